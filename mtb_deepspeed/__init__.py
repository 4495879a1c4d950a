"""MiniTrainBench plugin: strategy and command `deepspeed`."""
