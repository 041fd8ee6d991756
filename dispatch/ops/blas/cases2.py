"""The test cases of BLAS level 2: every flag, both orders, bands and packed triangles, positive and negative steps.

Everything that must not be read is NaN: the other triangle, the corners of bands, a unit diagonal, y if beta is 0, the
gaps between a vector's elements, and all of the result that will be written.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.keys import F32, HALF
from dispatch.ops.blas import level2, level2_outer
from dispatch.ops.blas.cases3 import complex_normal
from dispatch.ops.blas.choices import DiagType, FillMode, Operation
from dispatch.ops.blas.reference2 import evaluate, matrix_of, packed
from dispatch.ops.blas.reference3 import triangle, turned, work_with
from dispatch.testing.check import ROUNDOFF, Check, GuardedBuffer, MadeCase, place, poison, rounded
from dispatch.testing.mutations import altered

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype

__all__ = ["FACTORS", "bounds", "level2_cases"]

NAMED = {**vars(level2), **vars(level2_outer)}
KINDS: dict[str, Any] = {
    NAMED[name].op: NAMED[name] for name in (*level2.__all__, *level2_outer.__all__) if name.endswith("Request")
}
FILLS, DIAGS, OPERATIONS = tuple(FillMode), tuple(DiagType), tuple(Operation)
N = Operation.N
SIZES = ((5, 7), (1, 1), (17, 4), (3, 33), (8, 8), (48, 40), (0, 4), (6, 0), (1, 6))
LARGE = (300, 260)
MANY_ROWS = (256, 257, 300, 320, 449)  # rows of matrices for kernels that support only large ones
BANDS = ((1, 2), (0, 0), (3, 1), (0, 2))  # diagonals below and above
FACTORS = ((1.0, 0.0), (0.75, -1.5), (0.0, 0.5), (-2.0, 1.0), (1.0, 1.0))
STEPS = ((1, 1), (2, -1), (1, 3), (-2, 1))  # of x and of y
CONJUGATING = ("hemv", "gemv", "trmv", "trsv", "gerc", "her", "her2")  # these may be computed with matrices of one row
ADDED = ("nothing", "apart", "in place")


class Form(NamedTuple):
    """A case: extents, diagonals, flags by their fields, order, vector steps, factors, what is added, and where."""

    sizes: tuple[int, int]
    band: tuple[int, int]
    flags: dict[str, Any]
    row: bool
    steps: tuple[int, int]
    alpha: complex
    beta: complex
    added: str
    has_out: bool
    aligned: bool = False


def forms(op: str, dtype: Dtype) -> list[Form]:
    """Each combination of flags in both orders, several times; the other parameters in rotation."""
    names = {"uplo": FILLS, "trans": OPERATIONS, "diag": DIAGS}
    kind = KINDS[op]
    used = {name: members for name, members in names.items() if name in kind.__dataclass_fields__}
    every = [dict(zip(used, chosen, strict=True)) for chosen in product(*used.values())]
    rounds = list(product(every, (True, False))) * max(1, 12 // len(every))
    result = []
    for number, (flags, row) in enumerate(rounds):
        alpha: complex
        beta: complex
        alpha, beta = FACTORS[(number + number // 5) % 5]
        sizes = LARGE if number == len(rounds) // 2 else SIZES[number % 9]
        steps = STEPS[(number // 2) % 4]
        if 0 in sizes or (row and dtype.is_complex and op in CONJUGATING):
            steps = (abs(steps[0]), abs(steps[1]))
        if dtype.is_complex and number % 2:
            alpha, beta = alpha * (1 - 0.5j), beta * (1 + 2j)
        alpha = alpha.real if "alpha" in kind.real else alpha
        band, added = BANDS[(number // 3) % 4], ADDED[(number + 1) % 3]
        result.append(Form(sizes, band, flags, row, steps, alpha, beta, added, has_out=number % 5 != 3))
    if "alpha" in kind.numbers and "beta" not in kind.numbers:  # nothing is added: the matrix is unchanged
        for (flags, row), added in product(rounds[: 2 * len(every)], ADDED[1:]):
            result.append(Form((9, 6), (0, 0), flags, row, (1, 1), 0.0, 1.0, added, has_out=row))
    return result


def large_forms(op: str, dtype: Dtype) -> list[Form]:
    """Each triangle in both orders for large matrices; rows or columns begin at multiples of 16 bytes, or do not."""
    result = []
    for number, (uplo, row, aligned, _) in enumerate(product(FILLS, (True, False), (True, False), range(3))):
        alpha: complex
        beta: complex
        alpha, beta = FACTORS[(number + number // 5) % 5]
        if dtype.is_complex and number % 2:
            alpha, beta = alpha * (1 - 0.5j), beta * (1 + 2j)
        steps = STEPS[(number // 2) % 4]
        if row and op in CONJUGATING:
            steps = (abs(steps[0]), abs(steps[1]))
        sizes = (MANY_ROWS[number % 5],) * 2
        added, has_out = ADDED[(number + number // 3) % 3], number % 5 != 3
        result.append(Form(sizes, (0, 0), {"uplo": uplo}, row, steps, alpha, beta, added, has_out, aligned))
    return result


class OperandDraw:
    """The operands of a form on a device."""

    def __init__(self, op: str, dtype: Dtype, form: Form, device: Device, rng: np.random.Generator) -> None:
        self.op, self.dtype, self.form, self.device, self.rng = op, dtype, form, device, rng
        self.fields: dict[str, Any] = dict(form.flags)
        self.written: tuple[GuardedBuffer, ...] = ()
        self.hermitian = op.startswith("h")

    def normal(self, *shape: int) -> Array:
        return complex_normal(self.rng, self.dtype, shape)

    def nan_filled(self, *shape: int) -> Array:
        return np.full(shape, np.nan, self.dtype.numpy)

    def vector(self, name: str, drawn: Array, step: int) -> GuardedBuffer:
        """Put a vector on the device, possibly with a negative step, with poison between its elements."""
        values = poison(self.dtype, (len(drawn), abs(step)))
        values[:, 0] = drawn[:: 1 if step > 0 else -1]
        memory = self.device.array(values)
        view = memory[:, 0] if step > 0 else memory[::-1, 0]
        self.fields[name] = view
        return GuardedBuffer(view, memory, values, (slice(None), slice(0, 1)))

    def matrix(self, name: str, drawn: Array, *, row: bool) -> GuardedBuffer:
        """Put a matrix on the device, with poison around it."""
        gap = 4 + -len(drawn) % 4 if self.form.aligned else 2
        memory = place(self.device, drawn, (0, 1) if row else (1, 0), gap, aligned=self.form.aligned)
        self.fields[name] = memory.view
        return memory

    def one_triangle(self, matrix: Array) -> Array:
        """A matrix whose other triangle is NaN; the parts of the diagonal that must not be read are NaN too."""
        keep = np.tril(np.ones(matrix.shape, bool))
        keep = keep if self.fields["uplo"] is FillMode.LOWER else keep.T
        values = np.where(keep, matrix, np.nan).astype(self.dtype.numpy)
        if self.hermitian:
            np.fill_diagonal(values, values.diagonal().real + 5j)
        return values

    def store(self, matrix: Array, kl: int, ku: int) -> None:
        """Put the matrix of a product, or a triangle of it, into the storage format of the routine."""
        reads = KINDS[self.op].reads
        if "a" in reads:
            self.matrix("a", matrix, row=self.form.row)
        elif "ap" in reads:
            self.vector("ap", packed(matrix, self.fields["uplo"]), 1)
        else:
            m, n = matrix.shape
            ab = self.nan_filled(kl + ku + 1, n)
            below = np.subtract.outer(np.arange(m), np.arange(n))
            i, j = np.nonzero((-ku <= below) & (below <= kl))
            ab[ku + i - j, j] = matrix[i, j]
            self.matrix("ab", ab, row=False)

    def band_widths(self) -> tuple[int, int]:
        """The diagonals of a band on either side; for a triangle on one side."""
        if self.op == "gbmv":
            return self.form.band
        k = max(self.form.band)
        return (k, 0) if self.fields["uplo"] is FillMode.LOWER else (0, k)

    # -- by kind of routine ---------------------------------------------------------------------------------------
    def product_operands(self) -> None:
        form, op = self.form, self.op
        m, n = form.sizes if op in ("gemv", "gbmv") else (form.sizes[0],) * 2
        kl, ku = self.band_widths() if "ab" in KINDS[op].reads else (0, 0)
        drawn = self.normal(m, n)
        self.store(drawn if op in ("gemv", "gbmv") else self.one_triangle(drawn), kl, ku)
        if op == "gbmv":
            self.fields |= {"kl": kl, "ku": ku, "m": m}
        long, short = (m, n) if self.fields.get("trans", N) is N else (n, m)
        self.vector("x", self.normal(short), form.steps[0])
        self.fields["alpha"] = form.alpha
        if form.added != "nothing":
            self.fields["beta"] = form.beta
            y = self.vector("y", self.normal(long) if form.beta else self.nan_filled(long), form.steps[1])
            if form.added == "in place":
                self.fields["out"], self.written = y.view, (y,)
                return
        if form.has_out:
            self.written = (
                self.vector("out", self.nan_filled(long), -form.steps[1] if self.may_reverse else form.steps[1]),
            )

    @property
    def may_reverse(self) -> bool:
        """Whether vectors may have negative steps."""
        return min(self.form.steps) < 0

    def triangle_operands(self) -> None:
        form = self.form
        n = form.sizes[0]
        drawn = self.normal(n, n) / (2 * np.sqrt(n + 1))  # well conditioned
        np.fill_diagonal(drawn, np.nan if self.fields["diag"] is DiagType.UNIT else 1 + np.arange(n) % 3 / 3)
        kl, ku = self.band_widths()
        self.store(self.one_triangle(drawn), kl, ku)
        x = self.vector("x", self.normal(n), form.steps[0])
        if form.added == "in place":
            self.fields["out"], self.written = x.view, (x,)
        elif form.has_out:
            self.written = (self.vector("out", self.nan_filled(n), form.steps[1]),)

    def outer_operands(self) -> None:
        form, reads = self.form, KINDS[self.op].reads
        general = self.op.startswith("ge")
        m, n = form.sizes if general else (form.sizes[0],) * 2
        self.vector("x", self.normal(m), form.steps[0])
        if "y" in reads:
            self.vector("y", self.normal(n), form.steps[1])
        self.fields["alpha"] = form.alpha
        name = reads[-1]
        place_out = partial(self.matrix, row=form.row) if name == "a" else partial(self.vector, step=1)
        if form.added != "nothing":
            a = self.normal(m, n)
            if self.hermitian:
                np.fill_diagonal(a, a.diagonal().real + 5j)
            row = form.row != (form.added == "apart" and form.has_out and m % 2 == 1)
            a = a if name == "a" else packed(a, self.fields["uplo"])
            memory = self.matrix("a", a, row=row) if name == "a" else self.vector("ap", a, 1)
            if form.added == "in place":
                self.fields["out"], self.written = memory.view, (memory,)
                return
        if form.has_out or (name == "a" and form.added == "nothing"):
            self.written = (
                place_out("out", self.nan_filled(m, n) if name == "a" else self.nan_filled(n * (n + 1) // 2)),
            )


def check(op: str, dtype: Dtype, form: Form, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A request of a form with fresh operands."""
    draw, kind = OperandDraw(op, dtype, form, device, rng), KINDS[op]
    if "beta" in kind.numbers:
        draw.product_operands()
    elif "diag" in form.flags:
        draw.triangle_operands()
    else:
        draw.outer_operands()
    request = kind(**draw.fields)
    with np.errstate(all="ignore"):
        expected = evaluate(request, EXACT)
        return Check(name, request, expected, bounds(request, expected), draw.written)


