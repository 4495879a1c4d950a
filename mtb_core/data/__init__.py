"""Data: where samples come from, in which order, and how they reach a rank.

Importing the package is cheap; `loader` and `evaluation` are the only modules that need torch.
"""

from .dataset import Dataset

__all__ = ["Dataset"]
