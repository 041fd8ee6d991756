"""The cases of products with the caller's operators: each pattern over a semiring in turn, predefined and custom ones.

Operands are surrounded by poison. Patterns include rows without elements and matrices without products. The added
operand is absent, separate, or in the place of the result.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.keys import F32, HALF
from dispatch.ops.sparse.compiled import SpmmOpRequest, SpmvOpRequest
from dispatch.ops.sparse.compiled_reference import COMPILED, evaluate_compiled
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.patterns import PATTERNS, SQUARE, stored
from dispatch.ops.sparse.semirings import NAMED_SEMIRINGS, Semiring, SparseOperator
from dispatch.testing.check import ROUNDOFF, Check, GuardedBuffer, MadeCase, place, poison, rounded

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype

__all__ = ["COMPILED_OPS", "compiled_cases"]

COMPILED_OPS = tuple(COMPILED)
ADDED = ("nothing", "apart", "in place")
SMALL = [name for name in PATTERNS if name != "nothing"]
SHAPES = ((20, 28), (36, 12), (24, 24), (1, 8), (48, 36))
WIDE = (5, 1, 8, 33)
FACTORS = ((1.0, 0.0), (0.75, -1.5), (0.0, 0.5), (-2.0, 1.0))


# Named functions, so that the rows of two libraries have the same cases.
def _apart_squared(a: Array, b: Array) -> Any:
    return (a - b) * (a - b)


def _damped(total: Array, c: Array) -> Any:
    return total / (1 + abs(total)) - 2 * c


def _conjugated(a: Array, b: Array) -> Any:
    return a * np.conj(b)


def _turned(total: Array, c: Array) -> Any:
    return np.conj(total) + c * total.dtype.type(0.5)


def _positive(row: Array, x: Array) -> Any:
    del row
    return np.where(x > 0, x, x * x.dtype.type(0.25))


def _by_row(row: Array, x: Array) -> Any:
    return np.where(row % 3 == 0, x, x * (1 + row % 5).astype(x.dtype))


def _conjugate(row: Array, x: Array) -> Any:
    del row
    return np.conj(x)


SUM = NAMED_SEMIRINGS["plus_times"].add
# Code of several kinds: a loop, a cast, and several lines.
DISTANCE = Semiring(
    SparseOperator("const Number apart = a - b;\nreturn apart * apart;", _apart_squared),
    SUM,
    0.0,
    SparseOperator("const Number size = sum < 0 ? -sum : sum;\nreturn sum / (1 + size) - 2 * c;", _damped),
)
CONJUGATED = Semiring(
    SparseOperator("return a * conj(b);", _conjugated),
    SUM,
    0.0,
    SparseOperator("return conj(sum) + c * Number(Real(0.5));", _turned),
)
LONGEST = Semiring(NAMED_SEMIRINGS["max_plus"].multiply, NAMED_SEMIRINGS["max_plus"].add, -2.5)
SEMIRINGS = {**NAMED_SEMIRINGS, "distance": DISTANCE, "conjugated": CONJUGATED, "longest": LONGEST}
OF_REAL = (*NAMED_SEMIRINGS, "distance", "longest")
OF_COMPLEX = ("plus_times", "conjugated")
EPILOGUES = {
    "none": None,
    "positive": SparseOperator("return x > 0 ? x : x * Real(0.25);", _positive),
    "by row": SparseOperator("return row % 3 == 0 ? x : x * Number(1 + row % 5);", _by_row),
    "conjugate": SparseOperator("return conj(x);", _conjugate),
}
EPILOGUES_OF_REAL = ("none", "positive", "by row")
EPILOGUES_OF_COMPLEX = ("none", "conjugate", "by row")
# For kernels that split rows: matrices for several blocks, and rows shared by some of them.
LARGE = (
    ("dense row", (9, 1500)),
    ("power law", (250, 900)),
    ("dense row", (20, 900)),
    ("random", (600, 90)),
    ("empty rows", (700, 40)),
)


class Form(NamedTuple):
    """A case: pattern and shape, indices, the operators' name, the added operand, and the layouts."""

    pattern: str
    shape: tuple[int, int]
    base: int
    wide: bool
    operators: str
    added: str
    columns: int
    by_rows: tuple[bool, bool]
    has_out: bool
    factors: tuple[float, float]
    library: str


