"""`a @ b` of two tensors: the product of the table, with vectors as NumPy takes them.

Tensors stand below the ops, and know none: they are given this function once, here.
"""

from __future__ import annotations

from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest

__all__ = ["product"]


def product(a: Tensor, b: Tensor) -> Tensor:
    """`dispatch.matmul(a, b)`; a vector is a row on the left, a column on the right, and no axis of the result."""
    from dispatch.ops.matmul import matmul  # with the first product: `import dispatch` stays quick

    for name, operand in (("a", a), ("b", b)):
        if operand.ndim == 0:
            raise BadRequest(name, str(operand.layout), "at least one axis", "alpha=… of dispatch.matmul is a factor")
    result: Tensor = matmul(a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b)
    if b.ndim == 1:
        result = result[..., 0]
    return result[..., 0, :] if a.ndim == 1 and b.ndim > 1 else result[..., 0] if a.ndim == 1 else result


Tensor.product = staticmethod(product)
