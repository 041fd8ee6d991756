"""The rows, one file for each API of a library, and the selection among them."""
