"""What the cases of every family use: checks against a reference, guarded memory, mutations of results."""
