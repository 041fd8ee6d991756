"""What the ops for PyTorch share: how one is defined, autocast, checks, and operands as libraries take them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from dispatch.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ALIGNED", "autocast", "check_tensors", "define", "dense", "leading", "nothing", "rows_of"]

ALIGNED = 16  # bytes: where a library reads vectors, it reads so many at once


def define(
    name: str,
    schema: str,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    vmap: Callable[..., Any] | None = None,
) -> Any:
    """A custom op `dispatch::name` of torch's: what runs, what it gives without running, and its gradient.

    Without `backward` a gradient through the op is refused by torch, as that of a gradient is; without `vmap` so is
    torch.vmap over it.
    """
    op = torch.library.custom_op(f"dispatch::{name}", forward, mutates_args=(), schema=schema)
    op.register_fake(fake)
    if backward is not None:
        op.register_autograd(backward, setup_context=save)
    op.register_vmap(_refuse_vmap(name) if vmap is None else vmap)
    return op


def _refuse_vmap(name: str) -> Callable[..., Any]:
    def refuse(_info: Any, _in_dims: Any, *_operands: Any) -> Any:
        what = f"torch.vmap over dispatch::{name}"
        raise BadRequest(name, what, "operands without an axis of vmap", "pass that axis as a leading one of x")

    return refuse


def leading(name: str, info: Any, in_dims: Any, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands for a rule of vmap that has the mapped axis of the first one, and of no other, in front."""
    if in_dims[0] is None or any(dim is not None for dim in in_dims[1:]):
        return tuple(_refuse_vmap(name)(info, in_dims, *operands))
    return (operands[0].movedim(in_dims[0], 0), *operands[1:])


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors in autocast's dtype, where it is on for the first one's device; f64 ones stay, as in torch."""
    place = tensors[0].device.type if isinstance(tensors[0], torch.Tensor) else "cpu"
    if place not in ("cpu", "cuda") or not torch.is_autocast_enabled(place):
        return tensors
    dtype = torch.get_autocast_dtype(place)
    return tuple(
        x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    )


def check_tensors(dtypes: tuple[torch.dtype, ...], **operands: Any) -> None:
    """BadRequest for an operand that is no tensor, and for dtypes or devices that differ from the first one's."""
    first = next(iter(operands.values()))
    for name, x in operands.items():
        if not isinstance(x, torch.Tensor):
            raise BadRequest(name, f"a {type(x).__name__}", "a torch.Tensor")
        if x.dtype not in dtypes:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise BadRequest(name, f"a tensor of {x.dtype}", f"one of {known}, which there are rows for", "x.to(…)")
        if x.dtype != first.dtype:
            hint = "torch.autocast, or x.to(…)"
            raise BadRequest(name, f"a tensor of {x.dtype}", f"{first.dtype}, that of {next(iter(operands))}", hint)
        if x.device != first.device:
            raise BadRequest(name, f"a tensor on {x.device}", f"one on {first.device}", "x.to(…)")


def dense(x: Any, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    """The tensor, dense and at 16 bytes; a copy where it is not."""
    x = x.contiguous(memory_format=memory_format)
    return x if x.data_ptr() % ALIGNED == 0 else x.clone()


def rows_of(x: Any) -> Any:
    """(…, k) as a matrix with dense rows that do not overlap: a view where its strides allow it."""
    x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    rows, k = x.shape
    if (x.stride(1) == 1 or k <= 1) and (x.stride(0) >= k or rows <= 1):
        return x
    return x.contiguous()


def nothing(like: Any) -> Any:
    """What an op gives instead of a result that nobody wants."""
    return like.new_empty(0)
