"""JAX's arrays as operands: they are never written, and their streams are JAX's own, which orders by DLPack.

There is no faster way in than `__dlpack__(stream=)`, asked in each call (1.3 us with JAX 0.11): JAX tells nobody which
stream it works on, so no call is remembered by one, and `unsafe_buffer_pointer` and `__cuda_array_interface__` do not
say when the elements are there. Only what DLPack hands out keeps them from being donated or deleted meanwhile. JAX has
no C exchange API. The way out is `jax.dlpack.from_dlpack`, for what JAX has made itself is never written.
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
WIDE = (F64, I64, U64, C128)  # what JAX has with jax_enable_x64 alone
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
            known = ", ".join(name for name, kind in Dtype.by_name.items() if kind.bits >= BYTE)
            hint = "x.astype(…)" if dtype is None else "dev.array(x), a copy with two elements to a byte"
            raise BadRequest(operand, f"an array of {given.dtype}", f"one of {known}", hint)
        return super().tensor(operand, given)

    def wrapped(self, tensor: Tensor) -> Any:
        if tensor.dtype in WIDE and not jax.config.jax_enable_x64:
            return tensor  # JAX would take it over in 32 bits, without a word
        if not tensor.layout.is_contiguous:  # JAX takes no gaps between rows
            tensor = tensor.copy()
        if not tensor.device.is_host:
            # XLA may let go of memory that it borrowed while its own streams, which nobody can name, still read it.
            tensor.storage.lend(None)
        return super().wrapped(tensor)


def _check_memory(operand: str, given: Any) -> None:
    """BadRequest for what stands for an array and has no elements, or has them no more, or in several places."""
    if isinstance(given, jax.core.Tracer):
        what, hint = f"a {type(given).__name__} of jit, grad or vmap", "call it outside, or by jax.pure_callback"
        raise BadRequest(operand, what, "an array with memory", hint)
    if not isinstance(given, jax.Array):
        raise BadRequest(operand, f"a {type(given).__name__}, which may change", "an array", "x[...]")
    if jax.dtypes.issubdtype(given.dtype, jax.dtypes.extended):
        raise BadRequest(operand, f"an array of {given.dtype}", "one of numbers", "jax.random.key_data(x) of keys")
    if given.is_deleted():
        hint = "x.copy() before x.delete(), or before a jitted function that is given x by donate_argnums"
        raise BadRequest(operand, "an array that was deleted or donated", "one with memory", hint)
    count = len(given.devices())
    if count > 1:
        hint = "x.addressable_shards[0].data is one device's part, jax.device_put(x, device) a copy of all"
        raise BadRequest(operand, f"an array on {count} devices", "one on a single device", hint)


FRAMEWORK = Jax("jax")
