"""`grouped_linear`: groups of rows, each group with its own weights (a mixture of experts), with autograd."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from dispatch.errors import BadRequest, shown
from dispatch.ops.grouped_matmul import grouped_matmul as _grouped_matmul
from dispatch.torch.shared import autocast, check_tensors, define, empty_result, rows_at_16

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["grouped_linear"]

grouped_matmul: Callable[..., Any] = _grouped_matmul  # it accepts torch tensors, too
DTYPES = (torch.float16, torch.bfloat16)
ENDS = (torch.int32, torch.int64)
STEP = 8  # elements of 16 bits: rows begin at multiples of 16 bytes


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """x[rows of g] · weight[g]ᵀ for each group g of rows, in one kernel.

    Args:
        x: (total, in), f16 or bf16, sorted by group.
        weight: (groups, out, in), of x's dtype.
        ends: the end of each group: an i32 or i64 tensor (groups,) on x's device, or integers on the host; not
            decreasing, the last one at most total. A group begins where the previous one ends, and may be empty. The
            values of a GPU tensor are not checked.

    Returns (total, out) of x's dtype; sums are in f32, and rows after the last end are 0. Under autocast both operands
    are cast to autocast's dtype.

    The gradient of x is a grouped product, too. The gradient of the weights sums over the rows of each group, which no
    row of the table supports: it is computed by torch, group by group, and waits for the GPU if ends are on the GPU.
    vmap and a gradient of the gradient are refused. Raises BadRequest for invalid operands, NoRow if no row supports
    them.
    """
    x, weight = autocast(x, weight)
    check_tensors(DTYPES, x=x, weight=weight)
    if x.ndim != 2:
        raise BadRequest("x", f"shape {tuple(x.shape)}", "(total, in)", "x.flatten(0, -2)")
    if weight.ndim != 3 or weight.shape[2] != x.shape[1]:
        raise BadRequest(
            "weight", f"shape {tuple(weight.shape)}", f"(groups, out, {x.shape[1]}), for x {tuple(x.shape)}"
        )
    host_ends: list[int] = []
    if not isinstance(ends, torch.Tensor):
        host_ends = _checked_ends(ends, x.shape[0], weight.shape[0])
        ends = torch.tensor(host_ends, dtype=torch.int32, device="cpu").to(x.device)
    if ends.dtype not in ENDS or tuple(ends.shape) != (weight.shape[0],) or ends.device != x.device:
        what = f"{ends.dtype} of shape {tuple(ends.shape)} on {ends.device}"
        expected = f"torch.int32 or torch.int64 of shape ({weight.shape[0]},) on {x.device}"
        raise BadRequest("ends", what, expected, "sizes.cumsum(0)")
    y: torch.Tensor = GROUPED(x, weight, ends.to(torch.int32), host_ends)
    return y


def _checked_ends(ends: Any, total: int, groups: int) -> list[int]:
    """Ends on the host as a list; BadRequest if they are invalid."""
    numbers = list(ends) if isinstance(ends, (list, tuple)) else None
    if numbers is None or len(numbers) != groups or any(type(end) is not int for end in numbers):
        raise BadRequest("ends", shown(ends), f"{groups} integers, or a tensor", "itertools.accumulate(sizes)")
    if any(after < before for before, after in pairwise((0, *numbers))) or (numbers and numbers[-1] > total):
        raise BadRequest("ends", shown(ends), f"non-decreasing numbers, at most {total}", "itertools.accumulate(sizes)")
    return numbers


def _product(a: Any, b: Any, ends: Any) -> Any:
    """a[rows of g] · b[g], dense; 0 after the last group."""
    total, n = a.shape[0], b.shape[2]
    out = a.new_zeros((total, math.ceil(n / STEP) * STEP))[:, :n]
    if out.numel() and b.numel():
        by_column = b.stride(1) == 1 and b.stride(2) != 1
        b = rows_at_16(b.transpose(1, 2)).transpose(1, 2) if by_column else rows_at_16(b)
        grouped_matmul(rows_at_16(a), b, ends.contiguous(), out=out)
    return out.contiguous()


def _forward(x: Any, weight: Any, ends: Any, host_ends: list[int]) -> Any:
    if not host_ends and not ends.is_cuda:
        _checked_ends(ends.tolist(), x.shape[0], weight.shape[0])
    return _product(x, weight.transpose(1, 2), ends)


def _forward_fake(x: Any, weight: Any, _ends: Any, _host_ends: list[int]) -> Any:
    return x.new_empty((x.shape[0], weight.shape[1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001  # torch passes it by name
    x, weight, ends, ctx.host_ends = inputs
    ctx.save_for_backward(x, weight, ends)


def _backward(ctx: Any, dy: Any) -> tuple[Any, ...]:
    needs_dx, needs_dweight = ctx.needs_input_grad[:2]
    dx, dweight = GROUPED_BACKWARD(dy, *ctx.saved_tensors, ctx.host_ends, needs_dx, needs_dweight)
    return (dx if needs_dx else None, dweight if needs_dweight else None, None, None)


def _gradients(
    dy: Any, x: Any, weight: Any, ends: Any, host_ends: list[int], needs_dx: bool, needs_dweight: bool
) -> tuple[Any, Any]:
    """dx and dweight."""
    dx = _product(dy, weight, ends) if needs_dx else empty_result(x)
    if not needs_dweight:
        return dx, empty_result(weight)
    dweight, begin = weight.new_zeros(weight.shape), 0
    for group, end in enumerate(host_ends or ends.tolist()):
        if end > begin:
            torch.mm(dy[begin:end].t(), x[begin:end], out=dweight[group])
        begin = end
    return dx, dweight


def _gradients_fake(
    _dy: Any, x: Any, weight: Any, _ends: Any, _host_ends: list[int], needs_dx: bool, needs_dweight: bool
) -> tuple[Any, Any]:
    dx = x.new_empty(x.shape) if needs_dx else empty_result(x)
    return dx, weight.new_empty(weight.shape) if needs_dweight else empty_result(weight)


GROUPED = define(
    "grouped_linear",
    "(Tensor x, Tensor weight, Tensor ends, int[] host_ends) -> Tensor",
    _forward,
    _forward_fake,
    _save,
    _backward,
)
GROUPED_BACKWARD = define(
    "grouped_linear_backward",
    "(Tensor dy, Tensor x, Tensor weight, Tensor ends, int[] host_ends, bool needs_dx, bool needs_dweight) "
    "-> (Tensor, Tensor)",
    _gradients,
    _gradients_fake,
)
