"""The cases of einsum, their error bounds, and wrong results that each must reject."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.keys import C64, C128, F16, F32, F64, HALF
from dispatch.ops.contraction.einsum import EinsumRequest
from dispatch.ops.contraction.einsum_reference import einsum_steps
from dispatch.testing.check import Check, GuardedBuffer, MadeCase, place, rounded, with_outputs
from dispatch.testing.mutations import host_array

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype

__all__ = ["EINSUM_MUTATIONS", "einsum_cases", "magnitude"]

SIZES = dict(zip("abcdefghijklmnop", (4, 3, 5, 2, 7, 1, 6, 3, 8, 5, 11, 4, 9, 2, 3, 13), strict=True))


class Form(NamedTuple):
    """The options of a request; with `is_product`, every step is a matrix product with its operands' layouts.

    Forms with `own` are used only for this library's own rows.
    """

    name: str
    spec: str
    options: dict[str, Any] = {}  # noqa: RUF012  # never modified
    is_product: bool = False
    lower_precision: int | None = None  # the index of an operand of the next less precise dtype
    ones: str = ""  # modes along which the first operand has extent 1
    gap: int = 0
    own: bool = False
    reversed_axes: bool = False  # the first operand's axes have negative strides
    repeated: str = ""  # modes along which the first operand has stride 0
    sizes: dict[str, int] = {}  # noqa: RUF012
    positive: bool = False  # otherwise many terms of both signs cancel to less than the roundoff of any summation order


# fmt: off
FORMS = (
    Form("a matrix product", "ij,jk->ik", is_product=True),
    Form("a chain of three", "ij,jk,kl->il", is_product=True),
    Form("from the left", "ij,jk,kl->il", {"optimize": "left-to-right"}, is_product=True),
    Form("a path", "ij,jk,kl->il", {"optimize": ((0, 1), (0, 1))}, is_product=True),
    Form("a chain of five", "ab,bc,cd,de,eg->ag", is_product=True),
    Form("turned", "ij,kj,lk->li", is_product=True),
    Form("a batch", "bij,bjk->bik", is_product=True),
    Form("one tensor, turned", "abc->cab"), Form("one tensor, summed", "abc->b"), Form("a trace", "aa->"),
    Form("a diagonal", "aba->ba"), Form("a diagonal that is written", "ai,i->ii"),
    Form("three at once", "ai,bi,ci->abc", {"optimize": ((0, 1, 2),)}),
    Form("a star", "ai,bi,ci->abc"), Form("modes of one alone", "abk,kcd->ac"), Form("to a scalar", "ab,bc,ca->"),
    Form("elements", "ab,ab,ab->ab"), Form("an outer product", "a,b,c->cab"), Form("a scalar", ",ab->ba"),
    Form("conjugates", "ij,jk,kl->il", {"conj": (0, 2)}), Form("one's conjugates", "ab->ba", {"conj": (0,)}),
    Form("an extent of 1", "ab,ab,bc->ac", ones="a"), Form("another precision", "ab,bc->ac", lower_precision=1),
    Form("gaps", "abk,kc,cd->bad", gap=2), Form("an ellipsis", "...ab,...bc->...ac"),
    Form("six modes", "abcd,dgce,eh->hgab"), Form("nothing to sum", "ab,bf->af"),
    Form("backwards", "abc,cd,de->eab", own=True, reversed_axes=True),
    Form("one repeated", "ab,bc,cd->ad", own=True, repeated="a"),
    Form("a diagonal with gaps", "ai,ib->aib", own=True, gap=3), Form("zeros with gaps", "ai,i->ii", own=True, gap=1),
    Form("a sum of nothing", "ab,bc->ac", own=True, gap=1, sizes={"b": 0}),
    Form("many terms", "a,a,ab->", own=True, sizes={"a": 1500}, positive=True),
    Form("a chain of 24", ",".join(f"{chr(97 + n)}{chr(98 + n)}" for n in range(24)) + "->ay", own=True,
         sizes=dict.fromkeys((chr(97 + n) for n in range(25)), 3), positive=True),
    Form("a lattice", "ab,acd,ce,bfg,dfhi,ehj,gk,ikl,jl->", own=True, sizes=dict.fromkeys("abcdefghijkl", 5),
         positive=True),
    Form("twelve modes", "abcd,cdefg,ghijk,bl,il->ahkl", own=True, sizes=dict.fromkeys("abcdefghijkl", 2)),
)
# fmt: on
LOWER_PRECISION: dict[Dtype, Dtype] = {F32: F16, F64: F32, C128: C64}


def einsum_cases(row: Row) -> list[MadeCase]:
    """Every form that a row supports."""
    return [
        MadeCase(f"{row.dtypes[0]}-{form.name}", partial(check, form, row), form.name)
        for form in FORMS
        if (form.is_product or row.library != "cublasLt")
        and (form.lower_precision is None or row.dtypes[0] in LOWER_PRECISION)
        and (not form.own or is_own(row))
    ]


def is_own(row: Row) -> bool:
    """Whether a row is that of this library's kernel, or represents one on the host."""
    return "own" in (row.library, row.stands_for)


