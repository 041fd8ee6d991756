"""JAX's arrays as operands: they are never written, and DLPack orders their uses with JAX's own streams.

Each call imports them by `__dlpack__(stream=)` (1.3 us with JAX 0.11); there is no faster way. JAX does not report the
stream that it uses, so calls cannot be cached by stream; `unsafe_buffer_pointer` and `__cuda_array_interface__` do not
report when the elements are ready; and only a DLPack capsule keeps an array from being donated or deleted meanwhile.
JAX has no C exchange API. Results become JAX arrays by `jax.dlpack.from_dlpack`; arrays made by JAX are never written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.dlpack

from dispatch.device.frameworks.exchange import Exchange
from dispatch.errors import BadRequest
from dispatch.keys import C128, F64, I64, U64, Dtype

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["FRAMEWORK"]

BYTE = 8  # bits
WIDE = (F64, I64, U64, C128)  # dtypes that JAX has only with jax_enable_x64
KINDS = (jax.Array, jax.core.Tracer, *((jax.Ref,) if hasattr(jax, "Ref") else ()))


class Jax(Exchange):
    """JAX."""

    readonly = True

    def owns(self, kind: type) -> bool:
        return issubclass(kind, KINDS)

    def tensor(self, operand: str, given: Any) -> Tensor:
        _check_memory(operand, given)
        dtype = Dtype.by_numpy.get(given.dtype)
        if dtype is None or dtype.bits < BYTE:
            supported = ", ".join(name for name, kind in Dtype.by_name.items() if kind.bits >= BYTE)
            hint = "x.astype(…)" if dtype is None else "dev.array(x) makes a copy with two elements in each byte"
            raise BadRequest(operand, f"an array of {given.dtype}", f"one of {supported}", hint)
        return super().tensor(operand, given)

    def wrapped(self, tensor: Tensor) -> Any:
        if tensor.dtype in WIDE and not jax.config.jax_enable_x64:
            return tensor  # JAX would silently convert it to 32 bits
        if not tensor.layout.is_contiguous:  # JAX does not support gaps between rows
            tensor = tensor.copy()
        if not tensor.device.is_host:
            # XLA may release borrowed memory while its own streams, which are unknown here, still read it.
            tensor.storage.lend(None)
        return super().wrapped(tensor)


def _check_memory(operand: str, given: Any) -> None:
    """BadRequest for a tracer or a reference, and for an array that was deleted or lies on several devices."""
    if isinstance(given, jax.core.Tracer):
        what, hint = (
            f"a {type(given).__name__} of jit, grad or vmap",
            "call it outside of the transformation, or through jax.pure_callback",
        )
        raise BadRequest(operand, what, "an array with memory", hint)
    if not isinstance(given, jax.Array):
        raise BadRequest(operand, f"a {type(given).__name__}, which may change", "an array", "x[...]")
    if jax.dtypes.issubdtype(given.dtype, jax.dtypes.extended):
        raise BadRequest(
            operand,
            f"an array of {given.dtype}",
            "an array of numbers",
            "jax.random.key_data(x) returns the numbers of random keys",
        )
    if given.is_deleted():
        hint = "call x.copy() before x.delete(), or before a jitted function to which donate_argnums donates x"
        raise BadRequest(operand, "an array that was deleted or donated", "one with memory", hint)
    count = len(given.devices())
    if count > 1:
        hint = "x.addressable_shards[0].data is one device's part, jax.device_put(x, device) a copy of all"
        raise BadRequest(operand, f"an array on {count} devices", "one on a single device", hint)


FRAMEWORK = Jax("jax")
