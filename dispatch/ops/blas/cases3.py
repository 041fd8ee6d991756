"""The test cases of BLAS level 3: every flag, both orders, gaps between rows or columns, and poison.

Everything that must not be read is NaN: the other triangle of symmetric, Hermitian or triangular matrices, the diagonal
of a unit triangle, c if beta is 0, and all of the result that will be written.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import EXACT, values
from dispatch.ops.blas import level3
from dispatch.ops.blas.choices import DiagType, FillMode, Operation, SideMode
from dispatch.ops.blas.reference3 import RANKS, evaluate, triangle, turned, work_with
from dispatch.testing.check import ROUNDOFF, Check, GuardedBuffer, MadeCase, place, rounded
from dispatch.testing.mutations import altered

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype

__all__ = ["complex_normal", "level3_cases"]

KINDS: dict[str, Any] = {
    kind.op: kind for kind in map(level3.__dict__.get, level3.__all__) if kind is not None and hasattr(kind, "op")
}
SIDES, FILLS, DIAGS = tuple(SideMode), tuple(FillMode), tuple(DiagType)
N, T, C = Operation.N, Operation.T, Operation.C
SIZES = ((5, 7, 3), (1, 1, 1), (17, 4, 9), (3, 33, 12), (8, 8, 8), (48, 40, 64), (0, 4, 2), (6, 5, 0), (1, 6, 1))
LARGE = (130, 70, 150)  # more than one tile of any kernel
FACTORS = ((1.0, 0.0), (0.75, -1.5), (0.0, 0.5), (-2.0, 1.0), (1.0, 1.0), (0.0, 0.0))
ADDED = ("nothing", "apart", "in place")
BATCHES = ((), (4,), (2, 3), (1,))
POISON_PART = 5.0  # the imaginary part of a diagonal, which must be treated as 0


class Form(NamedTuple):
    """A case: extents, flags by their fields, memory orders, the factors, what is added, whether out is passed."""

    sizes: tuple[int, int, int]
    flags: dict[str, Any]
    row: bool  # the order of the result
    other: bool  # whether operands that may have the opposite order do
    gap: int
    alpha: complex
    beta: complex
    added: str
    has_out: bool
    batch: tuple[int, ...] = ()
    shares_a: bool = False


def flags_of(op: str, *, is_complex: bool) -> list[dict[str, Any]]:
    """Every combination of a routine's flags."""
    if op in ("symm", "hemm"):
        named: dict[str, Any] = {"side": SIDES, "uplo": FILLS}
    elif op in RANKS:
        named = {"uplo": FILLS, "trans": (N, C) if op.startswith("he") else (N, T)}
    elif op in ("trmm", "trsm"):
        named = {"side": SIDES, "uplo": FILLS, "trans": (N, T, C), "diag": DIAGS}
    elif op == "geam":
        named = {"trans_a": (N, T, C), "trans_b": (N, T, C) if is_complex else (N, T)}
    else:
        named = {"side": SIDES}
    return [dict(zip(named, chosen, strict=True)) for chosen in product(*named.values())]


