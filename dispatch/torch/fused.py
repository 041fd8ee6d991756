"""The functions that a fused model calls: an op of this package if it supports the operands, else torch's function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from dispatch.libraries.cutlass import evt
from dispatch.torch import attention, convolution, mlps, norms, products, rotary, trees
from dispatch.torch import gated as gated_ops
from dispatch.torch.shared import autocast, is_strided, is_transformed, overrides_functions

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "LINEAR_DTYPES",
    "MAX_HEAD",
    "conv2d",
    "conv_of_norm",
    "epsilon_of",
    "gated",
    "gated_activation",
    "is_rms_norm",
    "layer_norm",
    "layer_norm_forward",
    "linear",
    "linear_forward",
    "mlp",
    "operands_fit",
    "other_rms_norm_forward",
    "rms_norm",
    "rms_norm_forward",
    "rope",
    "run_attention",
    "scaled_dot_product_attention",
    "supports_attention",
]

F = torch.nn.functional
LINEAR_DTYPES = products.DTYPES
MAX_HEAD = 256  # the largest head size of cuDNN's attention


def operands_fit(dtypes: tuple[torch.dtype, ...], *tensors: Any) -> bool:
    """Whether an op supports the dtypes, devices, layouts and classes of the operands. The first one is a tensor.

    A fused model checks this at each call, so the loop is written for speed: 1.2 µs for three tensors.
    """
    first = tensors[0]
    device_type = "cuda" if first.is_cuda else "cpu"
    if (device_type == "cpu" and not first.is_cpu) or is_transformed():
        return False
    cast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    device, common = first.device, None
    for t in tensors:
        if t is None:
            continue
        dtype, kind = t.dtype, type(t)
        if cast is not None and dtype.is_floating_point and dtype is not torch.float64:
            dtype = cast
        if common is None:
            common = dtype
            if dtype not in dtypes:
                return False
        elif dtype is not common or t.device != device:
            return False
        if t.layout is not torch.strided or t.is_nested:
            return False
        if kind is not torch.Tensor and kind is not nn.Parameter and overrides_functions(t):
            return False
    return True


def linear(x: Any, weight: Any, bias: Any, activation: str | None) -> Any:
    """A linear layer and its activation."""
    if activation == "gelu" and _is_imprecise_gelu(x):
        return F.gelu(linear(x, weight, bias, None), approximate="tanh")
    if x.ndim and operands_fit(products.DTYPES, x, weight, bias):
        return products.linear(x, weight, bias, activation)
    y = F.linear(x, weight, bias)
    if activation is None:
        return y
    return F.relu(y) if activation == "relu" else F.gelu(y, approximate="tanh")


def _is_imprecise_gelu(x: Any) -> bool:
    """Whether cuBLASLt's GELU is less precise than torch's: relative error 1.8e-6 in f32, torch's 1.4e-7."""
    return x.is_cuda and x.dtype is torch.float32 and not torch.is_autocast_enabled("cuda")


def linear_forward(self: Any, x: Any) -> Any:
    """The forward of a torch.nn.Linear."""
    return linear(x, self.weight, self.bias, None)


def mlp(x: Any, weight1: Any, bias1: Any, weight2: Any, bias2: Any, activation: str) -> Any:
    """Two linear layers and the activation between them."""
    imprecise = activation == "gelu" and _is_imprecise_gelu(x)
    if not imprecise and x.ndim and operands_fit(products.DTYPES, x, weight1, bias1, weight2, bias2):
        return mlps.mlp(x, weight1, bias1, weight2, bias2, activation)
    return F.linear(linear(x, weight1, bias1, activation), weight2, bias2)


