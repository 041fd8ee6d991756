"""The cases of cosine and sine transforms: every type and its inverse, in all layouts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.core.host_plan import EXACT
from dispatch.ops.fft.cosine import CosineRequest, DctRequest, DstRequest, evaluate, exact
from dispatch.ops.fft.request import DftNorm
from dispatch.ops.fft.spectrum_check import drawn, spectrum_check
from dispatch.testing.check import GuardedBuffer, MadeCase, place, with_outputs
from dispatch.testing.mutations import altered

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.keys import Dtype
    from dispatch.testing.check import Check

__all__ = ["COSINE_MUTATIONS", "cosine_cases"]


class Form(NamedTuple):
    """The operand of a transform, and the memory layouts of both operands."""

    name: str
    shape: tuple[int, ...]
    axis: int = -1
    n: int | None = None
    order: tuple[int, ...] | None = None
    gap: int = 0
    out: tuple[tuple[int, ...] | None, int] | None = None


class Choice(NamedTuple):
    """The choices of a transform."""

    type: int
    inverse: bool
    norm: DftNorm
    orthogonalize: bool | None


FORMS = (
    Form("even", (3, 16)),
    Form("odd", (3, 15)),
    Form("two points", (4, 2)),
    Form("three points", (5, 3)),
    Form("columns", (12, 5), 0),
    Form("the middle", (3, 9, 4), 1),
    Form("filled up", (2, 7), -1, 11),
    Form("cut off", (2, 20), -1, 8),
    Form("gaps", (2, 3, 10), 1, None, (0, 2, 1), 2),
    Form("into columns", (6, 8), -1, None, None, 1, ((1, 0), 1)),
    Form("one line", (30,)),
    Form("a prime", (2, 61)),
    Form("nothing, filled up", (2, 0), -1, 6),
    Form("no line", (0, 6)),
    Form("larger", (2, 1000)),
)
ONE_POINT = Form("one point", (4, 1))
CHOICES = tuple(
    Choice(kind, inverse, norm, orthogonalize)
    for kind in (1, 2, 3, 4)
    for inverse in (False, True)
    for norm, orthogonalize in (
        *((norm, None) for norm in DftNorm),
        (DftNorm.BACKWARD, True),
        (DftNorm.ORTHO, False),
    )
)
PLAIN = ("even", "odd")
FEW = 9  # for dtypes that are only converted, one of this many cases is used


def cosine_cases(row: Row) -> list[MadeCase]:
    """The plain forms with all choices, and the others with each type and its inverse."""
    dtype = row.dtypes[0]
    cases = []
    for turn, form in enumerate((*FORMS, ONE_POINT)):
        for number, choice in enumerate(CHOICES):
            if form is ONE_POINT and choice.type == 1 and row.op == "dct":
                continue
            if form.name in PLAIN or number % (len(CHOICES) // 8) == turn % (len(CHOICES) // 8):
                word = f"{'inverse' if choice.inverse else 'forward'}-{choice.norm.name}-{choice.orthogonalize}"
                name = f"{dtype}-{form.name}-{choice.type}-{word}"
                cases.append(MadeCase(name, partial(check, form, row.op, dtype, choice), form.name))
    return cases if dtype.numpy.kind in "fc" and dtype is row.dtypes[1] else cases[::FEW]


def check(form: Form, op: str, dtype: Dtype, choice: Choice, name: str, device: Device, rng: Any) -> Check:
    """A case with fresh operands."""
    x = place(device, drawn(rng, dtype, form.shape), form.order, form.gap)
    kind: type[CosineRequest] = DctRequest if op == "dct" else DstRequest
    request_class: Any = kind  # the fields are the same in both classes
    request = request_class(x.view, n=form.n, axis=form.axis, **choice._asdict())
    written: tuple[GuardedBuffer, ...] = ()
    if form.out is not None:
        order, gap = form.out
        request, written = with_outputs(request, lambda values: place(device, values, order, gap))
    axes = (form.axis % len(form.shape),)
    return spectrum_check(name, request, exact(request, EXACT), written, axes, 2.0 * (request.points + 1))


# -- wrong results ----------------------------------------------------------------------------------------------------
MIN_POINTS = 3  # points; fewer do not distinguish the types


def has_ends(request: CosineRequest) -> bool:
    """Whether there are nonzero numbers at the ends that may be scaled."""
    without = (1, 4) if request.sine else (4,)
    may_be_zero = request.x.dtype.numpy.kind == "b"
    return request.type not in without and request.points <= request.x.shape[request.axis] and not may_be_zero


def with_choices(**choices: Callable[[CosineRequest], Any]) -> Callable[[Any], Results | None]:
    """The results of a transform with other choices."""

    def mutation(request: Any) -> Results | None:
        if not isinstance(request, CosineRequest) or min(request.points, request.x.shape[request.axis]) < MIN_POINTS:
            return None
        if choices.keys() == {"orthogonalize"} and not has_ends(request):
            return None
        return altered(evaluate, request, **{name: choose(request) for name, choose in choices.items()})

    return mutation


COSINE_MUTATIONS = {
    "another type": with_choices(type=lambda request: 4 if request.type != 4 else 2),
    "another factor": with_choices(
        norm=lambda request: DftNorm.FORWARD if request.norm == DftNorm.BACKWARD else DftNorm.BACKWARD,
        orthogonalize=lambda request: request.is_orthogonal,
    ),
    "other ends": with_choices(orthogonalize=lambda request: not request.is_orthogonal),
}
