"""A call of a model that is to be recorded: made with other operands and parameters, and without a trace.

While a step is recorded the model has parameters in the same memory that are others to autograd: its own ones' hooks
and .grad do not see it, nor does it see the streams on which they were used before.
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

DEVICE_TYPE = "cuda"  # whose autocast counts


@contextmanager
def separate_parameters(model: nn.Module, parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Give the model others in the same memory: with gradients, hooks and nodes of their own."""
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
    if isinstance(module, torch.nn.RNNBase):  # which keeps a list of them
        setattr(module, name, p)
    else:
        module._parameters[name] = p


def results_of(leaves: list[Any]) -> list[torch.Tensor]:
    """The tensors in a result, each once."""
    return list({id(x): x for x in leaves if type(x) is torch.Tensor}.values())


class Call:
    """What a forward is called with and under, so that it can be called with other tensors.

    Attributes:
        model: whose forward it is.
        asked: for each tensor among the operands whether it requires a gradient.
        dtype: autocast's, or None.
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
        empty = [torch.empty(0)] * len(tensors)  # in their places others are put
        self._args, self._kwargs = with_operands(empty, args, kwargs)
        self.requires_grad = [t.requires_grad for t in tensors]
        self.dtype = torch.get_autocast_dtype(DEVICE_TYPE) if torch.is_autocast_enabled(DEVICE_TYPE) else None

    def run(self, inputs: list[torch.Tensor]) -> Any:
        """The result over these operands. Weights are cast anew, for a graph must not read what was cast outside."""
        args, kwargs = with_operands(inputs, self._args, self._kwargs)
        enabled = self.dtype is not None
        with torch.enable_grad(), torch.autocast(DEVICE_TYPE, self.dtype, enabled, cache_enabled=False):
            return self._forward(*args, **kwargs)

    @staticmethod
    def gradients(
        results: list[torch.Tensor], given: list[torch.Tensor], sources: list[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Those of the sources, or None where a result does not depend on one."""
        with torch.autocast(DEVICE_TYPE, enabled=False):
            return list(torch.autograd.grad(results, sources, given, allow_unused=True))


@contextmanager
def buffers_restored(buffers: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """What is written to them in here is undone, and torch does not count that; gives what they were."""
    with torch.inference_mode(False), torch.no_grad():
        before = [b.detach().clone() for b in buffers]
    try:
        yield before
    finally:
        restore(buffers, before)


def restore(buffers: list[torch.Tensor], before: list[torch.Tensor]) -> None:
    """Write to buffers what they were, without torch's counting it."""
    with torch.inference_mode(False), torch.no_grad():
        for b, then in zip(buffers, before, strict=True):
            b.data.copy_(then)
