"""Contractions that are one matrix product, or a batch of them, without copies of the operands.

The modes of a contraction have four roles: K in A and B, M in A and D, N in B and D, and the batch in all three. If the
modes of each role merge into one axis, the same in each tensor that has them, the contraction is D = A · B for matrices
(M, K), (K, N) and (M, N). If there is no batch, the slowest modes of M or of N may serve as one, along which the other
operand is repeated; if the batch is two axes, the slower one may be a few calls. Pure arithmetic.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.ops.contraction.modes import lower

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = [
    "MIN_BATCHED_ELEMENTS",
    "MIN_BATCHED_ELEMENTS_COMPLEX",
    "Matrix",
    "Product",
    "Roles",
    "Steps",
    "modes_by_role",
    "modes_merge",
    "product_along",
    "product_of",
    "steps_of",
]

Steps = dict[str, dict[str, int]]  # for each operand, the stride along each of its modes


class Matrix(NamedTuple):
    """An operand as a matrix: rows and columns, after a batch axis if there is one; strides are in elements."""

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
        """Whether its columns are dense, and do not overlap."""
        (rows, columns), (row, column) = self.shape[-2:], self.strides[-2:]
        return (rows == 1 or row == 1) and (columns == 1 or column >= rows)


class Product(NamedTuple):
    """D = a · b + c: matrices of a contraction's operands, which may have changed places.

    It takes `calls` calls; the offset of an operand between two of them is `call_offsets[name]` elements. If it
    `repeats`, one operand is repeated along a batch whose modes only the other operand has.
    """

    a: Matrix
    b: Matrix
    out: Matrix
    c: Matrix | None
    calls: int = 1
    call_offsets: Mapping[str, int] = MappingProxyType({})
    repeats: bool = False


class Axis(NamedTuple):
    """Modes as one axis: its extent, and its stride in each tensor that has them."""

    extent: int
    steps: tuple[int, ...]


def merge_modes(extents: dict[str, int], steps: Sequence[dict[str, int]], modes: Sequence[str]) -> Axis | str:
    """The modes that tensors share merged into one axis of each; or the first mode that does not merge."""
    if not modes:
        return Axis(1, (0,) * len(steps))
    order = sorted(modes, key=lambda mode: -steps[-1][mode])
    inner = order[-1]
    extent, inner_strides = extents[inner], tuple(each[inner] for each in steps)
    for mode in reversed(order[:-1]):
        if any(each[mode] != step * extent for each, step in zip(steps, inner_strides, strict=True)):
            return mode
        extent *= extents[mode]
    return Axis(extent, inner_strides)


Roles = dict[str, list[str]]
Inputs = dict[str, tuple[str, ...]]
INPUTS: Inputs = {"batch": ("a", "b"), "m": ("a",), "n": ("b",), "k": ("a", "b")}  # operands with the modes of a role
MAX_CALLS = 16  # of a product whose batch does not merge into one axis
MIN_BATCHED_EXTENT = 8  # rows, columns and terms of each matrix of a batch that repeats an operand
# The minimum number of elements of its result. For 40 x 40 complex numbers cuBLASLt took 60 us on an H200 and cuTENSOR
# 52; for real numbers, and for more elements, it was as fast.
MIN_BATCHED_ELEMENTS, MIN_BATCHED_ELEMENTS_COMPLEX = 64, 4096


def product_of(request: Any) -> Product | str:
    """The matrix product that a contraction is with its operands' layouts, or the reason why it is not one."""
    min_batched_elements = (
        MIN_BATCHED_ELEMENTS_COMPLEX if request.layout_of("out").dtype.is_complex else MIN_BATCHED_ELEMENTS
    )
    return product_along(request.sizes, steps_of(request), min_batched_elements=min_batched_elements)


def steps_of(request: Any) -> Steps:
    """The strides of the operands of a contraction along their modes; those of c only if it is read."""
    names = ("a", "b", *(("c",) if request.reads_added else ()), "out")
    return {name: lower(request.modes_of(name), request.layout_of(name), request.sizes).steps for name in names}


def modes_by_role(steps: Steps) -> dict[str, list[str]]:
    """The modes of each role, in the order of the first operand that has them."""
    in_a, in_b, in_d = (steps[name].keys() for name in ("a", "b", "out"))
    return {
        "batch": [m for m in in_d if m in in_a and m in in_b],
        "m": [m for m in in_d if m in in_a and m not in in_b],
        "n": [m for m in in_d if m in in_b and m not in in_a],
        "k": [m for m in in_a if m in in_b and m not in in_d],
    }


