"""cuSPARSELt: its handle, descriptors of structured matrices and of products over them, and what is enqueued."""
