"""Fourier transforms with callbacks by cuFFT: one transform that reads and writes through them, as far as it takes any.

cuFFT counts in dense operands: of a's extents, in the order in which `a` lies in memory where a plan states that, else
with the transformed axes innermost. A load callback is there wherever cuFFT is not to read `a` as it lies, a store
callback where it is not to write `out`; both are all that reads and writes these. cuFFT still writes what is between
its kernels into its output, and of C2R into its input: where such is not `out`, it is scratch memory.

Of more than three axes, of none with more than one point, where cuFFT takes no callbacks or refuses these, and where it
takes less time, the same functions are a pass before and a pass behind a transform in scratch memory.
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
            why = f"no single transform of cuFFT is over {len(work.nontrivial_axes)} axes"
        except Refused as refused:  # cuFFT has no plan with these callbacks: it may have one without them
            why = str(refused)
    log("not fused", {"row": row.name, "cause": why})
    steps = Steps(executor, row, work.operands)
    _with_passes(work, steps, executor)
    return steps.plan()


def slower(request: CallbackDftRequest) -> str:
    """Why callbacks take longer in cuFFT's kernels than passes around these; "" where they do not, as on an H100."""
    if request.store is not None:
        return "cuFFT writes through a callback element by element, which takes longer than a pass behind it"
    if max(request.points, default=0) >= LONG:
        return f"a transform of {LONG} points or more reads its operand more than once through a callback"
    return ""


