"""The cases of the rows of Fourier transforms, their error bounds, and wrong results that each case must reject."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.device.tensor import Tensor
from dispatch.ops.fft.callback_cases import CALLBACK_MUTATIONS, callback_cases
from dispatch.ops.fft.cosine_cases import COSINE_MUTATIONS, cosine_cases
from dispatch.ops.fft.half_cases import HALF_MUTATIONS, half_cases
from dispatch.ops.fft.reference import evaluate, exact
from dispatch.ops.fft.request import COMPUTED, DftKind, DftNorm, DftRequest
from dispatch.ops.fft.roll_cases import ROLL_MUTATIONS, roll_cases
from dispatch.ops.fft.spectrum_check import another_norm, drawn, of_kind, spectrum_check
from dispatch.testing.check import GuardedBuffer, MadeCase, place, with_outputs
from dispatch.testing.mutations import altered, of_operand, with_fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype
    from dispatch.testing.check import Check
    from dispatch.testing.mutations import Mutation

__all__ = ["MUTATIONS", "Form", "cases", "check"]


class Form(NamedTuple):
    """The operand of a transform, with `points` along `axes`, and the memory layouts of both operands."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[int, ...] | None = None
    points: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None  # the order of a's axes in memory
    gap: int = 0  # elements after each axis of a
    out: tuple[tuple[int, ...] | None, int] | None = None  # the same for out; None to have it allocated
    in_place: bool = False
    reversed_axis: int | None = None
    repeated: int = 0  # a is repeated this many times in the same memory, along a new first axis
    factors: tuple[int, ...] | None = None  # their shape; a negative extent means that of a
    complex_factors: bool = False
    step: int = 0  # stride from one line of a to the next, where lines overlap


# fmt: off
FORMS = (
    Form("a power of 2", (3, 64), (-1,)),
    Form("a prime", (2, 61), (-1,)),
    Form("mixed radices", (2, 360), (-1,)),
    Form("a prime beyond cuFFT's own", (2, 211), (-1,)),
    Form("one point", (4, 1), (-1,)),
    Form("two points", (5, 2), (-1,)),
    Form("three points", (3,), (0,)),
    Form("columns", (45, 7), (0,)),
    Form("the middle", (5, 24, 7), (1,)),
    Form("the middle of many", (33, 12, 40), (1,)),
    Form("first and last", (6, 5, 10), (0, 2)),
    Form("last and first", (6, 5, 10), (2, 0)),
    Form("two axes", (3, 12, 18), (-2, -1)),
    Form("three axes", (8, 5, 12)),
    Form("three axes of a batch", (2, 4, 6, 10), (1, 2, 3)),
    Form("four axes", (4, 3, 6, 8)),
    Form("five axes", (3, 2, 4, 3, 6)),
    Form("six axes in another order", (2, 3, 2, 4, 3, 2), (4, 0, 5, 2, 1, 3)),
    Form("no axis", (3, 4), ()),
    Form("filled up", (3, 20), (-1,), (48,)),
    Form("cut off", (3, 50), (-1,), (21,)),
    Form("both", (3, 20, 9), (0, 1), (5, 12)),
    Form("filled up along the halved axis", (7, 5), (0, 1), (7, 12)),
    Form("one of them to one point", (4, 6), (0, 1), (6, 1)),
    Form("transposed", (12, 18), None, None, (1, 0)),
    Form("a channel behind", (4, 10, 6, 3), (1, 2), None, None, 0, None),
    Form("a channel in between", (2, 3, 8, 10), (2, 3), None, (0, 2, 3, 1)),
    Form("gaps", (3, 10, 12), (1, 2), None, None, 2),
    Form("odd gaps", (3, 10, 12), (1, 2), None, None, 1, (None, 1)),
    Form("into other strides", (3, 8, 12), (1, 2), None, None, 0, ((2, 0, 1), 0)),
    Form("into gaps", (3, 8, 12), (0, 1, 2), None, None, 2, (None, 3)),
    Form("into columns", (24, 20), (1,), None, None, 0, ((1, 0), 0)),
    Form("in place", (4, 36), (-1,), in_place=True),
    Form("in place, all axes", (4, 6, 10), in_place=True),
    Form("in place, the middle of many", (20, 6, 18), (1,), in_place=True),
    Form("in place, gaps", (4, 6, 10), (0, 2), None, None, 2, in_place=True),
    Form("backwards", (5, 16), (-1,), reversed_axis=1),
    Form("a batch backwards", (5, 16), (-1,), reversed_axis=0),
    Form("a repeated batch", (16,), (-1,), repeated=4),
    Form("no batch", (0, 8), (-1,)),
    Form("nothing, filled up", (3, 0), (-1,), (6,)),
    Form("a window", (3, 40), (-1,), factors=(-1,)),
    Form("a window, filled up", (2, 3, 20), (-1,), (32,), factors=(-1,)),
    Form("a factor of each line", (6, 9), (0,), factors=(1, -1)),
    Form("another spectrum", (3, 6, 10), (1, 2), factors=(-1, -1, -1), complex_factors=True),
    Form("one spectrum for all", (3, 24), (1,), (30,), factors=(-1,), complex_factors=True),
    Form("in place, a window", (4, 12), (1,), in_place=True, factors=(-1,)),
    Form("larger", (2, 1000), (-1,)),
    Form("larger, odd", (3, 1215), (-1,)),
    Form("frames that overlap", (2, 9, 16), (-1,), step=6),
    Form("frames that overlap, a window, filled up", (2, 9, 12), (-1,), (20,), factors=(-1,), step=5),
)
# fmt: on
CHOICES = [(inverse, norm) for norm in DftNorm for inverse in (False, True)]
PLAIN = ("a power of 2", "two axes", "in place")
OTHERS = {
    "callback_dft": callback_cases,
    "half_dft": half_cases,
    "roll": roll_cases,
    "dct": cosine_cases,
    "dst": cosine_cases,
}
FEW = 4  # forms for dtypes that are only converted


