"""The fast path of `matmul`: what an executor remembers of a call, so that the next one needs no request.

A Shortcut serves calls with the same layouts: its plan is ready. A Pattern serves calls whose layouts differ from those
of an earlier call in extents only: the row is known, and only the plan is made. Both do exactly what a request would,
so a call is kept only if its key determines its result. Anything unusual is left to a request, which validates it
and explains errors. This module launches nothing.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.core.call_cache import CACHE_MISS, overlap_bounds
from dispatch.core.operand_checks import MAX_EXTENT
from dispatch.core.overlap import may_overlap
from dispatch.core.row import accepts
from dispatch.device.tensor import Tensor
from dispatch.errors import Refused
from dispatch.keys import I8
from dispatch.libraries.cublaslt.problem import Matrix
from dispatch.ops.matmul.rules import (
    ALIGNED,
    aligned_vectors,
    bgrad_order,
    full_precision,
    gelu_asked,
    no_fast_accum,
    no_scales,
)
from dispatch.ops.matmul.scales import NO_SCALES

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Plan
    from dispatch.device.layout import Layout
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype
    from dispatch.ops.matmul.cublaslt import CublasLtPlan
    from dispatch.ops.matmul.request import MatmulRequest

__all__ = ["MAX_SHORTCUTS", "Shortcut", "cache_shortcut", "recognize"]

MAX_SHORTCUTS = 4096  # on one executor; each keeps its plan alive, and the oldest is dropped first
MAX_PATTERNS = 256  # on one executor; each keeps the plan of its first call alive
MAX_INT_NUMBER = 2**31 - 1  # largest int taken as alpha or beta: every scalar type holds it
Key = tuple[Any, ...]  # of `matmul`: the layouts of a, b, c, bias, aux, bgrad and out, then the choices
OPERANDS = ("a", "b", "c", "bias", "aux", "bgrad", "out")
BETA = len(OPERANDS) + 1  # index in a key: None without beta, else whether it is not 0


class Form(NamedTuple):
    """Which operands a call has and which it writes; calls of one form share their generated code."""

    operands: tuple[str, ...]  # names from OPERANDS
    allocated: tuple[str, ...]  # the outputs that are allocated
    aux_written: bool
    has_beta: bool  # whether beta was given
    adds_out: bool  # whether `out` is also C: no c was given, and beta is not 0
    scaled: bool  # whether there are scale factors or amax outputs

    @property
    def writes(self) -> tuple[str, ...]:
        """The outputs, in the order in which they are returned."""
        present = {*self.operands, *self.allocated}
        return tuple(
            name for name in ("out", "aux", "bgrad") if name in present and (name != "aux" or self.aux_written)
        )

    @property
    def reads(self) -> tuple[str, ...]:
        writes = self.writes
        return tuple(name for name in self.operands if name not in writes)

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The pairs that must not overlap: each given output with every other given operand."""
        written = [name for name in self.writes if name in self.operands]
        return tuple(
            (one, other) for place, one in enumerate(written) for other in (*self.reads, *written[place + 1 :])
        )


