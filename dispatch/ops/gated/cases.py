"""The test cases of the rows of gated activations, the allowed errors, and the wrong results to reject."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.keys import F64, member
from dispatch.ops.gated import GatedActivationBwdRequest, GatedActivationRequest, GatedMode, activated, evaluate
from dispatch.testing.check import GuardedBuffer, MadeCase, checked, in_turn, normal, place, rounded, unit
from dispatch.testing.mutations import of_operand, with_fields

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.keys import Dtype
    from dispatch.testing.check import Check

__all__ = ["MUTATIONS", "cases"]

Form = tuple[str, tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None, int, bool]
# Name, shape, order of the axes of gate and of the others in memory, gap after every axis, and whether the outputs are
# operands.
# fmt: off
FORMS: tuple[Form, ...] = (
    ("primes",          (7, 13, 31),        None,         None,         0, False),
    ("one element",     (1,),               None,         None,         0, False),
    ("scalar",          (),                 None,         None,         0, False),
    ("vectors",         (6, 64),            None,         None,         0, False),
    ("gaps",            (5, 3, 7),          None,         None,         1, False),
    ("gaps of vectors", (3, 5, 32),         None,         None,         8, False),
    ("transposed",      (11, 6),            (1, 0),       (1, 0),       0, False),
    ("two orders",      (16, 24),           (1, 0),       None,         0, False),
    ("six axes",        (2, 3, 2, 5, 2, 3), None,         None,         1, False),
    ("in place",        (6, 37),            None,         None,         0, True),
    ("vectors in place", (6, 40),           None,         None,         8, True),
    ("nothing",         (3, 0),             None,         None,         0, False),
    ("large",           (1 << 18,),         None,         None,         0, False),
)
# fmt: on


def check(
    form: Form, dtype: Dtype, mode: GatedMode, backward: bool, name: str, device: Device, rng: np.random.Generator
) -> Check:
    """A case with fresh operands; the gate is positive and negative, up to the flat parts of the function."""
    _, shape, first, others, gap, in_place = form
    lay = partial(place, device, gap=gap)
    gate = lay(normal(rng, dtype, shape, 3.0), order=first)
    up, dy, *outs = (lay(normal(rng, dtype, shape), order=others) for _ in range(4))
    written: tuple[GuardedBuffer, ...]
    if backward:
        written = (up, dy) if in_place else tuple(outs)
        outputs = {"dgate": written[0].view, "dup": written[1].view}
        request: Any = GatedActivationBwdRequest(gate.view, up.view, dy.view, mode, **outputs)
    else:
        written = (gate if mode in (GatedMode.GELU, GatedMode.RELU) else up,) if in_place else (outs[0],)
        request = GatedActivationRequest(gate.view, up.view, mode, out=written[0].view)
    return checked(name, (request, written), evaluate, bounds)


TINY = 2.0**-148  # errors below f32's normal numbers are up to one step of the smallest ones


def bounds(request: Any, expected: Results) -> Results:
    """The allowed errors.

    An exponential has an error of (4 + 2 |argument|) · u if the argument itself was rounded: x² / 2 for GELU, a cubic
    polynomial for its approximation. Slopes have magnitude 1, and so do their errors in the flat parts.
    """
    gate, up, dy = (np.abs(np.asarray(getattr(request, n, 0)).astype(np.float64)) for n in ("gate", "up", "dy"))
    dtype, mode, u = request.gate.dtype, member(request.mode), unit(request.gate.dtype)
    tiny = 0.0 if dtype is F64 else TINY
    active = np.abs(activated(mode, np.asarray(request.gate).astype(np.float64))[0])
    far = {GatedMode.GELU: 2 * gate**2, GatedMode.GELU_TANH: 20 * (gate + 0.05 * gate**3)}.get(mode, 4 * gate)
    error = (0 if mode is GatedMode.RELU else 16 + far) * u * active + tiny * (1 + gate)
    if "out" in expected:
        total = error * up + 2 * u * np.abs(expected["out"])
        return {"out": rounded(total, expected["out"], dtype)}
    steep = 0 if mode is GatedMode.RELU else (16 + 8 * gate) * u * (1 + gate) + tiny
    dgate = steep * dy * up + 4 * u * np.abs(expected["dgate"])
    dup = error * dy + 2 * u * np.abs(expected["dup"])
    return {"dgate": rounded(dgate, expected["dgate"], dtype), "dup": rounded(dup, expected["dup"], dtype)}


def cases(row: Row) -> list[MadeCase]:
    """Every form, with alternating modes, and the plain forms with all modes."""
    dtype, backward = row.dtypes[0], row.op == "gated_activation_bwd"
    return [
        MadeCase(f"{dtype}-{mode.name}-{form[0]}", partial(check, form, dtype, mode, backward), form[0])
        for form, mode in in_turn(FORMS, list(GatedMode), plain=("primes", "scalar", "vectors", "large"))
    ]


# -- wrong results that every case must reject: see `dispatch/testing/mutations.py` --------------------
FEW = 32  # elements: with fewer, the two functions may agree


def following(request: Any) -> GatedMode:
    """The mode after the next one, because the two GELUs differ by less than some roundings."""
    modes = list(GatedMode)
    return modes[(modes.index(member(request.mode)) + 2) % len(modes)]


MUTATIONS = {
    "another activation": with_fields(evaluate, FEW, mode=following),
    "gate and up exchanged": lambda request: (
        None
        if request.gate.size < FEW
        else evaluate(request.replace(gate=request.up, up=request.gate), np.dtype(np.float64))
    ),
    "up of the neighbour": of_operand(evaluate, "up", lambda up: np.roll(up, 1) if up.size >= FEW else None),
    "dy of the neighbour": of_operand(evaluate, "dy", lambda dy: np.roll(dy, 1) if dy.size >= FEW else None),
}
