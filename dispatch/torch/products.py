"""`linear`: x · weightᵀ + bias and an activation in one cuBLASLt call, with autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dispatch.core.framework_call_cache import CACHE_MISS, FunctionCallCache
from dispatch.core.request import run
from dispatch.errors import BadRequest, shown
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

__all__ = ["check", "dense_lines", "empty_gelu_argument", "linear", "weight_gradients"]

matmul: Callable[..., Any] = _matmul  # it accepts torch tensors, too
MatmulRequest: Callable[..., Any] = _MatmulRequest
aten = torch.ops.aten
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
EPILOGUES = {
    ("none", False): Epilogue.NONE,
    ("none", True): Epilogue.BIAS,
    ("relu", False): Epilogue.RELU,
    ("relu", True): Epilogue.RELU_BIAS,
    ("gelu", False): Epilogue.GELU,
    ("gelu", True): Epilogue.GELU_BIAS,
}
ROW_MULTIPLE = 8  # elements: the row stride of GELU's argument, as the product stores it, is a multiple of it


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    """activation(x · weightᵀ + bias), in one library call if a row of the table supports the operands.

    Args:
        x: (…, in), with any number of leading axes, including none; extents may be 0; f64, f32, f16 or bf16.
        weight: (out, in), like that of torch.nn.Linear; of x's dtype.
        bias: (out,), of x's dtype.
        activation: None, "relu", or "gelu", which is the tanh approximation as in
            torch.nn.functional.gelu(…, approximate="tanh"): cuBLASLt has no other, and the relative error of its GELU
            is 1.8e-6 in f32.

    Returns (…, out) of x's dtype. Sums are in f32 for f16 and bf16, and the result is rounded once. Under autocast all
    operands except f64 ones are cast to autocast's dtype.

    The gradient is one product for dx, and one for dweight with dbias as its epilogue. With "gelu" the forward also
    stores GELU's argument if a gradient is needed. The slope of ReLU at 0 is 0, as in torch. A gradient of the
    gradient, torch.func.grad and similar transforms, and vmap over weights are refused. Raises BadRequest for invalid
    operands.
    """
    y: torch.Tensor
    if is_plain_inference():
        y = CALLS.run(x, weight, bias, activation)
        if y is not CACHE_MISS:
            return y
    x, weight, bias = autocast(x, weight, bias)
    check(x, weight, bias, activation)
    kind, with_gradient = activation or "none", needs_gradient(x, weight, bias)
    if with_gradient or not LINEAR.direct(x, weight, bias):
        y = LINEAR(x, weight, bias, kind, kind == "gelu" and with_gradient)[0]
    elif on_gpu(x) and x.numel() and not CALLS.known(x, weight, bias, activation):
        y = _run_and_cache(x, weight, bias, activation)
    else:
        y = _activated_product(x, weight, bias, kind)
    return y


def check(x: Any, weight: Any, bias: Any, activation: Any) -> None:
    """BadRequest for operands that are invalid for a linear layer."""
    check_tensors(DTYPES, x=x, weight=weight, **({} if bias is None else {"bias": bias}))
    if activation not in (None, "relu", "gelu"):
        hint = '"gelu" is the tanh approximation'
        raise BadRequest("activation", shown(activation), 'None, "relu" or "gelu"', hint)
    if x.ndim < 1:
        raise BadRequest("x", "a tensor without axes", "(…, in)")
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise BadRequest("weight", f"shape {tuple(weight.shape)}", f"(out, {x.shape[-1]}), for x {tuple(x.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise BadRequest("bias", f"shape {tuple(bias.shape)}", f"({weight.shape[0]},), the rows of weight")


# -- forward -------------------------------------------------------------------------------------------------------
def _forward(x: Any, weight: Any, bias: Any, activation: str, keep: bool) -> tuple[Any, Any]:
    """y; with `keep` also GELU's argument (rows, out)."""
    if not keep:
        return _activated_product(x, weight, bias, activation), empty_result(x)
    options = {} if bias is None else {"bias": dense(bias)}
    epilogue = Epilogue.GELU_AUX if bias is None else Epilogue.GELU_AUX_BIAS
    y, argument = matmul(rows_of(x), dense_lines(weight).t(), epilogue=epilogue, **options)
    return y.view(*x.shape[:-1], weight.shape[0]), argument


def _activated_product(x: Any, weight: Any, bias: Any, activation: str) -> Any:
    """The product with its activation, without outputs for a gradient."""
    rows, b = rows_of(x), dense_lines(weight).t()
    if bias is None:
        y = matmul(rows, b, epilogue=EPILOGUES[activation, False])
    else:
        y = matmul(rows, b, bias=dense(bias), epilogue=EPILOGUES[activation, True])
    return y if x.ndim == 2 else y.view(*x.shape[:-1], weight.shape[0])


