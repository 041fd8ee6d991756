"""Operands from arrays of other libraries, results as arrays of the same library, and copies of views on a device."""

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
    """The library of a function's operands (None for this one), and tensors that share the operands' memory."""

    def __init__(self, **operands: Any) -> None:
        self.framework: Framework | None = None
        self.tensors: list[Tensor] = []
        for name, operand in operands.items():
            framework = check_array(name, operand)
            self.tensors.append(operand if framework is None else framework.tensor(name, operand))
            self.framework = self.framework or framework

    def to_framework(self, tensor: Tensor) -> Any:
        """The result as an array of the operands' library."""
        return tensor if self.framework is None else self.framework.wrapped(tensor)


@contextmanager
def framework_operands(**operands: Any) -> Iterator[FrameworkOperands]:
    """Context manager with the operands, by name; inside it, the current stream is that of their library."""
    converted = FrameworkOperands(**operands)
    stream = None if converted.framework is None else converted.framework.stream(converted.tensors[0].device)
    with NULL_CONTEXT if stream is None else stream:
        yield converted


def copy_view(source: Tensor, out: Tensor | None = None) -> Tensor:
    """Copy a view into `out`, by default a new dense tensor; on a GPU by a kernel, without waiting."""
    if out is None:
        out = source.device.empty(source.shape, source.dtype)
    if source.size:
        roll(source, 0, 0, out=out)
    return out
