"""`scaled_dot_product_attention` by cuDNN's fused attention, with autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dispatch.core.framework_call_cache import CACHE_MISS, FunctionCallCache
from dispatch.core.request import run
from dispatch.errors import BadRequest
from dispatch.ops.sdpa import SdpaFwdRequest as _SdpaFwdRequest
from dispatch.ops.sdpa import sdpa_bwd as _sdpa_bwd
from dispatch.ops.sdpa import sdpa_fwd as _sdpa_fwd
from dispatch.torch import masks
from dispatch.torch.shared import (
    ALIGNED,
    autocast,
    check_tensors,
    define,
    dense,
    empty_result,
    is_plain_inference,
    needs_gradient,
    on_gpu,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["scaled_dot_product_attention"]

SdpaFwdRequest: Callable[..., Any] = _SdpaFwdRequest
sdpa_fwd: Callable[..., Any] = _sdpa_fwd  # which take torch's tensors, too
sdpa_bwd: Callable[..., Any] = _sdpa_bwd
DTYPES = (torch.float16, torch.bfloat16)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """softmax(scale · Q · Kᵀ + mask) · V, as torch.nn.functional.scaled_dot_product_attention has it.

    Args:
        query: (B, Hq, Sq, D), f16 or bf16, for cuDNN has no other; D a multiple of 8 up to 256.
        key: (B, Hk, Skv, D), where Hk divides Hq: groups of heads share one of K and V.
        value: (B, Hk, Skv, Dv).
        attn_mask: what broadcasts to (B, Hq, Sq, Skv): bools, True for the keys that a query sees, or numbers of
            query's dtype that are added to the scores. A query that sees no key gets 0, as in torch.
        dropout_p: the probability of a weight to be dropped, from 0 to below 1; drawn by torch's generator, other
            weights than torch drops.
        is_causal: query i sees the keys up to i, also where there are more or fewer keys than queries; without a mask.
        scale: above 0; None for 1/√D.
        enable_gqa: fewer heads of K and V are taken with it and without.

    Heads and tokens may lie in either order, (B, S, H, D).transpose(1, 2) too: what lies otherwise is copied. Gives
    back (B, Hq, Sq, Dv), which lies as the query does where Dv is D, else dense. Extents are 1 or more, and a gradient
    needs two queries or two keys; a mask of numbers has one, too. Raises BadRequest for operands that do not fit,
    NoRow for what cuDNN does not take.
    """
    del enable_gqa
    result: torch.Tensor
    if attn_mask is None and dropout_p == 0 and is_plain_inference():
        result = CALLS.run(query, key, value, None, is_causal, scale)
        if result is not CACHE_MISS:
            return result
    query, key, value, attn_mask = autocast(query, key, value, attn_mask)
    check_tensors(DTYPES, query=query, key=key, value=value)
    _check_shapes(query, key, value)
    if type(dropout_p) not in (int, float) or not 0 <= dropout_p < 1:
        raise BadRequest("dropout_p", repr(dropout_p), "a probability from 0 to below 1")
    bias, blind = _bias_of(attn_mask, query, key, is_causal)
    if dropout_p == 0 and not needs_gradient(query, key, value, bias) and ATTENTION.direct(query, key, value, bias):
        result = _inference(query, key, value, bias, is_causal, scale)
        return result if blind is None else result.masked_fill_(blind, 0)
    # Drawn here, so that the op gives the same for the same operands, as torch.compile takes it to.
    seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=query.device) if dropout_p else None
    result = ATTENTION(query, key, value, bias, seed, float(dropout_p), is_causal, scale)[0]
    return result if blind is None else result.masked_fill(blind, 0)


CALLS = FunctionCallCache(("query", "key", "value", "bias"), ("is_causal", "scale"), optional=("bias",))


def _inference(query: Any, key: Any, value: Any, bias: Any, is_causal: bool, scale: float | None) -> torch.Tensor:
    """O without what a gradient reads; the next call like it is to find the plan."""
    operands = (query, key, value, bias)
    out: torch.Tensor
    if bias is not None and is_plain_inference():
        out = CALLS.run(*operands, is_causal, scale)
        if out is not CACHE_MISS:
            return out
    choices = _choices(bias, None, 0.0, is_causal, scale)
    ready = (_ready(query), _ready(key), _ready(value))
    if not on_gpu(query) or CALLS.known(*operands, is_causal, scale):
        out = sdpa_fwd(*ready, **choices)
        return out
    request = SdpaFwdRequest(*ready, **choices)
    out = run(request)
    views = {"q": "query", "k": "key", "v": "value", "bias": "bias"}
    CALLS.learn(request, views, operands, (is_causal, scale), {})
    return out


def _check_shapes(query: Any, key: Any, value: Any) -> None:
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


def _bias_of(mask: Any, query: Any, key: Any, is_causal: bool) -> tuple[Any, Any]:
    """What is added to the scores, and which queries see no key; None without a mask."""
    if mask is None:
        return None, None
    scores = (*query.shape[:3], key.shape[2])
    if not isinstance(mask, torch.Tensor):
        raise BadRequest("attn_mask", f"a {type(mask).__name__}", "a torch.Tensor, or None")
    if is_causal:
        raise BadRequest("attn_mask", "a mask with is_causal", "one of the two", "mask & torch.ones(…).tril()")
    if mask.dtype not in (torch.bool, query.dtype) or mask.device != query.device:
        what = f"torch.bool or {query.dtype} on {query.device}"
        raise BadRequest("attn_mask", f"a tensor of {mask.dtype} on {mask.device}", what, "mask.to(…)")
    if mask.ndim > 4 or any(m not in (1, s) for m, s in zip(mask.shape[::-1], scores[::-1], strict=False)):
        raise BadRequest("attn_mask", f"shape {tuple(mask.shape)}", f"what broadcasts to {scores}")
    return masks.additive_mask(mask, query.dtype, *scores[2:])


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


def _choices(bias: Any, seed: Any, dropout: float, is_causal: bool, scale: float | None) -> dict[str, Any]:
    found: dict[str, Any] = {"scale": scale}
    if bias is not None:
        found["bias"] = dense(bias)
    if is_causal:
        found["right_bound"] = 0
    if dropout:
        found |= {"dropout": dropout, "seed": dense(seed), "offset": torch.zeros_like(seed)}
    return found


def _forward(
    query: Any, key: Any, value: Any, bias: Any, seed: Any, dropout: float, is_causal: bool, scale: float | None
) -> tuple[Any, Any]:
    """O, and in f32 the logarithm of the sums (B, Hq, Sq, 1), which the gradient reads."""
    out, stats = _forward_fake(query, key, value, bias, seed, dropout, is_causal, scale)
    ready = (_ready(query), _ready(key), _ready(value))
    choices = _choices(bias, seed, dropout, is_causal, scale)
    sdpa_fwd(*ready, out=out, stats_out=stats, stats=True, **choices)
    return out, stats


def _forward_fake(
    query: Any, _key: Any, value: Any, _bias: Any, _seed: Any, _dropout: float, _is_causal: bool, _scale: float | None
) -> tuple[Any, Any]:
    shape = (*query.shape[:3], value.shape[3])
    out = _alike(query) if value.shape[3] == query.shape[3] else query.new_empty(shape)
    return out, query.new_empty((*query.shape[:3], 1), dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    *tensors, dropout, is_causal, scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.choices = (dropout, is_causal, scale)
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, do: Any, _: Any) -> tuple[Any, ...]:
    if do is None:
        return (None,) * 8
    of_bias = ctx.needs_input_grad[3]
    *found, dbias = ATTENTION_BACKWARD(do, *ctx.saved_tensors, *ctx.choices, of_bias)
    return (*found, dbias if of_bias else None, *(None,) * 4)


def _gradients(
    do: Any,
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    seed: Any,
    out: Any,
    stats: Any,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    of_bias: bool,
) -> tuple[Any, ...]:
    """dQ, dK, dV, and that of the bias."""
    dq, dk, dv = _alike(query), _alike(key), _alike(value)
    ready = (_ready(t) for t in (query, key, value, out, do))
    choices = _choices(bias, seed, dropout, is_causal, scale)
    dbias = empty_result(query)
    if of_bias:
        dbias = query.new_empty(bias.shape)
        choices |= {"dbias": dbias, "bias_gradient": True}
    sdpa_bwd(*ready, stats.contiguous(), dq=dq, dk=dk, dv=dv, **choices)
    return dq, dk, dv, dbias


def _gradients_fake(_do: Any, query: Any, key: Any, value: Any, bias: Any, *others: Any) -> tuple[Any, ...]:
    dbias = query.new_empty(bias.shape) if others[-1] else empty_result(query)
    return _alike(query), _alike(key), _alike(value), dbias


ATTENTION = define(
    "attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? seed, float dropout, bool is_causal, float? scale) "
    "-> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    _save,
    _backward,
)
ATTENTION_BACKWARD = define(
    "attention_backward",
    "(Tensor do, Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? seed, Tensor out, Tensor stats, "
    "float dropout, bool is_causal, float? scale, bool of_bias) -> (Tensor, Tensor, Tensor, Tensor)",
    _gradients,
    _gradients_fake,
)
