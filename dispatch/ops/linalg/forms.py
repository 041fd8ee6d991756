"""The building blocks of the cases of linear algebra: forms, the matrices themselves, and their memory layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.keys import F32
from dispatch.ops.linalg.base import real_of
from dispatch.testing.memory import GuardedBuffer

if TYPE_CHECKING:
    from dispatch.device.device import Device
    from dispatch.device.layout import Array

__all__ = [
    "EVERY",
    "FAILING",
    "HALVES",
    "OBLONG",
    "ONE_RIGHT",
    "RANKS",
    "SINGULAR",
    "SQUARE",
    "SYSTEMS",
    "F",
    "Form",
    "chosen",
    "for_single_precision",
    "matrix",
    "mixed",
    "normal",
    "one_triangle",
    "place_on_device",
]


class Form(NamedTuple):
    """A case: how the matrix is made, its batch and extents, the layouts of operands and results, and the choices.

    `out` is "open" to have results allocated, "rows" or "columns" for memory with gaps and guards, "in place" for the
    first operand, or the right-hand side of a system. `right` is the number of right-hand sides, 0 for a vector.
    """

    kind: str
    batch: tuple[int, ...]
    rows: int
    cols: int
    order: str = "rows"
    out: str = "open"
    right: int = 3
    choices: tuple[tuple[str, Any], ...] = ()


def F(
    kind: str, extents: tuple[int, ...], order: str = "rows", out: str = "open", right: int = 3, **choices: Any
) -> Form:
    """A form from its extents (batch…, rows, columns)."""
    *batch, rows, cols = extents
    return Form(kind, tuple(batch), rows, cols, order, out, right, tuple(choices.items()))


SQUARE = (
    F("random", (17, 17)), F("random", (33, 33), "columns", "columns"), F("hilbert", (6, 6), "strided", "rows"),
    F("graded", (3, 8, 8), "columns", "rows"), F("repeated", (2, 2, 5, 5), "rows", "columns"),
    F("random", (1, 1)), F("random", (40, 40), "strided", "in place"), F("random", (4, 7, 7), "rows", "in place"),
    F("random", (0, 0)), F("random", (0, 3, 3)), F("random", (130, 130)), F("random", (65, 65), "columns"),
)  # fmt: skip
BOTH = tuple(form._replace(choices=(("lower", number % 2 == 1),)) for number, form in enumerate(SQUARE))
HALVES = (*BOTH, *(form._replace(choices=(("lower", not form.choices[0][1]),)) for form in BOTH[:6]))
FAILING = (F("indefinite", (9, 9), lower=True), F("indefinite", (3, 6, 6), "columns", "rows", lower=False))
SINGULAR = (F("singular", (7, 7)), F("singular", (2, 5, 5), "columns"))
ONE_RIGHT = tuple(form._replace(right=right) for form, right in zip(BOTH[:6], (0, 0, 1, 1, 1, 0), strict=True))
SYSTEMS = (*(form._replace(choices=()) for form in SQUARE), *(form._replace(choices=()) for form in ONE_RIGHT))
OBLONG = (
    F("random", (12, 5)), F("random", (5, 12), "columns"), F("graded", (2, 9, 4), "rows", "columns"),
    F("random", (3, 4, 9), "strided", "rows"), F("random", (7, 1)), F("random", (1, 7), "columns"),
    F("random", (70, 35), "columns"), F("random", (35, 70)), F("random", (0, 4)), F("random", (4, 0)),
)  # fmt: skip
RANKS = (F("deficient", (11, 8)), F("deficient", (6, 9), "columns", "columns"))


def chosen(forms: tuple[Form, ...], name: str, *values: Any) -> tuple[Form, ...]:
    """Each form with one of the values of a choice, in rotation."""
    return tuple(
        form._replace(choices=(*form.choices, (name, values[number % len(values)])))
        for number, form in enumerate(forms)
    )


EVERY = (*SQUARE[:6], SQUARE[10], *OBLONG, *RANKS)


def for_single_precision(form: Form) -> Form:
    """A form whose least singular value is resolved in single precision, if the correct result depends on it."""
    if form.kind == "hilbert":
        return form._replace(rows=4, cols=4)
    return form._replace(kind="even") if form.kind == "random" else form


# -- matrices ---------------------------------------------------------------------------------------------------------
def normal(rng: np.random.Generator, dtype: Any, shape: tuple[int, ...]) -> Array:
    """Normal random numbers in double precision, complex ones for a complex dtype."""
    drawn: Array = rng.standard_normal(shape)
    return drawn + 1j * rng.standard_normal(shape) if dtype.is_complex else drawn


def orthonormal(rng: np.random.Generator, dtype: Any, n: int) -> Array:
    """A random unitary matrix."""
    return np.asarray(np.linalg.qr(normal(rng, dtype, (n, n)))[0])


def kahan(n: int) -> Array:
    """Kahan's matrix: its least singular value is far below the numbers on its diagonal."""
    sine, cosine = np.sin(1.2), np.cos(1.2)
    upper = np.triu(np.full((n, n), -cosine), 1) + np.eye(n)
    return np.asarray(sine ** np.arange(n)[:, None] * upper)


