"""cuSPARSE's generic interface: its handle, descriptors that are updated with a run's addresses, and call sequences."""
