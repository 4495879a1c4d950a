"""MiniTrainBench plugin: commands `comm` and `moe`."""
