"""`rope` with a kernel of this library and autograd."""

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
run_rope: Callable[..., Any] = _rope  # these accept torch tensors, too
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
AXES, ANGLE_AXES = 4, 3  # of q and k, of cos and sin


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """x · cos + (-x₂, x₁) · sin for queries and keys, where x₁ and x₂ are the halves of a head; one kernel for both.

    Args:
        q: (batch, heads, tokens, width) in f32, f16, bf16 or f64, with any strides. Extents may be 0.
        k: like q; the number of heads may differ.
        cos, sin: (batch or 1, tokens, turned) in q's dtype or f32, without a gradient. `turned` is even and at most
            width; the elements of a head from index `turned` on are not changed.
        interleaved: x₁ and x₂ are the even and the odd elements instead of the halves.

    Returns both results, with the shapes of q and k, dense with their axes in the same order in memory. They are
    computed in f32 (f64 for f64) and rounded once. Raises BadRequest for invalid operands.
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
    """BadRequest for operands that do not match; the request checks further shapes, except those of fake tensors."""
    check_tensors(DTYPES, q=q, k=k)
    check_tensors(DTYPES, cos=cos, sin=sin)
    if cos.device != q.device:
        raise BadRequest("cos", f"a tensor on {cos.device}", f"one on {q.device}", "x.to(…)")
    if cos.dtype not in (q.dtype, torch.float32):
        raise BadRequest("cos", f"a tensor of {cos.dtype}", f"{q.dtype}, the dtype of q, or torch.float32", "x.to(…)")
    for name, x, axes in (("q", q, AXES), ("k", k, AXES), ("cos", cos, ANGLE_AXES), ("sin", sin, ANGLE_AXES)):
        if x.ndim != axes:
            wanted = "batch, heads, tokens and width" if axes == AXES else "batch or 1, tokens, and the rotated width"
            raise BadRequest(name, f"shape {tuple(x.shape)}", wanted)
    for name, x in (("cos", cos), ("sin", sin)):
        if torch.is_grad_enabled() and x.requires_grad:
            raise BadRequest(name, "a tensor that requires a gradient", "one that does not", f"{name}.detach()")


def _inference(q: Any, k: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Both results without a gradient; caches the plan for the next similar call."""
    if not on_gpu(q) or CALLS.known(q, k, cos, sin, interleaved):
        return run_rope(q, k, cos, sin, interleaved)
    request = RopeRequest(q, k, cos, sin, interleaved)
    y = run(request)
    views = {name: name for name in ("q", "k", "cos", "sin")}
    CALLS.learn(request, views, (q, k, cos, sin), (interleaved,), {})
    return y


def _rotate(q: Any, k: Any, cos: Any, sin: Any, interleaved: bool, adjoint: bool) -> tuple[Any, Any]:
    """Both results; with `adjoint` the transposed rotation, which maps gradients of results to those of operands."""
    rotated: tuple[Any, Any] = run_rope(q, k, cos, sin, interleaved, adjoint)
    return rotated


def _fake(q: Any, k: Any, _cos: Any, _sin: Any, _interleaved: bool, _adjoint: bool) -> tuple[Any, Any]:
    return empty_in_order_of(q), empty_in_order_of(k)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    del output
    _, _, cos, sin, ctx.interleaved, ctx.adjoint = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, dq: Any, dk: Any) -> tuple[Any, ...]:
    """The gradients, by the transposed rotation, whose own gradient is the rotation."""
    return (*ROPE(dq, dk, *ctx.saved_tensors, ctx.interleaved, not ctx.adjoint), None, None, None, None)


ROPE = define(
    "rope",
    "(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, bool adjoint) -> (Tensor, Tensor)",
    _rotate,
    _fake,
    _save,
    _backward,
)
