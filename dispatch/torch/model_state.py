"""What a torch model consists of, so that it can be asked, in some ten microseconds, whether it is as it was."""

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
    """A model's tensors with their addresses and layouts, its submodules and attributes, told apart by identity.

    What is within an attribute, as a dict of tensors, is not looked at.

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
        """Where and how the tensors lie: x.data = other changes it, and x is the same object."""
        return [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in self.tensors]

    def _current_values(self) -> Iterator[Any]:
        return chain(chain.from_iterable(map(dict.values, self._dicts)), (_END,))

    def why_not(self) -> str:
        """Why a recording would not stand for the model's calls; empty where it would."""
        if any(type(t) not in _PLAIN_TYPES for t in self.tensors):
            return "a parameter is no plain tensor"
        if any(not on_gpu(t) for t in self.tensors if t.numel() > 1):
            return "a part of the model is not on the GPU"
        return "modules have hooks" if self.is_hooked() else ""

    def is_hooked(self) -> bool:
        return any(map(len, self._hooks)) or _hooked_everywhere()

    def is_unchanged(self) -> bool:
        """Whether everything is the same object, and lies where and as it did when this was made."""
        return (
            all(map(operator.is_, self._current_values(), self._values))
            and self._current_layouts() == self._layouts
            and not self.is_hooked()
        )


class TrainedState(ModelState):
    """The same of a model whose gradients are asked for.

    Attributes:
        parameters: those that require a gradient, each once.
        buffers: tensors that the forward may write to.
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
        """Why no training step of the model would be recorded; empty where one would."""
        if why := super().why_not():
            return why
        known = {id(p) for p in self.parameters}
        if any(t.requires_grad and id(t) not in known for t in self.tensors):
            return "a tensor of the model that is no parameter requires a gradient"
        return ""

    def is_hooked(self) -> bool:
        return super().is_hooked() or any(map(len, self._gradient_hooks)) or _gradients_hooked_everywhere()

    def is_unchanged(self) -> bool:
        return super().is_unchanged() and self._current_requires_grad() == self._requires_grad


def _gradients_hooked_everywhere() -> bool:
    module = torch.nn.modules.module
    return bool(module._global_backward_hooks or module._global_backward_pre_hooks)


def _hooked_everywhere() -> bool:
    module = torch.nn.modules.module
    return bool(module._global_forward_hooks or module._global_forward_pre_hooks)
