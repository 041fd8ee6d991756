"""The parts of an op family: requests, rows and operands; also shapes and layouts that families share."""
