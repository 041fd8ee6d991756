"""Fourier transforms with callbacks by cuFFT: one transform that reads and writes through them, where supported.

cuFFT's plan has dense operands with a's extents, in the memory order of `a` if a plan describes that, else with the
transformed axes innermost. There is a load callback unless cuFFT can read `a` directly, and a store callback unless it
can write `out` directly; all accesses to the tensors are through these. cuFFT still writes intermediate results of its
kernels to its output, and for C2R to its input: if that is not `out`, it is scratch memory.

The same functions run as a pass before and a pass after a transform in scratch memory: for more than three axes, for
none with more than one point, where cuFFT does not support callbacks or refuses these, and where that is faster.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from cudabind.errors import NvrtcError
from dispatch.errors import BadRequest, Refused
from dispatch.libraries.cufft.callback_source import CallbackSide, Operand
from dispatch.libraries.cufft.callbacks import (
    BoundSide,
    CallbackPass,
    CallbackWord,
    FusedTransform,
    callback_routine,
    why_not,
)
from dispatch.libraries.cufft.layouts import COMPLEX, View, dense_view, transform_chain, transform_spec, view_of
from dispatch.libraries.cufft.moves import Hermitian
from dispatch.libraries.cufft.steps import ALIGNMENT, Steps
from dispatch.logs import log
from dispatch.ops.fft.cufft import ANY, RANK, chain_with_last, checked_chain
from dispatch.ops.fft.request import DftKind

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.layout import Layout
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype
    from dispatch.libraries.cufft.layouts import TransformSpec
    from dispatch.ops.fft.callback import Callback
    from dispatch.ops.fft.callback_dft import CallbackDftRequest

__all__ = ["plan"]

SMALL = 1 << 31
LONG = 4096  # points along an axis
LINE = re.compile(r"^(load|store)\((\d+)\): (?:error|catastrophic error)[^:]*: (.*)$", re.MULTILINE)


def plan(request: CallbackDftRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; BadRequest, with the line, for a callback that does not compile."""
    if not request.layout_of("out").size:
        return Steps(executor, row, 0).plan()
    try:
        return _plan(request, executor, row)
    except NvrtcError as error:
        raise compile_error(request, error) from error


def _plan(request: CallbackDftRequest, executor: CudaExecutor, row: Row) -> Plan:
    work, why = _CallbackProblem(request), why_not() or slower(request)
    if not why:
        try:
            steps = Steps(executor, row, work.operands)
            if _fused(work, steps, executor):
                return steps.plan()
            why = f"cuFFT has no single transform over {len(work.nontrivial_axes)} axes"
        except Refused as refused:  # cuFFT has no plan with these callbacks, but may have one without them
            why = str(refused)
    log("not fused", {"row": row.name, "cause": why})
    steps = Steps(executor, row, work.operands)
    _with_passes(work, steps, executor)
    return steps.plan()


def slower(request: CallbackDftRequest) -> str:
    """Why callbacks in cuFFT's kernels are slower than passes around them (on an H100); "" if they are not."""
    if request.store is not None:
        return "cuFFT calls a store callback element by element, which takes longer than a separate pass"
    if max(request.points, default=0) >= LONG:
        return f"a transform of {LONG} points or more reads its operand more than once through a callback"
    return ""


class _CallbackProblem:
    """A request in cuFFT's terms: its kind, its axes, and what each side does in addition to the user's lines."""

    def __init__(self, request: CallbackDftRequest) -> None:
        self.request, self.kind = request, request.kind
        self.operands = len(request.reads) + len(request.writes)
        last = request.transformed[-1] if request.transformed else None
        self.nontrivial_axes = tuple(axis for axis, n in zip(request.transformed, request.points, strict=True) if n > 1)
        # With one point along the halved axis real numbers count as complex ones, and the other axes are transformed.
        self.halved = last if last in self.nontrivial_axes and self.kind != DftKind.C2C else None
        self.others = (
            tuple(axis for axis in self.nontrivial_axes if axis != last)
            if self.kind != DftKind.C2C
            else self.nontrivial_axes
        )
        self.input = view_of(request.layout_of("a"), 0)
        self.output = view_of(request.layout_of("out"), request.place_of("out"))
        spectrum = COMPLEX[request.real]
        self.number = request.real if self.kind == DftKind.R2C and self.halved is not None else spectrum
        self.result = request.real if self.kind == DftKind.C2R and self.halved is not None else spectrum
        if self.kind == DftKind.C2R:
            self.forward, self.conj_load = False, not request.inverse
        else:
            self.forward, self.conj_load = self.halved is not None or not request.inverse, False
        self.conj_store = self.kind == DftKind.R2C and self.halved is not None and request.inverse
        self.hermitian = None
        if self.kind == DftKind.C2R:
            self.hermitian = Hermitian(request.transformed[-1], request.points[-1], self.others)

    def load(self, dense: View, *, is_direct: bool, factor: float = 1.0) -> BoundSide:
        """The side that reads."""
        callback, request = self.request.load, self.request
        operands, words = _operands(callback, "load", request, self.input)
        side = CallbackSide(
            name="load",
            code="" if callback is None else callback.code,
            operands=operands,
            tensor=self.input,
            dense=dense,
            real=request.real,
            number=self.number,
            value=request.number,
            is_direct=is_direct,
            factor=factor,
            conj=self.conj_load,
            hermitian=self.hermitian,
        )
        return BoundSide(side, (CallbackWord(0), *words))

    def store(self, dense: View, *, is_direct: bool) -> BoundSide:
        """The side that writes, with the transform's factor."""
        callback, request = self.request.store, self.request
        operands, words = _operands(callback, "store", request, self.output)
        side = CallbackSide(
            name="store",
            code="" if callback is None else callback.code,
            operands=operands,
            tensor=self.output,
            dense=dense,
            real=request.real,
            number=self.result,
            value=request.found,
            is_direct=is_direct,
            factor=request.factor,
            conj=self.conj_store,
        )
        return BoundSide(side, (CallbackWord(self.output.operand), *words))


