"""`gated_activation` with a kernel of this library and autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dispatch.core.framework_call_cache import CACHE_MISS, FunctionCallCache
from dispatch.core.request import run
from dispatch.errors import BadRequest, shown
from dispatch.ops.gated import GatedActivationRequest as _GatedActivationRequest
from dispatch.ops.gated import GatedMode
from dispatch.ops.gated import gated_activation as _gated_activation
from dispatch.ops.gated import gated_activation_bwd as _gated_activation_bwd
from dispatch.torch.shared import check_tensors, define, empty_in_order_of, is_plain_inference, needs_gradient, on_gpu

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DTYPES", "MODES", "gated_activation"]

GatedActivationRequest: Callable[..., Any] = _GatedActivationRequest
run_gated_activation: Callable[..., Any] = _gated_activation  # these accept torch tensors, too
run_gated_activation_bwd: Callable[..., Any] = _gated_activation_bwd
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MODES = tuple(mode.name.lower() for mode in GatedMode)


def gated_activation(gate: torch.Tensor, up: torch.Tensor, mode: str = "silu") -> torch.Tensor:
    """act(gate) · up, element by element, in one kernel: the elementwise part of a gated MLP.

    Args:
        gate: the operand of the activation, in f32, f16, bf16 or f64; any shape and strides, also one half of a tensor.
        up: the other factor, of gate's shape and dtype.
        mode: "silu", "gelu" (with the error function), "gelu_tanh", "relu" or "sigmoid".

    Returns a dense tensor of gate's shape, with its axes in the same order in memory. It is computed in f32 (f64 for
    f64) and rounded once. A gradient of the gradient is refused. Raises BadRequest for invalid operands.
    """
    y: torch.Tensor
    if is_plain_inference():
        y = CALLS.run(gate, up, mode)
        if y is not CACHE_MISS:
            return y
    check_tensors(DTYPES, gate=gate, up=up)
    if up.shape != gate.shape:
        raise BadRequest("up", f"shape {tuple(up.shape)}", f"{tuple(gate.shape)}, the shape of gate")
    if mode not in MODES:
        raise BadRequest("mode", shown(mode), f"one of {', '.join(MODES)}")
    y = GATED(gate, up, mode) if needs_gradient(gate, up) or not GATED.direct(gate, up) else _inference(gate, up, mode)
    return y


CALLS = FunctionCallCache(("gate", "up"), ("mode",))


def _inference(gate: Any, up: Any, mode: str) -> Any:
    """The result without a gradient; caches the plan for the next similar call."""
    if not on_gpu(gate) or CALLS.known(gate, up, mode):
        return run_gated_activation(gate, up, mode)
    request = GatedActivationRequest(gate, up, mode)
    y = run(request)
    CALLS.learn(request, {"gate": "gate", "up": "up"}, (gate, up), (mode,), {})
    return y


def _forward(gate: Any, up: Any, mode: str) -> Any:
    return run_gated_activation(gate, up, mode)


def _fake(gate: Any, _up: Any, _mode: str) -> Any:
    return empty_in_order_of(gate)


def _vmap(info: Any, in_dims: Any, gate: Any, up: Any, mode: str) -> Any:
    """The mapped axis becomes the leading one; an operand without a mapped axis is expanded."""
    size = info.batch_size
    operands = zip((gate, up), in_dims, strict=False)
    both = (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0) for x, dim in operands)
    return GATED(*both, mode), 0


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del output
    gate, up, ctx.mode = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx: Any, dy: Any) -> tuple[Any, ...]:
    return (*GATED_BACKWARD(*ctx.saved_tensors, dy, ctx.mode), None)


def _gradients(gate: Any, up: Any, dy: Any, mode: str) -> tuple[Any, Any]:
    """dgate and dup."""
    dgate_and_dup: tuple[Any, Any] = run_gated_activation_bwd(gate, up, dy, mode)
    return dgate_and_dup


def _gradients_fake(gate: Any, up: Any, _dy: Any, _mode: str) -> tuple[Any, Any]:
    return empty_in_order_of(gate), empty_in_order_of(up)


GATED = define(
    "gated_activation", "(Tensor gate, Tensor up, str mode) -> Tensor", _forward, _fake, _save, _backward, _vmap
)
GATED_BACKWARD = define(
    "gated_activation_backward",
    "(Tensor gate, Tensor up, Tensor dy, str mode) -> (Tensor, Tensor)",
    _gradients,
    _gradients_fake,
)
