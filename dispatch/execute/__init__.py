"""What runs a plan on a stream. Knows no op, no library and no table."""
