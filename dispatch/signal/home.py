"""Operands of other libraries taken in, results given back to these, and copies of views on the device."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dispatch.core.operand_checks import check_array
from dispatch.device.stream import NULL_CONTEXT
from dispatch.ops.fft.roll import roll

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.device.frameworks.framework import Framework
    from dispatch.device.tensor import Tensor

__all__ = ["Home", "at_home", "copied"]


class Home:
    """The library that a function's operands are of, if it is another one, and the tensors that stand for these."""

    def __init__(self, **operands: Any) -> None:
        self.framework: Framework | None = None
        self.tensors: list[Tensor] = []
        for name, given in operands.items():
            framework = check_array(name, given)
            self.tensors.append(given if framework is None else framework.tensor(name, given))
            self.framework = self.framework or framework

    def given(self, tensor: Tensor) -> Any:
        """A result as that library has it."""
        return tensor if self.framework is None else self.framework.wrapped(tensor)


@contextmanager
def at_home(**operands: Any) -> Iterator[Home]:
    """Operands by their names; in here the stream is current that is so in their library."""
    home = Home(**operands)
    stream = None if home.framework is None else home.framework.stream(home.tensors[0].device)
    with NULL_CONTEXT if stream is None else stream:
        yield home


def copied(source: Tensor, out: Tensor | None = None) -> Tensor:
    """The elements of a view in a tensor of ours, dense unless it is given; on a GPU by a kernel, without waiting."""
    if out is None:
        out = source.device.empty(source.shape, source.dtype)
    if source.size:
        roll(source, 0, 0, out=out)
    return out
