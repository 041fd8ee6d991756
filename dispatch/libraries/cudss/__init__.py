"""cuDSS: its handle, and the factors of a sparse matrix with their settings and descriptors."""
