"""The short ways of `matmul`: what it remembers of its calls, so that the next one needs no request.

A Shortcut is for the very same layouts: the plan is at hand. A Pattern is for layouts that differ from those of an
earlier call in their extents alone: the row is known, and only the plan is made. Both stand for what a request would
lead to, to the letter: what depends on anything else than the key says is not remembered. Whatever is unusual is left
to a request, which validates and explains. This module launches nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.core.operand_checks import MAX_EXTENT
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
    from dispatch.core.request import Plan
    from dispatch.device.layout import Layout
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.matmul.cublaslt import CublasLtPlan
    from dispatch.ops.matmul.request import MatmulRequest

__all__ = ["MAX_SHORTCUTS", "Shortcut", "recognize", "remember"]

MAX_SHORTCUTS = 4096  # on one executor; the oldest goes first, for each keeps its plan
MAX_PATTERNS = 256  # on one executor; each keeps the plan of its first call
MAX_WHOLE = 2**31 - 1  # numbers that are ints are taken up to here, where every type of alpha and beta holds them
Uses = tuple[Tensor, ...]
Key = tuple[Any, ...]  # of `matmul`: the layouts of a, b, c, bias, aux, bgrad and out, then the choices
OPERANDS = 7


class Shortcut:
    """What `matmul` must know of a plan to run it again without making a request."""

    __slots__ = (
        "aux_written",
        "bare",
        "plan",
        "scale_arguments",
        "scale_reads",
        "scale_writes",
        "several",
        "unallocated",
        "whole",
    )

    def __init__(self, plan: Plan, request: MatmulRequest) -> None:
        self.plan = plan
        self.aux_written = request.plain_epilogue.writes_aux
        self.several = self.aux_written or request.plain_epilogue.writes_bgrad
        self.unallocated = request.unallocated()
        self.whole = request.a.dtype is I8
        self.bare = {name for name, _, _ in request.tensors()} <= {"a", "b", "out"} and not self.several
        factors = [(t, written) for name, t, written in request.tensors() if name.startswith("scales.")]
        self.scale_reads = tuple(t for t, written in factors if not written)
        self.scale_writes = tuple(t for t, written in factors if written)
        self.scale_arguments = request.scale_arguments()

    def takes(self, alpha: Any, beta: Any) -> bool:
        """Whether these numbers need no look by a request: plain ones, and whole where sums are integers."""
        if type(alpha) is not float and not _is_plain(alpha):
            return False
        if beta is not None and type(beta) is not float and not _is_plain(beta):
            return False
        return not self.whole or (_is_whole(alpha) and (beta is None or _is_whole(beta)))

    def uses(self, a: Any, b: Any, c: Any, bias: Any, aux: Any, bgrad: Any, out: Any) -> tuple[Uses, Uses]:
        """The tensors that are read and those that are written."""
        if self.bare:
            return (a, b), (out,)
        read, written = (None, aux) if self.aux_written else (aux, None)
        # C alone may be D: another operand that is D must be seen to overlap it.
        reads = tuple(t for t in (a, b, None if c is out else c, bias, read) if t is not None)
        writes = tuple(t for t in (out, written, bgrad) if t is not None)
        return (*reads, *self.scale_reads), (*writes, *self.scale_writes)

    def resized(self, plan: Plan, shape: tuple[int, int]) -> Shortcut:
        """The same for a plan of other extents, of a request without scales that writes nothing but D."""
        twin = Shortcut.__new__(Shortcut)
        twin.plan = plan
        twin.aux_written, twin.several, twin.whole, twin.bare = self.aux_written, self.several, self.whole, self.bare
        twin.scale_reads = twin.scale_writes = twin.scale_arguments = ()
        twin.unallocated = {name: (shape, (shape[1], 1), dtype) for name, (_, _, dtype) in self.unallocated.items()}
        return twin


class Pattern:
    """The first call of many that differ in extents alone: two axes each, D the only output, no C and no scales."""

    __slots__ = ("_plan", "_shortcut")

    def __init__(self, plan: CublasLtPlan, shortcut: Shortcut) -> None:
        self._plan, self._shortcut = plan, shortcut

    def resized(self, a: Layout, b: Layout, bias: Layout | None, out: Layout | None) -> Shortcut | None:
        """The shortcut for other extents; None where they do not fit each other, or the library refuses them."""
        (m, k), (rows, n) = a.shape, b.shape
        shape = (m, n)
        if rows != k or (out is not None and out.shape != shape) or (bias is not None and bias.shape != (n,)):
            return None
        if m > MAX_EXTENT or n > MAX_EXTENT or k > MAX_EXTENT:
            return None
        lowered = self._plan.lowered
        known = lowered.problem
        d = Matrix(known.d.dtype, n, m, n) if out is None else _matrix(out)
        first, second = (_matrix(b), _matrix(a)) if lowered.exchanged else (_matrix(a), _matrix(b))
        try:
            alignment = 256 if bias is None else bias.alignment
            plan = self._plan.resized(known._replace(a=first, b=second, c=d, d=d, bias_alignment=alignment))
        except Refused:
            return None
        return self._shortcut.resized(plan, shape)


def _matrix(layout: Layout) -> Matrix:
    """The column-major matrix that a dense row-major or column-major operand of two axes is."""
    (rows, columns), (down, right) = layout.shape, layout.strides
    if right == 1:
        return Matrix(layout.dtype.cuda, columns, rows, down, 0, layout.alignment)
    return Matrix(layout.dtype.cuda, rows, columns, right, 0, layout.alignment)


def recognize(executor: CudaExecutor, key: Key) -> Shortcut | None:
    """The shortcut of a call whose layouts were never seen but whose pattern was; it is remembered."""
    name = _pattern(key)
    pattern = None if name is None else executor.patterns.get(name)
    if pattern is None or executor.closed:
        return None
    a, b, _, bias, _, _, out = key[:OPERANDS]
    for other in (b, bias, out):
        if other is not None and other.device is not a.device:
            return None
    shortcut: Shortcut | None = pattern.resized(a, b, bias, out)
    if shortcut is not None:
        _keep(executor.shortcuts, key, shortcut, MAX_SHORTCUTS)
    return shortcut


def remember(executor: CudaExecutor, key: Key, request: MatmulRequest) -> None:
    """Keep what the next call of the same key needs, and the next of the same pattern."""
    plan = request.bound.plan
    if isinstance(request.alpha, Tensor) or isinstance(request.beta, Tensor):
        return  # its plan reads them on the device, and the key does not tell them from numbers
    shortcut = Shortcut(plan, request)
    _keep(executor.shortcuts, key, shortcut, MAX_SHORTCUTS)
    name = _pattern(key)
    if name is not None and name not in executor.patterns and _is_sizeless(executor, request):
        _keep(executor.patterns, name, Pattern(plan, shortcut), MAX_PATTERNS)


def _is_sizeless(executor: CudaExecutor, request: MatmulRequest) -> bool:
    """Whether the same request of other extents leads to the same row, and to a plan that differs in extents alone."""
    from dispatch.ops.matmul.cublaslt import CublasLtPlan  # a GPU's request was bound: it is in by now

    plan = request.bound.plan
    if request.autotune or request.scales is not NO_SCALES or not isinstance(plan, CublasLtPlan):
        return False
    problem = plan.lowered.problem
    if problem.c != problem.d or problem.aux_ld or problem.batch != 1 or plan.lowered.empty_k:
        return False
    # Where a row before this one, or this one, looks at extents, other extents may be another row's. Where the library
    # refused what a row before this one takes, it may take other extents of it.
    before = executor.rows_before(request, plan)
    if not plan.row.rules or not all(SIZELESS.issuperset(row.rules) for row in (*before, plan.row)):
        return False
    signature = request.signature()
    return not any(row.on(executor.device.arch) and accepts(row, request, signature) for row in before)


# The rules that do not look at extents; `_kind` has a pattern for aligned vectors alone.
SIZELESS = frozenset((aligned_vectors, bgrad_order, full_precision, gelu_asked, no_fast_accum, no_scales))
ROW, COLUMN, LINE = range(3)


def _pattern(key: Key) -> tuple[Any, ...] | None:
    """What of a call's key is neither an extent nor a step; None for a call that has no pattern."""
    a, b, c, bias, aux, bgrad, out = key[:OPERANDS]
    epilogue = key[OPERANDS]
    if c is not None or aux is not None or bgrad is not None or epilogue.writes_aux or epilogue.writes_bgrad:
        return None  # what is written beside D has a shape and steps of its own
    kinds = (_kind(a), _kind(b), _kind(bias), _kind(out))
    return None if None in kinds else (*kinds, *key[OPERANDS:])


def _kind(layout: Layout | None) -> tuple[Any, ...] | None:
    """Dtype and order of a dense operand; None where only `lower` can tell, as for a single row or column."""
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


def _is_plain(number: Any) -> bool:
    return type(number) is int and -MAX_WHOLE <= number <= MAX_WHOLE


def _is_whole(number: float) -> bool:
    return -MAX_WHOLE <= number <= MAX_WHOLE and float(number).is_integer()


def _keep(memory: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    if len(memory) >= most:
        memory.pop(next(iter(memory)))
    memory[key] = value
