"""Repeats a call of a model for a recording, with other operands and parameters and without side effects.

While a step is recorded, the model has separate Parameter objects over the same memory. So the recording does not touch
the hooks and .grad of the original parameters, and autograd does not synchronize with the streams where they were used.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dispatch.torch.graph_recorder import with_operands

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

__all__ = ["DEVICE_TYPE", "Call", "buffers_restored", "restore", "results_of", "separate_parameters"]

DEVICE_TYPE = "cuda"  # the device type whose autocast state is recorded


@contextmanager
def separate_parameters(model: nn.Module, parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Give the model separate parameters over the same memory, with their own gradients, hooks and autograd nodes."""
    separate: dict[int, Any] = {id(p): torch.nn.Parameter(p.detach()) for p in parameters}
    for p in parameters:
        separate[id(p)].__dict__.update(p.__dict__)
    slots = [
        (m, name, p)
        for m in model.modules()
        for name, p in m._parameters.items()
        if p is not None and id(p) in separate
    ]
    try:
        for module, name, p in slots:
            _set_parameter(module, name, separate[id(p)])
        yield [separate[id(p)] for p in parameters]
    finally:
        for module, name, p in slots:
            if module._parameters.get(name) is separate[id(p)]:
                _set_parameter(module, name, p)


def _set_parameter(module: nn.Module, name: str, p: nn.Parameter) -> None:
    if isinstance(module, torch.nn.RNNBase):  # it keeps a list of its parameters
        setattr(module, name, p)
    else:
        module._parameters[name] = p


def results_of(leaves: list[Any]) -> list[torch.Tensor]:
    """The tensors in a result, each once."""
    return list({id(x): x for x in leaves if type(x) is torch.Tensor}.values())


class Call:
    """The arguments and modes of a forward, to call it with other tensors.

    Attributes:
        model: the model.
        requires_grad: for each tensor among the operands, whether it requires a gradient.
        dtype: autocast's dtype; None without autocast.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> None:
        self.model, self._forward = model, forward
        empty = [torch.empty(0)] * len(tensors)  # placeholders for the operands
        self._args, self._kwargs = with_operands(empty, args, kwargs)
        self.requires_grad = [t.requires_grad for t in tensors]
        self.dtype = torch.get_autocast_dtype(DEVICE_TYPE) if torch.is_autocast_enabled(DEVICE_TYPE) else None

    def run(self, inputs: list[torch.Tensor]) -> Any:
        """The result for these operands. Autocast's cache is off: a graph must not read weights cast outside."""
        args, kwargs = with_operands(inputs, self._args, self._kwargs)
        enabled = self.dtype is not None
        with torch.enable_grad(), torch.autocast(DEVICE_TYPE, self.dtype, enabled, cache_enabled=False):
            return self._forward(*args, **kwargs)

    @staticmethod
    def gradients(
        results: list[torch.Tensor], output_gradients: list[torch.Tensor], sources: list[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """The gradients of the sources; None for a source that no result depends on."""
        with torch.autocast(DEVICE_TYPE, enabled=False):
            return list(torch.autograd.grad(results, sources, output_gradients, allow_unused=True))


@contextmanager
def buffers_restored(buffers: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Restore the buffers after the block without changing their versions; yields copies of their values."""
    with torch.inference_mode(False), torch.no_grad():
        before = [b.detach().clone() for b in buffers]
    try:
        yield before
    finally:
        restore(buffers, before)


def restore(buffers: list[torch.Tensor], before: list[torch.Tensor]) -> None:
    """Write earlier values to buffers without changing their version counters."""
    with torch.inference_mode(False), torch.no_grad():
        for b, value in zip(buffers, before, strict=True):
            b.data.copy_(value)
