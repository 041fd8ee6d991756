"""`fuse`: finds what the ops of this package do in one call in a model of torch's, and has the model call them.

Each module's own forward is traced by torch.fx with its children as they are, so one that cannot be traced leaves the
others alone. A module gets a forward of its own, which `Report.undo` takes away again: parameters, submodules and
state_dict stay the very same, and the weights are read where they are at each call.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from dispatch.errors import BadRequest
from dispatch.torch import fused

__all__ = ["Note", "Report", "fuse"]

F = nn.functional
RELUS = (F.relu, torch.relu, F.relu_, torch.relu_, "relu", "relu_")
NORMS: dict[Any, Any] = {nn.LayerNorm: fused.of_layer_norm, nn.RMSNorm: fused.of_rms_norm}
FUNCTIONS: dict[Any, Any] = {F.layer_norm: fused.layer_norm, F.rms_norm: fused.rms_norm}
EXACT = "GELU is the exact one, by erf: the library has the tanh approximation"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Note(NamedTuple):
    """One thing that was looked at."""

    where: str  # the path of the module, or of the one whose forward calls the function, and its node
    what: str
    why: str = ""  # it was not replaced


@dataclass
class Report:
    """What `fuse` did to a model.

    Attributes:
        replaced: what now runs by an op of this package, where it takes the operands; else torch's own runs.
        kept: what looks like it and was left, and why.
    """

    replaced: list[Note] = field(default_factory=list)
    kept: list[Note] = field(default_factory=list)
    _modules: list[nn.Module] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Give all modules the forward of their classes again; a second time it does nothing."""
        for module in self._modules:
            module.__dict__.pop("forward", None)
        self._modules.clear()

    def __str__(self) -> str:
        lines = [f"{len(self.replaced)} replaced, {len(self.kept)} kept"]
        lines += [f"  {note.where or 'the model'}: {note.what}" for note in self.replaced]
        lines += [f"  {note.where or 'the model'}: {note.what} kept: {note.why}" for note in self.kept]
        return "\n".join(lines)

    def _install(self, module: nn.Module, forward: Any) -> None:
        module.__dict__["forward"] = MethodType(forward, module)
        self._modules.append(module)


def fuse(model: nn.Module) -> Report:
    """Have a model call the ops of this package where they do in one call what it does in several.

    Replaced are Linear with ReLU or GELU by tanh behind it and Conv2d with ReLU, as modules or functions; LayerNorm,
    RMSNorm, and scaled_dot_product_attention. At each call torch's own runs instead where
    an op does not take the operands, for example f64 in a norm, or f32 in attention. Results are those of before
    within the rounding of the dtype: what is fused is rounded once. Modules with hooks are left as they are.

    What torch.fx sees of a forward is what counts: a branch on an attribute is taken as it is now, one on `training`
    for both, one on the class of an argument as for a torch.fx.Proxy; and what it writes to attributes is not seen.
    A call with arguments that have defaults, or by keyword, runs the forward of before. A fused model can be copied,
    trained, compiled, and moved; to pickle it as a whole, undo first.
    """
    if not isinstance(model, nn.Module):
        raise BadRequest("model", f"a {type(model).__name__}", "a torch.nn.Module")
    report = Report()
    for where, module in model.named_modules():
        kind = type(module)
        if "forward" in module.__dict__:
            report.kept.append(Note(where, kind.__name__, "it has a forward of its own already"))
        elif kind in NORMS:
            report._install(module, NORMS[kind])
            report.replaced.append(Note(where, kind.__name__))
        elif _traceable(module):
            _fuse_one(where, module, report)
    return report


def _traceable(module: nn.Module) -> bool:
    """Whether its forward is one that somebody wrote over other modules or functions."""
    kind = type(module)
    own = kind.forward is nn.Sequential.forward or not kind.__module__.startswith("torch.")
    return own and kind.forward is not nn.Module.forward and not isinstance(module, torch.jit.ScriptModule)