def compiled_cases(row: Row) -> list[MadeCase]:
    """Each pattern twice, all other properties in turn, and larger ones for our kernels; each library separately."""
    op, dtype = row.op, row.dtypes[0]
    names = OF_COMPLEX if dtype.is_complex else OF_REAL
    if op == "spmv_op":
        names = EPILOGUES_OF_COMPLEX if dtype.is_complex else EPILOGUES_OF_REAL
    is_own = "own" in (row.library, row.stands_for)
    patterns = [(name, SHAPES[number % 5]) for number, name in enumerate(SMALL * 2)]
    out = row.dtypes[1]
    listed = []
    for number, (pattern, shape) in enumerate((*patterns, *LARGE * is_own)):
        form = Form(
            pattern,
            shape,
            base=0 if op == "spmv_op" and not is_own else number // 2 % 2,
            wide=number % 3 == 1,
            operators=names[0 if number == len(patterns) else (number + number // len(names)) % len(names)],
            added=ADDED[(number + number // 3) % 3],
            columns=WIDE[number % 4],
            by_rows=(number % 2 == 0, number // 2 % 2 == 0),
            has_out=number % 4 != 3,
            factors=FACTORS[number % 4],
            library="own" if is_own else "cusparse",
        )
        name = f"{dtype}-{number}-{form.library}"
        listed.append(MadeCase(name, partial(check, op, dtype, out, form), form.operators))
    return listed


class Draw:
    """The operands of a form on a device."""

    def __init__(self, dtype: Dtype, form: Form, device: Device, rng: np.random.Generator) -> None:
        self.dtype, self.form, self.device, self.rng = dtype, form, device, rng
        self.fields: dict[str, Any] = {}

    def normal(self, *shape: int) -> Array:
        drawn = self.rng.standard_normal(shape)
        if self.dtype.is_complex:
            drawn = drawn + 1j * self.rng.standard_normal(shape)
        if self.form.operators == "or_and":  # half of them are false
            drawn = np.where(self.rng.random(shape) < 0.5, drawn, 0)
        return np.asarray(drawn)

    def place_operand(self, name: str, values: Array, *, by_rows: bool = True) -> GuardedBuffer:
        """Place an operand surrounded by poison."""
        memory = place(self.device, values, None if by_rows or values.ndim < 2 else (1, 0), 2)
        self.fields[name] = memory.view
        return memory

    def sparse(self, *, wide_columns: bool) -> tuple[int, int]:
        """A matrix in CSR, and its shape, which some patterns determine."""
        form = self.form
        shape = (24, 24) if form.pattern in SQUARE else form.shape
        mask = PATTERNS[form.pattern](self.rng, shape)
        mask[-1, 0] = True  # ensures at least one element
        values = self.normal(*mask.shape).astype(self.dtype.numpy)
        index = np.int64 if form.wide else np.int32
        values, rows, columns, matrix_form = stored(mask, values, SparseFormat.CSR, form.base, index)
        self.place_operand("values", values)
        self.place_operand("rows", rows)
        self.place_operand("columns", columns if wide_columns else columns.astype(np.int32))
        self.fields["form"] = matrix_form
        m, n = mask.shape
        return m, n


def check(op: str, dtype: Dtype, out: Dtype, form: Form, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A request of a form with fresh operands."""
    draw = Draw(dtype, form, device, rng)
    m, n = draw.sparse(wide_columns=op == "spmm_op" or form.library == "own")
    draw.fields["library"] = form.library
    right, added = ("b", "c") if op == "spmm_op" else ("x", "y")
    shape: tuple[int, ...] = (m, form.columns) if op == "spmm_op" else (m,)
    draw.place_operand(right, draw.normal(n, *shape[1:]).astype(dtype.numpy), by_rows=form.by_rows[0])
    fields = draw.fields
    if op == "spmm_op":
        fields["semiring"] = form.operators if form.operators in NAMED_SEMIRINGS else SEMIRINGS[form.operators]
    else:
        fields |= {"epilogue": EPILOGUES[form.operators], "alpha": form.factors[0]}
    made: tuple[GuardedBuffer, ...] = ()
    if form.added != "nothing":
        unread = op == "spmv_op" and not form.factors[1]
        values = poison(out, shape) if unread else draw.normal(*shape).astype(out.numpy)
        memory = draw.place_operand(added, values, by_rows=form.by_rows[1])
        if op == "spmv_op":
            fields["beta"] = form.factors[1]
        if form.added == "in place":
            fields["out"], made = memory.view, (memory,)
    if "out" not in fields and (form.has_out or (out is not dtype and form.added == "nothing")):
        made = (draw.place_operand("out", poison(out, shape), by_rows=form.by_rows[1]),)
    kind: Any = SpmmOpRequest if op == "spmm_op" else SpmvOpRequest
    request = kind(**fields)
    with np.errstate(all="ignore"):
        expected = evaluate_compiled(request, EXACT)
        return Check(name, request, expected, bounds(request, form, expected, out), made)


def bounds(request: Any, form: Form, expected: Results, out: Dtype) -> Results:
    """For n terms n + 8 roundings of the sum of magnitudes, four times for complex ones; then the result's rounding.

    The magnitude of a term is the largest one from any of the operators. Epilogues multiply by at most 5.
    """
    if form.operators == "or_and":
        return {"out": np.zeros(())}
    dtype = request.values.dtype
    unit = ROUNDOFF[F32 if dtype in HALF else dtype][0] * (4 if dtype.is_complex else 1)
    row = np.repeat(np.arange(request.form.shape[0]), np.diff(np.asarray(request.rows)))
    values, columns = np.abs(np.asarray(request.values, EXACT_OF[dtype.is_complex])), np.asarray(request.columns)
    right = np.abs(np.asarray(request.b if request.op == "spmm_op" else request.x, EXACT_OF[dtype.is_complex]))
    right = right.reshape(right.shape[0], -1)[columns - request.form.base]
    terms = {
        "distance": (values[:, None] + right) ** 2,
        "min_plus": values[:, None] + right,
        "max_plus": values[:, None] + right,
        "longest": values[:, None] + right,
    }.get(form.operators, values[:, None] * right)
    size = np.zeros((request.form.shape[0], right.shape[1]))
    np.add.at(size, row, terms)
    added = request.c if request.op == "spmm_op" else request.y
    if added is not None and (request.op == "spmm_op" or request.reads_added):
        added_size = np.abs(np.asarray(added, EXACT_OF[dtype.is_complex])).reshape(size.shape)
        size = size + 2 * added_size
    if request.op == "spmv_op":
        size *= 5 * 2
    counts = np.bincount(row, minlength=len(size))[:, None]
    error = ((counts + 8) * unit * size).reshape(expected["out"].shape)
    return {"out": np.asarray(rounded(error, expected["out"], out))}


EXACT_OF = {False: np.float64, True: np.complex128}
