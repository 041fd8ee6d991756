"""The cases of block-sparse contractions, and wrong results that each must reject."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.ops.contraction.block_sparse import BlockSparseForm, block_offsets, size_of
from dispatch.ops.contraction.block_sparse_reference import block_sparse_bounds, block_sparse_evaluate, blocks_of
from dispatch.ops.contraction.block_sparse_request import ContractBlockSparseRequest
from dispatch.testing.check import GuardedBuffer, MadeCase, checked, place, with_outputs
from dispatch.testing.mutations import changed

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype
    from dispatch.testing.check import Check

__all__ = ["BLOCK_SPARSE_MUTATIONS", "block_sparse_cases"]

SECTIONS = {
    "p": (16, 8, 24), "q": (32, 16), "r": (8, 16, 32),
    "i": (4, 2, 3, 4, 5), "j": (2, 3, 7), "k": (3, 1, 8, 2), "l": (5, 5), "m": (1, 6, 2), "n": (16, 3), "o": (1, 1, 9),
}  # fmt: skip
GAP = 64  # elements around the checked memory, so that blocks have the required alignment


class Form(NamedTuple):
    """The options of a request, and the share of the blocks that is stored."""

    name: str
    spec: str
    options: dict[str, Any] = {}  # noqa: RUF012  # never modified
    share: float = 0.5
    added: bool = False
    in_place: bool = False
    other_form: bool = False  # a result with blocks without contributions, and without some that have one
    has_out: bool = False


# fmt: off
FORMS = (
    Form("a matrix product", "pq,qr->pr"), Form("small blocks", "ik,kj->ij"),
    Form("all blocks", "ik,kj->ij", share=1.0),
    Form("turned", "ki,jk->ji", {"alpha": -1.25}), Form("two modes to sum over", "ikl,lkj->ij"),
    Form("modes in any order", "kmi,jkl->lijm", {"alpha": 0.5}), Form("an outer product", "ij,kl->ikjl", share=0.3),
    Form("six modes", "ikln,kmnj->jmli", share=0.15), Form("blocks of one element", "om,mj->jo"),
    Form("other blocks", "ik,kj->ij", other_form=True), Form("into memory", "ikl,lkj->ji", has_out=True),
    Form("added", "ik,kj->ij", {"alpha": 2.0, "beta": 0.75}, added=True, other_form=True),
    Form("added in place", "ikl,jkl->ji", {"beta": -2.0}, added=True, in_place=True, other_form=True),
    Form("added by nothing", "ik,kj->ij", {"beta": 0.0}, added=True, other_form=True),
    Form("bit by bit", "ik,kj->ij", {"reproducible": True}),
    Form("no block of a", "ik,kj->ij", share=0.0, other_form=True),
)
# fmt: on


def block_sparse_cases(row: Row) -> list[MadeCase]:
    """Every form of a row's dtype."""
    return [MadeCase(f"{row.dtypes[0]}-{form.name}", partial(check, form, row), form.name) for form in FORMS]


def check(form: Form, row: Row, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A case with fresh operands; elements between blocks are NaN."""
    inputs, output = form.spec.split("->")
    dtype, fields, forms = row.dtypes[0], {**form.options}, {}
    is_complex = dtype.is_complex
    for key in ("alpha", "beta"):
        if is_complex and fields.get(key):
            fields[key] *= 0.6 + 0.8j
    for operand, modes in zip("ab", inputs.split(","), strict=True):
        share = 1.0 if form.share == 0 and operand == "b" else form.share
        forms[operand] = fields[f"{operand}_form"] = random_form(rng, modes, share)
        fields[operand] = place_values(device, random_blocks(rng, dtype, forms[operand])).view
    if form.other_form:
        fields["out_form"] = random_form(rng, output, 0.7)
    written: tuple[GuardedBuffer, ...] = ()
    if form.added:
        memory = place_values(device, random_blocks(rng, dtype, fields["out_form"]))
        fields["c"] = memory.view
        if form.in_place:
            fields["out"], written = memory.view, (memory,)
    request: Any = ContractBlockSparseRequest(form.spec, **fields)
    if form.has_out:
        request, written = with_outputs(request, lambda values: place_values(device, values))
    return checked(name, (request, written), block_sparse_evaluate, block_sparse_bounds)


def random_form(rng: np.random.Generator, modes: str, share: float) -> BlockSparseForm:
    """A random share of all blocks, in any order; at least two, unless the share is 0."""
    sections = tuple(SECTIONS[mode] for mode in modes)
    every = list(product(*(range(len(one)) for one in sections)))
    count = 0 if share == 0 else min(len(every), max(2, round(share * len(every))))
    return BlockSparseForm(sections, tuple(every[number] for number in rng.permutation(len(every))[:count]))


def random_blocks(rng: np.random.Generator, dtype: Dtype, form: BlockSparseForm) -> Array:
    """Normally distributed numbers in the blocks of a form, complex ones in both parts, and NaN between them."""
    flat = np.full(size_of(form, dtype), np.nan, dtype.numpy)
    for block in blocks_of(flat, form, block_offsets(form, dtype)).values():
        parts = [rng.standard_normal(block.shape) for _ in range(1 + dtype.is_complex)]
        block[...] = parts[0] + 1j * parts[1] if dtype.is_complex else parts[0]
    return flat


def place_values(device: Device, values: Array) -> GuardedBuffer:
    """A tensor of one axis at the start of its memory, with poison after it."""
    return place(device, values, gap=GAP, aligned=True)


# -- wrong results that every case must reject: see `dispatch/testing/mutations.py` -----------------------------------
def first_block(request: Any, name: str) -> tuple[int, int]:
    """The first element of an operand's largest block, and the end of it."""
    form = request.form_of(name)
    sizes = [math.prod(form.shape_of(block)) for block in form.blocks]
    begin = block_offsets(form, request.a.dtype)[sizes.index(max(sizes))]
    return begin, begin + max(sizes)


def block_left_out(request: Any) -> Results | None:
    """The result if the largest block of a were 0."""
    if request.op != "contract_block_sparse" or not request.a_form.blocks:
        return None
    values = np.array(request.a)
    begin, end = first_block(request, "a")
    values[begin:end] = 0
    return block_sparse_evaluate(replace(request, a=changed(request.a, values), out=None), EXACT)


def block_column_major(request: Any) -> Results | None:
    """The largest block of b with its elements in column-major order."""
    if request.op != "contract_block_sparse" or not request.b_form.blocks:
        return None
    values = np.array(request.b)
    begin, end = first_block(request, "b")
    sizes = [math.prod(request.b_form.shape_of(block)) for block in request.b_form.blocks]
    shape = request.b_form.shape_of(request.b_form.blocks[sizes.index(max(sizes))])
    values[begin:end] = values[begin:end].reshape(shape).ravel("F")
    return block_sparse_evaluate(replace(request, b=changed(request.b, values), out=None), EXACT)


def c_of_other_sign(request: Any) -> Results | None:
    """Beta with the other sign, if something is added."""
    if request.op != "contract_block_sparse" or not request.reads_added:
        return None
    return block_sparse_evaluate(replace(request, beta=-request.factor("beta"), out=None), EXACT)


BLOCK_SPARSE_MUTATIONS = {
    "a block left out": block_left_out,
    "a block column-major": block_column_major,
    "c of the other sign": c_of_other_sign,
}
