"""The cases of the rows of linear algebra: matrices that are known to be hard, in all orders of memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.keys import F32
from dispatch.ops import linalg as ops
from dispatch.ops.linalg.base import real_of
from dispatch.ops.linalg.reference import evaluate
from dispatch.ops.linalg.residuals import ResidualCheck
from dispatch.testing.check import MadeCase, place
from dispatch.testing.memory import GuardedBuffer, poison

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.testing.check import Check

__all__ = ["Form", "cases", "matrix"]

KINDS: dict[str, Any] = {
    kind.op: kind
    for kind in (
        *(ops.CholeskyRequest, ops.ChoSolveRequest, ops.LuFactorRequest, ops.LuSolveRequest, ops.SolveRequest),
        *(ops.QrRequest, ops.EighRequest, ops.SvdRequest),
    )
}
VECTORS = ("info", "pivots", "tau", "w", "s")  # outputs that are dense
FEW = 6  # rows of a Hilbert matrix in single precision: of more the smallest values are below its roundoff


class Form(NamedTuple):
    """A case: how the matrix is made, its batch and extents, how operands lie, where results go, and the choices.

    `out` is "open" to have results allocated, "rows" or "columns" for memory with gaps and guards, "in place" for the
    first operand, or the right side of a system. `right` is how many right sides there are, 0 for a vector.
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
    """A form of its extents (batch…, rows, columns)."""
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
    """Each form with one of the values of a choice, by turns."""
    return tuple(
        form._replace(choices=(*form.choices, (name, values[number % len(values)])))
        for number, form in enumerate(forms)
    )


EVERY = (*SQUARE[:6], SQUARE[10], *OBLONG, *RANKS)
REDUCED, COMPLETE, R, RAW = ops.QrMode
FULL_RANK = (*SQUARE[:2], SQUARE[4], *OBLONG)
EIGEN = (*(form for form in HALVES if form.out != "in place"), F("wilkinson", (21, 21), lower=True))
EIGEN_FORMS = (
    *EIGEN, *chosen(EIGEN, "driver", ops.EighDriver.SYEVJ), *chosen(EIGEN[:6], "eigvals_only", True),
    *chosen(chosen(EIGEN[:6], "driver", ops.EighDriver.SYEVJ), "eigvals_only", True),
)  # fmt: skip
SVD_FORMS = tuple(
    form
    for driver in ops.SvdDriver
    for form in (
        *chosen(chosen(EVERY, "driver", driver), "full_matrices", True),
        *chosen(chosen(EVERY, "driver", driver), "full_matrices", False),
        *chosen(chosen(EVERY[::3], "driver", driver), "compute_uv", False),
    )
)
FORMS = {
    "cholesky": (*HALVES, *FAILING),
    "cho_solve": (*HALVES, *ONE_RIGHT),
    "lu_factor": (*(form for form in (*SQUARE, *OBLONG, *RANKS)), *SINGULAR),
    "lu_solve": chosen(SYSTEMS, "trans", 0, 1, 2),
    "solve": (
        *SYSTEMS,
        *SINGULAR,
        *chosen((*HALVES, *FAILING, *ONE_RIGHT), "assume_a", ops.MatrixKind.POS),
    ),
    "qr": (
        *chosen(EVERY, "mode", REDUCED),
        *chosen(EVERY, "mode", COMPLETE),
        *chosen(FULL_RANK, "mode", R),
        *chosen((*EVERY, *SQUARE[6:8]), "mode", RAW),
    ),
    "eigh": EIGEN_FORMS,
    "svd": SVD_FORMS,
}


def cases(row: Row) -> list[MadeCase]:
    """Every form of a row's op."""
    return MadeCase.each(row, FORMS[row.op], check)


# -- matrices ---------------------------------------------------------------------------------------------------------
def normal(rng: np.random.Generator, dtype: Any, shape: tuple[int, ...]) -> Array:
    """Normal numbers in double precision, complex ones where the dtype is."""
    drawn: Array = rng.standard_normal(shape)
    return drawn + 1j * rng.standard_normal(shape) if dtype.is_complex else drawn


def orthonormal(rng: np.random.Generator, dtype: Any, n: int) -> Array:
    """A random unitary matrix."""
    return np.asarray(np.linalg.qr(normal(rng, dtype, (n, n)))[0])


