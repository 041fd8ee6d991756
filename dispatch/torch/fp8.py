"""`fp8_linear`: a linear layer whose products are in fp8, with a scale for each tensor, and autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dispatch.errors import BadRequest
from dispatch.keys import Epilogue
from dispatch.ops.matmul import Scales
from dispatch.ops.matmul import matmul as _matmul
from dispatch.torch.shared import check_tensors, define, dense, empty_result, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["fp8_linear"]

matmul: Callable[..., Any] = _matmul  # which takes torch's tensors, too
DTYPES = (torch.float16, torch.bfloat16)
FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK = 16  # elements: products of fp8 are over whole ones


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    scale_grad: torch.Tensor | None = None,
) -> torch.Tensor:
    """x · weightᵀ + bias, where x / scale_x and weight / scale_weight are rounded to f8e4m3 for the product.

    Args:
        x: (…, in), f16 or bf16; in is a multiple of 16.
        weight: (out, in), of x's dtype; out is a multiple of 16.
        bias: (out,), of x's dtype.
        scale_x, scale_weight: f32 of one element, above 0, on x's device: the largest magnitude by 448 uses the
            whole range. What is out of it becomes the largest number there is.
        scale_grad: likewise that of the result's gradient, which is rounded to f8e5m2; None for 1.

    Gives back (…, out) of x's dtype: sums are in f32. In the gradient all three products' operands are those of fp8,
    the rounding passes gradients on as they are, and scales have none. Autocast leaves the op alone. Raises BadRequest
    for operands that do not fit, NoRow where the GPU has no fp8 (before sm_90).
    """
    check_tensors(DTYPES, x=x, weight=weight, **({} if bias is None else {"bias": bias}))
    if scale_grad is None:
        scale_grad = torch.ones((), dtype=torch.float32, device=x.device)
    for name, t in (("scale_x", scale_x), ("scale_weight", scale_weight), ("scale_grad", scale_grad)):
        check_tensors((torch.float32,), **{name: t})
        if t.numel() != 1 or t.device != x.device:
            raise BadRequest(name, f"shape {tuple(t.shape)} on {t.device}", f"one element on {x.device}")
    if x.ndim < 1 or x.shape[-1] % BLOCK or not x.shape[-1]:
        raise BadRequest("x", f"shape {tuple(x.shape)}", f"(…, in) with in a multiple of {BLOCK}")
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1] or weight.shape[0] % BLOCK or not weight.shape[0]:
        what = f"(out, {x.shape[-1]}) with out a multiple of {BLOCK}"
        raise BadRequest("weight", f"shape {tuple(weight.shape)}", what)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise BadRequest("bias", f"shape {tuple(bias.shape)}", f"({weight.shape[0]},), the rows of weight")
    y: torch.Tensor = FP8_LINEAR(x, weight, bias, scale_x, scale_weight, scale_grad)
    return y


def _rounded(x: Any, scale: Any, dtype: torch.dtype) -> Any:
    """x / scale in fp8, dense; what is out of range becomes the largest number."""
    most = torch.finfo(dtype).max
    return (rows_of(x).float() / scale.reshape(())).clamp(-most, most).to(dtype).contiguous()


def _product(a: Any, b_lines: Any, scale_a: Any, scale_b: Any, dtype: torch.dtype, bias: Any = None) -> Any:
    """a · b_linesᵀ, both dense along what is summed over."""
    given: dict[str, Any] = {} if bias is None else {"bias": dense(bias), "epilogue": Epilogue.BIAS}
    scales = Scales(a=dense(scale_a.reshape(1)), b=dense(scale_b.reshape(1)))
    return matmul(a, b_lines.T, scales=scales, out_dtype=str(dtype).removeprefix("torch."), **given)


def _forward(x: Any, weight: Any, bias: Any, scale_x: Any, scale_weight: Any, _scale_grad: Any) -> Any:
    a, b = _rounded(x, scale_x, FORWARD), _rounded(weight, scale_weight, FORWARD)
    return _product(a, b, scale_x, scale_weight, x.dtype, bias).view(*x.shape[:-1], weight.shape[0])


def _forward_fake(x: Any, weight: Any, _bias: Any, _scale_x: Any, _scale_weight: Any, _scale_grad: Any) -> Any:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001  # given by name
    x, weight, _, *scales = inputs
    ctx.save_for_backward(x, weight, *scales)


def _backward(ctx: Any, dy: Any) -> tuple[Any, ...]:
    of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
    dx, dweight = FP8_BACKWARD(dy, *ctx.saved_tensors, of_x, of_weight) if of_x or of_weight else (None, None)
    dbias = dy.reshape(-1, dy.shape[-1]).sum(0) if of_bias else None
    return (dx if of_x else None, dweight if of_weight else None, dbias, None, None, None)


def _gradients(
    dy: Any, x: Any, weight: Any, scale_x: Any, scale_weight: Any, scale_grad: Any, of_x: bool, of_weight: bool
) -> tuple[Any, Any]:
    """dx and dweight; rows of zeros fill up what dweight sums over."""
    dx, dweight = empty_result(x), empty_result(weight)
    if of_x:
        a, b = _rounded(dy, scale_grad, BACKWARD), _rounded(weight.T, scale_weight, FORWARD)
        dx = _product(a, b, scale_grad, scale_weight, x.dtype).view(x.shape)
    if of_weight:
        rows = rows_of(x).shape[0]
        a, b = (torch.nn.functional.pad(rows_of(t).T, (0, -rows % BLOCK)) for t in (dy, x))
        a, b = _rounded(a, scale_grad, BACKWARD), _rounded(b, scale_x, FORWARD)
        dweight = _product(a, b, scale_grad, scale_x, x.dtype) if rows else torch.zeros_like(weight)
    return dx, dweight


def _gradients_fake(
    _dy: Any, x: Any, weight: Any, _x: Any, _weight: Any, _grad: Any, of_x: bool, of_weight: bool
) -> tuple[Any, Any]:
    return (
        x.new_empty(x.shape) if of_x else empty_result(x),
        weight.new_empty(weight.shape) if of_weight else empty_result(weight),
    )


FP8_LINEAR = define(
    "fp8_linear",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor scale_x, Tensor scale_weight, Tensor scale_grad) -> Tensor",
    _forward,
    _forward_fake,
    _save,
    _backward,
)
FP8_BACKWARD = define(
    "fp8_linear_backward",
    "(Tensor dy, Tensor x, Tensor weight, Tensor scale_x, Tensor scale_weight, Tensor scale_grad, bool of_x, "
    "bool of_weight) -> (Tensor, Tensor)",
    _gradients,
    _gradients_fake,
)
