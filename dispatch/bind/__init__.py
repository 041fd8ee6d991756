"""Binding: from a request to its row and plan; prepared calls; refits."""
