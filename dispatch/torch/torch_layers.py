"""Forwards for torch's own MultiheadAttention, TransformerEncoderLayer and TransformerDecoderLayer in a fused model.

In eval mode, the first two run one function of torch for the whole layer, which bypasses their submodules and so the
forwards that `fuse` installed there. The forwards here call the submodules. (That function computes GELU with erf, even
if the layer has GELU with tanh. So in eval mode such a layer's own results differ from those of the forward here, as
they differ from its own results in training.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from dispatch.torch import attention, fused
from dispatch.torch.forward_guards import ForwardGuards
from dispatch.torch.patterns import EXACT_GELU, HOOKS, Note

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["KINDS", "LayerReplacement", "replacement_of"]

F = torch.nn.functional
KINDS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
INNER = ("linear1", "activation", "dropout", "linear2")  # in the order in which they are called


class LayerReplacement(NamedTuple):
    """How a layer is changed."""

    forwards: dict[str, Any]  # the replacements of methods, by method name
    replaced: list[Note]
    kept: list[Note]
    consumed: list[nn.Module]  # modules whose weights the forwards read


def replacement_of(where: str, module: Any, linears: bool) -> LayerReplacement:
    """The changes of `fuse` to a module of one of the KINDS."""
    if isinstance(module, nn.MultiheadAttention):
        why = _why_not(module)
        if why:
            return LayerReplacement({}, [], [Note(where, "MultiheadAttention", why)], [])
        forward = _multihead_with_linears if linears else _multihead
        return LayerReplacement(
            {"forward": forward}, [Note(where, "MultiheadAttention, with need_weights=False")], [], []
        )
    found = LayerReplacement({}, [], [], [])
    if isinstance(module, nn.TransformerEncoderLayer):
        found.forwards["forward"] = encoder_layer_forward
        found.replaced.append(Note(where, "TransformerEncoderLayer, whose modules are called in eval mode, too"))
    first = f"{where}.linear1" if where else "linear1"
    name, why = _activation(module)
    if why:
        found.kept.append(Note(first, "Linear", why))
    else:
        last = "dropout2" if isinstance(module, nn.TransformerEncoderLayer) else "dropout3"
        children = [each for each in INNER if each in module._modules]
        guards = ForwardGuards(module, children, [each for each in INNER if each not in children])
        found.forwards["_ff_block"] = _feed_forward(name, last, guards)
        found.replaced.append(Note(first, f"Linear + {'ReLU' if name == 'relu' else 'GELU'} + Linear"))
        found.consumed.extend((module.linear1, module.linear2))
    return found


# -- the layers ----------------------------------------------------------------------------------------------------
def encoder_layer_forward(
    self: Any, src: Any, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False
) -> Any:
    """The forward of a TransformerEncoderLayer, module by module; for a nested tensor torch's own forward runs."""
    if src.is_nested:
        return type(self).forward(self, src, src_mask, src_key_padding_mask, is_causal)
    mask_arguments = (src_mask, src_key_padding_mask, is_causal)
    if self.norm_first:
        x = src + self._sa_block(self.norm1(src), *mask_arguments)
        return x + self._ff_block(self.norm2(x))
    x = self.norm1(src + self._sa_block(src, *mask_arguments))
    return self.norm2(x + self._ff_block(x))


def _activation(layer: Any) -> tuple[str, str]:
    """The activation between the two linear layers, and the reason why it cannot be fused with them."""
    activation = layer.activation
    inner = {name: getattr(layer, name) for name in INNER}
    with_hooks = [
        name
        for name, module in inner.items()
        if isinstance(module, nn.Module) and any(getattr(module, hooks) for hooks in HOOKS)
    ]
    if with_hooks:
        return "", f"{with_hooks[0]} has hooks"
    if any(type(inner[name]) is not nn.Linear or "forward" in inner[name].__dict__ for name in ("linear1", "linear2")):
        return "", "it or the second one is not a plain Linear"
    if activation in (F.relu, torch.relu) or type(activation) is nn.ReLU:
        return "relu", ""
    if type(activation) is nn.GELU and activation.approximate == "tanh":
        return "gelu", ""
    if activation is F.gelu or type(activation) is nn.GELU:
        return "", EXACT_GELU
    return "", "no ReLU or GELU follows it directly"


def _feed_forward(name: str, last: str, guards: ForwardGuards) -> Callable[[Any, Any], Any]:
    def feed_forward(self: Any, x: Any) -> Any:
        if not (guards.holds_while_compiling if torch.compiler.is_compiling() else guards.holds_for)(self):
            return type(self)._ff_block(self, x)
        one, two = self.linear1, self.linear2
        if self.training and self.dropout.p > 0:
            y = two(self.dropout(fused.linear(x, one.weight, one.bias, name)))
        else:
            y = fused.mlp(x, one.weight, one.bias, two.weight, two.bias, name)
        return getattr(self, last)(y)

    return feed_forward


