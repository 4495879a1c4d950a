"""What exists (`discovery`) and what happens in a run (`run_hooks`). Torch-free."""