def _operands(
    callback: Callback | None, side: str, request: CallbackDftRequest, memory: View
) -> tuple[tuple[Operand, ...], tuple[CallbackWord, ...]]:
    """The operands that the user's lines name, and the words that hold them."""
    operands, words = [], []
    for name, value in ({} if callback is None else callback.operands).items():
        kind: Dtype | str
        strides = None
        if callback is not None and name in callback.tensors:
            layout = request.layout_of(f"{side}.{name}")
            kind, word = layout.dtype, CallbackWord(request.place_of(f"{side}.{name}"))
            if name in callback.broadcast:
                strides = broadcast_strides(layout, len(memory.shape))
        else:
            number: Any = value
            integer = "int" if isinstance(value, int) and -SMALL <= value < SMALL else "long long"
            kind = "Complex" if isinstance(value, complex) else "Real" if isinstance(value, float) else integer
            word = CallbackWord(None, number=number)
        operands.append(Operand(name, kind, strides))
        words.append(word)
    return tuple(operands), tuple(words)


def broadcast_strides(layout: Layout, rank: int) -> tuple[int, ...]:
    """The strides of a tensor along the axes of another that it broadcasts to."""
    strides = (0 if extent == 1 else step for extent, step in zip(layout.shape, layout.strides, strict=True))
    return (*(0,) * (rank - len(layout.shape)), *strides)


# -- one transform with callbacks -------------------------------------------------------------------------------------
def _fused(work: _CallbackProblem, steps: Steps, executor: CudaExecutor) -> bool:
    """Add the transform that does everything; False if no single cuFFT transform does."""
    request = work.request
    if not work.nontrivial_axes or len(work.nontrivial_axes) > RANK:
        return False
    dense_spec = _dense_spec(work)
    if dense_spec is None:
        return False
    spec, source, target = dense_spec
    has_out = _is_dense(work.output, target)
    stores = request.store is not None or work.conj_store or not has_out
    is_own = (
        _size(work.input) > 0
        and work.input.dtype is work.number
        and work.input.alignment >= COMPLEX[work.number].itemsize
    )
    has_in = is_own and work.kind != DftKind.C2R
    loads = request.load is not None or work.hermitian is not None or not (has_in and _is_dense(work.input, source))
    # The factor goes where there is a callback anyway, preferably after the transform.
    factor = request.factor if loads and not stores else 1.0
    stores = stores or request.factor != factor
    if has_out:
        target = target._replace(operand=work.output.operand)
    else:
        target = steps.scratch(work.result, (_size(target),), (0,))
    if has_in:
        source = source._replace(operand=0)
    else:
        # For C2R cuFFT writes intermediate results there; else it accesses its input only through the callback.
        count = _size(source) if work.kind == DftKind.C2R else 1
        source = steps.scratch(work.number, (count,), (0,))
    sides = [work.load(dense_spec[1], is_direct=has_in, factor=factor)] if loads else []
    sides += [work.store(dense_spec[2], is_direct=has_out)] if stores else []
    routines = tuple(callback_routine(one.side, str(executor.device.arch)) for one in sides)
    spec = spec._replace(source=source, target=target)
    steps.append(FusedTransform(executor, spec, sides, routines, forward=work.forward))
    return True


