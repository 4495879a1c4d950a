"""Checkpoint format ``dcp``: the files of ``torch.distributed.checkpoint``, written for it and read without running them."""
