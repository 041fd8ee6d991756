"""The guards of a fused forward: everything it depends on except the weights, checked at each call.

A traced forward contains the module's settings at the time of tracing: strides, an epsilon, the class of an activation.
An op that replaces several children does not call them, so their hooks would not run.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn

from dispatch.torch.patterns import HOOKS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["ForwardGuards", "call_counts"]

# The settings of a child that a pattern reads or assumes. A batch norm is folded only in eval mode.
CHECKED_SETTINGS: dict[type, tuple[str, ...]] = {
    nn.Conv2d: ("stride", "padding", "dilation", "groups", "padding_mode"),
    nn.BatchNorm2d: ("eps", "training"),
    nn.GELU: ("approximate",),
}
OPTIONAL_PARAMETERS = ("weight", "bias")  # a child may have none at first, and get one later
PLAIN_TYPES = (bool, int, float, str, type(None))
GLOBAL_HOOKS = [
    getattr(torch.nn.modules.module, name)
    for name in (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
]


def call_counts(graph: fx.Graph) -> Counter[str]:
    """How often a graph calls each child."""
    return Counter(str(node.target) for node in graph.nodes if node.op == "call_module")


class _GuardedValues:
    """The places of the values that one module's guards check, and the expected values."""

    __slots__ = ("dicts", "hooks", "lengths", "lists", "names", "values")

    def __init__(self) -> None:
        self.dicts: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.values: list[Any] = []
        self.hooks: list[Any] = list(GLOBAL_HOOKS)
        self.lists: list[dict[str, Any]] = []
        self.lengths: list[int] = []

    def expect(self, where: dict[str, Any], name: str, value: Any) -> None:
        self.dicts.append(where)
        self.names.append(name)
        self.values.append(value)

    def holds(self) -> bool:
        """Whether all values are as expected; about 40 ns per value, because the loops run in C."""
        try:
            is_unchanged = list(map(dict.get, self.dicts, self.names)) == self.values
        except (RuntimeError, ValueError):  # a new value is a tensor or an array, whose comparison is no single bool
            return False
        return is_unchanged and not any(self.hooks) and list(map(len, self.lists)) == self.lengths


class ForwardGuards:
    """The conditions under which a fused forward of a module, or of a copy of it, may run.

    Args:
        module: the module in its present state.
        children: the paths of the children that an op replaces.
        attributes: the names of the module's own attributes that matter; None if its forward was traced, because its
            branches may depend on any attribute, and on which children there are.
    """

    def __init__(self, module: nn.Module, children: Iterable[str], attributes: Iterable[str] | None = None) -> None:
        is_traced = attributes is None
        self._children = {path: _child_guards(module.get_submodule(path)) for path in children}
        self._attributes = (
            _plain_attributes(module) if attributes is None else {name: module.__dict__[name] for name in attributes}
        )
        self._absent = [name for name, child in module._modules.items() if child is None] if is_traced else []
        self._lengths = {path: len(found) for path, found in _module_lists(module)} if is_traced else {}
        self._guarded: WeakKeyDictionary[nn.Module, _GuardedValues] = WeakKeyDictionary()

    def holds_for(self, module: nn.Module) -> bool:
        """Whether a module, or a copy of it, is unchanged in everything that the guards cover."""
        guarded = self._guarded.get(module)
        if guarded is not None and guarded.holds():
            return True
        guarded = self._collect(module)  # a child may have been replaced by an equal one
        if guarded is None or not guarded.holds():
            return False
        self._guarded[module] = guarded
        return True

    def holds_while_compiling(self, module: Any) -> bool:
        """The same check in code that torch.compile can trace and turn into its own guards."""
        for name, value in self._attributes.items():
            if getattr(module, name) != value:
                return False
        for name in self._absent:
            if getattr(module, name) is not None:
                return False
        for path, length in self._lengths.items():
            found = module
            for name in path.split(".") if path else ():
                found = getattr(found, name)
            if path and len(found) != length:
                return False
        for path, (kind, settings, _) in self._children.items():
            child = module
            for name in path.split("."):
                child = getattr(child, name)
            if type(child) is not kind or child._forward_hooks or child._forward_pre_hooks:
                return False
            for name, value in settings.items():
                if getattr(child, name) != value:
                    return False
        return True

    def _collect(self, module: Any) -> _GuardedValues | None:
        """The places of the guarded values; None if a child is missing, or is of another class."""
        guarded = _GuardedValues()
        for name, value in self._attributes.items():
            guarded.expect(module.__dict__, name, value)
        for name in self._absent:
            guarded.expect(module._modules, name, None)
        for path, length in self._lengths.items():
            found = _submodule_at(module, path)
            if found is None:
                return None
            guarded.lists.append(found._modules)
            guarded.lengths.append(length)
        for path, (kind, settings, absent) in self._children.items():
            child = module
            for name in path.split("."):
                parent, child = child, child._modules.get(name)
                if child is None:
                    return None
                guarded.expect(parent._modules, name, child)
            if type(child) is not kind:
                return None
            for name, value in settings.items():
                guarded.expect(child.__dict__, name, value)
            for name in absent:
                guarded.expect(child._parameters, name, None)
            guarded.expect(child.__dict__, "forward", None)
            guarded.hooks += [getattr(child, hooks) for hooks in HOOKS]
        return guarded


def _child_guards(child: nn.Module) -> tuple[Any, dict[str, Any], list[str]]:
    """A child's class, its settings, and the names of the parameters that it lacks."""
    kind = type(child)
    settings = {name: child.__dict__[name] for name in CHECKED_SETTINGS.get(kind, ())}
    return kind, settings, [name for name in OPTIONAL_PARAMETERS if child._parameters.get(name, child) is None]


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that its forward may branch on or compute with."""
    given = module.__dict__.items()
    return {name: value for name, value in given if name != "training" and name[0] != "_" and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN_TYPES or (type(value) is tuple and all(type(one) in PLAIN_TYPES for one in value))


def _module_lists(module: nn.Module, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The children of a module and of its nested ModuleLists and ModuleDicts, by their paths."""
    yield path, module._modules
    for name, child in module._modules.items():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _module_lists(child, f"{path}.{name}" if path else name)


def _submodule_at(module: Any, path: str) -> Any:
    """The submodule at a path, None if there is none."""
    for name in path.split(".") if path else ():
        module = None if module is None else module._modules.get(name)
    return module