def check(form: Form, row: Row, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A case with fresh operands."""
    operands, sizes = [], {**SIZES, **form.sizes}
    terms = form.spec.split("->")[0].split(",")
    count = terms_of(form.spec, sizes)
    for number, term in enumerate(terms):
        shape = tuple(1 if not number and mode in form.ones else sizes[mode] for mode in term.replace("...", "dh"))
        dtype = LOWER_PRECISION[row.dtypes[0]] if form.lower_precision == number else row.dtypes[0]
        values = random_values(rng, dtype, shape)
        if form.positive:  # their product has about the magnitude 1, which f16 represents
            values = (rng.uniform(0.5, 1.5, shape) / count ** (1 / len(terms))).astype(dtype.numpy)
        view = place(device, values, gap=form.gap).view
        if not number and form.reversed_axes:
            view = view[tuple(slice(None, None, -1) for _ in shape)]
        if not number and form.repeated:
            steps = zip(term, view.layout.strides, strict=True)
            view = view.strided(shape, tuple(0 if mode in form.repeated else step for mode, step in steps))
        operands.append(view)
    options: dict[str, Any] = {"library": "own"} if is_own(row) else {}  # even if it is slower
    request: Any = EinsumRequest(form.spec, operands, **form.options, **options)
    written: tuple[GuardedBuffer, ...] = ()
    if form.gap:
        request, written = with_outputs(request, lambda values: place(device, values, gap=form.gap))
    expected = einsum_steps(request, EXACT)
    return Check(name, request, expected, bounds(request, expected), written)


def random_values(rng: np.random.Generator, dtype: Dtype, shape: tuple[int, ...]) -> Array:
    """Normally distributed numbers, complex ones in both parts; for 16 bits -1, 0 and 1, whose sums are exact."""
    if dtype in HALF:
        return np.asarray(rng.choice(np.array([-1.0, 0.0, 1.0]), shape).astype(dtype.numpy))
    parts = [rng.standard_normal(shape) for _ in range(1 + dtype.is_complex)]
    return np.asarray(parts[0] + 1j * parts[1] if dtype.is_complex else parts[0]).astype(dtype.numpy)


def magnitude(request: EinsumRequest) -> Array:
    """The einsum of the operands' magnitudes."""
    tensors = [one.device.array(np.abs(np.asarray(one).astype(np.complex128)).real) for one in request.operands]
    return einsum_steps(replace(request, operands=tuple(tensors), conj=(), out=None), EXACT)["out"]


def bounds(request: EinsumRequest, expected: Results) -> Results:
    """The error bound of the result: each step adds the roundoff of its sums."""
    dtype = request.dtype
    unit = 2.0**-53 if request.precision is F64 else 2.0**-24
    factor = sum(8 + 4 * np.sqrt(terms_of(step.spec, request.sizes)) for step in request.schedule.steps)
    size = magnitude(request) * (4 if dtype.is_complex else 1)
    return {"out": rounded(factor * unit * size, expected["out"], dtype)}


def terms_of(spec: str, sizes: dict[str, int]) -> float:
    """The number of terms of each sum."""
    inputs, output = spec.replace("...", "").split("->")
    return float(np.prod([float(sizes[mode]) for mode in set(inputs) - {","} - set(output)]))


# -- wrong results that every case must reject: see `dispatch/testing/mutations.py` -----------------------------------
def left_out(request: Any) -> Results | None:
    """The result if the largest element of the first operand were 0."""
    if request.op != "einsum" or not request.operands[0].size or not request.operands[0].ndim:
        return None
    first, *others = request.operands
    values = np.array(first)
    values.flat[int(np.abs(values.astype(np.complex128)).argmax())] = 0
    return einsum_steps(replace(request, operands=(host_array(first, values), *others), out=None), EXACT)


def not_conjugated(request: Any) -> Results | None:
    """The result without conjugation."""
    if request.op != "einsum" or not request.conj or not request.dtype.is_complex:
        return None
    return einsum_steps(replace(request, conj=(), out=None), EXACT)


EINSUM_MUTATIONS = {"an element left out": left_out, "operands not conjugated": not_conjugated}
