"""`scaled_dot_product_attention` with cuDNN's fused attention and autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dispatch.core.framework_call_cache import CACHE_MISS, FunctionCallCache
from dispatch.core.request import run
from dispatch.errors import BadRequest, shown
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
sdpa_fwd: Callable[..., Any] = _sdpa_fwd  # these accept torch tensors, too
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
    """softmax(scale · Q · Kᵀ + mask) · V, like torch.nn.functional.scaled_dot_product_attention.

    Args:
        query: (B, Hq, Sq, D), f16 or bf16 (cuDNN supports no other dtype); D is a multiple of 8 up to 256.
        key: (B, Hk, Skv, D), where Hk divides Hq: a group of query heads shares one head of K and V.
        value: (B, Hk, Skv, Dv).
        attn_mask: a tensor that broadcasts to (B, Hq, Sq, Skv): bools, True where a query attends to a key, or numbers
            in query's dtype that are added to the scores. The result of a query without visible keys is 0, as in torch.
        dropout_p: the probability that a weight is dropped, 0 <= p < 1. The seed is drawn from torch's generator; the
            dropped weights are not the ones that torch would drop.
        is_causal: query i attends to the keys up to i, even if the numbers of keys and queries differ; not together
            with a mask.
        scale: above 0; None for 1/√D.
        enable_gqa: ignored; fewer heads of K and V are accepted either way.

    Heads and tokens may be stored in either order, e.g. (B, S, H, D).transpose(1, 2); operands with other layouts are
    copied. Returns (B, Hq, Sq, Dv), with the same layout as query if Dv equals D, else dense. Extents are 1 or more. A
    gradient needs at least two queries or two keys; a mask of numbers has a gradient, too. Raises BadRequest for
    invalid operands, NoRow for operands that cuDNN does not support.
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
        raise BadRequest("dropout_p", shown(dropout_p), "a probability p with 0 <= p < 1")
    bias, masked_queries = _bias_of(attn_mask, query, key, is_causal)
    if dropout_p == 0 and not needs_gradient(query, key, value, bias) and ATTENTION.direct(query, key, value, bias):
        result = _inference(query, key, value, bias, is_causal, scale)
        return result if masked_queries is None else result.masked_fill_(masked_queries, 0)
    # Drawn outside the op: torch.compile assumes that an op returns the same result for the same operands.
    seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=query.device) if dropout_p else None
    result = ATTENTION(query, key, value, bias, seed, float(dropout_p), is_causal, scale)[0]
    return result if masked_queries is None else result.masked_fill(masked_queries, 0)


CALLS = FunctionCallCache(("query", "key", "value", "bias"), ("is_causal", "scale"), optional=("bias",))


def _inference(query: Any, key: Any, value: Any, bias: Any, is_causal: bool, scale: float | None) -> torch.Tensor:
    """O without the statistics for a gradient; caches the plan for the next similar call."""
    operands = (query, key, value, bias)
    out: torch.Tensor
    if bias is not None and is_plain_inference():
        out = CALLS.run(*operands, is_causal, scale)
        if out is not CACHE_MISS:
            return out
    options = _options(bias, None, 0.0, is_causal, scale)
    aligned = (_aligned(query), _aligned(key), _aligned(value))
    if not on_gpu(query) or CALLS.known(*operands, is_causal, scale):
        out = sdpa_fwd(*aligned, **options)
        return out
    request = SdpaFwdRequest(*aligned, **options)
    out = run(request)
    views = {"q": "query", "k": "key", "v": "value", "bias": "bias"}
    CALLS.learn(request, views, operands, (is_causal, scale), {})
    return out


def _check_shapes(query: Any, key: Any, value: Any) -> None:
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.ndim != 4:
            hint = "x.unsqueeze(0) adds a batch axis, x.flatten(0, -4) merges several into one"
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
    """The tensor to add to the scores, and the queries without visible keys; None for both without a mask."""
    if mask is None:
        return None, None
    scores = (*query.shape[:3], key.shape[2])
    if not isinstance(mask, torch.Tensor):
        raise BadRequest("attn_mask", f"a {type(mask).__name__}", "a torch.Tensor, or None")
    if is_causal:
        raise BadRequest("attn_mask", "a mask with is_causal", "only one of the two", "mask & torch.ones(…).tril()")
    if mask.dtype not in (torch.bool, query.dtype) or mask.device != query.device:
        what = f"torch.bool or {query.dtype} on {query.device}"
        raise BadRequest("attn_mask", f"a tensor of {mask.dtype} on {mask.device}", what, "mask.to(…)")
    if mask.ndim > 4 or any(m not in (1, s) for m, s in zip(mask.shape[::-1], scores[::-1], strict=False)):
        raise BadRequest("attn_mask", f"shape {tuple(mask.shape)}", f"a shape that broadcasts to {scores}")
    return masks.additive_mask(mask, query.dtype, *scores[2:])


