"""Transforms over several GPUs computed by NumPy, for plans whose parts are all on the host, and their factors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.libraries.cufft.xt_layouts import Factors
from dispatch.ops.fft.request import DftNorm

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.libraries.cufft.xt_layouts import Problem

__all__ = ["computed", "factor_of", "factors_on_host"]


def computed(values: Array, problem: Problem, norm: DftNorm, *, inverse: bool) -> Array:
    """The transform of an array in natural order."""
    sizes, word = problem.sizes, norm.name.lower()
    names = ("rfftn", "irfftn") if problem.is_real else ("fftn", "ifftn")
    function: Any = getattr(np.fft, names[inverse])
    return np.asarray(function(values, sizes, tuple(range(-len(sizes), 0)), word))


def factor_of(sizes: tuple[int, ...], norm: DftNorm, *, inverse: bool) -> float:
    """The factor of the sums."""
    points = math.prod(sizes)
    if norm == DftNorm.ORTHO:
        return 1 / math.sqrt(points)
    return 1 / points if (norm == DftNorm.BACKWARD) == inverse else 1.0


def factors_on_host(n: int, count: int) -> Factors:
    """The layout of a result along one axis: one string for each part."""
    factor2 = 1 << (n.bit_length() - 1) // 2
    return Factors(factor2, count, n // factor2 // count)
