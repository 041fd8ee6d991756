"""`grouped_linear`: rows in groups, each group by weights of its own (a mixture of experts), with autograd."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from dispatch.errors import BadRequest
from dispatch.ops.grouped_matmul import grouped_matmul as _grouped_matmul
from dispatch.torch.shared import autocast, check_tensors, define, empty_result, lines_at_16

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["grouped_linear"]

grouped_matmul: Callable[..., Any] = _grouped_matmul  # which takes torch's tensors, too
DTYPES = (torch.float16, torch.bfloat16)
ENDS = (torch.int32, torch.int64)
STEP = 8  # elements of 16 bits: lines begin at multiples of 16 bytes


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """x[rows of g] · weight[g]ᵀ for each group g of rows, in one kernel.

    Args:
        x: (total, in), f16 or bf16, sorted by group.
        weight: (groups, out, in), of x's dtype.
        ends: where each group ends: i32 or i64 (groups,) on x's device, or numbers of the host; not falling, the last
            one at most total. A group begins where the one before ends, and may be empty. Nobody looks at a GPU's.

    Gives back (total, out) of x's dtype, sums in f32; rows behind the last end are 0. Under autocast both operands
    are in autocast's dtype.

    The gradient by x is a grouped product likewise. That by the weights sums over as many rows as a group has, for
    which there is no row: it is torch's product, group by group, and waits for the GPU where ends lie on it. vmap and
    a gradient of the gradient are refused. Raises BadRequest for operands that do not fit, NoRow where there is no row.
    """
    x, weight = autocast(x, weight)
    check_tensors(DTYPES, x=x, weight=weight)
    if x.ndim != 2:
        raise BadRequest("x", f"shape {tuple(x.shape)}", "(total, in)", "x.flatten(0, -2)")
    if weight.ndim != 3 or weight.shape[2] != x.shape[1]:
        raise BadRequest(
            "weight", f"shape {tuple(weight.shape)}", f"(groups, out, {x.shape[1]}), for x {tuple(x.shape)}"
        )
    known: list[int] = []
    if not isinstance(ends, torch.Tensor):
        known = _numbers(ends, x.shape[0], weight.shape[0])
        ends = torch.tensor(known, dtype=torch.int32).to(x.device)
    if ends.dtype not in ENDS or tuple(ends.shape) != (weight.shape[0],) or ends.device != x.device:
        what = f"{ends.dtype} of shape {tuple(ends.shape)} on {ends.device}"
        raise BadRequest("ends", what, f"torch.int32 of shape ({weight.shape[0]},) on {x.device}", "sizes.cumsum(0)")
    y: torch.Tensor = GROUPED(x, weight, ends.to(torch.int32), known)
    return y


def _numbers(ends: Any, total: int, groups: int) -> list[int]:
    """Ends that the host knows; BadRequest for those that cannot be."""
    found = list(ends) if isinstance(ends, (list, tuple)) else None
    if found is None or len(found) != groups or any(type(end) is not int for end in found):
        raise BadRequest("ends", repr(ends), f"{groups} whole numbers, or a tensor", "itertools.accumulate(sizes)")
    if any(after < before for before, after in pairwise((0, *found))) or (found and found[-1] > total):
        raise BadRequest(
            "ends", repr(ends), f"numbers that do not fall, at most {total}", "itertools.accumulate(sizes)"
        )
    return found


def _product(a: Any, b: Any, ends: Any) -> Any:
    """a[rows of g] · b[g], dense; 0 behind the last group."""
    total, n = a.shape[0], b.shape[2]
    out = a.new_zeros((total, math.ceil(n / STEP) * STEP))[:, :n]
    if out.numel() and b.numel():
        by_column = b.stride(1) == 1 and b.stride(2) != 1
        b = lines_at_16(b.transpose(1, 2)).transpose(1, 2) if by_column else lines_at_16(b)
        grouped_matmul(lines_at_16(a), b, ends.contiguous(), out=out)
    return out.contiguous()


def _forward(x: Any, weight: Any, ends: Any, known: list[int]) -> Any:
    if not known and not ends.is_cuda:
        _numbers(ends.tolist(), x.shape[0], weight.shape[0])
    return _product(x, weight.transpose(1, 2), ends)


def _forward_fake(x: Any, weight: Any, _ends: Any, _known: list[int]) -> Any:
    return x.new_empty((x.shape[0], weight.shape[1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001  # given by name
    x, weight, ends, ctx.known = inputs
    ctx.save_for_backward(x, weight, ends)


def _backward(ctx: Any, dy: Any) -> tuple[Any, ...]:
    of_x, of_weight = ctx.needs_input_grad[:2]
    dx, dweight = GROUPED_BACKWARD(dy, *ctx.saved_tensors, ctx.known, of_x, of_weight)
    return (dx if of_x else None, dweight if of_weight else None, None, None)


def _gradients(
    dy: Any, x: Any, weight: Any, ends: Any, known: list[int], of_x: bool, of_weight: bool
) -> tuple[Any, Any]:
    """dx and dweight."""
    dx = _product(dy, weight, ends) if of_x else empty_result(x)
    if not of_weight:
        return dx, empty_result(weight)
    dweight, begin = weight.new_zeros(weight.shape), 0
    for group, end in enumerate(known or ends.tolist()):
        if end > begin:
            torch.mm(dy[begin:end].t(), x[begin:end], out=dweight[group])
        begin = end
    return dx, dweight


def _gradients_fake(
    _dy: Any, x: Any, weight: Any, _ends: Any, _known: list[int], of_x: bool, of_weight: bool
) -> tuple[Any, Any]:
    dx = x.new_empty(x.shape) if of_x else empty_result(x)
    return dx, weight.new_empty(weight.shape) if of_weight else empty_result(weight)


GROUPED = define(
    "grouped_linear",
    "(Tensor x, Tensor weight, Tensor ends, int[] known) -> Tensor",
    _forward,
    _forward_fake,
    _save,
    _backward,
)
GROUPED_BACKWARD = define(
    "grouped_linear_backward",
    "(Tensor dy, Tensor x, Tensor weight, Tensor ends, int[] known, bool of_x, bool of_weight) -> (Tensor, Tensor)",
    _gradients,
    _gradients_fake,
)
