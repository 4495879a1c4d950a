"""MiniTrainBench plugin: command `data`."""
