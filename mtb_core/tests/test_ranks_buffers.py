import torch

from mtb_core.ranks import buffers as module_of_buffers
from mtb_core.ranks.buffers import BufferSync, broadcast_buffers
from mtb_core.ranks.context import open_ranks
from mtb_core.tests.launching import plan_for, run_ranks


def buffers(rank):
    """Of every layout; on rank 0 they count up, on others they are zero."""
    count = torch.arange(24.0) if rank == 0 else torch.zeros(24)
    return {
        "plain": count[:6].view(2, 3).clone(),
        "transposed": count[6:12].view(2, 3).clone().t(),
        "gaps": count.clone()[::4],
        "expanded": count[1:4].clone().expand(5000, 3),
        "scalar": count[5].clone(),
        "none": count[:0].clone(),
        "whole": count[:4].long(),
        "flags": count[:4] > 0,
        "complex": torch.complex(count[:3], -count[:3]),
        "half": count[:3].bfloat16(),
        "double": count[:2].double(),
    }


def talk(_payload, worker):
    with open_ranks(worker, plan_for(2), device="cpu") as ctx:
        mine = buffers(ctx.rank)
        broadcast_buffers(mine.values())
        return {name: (tensor.stride(), tensor.tolist()) for name, tensor in mine.items()}


def test_all_ranks_get_those_of_rank_zero(tmp_path):
    """Values of any layout and dtype arrive; the buffers stay the same tensors, with the same strides."""
    out = run_ranks(talk, tmp_path)
    expected = {name: (tensor.stride(), tensor.tolist()) for name, tensor in buffers(0).items()}
    assert out.values[0] == expected
    assert out.values[1] == expected


def test_they_are_sent_when_due(monkeypatch):
    """At each forward that follows a synchronised micro-batch, as they are by then; a model without any gets no hook."""
    sent = []
    monkeypatch.setattr(module_of_buffers, "broadcast_buffers", lambda found, _group: sent.append(list(found)))
    assert BufferSync.of(torch.nn.Linear(1, 1)) is None
    model = torch.nn.BatchNorm1d(2)
    sync = BufferSync.of(model)
    batch = torch.ones(3, 2)
    for due in (True, False, True):
        sync.due = due
        model.running_mean = torch.zeros(2)
        model(batch)
    assert len(sent) == 2
    assert sent[1][0] is model.running_mean
    model.eval()(batch)
    assert len(sent) == 3