CALLS = FunctionCallCache(("x", "weight", "bias"), ("activation",), optional=("bias",))


def _run_and_cache(x: Any, weight: Any, bias: Any, activation: str | None) -> Any:
    """The product with its activation; caches the plan for the next similar call."""
    epilogue = EPILOGUES[activation or "none", bias is not None]
    options = {} if bias is None else {"bias": dense(bias)}
    request: Any = MatmulRequest(rows_of(x), dense_lines(weight).t(), epilogue=epilogue, **options)
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
    return y, empty_gelu_argument(x, weight.shape[0]) if keep else empty_result(x)


def empty_gelu_argument(x: Any, n: Any) -> Any:
    """An uninitialized tensor for GELU's argument, in the layout that a product of x's rows with n columns stores."""
    rows = 1
    for extent in x.shape[:-1]:
        rows = rows * extent
    return x.new_empty_strided((rows, n), ((n + ROW_MULTIPLE - 1) // ROW_MULTIPLE * ROW_MULTIPLE, 1))


def _forward_vmap(info: Any, in_dims: Any, *operands: Any) -> Any:
    """Only x may have a mapped axis, which becomes its leading one; GELU's argument is not kept then."""
    x, weight, bias, activation, _ = move_vmap_axis("linear", info, in_dims, operands)
    return LINEAR(x, weight, bias, activation, False), (0, None)


# -- backward ------------------------------------------------------------------------------------------------------
def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    x, weight, bias, activation, _ = inputs
    y, argument = output
    has_argument = argument.ndim == 2
    ctx.mark_non_differentiable(argument)
    ctx.set_materialize_grads(False)
    ctx.activation = activation
    ctx.save_for_backward(x, weight, bias, y if activation == "relu" else argument if has_argument else None)


def _backward(ctx: Any, dy: Any, _: Any) -> tuple[Any, ...]:
    x, weight, bias, saved = ctx.saved_tensors
    needs = [need and dy is not None for need in ctx.needs_input_grad[:3]]
    if not any(needs):
        return (None,) * 5
    if ctx.activation == "gelu" and saved is None:  # not kept, e.g. under vmap: compute it again
        saved = LINEAR(x, weight, bias, "none", False)[0]
    grads = LINEAR_BACKWARD(dy, x, weight, saved, ctx.activation, *needs)
    return (*(grad if need else None for grad, need in zip(grads, needs, strict=True)), None, None)


def _gradients(
    dy: Any, x: Any, weight: Any, saved: Any, activation: str, needs_dx: bool, needs_dweight: bool, needs_dbias: bool
) -> tuple[Any, Any, Any]:
    """dx, dweight, dbias; `saved` is the result of a ReLU, or the argument of GELU."""
    dz = rows_of(dy)
    if activation == "relu":
        dz = aten.threshold_backward(dz, saved.reshape(dz.shape), 0)
    elif activation == "gelu":
        dz = aten.gelu_backward(dz, saved.reshape(dz.shape), approximate="tanh")
    dz = rows_of(dz)
    dx = matmul(dz, dense_lines(weight)).view(x.shape) if needs_dx else empty_result(x)
    return dx, *weight_gradients(dz, x, needs_dweight, needs_dbias)


def weight_gradients(dz: Any, x: Any, needs_dweight: bool, needs_dbias: bool) -> tuple[Any, Any]:
    """dzᵀ · x and the sums of dz's columns, in one product if both are needed; x is (…, in).

    For a product over one row cuBLASLt has no kernel with these sums.
    """
    dweight, dbias = empty_result(x), empty_result(x)
    if needs_dweight and needs_dbias and len(dz) > 1 and dz.shape[1] and x.shape[-1]:
        dbias = x.new_empty(dz.shape[1])
        dweight, _ = matmul(dz.contiguous().t(), rows_of(x), epilogue=Epilogue.BGRADA, bgrad=dbias)
        return dweight, dbias
    if needs_dweight:
        dweight = matmul(dz.t(), rows_of(x))
    if needs_dbias:
        dbias = dz.sum(0)
    return dweight, dbias


def _gradients_fake(
    _dy: Any, x: Any, weight: Any, _saved: Any, _activation: str, needs_dx: bool, needs_dweight: bool, needs_dbias: bool
) -> tuple[Any, Any, Any]:
    dx = x.new_empty(x.shape) if needs_dx else empty_result(x)
    dweight = weight.new_empty(weight.shape) if needs_dweight else empty_result(x)
    return dx, dweight, weight.new_empty(weight.shape[0]) if needs_dbias else empty_result(x)


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
    "(Tensor dy, Tensor x, Tensor weight, Tensor? saved, str activation, bool needs_dx, bool needs_dweight, "
    "bool needs_dbias) -> (Tensor, Tensor, Tensor)",
    _gradients,
    _gradients_fake,
)
