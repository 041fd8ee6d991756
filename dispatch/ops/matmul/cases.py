"""The test cases of every matmul row: sizes, layouts, batches, C, scalars, epilogues and scales, combined pairwise.

Tests parametrize over `cases(row)` for each row of the table, and run `case.check(device, rng)`. bounds.py compares
the results. This file calls no library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.row import FAST
from dispatch.keys import C64, C128, E8M0, F32, FP8, HALF, I8, U8, Compute, Dtype, Epilogue, ScaleMode
from dispatch.ops.matmul.bounds import Check
from dispatch.ops.matmul.request import MatmulRequest
from dispatch.ops.matmul.rules import gelu_asked
from dispatch.ops.matmul.scales import Scales, aux_shape, scale_dtype, scale_shape
from dispatch.ops.matmul.tree_cases import row_cases
from dispatch.testing.memory import GuardedBuffer, poison

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor
    from dispatch.ops.matmul.tree_cases import Case as TreeCase

__all__ = ["Case", "Form", "cases"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """Sizes and memory layout: everything about a case but its dtypes, epilogue and scales.

    Attributes:
        sizes: (m, n, k).
        order: of A and B: n for dense rows, t for dense columns; "" for what suits the dtypes and the epilogue.
        padding: elements after every line of A, B, C and D; `guard`: lines before and after every matrix.
        c: "" for none, "c" for its own memory, "unread" for one of NaN that beta 0 must not read, "in place" for C and
            D the same tensor, "out" for D that is read because beta is not 0.
        scalars: where alpha and beta are: "host", "device", or "mixed" for alpha only on the device.
        has_out: whether outputs are passed, in poisoned memory; else the request allocates them.
        d_columns: whether C and D are column-major.
    """

    name: str
    sizes: tuple[int, int, int]
    order: str = ""
    a_batch: Shape = ()
    b_batch: Shape = ()
    padding: int = 0
    guard: int = 0
    c: str = ""
    scalars: str = "host"
    alpha: float = 1.0
    beta: float = 0.0
    has_out: bool = True
    d_columns: bool = False

    @property
    def batch(self) -> Shape:
        return np.broadcast_shapes(self.a_batch, self.b_batch)


# fmt: off
PLAIN = Form("plain", (64, 48, 32))
# A batch that shares B may be run as one taller product, unless the epilogue has a bias or bgrad for each batch.
SHARED = Form("one b of each", (24, 32, 48), a_batch=(3,))
FORMS = (
    Form("fresh",               (64, 48, 32), has_out=False),
    Form("large",               (256, 384, 384), has_out=False),
    Form("deep",                (64, 48, 1024), c="c", beta=1.0),
    Form("odd",                 (37, 53, 29), has_out=False),
    Form("odd padded",          (37, 53, 29), padding=3, guard=1),
    Form("ones",                (1, 1, 1)),
    Form("row",                 (1, 256, 32), guard=1),
    Form("column",              (256, 1, 32), guard=1),
    Form("inner",               (31, 17, 1), c="c", beta=0.5),
    Form("no m",                (0, 48, 32)),
    Form("no n",                (64, 0, 32)),
    Form("no k",                (64, 48, 0), c="c", beta=0.5),
    Form("no k, no c",          (64, 48, 0)),
    Form("nt",                  (64, 48, 32), "nt", padding=16, guard=1),
    Form("tn",                  (64, 48, 32), "tn", padding=16, guard=1),
    Form("tt",                  (64, 48, 32), "tt", padding=16, guard=1),
    Form("tt primes",           (31, 61, 17), "tt", has_out=False),
    Form("padded",              (64, 48, 32), padding=16, guard=1, c="c", beta=0.5),
    Form("batch",               (64, 48, 32), a_batch=(3,), b_batch=(3,), has_out=False),
    Form("batch padded",        (32, 48, 16), a_batch=(3,), b_batch=(3,), padding=16, guard=1),
    Form("batch odd",           (29, 23, 11), "nt", a_batch=(3,), b_batch=(3,), padding=1, c="c", beta=-1.0),
    Form("one a",               (32, 48, 64), b_batch=(3,), c="c", alpha=0.5, beta=2.0),
    Form("one b",               (32, 48, 64), a_batch=(3,), has_out=False),
    Form("one b padded",        (32, 48, 64), a_batch=(3,), padding=16, guard=1),
    Form("two batch axes",      (32, 16, 48), a_batch=(2, 1), b_batch=(1, 3), c="c", beta=0.5),
    Form("batch of one",        (32, 16, 48), a_batch=(1,), b_batch=(1,), has_out=False),
    Form("alpha, c",            (64, 48, 32), c="c", alpha=-0.75, beta=0.5),
    Form("c unread",            (64, 48, 32), c="unread"),
    Form("in place",            (64, 48, 32), c="in place", beta=1.0, padding=16, guard=1),
    Form("in place, out alone", (64, 48, 32), c="out", alpha=0.5, beta=-2.0),
    Form("alpha 0",             (64, 48, 32), c="c", alpha=0.0, beta=1.0),
    Form("device scalars",      (64, 48, 32), c="c", scalars="device", alpha=-0.5, beta=2.0),
    Form("device alpha",        (64, 48, 32), c="c", scalars="mixed", alpha=1.5, beta=0.5),
    Form("d in columns",        (64, 48, 32), d_columns=True, padding=16, guard=1, c="c", beta=0.5),
)
# fmt: on
# Batches with enough outer indices for cuBLAS's calls with pointers; the second has lines that are not aligned.
BY_POINTERS = (
    Form("batch by pointers", (32, 16, 48), a_batch=(6, 1), b_batch=(1, 3), c="c", beta=0.5),
    Form("pointers, odd", (29, 23, 11), "nt", a_batch=(6, 1), b_batch=(1, 2), padding=1, guard=1),
)
ORDER = {Epilogue.BGRADA: "tn"}  # it sums over the columns of A, and libraries require dense columns
ANY_ORDER = (Epilogue.NONE, Epilogue.RELU, Epilogue.GELU)  # the epilogues that a column-major D may have


@dataclass(frozen=True)
class Case:
    """Everything that is chosen about one request, except the numbers in its operands.

    `variant` varies details from case to case: factors by value or in memory, one bias or one for each batch, and
    whether amax is requested.
    """

    form: Form
    dtypes: tuple[Dtype, ...]
    compute: Compute
    epilogue: Epilogue
    modes: tuple[ScaleMode | None, ScaleMode | None] = (None, None)
    bias: Dtype | None = None
    aux: Dtype | None = None
    variant: int = 0
    reduced_precision: bool = False

    @property
    def id(self) -> str:
        """A readable name, unique within a row."""
        names = "x".join(dtype.name for dtype in self.dtypes)
        extras = [dtype.name for dtype in (self.bias, self.aux) if dtype is not None]
        modes = [f"{side} {mode.name}" for side, mode in zip("ab", self.modes, strict=True) if mode is not None]
        return "-".join([names, self.compute.name, self.epilogue.name, *extras, *modes, self.form.name])

    def request(self, device: Device, rng: np.random.Generator) -> MatmulRequest:
        """The request with fresh operands, without a check."""
        return self._build(device, rng)[0]

    def check(self, device: Device, rng: np.random.Generator) -> Check:
        """The check of a request with fresh operands; inputs of its activation have magnitude 1, on both sides of 0."""
        request, written = self._build(device, rng)
        return Check.of(self.id, request, self.compute, written)

    def _build(self, device: Device, rng: np.random.Generator) -> tuple[MatmulRequest, tuple[GuardedBuffer, ...]]:
        draw = _Draw(self, device, rng)
        draw.operands()
        draw.results()
        draw.scalars()
        draw.vectors()
        draw.factors()
        request = MatmulRequest(
            epilogue=self.epilogue,
            compute=None if self.variant % 2 == 0 and self.compute not in FAST else self.compute,
            out_dtype=self.dtypes[3],
            scales=Scales(**draw.scales),
            reduced_precision=self.reduced_precision,
            **draw.fields,
        )
        return request, tuple(draw.written)


@dataclass
class _Draw:
    """Draws the operands of one case, in the order of the methods."""

    case: Case
    device: Device
    rng: np.random.Generator
    fields: dict[str, Any] = field(default_factory=dict)
    scales: dict[str, Any] = field(default_factory=dict)
    written: list[GuardedBuffer] = field(default_factory=list)

    def numbers(self, dtype: Dtype, shape: Shape, spread: float = 1.0, mean: float = 0.0) -> Array:
        """Normal numbers with this standard deviation and mean; integers are over the range of the dtype."""
        if dtype.numpy.kind in "iu":
            low, high = (0, 256) if dtype is U8 else (-128, 128)
            return self.rng.integers(low, high, shape).astype(dtype.numpy)
        if self.case.compute is Compute.COMPUTE_16F:  # sums that f16 holds exactly, so that small faults show
            return self.rng.integers(-2, 3, shape).astype(dtype.numpy)
        values = self.rng.standard_normal(shape) * spread + mean
        if self.case.form.sizes == (1, 1, 1):  # a single number: avoid cancellation and the flat parts of an activation
            values = 0.75 + np.abs(values) / 4
        if dtype.is_complex:
            values = values + 1j * self.rng.standard_normal(shape) * spread
        return values.astype(dtype.numpy)

    def operands(self) -> None:
        form, dtypes = self.case.form, self.case.dtypes
        m, n, k = form.sizes
        order = form.order or ("nt" if dtypes[0].bits <= 8 else ORDER.get(self.case.epilogue, "nn"))
        spread = max(k, 1) ** -0.25  # of both A and B: their products then sum to about 1
        # Summed columns of D get a mean, so that 1% of the sum is more than the error of its terms.
        lean = 0.8 * spread**2 if self.case.epilogue.writes_bgrad else 0.0
        for name, dtype, shape, way in (
            ("a", dtypes[0], (*form.a_batch, m, k), order[0]),
            ("b", dtypes[1], (*form.b_batch, k, n), order[1]),
        ):
            values = self.numbers(dtype, shape, spread, lean)
            self.fields[name] = self.lay(values, columns=way == "t").view

    def lay(self, values: Array, *, columns: bool = False) -> GuardedBuffer:
        form = self.case.form
        return GuardedBuffer.lay(self.device, values, columns=columns, padding=form.padding, guard=form.guard)

    def output(self, name: str, values: Array, *, columns: bool = False) -> Tensor:
        memory = self.lay(values, columns=columns)
        self.written.append(memory)
        self.fields[name] = memory.view
        return memory.view

    def results(self) -> None:
        """C and D."""
        form, (_, _, c_dtype, d_dtype) = self.case.form, self.case.dtypes
        shape = (*form.batch, *form.sizes[:2])
        if form.c in ("c", "unread"):
            values = poison(c_dtype, shape) if form.c == "unread" else self.numbers(c_dtype, shape)
            self.fields["c"] = self.lay(values, columns=form.d_columns).view
        if form.c in ("in place", "out"):
            out = self.output("out", self.numbers(d_dtype, shape), columns=form.d_columns)
            self.fields.update({"c": out} if form.c == "in place" else {})
        elif form.has_out or form.d_columns:
            self.output("out", poison(d_dtype, shape), columns=form.d_columns)

    def scalars(self) -> None:
        form, operand = self.case.form, self.case.dtypes[0]
        pair: dict[str, Any] = {"alpha": form.alpha, "beta": form.beta}
        if operand is I8:  # whole numbers
            pair = {name: float(round(4 * number)) if number % 1 else number for name, number in pair.items()}
        if operand in (C64, C128) and form.alpha % 1:
            pair["alpha"] = form.alpha + 0.5j
        in_memory = {"host": (), "device": ("alpha", "beta"), "mixed": ("alpha",)}[form.scalars]
        dtype = scale_dtype(operand, self.case.compute)
        for name in in_memory:
            pair[name] = self.device.array(np.array([pair[name]]).astype(dtype.numpy))
        self.fields.update(pair)

    def vectors(self) -> None:
        """Bias, aux and bias gradient."""
        form, epilogue = self.case.form, self.case.epilogue
        m, n, _ = form.sizes
        if epilogue.adds_bias and self.case.bias is not None:
            batch = form.batch if self.case.variant % 2 else ()
            self.fields["bias"] = self.device.array(self.numbers(self.case.bias, (*batch, n), 0.5))
        if epilogue.writes_bgrad and form.has_out and self.case.bias is not None:
            extent = m if epilogue is Epilogue.BGRADA else n
            vector = GuardedBuffer.lay(self.device, poison(self.case.bias, (*form.batch, 1, extent)), guard=1)
            self.written.append(vector)
            self.fields["bgrad"] = vector.view[..., 0, :]
        if epilogue.is_gradient or (epilogue.writes_aux and (form.has_out or self.case.aux is not None)):
            self._aux((*form.batch, m, n))

    def _aux(self, shape: Shape) -> None:
        form, epilogue = self.case.form, self.case.epilogue
        relu = epilogue.activation == "relu"
        dtype = U8 if relu or self.case.aux is None else self.case.aux
        extents, strides = aux_shape(epilogue, shape)
        padding = (strides[-2] - extents[-1]) + (16 if form.padding else 0)
        values = self.numbers(dtype, extents) if epilogue.is_gradient else poison(dtype, extents)
        memory = GuardedBuffer.lay(self.device, values, padding=padding, guard=1 if form.guard else 0)
        self.fields["aux"] = memory.view
        if epilogue.writes_aux:
            self.written.append(memory)

    def factors(self) -> None:
        """Scales of A and B by the case's modes; of C, D and aux where they are fp8."""
        m, n, k = self.case.form.sizes
        for name, mode, lines in zip("ab", self.case.modes, (m, n), strict=True):
            if mode is not None:
                self.scales[name] = self._factor(mode, lines, k)
                self.scales[f"{name}_mode"] = mode
        c, d = self.case.dtypes[2:]
        if c in FP8 and "c" in self.fields:
            self.scales["c"] = self._factor(ScaleMode.SCALAR_32F, 1, 1)
        if d in FP8:
            self.scales["d"] = self._factor(ScaleMode.SCALAR_32F, 1, 1)
        if self.case.aux in FP8 and self.case.epilogue.writes_aux:
            self.scales["aux"] = self._factor(ScaleMode.SCALAR_32F, 1, 1)
        if d in FP8 and self.case.variant % 3 == 0:
            self.scales["amax_d"] = self.device.array(poison(F32, (1,)))
        if "aux" in self.scales and self.case.variant % 3 != 1:
            self.scales["amax_aux"] = self.device.array(poison(F32, (1,)))

    def _factor(self, mode: ScaleMode, lines: int, k: int) -> Any:
        """Factors between 1/2 and 2 in the shape of a mode; a scalar factor is given by value in every other case."""
        if mode is ScaleMode.SCALAR_32F and self.case.variant % 2:
            return float(self._apart_from_1(()))
        dtype, shape = scale_shape(mode, lines, k)
        shape = shape or (1,)
        values = 2.0 ** self.rng.integers(-1, 2, shape) if dtype is E8M0 else self._apart_from_1(shape)
        return self.device.array(values.astype(dtype.numpy))

    def _apart_from_1(self, shape: Shape) -> Array:
        return np.asarray(self.rng.uniform(1.25, 2, shape) ** self.rng.choice([-1, 1], shape))