def _aligned(x: Any) -> Any:
    """The tensor in a layout that cuDNN supports: dense heads, other strides multiples of 16 bytes; else a copy."""
    strides = [s * x.element_size() for s, extent in zip(x.stride()[:3], x.shape[:3], strict=True) if extent > 1]
    is_aligned = x.stride(3) == 1 and x.data_ptr() % ALIGNED == 0
    if is_aligned and all(stride and stride % ALIGNED == 0 for stride in strides):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _empty_like(x: Any) -> Any:
    """An uninitialized tensor with the same layout as x, but with dense heads."""
    return torch.empty_like(x) if x.stride(3) == 1 else x.new_empty(x.shape)


def _options(bias: Any, seed: Any, dropout: float, is_causal: bool, scale: float | None) -> dict[str, Any]:
    options: dict[str, Any] = {"scale": scale}
    if bias is not None:
        options["bias"] = dense(bias)
    if is_causal:
        options["right_bound"] = 0
    if dropout:
        options |= {"dropout": dropout, "seed": dense(seed), "offset": torch.zeros_like(seed)}
    return options


def _forward(
    query: Any, key: Any, value: Any, bias: Any, seed: Any, dropout: float, is_causal: bool, scale: float | None
) -> tuple[Any, Any]:
    """O, and the logarithms of the softmax sums (B, Hq, Sq, 1) in f32, which the gradient reads."""
    out, stats = _forward_fake(query, key, value, bias, seed, dropout, is_causal, scale)
    aligned = (_aligned(query), _aligned(key), _aligned(value))
    options = _options(bias, seed, dropout, is_causal, scale)
    sdpa_fwd(*aligned, out=out, stats_out=stats, stats=True, **options)
    return out, stats


def _forward_fake(
    query: Any, _key: Any, value: Any, _bias: Any, _seed: Any, _dropout: float, _is_causal: bool, _scale: float | None
) -> tuple[Any, Any]:
    shape = (*query.shape[:3], value.shape[3])
    out = _empty_like(query) if value.shape[3] == query.shape[3] else query.new_empty(shape)
    return out, query.new_empty((*query.shape[:3], 1), dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    *tensors, dropout, is_causal, scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.options = (dropout, is_causal, scale)
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, do: Any, _: Any) -> tuple[Any, ...]:
    if do is None:
        return (None,) * 8
    needs_dbias = ctx.needs_input_grad[3]
    *gradients, dbias = ATTENTION_BACKWARD(do, *ctx.saved_tensors, *ctx.options, needs_dbias)
    return (*gradients, dbias if needs_dbias else None, *(None,) * 4)


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
    needs_dbias: bool,
) -> tuple[Any, ...]:
    """dQ, dK, dV and the gradient of the bias."""
    dq, dk, dv = _empty_like(query), _empty_like(key), _empty_like(value)
    aligned = (_aligned(t) for t in (query, key, value, out, do))
    options = _options(bias, seed, dropout, is_causal, scale)
    dbias = empty_result(query)
    if needs_dbias:
        dbias = query.new_empty(bias.shape)
        options |= {"dbias": dbias, "bias_gradient": True}
    sdpa_bwd(*aligned, stats.contiguous(), dq=dq, dk=dk, dv=dv, **options)
    return dq, dk, dv, dbias


def _gradients_fake(_do: Any, query: Any, key: Any, value: Any, bias: Any, *others: Any) -> tuple[Any, ...]:
    dbias = query.new_empty(bias.shape) if others[-1] else empty_result(query)
    return _empty_like(query), _empty_like(key), _empty_like(value), dbias


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
    "float dropout, bool is_causal, float? scale, bool needs_dbias) -> (Tensor, Tensor, Tensor, Tensor)",
    _gradients,
    _gradients_fake,
)
