"""The errors of results as LAPACK's test programs measure them: residuals in units of n·eps, which must be small.

A factorization has many correct results, so results are not compared with each other: the product of the factors must
give the matrix, and vectors must be orthonormal. Everything is computed in double precision, from the stored values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dispatch.ops.linalg.base import real_of
from dispatch.ops.linalg.multiply import QrSide
from dispatch.ops.linalg.norms import (
    THRESHOLD,
    hermitian_matrix,
    norm,
    orthonormality_error,
    scaled_error,
    solve_errors,
    zero_or_inf,
)
from dispatch.ops.linalg.packed import mirrored
from dispatch.ops.linalg.reference import RIGHT_EVEN_SO
from dispatch.ops.linalg.request import MatrixKind, QrMode
from dispatch.ops.linalg.residuals_derived import DERIVED
from dispatch.ops.linalg.spectral_residuals import SPECTRAL
from dispatch.ops.linalg.symmetric_residuals import SYMMETRIC
from dispatch.testing.check import Check
from dispatch.testing.memory import Mismatch
from dispatch.testing.roundoff import ROUNDOFF

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor

    Ratios: TypeAlias = Iterator[tuple[str, float]]

__all__ = ["ResidualCheck", "residuals"]


@dataclass(frozen=True)
class ResidualCheck(Check):
    """A check of a result by its residuals, not by comparison with another result.

    Attributes:
        given: the operands before the run, which may overwrite them.
        writes_nan: True: a routine writes NaN where the reference is NaN.
        right: the last results that were correct; a replay gives exactly the same bits.
    """

    given: dict[str, Array] = field(default_factory=dict)
    right: dict[str, Array] = field(default_factory=dict, init=False)
    writes_nan: ClassVar[bool] = True

    def verify(self, result: Tensor | tuple[Tensor, ...]) -> None:
        """Raise Mismatch for a residual above the threshold, a wrong status, or writes outside the results."""
        tensors = result if isinstance(result, tuple) else (result,)
        names = tuple(self.request.outputs())
        results = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        if results.keys() != self.right.keys() or not all(_same(results[name], self.right[name]) for name in results):
            self._measure(results)
            self.right.update(results)
        self._check_memory()

    def _measure(self, found: dict[str, Array]) -> None:
        request: Any = self.request
        if (
            "info" in found and request.op not in RIGHT_EVEN_SO
        ):  # here the status describes the factor, and roundoff may change it
            info, expected = (one["info"].tolist() for one in (found, self.expected))
            if info != expected:
                self._refuse(f"info is {info}, expected {expected}")
        for place in np.ndindex(request.batch):
            operands = {name: _exact(values[place]) for name, values in self.given.items()}
            one = {name: _exact(values[place]) for name, values in found.items()}
            for what, ratio in residuals(request, operands, one):
                if not ratio <= THRESHOLD:  # NaN is wrong
                    self._refuse(f"{what} of matrix {list(place)} is {ratio:.3g} n·eps, above {THRESHOLD:g}")

    def _refuse(self, text: str) -> None:
        raise Mismatch(f"{self.name}: {text} ({self.request.describe()})")


MAX_REASONS = 100  # negative numbers for the reason why a refinement ended, in addition to the step count


def _same(one: Array, other: Array) -> bool:
    """Whether the bits are equal."""
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def _exact(values: Array) -> Array:
    kind = np.complex128 if values.dtype.kind == "c" else np.float64 if values.dtype.kind == "f" else values.dtype
    return np.asarray(values).astype(kind)


def residuals(request: Any, given: dict[str, Array], found: dict[str, Array]) -> Ratios:
    """The measured errors of one matrix, each with its size in units of n·eps."""
    if "iterations" in found:
        most = request.max_iterations
        is_count = -(most + MAX_REASONS) <= found["iterations"] <= most
        yield "a count of steps that there cannot be, for which this", 0.0 if is_count else np.inf
    if found.get("info", 0) and request.op not in RIGHT_EVEN_SO:
        for name in found.keys() - {"count", "info", "iterations", "rank"}:
            yield (
                f"{name}, NaN where the status is not 0, for which this",
                0.0 if np.isnan(found[name]).all() else np.inf,
            )
        return
    a = given[request.reads[0]]
    if request.op in ("cholesky", "eigh", "generalized_eigh") or (
        request.op == "solve" and request.assume_a is MatrixKind.POS
    ):
        a = hermitian_matrix(a, lower=request.lower)
    elif request.op == "solve" and request.assume_a is not MatrixKind.GEN:
        a = mirrored(a, lower=request.lower, hermitian=request.assume_a is MatrixKind.HER)
    eps = ROUNDOFF[real_of(request.matrices.dtype)][0]
    yield from MEASURES[request.op](request, a, given, found, eps)


def _cholesky(request: Any, a: Array, given: Any, found: Any, eps: float) -> Ratios:
    del given
    f = found["out"]
    yield "what is in the other triangle", zero_or_inf(np.triu(f, 1) if request.lower else np.tril(f, -1))
    product = f @ f.conj().T if request.lower else f.conj().T @ f
    yield "A - L·Lᴴ", scaled_error(product - a, norm(a), eps, len(a))


def _cho_solve(request: Any, c: Array, given: Any, found: Any, eps: float) -> Ratios:
    f = np.tril(c) if request.lower else np.triu(c)
    a = f @ f.conj().T if request.lower else f.conj().T @ f
    yield from solve_errors(a, given["b"], found["out"], eps)


def permutation_of_pivots(rows: int, pivots: Array) -> Array:
    """The row order that results from pivots, counted from 1."""
    order = np.arange(rows)
    for place, pivot in enumerate(pivots):
        other = int(pivot) - 1
        order[[place, other]] = order[[other, place]]
    return order


def lu_factors(lu: Array) -> tuple[Array, Array]:
    """L and U."""
    least = min(lu.shape)
    return np.tril(lu[:, :least], -1) + np.eye(len(lu), least), np.triu(lu[:least])


def _lu_factor(request: Any, a: Array, given: Any, found: Any, eps: float) -> Ratios:
    del request, given
    pivots, (lower, upper) = found["pivots"], lu_factors(found["out"])
    in_range = not pivots.size or bool((pivots > np.arange(len(pivots))).all() and pivots.max() <= len(a))
    yield "a pivot before its own row, or outside of the matrix,", 0.0 if in_range else np.inf
    if in_range:
        yield (
            "P·A - L·U",
            scaled_error(lower @ upper - a[permutation_of_pivots(len(a), pivots)], norm(a), eps, max(a.shape)),
        )
    none, *_ = (*np.flatnonzero(np.diag(upper) == 0) + 1, 0)
    yield "another status than U has zeros on its diagonal", 0.0 if found["info"] == none else np.inf
    # LAPACK divides by the largest number of a column, for complex numbers by the sum of the magnitudes of both parts.
    largest = np.abs(lower).max(initial=0)
    yield "an element of L above 1", 0.0 if largest <= np.sqrt(2) * (1 + 4 * eps) else np.inf


def _lu_solve(request: Any, lu: Array, given: Any, found: Any, eps: float) -> Ratios:
    lower, upper = lu_factors(lu)
    a = np.zeros_like(lu)
    a[permutation_of_pivots(len(lu), given["pivots"])] = lower @ upper
    a = (a, a.T, a.conj().T)[request.trans]
    yield from solve_errors(a, given["b"], found["out"], eps)


def _solve(request: Any, a: Array, given: Any, found: Any, eps: float) -> Ratios:
    del request
    yield from solve_errors(a, given["b"], found["out"], eps)


def _qr(request: Any, a: Array, given: Any, found: Any, eps: float) -> Ratios:
    del given
    least, most = min(a.shape), max(a.shape)
    if request.mode is QrMode.RAW:
        h, tau = found["h"], found["tau"]
        q, r = product_of_reflections(h, tau), np.triu(h[:least])
        q = q[:, :least]
    elif request.mode is QrMode.R:
        r = found["r"]
        yield "what is below R's diagonal", zero_or_inf(np.tril(r, -1))
        yield "Aᴴ·A - Rᴴ·R", scaled_error(r.conj().T @ r - a.conj().T @ a, norm(a) * norm(a.T), eps, most)
        return
    else:
        q, r = found["q"], found["r"]
        yield "what is below R's diagonal", zero_or_inf(np.tril(r, -1))
    yield "A - Q·R", scaled_error(q @ r - a, norm(a), eps, most)
    yield "I - Qᴴ·Q", orthonormality_error(q, eps)


def product_of_reflections(h: Array, tau: Array) -> Array:
    """The product of the Householder reflections that LAPACK stores."""
    q = np.eye(len(h), dtype=h.dtype)
    for place, factor in enumerate(tau):
        v = np.zeros((len(h), 1), h.dtype)
        v[place], v[place + 1 :, 0] = 1, h[place + 1 :, place]
        q = q - factor * (q @ v) @ v.conj().T
    return q


def _orgqr(request: Any, h: Array, given: Any, found: Any, eps: float) -> Ratios:
    del request
    q = found["q"]
    yield "Q's distance", scaled_error(q - product_of_reflections(h, given["tau"])[:, : q.shape[1]], 1.0, eps, len(h))


def _ormqr(request: Any, h: Array, given: Any, found: Any, eps: float) -> Ratios:
    q, c = product_of_reflections(h, given["tau"]), given["c"]
    q = q.conj().T if request.adjoint else q
    exact = q @ c if request.side is QrSide.LEFT else c @ q
    yield "the product's distance", scaled_error(found["out"] - exact, norm(c), eps, len(h))


MEASURES: dict[str, Callable[[Any, Array, Any, Any, float], Any]] = {
    "cholesky": _cholesky,
    "cho_solve": _cho_solve,
    "lu_factor": _lu_factor,
    "lu_solve": _lu_solve,
    "solve": _solve,
    "qr": _qr,
    "orgqr": _orgqr,
    "ormqr": _ormqr,
    **SPECTRAL,
    **DERIVED,
    **SYMMETRIC,
    "refined_solve": _solve,
    "refined_lstsq": DERIVED["lstsq"],
}
