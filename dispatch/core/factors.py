"""Numbers that requests give by value to multiply operands with: what they may be, and how plans take them."""

from __future__ import annotations

from typing import Any

import numpy as np

from dispatch.checks import MAX_FLOAT, NO_NUMBERS, shown
from dispatch.errors import BadRequest

__all__ = ["F32_MAX", "as_argument", "check_factor"]

F32_MAX = float(np.finfo(np.float32).max)


def as_argument(given: Any) -> complex:
    """A factor as plans take it: a float, or complex; -0.0 is 0."""
    return complex(given) if isinstance(given, (complex, np.complexfloating)) else float(given) + 0.0


def check_factor(name: str, value: Any, *, may_be_complex: bool) -> None:
    """BadRequest unless a value is a number, and a real one where complex ones have no meaning."""
    kinds: tuple[Any, ...] = (int, float, np.integer, np.floating)
    expected = "a number" if may_be_complex else "a real number"
    if may_be_complex:
        kinds += (complex, np.complexfloating)
    too_large = isinstance(value, int) and abs(value) > MAX_FLOAT
    if isinstance(value, NO_NUMBERS) or not isinstance(value, kinds) or too_large:
        raise BadRequest(name, shown(value), expected)
