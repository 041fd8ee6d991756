"""The indices of the addresses and numbers in `MatmulRequest.arguments()`."""

from __future__ import annotations

__all__ = ["ALPHA", "AUX", "BETA", "BGRAD", "BIAS", "FIRST_FACTOR", "OUT", "A", "B", "C"]

A, B, C, BIAS, AUX, BGRAD, OUT, ALPHA, BETA, FIRST_FACTOR = range(10)
