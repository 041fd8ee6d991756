"""Which contractions are one matrix product, or a batch of them, over memory as it lies.

The modes of a contraction are of four sorts: K in A and B, M in A and D, N in B and D, and the batch in all three.
Where those of each sort lie in memory as one axis, the same one in each tensor that has them, it is D = A · B for
matrices (M, K), (K, N) and (M, N). Where there is no batch, the slowest modes of M or of N may be one, with the other
operand the same all along; where a batch is two axes, the slower one may be a few calls. Pure arithmetic.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.ops.contraction.modes import lower

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = [
    "SMALLEST",
    "SMALLEST_COMPLEX",
    "Matrix",
    "Product",
    "Sorts",
    "Steps",
    "merges",
    "modes_by_sort",
    "product_along",
    "product_of",
    "steps_of",
]

Steps = dict[str, dict[str, int]]  # of each operand, the stride along each of its modes


class Matrix(NamedTuple):
    """Rows and columns of an operand, behind a batch axis where there is one: extents, and strides in elements."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def has_dense_rows(self) -> bool:
        """Whether its rows are dense, and do not overlap."""
        (rows, columns), (row, column) = self.shape[-2:], self.strides[-2:]
        return (columns == 1 or column == 1) and (rows == 1 or row >= columns)

    @property
    def has_dense_columns(self) -> bool:
        """Whether its columns are."""
        (rows, columns), (row, column) = self.shape[-2:], self.strides[-2:]
        return (rows == 1 or row == 1) and (columns == 1 or column >= rows)


class Product(NamedTuple):
    """D = a · b + c: matrices of a contraction's operands, of which the second may be the left one.

    It is so `calls` times: in each the operands begin so many elements further, as `apart` has it by their names. Where
    it `repeats` one operand is the same all along a batch that another one's layout makes.
    """

    a: Matrix
    b: Matrix
    out: Matrix
    c: Matrix | None
    calls: int = 1
    apart: Mapping[str, int] = MappingProxyType({})
    repeats: bool = False


class Axis(NamedTuple):
    """Modes as one axis: its extent, and its stride in each tensor that has them."""

    extent: int
    steps: tuple[int, ...]


def merged(extents: dict[str, int], steps: Sequence[dict[str, int]], modes: Sequence[str]) -> Axis | str:
    """Modes that tensors share as one axis of each; or the mode that is no part of it."""
    if not modes:
        return Axis(1, (0,) * len(steps))
    order = sorted(modes, key=lambda mode: -steps[-1][mode])
    inner = order[-1]
    extent, found = extents[inner], tuple(each[inner] for each in steps)
    for mode in reversed(order[:-1]):
        if any(each[mode] != step * extent for each, step in zip(steps, found, strict=True)):
            return mode
        extent *= extents[mode]
    return Axis(extent, found)


Sorts = dict[str, list[str]]
Inputs = dict[str, tuple[str, ...]]
INPUTS: Inputs = {"batch": ("a", "b"), "m": ("a",), "n": ("b",), "k": ("a", "b")}  # which have the modes of a sort
MOST_CALLS = 16  # of a product whose batch does not lie as one axis
LEAST = 8  # rows, columns and terms of each matrix of a batch that is one for its layout's sake alone
# The elements of its result. With 40 x 40 complex numbers cuBLASLt took an H200 60 us where cuTENSOR took 52; of real
# ones, and with more, it was as fast.
SMALLEST, SMALLEST_COMPLEX = 64, 4096


def product_of(request: Any) -> Product | str:
    """The matrix product that a contraction is as its operands lie, or why it is none, in the words of a rule."""
    smallest = SMALLEST_COMPLEX if request.layout_of("out").dtype.is_complex else SMALLEST
    return product_along(request.sizes, steps_of(request), smallest=smallest)


def steps_of(request: Any) -> Steps:
    """How the operands of a contraction lie along the modes; c only where it is read."""
    names = ("a", "b", *(("c",) if request.reads_c else ()), "out")
    return {name: lower(request.modes_of(name), request.layout_of(name), request.sizes).steps for name in names}


def modes_by_sort(steps: Steps) -> dict[str, list[str]]:
    """The modes of each sort, in the order of the first operand that has them."""
    in_a, in_b, in_d = (steps[name].keys() for name in ("a", "b", "out"))
    return {
        "batch": [m for m in in_d if m in in_a and m in in_b],
        "m": [m for m in in_d if m in in_a and m not in in_b],
        "n": [m for m in in_d if m in in_b and m not in in_a],
        "k": [m for m in in_a if m in in_b and m not in in_d],
    }