def check(form: Form, dtype: Dtype, kind: DftKind, choice: Any, name: str, device: Device, rng: Any) -> Check:
    """A case with fresh operands."""
    inverse, norm = choice
    shape, points = of_kind(form, kind)
    a = _place_operand(form, drawn(rng, dtype, shape), device)
    request = DftRequest(a.view, kind, points, form.axes, inverse=inverse, norm=norm)
    if form.factors is not None:
        request = request.replace(factors=place(device, factors_of(form, kind, request, rng), gap=form.gap).view)
    written: tuple[GuardedBuffer, ...] = ()
    if form.in_place:
        request, written = request.replace(out=a.view), (a,)
    elif form.out is not None:
        order, gap = form.out
        request, written = with_outputs(request, lambda values: place(device, values, order, gap))
    count = float(np.prod([float(n) for n in request.points]))
    return spectrum_check(name, request, exact(request, EXACT), written, request.transformed, count)


def factors_of(form: Form, kind: DftKind, request: DftRequest, rng: Any) -> Array:
    """Numbers of the precision of the result; complex where allowed."""
    extents = request.a.shape[request.a.ndim - len(form.factors or ()) :]
    shape = tuple(extent if one < 0 else one for one, extent in zip(form.factors or (), extents, strict=True))
    is_complex = form.complex_factors and kind is not DftKind.R2C
    return drawn(rng, COMPUTED[request.outputs()["out"].dtype][is_complex], shape)


def _place_operand(form: Form, values: Array, device: Device) -> GuardedBuffer:
    buffer = place(device, values, form.order, form.gap)
    if form.reversed_axis is not None:
        index = [slice(None)] * values.ndim
        index[form.reversed_axis] = slice(None, None, -1)
        return replace(buffer, view=buffer.view[tuple(index)])
    if form.repeated:
        view = buffer.view
        shape, strides = (form.repeated, *view.shape), (0, *view.layout.strides)
        return replace(buffer, view=Tensor(view.storage, view.ptr, device.layout(view.dtype, shape, strides, view.ptr)))
    if form.step:
        view = buffer.view
        return replace(buffer, view=view.strided(view.shape, (*view.element_strides[:-2], form.step, 1)))
    return buffer


