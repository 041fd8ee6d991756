"""Rotations in NumPy, as in `drotg` and `drotmg` of LAPACK's BLAS: https://www.netlib.org/blas/."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import values

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.device.layout import Array

__all__ = ["ROUTINES", "evaluate", "matrix_of"]

ROUTINES = ("swap", "rot", "rotg", "rotm", "rotmg")
GAMMA = 4096.0  # d1 and d2 are scaled by its square if they leave 1 / GAMMA² … GAMMA²


def evaluate(request: Any, work: np.dtype[Any]) -> Results:
    """The outputs of a request, in a working dtype."""
    operands = {name: values(getattr(request, name), work).copy() for name in request.reads}  # results may be in place
    if request.op == "swap":
        return {"out_x": operands["y"], "out_y": operands["x"]}
    if request.op == "rot":
        x, y, c, s = (operands[name] for name in ("x", "y", "c", "s"))
        return {"out_x": c * x + s * y, "out_y": c * y - np.conj(s) * x}
    if request.op == "rotm":
        return apply_modified(**operands)
    if request.op == "rotg":
        return make_rotation(operands["a"], operands["b"])
    return make_modified_rotation(work, *(float(operands[name]) for name in request.reads))


def matrix_of(param: Array) -> Array:
    """The matrix whose stored elements depend on the flag."""
    flag, h11, h21, h12, h22 = param
    if flag in (0, -2):
        h11 = h22 = 1
    if flag == -2:
        h21 = h12 = 0
    elif flag == 1:
        h12, h21 = 1, -1
    return np.array(((h11, h12), (h21, h22)), param.dtype)


def apply_modified(x: Array, y: Array, param: Array) -> Results:
    """Two vectors times the matrix; with the flag -2 they stay unchanged, even if the other one has NaN."""
    if param[0] == -2:
        return {"out_x": x, "out_y": y}
    (h11, h12), (h21, h22) = matrix_of(param)
    return {"out_x": h11 * x + h12 * y, "out_y": h21 * x + h22 * y}


def make_rotation(a: Array, b: Array) -> Results:
    """c, s, r and z, without intermediate overflow."""
    is_complex = a.dtype.kind == "c"
    size = np.hypot(np.abs(a), np.abs(b))
    if size == 0:
        return {"c": np.ones_like(size), "s": np.zeros_like(a), "r": a, "z": b}
    if is_complex:
        if a == 0:
            return {"c": np.zeros_like(size), "s": np.ones_like(a), "r": b, "z": b}
        phase = a / np.abs(a)
        return {"c": np.abs(a) / size, "s": phase * (np.conj(b) / size), "r": phase * size, "z": b}
    is_larger = np.abs(a) > np.abs(b)
    r = np.copysign(size, a if is_larger else b)
    c, s = a / r, b / r
    z = s if is_larger else 1 / c if c else np.ones_like(c)
    return {"c": c, "s": s, "r": r, "z": z}


class Matrix(NamedTuple):
    """The result of `rotmg`: a flag and the elements that it stores, 0 for the others."""

    flag: float
    h11: float = 0.0
    h21: float = 0.0
    h12: float = 0.0
    h22: float = 0.0

    def with_all_elements(self) -> Matrix:
        """The same with all elements stored."""
        if self.flag == 0:
            return self._replace(flag=-1.0, h11=1.0, h22=1.0)
        return self._replace(flag=-1.0, h21=-1.0, h12=1.0) if self.flag == 1 else self


def make_modified_rotation(work: np.dtype[Any], d1: float, d2: float, x1: float, y1: float) -> Results:
    """The matrix, and the new d1, d2 and x1; in f64 throughout, since only a few numbers are computed."""
    matrix, d1, d2, x1 = _unscaled(d1, d2, x1, y1)
    if matrix.flag != -2:
        matrix, d1, x1 = _scaled_first(matrix, d1, x1)
        matrix, d2 = _scaled_second(matrix, d2)
    numbers = {"param": matrix, "out_d1": d1, "out_d2": d2, "out_x1": x1}
    return {name: np.asarray(number, work) for name, number in numbers.items()}


def _unscaled(d1: float, d2: float, x1: float, y1: float) -> tuple[Matrix, float, float, float]:
    nothing = Matrix(-1.0), 0.0, 0.0, 0.0
    if d1 < 0:
        return nothing
    p1, p2 = d1 * x1, d2 * y1
    if p2 == 0:
        return Matrix(-2.0), d1, d2, x1
    q1, q2 = p1 * x1, p2 * y1
    if abs(q1) > abs(q2):
        h21, h12 = -y1 / x1, p2 / p1
        u = 1 - h12 * h21
        return (Matrix(0.0, h21=h21, h12=h12), d1 / u, d2 / u, x1 * u) if u > 0 else nothing
    if q2 < 0:
        return nothing
    h11, h22 = p1 / p2, x1 / y1
    u = 1 + h11 * h22
    return Matrix(1.0, h11=h11, h22=h22), d2 / u, d1 / u, y1 * u


def _scaled_first(found: Matrix, d1: float, x1: float) -> tuple[Matrix, float, float]:
    while d1 and np.isfinite(d1) and not GAMMA**-2 < d1 < GAMMA**2:
        factor = GAMMA if d1 <= GAMMA**-2 else 1 / GAMMA
        found = found.with_all_elements()
        found = found._replace(h11=found.h11 / factor, h12=found.h12 / factor)
        d1, x1 = d1 * factor**2, x1 / factor
    return found, d1, x1


def _scaled_second(found: Matrix, d2: float) -> tuple[Matrix, float]:
    while d2 and np.isfinite(d2) and not GAMMA**-2 < abs(d2) < GAMMA**2:
        factor = GAMMA if abs(d2) <= GAMMA**-2 else 1 / GAMMA
        found = found.with_all_elements()
        found = found._replace(h21=found.h21 / factor, h22=found.h22 / factor)
        d2 = d2 * factor**2
    return found, d2
