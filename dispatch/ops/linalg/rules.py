"""What rows of linear algebra ask of a request beyond its dtypes: "needs …, has …", or "" where it is fine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.libraries.cusolver.matrix import batch_step

if TYPE_CHECKING:
    from dispatch.ops.linalg.base import LinalgRequest

__all__ = ["aligned", "even_batches"]


def aligned(request: LinalgRequest) -> str:
    """Every element at a multiple of its size."""
    for name, tensor, _ in request.tensors():
        layout = tensor.layout
        if layout.size and layout.alignment < layout.dtype.itemsize:
            return f"needs {name} at multiples of {layout.dtype.itemsize} bytes, has {layout.alignment}"
    return ""


def even_batches(request: LinalgRequest) -> str:
    """The matrices of a batch at equal distances."""
    before = len(request.batch)
    for name, tensor, _ in request.tensors():
        layout = tensor.layout
        if layout.size and batch_step(layout.shape[:before], layout.strides[:before]) is None:
            return f"needs the matrices of {name} at equal distances, has {layout}: copy it with dev.array(x.numpy())"
    return ""