def product_along(
    sizes: dict[str, int], steps: Steps, sorts: Sorts | None = None, *, smallest: int = SMALLEST
) -> Product | str:
    """The product of operands that lie so, or why it is none; `sorts` are the modes of each sort, if they are known."""
    if not all(sizes.values()):
        return "needs an element along each mode"
    sorts = sorts or modes_by_sort(steps)
    there = {mode for modes in sorts.values() for mode in modes}
    if lost := [mode for mode, extent in sizes.items() if extent > 1 and mode not in there]:
        return f"needs modes of two tensors at least, has {lost[0]} of one: sum over it first"
    found = _product(sizes, steps, sorts, INPUTS)
    if not isinstance(found, str):
        return found
    for other, inputs in () if sorts["batch"] else _repeated(sizes, steps, sorts, smallest):
        batched = _product(sizes, steps, other, inputs)
        if not isinstance(batched, str):
            return batched._replace(repeats=True)
    order = sorted(sorts["batch"], key=lambda mode: -steps["out"][mode])
    for count in range(1, len(order)):
        outer = merged(sizes, list(steps.values()), order[:count]) if _are_shared(order[:count], steps) else ""
        if isinstance(outer, str) or outer.extent > MOST_CALLS:
            continue
        called = _product(sizes, steps, {**sorts, "batch": order[count:]}, INPUTS)
        if not isinstance(called, str):
            return called._replace(calls=outer.extent, apart=dict(zip(steps, outer.steps, strict=True)))
    return found


def _are_shared(modes: Sequence[str], steps: Steps) -> bool:
    """Whether all operands step along these."""
    return all(mode in own for own in steps.values() for mode in modes)


def _repeated(sizes: dict[str, int], steps: Steps, sorts: Sorts, smallest: int) -> Iterator[tuple[Sorts, Inputs]]:
    """Batches along the slowest modes of one operand, in which the other one is the same all along."""
    for sort, name in (("m", "a"), ("n", "b")):
        order = sorted(sorts[sort], key=lambda mode: -steps[name][mode])
        for count in range(1, len(order)):
            split = {**sorts, "batch": order[:count], sort: order[count:]}
            rows, columns, terms = (math.prod(sizes[mode] for mode in split[each]) for each in "mnk")
            if min(rows, columns, terms) >= LEAST and rows * columns >= smallest:
                yield split, {**INPUTS, "batch": (name,)}


def _product(sizes: dict[str, int], steps: Steps, sorts: Sorts, inputs: Inputs) -> Product | str:
    """The product with modes of these sorts, or why it is none."""
    names = list(steps)
    axes: dict[str, Axis] = {}
    at: dict[str, dict[str, int]] = {name: {} for name in names}
    for sort, modes in sorts.items():
        owners = inputs[sort] if sort == "k" else (*inputs[sort], *names[2:])
        if any(mode not in steps[name] for name in owners for mode in modes):
            return "needs a c that steps along each mode of the result"
        axis = merged(sizes, [steps[name] for name in owners], modes)
        if isinstance(axis, str):
            return (
                f"needs {', '.join(sorted(modes))} as one axis of {' and '.join(owners)}, has {axis} apart: permute one"
            )
        axes[sort] = axis
        for name, step in zip(owners, axis.steps, strict=True):
            at[name][sort] = step
    if axes["batch"].extent > 1 and all(axes[sort].extent == 1 for sort in "mnk"):
        return "needs a mode that is summed over or of one operand alone, has products of elements: elementwise_binary"
    return _oriented(axes, at)


def _oriented(axes: dict[str, Axis], at: dict[str, dict[str, int]]) -> Product | str:
    """The product, transposed where the result's columns are dense and its rows are not."""
    batch = ("batch",) if axes["batch"].extent > 1 else ()

    def matrix(name: str, rows: str, columns: str) -> Matrix:
        sorts = (*batch, rows, columns)
        extents = tuple(axes[sort].extent for sort in sorts)
        steps = at[name]
        if batch and "batch" not in steps:
            steps = {**steps, "batch": 0}  # the same matrix all along
        return Matrix(
            name, extents, tuple(steps[s] if s == "batch" else steps.get(s, 0) or _dense(axes, s, sorts) for s in sorts)
        )

    straight = at["out"].get("n", 0) == 1 or axes["n"].extent == 1
    left, right, rows, columns = ("a", "b", "m", "n") if straight else ("b", "a", "n", "m")
    found = Product(
        matrix(left, rows, "k"),
        matrix(right, "k", columns),
        matrix("out", rows, columns),
        matrix("c", rows, columns) if "c" in at else None,
    )
    for one in (found.a, found.b):
        if not (one.has_dense_rows or one.has_dense_columns):
            return f"needs {one.name} with dense rows or columns, has strides {list(one.strides)}: permute it"
    for other in (found.out, found.c):
        if other is not None and not other.has_dense_rows:
            return f"needs {other.name} with rows dense as the result's, has strides {list(other.strides)}: permute it"
    return found


def _dense(axes: dict[str, Axis], sort: str, sorts: tuple[str, ...]) -> int:
    """The stride of an axis of one element, which means nothing: that of a dense matrix."""
    step = 1
    for behind in sorts[sorts.index(sort) + 1 :]:
        step *= axes[behind].extent
    return step


def merges(request: Any) -> str:
    """Rule: a contraction that is a matrix product as its operands lie."""
    found = product_of(request)
    return found if isinstance(found, str) else ""
