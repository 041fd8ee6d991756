"""When a network of tensors is one launch of this library's kernel: each rule gives "needs …, has …", or ""."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.errors import Refused
from dispatch.keys import BF16, C64, C128, F16, F32, F64, Compute, Dtype, member
from dispatch.ops.contraction.einsum_rules import summed_along
from dispatch.ops.contraction.network import (
    MOST_ELEMENTS,
    MOST_OPERANDS,
    MOST_STRIDES,
    elements_of,
    program_of,
)
from dispatch.ops.contraction.network_cost import CLOCK
from dispatch.ops.contraction.rules import steps_ahead

if TYPE_CHECKING:
    from dispatch.ops.contraction.einsum import EinsumRequest
    from dispatch.ops.contraction.network import Program

__all__ = ["as_precise", "few_elements", "less_than_calls"]

# Microseconds of an H200, by which one launch is held against calls of libraries in a graph. Of 52 lattices, chains and
# states of 2 to 24 tensors with extents of 2 to 64 all but one have the faster way (5.1 us, and 4.6 by calls).
LAUNCH = 1.3  # of a kernel that has nothing to do, and reads its program
CALL = 3.2  # of a step by a library: 1.6 to 6.5
FEWEST = 2  # steps: of a single pair a call takes 2.2 us, and the launch 2.6
NEAR = 160 << 10  # bytes of shared memory, beyond which what is on the way is far from the multiprocessor

COMPUTES: dict[Dtype, Compute] = {
    **dict.fromkeys((F16, BF16, F32, C64), Compute.COMPUTE_32F),
    **dict.fromkeys((F64, C128), Compute.COMPUTE_64F),
}


def as_precise(request: EinsumRequest) -> str:
    """Computed in f32, or in f64 of f64 and c128; and no kernel of cuTENSOR's asked for."""
    if request.jit:
        return "needs jit False, has True: that is cuTENSOR's"
    asked: Any = member(request.compute)
    usual = COMPUTES[request.dtype]
    return "" if asked in (None, usual) else f"needs compute {usual.name} for {request.dtype}, has {asked.name}"


def few_elements(request: EinsumRequest) -> str:
    """So many operands and elements as one launch takes."""
    if len(request.operands) > MOST_OPERANDS:
        return f"needs at most {MOST_OPERANDS} operands, has {len(request.operands)}"
    if (count := elements_of(request)) > MOST_ELEMENTS:
        return f"needs at most {MOST_ELEMENTS:,} elements of all operands and results on the way, has {count:,}"
    for name, tensor, _ in request.tensors():
        layout = tensor.layout
        if layout.size and (layout.high - layout.low) // layout.dtype.itemsize >= MOST_STRIDES:
            return f"needs elements of {name} within {MOST_STRIDES:,} of each other, has {layout}"
    return ""


def less_than_calls(request: EinsumRequest) -> str:
    """Less time in one block, by estimate, than calls of libraries take; whoever asks for this library has any."""
    if elements_of(request) > MOST_ELEMENTS:  # `few_elements` says so
        return ""
    try:
        program = program_of(request)
    except Refused as refused:
        return f"needs other steps: {refused}"
    if request.library == "own" or request.autotune:
        return ""
    reason = _slower(request, program)
    # What libraries do not take either stands before whose time is the least.
    theirs = steps_ahead(request) or summed_along(request) if reason else ""
    return f"{theirs}, or ask for library='own'" if theirs else reason


def _slower(request: EinsumRequest, program: Program) -> str:
    """Whether calls of libraries take less time, or the launch more memory than is near."""
    nbytes = program.elements * max(request.dtype.itemsize, F32.itemsize)
    if nbytes > NEAR:
        return (
            f"needs at most {NEAR:,} bytes of operands and results on the way at a time, or library own, has {nbytes:,}"
        )
    ours, calls = LAUNCH + program.cycles / CLOCK, len(request.course.steps)
    if calls < FEWEST:
        return f"needs {FEWEST} steps or more, or library own or autotune, has {calls}"
    if ours <= CALL * calls:
        return ""
    return (
        f"needs tensors so small that one block takes at most {CALL * calls:.3g} us, or library own or autotune, has"
        f" some of {ours:.3g} us"
    )
