"""Operands of any library with DLPack: the protocol imports operands and exports results.

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
    """A library accessed only by DLPack; its `from_dlpack` is in the arrays' package, or in `package.dlpack`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def owns(self, kind: type) -> bool:
        return hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__")

    def tensor(self, operand: str, given: Any) -> Tensor:
        try:
            imported = external_memory.from_dlpack(given)
        except BadRequest as error:
            raise error.about(operand) from error
        layout = imported.layout
        storage = ForeignStorage(self, layout.device, imported.storage.writer, given, imported.ptr)
        storage.held = imported
        return storage.tensor(layout.dtype, layout.shape, layout.strides, readonly=layout.readonly or self.readonly)

    def wrapped(self, tensor: Tensor) -> Any:
        take = self._takes()
        return tensor if take is None or tensor.dtype not in CODES else take(tensor)

    def _takes(self) -> Callable[[Any], Any] | None:
        for module in (sys.modules.get(self.name), sys.modules.get(f"{self.name}.dlpack")):
            importer: Callable[[Any], Any] | None = getattr(module, "from_dlpack", None)
            if importer is not None:
                return importer
        return None
