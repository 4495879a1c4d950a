"""MiniTrainBench plugin: command `doctor`."""