def _dense_spec(work: _CallbackProblem) -> tuple[TransformSpec, View, View] | None:
    """A plan over dense operands in one call, and these; ordered like `a` or `out`, else transformed axes innermost."""
    shapes = (work.request.read, work.request.result_shape)
    group = sorted(work.others, key=lambda axis: -abs(work.input.strides[axis]))
    group += [] if work.halved is None else [work.halved]
    for order in (_order(work.input), _order(work.output), None):
        views = [
            dense_view(-1, 0, dtype, shape, tuple(group) if order is None else order, ALIGNMENT)
            for dtype, shape in zip((work.number, work.result), shapes, strict=True)
        ]
        spec = transform_spec(group, views[0], views[1], most=1)
        if spec is not None:
            return spec, views[0], views[1]
    return None


def _order(view: View) -> tuple[int, ...]:
    """The axes from the largest stride in memory to the smallest."""
    return tuple(sorted(range(len(view.shape)), key=lambda axis: -abs(view.strides[axis])))


def _size(view: View) -> int:
    return math.prod(view.shape)


def _is_dense(view: View, dense: View) -> bool:
    """Whether a tensor has the dense operand's layout, so that cuFFT may read or write it directly."""
    axes = zip(view.shape, view.strides, dense.strides, strict=True)
    has_layout = view.shape == dense.shape and all(extent == 1 or stride == other for extent, stride, other in axes)
    return has_layout and view.dtype is dense.dtype and view.alignment >= COMPLEX[dense.dtype].itemsize


# -- a pass before, a transform, a pass after -------------------------------------------------------------------------
def _with_passes(work: _CallbackProblem, steps: Steps, executor: CudaExecutor) -> None:
    """Add a transform, and a pass on each side that needs one."""
    request = work.request
    reads, writes = _reads_given(work), _writes_wanted(work)
    factor = request.factor
    if reads and factor != 1:
        writes = False  # else the pass that reads multiplies by the factor
    source = work.input
    if not reads:
        source = steps.scratch(work.number, request.read, request.transformed)
        load = work.load(source, is_direct=True, factor=factor if writes else 1.0)
        steps.append(CallbackPass(executor, load, source.operand, source.offset))
    target = work.output
    if not writes:
        is_new = reads or work.halved is not None
        target = steps.scratch(work.result, request.result_shape, request.transformed) if is_new else source
    if work.kind == DftKind.C2R and work.halved is not None:
        steps.transform(checked_chain(chain_with_last(work.others, work.halved, source, target)), forward=work.forward)
    elif work.nontrivial_axes:
        chain = transform_chain(work.others, source, target, work.halved, most=ANY)
        steps.transform(checked_chain(chain), forward=work.forward)
    if not writes:
        steps.append(CallbackPass(executor, work.store(target, is_direct=True), target.operand, target.offset))


def _reads_given(work: _CallbackProblem) -> bool:
    """Whether cuFFT reads the tensor itself: nothing is done before, and its layout is that of scratch memory."""
    request = work.request
    if not work.nontrivial_axes or request.load is not None or work.conj_load or work.kind == DftKind.C2R:
        return False
    return _is_dense(work.input, dense_view(-1, 0, work.number, request.read, request.transformed, ALIGNMENT))


def _writes_wanted(work: _CallbackProblem) -> bool:
    """Whether cuFFT writes the result itself, likewise."""
    request = work.request
    if not work.nontrivial_axes or request.store is not None or work.conj_store:
        return False
    return _is_dense(work.output, dense_view(-1, 0, work.result, request.result_shape, request.transformed, ALIGNMENT))


# -- callbacks that do not compile ------------------------------------------------------------------------------------
def compile_error(request: CallbackDftRequest, error: NvrtcError) -> BadRequest | NvrtcError:
    """An error with the line of the callback that does not compile; without such a line the compiler's own error."""
    match = LINE.search(error.log or "")
    callback: Callback | None = getattr(request, match.group(1)) if match else None
    if match is None or callback is None:
        return error
    side, lines = match.group(1), callback.code.rstrip().splitlines()
    number = min(int(match.group(2)), len(lines))  # errors about the end of the last line name the next line
    line = lines[number - 1].strip()
    actual = f"{side}.code, of which line {number}, `{line}`, does not compile: {match.group(3)}"
    names = ", ".join(
        operand.declaration for operand in _operands(callback, side, request, view_of_side(request, side))[0]
    )
    return BadRequest(side, actual, f"CUDA C++ that returns a number{'; it has ' + names if names else ''}")


def view_of_side(request: CallbackDftRequest, side: str) -> View:
    """The tensor that a callback reads or writes."""
    return view_of(request.layout_of("a" if side == "load" else "out"), 0)
