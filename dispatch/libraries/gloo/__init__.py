"""Collectives by gloo (through PyTorch) between processes on the host that mpirun has not started."""
