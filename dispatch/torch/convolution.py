"""`conv2d` with bias, residual and ReLU in one cuDNN call, with autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dispatch.errors import BadRequest, shown
from dispatch.ops.conv import Activation
from dispatch.ops.conv import conv_bwd_data as _conv_bwd_data
from dispatch.ops.conv import conv_bwd_filter as _conv_bwd_filter
from dispatch.ops.conv import conv_fwd as _conv_fwd
from dispatch.torch.shared import autocast, check_tensors, define, dense, empty_result

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["conv2d", "result_shape"]

conv_fwd: Callable[..., Any] = _conv_fwd  # these accept torch tensors, too
conv_bwd_data: Callable[..., Any] = _conv_bwd_data
conv_bwd_filter: Callable[..., Any] = _conv_bwd_filter
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Pair = int | tuple[int, int]


def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """activation(conv(x, weight) + residual + bias): torch.nn.functional.conv2d and the operations after it.

    Args:
        x: (N, C, H, W), with channels first or last; f64, f32, f16 or bf16.
        weight: (K, C / groups, R, S), of x's dtype.
        bias: (K,), of x's dtype.
        stride, padding, dilation: one number, or one for each axis.
        groups: a divisor of C and K.
        activation: None or "relu".
        residual: of the result's shape and x's dtype; only with activation="relu", because only this combination is
            fused in every layout.

    Returns (N, K, …), with channels last if x is stored with channels last and not also contiguous, else with channels
    first. f32 is not rounded to TF32. Under autocast all operands except f64 ones are cast to autocast's dtype. A
    gradient of the gradient is refused. Raises BadRequest for invalid operands, NoRow for operands that cuDNN does not
    support.
    """
    x, weight, bias, residual = autocast(x, weight, bias, residual)
    optional = {name: t for name, t in (("bias", bias), ("residual", residual)) if t is not None}
    check_tensors(DTYPES, x=x, weight=weight, **optional)
    geometry = [*_pair("stride", stride, 1), *_pair("padding", padding, 0), *_pair("dilation", dilation, 1)]
    if activation not in (None, "relu"):
        raise BadRequest("activation", shown(activation), 'None or "relu"')
    if residual is not None and activation is None:
        raise BadRequest(
            "residual",
            "a residual without an activation",
            'a residual only with activation="relu"',
            "add the residual to the result",
        )
    _check_shapes(x, weight, bias, groups)
    _check_result(x, weight, residual, geometry)
    y: torch.Tensor = CONV(x, weight, bias, residual, geometry, groups, activation == "relu")
    return y


def _pair(name: str, value: Any, least: int) -> tuple[int, int]:
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2 or any(type(one) is not int or not least <= one < 1 << 31 for one in pair):
        raise BadRequest(name, shown(value), f"an integer from {least} to 2147483647, or two")
    return (pair[0], pair[1])


def _check_shapes(x: Any, weight: Any, bias: Any, groups: Any) -> None:
    for name, t in (("x", x), ("weight", weight)):
        if t.ndim != 4 or 0 in t.shape:
            hint = (
                "skip the call for an empty batch" if t.ndim == 4 else "x.unsqueeze(0) adds a batch" if t is x else ""
            )
            raise BadRequest(name, f"shape {tuple(t.shape)}", "four axes with extents of 1 or more", hint)
    if type(groups) is not int or groups < 1 or x.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        what = f"{groups!r} with x {tuple(x.shape)} and weight {tuple(weight.shape)}"
        raise BadRequest("groups", what, "weight (K, C / groups, …) where groups divides C and K")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise BadRequest("bias", f"shape {tuple(bias.shape)}", f"({weight.shape[0]},), one for each filter")


def _check_result(x: Any, weight: Any, residual: Any, geometry: list[int]) -> None:
    """BadRequest for filters that do not fit into x with its padding, and for a residual of another shape."""
    shape = _result_shape(x, weight, geometry)
    if shape[2] < 1 or shape[3] < 1:
        what = f"filters {tuple(weight.shape[2:])} with dilation {tuple(geometry[4:])}"
        padded = tuple(x.shape[2 + axis] + 2 * geometry[2 + axis] for axis in (0, 1))
        hint = "increase the padding, or use a smaller filter or dilation"
        raise BadRequest("weight", what, f"filters that fit into x with its padding, {padded}", hint)
    if residual is not None and tuple(residual.shape) != shape:
        raise BadRequest("residual", f"shape {tuple(residual.shape)}", f"{shape}, that of the result")


def _order(x: Any) -> torch.memory_format:
    """Channels last if x has that layout only; a tensor with both layouts counts as channels first."""
    if x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
        return torch.channels_last
    return torch.contiguous_format


def _geometry_arguments(geometry: list[int]) -> dict[str, Any]:
    return {
        "stride": (geometry[0], geometry[1]),
        "pad": (geometry[2], geometry[3]),
        "dilation": (geometry[4], geometry[5]),
    }


def _forward(x: Any, weight: Any, bias: Any, residual: Any, geometry: list[int], groups: int, relu: bool) -> Any:
    order = _order(x)
    y = _forward_fake(x, weight, bias, residual, geometry, groups, relu)
    options: dict[str, Any] = {}
    if bias is not None or relu:  # kernels with a fused activation need a bias
        options["bias"] = dense(weight.new_zeros(weight.shape[0]) if bias is None else bias)
    if residual is not None:
        options["z"] = dense(residual, order)
    if relu:
        options["activation"] = Activation.RELU_FWD
    conv_fwd(dense(x, order), dense(weight, order), out=y, **options, **_geometry_arguments(geometry))
    return y


def result_shape(x: Any, weight: Any, stride: Pair, padding: Pair, dilation: Pair) -> tuple[Any, ...]:
    """The shape of a convolution's result."""
    geometry = [*_pair("stride", stride, 1), *_pair("padding", padding, 0), *_pair("dilation", dilation, 1)]
    return _result_shape(x, weight, geometry)


