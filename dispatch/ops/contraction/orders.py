"""The operands of a contraction to permute so that it becomes one matrix product, and the best strides of its result.

The cheapest choice of operands to permute is used. The cost counts elements moved, launches, and the time of the
product, whose matrices may not fill tiles. A permuted operand is dense, its modes grouped by role. Its fastest mode
stays in the fastest group, so that both sides of a permutation are accessed contiguously. For TF32, however,
k is the fastest, because tensor cores read TF32 only along k. Only arithmetic.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations, product
from math import inf, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.device.layout import c_strides
from dispatch.keys import HALF, Compute
from dispatch.ops.contraction.product import (
    MIN_BATCHED_ELEMENTS,
    MIN_BATCHED_ELEMENTS_COMPLEX,
    Product,
    Roles,
    Steps,
    modes_by_role,
    product_along,
    steps_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dispatch.keys import Dtype

Shape = tuple[int, ...]
Term = tuple[str, Shape, Shape]  # an operand's modes, each once, its shape and its strides along them

__all__ = ["arrangement", "cost_model", "dense_strides", "is_intense", "result_strides"]

LAUNCH_ELEMENTS = 1 << 19  # elements that are moved in the time of one more launch, about 2 us
MIN_INTENSITY = 100  # operations per element; from here on operands are permuted for a product of any dtype
TILE = 64  # rows and columns of a tile of the product; whole tiles are computed
OPERANDS = ("a", "b", "c", "out")
ROLES = {"a": ("batch", "m", "k"), "b": ("batch", "k", "n"), "c": ("batch", "m", "n"), "out": ("batch", "m", "n")}


class CostModel(NamedTuple):
    """The cost of a product of some dtype, and the layouts that it prefers.

    Attributes:
        elements_per_flop: elements that are moved in the time of one operation.
        k_fastest: whether permuted operands have k as their fastest axis.
        always_permutes: whether operands are permuted for cuBLASLt even with few operations per element.
        min_batched_elements: the minimum number of elements of a result of a batch that repeats an operand.
    """

    elements_per_flop: float
    k_fastest: bool = False
    always_permutes: bool = False
    min_batched_elements: int = MIN_BATCHED_ELEMENTS


# From the performance of an H200: 45 TFLOP/s in f32, 300 in TF32, 600 in 16 bits, while it moves 8 bytes in 4 ps.
PLAIN, TF32, HALVES = (
    CostModel(5e-3),
    CostModel(8e-4, k_fastest=True, always_permutes=True),
    CostModel(8e-4, always_permutes=True),
)
COMPLEX = CostModel(1e-2, min_batched_elements=MIN_BATCHED_ELEMENTS_COMPLEX)


def cost_model(dtype: Dtype, compute: Any) -> CostModel:
    """The cost model of products of a dtype, for the requested compute type if there is one."""
    if dtype in HALF:
        return HALVES
    if dtype.is_complex:
        return COMPLEX
    return TF32 if compute is Compute.COMPUTE_32F_FAST_TF32 else PLAIN


def arrangement(request: Any) -> dict[str, str] | str:
    """The operands to permute, with the modes of each from the slowest to the fastest; or why no choice works."""
    best = cheapest_arrangement(request.sizes, steps_of(request), cost_model(request.result_dtype, request.compute))
    return best if isinstance(best, str) else best.orders


def is_intense(sizes: dict[str, int], operands: Iterable[Iterable[str]]) -> bool:
    """Whether a contraction has enough operations per element of its operands and its result to permute them."""
    elements = sum(prod(sizes[mode] for mode in set(operand_modes)) for operand_modes in operands)
    return 2 * prod(sizes.values()) >= MIN_INTENSITY * elements


class Arrangement(NamedTuple):
    """The operands to permute, the product after that, and the cost of all, in elements moved."""

    cost: float
    product: Product
    orders: dict[str, str]


def cheapest_arrangement(
    sizes: dict[str, int], steps: Steps, model: CostModel = PLAIN, below: float = inf
) -> Arrangement | str:
    """The cheapest arrangement, or why there is none that costs less than `below`."""
    if not all(sizes.values()):
        return "needs an element along each mode"
    roles = modes_by_role(steps)
    least = 2 * prod(sizes[mode] for modes in roles.values() for mode in modes) * model.elements_per_flop
    costs = {name: prod(sizes[mode] for mode in strides) + LAUNCH_ELEMENTS for name, strides in steps.items()}
    choices = [permuted for count in range(len(steps) + 1) for permuted in combinations(steps, count)]
    best: Arrangement | None = None
    why = ""
    for permuted in sorted(choices, key=lambda names: sum(costs[name] for name in names)):
        amount = sum(costs[name] for name in permuted)
        if amount + least >= (below if best is None else best.cost):
            why = why or "needs smaller strides of the other modes"
            break
        orders = {name: permuted_order(name, permuted, steps, roles, k_fastest=model.k_fastest) for name in permuted}
        strides_by_name = {
            name: dense_strides(orders[name], sizes) if name in orders else strides for name, strides in steps.items()
        }
        product = product_along(sizes, strides_by_name, roles, min_batched_elements=model.min_batched_elements)
        if isinstance(product, str):
            why = product  # the last reason is that with all of them permuted
            continue
        spent = amount + (product.calls - 1) * LAUNCH_ELEMENTS + padded_flops(product) * model.elements_per_flop
        if best is None or spent < best.cost:
            best = Arrangement(spent, product, orders)
    return why if best is None else best


def padded_flops(found: Product) -> int:
    """The operations of a product with its result rounded up to whole tiles."""
    *batch, rows, columns = found.out.shape
    return 2 * found.calls * prod(batch) * (-(-rows // TILE) * -(-columns // TILE)) * TILE**2 * found.a.shape[-1]


def permuted_order(name: str, chosen: Sequence[str], steps: Steps, roles: Roles, *, k_fastest: bool) -> str:
    """The modes of an operand that is permuted, from the slowest to the fastest."""
    strides = steps[name]
    if name == "c":
        strides = steps["out"]  # c may be repeated along some modes
    # The order follows an operand that is not permuted; if there is none, the result, and along k operand a.
    leader = {role: next((one for one in OPERANDS if one in steps and one not in chosen and role in ROLES[one]), "")
              for role in roles}  # fmt: skip
    order = ROLES[name]
    fastest = min(strides, key=lambda mode: strides[mode], default="")
    if k_fastest and "k" in order:
        order = ("batch", "m" if name == "a" else "n", "k")
    elif fastest in roles[order[1]] and roles[order[2]]:
        order = (order[0], order[2], order[1])
    lines = []
    for role in order:
        lead = steps[leader[role] or ("a" if role == "k" else "out")]
        lines += sorted(roles[role], key=lambda mode: -lead.get(mode, 0))
    return "".join(lines)


def dense_strides(order: str, sizes: dict[str, int]) -> dict[str, int]:
    """The strides of a dense tensor whose modes have this order."""
    return dict(zip(order, c_strides(tuple(sizes[mode] for mode in order)), strict=True))


@lru_cache(1024)
def result_strides(terms: tuple[Term, Term], output: str, model: CostModel) -> Shape:
    """The best strides for the result of a contraction of two operands if no order was requested.

    They are dense: in C order, unless a matrix product with another order costs less.
    """
    sizes: dict[str, int] = {}
    for modes, shape, _ in terms:
        for mode, extent in zip(modes, shape, strict=True):
            sizes[mode] = max(sizes.get(mode, 1), extent) if extent else 0
    steps: Steps = {}
    for name, (modes, shape, strides) in zip("ab", terms, strict=True):
        axes = zip(modes, shape, strides, strict=True)
        steps[name] = {mode: stride for mode, extent, stride in axes if extent > 1 and stride}
    stride_of = dense_strides(best_order(sizes, steps, output, model), sizes)
    return tuple(stride_of[mode] for mode in output)


def best_order(sizes: dict[str, int], steps: Steps, output: str, model: CostModel) -> str:
    """The cheapest order of the result's modes; that of the spec if no other costs less."""
    if not all(sizes.values()):
        return output
    usual = arrangement_for_order(sizes, steps, output, model)
    if not isinstance(usual, str) and not usual.orders and usual.product.calls == 1 and not usual.product.repeats:
        return output
    least, best = inf if isinstance(usual, str) else usual.cost, output
    permutes = model.always_permutes or is_intense(sizes, (*steps.values(), output))
    roles = modes_by_role(steps | {"out": dict.fromkeys((mode for mode in output if sizes[mode] > 1), 1)})
    placed = [mode for modes in (roles["batch"], roles["m"], roles["n"]) for mode in modes]
    alone = "".join(mode for mode in output if mode not in placed)  # modes of one element may have any strides

    def lines(role: str, name: str) -> list[str]:
        stepped = sorted(roles[role], key=lambda mode: -steps[name][mode])
        return ["".join(line) for line in dict.fromkeys((tuple(roles[role]), tuple(stepped)))]

    for batch, m, n in product(lines("batch", "a"), lines("m", "a"), lines("n", "b")):
        for order in (f"{alone}{batch}{m}{n}", f"{alone}{batch}{n}{m}"):
            other = arrangement_for_order(sizes, steps, order, model, least)
            if not isinstance(other, str) and other.cost < least and (permutes or not other.orders):
                least, best = other.cost, order
    return best


def arrangement_for_order(
    sizes: dict[str, int], steps: Steps, order: str, model: CostModel, below: float = inf
) -> Arrangement | str:
    """The cheapest arrangement for a dense result whose modes have this order."""
    out = {mode: stride for mode, stride in dense_strides(order, sizes).items() if sizes[mode] > 1}
    return cheapest_arrangement(sizes, {**steps, "out": out}, model, below)