def bounds(request: Any, expected: Results) -> Results:
    """The error bounds: for a sum of n products n + 4 roundings of their magnitudes, complex four times that."""
    first, out = getattr(request, request.reads[0]), expected["out"]
    unit = ROUNDOFF[F32 if first.dtype in HALF else first.dtype][0] * (4 if first.dtype.is_complex else 1)
    stored = request.layout_of("out").dtype
    terms = max(*request.x.shape, 1) if "alpha" not in request.numbers or "beta" in request.numbers else 1
    if request.op in ("trsv", "tbsv", "tpsv"):
        work = work_with(request, EXACT)
        a = turned(triangle(matrix_of(request, work), request.uplo, request.diag), request.trans)
        growth = np.abs(np.linalg.inv(a)) @ np.abs(a)
        return {"out": rounded(4 * (terms + 2) * unit * (growth @ growth @ np.abs(out)), out, first.dtype)}
    sizes = {name: np.abs(np.asarray(tensor)) for name, tensor, _ in request.tensors() if name in request.reads}
    factors = {name: abs(request.factor(name)) for name in request.numbers}
    size = np.abs(altered(evaluate, request, **sizes, **factors)["out"])
    error = np.asarray(rounded((terms + 4) * unit * size, out, stored))
    if out.ndim == 2 and hasattr(request, "uplo"):  # the other triangle is unchanged
        error = triangle(error, request.uplo)
    return {"out": error}


def level2_cases(row: Row) -> list[MadeCase]:
    """Every form of a row's routine and dtype; only large ones if the row is for large matrices."""
    op, dtype = row.op, row.dtypes[0]
    chosen = large_forms(op, dtype) if row.variant == "large" else forms(op, dtype)
    return [MadeCase(f"{dtype}-{number}", partial(check, op, dtype, form)) for number, form in enumerate(chosen)]
