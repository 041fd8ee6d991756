"""The cases of transforms with callbacks: layouts as in cases.py, each with lines that depend on the coordinates."""

from __future__ import annotations

from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.keys import F16, U8
from dispatch.ops.fft.callback import Callback
from dispatch.ops.fft.callback_dft import CallbackDftRequest, evaluate, exact
from dispatch.ops.fft.request import COMPUTED, DftKind, DftNorm
from dispatch.ops.fft.spectrum_check import another_norm, drawn, of_kind, spectrum_check
from dispatch.testing.check import MadeCase, place, with_outputs

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype
    from dispatch.testing.check import Check, GuardedBuffer
    from dispatch.testing.mutations import Mutation

__all__ = ["CALLBACK_MUTATIONS", "callback_cases"]


class CallbackForm(NamedTuple):
    """The operand of a transform, its layout, and its callbacks, by their names in `CALLBACKS`."""

    name: str
    shape: tuple[int, ...]
    load: str = ""
    store: str = ""
    axes: tuple[int, ...] | None = None
    points: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None
    gap: int = 0
    out: tuple[tuple[int, ...] | None, int] | None = None
    in_place: bool = False
    stored: Dtype | None = None  # a's dtype, if it is not one of the transform's
    step: int = 0  # stride from one line of a to the next, where lines overlap


# fmt: off
FORMS = (
    CallbackForm("a window", (3, 40), "window", "", (-1,)),
    CallbackForm("indexed", (3, 24), "indexed", "indexed", (-1,)),
    CallbackForm("magnitudes", (2, 64), "", "magnitude", (-1,)),
    CallbackForm("a filter, real parts", (12, 18), "multiply", "real"),
    CallbackForm("places", (4, 6, 10), "places", "places", (0, 2)),
    CallbackForm("columns", (45, 7), "places", "places", (0,)),
    CallbackForm("the middle", (5, 24, 7), "indexed", "places", (1,)),
    CallbackForm("three axes", (4, 5, 12), "scale", "indexed"),
    CallbackForm("four axes", (4, 3, 6, 8), "places", "indexed"),
    CallbackForm("one point", (4, 1), "indexed", "indexed", (-1,)),
    CallbackForm("no line", (4, 6), "indexed", "indexed", ()),
    CallbackForm("filled up", (3, 20), "indexed", "", (-1,), (48,)),
    CallbackForm("cut off", (3, 50, 4), "places", "indexed", (1, 2), (21, 6)),
    CallbackForm("transposed", (12, 18), "indexed", "indexed", None, None, (1, 0)),
    CallbackForm("gaps, into gaps", (3, 10, 12), "places", "scale", (1, 2), None, None, 2, (None, 3)),
    CallbackForm("into columns", (24, 20), "", "indexed", (1,), None, None, 0, ((1, 0), 0)),
    CallbackForm("in place", (4, 36), "window", "scale", (-1,), in_place=True),
    CallbackForm("in place, gaps", (4, 6, 10), "indexed", "indexed", (0, 2), None, None, 2, in_place=True),
    CallbackForm("bytes", (9, 14), "from_u8", "magnitude", stored=U8),
    CallbackForm("samples", (2, 60), "from_i16", "", (-1,), stored=F16),
    CallbackForm("frames that overlap", (2, 9, 16), "window", "magnitude", (-1,), step=6),
    CallbackForm("no callback", (3, 16), "", "", (-1,)),
    CallbackForm("nothing", (0, 8), "window", "", (-1,)),
)
# fmt: on
CHOICES = [(inverse, norm) for norm in DftNorm for inverse in (False, True)]
ONLY_REAL = 2  # points along the last axis, for which every imaginary part of the spectrum is ignored
OF_COMPLEX = ("multiply", "real", "magnitude")


def callback(name: str, shape: tuple[int, ...], dtype: Dtype, real: Dtype, device: Device, rng: Any) -> Callback | None:
    """A callback over elements of a dtype and a shape, with operands between 1/2 and 3/2 in magnitude."""
    if not name:
        return None

    def near_one(of: Dtype, extents: tuple[int, ...]) -> Tensor:
        values = rng.uniform(0.5, 1.5, extents) * (np.exp(2j * np.pi * rng.random(extents)) if of.is_complex else 1)
        tensor: Tensor = device.array(values.astype(of.numpy))
        return tensor

    if name == "window":
        return Callback.window(near_one(real, shape[-1:]))
    if name == "multiply":
        return Callback.multiply(near_one(dtype, (1, *shape[1:])))
    if name == "scale":
        code, factor = "return x * factor * one[0];", 0.75 - 0.5j if dtype.is_complex else 0.75
        operands = {"factor": factor, "one": near_one(real, ())}
        return Callback(code, lambda x, factor, one: x * factor * one, operands)
    if name == "indexed":
        n = 7
        operands = {"weights": near_one(dtype, (n,)), "n": n, "by": 3}
        return Callback(
            "return x * weights[(i + by) % n];", lambda x, i, weights, n, by: x * weights[(i + by) % n], operands
        )
    if name == "places":
        return Callback(PLACES, places)
    ready: Callback = getattr(Callback, name)()
    return ready


