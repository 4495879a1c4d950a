"""MiniTrainBench plugin: strategy `ddp`."""
