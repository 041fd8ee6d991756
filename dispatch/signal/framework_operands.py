"""Arrays of other libraries as operands, results as arrays of the same library, and copies of views on the device."""

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

__all__ = ["FrameworkOperands", "copy_view", "framework_operands"]


class FrameworkOperands:
    """The other library that a function's operands come from, if any, and tensors over the operands' memory."""

    def __init__(self, **operands: Any) -> None:
        self.framework: Framework | None = None
        self.tensors: list[Tensor] = []
        for name, given in operands.items():
            framework = check_array(name, given)
            self.tensors.append(given if framework is None else framework.tensor(name, given))
            self.framework = self.framework or framework

    def to_framework(self, tensor: Tensor) -> Any:
        """A result as an array of that library."""
        return tensor if self.framework is None else self.framework.wrapped(tensor)


@contextmanager
def framework_operands(**operands: Any) -> Iterator[FrameworkOperands]:
    """Operands by name; within, the current stream is that of their library."""
    found = FrameworkOperands(**operands)
    stream = None if found.framework is None else found.framework.stream(found.tensors[0].device)
    with NULL_CONTEXT if stream is None else stream:
        yield found


def copy_view(source: Tensor, out: Tensor | None = None) -> Tensor:
    """The elements of a view in a tensor of ours, dense unless it is given; on a GPU by a kernel, without waiting."""
    if out is None:
        out = source.device.empty(source.shape, source.dtype)
    if source.size:
        roll(source, 0, 0, out=out)
    return out