PLACES = """Real size = 1;
for (int k = 0; k < rank; ++k)
    size += Real(at[k] + 1) / Real((k + 2) * shape[k]);
return x * size;"""


def places(x: Any, at: Any, shape: Any) -> Any:
    """The same in NumPy."""
    size = sum((at[k] + 1) / x.real.dtype.type((k + 2) * shape[k]) for k in range(len(shape)))
    return x * (1 + size)


def check(form: CallbackForm, number: Dtype, found: Dtype, choice: Any, name: str, device: Device, rng: Any) -> Check:
    """A case with fresh operands."""
    inverse, norm = choice
    kind = DftKind.R2C if not number.is_complex else DftKind.C2C if found.is_complex else DftKind.C2R
    real = COMPUTED[found][0]
    shape, points = of_kind(form, kind)
    a = _place_operand(form, drawn(rng, form.stored or number, shape), device)
    if form.stored is F16:
        a = place(device, rng.integers(-30000, 30000, shape).astype(np.int16).view(np.float16))
    request = CallbackDftRequest(a.view, kind, points, form.axes, inverse=inverse, norm=norm, precision=real)
    load = callback(form.load, request.a.shape, number, real, device, rng)
    request = replace(request, load=load, store=callback(form.store, request.result_shape, found, real, device, rng))
    written: tuple[GuardedBuffer, ...] = ()
    if form.in_place:
        request, written = replace(request, out=a.view), (a,)
    elif form.out is not None:
        order, gap = form.out
        request, written = with_outputs(request, lambda values: place(device, values, order, gap))
    count = float(np.prod([float(n) for n in request.points]))
    dropped = _dropped(request) if kind is DftKind.C2R and request.points[-1] <= ONLY_REAL else None
    return spectrum_check(name, request, exact(request, EXACT), written, request.transformed, count, dropped)


def _dropped(request: CallbackDftRequest) -> Any:
    """The part that a transform to real numbers drops: its result for i times the loaded elements."""
    load: Any = request.load
    if load is None:
        return None

    @wraps(load.numpy)  # the parameters say which arguments it is called with
    def turned(*given: Any, **named: Any) -> Any:
        return 1j * load.numpy(*given, **named)

    return exact(replace(request, load=replace(load, numpy=turned)), EXACT)["out"]


def _place_operand(form: CallbackForm, values: Any, device: Device) -> GuardedBuffer:
    buffer = place(device, values, form.order, form.gap)
    if not form.step:
        return buffer
    view = buffer.view
    return replace(buffer, view=view.strided(view.shape, (*view.element_strides[:-2], form.step, 1)))


def callback_cases(row: Row) -> list[MadeCase]:
    """All forms for the dtypes of a row; directions and norms alternate."""
    number, found = row.dtypes
    cases = []
    for place_of, form in enumerate(FORMS):
        is_whole = number.is_complex and found.is_complex
        if (form.in_place and not is_whole) or (form.axes == () and not is_whole):
            continue
        if (form.load in OF_COMPLEX and not number.is_complex) or (form.store in OF_COMPLEX and not found.is_complex):
            continue
        choice = CHOICES[place_of % len(CHOICES)]
        cases.append(MadeCase(f"{number}-{found}-{form.name}", partial(check, form, number, found, choice), form.name))
    return cases


# -- wrong results that every case must reject ---------------------------------------------------------------------
MANY = 12  # elements; fewer may not show the mutation


def without(side: str) -> Mutation:
    """The result without this callback."""

    def mutation(request: Any) -> Results | None:
        callback = getattr(request, side, None) if isinstance(request, CallbackDftRequest) else None
        if callback is None or request.a.size < MANY:
            return None
        if callback.dtype is not None:  # the result would have another dtype
            return {"out": 2 * evaluate(request, EXACT)["out"]}
        with np.errstate(invalid="ignore"):  # the bits of samples may be a NaN
            return evaluate(replace(request, **{side: None}), EXACT)

    return mutation


def turned(side: str) -> Mutation:
    """The result with the operands of a callback rotated by one element."""

    def mutation(request: Any) -> Results | None:
        callback = getattr(request, side, None) if isinstance(request, CallbackDftRequest) else None
        if callback is None or "by" not in callback.operands or request.a.size < MANY:
            return None
        operands = {**callback.operands, "by": callback.operands["by"] + 1}
        return evaluate(replace(request, **{side: replace(callback, operands=operands)}), EXACT)

    return mutation


OTHER_NORM = another_norm(evaluate)
CALLBACK_MUTATIONS: dict[str, Mutation] = {
    "without load": without("load"),
    "without store": without("store"),
    "loads of the next element": turned("load"),
    "stores of the next element": turned("store"),
    "callbacks, another norm": lambda one: OTHER_NORM(one) if isinstance(one, CallbackDftRequest) else None,
}
