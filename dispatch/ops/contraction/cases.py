"""The cases of this family's rows, and wrong results that each must reject; bounds.py has the error bounds."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.keys import BF16, C128, F64, Compute
from dispatch.ops.contraction.block_sparse_cases import BLOCK_SPARSE_MUTATIONS, block_sparse_cases
from dispatch.ops.contraction.bounds import SUMMING, bounds, in_16_bits, sums_in_parts
from dispatch.ops.contraction.choices import TensorOp
from dispatch.ops.contraction.einsum_cases import EINSUM_MUTATIONS, einsum_cases
from dispatch.ops.contraction.elementwise import ElementwiseBinaryRequest, ElementwiseTrinaryRequest, PermuteRequest
from dispatch.ops.contraction.reference import elementwise, summed
from dispatch.ops.contraction.request import ContractRequest, ContractTrinaryRequest, ReduceModesRequest
from dispatch.testing.check import GuardedBuffer, MadeCase, checked, place, with_outputs
from dispatch.testing.mutations import other_alpha, other_beta, with_fields

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype
    from dispatch.testing.check import Check
    from dispatch.testing.mutations import Mutation

__all__ = ["MUTATIONS", "cases", "evaluate"]

REQUEST_CLASSES: dict[str, Any] = {
    "contract": ContractRequest,
    "contract_trinary": ContractTrinaryRequest,
    "reduce_modes": ReduceModesRequest,
    "permute": PermuteRequest,
    "elementwise_binary": ElementwiseBinaryRequest,
    "elementwise_trinary": ElementwiseTrinaryRequest,
}
SIZES = dict(
    zip(
        "abcdefghijklmnopqrstuvw", (4, 3, 5, 2, 7, 1, 6, 3, 8, 5, 11, 13, 4, 9, 2, 3, 1, 4, 5, 2, 3, 2, 2), strict=False
    )
)


class Form(NamedTuple):
    """The options of a request, and the layouts of the operands."""

    name: str
    spec: str
    options: dict[str, Any] = {}  # noqa: RUF012  # never modified
    added: bool = False
    reversed_order: tuple[str, ...] = ()  # operands whose axes are in reverse order in memory
    gap: int = 0
    in_place: bool = False
    out_order: bool = False  # the result's axes in reverse order
    ones: str = ""  # modes along which the first operand has extent 1
    sizes: dict[str, int] = {}  # noqa: RUF012
    one_sign: bool = (
        False  # for real numbers: without cancellation the intermediate roundoff is small relative to the sum
    )


# fmt: off
CONTRACTIONS = (
    Form("a matrix product", "ik,kj->ij"),
    Form("a matrix product, transposed", "ki,jk->ji", {"alpha": 0.5}),
    Form("a batch", "bik,bkj->bij"),
    Form("a batch in between", "ibk,kbj->ibj"),
    Form("two modes to sum over", "ikl,lkj->ij", {"alpha": -1.25}),
    Form("modes that merge", "abkl,klcd->abcd"),
    Form("modes that do not", "akbl,clkd->dbca"),
    Form("an outer product", "ab,cd->cadb"),
    Form("a sum of all", "abc,cab->"),
    Form("a mode of one operand alone", "mkc,nk->mn"),
    Form("of both alone", "mkc,nkd->nm"),
    Form("a hyperedge", "aij,aj->ai"),
    Form("elements only", "ab,ab->ba"),
    Form("a diagonal", "iij,jk->ik"),
    Form("six modes", "abcd,dfce->efab", {"alpha": 2.0}),
    Form("added", "ik,kj->ij", {"beta": 0.75, "alpha": 2.0}, added=True),
    Form("added in place", "akl,bkl->ba", {"beta": -2.0}, added=True, in_place=True),
    Form("added, lying otherwise", "ik,kj->ij", {"beta": 0.5}, added=True, out_order=True),
    Form("added by nothing", "ik,kj->ij", {"beta": 0.0}, added=True),
    Form("columns", "ik,kj->ij", reversed_order=("a", "b")),
    Form("gaps", "aik,kbj->abij", gap=2, reversed_order=("b",)),
    Form("into gaps", "ik,kj->ij", gap=1, out_order=True),
    Form("one for all of a mode", "aik,akj->ij", ones="a"),
    Form("scalars", ",->", {"alpha": 3.0}),
    Form("a scalar and a tensor", ",ab->ba"),
    Form("conjugates", "ik,kj->ij", {"op_a": "conj", "op_b": "conj"}),
    Form("no result", "ik,kj->ij", sizes={"i": 0}),
    Form("nothing to sum", "ik,kj->ij", sizes={"k": 0}),
)
TRINARY = (
    Form("a chain", "ij,jk,kl->il"),
    Form("a star", "ai,aj,ak->ijk", {"alpha": 0.5}),
    Form("one to a scalar", "ij,jk,ki->", one_sign=True),
    Form("added", "ij,jk,kl->li", {"beta": 0.5}, added=True),
    Form("columns", "ij,jk,kl->il", reversed_order=("a", "c")),
    Form("conjugates", "ij,jk,kl->il", {"op_b": "conj"}),
)
REDUCTIONS = (
    Form("rows", "ik->i"), Form("columns", "ik->k", {"alpha": 0.5}), Form("all", "abc->"),
    Form("turned", "abcd->ca"), Form("the largest", "abc->cb", {"reduce": "max"}),
    Form("the smallest", "abc->b", {"reduce": "min"}), Form("a product", "adb->b", {"reduce": "mul"}),
    Form("added", "abc->ac", {"beta": 0.5}, added=True), Form("gaps", "abc->ca", gap=2),
    Form("magnitudes", "abc->a", {"op_a": "abs"}), Form("a trace", "aab->b"),
    Form("nothing to sum", "ab->a", sizes={"b": 0}), Form("nothing is summed", "abc->bca"),
)
PERMUTATIONS = (
    Form("a matrix", "ij->ji"), Form("four axes", "abcd->dbca", {"alpha": 1.5}), Form("as it is", "abc->abc"),
    Form("gaps", "abc->cab", gap=3), Form("conjugates", "abc->bac", {"op_a": "conj"}),
    Form("an operator", "ab->ba", {"op_a": "neg"}), Form("a diagonal", "iij->ji"), Form("a scalar", "->"),
    Form("six axes", "abcdeh->hcadbe"), Form("nothing", "ab->ba", sizes={"a": 0}),
    Form("columns", "ab->ab", reversed_order=("a",)), Form("seven primes", "ejkl->lkje", sizes={"l": 5}),
)
BINARY = (
    Form("added", "ab->ba"), Form("factors", "abc->cab", {"alpha": 0.5, "gamma": -2.0}),
    Form("products", "ab->ab", {"op_ac": "mul"}), Form("the larger", "ab->ba", {"op_ac": "max"}),
    Form("the smaller", "abc->bca", {"op_ac": "min", "gamma": 0.5}), Form("repeated", "b->ab", {"gamma": 2.0}),
    Form("in place", "abc->cba", in_place=True), Form("operators", "ab->ba", {"op_a": "tanh", "op_c": "neg"}),
    Form("gaps", "abc->bca", gap=2), Form("lying otherwise", "abc->bca", out_order=True),
)
TERNARY = (
    Form("added", "ab,ba->ba"), Form("factors", "abc,ca->cab", {"alpha": 0.5, "beta": 3.0, "gamma": -2.0}),
    Form("product and sum", "ab,a->ab", {"op_ab": "mul"}), Form("the larger", "ab,ab->ba", {"op_abc": "max"}),
    Form("in place", "abc,b->cba", in_place=True), Form("operators", "ab,b->ba", {"op_b": "exp", "op_c": "conj"}),
    Form("gaps", "abc,cb->bca", {"op_ab": "mul", "op_abc": "mul"}, gap=2),
    Form("a factor of zero", "ab,ba->ba", {"beta": 0.0}),
)
# fmt: on
FORMS = dict(zip(REQUEST_CLASSES, (CONTRACTIONS, TRINARY, REDUCTIONS, PERMUTATIONS, BINARY, TERNARY), strict=True))
# For rows that round operands before they are multiplied, or round everything to bf16: operands are numbers of few
# digits, which every such type represents, so that only the sums are rounded.
COARSE = tuple(one for one in Compute if "FAST" in one.name or "EMULATED" in one.name)


def evaluate(request: Any, work: np.dtype[Any]) -> Results:
    """The outputs of a request of this family."""
    return (summed if request.op in SUMMING else elementwise)(request, work)


def cases(row: Row) -> list[MadeCase]:
    """Every form of a row's op that supports its dtypes."""
    if row.op == "einsum":
        return einsum_cases(row)
    if row.op == "contract_block_sparse":
        return block_sparse_cases(row)
    is_complex = any(dtype.is_complex for dtype in row.dtypes)
    forms = [
        form for form in FORMS[row.op] if not is_complex or not {"max", "min"} & {*map(str, form.options.values())}
    ]
    dtypes = "-".join(map(str, row.dtypes))
    word = "" if row.compute is None else row.compute.name.removeprefix("COMPUTE_")
    return [MadeCase(f"{dtypes}-{word}-{form.name}", partial(check, form, row), form.name) for form in forms]


