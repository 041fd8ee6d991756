"""A convolution request in the words of CUTLASS's kernels: its extents and steps, its operands, what a tree's are.

The plans fill a kernel's words from here, rules.py asks it what a kernel can step through. A line is an image of one
row, so that kernels know two and three axes alone. Nothing here chooses anything.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from dispatch.device.tensor import Tensor
from dispatch.keys import F32
from dispatch.libraries.cutlass.visitors import Operand

if TYPE_CHECKING:
    from dispatch.ops.cutlass_conv.base import TreedConvRequest

__all__ = ["alignments", "dims_of", "images", "operands_of", "spatial", "words_of"]

Shape = tuple[int, ...]


def dims_of(request: TreedConvRequest) -> int:
    """How many spatial axes the request's kernel has."""
    return max(2, len(request.x_shape) - 2)


def spatial(request: TreedConvRequest) -> dict[str, Shape]:
    """Extents and steps along the kernel's spatial axes: x, w, y, pre, post, stride, dilation."""
    line = len(request.x_shape) == 3
    steps = request.steps
    extents = {"x": request.x_shape[2:], "w": request.w_shape[2:], "y": request.y_shape[2:]}
    found = {name: (1, *shape) if line else shape for name, shape in extents.items()}
    for name, values in zip(("pre", "post", "stride", "dilation"), steps, strict=True):
        neutral = 0 if name in ("pre", "post") else 1
        found[name] = (neutral, *values) if line else values
    return found


def words_of(request: TreedConvRequest, processors: int) -> dict[str, int]:
    """The words that do not change from run to run; 1 stands for an address that is there."""
    along = spatial(request)
    (n, channels), filters = request.x_shape[:2], request.w_shape[0]
    along["x"] = (n, *along["x"], channels)
    along["w"] = (filters, *along["w"], request.w_shape[1])
    values = {f"problem.{name}{place}": value for name, one in along.items() for place, value in enumerate(one)}
    values |= {"problem.groups": request.groups, "multiprocessors": processors, "a": 1, "b": 1, "out": 1}
    if request.c is not None:
        values["c"] = 1
    pitch = request.result_shape[1]
    for name, kind in request.kinds.items():
        if isinstance(request.given.get(name), Tensor) or name in request.produced:
            values[name] = 1
        if kind in ("load", "store"):
            values[f"{name}.pitch"] = pitch
    return values


def operands_of(request: TreedConvRequest) -> dict[str, Operand]:
    """What each operand that the tree names is, for its visitor; images are matrices with dense rows."""
    found = {}
    for name, kind in request.kinds.items():
        given = request.given.get(name)
        made = request.produced.get(name)
        dtype = made.dtype if made is not None else given.dtype if isinstance(given, Tensor) else F32
        found[name] = Operand(kind, dtype)
    return found


def images(request: TreedConvRequest) -> dict[str, Tensor]:
    """The tensors that kernels take dense with channels last, by name."""
    named = {name: getattr(request, name) for name in (*request.reads, "out")}
    named |= {name: x for name, x in request.given.items() if request.kinds[name] in ("load", "store")}
    return {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}


def alignments(request: TreedConvRequest) -> tuple[int, int]:
    """The most bytes, up to 16, that addresses and channels are multiples of: of the operands, and of the result.

    The source lies as the result does.
    """
    first, second = (getattr(request, name) for name in request.reads[:2])
    inside = [_bytes(tensor) for tensor in (first, second)]
    size = request.result_dtype.bits // 8
    results = [gcd(16, request.result_shape[1] * size)]
    results += [_bytes(tensor) for tensor in (request.out, request.c) if tensor is not None]
    return min(inside), min(results)


def _bytes(tensor: Tensor) -> int:
    return gcd(16, tensor.shape[1] * tensor.dtype.itemsize, tensor.layout.alignment)
