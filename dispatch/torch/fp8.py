"""`fp8_linear`: a linear layer with fp8 products, one scale per tensor, and autograd."""

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

matmul: Callable[..., Any] = _matmul  # it accepts torch tensors, too
DTYPES = (torch.float16, torch.bfloat16)
FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK = 16  # elements: extents of fp8 products are multiples of it


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    scale_grad: torch.Tensor | None = None,
) -> torch.Tensor:
    """x · weightᵀ + bias, with x / scale_x and weight / scale_weight rounded to f8e4m3 for the product.

    Args:
        x: (…, in), f16 or bf16; in is a multiple of 16.
        weight: (out, in), of x's dtype; out is a multiple of 16.
        bias: (out,), of x's dtype.
        scale_x, scale_weight: f32 tensors of one element, above 0, on x's device. The largest magnitude divided by 448
            uses the whole range of f8e4m3; values outside the range are clamped to its largest number.
        scale_grad: the scale of the result's gradient, which is rounded to f8e5m2; None for 1.

    Returns (…, out) of x's dtype; sums are in f32. The products of the gradient have fp8 operands, too. The gradient
    passes through the rounding unchanged, and scales have no gradient. Autocast does not affect this op. Raises
    BadRequest for invalid operands, NoRow if the GPU has no fp8 (before sm_90).
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
    """x / scale in fp8, dense; values out of range are clamped to the largest number."""
    most = torch.finfo(dtype).max
    return (rows_of(x).float() / scale.reshape(())).clamp(-most, most).to(dtype).contiguous()


def _product(a: Any, b_rows: Any, scale_a: Any, scale_b: Any, dtype: torch.dtype, bias: Any = None) -> Any:
    """a · b_rowsᵀ; both are dense along the axis that is summed over."""
    options: dict[str, Any] = {} if bias is None else {"bias": dense(bias), "epilogue": Epilogue.BIAS}
    scales = Scales(a=dense(scale_a.reshape(1)), b=dense(scale_b.reshape(1)))
    return matmul(a, b_rows.T, scales=scales, out_dtype=str(dtype).removeprefix("torch."), **options)


def _forward(x: Any, weight: Any, bias: Any, scale_x: Any, scale_weight: Any, _scale_grad: Any) -> Any:
    a, b = _rounded(x, scale_x, FORWARD), _rounded(weight, scale_weight, FORWARD)
    return _product(a, b, scale_x, scale_weight, x.dtype, bias).view(*x.shape[:-1], weight.shape[0])


def _forward_fake(x: Any, weight: Any, _bias: Any, _scale_x: Any, _scale_weight: Any, _scale_grad: Any) -> Any:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001  # torch passes it by name
    x, weight, _, *scales = inputs
    ctx.save_for_backward(x, weight, *scales)


def _backward(ctx: Any, dy: Any) -> tuple[Any, ...]:
    needs_dx, needs_dweight, needs_dbias = ctx.needs_input_grad[:3]
    dx, dweight = None, None
    if needs_dx or needs_dweight:
        dx, dweight = FP8_BACKWARD(dy, *ctx.saved_tensors, needs_dx, needs_dweight)
    dbias = dy.reshape(-1, dy.shape[-1]).sum(0) if needs_dbias else None
    return (dx if needs_dx else None, dweight if needs_dweight else None, dbias, None, None, None)


def _gradients(
    dy: Any, x: Any, weight: Any, scale_x: Any, scale_weight: Any, scale_grad: Any, needs_dx: bool, needs_dweight: bool
) -> tuple[Any, Any]:
    """dx and dweight; the axis that dweight sums over is padded with zeros."""
    dx, dweight = empty_result(x), empty_result(weight)
    if needs_dx:
        a, b = _rounded(dy, scale_grad, BACKWARD), _rounded(weight.T, scale_weight, FORWARD)
        dx = _product(a, b, scale_grad, scale_weight, x.dtype).view(x.shape)
    if needs_dweight:
        rows = rows_of(x).shape[0]
        a, b = (torch.nn.functional.pad(rows_of(t).T, (0, -rows % BLOCK)) for t in (dy, x))
        a, b = _rounded(a, scale_grad, BACKWARD), _rounded(b, scale_x, FORWARD)
        dweight = _product(a, b, scale_grad, scale_x, x.dtype) if rows else torch.zeros_like(weight)
    return dx, dweight


def _gradients_fake(
    _dy: Any, x: Any, weight: Any, _x: Any, _weight: Any, _grad: Any, needs_dx: bool, needs_dweight: bool
) -> tuple[Any, Any]:
    return (
        x.new_empty(x.shape) if needs_dx else empty_result(x),
        weight.new_empty(weight.shape) if needs_dweight else empty_result(weight),
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
    "(Tensor dy, Tensor x, Tensor weight, Tensor scale_x, Tensor scale_weight, Tensor scale_grad, bool needs_dx, "
    "bool needs_dweight) -> (Tensor, Tensor)",
    _gradients,
    _gradients_fake,
)
