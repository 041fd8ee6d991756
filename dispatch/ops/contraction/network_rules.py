"""The rules for a network of tensors in one launch of this library's kernel: each returns "needs …, has …", or ""."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.errors import Refused
from dispatch.keys import BF16, C64, C128, F16, F32, F64, Compute, Dtype, member
from dispatch.ops.contraction.einsum_rules import strides_along_modes
from dispatch.ops.contraction.network import (
    MAX_ELEMENTS,
    MAX_OPERANDS,
    MAX_STRIDES,
    elements_of,
    program_of,
)
from dispatch.ops.contraction.network_cost import CYCLES_PER_US
from dispatch.ops.contraction.rules import nonnegative_strides

if TYPE_CHECKING:
    from dispatch.ops.contraction.einsum import EinsumRequest
    from dispatch.ops.contraction.network import Program

__all__ = ["faster_than_calls", "few_elements", "usual_precision"]

# Microseconds on an H200, to compare one launch with library calls in a graph. For 52 lattices, chains and states of 2
# to 24 tensors with extents of 2 to 64 these choose the faster of the two, except for one (5.1 us, 4.6 by calls).
LAUNCH_US = 1.3  # of a kernel that only reads an empty program
CALL_US = 3.2  # of one step by a library: 1.6 to 6.5
MIN_STEPS = 2  # for a single pair a call takes 2.2 us, and the launch 2.6
MAX_SHARED_BYTES = 160 << 10  # with more, intermediate results are in global memory

COMPUTES: dict[Dtype, Compute] = {
    **dict.fromkeys((F16, BF16, F32, C64), Compute.COMPUTE_32F),
    **dict.fromkeys((F64, C128), Compute.COMPUTE_64F),
}


def usual_precision(request: EinsumRequest) -> str:
    """The precision is f32, or f64 for f64 and c128; and the request asks for no kernel of cuTENSOR."""
    if request.jit:
        return "needs jit False, has True, which only cuTENSOR supports"
    compute: Any = member(request.compute)
    usual = COMPUTES[request.dtype]
    return "" if compute in (None, usual) else f"needs compute {usual.name} for {request.dtype}, has {compute.name}"


def few_elements(request: EinsumRequest) -> str:
    """At most as many operands and elements as one launch supports."""
    if len(request.operands) > MAX_OPERANDS:
        return f"needs at most {MAX_OPERANDS} operands, has {len(request.operands)}"
    if (count := elements_of(request)) > MAX_ELEMENTS:
        return f"needs at most {MAX_ELEMENTS:,} elements of all operands and intermediate results, has {count:,}"
    for name, tensor, _ in request.tensors():
        layout = tensor.layout
        if layout.size and (layout.high - layout.low) // layout.dtype.itemsize >= MAX_STRIDES:
            return f"needs elements of {name} within {MAX_STRIDES:,} of each other, has {layout}"
    return ""


def faster_than_calls(request: EinsumRequest) -> str:
    """Faster in one block, by estimate, than calls of libraries; not required if the request names this library."""
    if elements_of(request) > MAX_ELEMENTS:  # `few_elements` reports it
        return ""
    try:
        program = program_of(request)
    except Refused as refused:
        return f"needs other steps: {refused}"
    if request.library == "own" or request.autotune:
        return ""
    reason = _why_slower(request, program)
    # If the libraries refuse the request too, report their reason rather than the times.
    library_reason = nonnegative_strides(request) or strides_along_modes(request) if reason else ""
    return f"{library_reason}, or pass library='own'" if library_reason else reason


def _why_slower(request: EinsumRequest, program: Program) -> str:
    """The reason why library calls are faster, or why the launch does not fit in shared memory; "" for neither."""
    nbytes = program.elements * max(request.dtype.itemsize, F32.itemsize)
    if nbytes > MAX_SHARED_BYTES:
        most = f"{MAX_SHARED_BYTES:,} bytes of operands and intermediate results at a time"
        return f"needs at most {most}, or library own, has {nbytes:,}"
    ours, calls = LAUNCH_US + program.cycles / CYCLES_PER_US, len(request.schedule.steps)
    if calls < MIN_STEPS:
        return f"needs {MIN_STEPS} steps or more, or library own or autotune, has {calls}"
    if ours <= CALL_US * calls:
        return ""
    return (
        f"needs tensors so small that one block takes at most {CALL_US * calls:.3g} us, or library own or autotune, has"
        f" tensors that take {ours:.3g} us"
    )