def cases(row: Row) -> list[MadeCase]:
    """All forms for each kind of a row; the plain ones with all directions and norms, the others alternate them."""
    if row.op in OTHERS:
        return OTHERS[row.op](row)
    dtype, result = row.dtypes
    cases = []
    for kind in DftKind:
        if (kind is DftKind.C2R) == result.is_complex or (kind is DftKind.R2C and dtype.is_complex):
            continue
        is_first = dtype.is_complex or (dtype.numpy.kind == "f" and dtype.itemsize > FEW - 1 and result.is_complex)
        forms = FORMS if is_first else FORMS[:: len(FORMS) // FEW]
        for number, form in enumerate(forms):
            if form.in_place and (kind is not DftKind.C2C or not dtype.is_complex):
                continue
            if form.axes == () and kind is not DftKind.C2C:
                continue
            choices = CHOICES if form.name in PLAIN and is_first else [CHOICES[number % len(CHOICES)]]
            for inverse, norm in choices:
                word = "inverse" if inverse else "forward"
                name = f"{dtype}-{kind.name}-{form.name}-{word}-{norm.name}"
                run = partial(check, form, dtype, kind, (inverse, norm))
                cases.append(MadeCase(name, run, form.name))
    return cases


# -- wrong results that every case must reject: see `dispatch/testing/mutations.py` --------------------
MANY = 16  # elements of an operand; fewer may not show the mutation
SEVERAL = 2


def other_axis(request: DftRequest) -> Results | None:
    """The transform without its first axis."""
    axes, points = request.transformed, request.points
    if sum(n > 1 for n in points) < SEVERAL or request.a.size < MANY or points[0] == 1:
        return None
    if request.a.shape[axes[0]] != points[0]:
        return None  # the shape would differ
    return altered(evaluate, request, axes=axes[1:], s=points[1:])


def is_turned(request: DftRequest) -> bool:
    """Whether the sign of the exponent matters: it does not for real numbers with a symmetric spectrum."""
    return request.a.size >= MANY and (request.kind != DftKind.C2R or request.a.dtype.is_complex)


def opposite(request: DftRequest) -> Results | None:
    """The other sign of the exponent, with this direction's factor."""
    if not is_turned(request) or max(request.points, default=1) <= SEVERAL:  # both signs give the same result
        return None
    results = altered(evaluate, request, inverse=not request.inverse, norm="ortho")
    share = request.factor * np.sqrt(float(np.prod([float(n) for n in request.points])))
    return {"out": results["out"] * share}


def of_a(change: Callable[[Array], Array | None]) -> Mutation:
    """The mutation that changes the operand, if each of its elements has its own memory."""
    mutation = of_operand(evaluate, "a", change)
    return lambda request: None if request.a.layout.meets_itself else mutation(request)


def without_factors(request: DftRequest) -> Results | None:
    """The result without the factors."""
    if request.factors is None or request.a.size < MANY:
        return None
    return evaluate(replace(request, factors=None), np.dtype(np.float64))


def of_dft(mutation: Mutation) -> Mutation:
    """The mutation for transforms alone."""
    return lambda request: mutation(request) if isinstance(request, DftRequest) else None


DFT_MUTATIONS: dict[str, Mutation] = {
    "the other sign": opposite,
    "another norm": another_norm(evaluate),
    "an axis left out": other_axis,
    "the next element": of_a(lambda a: np.roll(a, 1) if a.size >= MANY else None),
    "without factors": without_factors,
    "the conjugate": of_a(lambda a: a.conj() if a.size >= MANY and a.dtype.kind == "c" else None),
    "the other direction": with_fields(
        evaluate, MANY, inverse=lambda request: not request.inverse if is_turned(request) else None
    ),
}
MUTATIONS: dict[str, Mutation] = {
    **{name: of_dft(mutation) for name, mutation in DFT_MUTATIONS.items()},
    **CALLBACK_MUTATIONS,
    **COSINE_MUTATIONS,
    **ROLL_MUTATIONS,
    **HALF_MUTATIONS,
}