class Shortcut:
    """A kept call of `matmul`: runs its plan again without making a request.

    `run(executor, a, b, c, bias, aux, bgrad, out, alpha, beta)` returns what the request would, or CACHE_MISS where
    operands overlap.
    """

    __slots__ = ("_form", "_pairs", "integers_only", "plan", "run")

    run: Callable[..., Any]

    def __init__(self, plan: Plan, request: MatmulRequest, key: Key) -> None:
        self.plan = plan
        self.integers_only = request.a.dtype is I8
        factors = [(t, written) for name, t, written in request.tensors() if name.startswith("scales.")]
        unallocated = request.unallocated()
        layouts = {name: layout for name, layout in zip(OPERANDS, key, strict=False) if layout is not None}
        self._form = Form(
            operands=tuple(layouts),
            allocated=tuple(unallocated),
            aux_written=request.plain_epilogue.writes_aux,
            has_beta=key[BETA] is not None,
            adds_out=request.c is None and bool(key[BETA]),
            scaled=bool(request.scale_arguments()),
        )
        self._pairs = self._form.pairs
        reads = tuple(tensor for tensor, written in factors if not written)
        writes = tuple(tensor for tensor, written in factors if written)
        self.run = self._make_run(layouts, unallocated, reads, writes, request.scale_arguments())

    def _make_run(self, layouts: dict[str, Layout], outputs: dict[str, Any], *factors: Any) -> Callable[..., Any]:
        bounds = [overlap_bounds(layouts[one], layouts[other]) for one, other in self._pairs]
        return _maker(self._form)(self.plan, outputs, bounds, *factors)

    def takes(self, alpha: Any, beta: Any) -> bool:
        """Whether alpha and beta need no check by a request: plain numbers, and whole ones where sums are integers."""
        if type(alpha) is not float and not _is_plain_int(alpha):
            return False
        if beta is not None and type(beta) is not float and not _is_plain_int(beta):
            return False
        return not self.integers_only or (_is_integer(alpha) and (beta is None or _is_integer(beta)))

    def resized(self, plan: Plan, shape: tuple[int, int], dtype: Dtype, layouts: dict[str, Layout]) -> Shortcut:
        """This shortcut with the plan of other extents, for a request without scales that writes only D."""
        other = Shortcut.__new__(Shortcut)
        other.plan, other.integers_only, other._form, other._pairs = plan, self.integers_only, self._form, self._pairs
        other.run = other._make_run(layouts, {"out": (shape, (shape[1], 1), dtype)}, (), (), ())
        return other


@cache
def _maker(form: Form) -> Callable[..., Callable[..., Any]]:
    """Generate the function that makes `Shortcut.run` for a form: each operand by name, without loops."""
    present = (*form.operands, *form.allocated)
    lines = [f"at_{name} = {name}.ptr" for name in form.operands]
    reads = f"({', '.join(form.reads)}, *scale_reads)" if form.scaled else f"({', '.join(form.reads)})"
    if "c" in form.operands and "out" in form.operands:  # C alone may be D
        other_reads = ", ".join(
            (*(name for name in form.reads if name != "c"), *(["*scale_reads"] if form.scaled else []))
        )
        reads = f"({other_reads}) if c is out else {reads}"
    writes = f"({', '.join(form.writes)}, {'*scale_writes' if form.scaled else ''})"
    meetings = [f"low_{n} < at_{other} - at_{one} < high_{n}" for n, (one, other) in enumerate(form.pairs)]
    meetings = [
        f"c is not out and {test}" if pair == ("out", "c") else test
        for pair, test in zip(form.pairs, meetings, strict=True)
    ]
    if meetings:
        lines += [f"if {' or '.join(meetings)}:", "    return CACHE_MISS"]
    lines += [
        line
        for name in form.allocated
        for line in (f"{name} = executor.empty(*made_{name})", f"at_{name} = {name}.ptr")
    ]
    lines += [f"reads, writes = {reads}, {writes}"]
    if form.scaled:
        lines += ["if may_overlap(reads, writes):", "    return CACHE_MISS"]
    # Convert alpha and beta as a request does: to float, for an int would be taken for an address, and -0.0 to 0.0.
    # Other floats stay the same objects.
    lines += ["if alpha.__class__ is not float or not alpha:", "    alpha = (alpha or 0.0) * 1.0"]
    if form.has_beta:
        lines += ["if beta.__class__ is not float or not beta:", "    beta = (beta or 0.0) * 1.0"]
    places = {name: f"at_{name}" if name in present else "0" for name in OPERANDS}
    if form.adds_out:
        places["c"] = "at_out"
    beta = "beta" if form.has_beta else "1.0" if "c" in present else "0.0"
    arguments = [*(places[name] for name in OPERANDS), "alpha", beta, *(["*scale_arguments"] if form.scaled else [])]
    lines += [f"executor.enqueue(plan, ({', '.join(arguments)}), reads, writes)"]
    lines += [f"return {form.writes[0]}" if len(form.writes) == 1 else f"return ({', '.join(form.writes)})"]
    source = [
        "def make(plan, made, bounds, scale_reads, scale_writes, scale_arguments):",
        *(f"    made_{name} = made['{name}']" for name in form.allocated),
        *(f"    low_{n}, high_{n}, _ = bounds[{n}]" for n in range(len(form.pairs))),
        f"    def run(executor, {', '.join(OPERANDS)}, alpha, beta):",
        *(f"        {line}" for line in lines),
        "    return run",
    ]
    scope: dict[str, Any] = {"CACHE_MISS": CACHE_MISS, "may_overlap": may_overlap}
    exec("\n".join(source), scope)
    maker: Callable[..., Callable[..., Any]] = scope["make"]
    return maker