def jordan(n: int) -> Array:
    """A Jordan block, which has only one eigenvector."""
    return 2 * np.eye(n) + np.eye(n, k=1)


def companion(n: int) -> Array:
    """The companion matrix of a polynomial: its eigenvalues are the roots."""
    return np.asarray(np.eye(n, k=-1) + np.eye(n, 1) * np.arange(1.0, n + 1))


SIZES_OF_NUMBERS = {"huge": 0.46, "tiny": -0.46}  # exponents of the largest number: products of two stay in range
SPECIAL = {"jordan": jordan, "kahan": kahan, "companion": companion}


def matrix(kind: str, rows: int, cols: int, dtype: Any, rng: np.random.Generator, *, positive: bool) -> Array:
    """A matrix of a kind, in double precision; Hermitian and positive definite kinds are square."""
    least = min(rows, cols)
    fall = 1.0 if real_of(dtype) is F32 else 4.0  # powers of 10 that a graded matrix spans
    if not least:
        return np.zeros((rows, cols))
    if kind == "hilbert":
        return np.asarray(1.0 / (np.arange(rows)[:, None] + np.arange(cols) + 1))
    if kind == "wilkinson":
        return np.asarray(np.diag(np.abs(np.arange(rows) - rows // 2.0)) + np.eye(rows, k=1) + np.eye(rows, k=-1))
    if kind in SPECIAL:
        return SPECIAL[kind](rows)
    if kind == "rotation":
        return orthonormal(rng, dtype, rows)
    if kind == "rank 3":  # singular values like 3, 2 and 1
        left, right = (orthonormal(rng, dtype, extent)[:, :3] for extent in (rows, cols))
        return np.asarray((left * rng.uniform(1, 2) * (3.0, 2.0, 1.0)) @ right.conj().T)
    if kind == "even":  # singular values from 3 to 1 at equal distances
        left, right = (orthonormal(rng, dtype, extent)[:, :least] for extent in (rows, cols))
        return np.asarray((left * np.linspace(3, 1, least)) @ right.conj().T)
    if kind == "repeated":
        q = orthonormal(rng, dtype, rows)
        return np.asarray((q * rng.uniform(1, 2) * (1.0 + (np.arange(rows) + 1) // 2)) @ q.conj().T)
    if kind == "deficient":
        return np.asarray(normal(rng, dtype, (rows, least - 1)) @ normal(rng, dtype, (least - 1, cols)))
    if kind == "zeros":
        return np.zeros((rows, cols))
    if kind == "diagonal":
        return np.diag(normal(rng, dtype, (rows,)))
    a = normal(rng, dtype, (rows, cols))
    if kind in SIZES_OF_NUMBERS:
        return np.asarray(a * float(np.finfo(real_of(dtype).numpy).max) ** SIZES_OF_NUMBERS[kind])
    if kind == "nilpotent":
        return np.triu(a, 1)
    if kind == "skew":
        return np.asarray(a - a.conj().T)
    if kind == "dominant":
        return a + rows * np.eye(rows, cols)
    if kind == "singular":
        a[:, :3] = np.triu(a[:, :3], 1)[:, :3] + np.eye(rows, 3) * (1, 2, 0)  # the third pivot is exactly 0
        a[3:, :3] = 0
        a[2, 2] = 0
        a[2:, 2] = 0
        return a
    if positive or kind == "indefinite":
        a = a @ a.conj().T / rows + np.eye(rows)
    if kind == "indefinite":
        a[least // 2, least // 2] = -5.0 * rows
    if kind == "graded":
        left = 10.0 ** (-fall * np.arange(rows) / rows)
        a = left[:, None] * a * (left if rows == cols else 10.0 ** (-fall * np.arange(cols) / cols))
    return a


def mixed(n: int, dtype: Any, rng: np.random.Generator, number: int) -> Array:
    """One of a batch of matrices of different norms, from 0 to NaN."""
    a = matrix("skew", n, n, dtype, rng, positive=False)
    a *= (0.0, 1.0, 1e-3, 1e7, 3.0, 30.0, 2.0)[number % 7] / float(np.abs(a).sum(axis=0).max())
    if number % 7 in (4, 6):
        a[1, 0] = np.nan if number % 7 == 4 else np.inf
    return a


def one_triangle(a: Array, *, lower: bool) -> Array:
    """One triangle of a Hermitian matrix; NaN in the other triangle, which must not be read."""
    mask = np.tri(len(a), dtype=np.bool_) if lower else np.tri(len(a), dtype=np.bool_).T
    return np.asarray(np.where(mask, a, np.nan))


def place_on_device(device: Device, values: Array, order: str) -> GuardedBuffer:
    """Values on a device, row-major, column-major, or with gaps between all elements of a row; guards around them."""
    if order != "strided":
        return GuardedBuffer.lay(device, values, columns=order == "columns", padding=3, guard=1)
    *batch, rows, cols = values.shape
    before = np.full((*batch, rows, 2 * cols + 1), np.nan, values.dtype)
    inside = (..., slice(0, rows), slice(0, 2 * cols, 2))
    before[inside] = values
    memory = device.array(before)
    return GuardedBuffer(memory[inside], memory, before, inside)
