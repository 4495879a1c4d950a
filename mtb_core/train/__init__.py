"""Training: one optimizer step in `trainer`, one trial of a run in `trial`, optimizer and schedule beside them."""
