"""cuTENSOR: its handle, descriptors and plans, and plans of ours that are calls of it one after another."""
