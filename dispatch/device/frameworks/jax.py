"""JAX's arrays as operands: they are never written, and their streams are JAX's own, which orders by DLPack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.dlpack

from dispatch.device.frameworks.exchange import Exchange
from dispatch.errors import BadRequest

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["FRAMEWORK"]


class Jax(Exchange):
    """JAX."""

    readonly = True

    def owns(self, kind: type) -> bool:
        return issubclass(kind, jax.Array) or issubclass(kind, jax.core.Tracer)

    def tensor(self, operand: str, given: Any) -> Tensor:
        if isinstance(given, jax.core.Tracer):
            what = f"a {type(given).__name__} of jit, grad or vmap"
            raise BadRequest(operand, what, "an array with memory", "call it outside, or by jax.pure_callback")
        if len(given.devices()) > 1:
            raise BadRequest(operand, f"an array on {len(given.devices())} devices", "one on a single device")
        return super().tensor(operand, given)

    def wrapped(self, tensor: Tensor) -> Any:
        if not tensor.layout.is_contiguous:  # JAX takes no gaps between rows
            tensor = tensor.copy()
        return jax.dlpack.from_dlpack(tensor)


FRAMEWORK = Jax("jax")
