"""MiniTrainBench plugin: strategy `ep` (expert parallel times data parallel) and its model `moe`."""
