"""Which operands of a contraction to permute so that it is one matrix product, and how a result lies that need not be.

Of all choices of operands to permute the one is taken that costs the least: elements that are moved, launches, and the
product's own time, for its matrices may not fill tiles. A permuted operand is dense, its modes sort by sort. The
fastest one stays in the fastest sort, so that both sides of a permutation run along memory; but for TF32, which tensor
cores read along k alone, k is the fastest. Pure arithmetic.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations, product
from math import inf, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.device.layout import c_strides
from dispatch.keys import HALF, Compute
from dispatch.ops.contraction.product import (
    SMALLEST,
    SMALLEST_COMPLEX,
    Product,
    Sorts,
    Steps,
    modes_by_sort,
    product_along,
    steps_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dispatch.keys import Dtype

Shape = tuple[int, ...]
Term = tuple[str, Shape, Shape]  # of an operand its modes, each once, and along them its shape and strides

__all__ = ["along", "arrangement", "cores_of", "is_intense", "result_strides"]

LAUNCH = 1 << 19  # elements that are moved in the time of one more launch, 2 us or so
INTENSE = 100  # operations for each element, from which on operands are permuted for a product of any dtype
TILE = 64  # rows and columns: what is left of one is computed, too
OPERANDS = ("a", "b", "c", "out")
SORTS = {"a": ("batch", "m", "k"), "b": ("batch", "k", "n"), "c": ("batch", "m", "n"), "out": ("batch", "m", "n")}


class Cores(NamedTuple):
    """What multiplies: elements that are moved in the time of one operation, and what of its operands is better.

    `along_k` has k the fastest, `moved` says whether operands are permuted for cuBLASLt however few operations there
    are, which another library does not need, and `smallest` is the least result of a matrix of a batch that is one for
    its layout's sake.
    """

    per_flop: float
    along_k: bool = False
    moved: bool = False
    smallest: int = SMALLEST


# By what an H200 does: 45 TFLOP/s of f32, 300 of TF32, 600 of 16 bits, while it moves 8 bytes in 4 ps.
PLAIN, TF32, HALVES = Cores(5e-3), Cores(8e-4, along_k=True, moved=True), Cores(8e-4, moved=True)
COMPLEX = Cores(1e-2, smallest=SMALLEST_COMPLEX)


def cores_of(dtype: Dtype, compute: Any) -> Cores:
    """What multiplies elements of a dtype, in a compute type if one was asked for."""
    if dtype in HALF:
        return HALVES
    if dtype.is_complex:
        return COMPLEX
    return TF32 if compute is Compute.COMPUTE_32F_FAST_TF32 else PLAIN


def arrangement(request: Any) -> dict[str, str] | str:
    """The operands to permute, with the modes of each from the slowest to the fastest; or why none serves."""
    found = cheapest(request.sizes, steps_of(request), cores_of(request.result_dtype, request.compute))
    return found if isinstance(found, str) else found.orders


def is_intense(sizes: dict[str, int], operands: Iterable[Iterable[str]]) -> bool:
    """Whether a contraction has enough operations for each element of its operands and its result to permute them."""
    elements = sum(prod(sizes[mode] for mode in set(own)) for own in operands)
    return 2 * prod(sizes.values()) >= INTENSE * elements


class Arrangement(NamedTuple):
    """The operands to permute, the product then, and what all costs, in elements moved."""

    cost: float
    product: Product
    orders: dict[str, str]


def cheapest(sizes: dict[str, int], steps: Steps, cores: Cores = PLAIN, below: float = inf) -> Arrangement | str:
    """The arrangement that costs the least, or why there is none, or none that costs less than `below`."""
    if not all(sizes.values()):
        return "needs an element along each mode"
    sorts = modes_by_sort(steps)
    least = 2 * prod(sizes[mode] for modes in sorts.values() for mode in modes) * cores.per_flop
    costs = {name: prod(sizes[mode] for mode in own) + LAUNCH for name, own in steps.items()}
    choices = [chosen for count in range(len(steps) + 1) for chosen in combinations(steps, count)]
    best: Arrangement | None = None
    why = ""
    for chosen in sorted(choices, key=lambda names: sum(costs[name] for name in names)):
        amount = sum(costs[name] for name in chosen)
        if amount + least >= (below if best is None else best.cost):
            why = why or "needs others to lie less apart"
            break
        orders = {name: order_of(name, chosen, steps, sorts, along_k=cores.along_k) for name in chosen}
        lying = {name: along(orders[name], sizes) if name in orders else own for name, own in steps.items()}
        found = product_along(sizes, lying, sorts, smallest=cores.smallest)
        if isinstance(found, str):
            why = found  # at last with all of them permuted
            continue
        spent = amount + (found.calls - 1) * LAUNCH + padded_flops(found) * cores.per_flop
        if best is None or spent < best.cost:
            best = Arrangement(spent, found, orders)
    return why if best is None else best


def padded_flops(found: Product) -> int:
    """The operations of a product whose matrices fill tiles."""
    *batch, rows, columns = found.out.shape
    return 2 * found.calls * prod(batch) * (-(-rows // TILE) * -(-columns // TILE)) * TILE**2 * found.a.shape[-1]


def order_of(name: str, chosen: Sequence[str], steps: Steps, sorts: Sorts, *, along_k: bool) -> str:
    """The modes of an operand that is permuted, from the slowest to the fastest."""
    own = steps[name]
    if name == "c":
        own = steps["out"]  # it may be repeated along some
    # Others follow an operand that stays; where none does, the result, and along what is summed over a.
    leader = {sort: next((one for one in OPERANDS if one in steps and one not in chosen and sort in SORTS[one]), "")
              for sort in sorts}  # fmt: skip
    order = SORTS[name]
    fastest = min(own, key=lambda mode: own[mode], default="")
    if along_k and "k" in order:
        order = ("batch", "m" if name == "a" else "n", "k")
    elif fastest in sorts[order[1]] and sorts[order[2]]:
        order = (order[0], order[2], order[1])
    lines = []
    for sort in order:
        lead = steps[leader[sort] or ("a" if sort == "k" else "out")]
        lines += sorted(sorts[sort], key=lambda mode: -lead.get(mode, 0))
    return "".join(lines)


def along(order: str, sizes: dict[str, int]) -> dict[str, int]:
    """The strides of dense memory whose modes come in an order."""
    return dict(zip(order, c_strides(tuple(sizes[mode] for mode in order)), strict=True))


@lru_cache(1024)
def result_strides(terms: tuple[Term, Term], output: str, cores: Cores) -> Shape:
    """How the result of a contraction of two operands lies best where nobody asks for an order.

    It is dense: in C order, unless it comes out of a matrix product in another one that costs less.
    """
    sizes: dict[str, int] = {}
    for modes, shape, _ in terms:
        for mode, extent in zip(modes, shape, strict=True):
            sizes[mode] = max(sizes.get(mode, 1), extent) if extent else 0
    steps: Steps = {}
    for name, (modes, shape, strides) in zip("ab", terms, strict=True):
        own = zip(modes, shape, strides, strict=True)
        steps[name] = {mode: stride for mode, extent, stride in own if extent > 1 and stride}
    found = along(best_order(sizes, steps, output, cores), sizes)
    return tuple(found[mode] for mode in output)


def best_order(sizes: dict[str, int], steps: Steps, output: str, cores: Cores) -> str:
    """The order of the result's modes that costs the least; that of the spec where none costs less."""
    if not all(sizes.values()):
        return output
    usual = resulting(sizes, steps, output, cores)
    if not isinstance(usual, str) and not usual.orders and usual.product.calls == 1 and not usual.product.repeats:
        return output
    least, found = inf if isinstance(usual, str) else usual.cost, output
    permutes = cores.moved or is_intense(sizes, (*steps.values(), output))
    sorts = modes_by_sort(steps | {"out": dict.fromkeys((mode for mode in output if sizes[mode] > 1), 1)})
    there = [mode for modes in (sorts["batch"], sorts["m"], sorts["n"]) for mode in modes]
    alone = "".join(mode for mode in output if mode not in there)  # of one element, which lie as they will

    def lines(sort: str, name: str) -> list[str]:
        stepped = sorted(sorts[sort], key=lambda mode: -steps[name][mode])
        return ["".join(line) for line in dict.fromkeys((tuple(sorts[sort]), tuple(stepped)))]

    for batch, m, n in product(lines("batch", "a"), lines("m", "a"), lines("n", "b")):
        for order in (f"{alone}{batch}{m}{n}", f"{alone}{batch}{n}{m}"):
            other = resulting(sizes, steps, order, cores, least)
            if not isinstance(other, str) and other.cost < least and (permutes or not other.orders):
                least, found = other.cost, order
    return found


def resulting(sizes: dict[str, int], steps: Steps, order: str, cores: Cores, below: float = inf) -> Arrangement | str:
    """The arrangement for a result whose modes lie in an order."""
    out = {mode: stride for mode, stride in along(order, sizes).items() if sizes[mode] > 1}
    return cheapest(sizes, {**steps, "out": out}, cores, below)
