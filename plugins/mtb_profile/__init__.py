"""MiniTrainBench plugin: command `profile`."""
