"""`linear`: x · weightᵀ + bias and an activation in one call of cuBLASLt, with autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dispatch.core.framework_call_cache import CACHE_MISS, FunctionCallCache
from dispatch.core.request import run
from dispatch.errors import BadRequest
from dispatch.keys import Epilogue
from dispatch.ops.matmul import MatmulRequest as _MatmulRequest
from dispatch.ops.matmul import matmul as _matmul
from dispatch.torch.shared import (
    autocast,
    check_tensors,
    define,
    dense,
    empty_result,
    is_plain_inference,
    move_vmap_axis,
    needs_gradient,
    on_gpu,
    rows_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["argument_fake", "check", "dense_lines", "linear", "weight_gradients"]

matmul: Callable[..., Any] = _matmul  # which takes torch's tensors, too
MatmulRequest: Callable[..., Any] = _MatmulRequest
aten = torch.ops.aten
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
PLAIN = {
    ("none", False): Epilogue.NONE,
    ("none", True): Epilogue.BIAS,
    ("relu", False): Epilogue.RELU,
    ("relu", True): Epilogue.RELU_BIAS,
    ("gelu", False): Epilogue.GELU,
    ("gelu", True): Epilogue.GELU_BIAS,
}
STEP = 8  # elements: the rows of GELU's argument, as the product stores it, are a multiple apart


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    """activation(x · weightᵀ + bias), in one call of the library where its row takes it.

    Args:
        x: (…, in), with any number of leading axes, also none and with extents of 0; f64, f32, f16 or bf16.
        weight: (out, in), as torch.nn.Linear has it; of x's dtype.
        bias: (out,), of x's dtype.
        activation: None, "relu", or "gelu", which is the tanh approximation, as in
            torch.nn.functional.gelu(…, approximate="tanh"): cuBLASLt has no other, and its own is off by 1.8e-6 in
            f32, relative to the result.

    Gives back (…, out) of x's dtype. Sums are in f32 for f16 and bf16, and the result is rounded once. Under autocast
    all operands are in autocast's dtype, but for f64 ones, which stay as they are.

    The gradient is one product for dx, and one for dweight with dbias as its epilogue. With "gelu" the forward also
    stores its argument where a gradient is needed. Where the argument of a ReLU is 0 the slope is 0, as torch has it.
    A gradient of the gradient, torch.func.grad and its kin, and vmap over weights are refused. Raises
    BadRequest for operands that do not fit.
    """
    y: torch.Tensor
    if is_plain_inference():
        y = CALLS.run(x, weight, bias, activation)
        if y is not CACHE_MISS:
            return y
    x, weight, bias = autocast(x, weight, bias)
    check(x, weight, bias, activation)
    kind, is_followed = activation or "none", needs_gradient(x, weight, bias)
    if is_followed or not LINEAR.direct(x, weight, bias):
        y = LINEAR(x, weight, bias, kind, kind == "gelu" and is_followed)[0]
    elif on_gpu(x) and x.numel() and not CALLS.known(x, weight, bias, activation):
        y = _first(x, weight, bias, activation)
    else:
        y = _activated(x, weight, bias, kind)
    return y


def check(x: Any, weight: Any, bias: Any, activation: Any) -> None:
    """BadRequest for operands that make no linear layer."""
    check_tensors(DTYPES, x=x, weight=weight, **({} if bias is None else {"bias": bias}))
    if activation not in (None, "relu", "gelu"):
        hint = '"gelu" is the tanh approximation'
        raise BadRequest("activation", repr(activation), 'None, "relu" or "gelu"', hint)
    if x.ndim < 1:
        raise BadRequest("x", "a tensor of no axes", "(…, in)")
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise BadRequest("weight", f"shape {tuple(weight.shape)}", f"(out, {x.shape[-1]}), for x {tuple(x.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise BadRequest("bias", f"shape {tuple(bias.shape)}", f"({weight.shape[0]},), the rows of weight")


# -- forward -------------------------------------------------------------------------------------------------------
def _forward(x: Any, weight: Any, bias: Any, activation: str, keep: bool) -> tuple[Any, Any]:
    """y, and GELU's argument (rows, out) where it is to be kept."""
    if not keep:
        return _activated(x, weight, bias, activation), empty_result(x)
    given = {} if bias is None else {"bias": dense(bias)}
    epilogue = Epilogue.GELU_AUX if bias is None else Epilogue.GELU_AUX_BIAS
    y, argument = matmul(rows_of(x), dense_lines(weight).t(), epilogue=epilogue, **given)
    return y.view(*x.shape[:-1], weight.shape[0]), argument


def _activated(x: Any, weight: Any, bias: Any, activation: str) -> Any:
    """The product with its activation, and nothing else."""
    rows, b = rows_of(x), dense_lines(weight).t()
    if bias is None:
        y = matmul(rows, b, epilogue=PLAIN[activation, False])
    else:
        y = matmul(rows, b, bias=dense(bias), epilogue=PLAIN[activation, True])
    return y if x.ndim == 2 else y.view(*x.shape[:-1], weight.shape[0])


CALLS = FunctionCallCache(("x", "weight", "bias"), ("activation",), optional=("bias",))


