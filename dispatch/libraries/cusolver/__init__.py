"""cuSOLVER's dense routines: its handle, plans that are sequences of its calls, and matrices as LAPACK arguments."""
