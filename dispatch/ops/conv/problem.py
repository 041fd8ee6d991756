"""A convolution request in the terms of CUTLASS's kernels: extents, padding, stride, dilation, and operands.

The plans fill a kernel's words from here; rules.py uses it to check what a kernel supports. An image with one spatial
axis gets a second one of extent 1, so that kernels support only two and three axes. This file chooses no kernel.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, NamedTuple

from dispatch.device.tensor import Tensor
from dispatch.keys import F32
from dispatch.libraries.cutlass.visitors import Operand

if TYPE_CHECKING:
    from dispatch.core.request import Argument
    from dispatch.ops.conv.request import ConvRequest

__all__ = ["ArgumentOrder", "alignments", "dims_of", "images", "operands_of", "spatial_extents", "words_of"]

Shape = tuple[int, ...]


def dims_of(request: ConvRequest) -> int:
    """The number of spatial axes of the request's kernel."""
    return max(2, len(request.x_shape) - 2)


def spatial_extents(request: ConvRequest) -> dict[str, Shape]:
    """Extents, padding, stride and dilation along the kernel's spatial axes: x, w, y, pre, post, stride, dilation."""
    line = len(request.x_shape) == 3
    steps = request.steps
    extents = {"x": request.x_shape[2:], "w": request.w_shape[2:], "y": request.y_shape[2:]}
    padded = {name: (1, *shape) if line else shape for name, shape in extents.items()}
    for name, values in zip(("pre", "post", "stride", "dilation"), steps, strict=True):
        neutral = 0 if name in ("pre", "post") else 1
        padded[name] = (neutral, *values) if line else values
    return padded


def words_of(request: ConvRequest, processors: int) -> dict[str, int]:
    """The words that are the same in every run; 1 stands for an address that is given."""
    extents = spatial_extents(request)
    (n, channels), filters = request.x_shape[:2], request.w_shape[0]
    extents["x"] = (n, *extents["x"], channels)
    extents["w"] = (filters, *extents["w"], request.w_shape[1])
    values = {
        f"problem.{name}{axis}": value
        for name, extent_list in extents.items()
        for axis, value in enumerate(extent_list)
    }
    values |= {"problem.groups": request.groups, "multiprocessors": processors, "a": 1, "b": 1, "out": 1}
    if request.c is not None:
        values["c"] = 1
    pitch = request.result_shape[1]
    for name, kind in request.kinds.items():
        if isinstance(request.operand_values.get(name), Tensor) or name in request.tree_outputs:
            values[name] = 1
        if kind in ("load", "store"):
            values[f"{name}.pitch"] = pitch
    return values


class ArgumentOrder(NamedTuple):
    """The order in which a request's arguments become a kernel's: a, b, c, out, and the operands that the tree names.

    A request without a tree has its numbers in its key and not among its arguments, and may add to the content of
    `out`.
    """

    places: tuple[int, ...]
    numbers: tuple[Argument, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, request: ConvRequest) -> ArgumentOrder:
        """The order of a request's arguments."""
        order = (*request.reads, *request.writes)
        fields = (*request.operand_names, "out" if request.accumulates else "z", "out")
        named = list(zip(fields, ("a", "b", "c", "out"), strict=True))
        named = [(name, word) for name, word in named if name in order]
        places = tuple(order.index(name) for name, _ in named)
        words = tuple(word for _, word in named)
        if request.has_tree:
            kinds = tuple(range(len(order), len(order) + len(request.kinds)))
            return cls((*places, *kinds), (), (*words, *request.kinds))
        numbers = tuple(float(request.operand_values[name]) + 0.0 for name in request.kinds)
        return cls(places, numbers, (*words, *request.kinds))

    def __call__(self, arguments: tuple[Argument, ...]) -> tuple[Argument, ...]:
        return (*(arguments[index] for index in self.places), *self.numbers)


def operands_of(request: ConvRequest) -> dict[str, Operand]:
    """The kind and dtype of each operand that the tree names, for its visitor; images are matrices with dense rows."""
    operands = {}
    for name, kind in request.kinds.items():
        operand = request.operand_values.get(name)
        output = request.tree_outputs.get(name)
        dtype = output.dtype if output is not None else operand.dtype if isinstance(operand, Tensor) else F32
        operands[name] = Operand(kind, dtype)
    return operands


def images(request: ConvRequest) -> dict[str, Tensor]:
    """The tensors that kernels need dense with channels last, by name."""
    named = {name: getattr(request, name) for name in (*request.operand_names, "z", "out")}
    named |= {name: x for name, x in request.operand_values.items() if request.kinds[name] in ("load", "store")}
    return {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}


def alignments(request: ConvRequest) -> tuple[int, int]:
    """The most bytes, up to 16, that addresses and channels are multiples of: of the operands, and of the result.

    The source has the layout of the result.
    """
    first, second = (getattr(request, name) for name in request.operand_names[:2])
    inside = [_bytes(tensor) for tensor in (first, second)]
    size = request.result_dtype.bits // 8
    results = [gcd(16, request.result_shape[1] * size)]
    results += [_bytes(tensor) for tensor in (request.out, request.c) if tensor is not None]
    return min(inside), min(results)


def _bytes(tensor: Tensor) -> int:
    return gcd(16, tensor.shape[1] * tensor.dtype.itemsize, tensor.layout.alignment)
