"""MiniTrainBench plugin: commands `compare`, `sweep`, `report`, `evidence` and `explain`."""
