"""cuSPARSELt: its handle, descriptors of structured matrices and of their products, and plans of its calls."""
