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

__all__ = ["PLACE", "Call", "buffers_restored", "parameters_apart", "restore", "results_of"]

PLACE = "cuda"  # whose autocast counts


@contextmanager
def parameters_apart(model: nn.Module, parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Give the model others in the same memory: with gradients, hooks and nodes of their own."""
    own: dict[int, Any] = {id(p): torch.nn.Parameter(p.detach()) for p in parameters}
    for p in parameters:
        own[id(p)].__dict__.update(p.__dict__)
    slots = [
        (m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None and id(p) in own
    ]
    try:
        for module, name, p in slots:
            _put(module, name, own[id(p)])
        yield [own[id(p)] for p in parameters]
    finally:
        for module, name, p in slots:
            if module._parameters.get(name) is own[id(p)]:
                _put(module, name, p)


def _put(module: nn.Module, name: str, p: nn.Parameter) -> None:
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
        self.asked = [t.requires_grad for t in tensors]
        self.dtype = torch.get_autocast_dtype(PLACE) if torch.is_autocast_enabled(PLACE) else None

    def run(self, own: list[torch.Tensor]) -> Any:
        """The result over these operands. Weights are cast anew, for a graph must not read what was cast outside."""
        args, kwargs = with_operands(own, self._args, self._kwargs)
        enabled = self.dtype is not None
        with torch.enable_grad(), torch.autocast(PLACE, self.dtype, enabled, cache_enabled=False):
            return self._forward(*args, **kwargs)

    @staticmethod
    def gradients(
        results: list[torch.Tensor], given: list[torch.Tensor], sources: list[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Those of the sources, or None where a result does not depend on one."""
        with torch.autocast(PLACE, enabled=False):
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
