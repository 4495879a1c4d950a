"""The plugin that core itself is: strategy `single`, sinks `console` and `jsonl`."""
