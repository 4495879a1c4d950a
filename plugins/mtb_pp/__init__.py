"""MiniTrainBench plugin: strategy `pp`."""
