"""The cases of `half_dft`: cuFFT's 16-bit transforms, transforms by way of f32, and wrong results to reject."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.ops.fft.half import PAIR, HalfDftRequest, evaluate, exact
from dispatch.ops.fft.request import DftKind, DftNorm
from dispatch.ops.fft.spectrum_check import another_norm, of_kind, spectrum_check
from dispatch.testing.check import MadeCase, place, with_outputs
from dispatch.testing.mutations import of_operand, with_fields

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.keys import Dtype
    from dispatch.testing.check import Check, GuardedBuffer
    from dispatch.testing.mutations import Mutation

__all__ = ["HALF_MUTATIONS", "half_cases"]

MANY = 16


class Form(NamedTuple):
    """The numbers that are transformed, the axes, and the memory layouts."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[int, ...] | None = None
    points: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None  # the order of the numbers' axes in memory
    gap: int = 0  # elements of 16 bits after each axis
    out: tuple[tuple[int, ...] | None, int] | None = None
    in_place: bool = False


FORMS = (
    Form("a power of 2", (5, 256), (-1,)),
    Form("two powers of 2", (3, 32, 64), (1, 2)),
    Form("three powers of 2", (8, 16, 4)),
    Form("four axes", (4, 2, 8, 4)),
    Form("columns", (64, 6), (0,)),
    Form("a prime", (3, 31), (-1,)),
    Form("mixed radices", (2, 12, 30), (1, 2)),
    Form("filled up", (3, 20), (-1,), (32,)),
    Form("cut off", (3, 40), (-1,), (16,)),
    Form("transposed", (16, 32), None, None, (1, 0)),
    Form("gaps", (3, 8, 16), (1, 2), None, None, 2),
    Form("into gaps", (4, 16), (-1,), None, None, 0, (None, 2)),
    Form("into columns", (8, 16), (-1,), None, None, 0, ((1, 0), 0)),
    Form("in place", (4, 64), (-1,), in_place=True),
    Form("in place, by way of f32", (4, 36), (-1,), in_place=True),
    Form("one point", (4, 1), (-1,)),
    Form("no batch", (0, 8), (-1,)),
    Form("1,024 points", (2, 1024), (-1,)),
)
CHOICES = [(inverse, norm) for norm in DftNorm for inverse in (False, True)]
WITHOUT_FACTOR = ((False, DftNorm.BACKWARD), (True, DftNorm.FORWARD))


def half_cases(row: Row) -> list[MadeCase]:
    """Every form of every kind without a factor; directions and norms with a factor alternate."""
    dtype, cases = row.dtypes[0], []
    for kind in DftKind:
        for number, form in enumerate(FORMS):
            if form.in_place and kind is not DftKind.C2C:
                continue
            for inverse, norm in {WITHOUT_FACTOR[number % 2], CHOICES[number % len(CHOICES)]}:
                word = "inverse" if inverse else "forward"
                name = f"{dtype}-{kind.name}-{form.name}-{word}-{norm.name}"
                checked = partial(check, form, dtype, kind, (inverse, norm))
                cases.append(MadeCase(name, checked, form.name))
    return sorted(cases, key=lambda case: case.id)


def check(form: Form, dtype: Dtype, kind: DftKind, choice: Any, name: str, device: Device, rng: Any) -> Check:
    """A case with fresh operands."""
    inverse, norm = choice
    shape, points = of_kind(form, kind)
    parts = () if kind is DftKind.R2C else (PAIR,)
    a = place(device, rng.standard_normal((*shape, *parts)).astype(dtype.numpy), behind(form.order, parts), form.gap)
    request = HalfDftRequest(a.view, kind, points, form.axes, inverse=inverse, norm=norm)
    written: tuple[GuardedBuffer, ...] = ()
    if form.in_place:
        request, written = request.replace(out=a.view), (a,)
    elif form.out is not None:
        order, gap = behind(form.out[0], () if kind is DftKind.C2R else (PAIR,)), form.out[1]
        request, written = with_outputs(request, lambda values: place(device, values, order, gap))
    count = float(np.prod([float(n) for n in request.points]))
    axes = request.transformed if kind is DftKind.C2R else (*request.transformed, len(request.result_shape))
    return spectrum_check(name, request, exact(request, EXACT), written, axes, count)


def behind(order: tuple[int, ...] | None, parts: tuple[int, ...]) -> tuple[int, ...] | None:
    """The order of a tensor's axes in memory, with the pairs innermost."""
    return (*order, len(order)) if order is not None and parts else order


def of_half(mutation: Mutation) -> Mutation:
    """The mutation for these requests alone."""
    return lambda request: mutation(request) if isinstance(request, HalfDftRequest) else None


def shows(request: HalfDftRequest) -> bool:
    """Whether the sign of the exponent matters."""
    return request.a.size >= MANY and max(request.points) > PAIR


HALF_MUTATIONS: dict[str, Mutation] = {
    name: of_half(mutation)
    for name, mutation in {
        "half: another norm": another_norm(evaluate),
        "half: the next element": of_operand(evaluate, "a", lambda a: np.roll(a, 2) if a.size >= MANY else None),
        "half: the other direction": with_fields(
            evaluate, MANY, inverse=lambda request: not request.inverse if shows(request) else None
        ),
    }.items()
}
