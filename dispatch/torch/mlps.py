"""`mlp`: two linear layers with an activation between them, which is the epilogue of the first product."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dispatch.errors import BadRequest, shown
from dispatch.keys import Epilogue
from dispatch.ops.matmul import matmul as _matmul
from dispatch.torch import products
from dispatch.torch.products import dense_lines, empty_gelu_argument, weight_gradients
from dispatch.torch.shared import autocast, check_tensors, define, dense, empty_result, move_vmap_axis, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["mlp"]

matmul: Callable[..., Any] = _matmul  # it accepts torch tensors, too
aten = torch.ops.aten
MASK_COLUMNS = 128  # columns per 16 bytes of a ReLU's bit mask


def mlp(
    x: torch.Tensor,
    weight1: torch.Tensor,
    bias1: torch.Tensor | None,
    weight2: torch.Tensor,
    bias2: torch.Tensor | None = None,
    activation: str = "gelu",
) -> torch.Tensor:
    """activation(x · weight1ᵀ + bias1) · weight2ᵀ + bias2, in two products.

    Args:
        x: (…, in), with any number of leading axes; f64, f32, f16 or bf16.
        weight1, weight2: (hidden, in) and (out, hidden), like those of torch.nn.Linear; of x's dtype.
        bias1, bias2: (hidden,) and (out,), of x's dtype.
        activation: "relu", or "gelu" (the tanh approximation, see `linear`).

    Returns (…, out) of x's dtype. The gradient takes four products. With ReLU, the epilogue of one of them multiplies
    by the slope and sums up the gradient of bias1 (DRELU_BGRAD); with GELU, torch's kernel runs between the products.
    They read a bit mask or the argument of GELU, which the forward stores if a gradient is needed. Autocast, gradients
    of gradients and vmap work as in `linear`. Raises BadRequest for invalid operands.
    """
    x, weight1, bias1, weight2, bias2 = autocast(x, weight1, bias1, weight2, bias2)
    if activation not in ("relu", "gelu"):
        raise BadRequest("activation", shown(activation), '"relu" or "gelu"', '"gelu" is the tanh approximation')
    _check(x, weight1, bias1, weight2, bias2)
    tensors = (x, weight1, bias1, weight2, bias2)
    needs_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    y: torch.Tensor = MLP(*tensors, activation, needs_gradient)[0]
    return y


def _check(x: Any, weight1: Any, bias1: Any, weight2: Any, bias2: Any) -> None:
    operands = {"x": x, "weight1": weight1, "bias1": bias1, "weight2": weight2, "bias2": bias2}
    check_tensors(products.DTYPES, **{name: t for name, t in operands.items() if t is not None or "bias" not in name})
    if x.ndim < 1:
        raise BadRequest("x", "a tensor without axes", "(…, in)")
    width = x.shape[-1]
    for name, weight, bias in (("1", weight1, bias1), ("2", weight2, bias2)):
        if weight.ndim != 2 or weight.shape[1] != width:
            raise BadRequest(
                f"weight{name}", f"shape {tuple(weight.shape)}", f"(…, {width}), the width of the input of layer {name}"
            )
        width = weight.shape[0]
        if bias is not None and bias.shape != (width,):
            raise BadRequest(f"bias{name}", f"shape {tuple(bias.shape)}", f"({width},), the rows of weight{name}")


def _epilogue(prefix: str, activation: str, suffix: str) -> Epilogue:
    return Epilogue[prefix + activation.upper() + suffix]


# -- forward -------------------------------------------------------------------------------------------------------
def _forward(
    x: Any, weight1: Any, bias1: Any, weight2: Any, bias2: Any, activation: str, keep: bool
) -> tuple[Any, Any, Any]:
    """y; with `keep` also the hidden layer (rows, hidden) and the tensor from which its slopes are computed."""
    options = {} if bias1 is None else {"bias": dense(bias1)}
    epilogue = _epilogue("", activation, ("_AUX" if keep else "") + ("" if bias1 is None else "_BIAS"))
    rows, n = rows_of(x), weight1.shape[0]
    if keep and activation == "relu" and n % MASK_COLUMNS:  # the library does not write bits after the last column
        options["aux"] = x.new_zeros(mask_shape(rows.shape[0], n), dtype=torch.uint8)
    result = matmul(rows, dense_lines(weight1).t(), epilogue=epilogue, **options)
    hidden, slopes = result if keep else (result, empty_result(x))
    options = {} if bias2 is None else {"bias": dense(bias2)}
    epilogue = Epilogue.NONE if bias2 is None else Epilogue.BIAS
    y = matmul(hidden, dense_lines(weight2).t(), epilogue=epilogue, **options)
    return y.view(*x.shape[:-1], weight2.shape[0]), hidden if keep else empty_result(x), slopes


def _forward_fake(
    x: Any, weight1: Any, _bias1: Any, weight2: Any, _bias2: Any, activation: str, keep: bool
) -> tuple[Any, Any, Any]:
    y = x.new_empty((*x.shape[:-1], weight2.shape[0]))
    if not keep:
        return y, empty_result(x), empty_result(x)
    n = weight1.shape[0]
    argument = empty_gelu_argument(x, n)
    hidden = x.new_empty(argument.shape)
    if activation == "gelu":
        return y, hidden, argument
    return y, hidden, x.new_empty(mask_shape(argument.shape[0], n), dtype=torch.uint8)


def mask_shape(rows: Any, n: Any) -> tuple[Any, Any]:
    """The shape in bytes of ReLU's bit mask: one bit per element, rows of multiples of 16 bytes."""
    return rows, (n + MASK_COLUMNS - 1) // MASK_COLUMNS * MASK_COLUMNS // 8


