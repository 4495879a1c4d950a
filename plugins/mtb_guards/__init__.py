"""MiniTrainBench plugin: run plugins that guard a training."""
