"""What a fused model calls: an op of this package where it takes the operands, else torch's own functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dispatch.torch import attention, convolution, norms, products
from dispatch.torch.shared import autocast

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["conv2d", "layer_norm", "linear", "of_layer_norm", "of_rms_norm", "rms_norm", "scaled_dot_product_attention"]

F = torch.nn.functional
WIDEST = 256  # head of cuDNN's attention


def _fit(dtypes: tuple[torch.dtype, ...], *tensors: Any) -> bool:
    """Whether an op takes the operands, as far as dtypes, devices and classes go."""
    given = [t for t in autocast(*tensors) if t is not None]
    first = given[0]
    return first.device.type in ("cpu", "cuda") and all(
        t.dtype in dtypes and t.dtype == first.dtype and t.device == first.device for t in given
    ) and not any(is_traceable_wrapper_subclass(t) for t in given)  # fmt: skip


def linear(x: Any, weight: Any, bias: Any, activation: str) -> Any:
    """A linear layer and its activation."""
    if x.ndim and _fit(products.DTYPES, x, weight, bias):
        return products.linear(x, weight, bias, activation)
    y = F.linear(x, weight, bias)
    return F.relu(y) if activation == "relu" else F.gelu(y, approximate="tanh")


def conv2d(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    """A convolution and the ReLU behind it."""
    if x.ndim == 4 and x.numel() and _fit(convolution.DTYPES, x, weight, bias):
        return convolution.conv2d(x, weight, bias, stride, padding, dilation, groups, "relu")
    return F.relu(F.conv2d(x, weight, bias, stride, padding, dilation, groups))


def _normalizes(x: Any, shape: Sequence[int], *parameters: Any) -> bool:
    """Whether cuDNN's norm takes it; under autocast torch computes norms in f32, which is left to it."""
    on = x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)
    return not on and 0 not in tuple(shape) and _fit(norms.DTYPES, x, *parameters)


def layer_norm(x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """torch.nn.functional.layer_norm."""
    if eps > 0 and _normalizes(x, normalized_shape, weight, bias):
        return norms.layer_norm(x, normalized_shape, weight, bias, eps)
    return F.layer_norm(x, normalized_shape, weight, bias, eps)


def rms_norm(x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """torch.nn.functional.rms_norm."""
    if (eps is None or eps > 0) and _normalizes(x, normalized_shape, weight):
        return norms.rms_norm(x, normalized_shape, weight, eps)
    return F.rms_norm(x, normalized_shape, weight, eps)


def of_layer_norm(self: Any, x: Any) -> Any:
    """The forward of a torch.nn.LayerNorm."""
    return layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


def of_rms_norm(self: Any, x: Any) -> Any:
    """The forward of a torch.nn.RMSNorm."""
    return rms_norm(x, self.normalized_shape, self.weight, self.eps)


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """torch.nn.functional.scaled_dot_product_attention."""
    choices = (attn_mask, dropout_p, is_causal)
    if (
        _fit(attention.DTYPES, query, key, value)
        and _attends(query, key, value, scale, enable_gqa)
        and 0 <= dropout_p < 1
        and _masks(attn_mask, query, key, is_causal)
    ):
        return attention.scaled_dot_product_attention(query, key, value, *choices, scale=scale)
    return F.scaled_dot_product_attention(query, key, value, *choices, scale=scale, enable_gqa=enable_gqa)


def _masks(mask: Any, query: Any, key: Any, is_causal: bool) -> bool:
    """Whether the op takes a mask; what torch does not take is left to it to refuse."""
    if mask is None:
        return True
    scores = (*query.shape[:3], key.shape[2])
    fits = 2 <= mask.ndim <= 4 and all(m in (1, s) for m, s in zip(mask.shape[::-1], scores[::-1], strict=False))
    dtype = autocast(mask)[0].dtype
    known = type(mask) in (torch.Tensor, torch.nn.Parameter) and mask.device == query.device
    return fits and known and not is_causal and dtype in (torch.bool, autocast(query)[0].dtype)


def _attends(query: Any, key: Any, value: Any, scale: float | None, enable_gqa: bool) -> bool:
    """Whether cuDNN's attention takes the shapes, and their gradient."""
    if any(t.ndim != 4 or not t.numel() or t.shape[0] != query.shape[0] for t in (query, key, value)):
        return False
    heads = query.shape[1] == key.shape[1] or (enable_gqa and query.shape[1] % key.shape[1] == 0)
    widths = all(t.shape[3] % 8 == 0 and t.shape[3] <= WIDEST for t in (query, value))
    fitting = heads and key.shape[1:3] == value.shape[1:3] and query.shape[3] == key.shape[3]
    return fitting and widths and (scale is None or scale > 0) and max(query.shape[2], key.shape[2]) > 1