class Pattern:
    """A call that others may differ from in extents only: two axes per matrix, D the only output, no C, no scales."""

    __slots__ = ("_dtype", "_plan", "_shortcut")

    def __init__(self, plan: CublasLtPlan, shortcut: Shortcut, dtype: Dtype) -> None:
        self._plan, self._shortcut, self._dtype = plan, shortcut, dtype

    def resized(self, a: Layout, b: Layout, bias: Layout | None, out: Layout | None) -> Shortcut | None:
        """The shortcut for other extents; None where they do not match each other, or the library refuses them."""
        (m, k), (rows, n) = a.shape, b.shape
        shape = (m, n)
        if rows != k or (out is not None and out.shape != shape) or (bias is not None and bias.shape != (n,)):
            return None
        if m > MAX_EXTENT or n > MAX_EXTENT or k > MAX_EXTENT:
            return None
        lowered = self._plan.lowered
        problem = lowered.problem
        d = Matrix(problem.d.dtype, n, m, n) if out is None else _matrix(out)
        first, second = (_matrix(b), _matrix(a)) if lowered.exchanged else (_matrix(a), _matrix(b))
        try:
            alignment = 256 if bias is None else bias.alignment
            plan = self._plan.resized(problem._replace(a=first, b=second, c=d, d=d, bias_alignment=alignment))
        except Refused:
            return None
        layouts = {"a": a, "b": b, "bias": bias, "out": out}
        present = {name: layout for name, layout in layouts.items() if layout is not None}
        return self._shortcut.resized(plan, shape, self._dtype, present)


def _matrix(layout: Layout) -> Matrix:
    """A dense two-axis operand, row-major or column-major, as cuBLASLt's column-major matrix."""
    (rows, columns), (down, right) = layout.shape, layout.strides
    if right == 1:
        return Matrix(layout.dtype.cuda, columns, rows, down, 0, layout.alignment)
    return Matrix(layout.dtype.cuda, rows, columns, right, 0, layout.alignment)


def recognize(executor: CudaExecutor, key: Key) -> Shortcut | None:
    """Make and keep the shortcut of a call with new layouts but a known pattern; None where no pattern fits."""
    name, shortcuts = _pattern(key), executor.shortcuts  # read first: a change of the table replaces the dictionary
    pattern = None if name is None else executor.patterns.get(name)
    if pattern is None or executor.closed:
        return None
    a, b, _, bias, _, _, out = key[: len(OPERANDS)]
    for other in (b, bias, out):
        if other is not None and other.device is not a.device:
            return None
    shortcut: Shortcut | None = pattern.resized(a, b, bias, out)
    if shortcut is not None:
        _keep(shortcuts, key, shortcut, MAX_SHORTCUTS)
    return shortcut


