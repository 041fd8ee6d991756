"""Collectives between threads of one process on the host: the ranks exchange values in memory."""
