"""cuDSS: its handle, and the factors of a sparse matrix with what they are made of."""
