"""`a @ b` of two tensors: `dispatch.matmul`, with vectors as in NumPy.

`device/` cannot import ops, so this module sets the function as `Tensor.product`.
"""

from __future__ import annotations

from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest

__all__ = ["product"]


def product(a: Tensor, b: Tensor) -> Tensor:
    """`dispatch.matmul(a, b)`; a vector on the left is used as a row, one on the right as a column.

    As in NumPy, the axis added to a vector is removed from the result.
    """
    from dispatch.ops.matmul import matmul  # imported at the first product, so that `import dispatch` stays quick

    for name, operand in (("a", a), ("b", b)):
        if operand.ndim == 0:
            raise BadRequest(
                name,
                str(operand.layout),
                "at least one axis",
                "to multiply by a number, use alpha=… of dispatch.matmul",
            )
    result: Tensor = matmul(a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b)
    if b.ndim == 1:
        result = result[..., 0]
    return result[..., 0, :] if a.ndim == 1 and b.ndim > 1 else result[..., 0] if a.ndim == 1 else result


Tensor.product = staticmethod(product)