class _CallbackProblem:
    """What a request comes to for cuFFT: its kind, its axes, and what each side does beside the user's lines."""

    def __init__(self, request: CallbackDftRequest) -> None:
        self.request, self.kind = request, request.kind
        self.operands = len(request.reads) + len(request.writes)
        last = request.transformed[-1] if request.transformed else None
        self.nontrivial_axes = tuple(axis for axis, n in zip(request.transformed, request.points, strict=True) if n > 1)
        # Real numbers along an axis of one point are complex ones: the others are transformed.
        self.halved = last if last in self.nontrivial_axes and self.kind != DftKind.C2C else None
        self.others = (
            tuple(axis for axis in self.nontrivial_axes if axis != last)
            if self.kind != DftKind.C2C
            else self.nontrivial_axes
        )
        self.given = view_of(request.layout_of("a"), 0)
        self.wanted = view_of(request.layout_of("out"), request.place_of("out"))
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
        operands, words = _operands(callback, "load", request, self.given)
        side = CallbackSide(
            name="load",
            code="" if callback is None else callback.code,
            operands=operands,
            tensor=self.given,
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
        operands, words = _operands(callback, "store", request, self.wanted)
        side = CallbackSide(
            name="store",
            code="" if callback is None else callback.code,
            operands=operands,
            tensor=self.wanted,
            dense=dense,
            real=request.real,
            number=self.result,
            value=request.found,
            is_direct=is_direct,
            factor=request.factor,
            conj=self.conj_store,
        )
        return BoundSide(side, (CallbackWord(self.wanted.operand), *words))


def _operands(
    callback: Callback | None, side: str, request: CallbackDftRequest, memory: View
) -> tuple[tuple[Operand, ...], tuple[CallbackWord, ...]]:
    """What the user's lines name, and the words in which it is found."""
    operands, words = [], []
    for name, given in ({} if callback is None else callback.operands).items():
        kind: Dtype | str
        strides = None
        if callback is not None and name in callback.tensors:
            layout = request.layout_of(f"{side}.{name}")
            kind, word = layout.dtype, CallbackWord(request.place_of(f"{side}.{name}"))
            if name in callback.broadcast:
                strides = broadcast_strides(layout, len(memory.shape))
        else:
            number: Any = given
            whole = "int" if isinstance(given, int) and -SMALL <= given < SMALL else "long long"
            kind = "Complex" if isinstance(given, complex) else "Real" if isinstance(given, float) else whole
            word = CallbackWord(None, number=number)
        operands.append(Operand(name, kind, strides))
        words.append(word)
    return tuple(operands), tuple(words)


def broadcast_strides(layout: Layout, rank: int) -> tuple[int, ...]:
    """The strides of a tensor along the axes of another that it broadcasts to."""
    own = (0 if extent == 1 else step for extent, step in zip(layout.shape, layout.strides, strict=True))
    return (*(0,) * (rank - len(layout.shape)), *own)


# -- one transform with callbacks -------------------------------------------------------------------------------------
def _fused(work: _CallbackProblem, steps: Steps, executor: CudaExecutor) -> bool:
    """Add the transform that does all; False where no single one of cuFFT does."""
    request = work.request
    if not work.nontrivial_axes or len(work.nontrivial_axes) > RANK:
        return False
    found = _dense_spec(work)
    if found is None:
        return False
    spec, source, target = found
    has_out = _is_dense(work.wanted, target)
    stores = request.store is not None or work.conj_store or not has_out
    is_own = (
        _size(work.given) > 0
        and work.given.dtype is work.number
        and work.given.alignment >= COMPLEX[work.number].itemsize
    )
    has_in = is_own and work.kind != DftKind.C2R
    loads = request.load is not None or work.hermitian is not None or not (has_in and _is_dense(work.given, source))
    # The factor goes where there is a callback anyway, behind the transform rather than before it.
    factor = request.factor if loads and not stores else 1.0
    stores = stores or request.factor != factor
    if has_out:
        target = target._replace(operand=work.wanted.operand)
    else:
        target = steps.scratch(work.result, (_size(target),), (0,))
    if has_in:
        source = source._replace(operand=0)
    else:
        # Of C2R cuFFT leaves there what is between its kernels; else it reads nothing but through the callback.
        count = _size(source) if work.kind == DftKind.C2R else 1
        source = steps.scratch(work.number, (count,), (0,))
    given = [work.load(found[1], is_direct=has_in, factor=factor)] if loads else []
    given += [work.store(found[2], is_direct=has_out)] if stores else []
    routines = tuple(callback_routine(one.side, str(executor.device.arch)) for one in given)
    spec = spec._replace(source=source, target=target)
    steps.append(FusedTransform(executor, spec, given, routines, forward=work.forward))
    return True


def _dense_spec(work: _CallbackProblem) -> tuple[TransformSpec, View, View] | None:
    """A plan over dense operands in one call, and these: as `a` or `out` lies, else the transformed axes innermost."""
    shapes = (work.request.read, work.request.made)
    group = sorted(work.others, key=lambda axis: -abs(work.given.strides[axis]))
    group += [] if work.halved is None else [work.halved]
    for order in (_order(work.given), _order(work.wanted), None):
        views = [
            dense_view(-1, 0, dtype, shape, tuple(group) if order is None else order, ALIGNMENT)
            for dtype, shape in zip((work.number, work.result), shapes, strict=True)
        ]
        spec = transform_spec(group, views[0], views[1], most=1)
        if spec is not None:
            return spec, views[0], views[1]
    return None


def _order(view: View) -> tuple[int, ...]:
    """The axes from the one with the largest steps in memory to that with the smallest."""
    return tuple(sorted(range(len(view.shape)), key=lambda axis: -abs(view.strides[axis])))


def _size(view: View) -> int:
    return math.prod(view.shape)


def _is_dense(view: View, dense: View) -> bool:
    """Whether a tensor lies as cuFFT counts, so that it may read or write there."""
    axes = zip(view.shape, view.strides, dense.strides, strict=True)
    lies_so = view.shape == dense.shape and all(extent == 1 or own == other for extent, own, other in axes)
    return lies_so and view.dtype is dense.dtype and view.alignment >= COMPLEX[dense.dtype].itemsize


# -- a pass before, a transform, a pass behind ------------------------------------------------------------------------
def _with_passes(work: _CallbackProblem, steps: Steps, executor: CudaExecutor) -> None:
    """Add a transform and a pass on each side that has something to do beside it."""
    request = work.request
    reads, writes = _reads_given(work), _writes_wanted(work)
    factor = request.factor
    if reads and factor != 1:
        writes = False  # else the pass that reads has it
    source = work.given
    if not reads:
        source = steps.scratch(work.number, request.read, request.transformed)
        load = work.load(source, is_direct=True, factor=factor if writes else 1.0)
        steps.append(CallbackPass(executor, load, source.operand, source.offset))
    target = work.wanted
    if not writes:
        is_new = reads or work.halved is not None
        target = steps.scratch(work.result, request.made, request.transformed) if is_new else source
    if work.kind == DftKind.C2R and work.halved is not None:
        steps.transform(checked_chain(chain_with_last(work.others, work.halved, source, target)), forward=work.forward)
    elif work.nontrivial_axes:
        chain = transform_chain(work.others, source, target, work.halved, most=ANY)
        steps.transform(checked_chain(chain), forward=work.forward)
    if not writes:
        steps.append(CallbackPass(executor, work.store(target, is_direct=True), target.operand, target.offset))


def _reads_given(work: _CallbackProblem) -> bool:
    """Whether cuFFT reads the tensor itself: nothing is done before, and it lies as memory of ours would."""
    request = work.request
    if not work.nontrivial_axes or request.load is not None or work.conj_load or work.kind == DftKind.C2R:
        return False
    return _is_dense(work.given, dense_view(-1, 0, work.number, request.read, request.transformed, ALIGNMENT))


def _writes_wanted(work: _CallbackProblem) -> bool:
    """Whether cuFFT writes the result itself, likewise."""
    request = work.request
    if not work.nontrivial_axes or request.store is not None or work.conj_store:
        return False
    return _is_dense(work.wanted, dense_view(-1, 0, work.result, request.made, request.transformed, ALIGNMENT))


# -- callbacks that do not compile ------------------------------------------------------------------------------------
def compile_error(request: CallbackDftRequest, error: NvrtcError) -> BadRequest | NvrtcError:
    """The user's line that the compiler complains of, as an error about the callback; else the compiler's own."""
    found = LINE.search(error.log or "")
    callback: Callback | None = getattr(request, found.group(1)) if found else None
    if found is None or callback is None:
        return error
    side, lines = found.group(1), callback.code.rstrip().splitlines()
    number = min(int(found.group(2)), len(lines))  # what the last line lacks is told of the next
    line = lines[number - 1].strip()
    given = f"{side}.code, of which line {number}, `{line}`, does not compile: {found.group(3)}"
    names = ", ".join(
        operand.declaration for operand in _operands(callback, side, request, view_of_side(request, side))[0]
    )
    return BadRequest(side, given, f"CUDA C++ that returns a number{'; it has ' + names if names else ''}")


def view_of_side(request: CallbackDftRequest, side: str) -> View:
    """The tensor that a callback reads or writes."""
    return view_of(request.layout_of("a" if side == "load" else "out"), 0)