def cache_shortcut(executor: CudaExecutor, key: Key, request: MatmulRequest) -> None:
    """Keep a shortcut for the next call with the same key, and a pattern for the next one with other extents."""
    shortcuts, patterns, bound = executor.shortcuts, executor.patterns, request.bound
    if bound.plans is not executor.plans:
        return  # the table has changed since
    plan = bound.plan
    if isinstance(request.alpha, Tensor) or isinstance(request.beta, Tensor):
        return  # the plan reads them on the device, and the key does not distinguish them from numbers
    shortcut = Shortcut(plan, request, key)
    _keep(shortcuts, key, shortcut, MAX_SHORTCUTS)
    name = _pattern(key)
    if name is not None and name not in patterns and _is_size_independent(executor, request):
        _keep(patterns, name, Pattern(plan, shortcut, request.d_dtype), MAX_PATTERNS)


def _is_size_independent(executor: CudaExecutor, request: MatmulRequest) -> bool:
    """Whether the same request with other extents would get the same row and a plan that differs in extents only."""
    from dispatch.ops.matmul.cublaslt import CublasLtPlan  # already imported: a request of a GPU was bound

    plan = request.bound.plan
    if request.autotune or request.scales is not NO_SCALES or not isinstance(plan, CublasLtPlan):
        return False
    problem = plan.lowered.problem
    if problem.c != problem.d or problem.aux_ld or problem.batch != 1 or plan.lowered.empty_k:
        return False
    # No, where this row or one before it looks at extents: another row may take other extents. No, too, where the
    # library has refused a request that an earlier row takes: the library may accept other extents.
    before = executor.rows_before(request, plan)
    if not plan.row.rules or not all(SIZE_INDEPENDENT_RULES.issuperset(row.rules) for row in (*before, plan.row)):
        return False
    signature = request.signature()
    return not any(row.on(executor.device.arch) and accepts(row, request, signature) for row in before)


# The rules that do not look at extents. (`_kind` gives vectors a pattern only if they are aligned.)
SIZE_INDEPENDENT_RULES = frozenset((aligned_vectors, bgrad_order, full_precision, gelu_asked, no_fast_accum, no_scales))
ROW, COLUMN, LINE = range(3)


def _pattern(key: Key) -> tuple[Any, ...] | None:
    """The part of a call's key that is neither an extent nor a stride; None for a call that has no pattern."""
    a, b, c, bias, aux, bgrad, out = key[: len(OPERANDS)]
    epilogue = key[len(OPERANDS)]
    if c is not None or aux is not None or bgrad is not None or epilogue.writes_aux or epilogue.writes_bgrad:
        return None  # outputs other than D have shapes and strides of their own
    kinds = (_kind(a), _kind(b), _kind(bias), _kind(out))
    return None if None in kinds else (*kinds, *key[len(OPERANDS) :])


def _kind(layout: Layout | None) -> tuple[Any, ...] | None:
    """Dtype and order of a dense operand; None where only `lower` can decide, as for a single row or column."""
    if layout is None:
        return ()
    shape, strides = layout.shape, layout.strides
    if len(shape) == 2:
        (rows, columns), (down, right) = shape, strides
        if rows > 1 and columns > 1:
            if right == 1 and down >= columns:
                return layout.dtype.cuda, ROW, layout.readonly
            if down == 1 and right >= rows:
                return layout.dtype.cuda, COLUMN, layout.readonly
    elif len(shape) == 1 and strides[0] == 1 and shape[0] > 1 and layout.alignment >= ALIGNED:
        return layout.dtype.cuda, LINE, layout.readonly
    return None


def _is_plain_int(number: Any) -> bool:
    return type(number) is int and -MAX_INT_NUMBER <= number <= MAX_INT_NUMBER


def _is_integer(number: float) -> bool:
    return -MAX_INT_NUMBER <= number <= MAX_INT_NUMBER and float(number).is_integer()


def _keep(memory: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    if len(memory) >= most:
        memory.pop(next(iter(memory)))
    memory[key] = value
