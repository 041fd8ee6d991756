"""What a fused forward relies on besides weights, which it reads where they are: asked again at each call.

A trace has a module's choices in it as they were: strides, an epsilon, which activation a child is. And an op that does
what several children do calls none of them, so nobody would call their hooks.
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

__all__ = ["Premises", "called"]

# What a pattern reads of a child's class, or takes for granted of it. A batch norm is folded in eval mode alone.
CHOICES: dict[type, tuple[str, ...]] = {
    nn.Conv2d: ("stride", "padding", "dilation", "groups", "padding_mode"),
    nn.BatchNorm2d: ("eps", "training"),
    nn.GELU: ("approximate",),
}
TENSORS = ("weight", "bias")  # which a child may lack, and then get
PLAIN = (bool, int, float, str, type(None))
EVERYWHERE = [
    getattr(torch.nn.modules.module, name)
    for name in (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
]


def called(graph: fx.Graph) -> Counter[str]:
    """How often a graph calls each child."""
    return Counter(str(node.target) for node in graph.nodes if node.op == "call_module")


class _Seen:
    """The places of one module's premises, and what stands there if they hold."""

    __slots__ = ("dicts", "hooks", "lengths", "lists", "names", "values")

    def __init__(self) -> None:
        self.dicts: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.values: list[Any] = []
        self.hooks: list[Any] = list(EVERYWHERE)
        self.lists: list[dict[str, Any]] = []
        self.lengths: list[int] = []

    def expect(self, where: dict[str, Any], name: str, value: Any) -> None:
        self.dicts.append(where)
        self.names.append(name)
        self.values.append(value)

    def holds(self) -> bool:
        """Some 40 ns for each premise: the loops are the interpreter's own."""
        try:
            is_as_it_was = list(map(dict.get, self.dicts, self.names)) == self.values
        except (RuntimeError, ValueError):  # a tensor, or an array, that stands there now is not one truth
            return False
        return is_as_it_was and not any(self.hooks) and list(map(len, self.lists)) == self.lengths


class Premises:
    """What the forward of a module, and of its copies, relies on.

    Args:
        module: as it is now.
        children: the paths of those that an op stands for.
        attributes: the names of its own that count; None where its forward was traced, whose branches may have gone by
            any of them, and by which children there are.
    """

    def __init__(self, module: nn.Module, children: Iterable[str], attributes: Iterable[str] | None = None) -> None:
        is_traced = attributes is None
        self._children = {path: _facts(module.get_submodule(path)) for path in children}
        self._own = _plain(module) if attributes is None else {name: module.__dict__[name] for name in attributes}
        self._absent = [name for name, child in module._modules.items() if child is None] if is_traced else []
        self._lengths = {path: len(found) for path, found in _lists(module)} if is_traced else {}
        self._seen: WeakKeyDictionary[nn.Module, _Seen] = WeakKeyDictionary()

    def hold(self, module: nn.Module) -> bool:
        """Whether a module, or a copy of it, is as it was in all that counts."""
        seen = self._seen.get(module)
        if seen is not None and seen.holds():
            return True
        seen = self._look(module)  # a child may be another object that is alike
        if seen is None or not seen.holds():
            return False
        self._seen[module] = seen
        return True

    def hold_while_traced(self, module: Any) -> bool:
        """The same in words that torch.compile follows, and guards."""
        for name, value in self._own.items():
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
        for path, (kind, choices, _) in self._children.items():
            child = module
            for name in path.split("."):
                child = getattr(child, name)
            if type(child) is not kind or child._forward_hooks or child._forward_pre_hooks:
                return False
            for name, value in choices.items():
                if getattr(child, name) != value:
                    return False
        return True

    def _look(self, module: Any) -> _Seen | None:
        """The places of the premises; None where a child is not there, or is of another class."""
        seen = _Seen()
        for name, value in self._own.items():
            seen.expect(module.__dict__, name, value)
        for name in self._absent:
            seen.expect(module._modules, name, None)
        for path, length in self._lengths.items():
            found = _at(module, path)
            if found is None:
                return None
            seen.lists.append(found._modules)
            seen.lengths.append(length)
        for path, (kind, choices, absent) in self._children.items():
            child = module
            for name in path.split("."):
                parent, child = child, child._modules.get(name)
                if child is None:
                    return None
                seen.expect(parent._modules, name, child)
            if type(child) is not kind:
                return None
            for name, value in choices.items():
                seen.expect(child.__dict__, name, value)
            for name in absent:
                seen.expect(child._parameters, name, None)
            seen.expect(child.__dict__, "forward", None)
            seen.hooks += [getattr(child, hooks) for hooks in HOOKS]
        return seen


def _facts(child: nn.Module) -> tuple[Any, dict[str, Any], list[str]]:
    """A child's class, its choices, and which parameters it has none of."""
    kind = type(child)
    choices = {name: child.__dict__[name] for name in CHOICES.get(kind, ())}
    return kind, choices, [name for name in TENSORS if child._parameters.get(name, child) is None]


def _plain(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module by which its forward may branch, or compute."""
    given = module.__dict__.items()
    return {name: value for name, value in given if name != "training" and name[0] != "_" and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and all(type(one) in PLAIN for one in value))


def _lists(module: nn.Module, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The children of a module, and of the lists in it that its forward goes through, by their paths."""
    yield path, module._modules
    for name, child in module._modules.items():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _lists(child, f"{path}.{name}" if path else name)


def _at(module: Any, path: str) -> Any:
    """What stands at a path, None where nothing does."""
    for name in path.split(".") if path else ():
        module = None if module is None else module._modules.get(name)
    return module
