"""cuBLAS: the handle of an executor, plans of its calls, arrays of pointers."""
