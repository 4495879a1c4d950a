"""Models: the built-in one, loading of a user's own, filling of weights, the loss. See ``docs/model.md``."""