def _forward_vmap(info: Any, in_dims: Any, *operands: Any) -> Any:
    """Only x may have a mapped axis, which becomes its leading one; nothing is kept for the gradient then."""
    *tensors, activation, _ = move_vmap_axis("mlp", info, in_dims, operands)
    return MLP(*tensors, activation, False), (0, None, None)


# -- backward ------------------------------------------------------------------------------------------------------
def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    *tensors, activation, keep = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.activation = activation
    ctx.save_for_backward(*tensors, *(output[1:] if keep else (None, None)))


def _backward(ctx: Any, dy: Any, *_: Any) -> tuple[Any, ...]:
    *tensors, hidden, slopes = ctx.saved_tensors
    needs = [need and dy is not None for need in ctx.needs_input_grad[:5]]
    if not any(needs):
        return (None,) * 7
    if hidden is None:  # not kept, e.g. under vmap: compute it again
        _, hidden, slopes = MLP(*tensors, ctx.activation, True)
    x, weight1, _, weight2, _ = tensors
    grads = MLP_BACKWARD(dy, x, weight1, weight2, hidden, slopes, ctx.activation, needs)
    return (*(grad if need else None for grad, need in zip(grads, needs, strict=True)), None, None)


def _gradients(
    dy: Any, x: Any, weight1: Any, weight2: Any, hidden: Any, slopes: Any, activation: str, needs: list[bool]
) -> tuple[Any, ...]:
    """dx, dweight1, dbias1, dweight2, dbias2."""
    dy = rows_of(dy)
    second = weight_gradients(dy, hidden, *needs[3:])
    dx, dweight1, dbias1 = (empty_result(x) for _ in range(3))
    if any(needs[:3]):
        if activation == "gelu":
            # cuBLASLt has no product with GELU's slope as its epilogue at these extents. It runs a separate kernel
            # after the product, which takes four times as long as torch's (ViT-B, batch 32, H100: 146 us against 35).
            dz = rows_of(aten.gelu_backward(matmul(dy, dense_lines(weight2)), slopes, approximate="tanh"))
            dweight1, dbias1 = weight_gradients(dz, x, *needs[1:3])
        else:
            summed = needs[2] and dy.numel() and weight1.numel()
            epilogue = _epilogue("D", activation, "_BGRAD" if summed else "")
            result = matmul(dy, dense_lines(weight2), aux=dense(slopes), epilogue=epilogue)
            dz, dbias1 = result if summed else (result, dbias1)
            if needs[2] and not summed:
                dbias1 = dz.sum(0)
            if needs[1]:
                dweight1, _ = weight_gradients(dz, x, True, False)
        if needs[0]:
            dx = matmul(dz, dense_lines(weight1)).view(x.shape)
    return dx, dweight1, dbias1, *second


def _gradients_fake(
    _dy: Any, x: Any, weight1: Any, weight2: Any, _hidden: Any, _slopes: Any, _activation: str, needs: list[bool]
) -> tuple[Any, ...]:
    shapes = (x.shape, weight1.shape, weight1.shape[:1], weight2.shape, weight2.shape[:1])
    return tuple(x.new_empty(shape) if need else empty_result(x) for shape, need in zip(shapes, needs, strict=True))


MLP = define(
    "mlp",
    "(Tensor x, Tensor weight1, Tensor? bias1, Tensor weight2, Tensor? bias2, str activation, bool keep) "
    "-> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    _save,
    _backward,
    _forward_vmap,
)
MLP_BACKWARD = define(
    "mlp_backward",
    "(Tensor dy, Tensor x, Tensor weight1, Tensor weight2, Tensor hidden, Tensor slopes, str activation, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _gradients,
    _gradients_fake,
)