def check(form: Form, row: Row, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A case with fresh operands."""
    kind, sizes = REQUEST_CLASSES[row.op], {**SIZES, **form.sizes}
    inputs, output = form.spec.split("->")
    operands: dict[str, Any] = {}
    for place_of, modes, dtype in zip(kind.tensors_of_spec, inputs.split(","), row.dtypes, strict=False):
        shape = tuple(1 if place_of == "a" and mode in form.ones else sizes[mode] for mode in modes)
        order = tuple(reversed(range(len(shape)))) if place_of in form.reversed_order else None
        values = random_values(rng, dtype, shape, row)
        if (form.one_sign or sums_in_parts(row.op, row.dtypes[-1], row.compute)) and not dtype.is_complex:
            values = np.abs(values)
        operands[place_of] = place(device, values, order, form.gap).view
    options = {key: option_of(value, row) for key, value in form.options.items()}
    written: tuple[GuardedBuffer, ...] = ()
    result_shape, result = tuple(sizes[mode] for mode in output), row.dtypes[-1]
    added = getattr(kind, "added", "c")
    if form.added or (row.op not in SUMMING and added in kind.reads and added not in operands):
        memory = place(device, random_values(rng, result, result_shape, row), gap=form.gap)
        operands[added] = memory.view
        if form.in_place:
            operands["out"], written = memory.view, (memory,)
    if row.op == "permute":
        options["out_dtype"] = result
    request = kind(spec=form.spec, compute=row.compute, **operands, **options)
    if not written and (form.gap or form.out_order):
        order = tuple(reversed(range(len(result_shape)))) if form.out_order else None
        request, written = with_outputs(request, lambda output_values: place(device, output_values, order, form.gap))
    return checked(name, (request, written), evaluate, bounds)


def option_of(value: Any, row: Row) -> Any:
    """An option adapted to a row; factors of complex tensors are complex."""
    is_complex = all(dtype.is_complex for dtype in row.dtypes)
    return value * (0.6 + 0.8j) if is_complex and isinstance(value, float) and value else value


def random_values(rng: np.random.Generator, dtype: Dtype, shape: tuple[int, ...], row: Row) -> Array:
    """Normally distributed numbers, complex ones in both parts; of few digits if a row's type rounds operands."""
    if in_16_bits(row.dtypes[0], row.compute):
        return np.asarray(rng.choice(np.array([-2.0, -1.0, 1.0, 2.0]), shape).astype(dtype.numpy))
    is_double = dtype in (F64, C128) and row.compute is Compute.COMPUTE_32F
    parts = [rng.standard_normal(shape) for _ in range(1 + dtype.is_complex)]
    if row.compute in COARSE or is_double:
        parts = [part.astype(BF16.numpy).astype(np.float64) for part in parts]
    values = parts[0] + 1j * parts[1] if dtype.is_complex else parts[0]
    return np.asarray(values).astype(dtype.numpy)


# -- wrong results that every case must reject: see `dispatch/testing/mutations.py` -----------------------------------
def not_conjugated(request: Any) -> Any:
    """The numbers themselves in place of their conjugates."""
    is_complex = request.a.dtype.is_complex
    return TensorOp.IDENTITY if is_complex and getattr(request, "op_a", None) is TensorOp.CONJ else None


def other_pairing(request: Any) -> Any:
    """MUL instead of ADD, or ADD."""
    op = getattr(request, "op_ac", None)
    return None if op is None else TensorOp.MUL if op is TensorOp.ADD else TensorOp.ADD


def other_pairing_of_three(request: Any) -> Any:
    """The same for the second of two."""
    op = getattr(request, "op_abc", None)
    return None if op is None else TensorOp.MUL if op is TensorOp.ADD else TensorOp.ADD


def of_modes(mutation: Mutation) -> Mutation:
    """A mutation for requests that are neither einsum nor block-sparse."""
    return lambda request: mutation(request) if request.op in REQUEST_CLASSES else None


MUTATIONS = {
    "another alpha": of_modes(with_fields(evaluate, 16, alpha=other_alpha)),
    "beta of the other sign": of_modes(with_fields(evaluate, 16, beta=other_beta)),
    "not conjugated": of_modes(with_fields(evaluate, 16, op_a=not_conjugated)),
    "MUL for ADD": of_modes(with_fields(evaluate, 16, op_ac=other_pairing)),
    "MUL for the second ADD": of_modes(with_fields(evaluate, 16, op_abc=other_pairing_of_three)),
    **EINSUM_MUTATIONS,
    **BLOCK_SPARSE_MUTATIONS,
}
