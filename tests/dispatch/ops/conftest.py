"""What the tests of several ops share: gradients by finite differences, and an op's host rows through their cases."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def slope_of() -> Callable[..., Any]:
    """`slope_of(f, x, weights)`: the gradient of Σ weights · f(x) by central differences, element by element."""

    def slope(f: Callable[[Any], Any], x: Any, weights: Any, step: float = 1e-6) -> Any:
        gradient = np.zeros(x.shape)
        for place in np.ndindex(x.shape):
            there, back = x.copy(), x.copy()
            there[place] += step
            back[place] -= step
            gradient[place] = (weights * (f(there) - f(back))).sum() / (2 * step)
        return gradient

    return slope
