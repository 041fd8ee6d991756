"""Searches the graph of one forward for the patterns that `fuse` replaces, and notes why others are kept."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from dispatch.torch import fused

__all__ = ["HOOKS", "Note", "Patterns"]

F = nn.functional
RELUS = (F.relu, torch.relu, F.relu_, torch.relu_, "relu", "relu_")
SILUS = (F.silu,)
SUMS = (operator.add, operator.iadd, torch.add)
PRODUCTS = (operator.mul, torch.mul)
FUNCTIONS: dict[Any, Any] = {F.layer_norm: fused.layer_norm, F.rms_norm: fused.rms_norm}
# What the modules of transformers.activations compute, by class name: GELU with tanh or erf, and SiLU.
TRANSFORMERS_ACTIVATIONS = {
    **dict.fromkeys(("GELUTanh", "PytorchGELUTanh", "NewGELUActivation"), "gelu"),
    "GELUActivation": "exact",
    "SiLUActivation": "silu",
}
EXACT_GELU = "GELU is the exact one (erf), but the library has only the tanh approximation"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Note(NamedTuple):
    """One operation that was replaced or kept."""

    where: str  # the path of the module; for a function, the path of the calling module and the name of the fx node
    what: str
    why: str = ""  # the reason why it was not replaced


class Patterns:
    """The search through one graph."""

    def __init__(self, where: str, module: nn.Module, graph: fx.Graph, training: bool, trees: bool) -> None:
        self.where, self.module, self.graph, self.training, self.trees = where, module, graph, training, trees
        self.replaced: list[Note] = []
        self.kept: list[Note] = []
        self.consumed: set[nn.Module] = set()  # modules whose weights the replacements read

    def replace(self) -> None:
        for node in list(self.graph.nodes):
            if self._is_gate(node):
                self._fuse_gate(node)
            elif (name := self._activation(node)) is not None:
                if name != "relu" or not self._fuse_batch_norm(node.args[0] if node.args else None, node):
                    self._fuse_activation(node, name)
            elif node.op == "call_function" and node.target in FUNCTIONS:
                self._replace(node, FUNCTIONS[node.target], node.args, node.kwargs, node.target.__name__)
            elif node.target is F.scaled_dot_product_attention:
                self._replace(node, fused.scaled_dot_product_attention, node.args, node.kwargs, node.target.__name__)
        for node in list(self.graph.nodes):
            if self._child(node, nn.BatchNorm2d) is not None:
                self._fuse_batch_norm(node, None)
        for node in self.graph.nodes:  # operations that were not replaced
            if self._is_linear(node) and not self._is_reported(node):
                self._report_kept(node, "no ReLU or GELU follows it directly")
            elif self._child(node, nn.Conv2d) is not None and not self._is_reported(node):
                self._report_kept(node, "no ReLU follows it directly")
        self.graph.lint()

    # -- kinds of nodes ---------------------------------------------------------------------------------------------
    def _child(self, node: Any, *kinds: type) -> Any:
        """The module that a node calls, if its class is one of these (not a subclass)."""
        if node.op != "call_module":
            return None
        child = self.module.get_submodule(node.target)
        return child if type(child) in kinds else None

    def _is_linear(self, node: Any) -> bool:
        return node.target is F.linear or self._child(node, nn.Linear) is not None

    def _activation(self, node: Any) -> str | None:
        """ "relu", "gelu" (the tanh approximation) or "exact" (GELU with erf); None for other nodes."""
        name = self._transformers_activation(node)
        if name is not None:
            return name if name != "silu" else None
        child = self._child(node, nn.ReLU, nn.GELU)
        if isinstance(child, nn.ReLU) or (node.op in ("call_function", "call_method") and node.target in RELUS):
            return "relu"
        if isinstance(child, nn.GELU):
            return "gelu" if child.approximate == "tanh" else "exact"
        if node.op == "call_function" and node.target is F.gelu:
            return "gelu" if node.kwargs.get("approximate", "none") == "tanh" else "exact"
        return None

    def _transformers_activation(self, node: Any) -> str | None:
        """The activation that a transformers module computes; None for other nodes."""
        if node.op != "call_module":
            return None
        kind = type(self.module.get_submodule(node.target))
        return TRANSFORMERS_ACTIVATIONS.get(kind.__name__) if kind.__module__ == "transformers.activations" else None

    # -- replacements ----------------------------------------------------------------------------------------------
    def _fuse_activation(self, node: Any, name: str) -> None:
        """Fuse an activation with the Linear or Conv2d before it."""
        before = node.args[0] if node.args else node.kwargs.get("input")
        if not isinstance(before, fx.Node):
            return
        conv = self._child(before, nn.Conv2d)
        if conv is None and not self._is_linear(before):
            return
        why = EXACT_GELU if name == "exact" else ""
        with_hooks = [one.target for one in (before, node) if one.op == "call_module" and self._has_hooks(one)]
        if len(before.users) > 1:
            why = "its result is also used elsewhere"
        elif with_hooks:
            why = f"{with_hooks[0]} has hooks"
        elif conv is not None and name != "relu":
            why = "Conv2d is only fused with a ReLU"
        elif conv is not None and (isinstance(conv.padding, str) or conv.padding_mode != "zeros"):
            why = f"its padding is {conv.padding!r}, {conv.padding_mode}"
        if why:
            self._report_kept(before, why)
        elif conv is not None:
            choices = (conv.stride, conv.padding, conv.dilation, conv.groups)
            self._replace(node, fused.conv2d, (*self._operands(before, node), *choices), {}, "Conv2d + ReLU", before)
            self.graph.erase_node(before)
        else:
            what = f"Linear + {'ReLU' if name == 'relu' else 'GELU'}"
            if (last := self._second_linear(node)) is not None:
                _, *second = self._operands(last, last)
                operands = (*self._operands(before, node), *second, name)
                self._replace(last, fused.mlp, operands, {}, f"{what} + Linear", before)
                self.graph.erase_node(node)
            else:
                self._replace(node, fused.linear, (*self._operands(before, node), name), {}, what, before)
            self.graph.erase_node(before)

    def _second_linear(self, node: Any) -> Any:
        """The linear layer that is an activation's only reader and is not followed by an activation; else None."""
        readers = list(node.users)
        if len(readers) != 1 or not self._is_linear(readers[0]) or self._has_hooks(readers[0]):
            return None
        last = readers[0]
        x = last.args[0] if last.args else last.kwargs.get("input")
        next_nodes = list(last.users)
        has_activation = len(next_nodes) == 1 and (self._activation(next_nodes[0]) or "exact") != "exact"
        weights = [one for one in self._linear_operands(last)[1:] if one is not None]
        return last if x is node and node not in weights and not has_activation else None

    # -- a batch norm after a convolution -----------------------------------------------------------------------------
    def _fuse_batch_norm(self, last: Any, relu: Any) -> bool:
        """Fuse a Conv2d with its batch norm and, if present, a sum and a ReLU. True if replaced, or noted why not.

        `last` is the operand of the ReLU; without a ReLU it is the batch norm.
        """
        norm, residual = (last, None) if relu is None else self._norm_and_residual(last)
        bn = None if norm is None else self._child(norm, nn.BatchNorm2d)
        before = norm.args[0] if bn is not None and norm.args else None
        conv = self._child(before, nn.Conv2d) if isinstance(before, fx.Node) else None
        if bn is None or conv is None:
            return False
        chain = [node for node in (before, norm, None if last is norm else last) if node is not None]
        with_hooks = [one.target for one in (before, norm, relu) if one is not None and self._has_hooks(one)]
        inner = chain if relu is not None else chain[:-1]
        if any(len(node.users) > 1 for node in inner):
            if relu is not None:  # the batch norm alone may still be folded
                return False
            self._report_kept(before, "its result is also used elsewhere")
        elif with_hooks:
            self._report_kept(before, f"{with_hooks[0]} has hooks")
        elif isinstance(conv.padding, str) or conv.padding_mode != "zeros":
            self._report_kept(before, f"its padding is {conv.padding!r}, {conv.padding_mode}")
        elif bn.running_mean is None or bn.running_var is None:
            self._report_kept(before, "its batch norm has no running statistics")
        elif self.training:
            self._report_kept(before, "its batch norm is only folded in eval mode")
        else:
            first = norm if relu is None else relu
            with self.graph.inserting_before(first):
                names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
                tensors = [self._get_attr(norm.target, name) for name in names]
            choices = (bn.eps, conv.stride, conv.padding, conv.dilation, conv.groups)
            operands = (*self._operands(before, first), *tensors, *choices, residual, relu is not None)
            what = "Conv2d + BatchNorm2d" + (" + sum" if residual is not None else "")
            what += " + ReLU" if relu is not None else ""
            self._replace(first, fused.conv_of_norm, operands, {}, what, before)
            for node in reversed(chain if relu is not None else chain[:-1]):
                self.graph.erase_node(node)
        return True

    def _norm_and_residual(self, node: Any) -> tuple[Any, Any]:
        """The batch norm that gives a ReLU's operand, and the residual added to it."""
        if not isinstance(node, fx.Node):
            return None, None
        plain = node.op == "call_function" and node.target in SUMS and len(node.args) == 2 and not node.kwargs
        if not plain:
            return node, None
        one, other = node.args
        for norm, residual in ((one, other), (other, one))[: 1 if node.target is operator.iadd else 2]:
            nodes = norm is not residual and isinstance(norm, fx.Node) and isinstance(residual, fx.Node)
            if nodes and self._child(norm, nn.BatchNorm2d) is not None:
                return norm, residual
        return None, None

    def _get_attr(self, where: Any, name: str) -> Any:
        """A node for a parameter or buffer of a submodule; None if that is None."""
        exists = getattr(self.module.get_submodule(where), name) is not None
        return self.graph.create_node("get_attr", f"{where}.{name}") if exists else None

    # -- a gate with SiLU or exact GELU -------------------------------------------------------------------------------
    def _gate_kind(self, node: Any) -> str | None:
        """The activation of a node that can be a gate, "silu" or "exact": it has only one reader. Else None."""
        if not isinstance(node, fx.Node) or len(node.users) != 1 or not node.args:
            return None
        before, called = node.args[0], node.op == "call_function" and node.target in SILUS
        child = self._child(node, nn.SiLU)
        silu = called or child is not None or self._transformers_activation(node) == "silu"
        name = "silu" if silu else self._activation(node)
        if name not in ("silu", "exact") or not isinstance(before, fx.Node):
            return None
        if getattr(child, "inplace", False) or node.kwargs.get("inplace", node.args[1:] == (True,)):
            is_only_reader = self._is_linear(before) and len(before.users) == 1
            return name if is_only_reader else None  # in place: other readers of its operand see the changed values
        return name

    def _is_gate(self, node: Any) -> bool:
        product = node.op == "call_function" and node.target in PRODUCTS and len(node.args) == 2 and not node.kwargs
        return product and any(self._gate_kind(one) is not None for one in node.args)

    def _fuse_gate(self, node: Any) -> None:
        """Replace act(x) · y by one kernel; with `trees`, include the Linear before a SiLU (a CUTLASS kernel)."""
        one, other = node.args
        active, up = (one, other) if self._gate_kind(one) is not None else (other, one)
        name, before = self._gate_kind(active), active.args[0]
        with_hooks = [each.target for each in (before, active) if each.op == "call_module" and self._has_hooks(each)]
        tree = self.trees and name == "silu" and self._is_linear(before) and len(before.users) == 1
        if with_hooks and (tree or active.target in with_hooks):
            self._report_kept(before if self._is_linear(before) else active, f"{with_hooks[0]} has hooks")
        elif not isinstance(up, fx.Node):
            return
        elif tree:
            self._replace(node, fused.gated, (*self._operands(before, node), up), {}, "Linear + SiLU · gate", before)
            self.graph.erase_node(active)
            self.graph.erase_node(before)
        else:
            mode, what = ("silu", "SiLU · up") if name == "silu" else ("gelu", "GELU · up")
            self._replace(node, fused.gated_activation, (before, up, mode), {}, what, active)
            self.graph.erase_node(active)

    def _has_hooks(self, node: Any) -> bool:
        return node.op == "call_module" and any(getattr(self.module.get_submodule(node.target), h) for h in HOOKS)

    @staticmethod
    def _linear_operands(node: Any) -> tuple[Any, Any, Any]:
        """The operands of torch.nn.functional.linear."""
        arguments = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
        return arguments["input"], arguments.get("weight"), arguments.get("bias")

    def _operands(self, node: Any, before: Any) -> tuple[Any, Any, Any]:
        """x, weight and bias of a Linear, a Conv2d or the function linear."""
        if node.op == "call_function":
            return self._linear_operands(node)
        x = node.args[0] if node.args else node.kwargs["input"]
        self.consumed.add(self.module.get_submodule(node.target))
        with self.graph.inserting_before(before):
            return x, self._get_attr(node.target, "weight"), self._get_attr(node.target, "bias")

    def _replace(self, node: Any, function: Any, args: Any, kwargs: Any, what: str, first: Any = None) -> None:
        """Replace a node by a call of a function; `first` is the pattern's first node, for the report."""
        with self.graph.inserting_before(node):
            other = self.graph.call_function(function, args, kwargs)
        node.replace_all_uses_with(other)
        self.graph.erase_node(node)
        self.replaced.append(Note(self._path_of(node if first is None else first), what))

    def _report_kept(self, node: Any, why: str) -> None:
        child = self.module.get_submodule(node.target) if node.op == "call_module" else None
        what = type(child).__name__ if child is not None else getattr(node.target, "__name__", str(node.target))
        self.kept.append(Note(self._path_of(node), what, why))

    def _is_reported(self, node: Any) -> bool:
        return any(note.where == self._path_of(node) for note in self.kept)

    def _path_of(self, node: Any) -> str:
        """The path of a node's module, or of the calling module and the node's name."""
        name = str(node.target if node.op == "call_module" else node.name)
        return f"{self.where}.{name}" if self.where else name