def matrix(kind: str, rows: int, cols: int, dtype: Any, rng: np.random.Generator, *, positive: bool) -> Array:
    """A matrix of a kind, in double precision; Hermitian and, if need be, positive definite ones are square."""
    least = min(rows, cols)
    fall = 1.0 if real_of(dtype) is F32 else 4.0  # powers of 10 that a graded matrix spans
    if not least:
        return np.zeros((rows, cols))
    if kind == "hilbert":
        return np.asarray(1.0 / (np.arange(rows)[:, None] + np.arange(cols) + 1))
    if kind == "wilkinson":
        return np.asarray(np.diag(np.abs(np.arange(rows) - rows // 2.0)) + np.eye(rows, k=1) + np.eye(rows, k=-1))
    if kind == "repeated":
        q = orthonormal(rng, dtype, rows)
        return np.asarray((q * rng.uniform(1, 2) * (1.0 + (np.arange(rows) + 1) // 2)) @ q.conj().T)
    if kind == "deficient":
        return np.asarray(normal(rng, dtype, (rows, least - 1)) @ normal(rng, dtype, (least - 1, cols)))
    a = normal(rng, dtype, (rows, cols))
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


def half(a: Array, *, lower: bool) -> Array:
    """One triangle of a Hermitian matrix; NaN in the other, which nobody may read."""
    kept = np.tri(len(a), dtype=np.bool_) if lower else np.tri(len(a), dtype=np.bool_).T
    return np.asarray(np.where(kept, a, np.nan))


# -- requests ---------------------------------------------------------------------------------------------------------
def lay(device: Device, values: Array, order: str) -> GuardedBuffer:
    """Values on a device in rows, in columns, or with gaps between all elements of a row; guards around them."""
    if order != "strided":
        return GuardedBuffer.lay(device, values, columns=order == "columns", padding=3, guard=1)
    *batch, rows, cols = values.shape
    before = np.full((*batch, rows, 2 * cols + 1), np.nan, values.dtype)
    inside = (..., slice(0, rows), slice(0, 2 * cols, 2))
    before[inside] = values
    whole = device.array(before)
    return GuardedBuffer(whole[inside], whole, before, inside)


def operands(op: str, form: Form, dtype: Any, rng: np.random.Generator) -> dict[str, Array]:
    """The operands of a request by name, in its dtype."""
    choices = dict(form.choices)
    is_half = op in ("cholesky", "cho_solve", "eigh") or choices.get("assume_a") is ops.MatrixKind.POS
    made, is_positive = [], is_half and op != "eigh"
    for _ in np.ndindex(form.batch):
        one = matrix(form.kind, form.rows, form.cols, dtype, rng, positive=is_positive)
        if op == "eigh" and form.kind in ("random", "graded"):
            one = one + one.conj().T
        made.append(one)
    empty = np.zeros((*form.batch, form.rows, form.cols))
    a = np.reshape(made, empty.shape) if made else empty
    exact = (a, a.mT, a.conj().mT)[choices.get("trans", 0)]
    if op == "cho_solve" and a.size:
        a = np.linalg.cholesky(a) if choices["lower"] else np.linalg.cholesky(a).conj().mT
    if op == "lu_solve":
        factors = evaluate(ops.LuFactorRequest(_on_host(a.astype(dtype.numpy))), EXACT)
        found = {"lu": factors["out"], "pivots": factors["pivots"]}
    else:
        found = {KINDS[op].reads[0]: a}
    if is_half:
        name = KINDS[op].reads[0]
        halves = [half(a[index], lower=choices["lower"]) for index in np.ndindex(form.batch)]
        found[name] = np.reshape(halves, a.shape) if halves else a
    if "b" in KINDS[op].reads:
        sides = (form.right,) if form.right else ()
        shape = (*form.batch, form.rows, *(sides or (() if not form.batch else (1,))))
        x = normal(rng, dtype, shape)  # of A·x a wrong x shows, which of a small b beside a large x it would not
        found["b"] = exact @ x
    return {name: values if name == "pivots" else values.astype(dtype.numpy) for name, values in found.items()}


def _on_host(values: Array) -> Any:
    from dispatch.device.registry import device

    return device("host").array(values)


def check(op: str, dtype: Any, form: Form, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A request of a form with fresh operands, and what is to come out."""
    given = operands(op, form, dtype, rng)
    laid = {
        n: place(device, v) if v.ndim == 1 or n == "pivots" else lay(device, v, form.order) for n, v in given.items()
    }
    request = KINDS[op](**{n: memory.view for n, memory in laid.items()}, **dict(form.choices))
    expected, written = evaluate(request, EXACT), []
    if form.out != "open":
        given_outputs = {}
        for output, made in request.outputs().items():
            over = next((read for one, read in request.in_place if one == output), None)
            if form.out == "in place" and over is not None:
                memory = laid[over]
            elif output in VECTORS or len(made.shape) == 1:
                memory = place(device, poison(made.dtype, made.shape))
            else:
                memory = lay(device, poison(made.dtype, made.shape), "rows" if form.out == "in place" else form.out)
            given_outputs[output] = memory.view
            written.append(memory)
        request = request.replace(**given_outputs)
    return ResidualCheck(name, request, expected, {}, tuple(written), given=given)


# -- wrong results that every case must reject ------------------------------------------------------------------------
def _flipped(request: Any) -> Any:
    """Of the other triangle."""
    if not hasattr(request, "lower") or request.matrices.size < FEW:
        return None
    given = {name: np.asarray(tensor) for name, tensor, written in request.tensors() if not written}
    if not np.isnan(given[request.reads[0]]).any():
        return None
    with np.errstate(all="ignore"):
        return evaluate(replace(request, lower=not request.lower), EXACT)


def _with(**changes: Any) -> Any:
    """Outputs changed by functions of all outputs, where a request has them."""

    def mutation(request: Any) -> Any:
        if request.matrices.size < FEW:
            return None
        found = evaluate(request, EXACT)
        if not changes.keys() <= found.keys():
            return None
        return found | {name: change(found) for name, change in changes.items()}

    return mutation


MUTATIONS = {
    "the other triangle": _flipped,
    "the status is another": _with(info=lambda found: found["info"] + 1),
    "pivots counted from 0": _with(pivots=lambda found: found["pivots"] - 1),
    "R of another sign": _with(q=lambda found: found["q"], r=lambda found: -found["r"]),
    "eigenvalues descending": _with(w=lambda found: found["w"][..., ::-1]),
    "singular values ascending": _with(s=lambda found: found["s"][..., ::-1]),
    "vectors of another sign": _with(u=lambda found: -found["u"]),
}
