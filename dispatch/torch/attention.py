"""`scaled_dot_product_attention` by cuDNN's fused attention, with autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dispatch.errors import BadRequest
from dispatch.ops.sdpa import sdpa_bwd as _sdpa_bwd
from dispatch.ops.sdpa import sdpa_fwd as _sdpa_fwd
from dispatch.torch.shared import ALIGNED, autocast, check_tensors, define

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["scaled_dot_product_attention"]

sdpa_fwd: Callable[..., Any] = _sdpa_fwd  # which take torch's tensors, too
sdpa_bwd: Callable[..., Any] = _sdpa_bwd
DTYPES = (torch.float16, torch.bfloat16)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(scale · Q · Kᵀ, masked) · V, as torch.nn.functional.scaled_dot_product_attention has it.

    Args:
        query: (B, Hq, Sq, D), f16 or bf16, for cuDNN has no other; D a multiple of 8 up to 256.
        key: (B, Hk, Skv, D), where Hk divides Hq: groups of heads share one of K and V.
        value: (B, Hk, Skv, Dv).
        is_causal: query i sees the keys up to i.
        scale: above 0; None for 1/√D.

    Heads and tokens may lie in either order, (B, S, H, D).transpose(1, 2) too: what lies otherwise is copied. Gives
    back (B, Hq, Sq, Dv), which lies as the query does where Dv is D, else dense. Extents are 1 or more, and a gradient
    needs two queries or two keys. Masks as tensors and dropout are not taken here: `dispatch.sdpa_fwd` has both. Raises
    BadRequest for operands that do not fit, NoRow for what cuDNN does not take.
    """
    query, key, value = autocast(query, key, value)
    check_tensors(DTYPES, query=query, key=key, value=value)
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.ndim != 4:
            hint = "x.unsqueeze(0) adds a batch, x.flatten(0, -4) makes one of several axes"
            raise BadRequest(name, f"shape {tuple(t.shape)}", "four axes: (batch, heads, sequence, head)", hint)
        if t.shape[0] != query.shape[0]:
            raise BadRequest(name, f"shape {tuple(t.shape)}", f"a batch of {query.shape[0]}, as query has")
    if key.shape[3] != query.shape[3]:
        raise BadRequest("key", f"heads of {key.shape[3]}", f"{query.shape[3]}, as query has")
    if value.shape[1:3] != key.shape[1:3]:
        raise BadRequest("value", f"shape {tuple(value.shape)}", f"heads and tokens of key {tuple(key.shape)}")
    if not key.shape[1] or query.shape[1] % key.shape[1]:
        raise BadRequest("key", f"{key.shape[1]} heads", f"a divisor of the {query.shape[1]} heads of query")
    result: torch.Tensor = ATTENTION(query, key, value, is_causal, scale)[0]
    return result


def _ready(x: Any) -> Any:
    """The tensor as cuDNN takes it: heads dense, tokens and heads at multiples of 16 bytes; a copy where it is not."""
    apart = [step * x.element_size() for step, extent in zip(x.stride()[:3], x.shape[:3], strict=True) if extent > 1]
    sound = x.stride(3) == 1 and x.data_ptr() % ALIGNED == 0
    if sound and all(step and step % ALIGNED == 0 for step in apart):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _alike(x: Any) -> Any:
    """An uninitialized tensor that lies as x does, with dense heads."""
    return torch.empty_like(x) if x.stride(3) == 1 else x.new_empty(x.shape)


def _mask(is_causal: bool) -> dict[str, Any]:
    return {"right_bound": 0} if is_causal else {}


def _forward(query: Any, key: Any, value: Any, is_causal: bool, scale: float | None) -> tuple[Any, Any]:
    """O, and in f32 the logarithm of the sums (B, Hq, Sq, 1), which the gradient reads."""
    out, stats = _forward_fake(query, key, value, is_causal, scale)
    ready = (_ready(query), _ready(key), _ready(value))
    sdpa_fwd(*ready, out=out, stats_out=stats, stats=True, scale=scale, **_mask(is_causal))
    return out, stats


def _forward_fake(query: Any, _key: Any, value: Any, _is_causal: bool, _scale: float | None) -> tuple[Any, Any]:
    shape = (*query.shape[:3], value.shape[3])
    out = _alike(query) if value.shape[3] == query.shape[3] else query.new_empty(shape)
    return out, query.new_empty((*query.shape[:3], 1), dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    query, key, value, is_causal, scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.choices = (is_causal, scale)
    ctx.save_for_backward(query, key, value, *output)


def _backward(ctx: Any, do: Any, _: Any) -> tuple[Any, ...]:
    if do is None:
        return (None,) * 5
    return (*ATTENTION_BACKWARD(do, *ctx.saved_tensors, *ctx.choices), None, None)


def _gradients(
    do: Any, query: Any, key: Any, value: Any, out: Any, stats: Any, is_causal: bool, scale: float | None
) -> tuple[Any, ...]:
    """dQ, dK, dV."""
    found = _gradients_fake(do, query, key, value, out, stats, is_causal, scale)
    dq, dk, dv = found
    ready = (_ready(t) for t in (query, key, value, out, do))
    sdpa_bwd(*ready, stats.contiguous(), dq=dq, dk=dk, dv=dv, scale=scale, **_mask(is_causal))
    return found


def _gradients_fake(
    _do: Any, query: Any, key: Any, value: Any, _out: Any, _stats: Any, _is_causal: bool, _scale: float | None
) -> tuple[Any, ...]:
    return _alike(query), _alike(key), _alike(value)


ATTENTION = define(
    "attention",
    "(Tensor query, Tensor key, Tensor value, bool is_causal, float? scale) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    _save,
    _backward,
)
ATTENTION_BACKWARD = define(
    "attention_backward",
    "(Tensor do, Tensor query, Tensor key, Tensor value, Tensor out, Tensor stats, bool is_causal, float? scale) "
    "-> (Tensor, Tensor, Tensor)",
    _gradients,
    _gradients_fake,
)
