"""cuSOLVER's dense routines: its handle, sequences of its calls as plans, and matrices as its routines take them."""
