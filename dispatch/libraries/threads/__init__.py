"""Collectives between threads of one process on the host: what each rank gives is handed to the others."""
