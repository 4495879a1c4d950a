"""MiniTrainBench plugin: strategy `cp`."""