def cases(row: Row) -> list[Case] | list[TreeCase]:
    """About 50 cases for a row: every form, with the row's epilogues, scale modes and vector dtypes in turn.

    Each epilogue also gets the plain form, so that everything a row lists is run at least once in a simple case, and
    those with a vector or aux get a batch that shares B. The cases of CUTLASS's rows are in tree_cases.py.
    """
    if row.of("cutlass"):
        return row_cases(row)
    forms = [(form, None) for form in _forms(row)] + [(PLAIN, epilogue) for epilogue in row.epilogues]
    if row.dtypes[0].bits > 4:
        forms += [
            (SHARED, e) for e in row.epilogues if e is Epilogue.BIAS or e.writes_aux or e.is_gradient or e.writes_bgrad
        ]
    by_id: dict[str, Case] = {}
    for number, (form, epilogue) in enumerate(forms):
        turn = number + number // len(row.epilogues)  # out of step with the epilogues
        chosen = epilogue or row.epilogues[number % len(row.epilogues)]
        if not _fit(form, chosen):
            chosen = next((other for other in row.epilogues if _fit(form, other)), chosen)
        if _fit(form, chosen):
            case = _case(row, form, chosen, turn)
            by_id.setdefault(case.id, case)
    return list(by_id.values())


def _fit(form: Form, epilogue: Epilogue) -> bool:
    """Whether a form can have an epilogue: some need a row-major D, some a D with elements."""
    if epilogue in (Epilogue.BGRADA, Epilogue.BGRADB) and 0 in form.sizes[:2]:
        return False
    return not form.d_columns or epilogue in ANY_ORDER


