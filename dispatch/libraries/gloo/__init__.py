"""Collectives between processes of the host that no mpirun has started, by gloo through PyTorch."""
