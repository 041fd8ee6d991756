"""cuBLASLt: problems, descriptors, algorithms."""
