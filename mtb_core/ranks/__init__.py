"""Ranks among each other: joining and leaving, agreement, failures, signals, network."""