def _first(x: Any, weight: Any, bias: Any, activation: str | None) -> Any:
    """The product with its activation, which the next call like it is to find."""
    epilogue = PLAIN[activation or "none", bias is not None]
    given = {} if bias is None else {"bias": dense(bias)}
    request: Any = MatmulRequest(rows_of(x), dense_lines(weight).t(), epilogue=epilogue, **given)
    y, shape = run(request), (*x.shape[:-1], weight.shape[0])
    views = {"a": "x", "b": "weight", "bias": "bias"}
    CALLS.learn(request, views, (x, weight, bias), (activation,), {"out": shape})
    return y.view(shape)


def dense_lines(weight: Any) -> Any:
    """The weights with dense rows or columns."""
    rows, (between, within) = weight.shape[0], weight.stride()
    return weight if between == 1 and within == rows else rows_of(weight)


def _forward_fake(x: Any, weight: Any, _bias: Any, _activation: str, keep: bool) -> tuple[Any, Any]:
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    return y, argument_fake(x, weight.shape[0]) if keep else empty_result(x)


def argument_fake(x: Any, n: Any) -> Any:
    """GELU's argument as a product of x's rows with n columns stores it, uninitialized."""
    rows = 1
    for extent in x.shape[:-1]:
        rows = rows * extent
    return x.new_empty_strided((rows, n), ((n + STEP - 1) // STEP * STEP, 1))


def _forward_vmap(info: Any, in_dims: Any, *operands: Any) -> Any:
    """x alone may have an axis more, which becomes a leading one; GELU's argument is then not kept."""
    x, weight, bias, activation, _ = move_vmap_axis("linear", info, in_dims, operands)
    return LINEAR(x, weight, bias, activation, False), (0, None)


# -- backward ------------------------------------------------------------------------------------------------------
def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    x, weight, bias, activation, _ = inputs
    y, argument = output
    kept = argument.ndim == 2
    ctx.mark_non_differentiable(argument)
    ctx.set_materialize_grads(False)
    ctx.activation = activation
    ctx.save_for_backward(x, weight, bias, y if activation == "relu" else argument if kept else None)


def _backward(ctx: Any, dy: Any, _: Any) -> tuple[Any, ...]:
    x, weight, bias, saved = ctx.saved_tensors
    needs = [need and dy is not None for need in ctx.needs_input_grad[:3]]
    if not any(needs):
        return (None,) * 5
    if ctx.activation == "gelu" and saved is None:  # not kept, as in vmap: computed again
        saved = LINEAR(x, weight, bias, "none", False)[0]
    grads = LINEAR_BACKWARD(dy, x, weight, saved, ctx.activation, *needs)
    return (*(grad if need else None for grad, need in zip(grads, needs, strict=True)), None, None)


def _gradients(
    dy: Any, x: Any, weight: Any, saved: Any, activation: str, of_x: bool, of_weight: bool, of_bias: bool
) -> tuple[Any, Any, Any]:
    """dx, dweight, dbias; `saved` is the result of a ReLU, or the argument of GELU."""
    dz = rows_of(dy)
    if activation == "relu":
        dz = aten.threshold_backward(dz, saved.reshape(dz.shape), 0)
    elif activation == "gelu":
        dz = aten.gelu_backward(dz, saved.reshape(dz.shape), approximate="tanh")
    dz = rows_of(dz)
    dx = matmul(dz, dense_lines(weight)).view(x.shape) if of_x else empty_result(x)
    return dx, *weight_gradients(dz, x, of_weight, of_bias)


def weight_gradients(dz: Any, x: Any, of_weight: bool, of_bias: bool) -> tuple[Any, Any]:
    """dzᵀ · x, and the sums of dz's columns, in one product where both are asked for; x is (…, in)."""
    dweight, dbias = empty_result(x), empty_result(x)
    if of_weight and of_bias and dz.shape[1] and x.shape[-1]:
        dbias = x.new_empty(dz.shape[1])
        dweight, _ = matmul(dz.contiguous().t(), rows_of(x), epilogue=Epilogue.BGRADA, bgrad=dbias)
        return dweight, dbias
    if of_weight:
        dweight = matmul(dz.t(), rows_of(x))
    if of_bias:
        dbias = dz.sum(0)
    return dweight, dbias


def _gradients_fake(
    _dy: Any, x: Any, weight: Any, _saved: Any, _activation: str, of_x: bool, of_weight: bool, of_bias: bool
) -> tuple[Any, Any, Any]:
    dx = x.new_empty(x.shape) if of_x else empty_result(x)
    dweight = weight.new_empty(weight.shape) if of_weight else empty_result(x)
    return dx, dweight, weight.new_empty(weight.shape[0]) if of_bias else empty_result(x)


LINEAR = define(
    "linear",
    "(Tensor x, Tensor weight, Tensor? bias, str activation, bool keep) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    _save,
    _backward,
    _forward_vmap,
)
LINEAR_BACKWARD = define(
    "linear_backward",
    "(Tensor dy, Tensor x, Tensor weight, Tensor? saved, str activation, bool of_x, bool of_weight, bool of_bias) "
    "-> (Tensor, Tensor, Tensor)",
    _gradients,
    _gradients_fake,
)
