"""Tools for the cases of every op family: checks against a reference, guarded memory, mutations of results."""
