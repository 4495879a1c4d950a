"""What a rank is among others: joining and leaving, agreement, failures, signals, network."""
