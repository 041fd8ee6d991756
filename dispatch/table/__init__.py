"""The rows, one file for each way into a library, and the choice among them."""
