"""`rope` by a kernel of this library, with autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dispatch.core.framework_call_cache import CACHE_MISS, FunctionCallCache
from dispatch.core.request import run
from dispatch.errors import BadRequest
from dispatch.ops.rope import RopeRequest as _RopeRequest
from dispatch.ops.rope import rope as _rope
from dispatch.torch.shared import check_tensors, define, empty_in_order_of, is_plain_inference, needs_gradient, on_gpu

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DTYPES", "rope"]

RopeRequest: Callable[..., Any] = _RopeRequest
rope_of: Callable[..., Any] = _rope  # which take torch's tensors, too
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
AXES, OF_ANGLES = 4, 3


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """x · cos + (-x₂, x₁) · sin of queries and keys, where x₁ and x₂ are the halves of a head: one kernel for both.

    Args:
        q: (batch, heads, tokens, width) in f32, f16, bf16 or f64, of any strides. Extents may be 0.
        k: as q, with a number of heads of its own.
        cos, sin: (batch or 1, tokens, turned) in q's dtype or f32, without a gradient. `turned` is even and at most
            width: what of a head lies behind it stays as it is.
        interleaved: x₁ and x₂ are the even and the odd elements, not the halves.

    Gives back both, of the shapes of q and k, dense with their axes in memory in the same order. They are computed in
    f32, f64 for f64, and rounded once. Raises BadRequest for operands that do not fit.
    """
    y: tuple[torch.Tensor, torch.Tensor]
    if is_plain_inference():
        y = CALLS.run(q, k, cos, sin, interleaved)
        if y is not CACHE_MISS:
            return y
    _check(q, k, cos, sin)
    if needs_gradient(q, k, cos, sin) or not ROPE.direct(q, k, cos, sin):
        y = ROPE(q, k, cos, sin, interleaved, False)
    else:
        y = _inference(q, k, cos, sin, interleaved)
    return y


CALLS = FunctionCallCache(("q", "k", "cos", "sin"), ("interleaved",))


def _check(q: Any, k: Any, cos: Any, sin: Any) -> None:
    """BadRequest for operands that do not fit each other; shapes are the request's to check, but those of fakes."""
    check_tensors(DTYPES, q=q, k=k)
    check_tensors(DTYPES, cos=cos, sin=sin)
    if cos.device != q.device:
        raise BadRequest("cos", f"a tensor on {cos.device}", f"one on {q.device}", "x.to(…)")
    if cos.dtype not in (q.dtype, torch.float32):
        raise BadRequest("cos", f"a tensor of {cos.dtype}", f"{q.dtype}, that of q, or torch.float32", "x.to(…)")
    for name, x, axes in (("q", q, AXES), ("k", k, AXES), ("cos", cos, OF_ANGLES), ("sin", sin, OF_ANGLES)):
        if x.ndim != axes:
            wanted = "batch, heads, tokens and width" if axes == AXES else "batch or 1, tokens, and what turns"
            raise BadRequest(name, f"shape {tuple(x.shape)}", wanted)
    for name, x in (("cos", cos), ("sin", sin)):
        if torch.is_grad_enabled() and x.requires_grad:
            raise BadRequest(name, "a tensor that requires a gradient", "one that does not", f"{name}.detach()")


def _inference(q: Any, k: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Both without a gradient; the next call like it is to find the plan."""
    if not on_gpu(q) or CALLS.known(q, k, cos, sin, interleaved):
        return rope_of(q, k, cos, sin, interleaved)
    request = RopeRequest(q, k, cos, sin, interleaved)
    y = run(request)
    views = {name: name for name in ("q", "k", "cos", "sin")}
    CALLS.learn(request, views, (q, k, cos, sin), (interleaved,), {})
    return y


def _rotate(q: Any, k: Any, cos: Any, sin: Any, interleaved: bool, adjoint: bool) -> tuple[Any, Any]:
    """Both, or what gradients of both are those of."""
    found: tuple[Any, Any] = rope_of(q, k, cos, sin, interleaved, adjoint)
    return found


def _fake(q: Any, k: Any, _cos: Any, _sin: Any, _interleaved: bool, _adjoint: bool) -> tuple[Any, Any]:
    return empty_in_order_of(q), empty_in_order_of(k)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    del output
    _, _, cos, sin, ctx.interleaved, ctx.adjoint = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, dq: Any, dk: Any) -> tuple[Any, ...]:
    """The gradients by the transpose; its own are by the rotation again."""
    return (*ROPE(dq, dk, *ctx.saved_tensors, ctx.interleaved, not ctx.adjoint), None, None, None, None)


ROPE = define(
    "rope",
    "(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, bool adjoint) -> (Tensor, Tensor)",
    _rotate,
    _fake,
    _save,
    _backward,
)
