"""Collectives between processes on the host, by MPI through mpi4py."""
