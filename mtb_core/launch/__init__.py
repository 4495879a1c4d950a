"""Starting the ranks of a run, on this node, and seeing them through to their end."""
