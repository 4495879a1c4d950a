"""MiniTrainBench plugin: strategy and command `tp`."""
