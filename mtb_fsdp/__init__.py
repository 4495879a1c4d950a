"""MiniTrainBench plugin: strategies `fsdp` and `fsdp1`."""