def product_along(
    sizes: dict[str, int], steps: Steps, roles: Roles | None = None, *, min_batched_elements: int = MIN_BATCHED_ELEMENTS
) -> Product | str:
    """The product of operands with these strides, or why it is none; `roles` are the modes of each role, if known."""
    if not all(sizes.values()):
        return "needs an element along each mode"
    roles = roles or modes_by_role(steps)
    assigned = {mode for modes in roles.values() for mode in modes}
    if lost := [mode for mode, extent in sizes.items() if extent > 1 and mode not in assigned]:
        return f"needs each mode in at least two tensors, has {lost[0]} in one: sum over it first"
    product = _product(sizes, steps, roles, INPUTS)
    if not isinstance(product, str):
        return product
    for other, inputs in () if roles["batch"] else _repeated_batches(sizes, steps, roles, min_batched_elements):
        batched = _product(sizes, steps, other, inputs)
        if not isinstance(batched, str):
            return batched._replace(repeats=True)
    order = sorted(roles["batch"], key=lambda mode: -steps["out"][mode])
    for count in range(1, len(order)):
        outer = merge_modes(sizes, list(steps.values()), order[:count]) if _are_shared(order[:count], steps) else ""
        if isinstance(outer, str) or outer.extent > MAX_CALLS:
            continue
        called = _product(sizes, steps, {**roles, "batch": order[count:]}, INPUTS)
        if not isinstance(called, str):
            return called._replace(calls=outer.extent, call_offsets=dict(zip(steps, outer.steps, strict=True)))
    return product


def _are_shared(modes: Sequence[str], steps: Steps) -> bool:
    """Whether all operands have a stride along these modes."""
    return all(mode in strides for strides in steps.values() for mode in modes)


def _repeated_batches(
    sizes: dict[str, int], steps: Steps, roles: Roles, min_batched_elements: int
) -> Iterator[tuple[Roles, Inputs]]:
    """Batches along the slowest modes of one operand, along which the other one is repeated."""
    for role, name in (("m", "a"), ("n", "b")):
        order = sorted(roles[role], key=lambda mode: -steps[name][mode])
        for count in range(1, len(order)):
            split = {**roles, "batch": order[:count], role: order[count:]}
            rows, columns, terms = (math.prod(sizes[mode] for mode in split[each]) for each in "mnk")
            if min(rows, columns, terms) >= MIN_BATCHED_EXTENT and rows * columns >= min_batched_elements:
                yield split, {**INPUTS, "batch": (name,)}


def _product(sizes: dict[str, int], steps: Steps, roles: Roles, inputs: Inputs) -> Product | str:
    """The product with modes of these roles, or why it is none."""
    names = list(steps)
    axes: dict[str, Axis] = {}
    at: dict[str, dict[str, int]] = {name: {} for name in names}
    for role, modes in roles.items():
        owners = inputs[role] if role == "k" else (*inputs[role], *names[2:])
        if any(mode not in steps[name] for name in owners for mode in modes):
            return "needs a c with a nonzero stride along each mode of the result"
        axis = merge_modes(sizes, [steps[name] for name in owners], modes)
        if isinstance(axis, str):
            return (
                f"needs {', '.join(sorted(modes))} to merge into one axis of {' and '.join(owners)}, has {axis}"
                " apart: permute one of them"
            )
        axes[role] = axis
        for name, step in zip(owners, axis.steps, strict=True):
            at[name][role] = step
    if axes["batch"].extent > 1 and all(axes[role].extent == 1 for role in "mnk"):
        return (
            "needs a mode that is summed over or that only one operand has, has elementwise products: use"
            " elementwise_binary"
        )
    return _oriented(axes, at)


def _oriented(axes: dict[str, Axis], at: dict[str, dict[str, int]]) -> Product | str:
    """The product, transposed if the result's columns are dense and its rows are not."""
    batch = ("batch",) if axes["batch"].extent > 1 else ()

    def matrix(name: str, rows: str, columns: str) -> Matrix:
        roles = (*batch, rows, columns)
        extents = tuple(axes[role].extent for role in roles)
        steps = at[name]
        if batch and "batch" not in steps:
            steps = {**steps, "batch": 0}  # the same matrix is repeated
        return Matrix(
            name,
            extents,
            tuple(steps[s] if s == "batch" else steps.get(s, 0) or _dense_stride(axes, s, roles) for s in roles),
        )

    straight = at["out"].get("n", 0) == 1 or axes["n"].extent == 1
    left, right, rows, columns = ("a", "b", "m", "n") if straight else ("b", "a", "n", "m")
    product = Product(
        matrix(left, rows, "k"),
        matrix(right, "k", columns),
        matrix("out", rows, columns),
        matrix("c", rows, columns) if "c" in at else None,
    )
    for one in (product.a, product.b):
        if not (one.has_dense_rows or one.has_dense_columns):
            return f"needs {one.name} with dense rows or columns, has strides {list(one.strides)}: permute it"
    for other in (product.out, product.c):
        if other is not None and not other.has_dense_rows:
            return (
                f"needs {other.name} with dense rows, as the result has, has strides {list(other.strides)}: permute it"
            )
    return product


def _dense_stride(axes: dict[str, Axis], role: str, roles: tuple[str, ...]) -> int:
    """The stride that an axis of one element has in a dense matrix; it has no effect."""
    step = 1
    for faster in roles[roles.index(role) + 1 :]:
        step *= axes[faster].extent
    return step


def modes_merge(request: Any) -> str:
    """Rule: a contraction that is a matrix product with its operands' layouts."""
    product = product_of(request)
    return product if isinstance(product, str) else ""
