"""MiniTrainBench plugin: sinks `csv`, `tensorboard`, `prometheus`."""
