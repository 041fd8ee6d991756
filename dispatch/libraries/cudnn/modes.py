"""cuDNN's pointwise modes and reductions, by NVIDIA's names: the number of operands, and the definition in NumPy.

`graph.py` checks graphs with it, `reference.py` evaluates them with it, `lower.py` uses the names unchanged. It calls
no library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.layout import Array

__all__ = ["ARITY", "ATTRIBUTES", "BACKWARD", "COMPARE", "REDUCTIONS", "pointwise"]

Numbers = dict[str, float]
SQRT_2, SQRT_PI = 2.0**0.5, np.pi**0.5
TANH_SCALE, TANH_CUBIC = (2 / np.pi) ** 0.5, 0.044715  # of GELU_APPROX_TANH


def erf(x: Array) -> Array:
    """The error function, which NumPy lacks: exact to 1e-16 by math.erf for each element."""
    from math import erf as one

    values = np.fromiter(map(one, np.asarray(x, np.float64).ravel()), np.float64, np.size(x))
    return values.reshape(np.shape(x)).astype(x.dtype, copy=False)


def _sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def _relu(x: Array, p: Numbers) -> Array:
    low, high, slope = (
        p.get("RELU_LOWER_CLIP", 0.0),
        p.get("RELU_UPPER_CLIP", np.inf),
        p.get("RELU_LOWER_CLIP_SLOPE", 0.0),
    )
    below = low + slope * (x - low) if slope else low  # 0 · ∞ would be NaN
    return np.where(x <= low, below, np.minimum(x, high))


def _relu_grad(x: Array, p: Numbers) -> Array:
    low, high, slope = (
        p.get("RELU_LOWER_CLIP", 0.0),
        p.get("RELU_UPPER_CLIP", np.inf),
        p.get("RELU_LOWER_CLIP_SLOPE", 0.0),
    )
    return np.where(x <= low, slope, np.where((x >= high) & (high < np.inf), 0.0, 1.0))  # 1 for NaN, as on a GPU


def _tanh_inner(x: Array) -> Array:
    return np.asarray(np.tanh(TANH_SCALE * (x + TANH_CUBIC * x**3)))


def _gelu_tanh_grad(x: Array) -> Array:
    t = _tanh_inner(x)
    slope: Array = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * TANH_SCALE * (1 + 3 * TANH_CUBIC * x * x)
    return slope


def _softplus(x: Array, b: float) -> Array:
    return np.asarray(np.logaddexp(0, b * x) / b)


def _swish_grad(x: Array, b: float) -> Array:
    s = _sigmoid(b * x)
    return np.asarray(s + b * x * s * (1 - s))


UNARY: dict[str, Callable[[Array], Any]] = {
    "ABS": np.abs,
    "CEIL": np.ceil,
    "COS": np.cos,
    "EXP": np.exp,
    "FLOOR": np.floor,
    "LOG": np.log,
    "NEG": lambda x: -x,
    "RSQRT": lambda x: 1 / np.sqrt(x),
    "SIN": np.sin,
    "SQRT": np.sqrt,
    "TAN": np.tan,
    "ERF": erf,
    "IDENTITY": lambda x: x,
    "RECIPROCAL": lambda x: 1 / x,
    "LOGICAL_NOT": lambda x: ~x.astype(bool),
    "TANH_FWD": np.tanh,
    "SIGMOID_FWD": _sigmoid,
    "GELU_FWD": lambda x: 0.5 * x * (1 + erf(x / SQRT_2)),
    "GELU_APPROX_TANH_FWD": lambda x: 0.5 * x * (1 + _tanh_inner(x)),
}
# Modes with parameters.
PARAMETRIC: dict[str, Callable[[Array, Numbers], Any]] = {
    "RELU_FWD": _relu,
    "ELU_FWD": lambda x, p: np.where(x > 0, x, p.get("ELU_ALPHA", 1.0) * np.expm1(np.minimum(x, 0))),
    "SOFTPLUS_FWD": lambda x, p: _softplus(x, p.get("SOFTPLUS_BETA", 1.0)),
    "SWISH_FWD": lambda x, p: x * _sigmoid(p.get("SWISH_BETA", 1.0) * x),
}
# The factor that dy is multiplied with, as a function of the forward's x.
SLOPE: dict[str, Callable[[Array], Any]] = {
    "TANH_BWD": lambda x: 1 - np.tanh(x) ** 2,
    "SIGMOID_BWD": lambda x: _sigmoid(x) * (1 - _sigmoid(x)),
    "GELU_BWD": lambda x: 0.5 * (1 + erf(x / SQRT_2)) + x * np.exp(-x * x / 2) / (SQRT_2 * SQRT_PI),
    "GELU_APPROX_TANH_BWD": _gelu_tanh_grad,
}
PARAMETRIC_SLOPE: dict[str, Callable[[Array, Numbers], Any]] = {
    "RELU_BWD": _relu_grad,
    "ELU_BWD": lambda x, p: np.where(x > 0, 1.0, p.get("ELU_ALPHA", 1.0) * np.exp(np.minimum(x, 0))),
    "SOFTPLUS_BWD": lambda x, p: _sigmoid(p.get("SOFTPLUS_BETA", 1.0) * x),
    "SWISH_BWD": lambda x, p: _swish_grad(x, p.get("SWISH_BETA", 1.0)),
}
BINARY: dict[str, Callable[[Array, Array], Any]] = {
    "ADD": lambda x, b: x + b,
    "ADD_SQUARE": lambda x, b: x + b * b,
    "DIV": lambda x, b: x / b,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "MOD": np.fmod,
    "MUL": lambda x, b: x * b,
    "POW": np.power,
    "SUB": lambda x, b: x - b,
    "ATAN2": np.arctan2,
}
COMPARE: dict[str, Callable[..., Any]] = {
    "CMP_EQ": np.equal,
    "CMP_NEQ": np.not_equal,
    "CMP_GT": np.greater,
    "CMP_GE": np.greater_equal,
    "CMP_LT": np.less,
    "CMP_LE": np.less_equal,
    "LOGICAL_AND": np.logical_and,
    "LOGICAL_OR": np.logical_or,
}
BACKWARD = (*SLOPE, *PARAMETRIC_SLOPE)
ARITY: dict[str, int] = {
    **dict.fromkeys((*UNARY, *PARAMETRIC, "GEN_INDEX"), 1),
    **dict.fromkeys((*BINARY, *COMPARE, *BACKWARD), 2),
    "BINARY_SELECT": 3,
}
CLIPS = ("RELU_LOWER_CLIP", "RELU_UPPER_CLIP", "RELU_LOWER_CLIP_SLOPE")
ATTRIBUTES: dict[str, tuple[str, ...]] = {  # of the modes that have any
    "GEN_INDEX": ("AXIS",),
    **dict.fromkeys(("RELU_FWD", "RELU_BWD"), CLIPS),
    **dict.fromkeys(("ELU_FWD", "ELU_BWD"), ("ELU_ALPHA",)),
    **dict.fromkeys(("SOFTPLUS_FWD", "SOFTPLUS_BWD"), ("SOFTPLUS_BETA",)),
    **dict.fromkeys(("SWISH_FWD", "SWISH_BWD"), ("SWISH_BETA",)),
}
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "ADD": np.sum,
    "MUL": np.prod,
    "MIN": np.min,
    "MAX": np.max,
    "AMAX": lambda x, axis, keepdims: np.max(np.abs(x), axis=axis, keepdims=keepdims),
    "AVG": np.mean,
    "NORM1": lambda x, axis, keepdims: np.sum(np.abs(x), axis=axis, keepdims=keepdims),
    "NORM2": lambda x, axis, keepdims: np.sqrt(np.sum(x * x, axis=axis, keepdims=keepdims)),
}


def _indices(shape: tuple[int, ...], axis: int) -> Array:
    """The index of each element along an axis."""
    places = np.arange(shape[axis]).reshape([-1 if a == axis else 1 for a in range(len(shape))])
    return np.broadcast_to(places, shape)


def pointwise(mode: str, operands: list[Array], numbers: Numbers) -> Array:
    """The result of a pointwise mode, in the precision of its operands."""
    x = operands[0]
    with np.errstate(all="ignore"):
        if mode in UNARY:
            result = UNARY[mode](x)
        elif mode in PARAMETRIC:
            result = PARAMETRIC[mode](x, numbers)
        elif mode in SLOPE:
            result = x * SLOPE[mode](operands[1])  # x is dy here
        elif mode in PARAMETRIC_SLOPE:
            result = x * PARAMETRIC_SLOPE[mode](operands[1], numbers)
        elif mode == "GEN_INDEX":
            result = _indices(x.shape, int(numbers["AXIS"]))
        elif mode == "BINARY_SELECT":
            result = np.where(operands[2].astype(bool), x, operands[1])
        else:
            result = {**BINARY, **COMPARE}[mode](x, operands[1])
    return np.asarray(result)
