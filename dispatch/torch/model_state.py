"""A snapshot of a torch model, to check in some ten microseconds whether the model has changed."""

from __future__ import annotations

import operator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from dispatch.torch.shared import on_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

__all__ = ["ModelState", "TrainedState"]

_END = object()
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class ModelState:
    """A model's tensors with their addresses and layouts, its submodules and attributes, compared by identity.

    The contents of attributes, such as a dict of tensors, are not compared.

    Attributes:
        tensors: parameters, buffers, and attributes that are tensors.
    """

    __slots__ = ("_dicts", "_hooks", "_layouts", "_values", "tensors")

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._dicts: list[dict[str, Any]] = []
        for m in modules:
            self._dicts += [m.__dict__, m._parameters, m._buffers, m._modules]
        self._values = list(self._current_values())
        self._hooks = [h for m in modules for h in (m._forward_hooks, m._forward_pre_hooks)]
        self.tensors = [x for x in self._values if isinstance(x, torch.Tensor)]
        self._layouts = self._current_layouts()

    def _current_layouts(self) -> list[tuple[Any, ...]]:
        """Addresses, dtypes and layouts: `x.data = other` changes them, although x stays the same object."""
        return [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in self.tensors]

    def _current_values(self) -> Iterator[Any]:
        return chain(chain.from_iterable(map(dict.values, self._dicts)), (_END,))

    def why_not(self) -> str:
        """The reason why the model's calls cannot be recorded; empty if they can."""
        if any(type(t) not in _PLAIN_TYPES for t in self.tensors):
            return "a parameter is not a plain tensor"
        if any(not on_gpu(t) for t in self.tensors if t.numel() > 1):
            return "a part of the model is not on the GPU"
        return "modules have hooks" if self.is_hooked() else ""

    def is_hooked(self) -> bool:
        return any(map(len, self._hooks)) or _has_global_forward_hooks()

    def is_unchanged(self) -> bool:
        """Whether all objects, addresses and layouts are the same as when the snapshot was taken."""
        return (
            all(map(operator.is_, self._current_values(), self._values))
            and self._current_layouts() == self._layouts
            and not self.is_hooked()
        )


class TrainedState(ModelState):
    """The snapshot of a model that is trained.

    Attributes:
        parameters: those that require a gradient, each once.
        buffers: the buffers, which the forward may write to.
    """

    __slots__ = ("_gradient_hooks", "_requires_grad", "buffers", "parameters")

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        modules = list(model.modules())
        self._gradient_hooks = [h for m in modules for h in (m._backward_hooks, m._backward_pre_hooks)]
        self._requires_grad = self._current_requires_grad()
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.buffers = list({id(b): b for m in modules for b in m._buffers.values() if b is not None}.values())

    def _current_requires_grad(self) -> list[bool]:
        return [t.requires_grad for t in self.tensors]

    def why_not(self) -> str:
        """The reason why the model's training steps cannot be recorded; empty if they can."""
        if why := super().why_not():
            return why
        parameter_ids = {id(p) for p in self.parameters}
        if any(t.requires_grad and id(t) not in parameter_ids for t in self.tensors):
            return "a tensor of the model that is not a parameter requires a gradient"
        return ""

    def is_hooked(self) -> bool:
        return super().is_hooked() or any(map(len, self._gradient_hooks)) or _has_global_backward_hooks()

    def is_unchanged(self) -> bool:
        return super().is_unchanged() and self._current_requires_grad() == self._requires_grad


def _has_global_backward_hooks() -> bool:
    module = torch.nn.modules.module
    return bool(module._global_backward_hooks or module._global_backward_pre_hooks)


def _has_global_forward_hooks() -> bool:
    module = torch.nn.modules.module
    return bool(module._global_forward_hooks or module._global_forward_pre_hooks)