def _case(row: Row, form: Form, epilogue: Epilogue, turn: int) -> Case:
    takes_bias = epilogue.adds_bias or epilogue.writes_bgrad
    takes_aux = epilogue.activation == "gelu" and (epilogue.writes_aux or epilogue.is_gradient)
    bias, aux = row.epilogue_dtypes[0] or row.dtypes[2:3], row.epilogue_dtypes[1] or row.dtypes[2:3]
    return Case(
        form=_with_c(form, row.dtypes),
        dtypes=row.dtypes,
        compute=row.compute or Compute.COMPUTE_32F,
        epilogue=epilogue,
        modes=row.scales[turn % len(row.scales)],
        bias=bias[turn % len(bias)] if takes_bias else None,
        aux=aux[turn % len(aux)] if takes_aux else None,
        variant=turn,
        reduced_precision=gelu_asked in row.rules and epilogue.activation == "gelu",
    )


def _forms(row: Row) -> tuple[Form, ...]:
    if row.dtypes[0].bits == 4:  # packed elements: no strided views
        return tuple(form for form in FORMS if form.name in ("fresh", "large", "deep"))
    return (*FORMS, *BY_POINTERS) if row.of("cublas") else FORMS


def _with_c(form: Form, dtypes: tuple[Dtype, ...]) -> Form:
    """The form with a separate C where D cannot be C, or where C's dtype follows only from a given C."""
    c, d = dtypes[2:]
    implied = HALF[1] if d in FP8 else d
    if c is not d and form.c in ("in place", "out"):
        return Form(**{**vars(form), "c": "c"})
    if c is not implied and not form.c:
        return Form(**{**vars(form), "c": "c", "beta": 1.0})
    return form
