"""cuTENSOR: its handle, descriptors and plans, and this library's plans that make several calls of it in sequence."""