# -- attention -------------------------------------------------------------------------------------------------------
def _why_not(module: nn.MultiheadAttention) -> str:
    if not module._qkv_same_embed_dim:
        return "its keys or values have a different width than its queries"
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        return "it adds a key and a value (bias_k, bias_v or add_zero_attn)"
    if module.head_dim % 8 or module.head_dim > fused.MAX_HEAD:
        return f"its head size is {module.head_dim}: cuDNN supports multiples of 8 up to {fused.MAX_HEAD}"
    return ""


def _multihead_forward(project: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """The forward of a MultiheadAttention that computes its linear layers with `project`."""

    def of_multihead_attention(
        self: Any,
        query: Any,
        key: Any,
        value: Any,
        key_padding_mask: Any = None,
        need_weights: bool = True,
        attn_mask: Any = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        if need_weights or not _is_supported(self, query, key, value, key_padding_mask, attn_mask, is_causal):
            choices = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            return type(self).forward(self, query, key, value, *choices)
        q, k, v = (_split_heads(self, t) for t in _project(self, query, key, value, project))
        causal = is_causal and key_padding_mask is None  # as in torch: with a padding mask, attn_mask is used instead
        mask = None if causal else _merge_masks(attn_mask, key_padding_mask, q, k)
        dropout = self.dropout if self.training else 0.0
        y = fused.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        y = y.transpose(1, 2) if self.batch_first else y.permute(2, 0, 1, 3)
        return project(y.flatten(-2), self.out_proj.weight, self.out_proj.bias), None

    return of_multihead_attention


_multihead = _multihead_forward(F.linear)
_multihead_with_linears = _multihead_forward(lambda x, weight, bias: fused.linear(x, weight, bias, None))


def _is_supported(self: Any, query: Any, key: Any, value: Any, padding: Any, mask: Any, is_causal: bool) -> bool:
    """Whether torch and cuDNN both support the operands; for all others torch's own forward runs, or reports errors."""
    operands = (query, key, value)
    if any(t.ndim != 3 or t.is_nested or t.shape[2] != self.embed_dim or not t.numel() for t in operands):
        return False
    if not fused.operands_fit(attention.DTYPES, *operands, self.in_proj_weight, self.out_proj.weight):
        return False
    batch, tokens = (0, 1) if self.batch_first else (1, 0)
    n, queries, keys = query.shape[batch], query.shape[tokens], key.shape[tokens]
    fits = key.shape == value.shape and key.shape[batch] == n and max(queries, keys) > 1
    fits = fits and not (is_causal and mask is None)
    shapes = ((queries, keys), (n * self.num_heads, queries, keys))
    return fits and _is_mask(mask, shapes, query) and _is_mask(padding, ((n, keys),), query)


def _is_mask(mask: Any, shapes: tuple[tuple[int, ...], ...], query: Any) -> bool:
    if mask is None:
        return True
    return mask.dtype in (torch.bool, query.dtype) and mask.device == query.device and tuple(mask.shape) in shapes


def _merge_masks(mask: Any, padding: Any, q: Any, k: Any) -> Any:
    """One mask (…, queries, keys) for both: True for visible keys, or the numbers to add to the scores."""
    n, heads, queries, _ = q.shape
    keys = k.shape[2]
    masks = []
    if mask is not None:
        masks.append(mask[None, None] if mask.ndim == 2 else mask.reshape(n, heads, queries, keys))
    if padding is not None:
        masks.append(padding.reshape(n, 1, 1, keys))
    if not masks:
        return None
    if all(one.dtype == torch.bool for one in masks):
        return ~(masks[0] if len(masks) == 1 else masks[0] | masks[1])
    added = [one if one.dtype != torch.bool else q.new_zeros(one.shape).masked_fill(one, -torch.inf) for one in masks]
    return added[0] if len(added) == 1 else added[0] + added[1]


def _project(self: Any, query: Any, key: Any, value: Any, project: Any) -> Any:
    """Queries, keys and values, with one product for each distinct operand."""
    weight, bias, width = self.in_proj_weight, self.in_proj_bias, self.embed_dim
    if query is key and key is value:
        return project(query, weight, bias).chunk(3, -1)
    bounds = ((query, 0, 1), (key, 1, 3)) if key is value else ((query, 0, 1), (key, 1, 2), (value, 2, 3))
    projected: list[Any] = []
    for x, start, stop in bounds:
        rows = slice(start * width, stop * width)
        y = project(x, weight[rows], None if bias is None else bias[rows])
        projected += y.chunk(stop - start, -1)
    return projected


def _split_heads(self: Any, x: Any) -> Any:
    """(batch, heads, tokens, head), a view."""
    x = x.unflatten(-1, (self.num_heads, self.head_dim))
    return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)