def conv2d(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    """A convolution followed by a ReLU."""
    if x.ndim == 4 and x.numel() and operands_fit(convolution.DTYPES, x, weight, bias):
        return convolution.conv2d(x, weight, bias, stride, padding, dilation, groups, "relu")
    return F.relu(F.conv2d(x, weight, bias, stride, padding, dilation, groups))


# For each weight of a convolution: the state of the tensors that were folded, and the folded filters and bias.
_FOLDED_FILTERS: Any = WeakTensorKeyDictionary()


def conv_of_norm(
    x: Any,
    weight: Any,
    bias: Any,
    gamma: Any,
    beta: Any,
    mean: Any,
    variance: Any,
    batches: Any,
    eps: float,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    residual: Any,
    relu: bool,
) -> Any:
    """A convolution and its batch norm in eval mode, plus the residual if any, and a ReLU if `relu`.

    `batches` is num_batches_tracked: torch's batch norm does not increment the version of its running statistics.
    """
    choices = (stride, padding, dilation, groups)
    if mean is None or variance is None:  # removed since: the norm then uses batch statistics, in eval mode, too
        y = F.batch_norm(F.conv2d(x, weight, bias, *choices), None, None, gamma, beta, True, 0.0, eps)
    elif not (
        x.ndim == 4 and x.numel() and operands_fit(convolution.DTYPES, x, weight, bias, mean, variance, gamma, beta)
    ):
        y = F.batch_norm(F.conv2d(x, weight, bias, *choices), mean, variance, gamma, beta, False, 0.0, eps)
    else:
        weight, bias = _folded_filters(weight, bias, gamma, beta, mean, variance, batches, eps)
        shape = convolution.result_shape(x, weight, stride, padding, dilation)
        if residual is None or (tuple(residual.shape) == shape and operands_fit(convolution.DTYPES, x, residual)):
            return convolution.conv2d(x, weight, bias, *choices, "relu" if relu else None, residual)
        y = convolution.conv2d(x, weight, bias, *choices)
    y = y if residual is None else y + residual
    return F.relu(y) if relu else y


def _folded_filters(
    weight: Any, bias: Any, gamma: Any, beta: Any, mean: Any, variance: Any, batches: Any, eps: float
) -> tuple[Any, Any]:
    """The filters times the batch norm's scale, and its shift as a bias; cached until a tensor's version changes."""
    tensors = [t for t in (weight, bias, gamma, beta, mean, variance, batches) if t is not None]
    needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if needs_gradient or torch.compiler.is_compiling() or any(t.is_inference() for t in tensors):
        return _fold(weight, bias, gamma, beta, mean, variance, eps)
    state = (eps, [(id(t), t.data_ptr(), t._version) for t in tensors])
    cached = _FOLDED_FILTERS.get(weight)
    if cached is None or cached[0] != state:
        with torch.no_grad(), torch.inference_mode(False):
            cached = (state, _fold(weight, bias, gamma, beta, mean, variance, eps))
        _FOLDED_FILTERS[weight] = cached
    folded: tuple[Any, Any] = cached[1]
    return folded


def _fold(weight: Any, bias: Any, gamma: Any, beta: Any, mean: Any, variance: Any, eps: float) -> tuple[Any, Any]:
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    scale = (variance.to(wide) + eps).rsqrt()
    scale = scale if gamma is None else scale * gamma.to(wide)
    shift = (-mean.to(wide) if bias is None else bias.to(wide) - mean.to(wide)) * scale
    shift = shift if beta is None else shift + beta.to(wide)
    return (weight.to(wide) * scale.view(-1, 1, 1, 1)).to(weight.dtype), shift.to(weight.dtype)


def gated(x: Any, weight: Any, bias: Any, gate: Any) -> Any:
    """silu(x · weightᵀ + bias) · gate; by an epilogue tree if no gradient is needed and CUTLASS has the kernel."""
    tensors = (x, weight, gate) if bias is None else (x, weight, gate, bias)
    halves = (torch.float16, torch.bfloat16)
    needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    fits = (
        not needs_gradient
        and x.ndim
        and x.numel()
        and weight.numel()
        and operands_fit(halves, *tensors)
        and _has_tree_kernels(x)
    )
    if fits and tuple(gate.shape) == (*x.shape[:-1], weight.shape[0]):
        leaves = {} if bias is None else {"bias": bias}
        return trees.tree_linear(x, weight, _silu_gate, gate=gate, **leaves)
    return gated_activation(F.linear(x, weight, bias), gate, "silu")


def gated_activation(gate: Any, up: Any, mode: str) -> Any:
    """act(gate) · up, where act is "silu" or the exact "gelu"."""
    if isinstance(up, torch.Tensor) and _have_one_dtype(gate, up) and gate.shape == up.shape and gate.numel():
        return gated_ops.gated_activation(gate, up, mode)
    return (F.silu(gate) if mode == "silu" else F.gelu(gate)) * up


def rope(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    """The rotary embedding of whole heads of q and k, (batch, heads, tokens, width); None for unsupported operands."""
    has_axes = q.ndim == k.ndim == rotary.AXES and cos.ndim == rotary.ANGLE_AXES
    if not (has_axes and _have_one_dtype(q, k, cos, sin) and cos.shape == sin.shape):
        return None
    (batch, _, tokens, width), (angle_batch, angle_tokens, angle_width) = q.shape, cos.shape
    if k.shape[0] != batch or k.shape[2:] != q.shape[2:] or angle_batch not in (1, batch) or angle_tokens != tokens:
        return None
    if angle_width != width or width % 2 or not q.numel():
        return None
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return None
    return rotary.rope(q, k, cos, sin)


def _have_one_dtype(first: Any, *others: Any) -> bool:
    """Whether strided tensors have one dtype (autocast does not change it here) and are on one device with kernels."""
    dtype, device = first.dtype, first.device
    if not (first.is_cuda or first.is_cpu) or dtype not in gated_ops.DTYPES or is_transformed():
        return False
    for x in (first, *others):
        if x.dtype is not dtype or x.device != device or not is_strided(x) or overrides_functions(x):
            return False
    return True


def _silu_gate(product: Any, gate: Any, bias: Any = None) -> Any:
    return evt.silu(product if bias is None else product + bias) * gate


def _has_tree_kernels(x: Any) -> bool:
    return not x.is_cuda or torch.cuda.get_device_capability(x.device) == (9, 0)


def _supports_norm(x: Any, shape: Sequence[int], *parameters: Any) -> bool:
    """Whether cuDNN's norm supports the operands; under autocast torch runs, because it computes norms in f32."""
    is_autocast = x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)
    return not is_autocast and 0 not in tuple(shape) and operands_fit(norms.DTYPES, x, *parameters)


def layer_norm(x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """torch.nn.functional.layer_norm.

    f32 on a GPU uses torch's kernel: cuDNN's error is up to twice as large if the mean is some standard deviations.
    """
    if eps > 0 and not (x.is_cuda and x.dtype is torch.float32) and _supports_norm(x, normalized_shape, weight, bias):
        return norms.layer_norm(x, normalized_shape, weight, bias, eps)
    return F.layer_norm(x, normalized_shape, weight, bias, eps)


def rms_norm(x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """torch.nn.functional.rms_norm."""
    if (eps is None or eps > 0) and _supports_norm(x, normalized_shape, weight):
        return norms.rms_norm(x, normalized_shape, weight, eps)
    return F.rms_norm(x, normalized_shape, weight, eps)


def layer_norm_forward(self: Any, x: Any) -> Any:
    """The forward of a torch.nn.LayerNorm."""
    return layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


def rms_norm_forward(self: Any, x: Any) -> Any:
    """The forward of a torch.nn.RMSNorm."""
    return rms_norm(x, self.normalized_shape, self.weight, self.eps)


def is_rms_norm(module: nn.Module) -> bool:
    """Whether a module of another library computes an RMS norm over the last axis: tested on numbers, not by name.

    One of the test rows is so small that epsilon affects its result.
    """
    weight, eps = module._parameters.get("weight"), epsilon_of(module)
    has_only_weight = list(module._parameters) == ["weight"] and not module._buffers and not module._modules
    if not has_only_weight or eps is None or weight is None or weight.ndim != 1 or weight.dtype not in norms.DTYPES:
        return False
    if type(weight) is not nn.Parameter or weight.device.type not in ("cpu", "cuda") or not weight.numel():
        return False
    n = weight.numel()
    row = torch.linspace(-2, 3, n, dtype=torch.float64, device=weight.device)
    probe = torch.stack((row, row.flip(0) * eps**0.5, row * 100)).to(weight.dtype)
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        try:
            y: Any = type(module).forward(module, probe)
        except Exception:  # noqa: BLE001  # a user's forward may raise anything
            return False
        expected = F.rms_norm(probe.double(), (n,), weight.double(), eps)
        bound = 8 * torch.finfo(weight.dtype).eps
        same = isinstance(y, torch.Tensor) and y.dtype == probe.dtype and y.shape == probe.shape
        return same and torch.allclose(y.double(), expected, rtol=bound, atol=bound)


def epsilon_of(module: Any) -> float | None:
    """The epsilon of another library's RMS norm; None if the module has none, or several."""
    values = [module.__dict__[name] for name in ("variance_epsilon", "eps", "epsilon") if name in module.__dict__]
    return values[0] if len(values) == 1 and isinstance(values[0], float) and values[0] > 0 else None


def other_rms_norm_forward(self: Any, x: Any) -> Any:
    """The forward of another library's RMS norm."""
    if x.dtype == self.weight.dtype and _supports_norm(x, self.weight.shape, self.weight):
        return norms.rms_norm(x, self.weight.shape, self.weight, epsilon_of(self))
    return type(self).forward(self, x)


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
    if supports_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
        return run_attention(query, key, value, attn_mask, dropout_p, is_causal, scale)
    choices = (attn_mask, dropout_p, is_causal)
    return F.scaled_dot_product_attention(query, key, value, *choices, scale=scale, enable_gqa=enable_gqa)


def run_attention(
    query: Any, key: Any, value: Any, mask: Any, dropout: float, is_causal: bool, scale: float | None
) -> Any:
    """Attention for operands that `supports_attention`."""
    return attention.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal, scale=scale)


def supports_attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> bool:
    """Whether the attention op supports the operands."""
    return (
        operands_fit(attention.DTYPES, query, key, value)
        and _supports_shapes(query, key, value, scale, enable_gqa)
        and 0 <= dropout < 1
        and _supports_mask(mask, query, key, is_causal)
    )


def _supports_mask(mask: Any, query: Any, key: Any, is_causal: bool) -> bool:
    """Whether the op supports a mask; torch itself reports masks that are invalid for it, too."""
    if mask is None:
        return True
    scores = (*query.shape[:3], key.shape[2])
    fits = 2 <= mask.ndim <= 4 and all(m in (1, s) for m, s in zip(mask.shape[::-1], scores[::-1], strict=False))
    dtype = autocast(mask)[0].dtype
    is_plain = type(mask) in (torch.Tensor, torch.nn.Parameter) and mask.device == query.device
    return fits and is_plain and not is_causal and dtype in (torch.bool, autocast(query)[0].dtype)


def _supports_shapes(query: Any, key: Any, value: Any, scale: float | None, enable_gqa: bool) -> bool:
    """Whether cuDNN's attention supports the shapes, in the gradient, too."""
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        return False
    batch, heads, queries, width = query.shape
    batch_of_key, groups, keys, width_of_key = key.shape
    batch_of_value, groups_of_value, values, width_of_value = value.shape
    if batch_of_key != batch or batch_of_value != batch or width_of_key != width:
        return False
    if groups_of_value != groups or values != keys:
        return False
    if not (batch and heads and groups and queries and keys and width and width_of_value):
        return False
    if heads != groups and not (enable_gqa and heads % groups == 0):
        return False
    if width % 8 or width_of_value % 8 or width > MAX_HEAD or width_of_value > MAX_HEAD:
        return False
    return (scale is None or scale > 0) and (queries > 1 or keys > 1)