def forms(op: str, dtype: Dtype) -> list[Form]:
    """Each combination of flags in both orders; the other parameters in rotation, with coprime periods."""
    result: list[Form] = []
    every = product(flags_of(op, is_complex=dtype.is_complex), (True, False))
    rounds = list(every) * (1 if op in ("trmm", "trsm", "geam") else 3)
    for number, (flags, row) in enumerate(rounds):
        alpha: complex
        beta: complex
        alpha, beta = FACTORS[(number + number // len(FACTORS)) % len(FACTORS)]
        turn = number % 5
        if dtype.is_complex and number % 2:
            alpha, beta = alpha * (1 - 0.5j), beta * (1 + 2j)
        real = KINDS[op].real
        result.append(
            Form(
                sizes=LARGE if number == len(rounds) // 2 else SIZES[number % len(SIZES)],
                flags=flags,
                row=row,
                other=turn in (1, 2),
                gap=(0, 3, 1)[number % 3],
                alpha=alpha.real if "alpha" in real else alpha,
                beta=beta.real if "beta" in real else beta,
                added=ADDED[(number + 1) % 3],
                has_out=turn != 3,
                batch=BATCHES[number % len(BATCHES)] if op == "trsm" else (),
                shares_a=number % 7 == 1,
            )
        )
    if op in ("geam", "dgmm"):  # the large size takes the place of their empty sizes
        result += [result[number]._replace(sizes=sizes) for number, sizes in enumerate(((0, 4, 2), (6, 0, 5)))]
    if op in RANKS:  # nothing is added: c is unchanged
        for (flags, row), (k, alpha), added in product(rounds[: len(rounds) // 3], ((3, 0.0), (0, 2.0)), ADDED[1:]):
            result.append(
                Form((9, 1, k), flags, row, other=False, gap=1, alpha=alpha, beta=1.0, added=added, has_out=row)
            )
    return result


def complex_normal(rng: np.random.Generator, dtype: Dtype, shape: tuple[int, ...]) -> Array:
    """Normal numbers, complex ones for complex dtypes."""
    drawn: Any = rng.standard_normal(shape)
    if dtype.is_complex:
        drawn = drawn + 1j * rng.standard_normal(shape)
    return np.asarray(drawn.astype(dtype.numpy))


class OperandDraw:
    """The operands of a form on a device."""

    def __init__(self, op: str, dtype: Dtype, form: Form, device: Device, rng: np.random.Generator) -> None:
        self.op, self.dtype, self.form, self.device, self.rng = op, dtype, form, device, rng
        self.fields: dict[str, Any] = dict(form.flags)
        self.memory: dict[str, GuardedBuffer] = {}

    def place_operand(self, name: str, drawn: Array, *, free: bool = False) -> GuardedBuffer:
        """Put an operand on the device, in the order of the result, or the opposite if `free` and the form says so."""
        row = self.form.row != (free and self.form.other)
        axes = tuple(range(drawn.ndim))
        order = axes if row or drawn.ndim < 2 else (*axes[:-2], axes[-1], axes[-2])
        self.memory[name] = place(self.device, drawn, order, self.form.gap)
        self.fields[name] = self.memory[name].view
        return self.memory[name]

    def normal(self, *shape: int) -> Array:
        return complex_normal(self.rng, self.dtype, shape)

    def one_triangle(self, matrix: Array, *, hermitian: bool = False) -> Array:
        """A matrix whose other triangle is NaN, with imaginary parts on the diagonal that must not be read."""
        keep = np.tril(np.ones(matrix.shape[-2:], bool))
        keep = keep if self.fields["uplo"] is FillMode.LOWER else keep.T
        values = np.where(keep, matrix, np.nan).astype(matrix.dtype)
        if hermitian:
            np.fill_diagonal(values, values.diagonal().real + 1j * POISON_PART)
        return values

    def add(self, shape: tuple[int, int]) -> None:
        """c and out for a routine that adds; for a rank update the other triangle of out must not change."""
        form = self.form
        if form.added != "nothing":
            self.fields["beta"] = form.beta
            c = self.normal(*shape) if form.beta else np.full(shape, np.nan, self.dtype.numpy)
            if self.op in RANKS:
                c = self.with_other_triangle(c, self.normal(*shape))
            if form.added == "in place":
                self.memory["out"] = self.place_operand("c", c)
                self.fields["out"] = self.fields["c"]
                return
            self.place_operand("c", c, free=True)
        if form.has_out:
            self.place_operand("out", np.full(shape, np.nan, self.dtype.numpy))

    def with_other_triangle(self, c: Array, other: Array) -> Array:
        """c with another triangle that must not change; the diagonal of a Hermitian one has imaginary parts."""
        if self.op.startswith("he"):
            np.fill_diagonal(c, c.diagonal().real + 1j * POISON_PART)
        written = np.tril(np.ones(c.shape, bool))
        return np.where(written if self.fields["uplo"] is FillMode.LOWER else written.T, c, other)

    # -- by routine -----------------------------------------------------------------------------------------------
    def symm(self) -> None:
        m, n, _ = self.form.sizes
        order = m if self.fields["side"] is SideMode.LEFT else n
        is_hermitian = self.op == "hemm"
        self.place_operand(
            "a", self.one_triangle(self.normal(order, order), hermitian=is_hermitian), free=not is_hermitian
        )
        self.place_operand("b", self.normal(m, n))
        self.fields["alpha"] = self.form.alpha
        self.add((m, n))

    def rank(self) -> None:
        n, _, k = self.form.sizes
        shape = (n, k) if self.fields["trans"] is N else (k, n)
        free = not self.op.startswith("he")
        for name in KINDS[self.op].reads[:-1]:
            self.place_operand(name, self.normal(*shape), free=free)
        self.fields["alpha"] = self.form.alpha
        self.add((n, n))

    def triangular(self) -> None:
        m, n, _ = self.form.sizes
        form, batch = self.form, self.form.batch
        order = m if self.fields["side"] is SideMode.LEFT else n
        a_batch = batch if not form.shares_a else batch[1:]
        a = self.normal(*a_batch, order, order) / (2 * np.sqrt(order + 1))  # well conditioned
        a = self.one_triangle(a)
        places = np.arange(order)
        is_unit = self.fields["diag"] is DiagType.UNIT
        a[..., places, places] = (
            np.nan if is_unit else np.sign(a[..., places, places].real + 0.1) * (1 + places % 3 / 3)
        )
        conjugates = self.fields["trans"] is C and self.dtype.is_complex
        self.place_operand("a", a.astype(self.dtype.numpy), free=not conjugates)
        self.fields["alpha"] = form.alpha
        b = self.normal(*batch, m, n)
        if form.added == "in place":
            self.memory["out"] = self.place_operand("b", b)
            self.fields["out"] = self.fields["b"]
            return
        self.place_operand("b", b, free=self.op == "trsm" and form.has_out)
        if form.has_out:
            self.place_operand("out", np.full(b.shape, np.nan, b.dtype))

    def geam(self) -> None:
        m, n, _ = self.form.sizes
        for name, factor in (("a", self.form.alpha), ("b", self.form.beta)):
            trans = self.fields[f"trans_{name}"]
            shape = (m, n) if trans is N else (n, m)
            drawn = self.normal(*shape) if factor else np.full(shape, np.nan, self.dtype.numpy)
            free = not (trans is C and self.dtype.is_complex) and self.form.has_out
            self.place_operand(name, drawn, free=free)
        self.fields |= {"alpha": self.form.alpha, "beta": self.form.beta}
        self.result((m, n), {name: self.fields[f"trans_{name}"] is N for name in "ab"})

    def dgmm(self) -> None:
        m, n, _ = self.form.sizes
        self.place_operand("a", self.normal(m, n))
        count = m if self.fields["side"] is SideMode.LEFT else n
        spread = np.full((count, 1 + self.form.gap), np.nan, self.dtype.numpy)
        spread[:, 0] = self.normal(count)
        self.fields["x"] = self.device.array(spread)[:, 0]
        self.result((m, n), {"a": True})

    def result(self, shape: tuple[int, int], in_place: dict[str, bool]) -> None:
        """out: an operand that may be overwritten, other memory, or None."""
        for name, may_be in in_place.items():
            if self.form.added == "in place" and may_be:
                self.memory["out"] = self.memory[name] if name in self.memory else self.memory["out"]
                self.fields["out"] = self.fields[name]
                return
        if self.form.has_out:
            self.place_operand("out", np.full(shape, np.nan, self.dtype.numpy))


def check(op: str, dtype: Dtype, form: Form, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A request of a form with fresh operands."""
    draw = OperandDraw(op, dtype, form, device, rng)
    if op in RANKS:
        draw.rank()
    elif op in ("trmm", "trsm"):
        draw.triangular()
    else:
        getattr(draw, "symm" if op == "hemm" else op)()
    request = KINDS[op](**draw.fields)
    written = (draw.memory["out"],) if "out" in draw.memory else ()
    with np.errstate(all="ignore"):
        expected = evaluate(request, EXACT)
        return Check(name, request, expected, bounds(request, expected), written)


def bounds(request: Any, expected: Results) -> Results:
    """The error bounds: for a sum of k products k + 4 roundings of their magnitudes, complex four times that."""
    dtype, out = request.a.dtype, expected["out"]
    unit = ROUNDOFF[dtype][0] * (4 if dtype.is_complex else 1)
    if request.op == "trsm":
        return {"out": rounded(4 * (request.a.shape[-1] + 2) * unit * solved(request, np.abs(out)), out, dtype)}
    sizes = {name: np.abs(np.asarray(tensor)) for name, tensor, _ in request.tensors() if name in request.reads}
    factors = {name: abs(request.factor(name)) for name in request.numbers}
    size = np.abs(altered(evaluate, request, **sizes, **factors)["out"])
    terms = max(request.a.shape) if request.op not in ("geam", "dgmm") else 1
    error = np.asarray(rounded((terms + 4) * unit * size, out, dtype))
    if request.op in RANKS:  # the other triangle is unchanged
        error = triangle(error, request.uplo)
    return {"out": error}


def solved(request: Any, x: Array) -> Array:
    """The largest error of a solution: |A⁻¹| |A| of its magnitudes, twice that if blocks are inverted."""
    work = work_with(request, EXACT)
    a = turned(triangle(values(request.a, work), request.uplo, request.diag), request.trans)
    growth = np.abs(np.linalg.inv(a)) @ np.abs(a)
    if request.side is SideMode.LEFT:
        return np.asarray(growth @ growth @ x)
    growth = np.abs(a) @ np.abs(np.linalg.inv(a))
    return np.asarray(x @ growth @ growth)


def level3_cases(row: Row) -> list[MadeCase]:
    """Every form of a row's routine and dtype."""
    op, dtype = row.op, row.dtypes[0]
    return [
        MadeCase(f"{dtype}-{number}", partial(check, op, dtype, form)) for number, form in enumerate(forms(op, dtype))
    ]
