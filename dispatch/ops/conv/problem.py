"""A convolution request in the words of CUTLASS's kernels: its extents and steps, its operands, what a tree's are.

The plans fill a kernel's words from here, rules.py asks it what a kernel can step through. A line is an image of one
row, so that kernels know two and three axes alone. Nothing here chooses anything.
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
    """How many spatial axes the request's kernel has."""
    return max(2, len(request.x_shape) - 2)


def spatial_extents(request: ConvRequest) -> dict[str, Shape]:
    """Extents and steps along the kernel's spatial axes: x, w, y, pre, post, stride, dilation."""
    line = len(request.x_shape) == 3
    steps = request.steps
    extents = {"x": request.x_shape[2:], "w": request.w_shape[2:], "y": request.y_shape[2:]}
    found = {name: (1, *shape) if line else shape for name, shape in extents.items()}
    for name, values in zip(("pre", "post", "stride", "dilation"), steps, strict=True):
        neutral = 0 if name in ("pre", "post") else 1
        found[name] = (neutral, *values) if line else values
    return found


def words_of(request: ConvRequest, processors: int) -> dict[str, int]:
    """The words that do not change from run to run; 1 stands for an address that is there."""
    extents = spatial_extents(request)
    (n, channels), filters = request.x_shape[:2], request.w_shape[0]
    extents["x"] = (n, *extents["x"], channels)
    extents["w"] = (filters, *extents["w"], request.w_shape[1])
    values = {f"problem.{name}{place}": value for name, one in extents.items() for place, value in enumerate(one)}
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
    """How a request's arguments come to be those of a kernel: a, b, c, out, and what the tree names.

    A request without a tree has its numbers in its key and not among its arguments, and may add to what `out` held.
    """

    places: tuple[int, ...]
    numbers: tuple[Argument, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, request: ConvRequest) -> ArgumentOrder:
        """That of a request."""
        order = (*request.reads, *request.writes)
        taken = (*request.operand_names, "out" if request.accumulates else "z", "out")
        named = list(zip(taken, ("a", "b", "c", "out"), strict=True))
        named = [(name, word) for name, word in named if name in order]
        places = tuple(order.index(name) for name, _ in named)
        words = tuple(word for _, word in named)
        if request.has_tree:
            kinds = tuple(range(len(order), len(order) + len(request.kinds)))
            return cls((*places, *kinds), (), (*words, *request.kinds))
        numbers = tuple(float(request.operand_values[name]) + 0.0 for name in request.kinds)
        return cls(places, numbers, (*words, *request.kinds))

    def __call__(self, arguments: tuple[Argument, ...]) -> tuple[Argument, ...]:
        return (*(arguments[place] for place in self.places), *self.numbers)


def operands_of(request: ConvRequest) -> dict[str, Operand]:
    """What each operand that the tree names is, for its visitor; images are matrices with dense rows."""
    found = {}
    for name, kind in request.kinds.items():
        given = request.operand_values.get(name)
        made = request.tree_outputs.get(name)
        dtype = made.dtype if made is not None else given.dtype if isinstance(given, Tensor) else F32
        found[name] = Operand(kind, dtype)
    return found


def images(request: ConvRequest) -> dict[str, Tensor]:
    """The tensors that kernels take dense with channels last, by name."""
    named = {name: getattr(request, name) for name in (*request.operand_names, "z", "out")}
    named |= {name: x for name, x in request.operand_values.items() if request.kinds[name] in ("load", "store")}
    return {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}


def alignments(request: ConvRequest) -> tuple[int, int]:
    """The most bytes, up to 16, that addresses and channels are multiples of: of the operands, and of the result.

    The source lies as the result does.
    """
    first, second = (getattr(request, name) for name in request.operand_names[:2])
    inside = [_bytes(tensor) for tensor in (first, second)]
    size = request.result_dtype.bits // 8
    results = [gcd(16, request.result_shape[1] * size)]
    results += [_bytes(tensor) for tensor in (request.out, request.c) if tensor is not None]
    return min(inside), min(results)


def _bytes(tensor: Tensor) -> int:
    return gcd(16, tensor.shape[1] * tensor.dtype.itemsize, tensor.layout.alignment)
