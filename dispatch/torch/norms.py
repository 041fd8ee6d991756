"""`layer_norm` and `rms_norm` with cuDNN's norms and autograd."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from dispatch.checks import check_number, shown
from dispatch.core.framework_call_cache import CACHE_MISS, FunctionCallCache
from dispatch.core.request import run
from dispatch.errors import BadRequest
from dispatch.ops.norm import NormFwdRequest as _NormFwdRequest
from dispatch.ops.norm import NormMode
from dispatch.ops.norm import norm_bwd as _norm_bwd
from dispatch.ops.norm import norm_fwd as _norm_fwd
from dispatch.torch.shared import (
    check_tensors,
    define,
    dense,
    empty_result,
    is_plain_inference,
    move_vmap_axis,
    needs_gradient,
    on_gpu,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["layer_norm", "rms_norm"]

NormFwdRequest: Callable[..., Any] = _NormFwdRequest
norm_fwd: Callable[..., Any] = _norm_fwd  # these accept torch tensors, too
norm_bwd: Callable[..., Any] = _norm_bwd
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPSILON = torch.finfo(torch.float32).eps


def layer_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """weight · (x - mean) / √(variance + eps) + bias over the last axes, like torch.nn.functional.layer_norm.

    Args:
        x: (…, *normalized_shape); f32, f16 or bf16 (cuDNN's norms do not support f64). Leading extents may be 0.
        normalized_shape: the last axes of x.
        weight, bias: of shape normalized_shape, in x's dtype or f32, both in the same; None for ones and zeros.
        eps: above 0.

    Returns a dense tensor of x's shape and dtype. Mean, variance and their gradients are in f32. If x is in f32,
    torch's kernel computes the gradients. A gradient of the gradient is refused. Raises BadRequest for invalid
    operands.
    """
    return _normalized("layer", x, normalized_shape, weight, bias, eps)


def rms_norm(
    x: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """weight · x / √(mean of x² + eps) over the last axes, like torch.nn.functional.rms_norm.

    Arguments and result are as in `layer_norm`, without a bias. eps=None is the machine epsilon of f32, in which torch
    computes.
    """
    return _normalized("rms", x, normalized_shape, weight, None, EPSILON if eps is None else eps)


def _normalized(mode: str, x: Any, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float) -> torch.Tensor:
    y: torch.Tensor
    if type(normalized_shape) in (torch.Size, list):
        normalized_shape = tuple(normalized_shape)
    if weight is not None and is_plain_inference():
        y = CALLS.run(x, weight, bias, mode, eps, normalized_shape)
        if y is not CACHE_MISS:
            return y
    check_tensors(DTYPES, x=x)
    if not isinstance(normalized_shape, tuple):
        hint = f"({normalized_shape},)" if isinstance(normalized_shape, int) else ""
        raise BadRequest("normalized_shape", shown(normalized_shape), "extents", hint)
    parameters = {name: t for name, t in (("weight", weight), ("bias", bias)) if t is not None}
    for name, t in parameters.items():
        check_tensors(DTYPES, **{name: t})
        if t.dtype not in (x.dtype, torch.float32):
            raise BadRequest(name, f"a tensor of {t.dtype}", f"{x.dtype}, the dtype of x, or torch.float32", "x.to(…)")
        if tuple(t.shape) != tuple(normalized_shape):
            raise BadRequest(name, f"shape {tuple(t.shape)}", f"{tuple(normalized_shape)}, the normalized_shape")
    axes = len(tuple(normalized_shape))
    if not 1 <= axes <= x.ndim or tuple(x.shape[x.ndim - axes :]) != tuple(normalized_shape):
        raise BadRequest("normalized_shape", f"{tuple(normalized_shape)}", f"the last axes of x {tuple(x.shape)}")
    if math.prod(normalized_shape) == 0:
        raise BadRequest("normalized_shape", f"{tuple(normalized_shape)}", "extents of 1 or more")
    check_number("eps", eps)
    if not eps > 0:
        raise BadRequest("eps", shown(eps), "a number above 0")
    if len({t.dtype for t in parameters.values()}) > 1:
        raise BadRequest("bias", f"a tensor of {bias.dtype}", f"{weight.dtype}, the dtype of weight")
    if weight is None:
        weight = torch.ones(
            tuple(normalized_shape), dtype=torch.float32 if bias is None else bias.dtype, device=x.device
        )
    if needs_gradient(x, weight, bias) or not NORM.direct(x, weight, bias):
        y = NORM(x, weight, bias, mode, eps)[0]
    else:
        y = _inference(x, weight, bias, (mode, eps, normalized_shape))
    return y


CALLS = FunctionCallCache(("x", "weight", "bias"), ("mode", "eps", "shape"), optional=("bias",))


def _inference(x: Any, weight: Any, bias: Any, choices: tuple[str, float, Sequence[int]]) -> Any:
    """y without statistics; caches the plan for the next similar call."""
    mode, eps, _ = choices
    flat = _merge_leading_axes(x, weight)
    if not flat.shape[0]:
        return x.new_empty(x.shape)
    options: dict[str, Any] = {} if bias is None else {"bias": dense(bias)}
    options |= {"mode": MODES[mode], "epsilon": eps}
    if not on_gpu(x) or CALLS.known(x, weight, bias, *choices):
        return norm_fwd(flat, dense(weight), **options).view(x.shape)
    request = NormFwdRequest(flat, dense(weight), **options)
    y = run(request)
    views = {"x": "x", "scale": "weight", "bias": "bias"}
    CALLS.learn(request, views, (x, weight, bias), choices, {"out": tuple(x.shape)})
    return y.view(x.shape)


MODES = {"layer": NormMode.LAYER_NORM, "rms": NormMode.RMS_NORM}


def _merge_leading_axes(x: Any, weight: Any) -> Any:
    """x with its leading axes merged into one."""
    return dense(x).view(math.prod(x.shape[: x.ndim - weight.ndim]), *weight.shape)


def _forward(x: Any, weight: Any, bias: Any, mode: str, eps: float) -> tuple[Any, Any, Any]:
    """y, and in f32 the mean and the inverse standard deviation of each row, which the gradient reads."""
    flat = _merge_leading_axes(x, weight)
    rows = flat.shape[0]
    y, mean, inverse = _forward_fake(x, weight, bias, mode, eps)
    if not rows:
        return y, mean, inverse
    shape = (rows, *(1,) * weight.ndim)
    options: dict[str, Any] = {} if bias is None else {"bias": dense(bias)}
    if mode == "layer":
        options["mean_out"] = mean.view(shape)
    norm_fwd(
        flat, dense(weight), mode=MODES[mode], epsilon=eps, training=True, out=y.view(flat.shape),
        inv_variance_out=inverse.view(shape), **options,
    )  # fmt: skip
    return y, mean, inverse


def _forward_fake(x: Any, weight: Any, _bias: Any, mode: str, _eps: float) -> tuple[Any, Any, Any]:
    rows = x.shape[: x.ndim - weight.ndim]
    statistics = x.new_empty(rows, dtype=torch.float32)
    mean = torch.empty_like(statistics) if mode == "layer" else empty_result(statistics)
    return x.new_empty(x.shape), mean, statistics


def _forward_vmap(info: Any, in_dims: Any, *operands: Any) -> Any:
    """Only x may have a mapped axis, which becomes its leading one."""
    x, *others = move_vmap_axis("norm", info, in_dims, operands)
    return NORM(x, *others), (0, 0 if others[2] == "layer" else None, 0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    x, weight, bias, mode, eps = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.mode, ctx.eps, ctx.has_bias = mode, eps, bias is not None
    ctx.save_for_backward(x, weight, *output[1:])


def _backward(ctx: Any, dy: Any, *_: Any) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 5
    dx, dweight, dbias = NORM_BACKWARD(dy, *ctx.saved_tensors, ctx.mode, ctx.eps)
    return dx, dweight, dbias if ctx.has_bias else None, None, None


def _gradients(dy: Any, x: Any, weight: Any, mean: Any, inverse: Any, mode: str, eps: float) -> tuple[Any, Any, Any]:
    """dx, dweight, dbias; an RMS norm has no bias."""
    flat = _merge_leading_axes(x, weight)
    rows = flat.shape[0]
    if not rows:
        dx, dweight, dbias = _gradients_fake(dy, x, weight, mean, inverse, mode, eps)
        return dx, dweight.zero_(), dbias.zero_()
    if x.dtype == torch.float32 and mode == "layer":
        return _gradients_by_torch(dy, x, weight, mean, inverse)
    shape = (rows, *(1,) * weight.ndim)
    options = {"mean": mean.reshape(shape)} if mode == "layer" else {"bias": False}
    dx, *others = norm_bwd(
        _merge_leading_axes(dy, weight),
        flat,
        dense(weight),
        inverse.reshape(shape),
        mode=MODES[mode],
        epsilon=eps,
        **options,
    )
    return dx.view(x.shape), others[0], others[1] if mode == "layer" else empty_result(weight)


def _gradients_by_torch(dy: Any, x: Any, weight: Any, mean: Any, inverse: Any) -> tuple[Any, Any, Any]:
    """Gradients by torch's kernel, for f32: the error of cuDNN's sums over the rows was four times as large (H100)."""
    shape = (*x.shape[: x.ndim - weight.ndim], *(1,) * weight.ndim)
    gradients: tuple[Any, Any, Any] = torch.ops.aten.native_layer_norm_backward(
        dense(dy), dense(x), weight.shape, mean.reshape(shape), inverse.reshape(shape), dense(weight),
        dense(weight), [True, True, True],
    )  # fmt: skip
    return gradients


def _gradients_fake(
    _dy: Any, x: Any, weight: Any, _mean: Any, _inverse: Any, mode: str, _eps: float
) -> tuple[Any, Any, Any]:
    dweight = weight.new_empty(weight.shape)
    return x.new_empty(x.shape), dweight, torch.empty_like(dweight) if mode == "layer" else empty_result(weight)


NORM = define(
    "norm",
    "(Tensor x, Tensor weight, Tensor? bias, str mode, float eps) -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    _save,
    _backward,
    _forward_vmap,
)
NORM_BACKWARD = define(
    "norm_backward",
    "(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor inverse, str mode, float eps) "
    "-> (Tensor, Tensor, Tensor)",
    _gradients,
    _gradients_fake,
)
