"""Operands of any library with DLPack: imported by the protocol, and results exported by it.

The library makes our stream wait for its work on an operand, and its own stream wait when it imports a result.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from dispatch.device import external_memory
from dispatch.device.dlpack import CODES
from dispatch.device.frameworks.framework import ForeignStorage, Framework
from dispatch.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.tensor import Tensor

__all__ = ["Exchange"]


class Exchange(Framework):
    """A library known only by DLPack; its `from_dlpack` is in the package of its arrays, or in `package.dlpack`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def owns(self, kind: type) -> bool:
        return hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__")

    def tensor(self, operand: str, given: Any) -> Tensor:
        try:
            taken = external_memory.from_dlpack(given)
        except BadRequest as error:
            raise BadRequest(operand, error.given, error.expected, error.hint) from error
        layout = taken.layout
        storage = ForeignStorage(self, layout.device, taken.storage.writer, given, taken.ptr)
        storage.held = taken
        return storage.tensor(layout.dtype, layout.shape, layout.strides, readonly=layout.readonly or self.readonly)

    def wrapped(self, tensor: Tensor) -> Any:
        take = self._takes()
        return tensor if take is None or tensor.dtype not in CODES else take(tensor)

    def _takes(self) -> Callable[[Any], Any] | None:
        for module in (sys.modules.get(self.name), sys.modules.get(f"{self.name}.dlpack")):
            found: Callable[[Any], Any] | None = getattr(module, "from_dlpack", None)
            if found is not None:
                return found
        return None