def _fuse_one(where: str, module: nn.Module, report: Report) -> None:
    """Trace a module's own forward, in training and not, and install what was found in it."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    training, graphs = module.training, {}
    try:
        for mode in (True, False):
            module.training = mode
            graphs[mode] = _traced(module, parameters)
    except Exception as error:  # noqa: BLE001  # whatever tracing a forward of others raises
        reason = [*str(error).strip().splitlines(), type(error).__name__][0]
        report.kept.append(Note(where, type(module).__name__, f"torch.fx cannot trace its forward: {reason}"))
        return
    finally:
        module.training = training
    searches = [_Patterns(where, module, graph) for graph in graphs.values()]
    for patterns in searches:
        patterns.replace()
    report.kept += dict.fromkeys(note for patterns in searches for note in patterns.kept)
    replaced = dict.fromkeys(note for patterns in searches for note in patterns.replaced)
    if replaced:
        report.replaced += replaced
        forwards = {mode: type(fx.GraphModule(module, graph)).forward for mode, graph in graphs.items()}
        report._install(module, _forward(forwards, sum(p.default is p.empty for p in parameters)))


class _Shallow(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _traced(module: nn.Module, parameters: list[inspect.Parameter]) -> fx.Graph:
    """The graph of a forward, with parameters that have defaults at these."""
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.KEYWORD_ONLY) for p in parameters):
        raise TypeError("it takes *args, **kwargs or arguments by keyword alone")
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about defaults that no assertion can be written for
        return _Shallow().trace(module, defaults or None)


def _forward(found: dict[bool, Any], count: int) -> Any:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != count:
            return type(self).forward(self, *args, **kwargs)
        return found[self.training](self, *args)

    return forward


class _Patterns:
    """The search through one graph."""

    def __init__(self, where: str, module: nn.Module, graph: fx.Graph) -> None:
        self.where, self.module, self.graph = where, module, graph
        self.replaced: list[Note] = []
        self.kept: list[Note] = []

    def replace(self) -> None:
        for node in list(self.graph.nodes):
            if (name := self._activation(node)) is not None:
                self._behind(node, name)
            elif node.op == "call_function" and node.target in FUNCTIONS:
                self._put(node, FUNCTIONS[node.target], node.args, node.kwargs, node.target.__name__)
            elif node.target is F.scaled_dot_product_attention:
                self._put(node, fused.scaled_dot_product_attention, node.args, node.kwargs, node.target.__name__)
        for node in self.graph.nodes:  # what is left
            if self._is_linear(node) and not self._noted(node):
                self._keep(node, "no ReLU or GELU is right behind it")
            elif self._child(node, nn.Conv2d) is not None and not self._noted(node):
                self._keep(node, "no ReLU is right behind it")
        self.graph.lint()

    # -- what a node is ---------------------------------------------------------------------------------------------
    def _child(self, node: Any, *kinds: type) -> Any:
        """The module that a node calls, if it is of one of these classes itself."""
        if node.op != "call_module":
            return None
        child = self.module.get_submodule(node.target)
        return child if type(child) in kinds else None

    def _is_linear(self, node: Any) -> bool:
        return node.target is F.linear or self._child(node, nn.Linear) is not None

    def _activation(self, node: Any) -> str | None:
        """ "relu", "gelu" by tanh, or "exact" for the other GELU; None for anything else."""
        child = self._child(node, nn.ReLU, nn.GELU)
        if isinstance(child, nn.ReLU) or (node.op in ("call_function", "call_method") and node.target in RELUS):
            return "relu"
        if isinstance(child, nn.GELU):
            return "gelu" if child.approximate == "tanh" else "exact"
        if node.op == "call_function" and node.target is F.gelu:
            return "gelu" if node.kwargs.get("approximate", "none") == "tanh" else "exact"
        return None

    # -- what becomes of it -----------------------------------------------------------------------------------------
    def _behind(self, node: Any, name: str) -> None:
        """An activation, and what it is behind."""
        before = node.args[0] if node.args else node.kwargs.get("input")
        if not isinstance(before, fx.Node):
            return
        conv = self._child(before, nn.Conv2d)
        if conv is None and not self._is_linear(before):
            return
        why = EXACT if name == "exact" else ""
        hooked = [one.target for one in (before, node) if one.op == "call_module" and self._hooked(one)]
        if len(before.users) > 1:
            why = "its result is read by others, too"
        elif hooked:
            why = f"{hooked[0]} has hooks"
        elif conv is not None and name != "relu":
            why = "Conv2d is fused with a ReLU alone"
        elif conv is not None and (isinstance(conv.padding, str) or conv.padding_mode != "zeros"):
            why = f"its padding is {conv.padding!r}, {conv.padding_mode}"
        if why:
            self._keep(before, why)
        elif conv is not None:
            choices = (conv.stride, conv.padding, conv.dilation, conv.groups)
            self._put(node, fused.conv2d, (*self._operands(before, node), *choices), {}, "Conv2d + ReLU", before)
            self.graph.erase_node(before)
        else:
            what = f"Linear + {'ReLU' if name == 'relu' else 'GELU'}"
            self._put(node, fused.linear, (*self._operands(before, node), name), {}, what, before)
            self.graph.erase_node(before)

    def _hooked(self, node: Any) -> bool:
        return any(getattr(self.module.get_submodule(node.target), name) for name in HOOKS)

    def _operands(self, node: Any, before: Any) -> tuple[Any, Any, Any]:
        """x, weight and bias of a Linear or Conv2d, or of the function."""
        if node.op == "call_function":
            given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
            return given["input"], given["weight"], given.get("bias")
        x = node.args[0] if node.args else node.kwargs["input"]
        with self.graph.inserting_before(before):
            weight = self.graph.create_node("get_attr", f"{node.target}.weight")
            biased = self.module.get_submodule(node.target).bias is not None
            return x, weight, self.graph.create_node("get_attr", f"{node.target}.bias") if biased else None

    def _put(self, node: Any, function: Any, args: Any, kwargs: Any, what: str, first: Any = None) -> None:
        """Call a function in the place of a node, and of the first one of its pattern where there are two."""
        with self.graph.inserting_before(node):
            other = self.graph.call_function(function, args, kwargs)
        node.replace_all_uses_with(other)
        self.graph.erase_node(node)
        self.replaced.append(Note(self._place(node if first is None else first), what))

    def _keep(self, node: Any, why: str) -> None:
        child = self.module.get_submodule(node.target) if node.op == "call_module" else None
        what = type(child).__name__ if child is not None else getattr(node.target, "__name__", str(node.target))
        self.kept.append(Note(self._place(node), what, why))

    def _noted(self, node: Any) -> bool:
        return any(note.where == self._place(node) for note in self.kept)

    def _place(self, node: Any) -> str:
        """Where a node's module is, or the node in the module."""
        own = str(node.target if node.op == "call_module" else node.name)
        return f"{self.where}.{own}" if self.where else own
