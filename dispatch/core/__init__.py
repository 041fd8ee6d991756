"""What an op family is made of: requests, rows, operands, and what families share of shapes and layouts."""