def _result_shape(x: Any, weight: Any, geometry: list[int]) -> tuple[Any, ...]:
    extents = [
        (x.shape[2 + axis] + 2 * geometry[2 + axis] - geometry[4 + axis] * (weight.shape[2 + axis] - 1) - 1)
        // geometry[axis]
        + 1
        for axis in (0, 1)
    ]
    return (x.shape[0], weight.shape[0], *extents)


def _forward_fake(
    x: Any, weight: Any, _bias: Any, _residual: Any, geometry: list[int], _groups: int, _relu: bool
) -> Any:
    shape = _result_shape(x, weight, geometry)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_order(x))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _, _, geometry, groups, relu = inputs
    ctx.choices = (geometry, groups)
    ctx.save_for_backward(x, weight, output if relu else None)


def _backward(ctx: Any, dy: Any) -> tuple[Any, ...]:
    x, weight, y = ctx.saved_tensors
    needs_dx, needs_dweight, needs_dbias, needs_dresidual = ctx.needs_input_grad[:4]
    dz = dy if y is None else torch.ops.aten.threshold_backward(dy, y, 0)
    dx, dweight = None, None
    if needs_dx or needs_dweight:
        dx, dweight = CONV_BACKWARD(dz, x, weight, *ctx.choices, needs_dx, needs_dweight)
    return (
        dx if needs_dx else None,
        dweight if needs_dweight else None,
        dz.sum((0, 2, 3)) if needs_dbias else None,
        dz if needs_dresidual else None,
        *(None,) * 3,
    )


def _gradients(
    dz: Any, x: Any, weight: Any, geometry: list[int], groups: int, needs_dx: bool, needs_dweight: bool
) -> tuple[Any, Any]:
    """dx and dweight."""
    order = _order(x)
    dz, choices = dense(dz, order), {**_geometry_arguments(geometry), "group_count": groups}
    dx, dweight = _gradients_fake(dz, x, weight, geometry, groups, needs_dx, needs_dweight)
    if needs_dx:
        conv_bwd_data(dz, dense(weight, order), out=dx, **choices)
    if needs_dweight:
        conv_bwd_filter(dz, dense(x, order), out=dweight, **choices)
    return dx, dweight


def _gradients_fake(
    _dz: Any, x: Any, weight: Any, _geometry: list[int], _groups: int, needs_dx: bool, needs_dweight: bool
) -> tuple[Any, Any]:
    dx, dweight = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device, memory_format=_order(x)) if wanted else empty_result(t)
        for t, wanted in ((x, needs_dx), (weight, needs_dweight))
    )
    return dx, dweight


CONV = define(
    "conv2d",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, int[] geometry, int groups, bool relu) -> Tensor",
    _forward,
    _forward_fake,
    _save,
    _backward,
)
CONV_BACKWARD = define(
    "conv2d_backward",
    "(Tensor dz, Tensor x, Tensor weight, int[] geometry, int groups, bool needs_dx, bool needs_dweight) "
    "-> (Tensor, Tensor)",
    _gradients,
    _gradients_fake,
)
