"""Discovery of plugins (`discovery`) and the hooks of a run (`run_hooks`). Torch-free."""
