"""cuSPARSE's generic interface: its handle, descriptors that follow a plan's addresses, and sequences of its calls."""
