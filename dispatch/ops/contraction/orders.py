"""Which operands of a contraction to permute so that it is one matrix product, and how a result lies that need not be.

Of all choices of operands to permute the one is taken that costs the least: elements that are moved, and launches. A
permuted operand is dense, its
modes sort by sort; the fastest one stays in the fastest sort, so that both sides of a permutation run along memory.
Pure arithmetic.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations, product
from math import inf, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.device.layout import c_strides
from dispatch.ops.contraction.product import Steps, modes_by_sort, product_along, steps_of

if TYPE_CHECKING:
    from collections.abc import Sequence

Shape = tuple[int, ...]
Term = tuple[str, Shape, Shape]  # of an operand its modes, each once, and along them its shape and strides

__all__ = ["along", "arrangement", "result_strides"]

LAUNCH = 1 << 19  # elements that are moved in the time of one more launch, 2 us or so
OPERANDS = ("a", "b", "c", "out")
SORTS = {"a": ("batch", "m", "k"), "b": ("batch", "k", "n"), "c": ("batch", "m", "n"), "out": ("batch", "m", "n")}


def arrangement(request: Any) -> dict[str, str] | str:
    """The operands to permute, with the modes of each from the slowest to the fastest; or why none serves."""
    return arranged(request.sizes, steps_of(request))


def arranged(sizes: dict[str, int], steps: Steps) -> dict[str, str] | str:
    """That of operands which lie so."""
    found = cheapest(sizes, steps)
    return found if isinstance(found, str) else found.orders


class Arrangement(NamedTuple):
    """The operands to permute, and what that and the calls of the product cost, in elements moved."""

    cost: int
    orders: dict[str, str]


def cheapest(sizes: dict[str, int], steps: Steps) -> Arrangement | str:
    """The arrangement that costs the least, or why there is none."""
    if not all(sizes.values()):
        return "needs an element along each mode"
    costs = {name: prod(sizes[mode] for mode in own) + LAUNCH for name, own in steps.items()}
    choices = [chosen for count in range(len(steps) + 1) for chosen in combinations(steps, count)]
    best: Arrangement | None = None
    why = ""
    for chosen in sorted(choices, key=lambda names: sum(costs[name] for name in names)):
        amount = sum(costs[name] for name in chosen)
        if best is not None and amount >= best.cost:
            break
        orders = {name: order_of(name, chosen, steps) for name in chosen}
        lying = {name: along(orders[name], sizes) if name in orders else own for name, own in steps.items()}
        found = product_along(sizes, lying)
        if isinstance(found, str):
            why = found  # at last with all of them permuted
        elif best is None or amount + (found.calls - 1) * LAUNCH < best.cost:
            best = Arrangement(amount + (found.calls - 1) * LAUNCH, orders)
    return why if best is None else best


def order_of(name: str, chosen: Sequence[str], steps: Steps) -> str:
    """The modes of an operand that is permuted, from the slowest to the fastest."""
    sorts, own = modes_by_sort(steps), steps[name]
    if name == "c":
        own = steps["out"]  # it may be repeated along some
    # Others follow an operand that stays; where none does, the result, and along what is summed over a.
    leader = {sort: next((one for one in OPERANDS if one in steps and one not in chosen and sort in SORTS[one]), "")
              for sort in sorts}  # fmt: skip
    order = SORTS[name]
    fastest = min(own, key=lambda mode: own[mode], default="")
    if fastest in sorts[order[1]] and sorts[order[2]]:
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
def result_strides(terms: tuple[Term, Term], output: str) -> Shape:
    """How the result of a contraction of two operands lies best where nobody asks for an order.

    It is dense: in C order, unless it comes out of a matrix product in another one with fewer elements to be moved.
    """
    sizes: dict[str, int] = {}
    for modes, shape, _ in terms:
        for mode, extent in zip(modes, shape, strict=True):
            sizes[mode] = max(sizes.get(mode, 1), extent) if extent else 0
    steps: Steps = {}
    for name, (modes, shape, strides) in zip("ab", terms, strict=True):
        own = zip(modes, shape, strides, strict=True)
        steps[name] = {mode: stride for mode, extent, stride in own if extent > 1 and stride}
    order = best_order(sizes, steps, output)
    found = along(order, sizes)
    return tuple(found[mode] for mode in output)


def best_order(sizes: dict[str, int], steps: Steps, output: str) -> str:
    """The order of the result's modes that costs the least; that of the spec where none costs less."""
    least = cost(sizes, steps, output)
    if not least or not all(sizes.values()):
        return output
    sorts = modes_by_sort(steps | {"out": dict.fromkeys((mode for mode in output if sizes[mode] > 1), 1)})
    there = [mode for modes in (sorts["batch"], sorts["m"], sorts["n"]) for mode in modes]
    alone = "".join(mode for mode in output if mode not in there)  # of one element, which lie as they will

    def lines(sort: str, name: str) -> list[str]:
        stepped = sorted(sorts[sort], key=lambda mode: -steps[name][mode])
        return ["".join(line) for line in dict.fromkeys((tuple(sorts[sort]), tuple(stepped)))]

    found = output
    for batch, m, n in product(lines("batch", "a"), lines("m", "a"), lines("n", "b")):
        for order in (f"{alone}{batch}{m}{n}", f"{alone}{batch}{n}{m}"):
            amount = cost(sizes, steps, order)
            if amount < least:
                least, found = amount, order
    return found


def cost(sizes: dict[str, int], steps: Steps, order: str) -> float:
    """What a result whose modes lie in an order costs; infinite where there is no product."""
    out = {mode: stride for mode, stride in along(order, sizes).items() if sizes[mode] > 1}
    found = cheapest(sizes, {**steps, "out": out})
    return inf if isinstance(found, str) else found.cost
