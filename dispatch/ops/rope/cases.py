"""The test cases of the rows of rotary embedding, the allowed errors, and the wrong results to reject."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.keys import F32
from dispatch.ops.rope import RopeRequest, evaluate
from dispatch.testing.check import GuardedBuffer, MadeCase, checked, in_turn, normal, place, rounded, unit
from dispatch.testing.mutations import neighbour, of_operand, with_fields

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.keys import Dtype
    from dispatch.testing.check import Check

__all__ = ["MUTATIONS", "cases"]

IN_ORDER, BY_TOKEN, ACROSS = (0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2)
# Name, batch, heads of q and of k, tokens, width, how much of it is rotated, order of axes in memory, gap, in place.
# fmt: off
FORMS: tuple[Any, ...] = (
    ("primes",          3, 5, 1, 7, 14, 14,    IN_ORDER, 0, False),
    ("vectors",         2, 4, 2, 9, 64, 64,    BY_TOKEN, 0, False),
    ("one pair",        1, 1, 1, 1, 2, 2,      IN_ORDER, 0, False),
    ("a rest",          2, 3, 3, 5, 32, 16,    BY_TOKEN, 0, False),
    ("an odd rest",     1, 2, 1, 3, 11, 6,     IN_ORDER, 0, False),
    ("gaps",            2, 3, 2, 5, 16, 16,    BY_TOKEN, 1, False),
    ("gaps of vectors", 2, 3, 2, 5, 48, 32,    BY_TOKEN, 8, False),
    ("across",          2, 3, 2, 6, 16, 16,    ACROSS,   0, False),
    ("in place",        2, 4, 2, 6, 32, 32,    BY_TOKEN, 0, True),
    ("a rest in place", 2, 4, 2, 6, 40, 24,    IN_ORDER, 1, True),
    ("no token",        2, 3, 2, 0, 16, 16,    IN_ORDER, 0, False),
    ("no head of k",    2, 3, 0, 5, 16, 16,    IN_ORDER, 0, False),
    ("nothing turns",   2, 3, 2, 5, 16, 0,     IN_ORDER, 0, False),
    ("large",           2, 8, 2, 130, 128, 128, BY_TOKEN, 0, False),
)
# fmt: on


class Choice(NamedTuple):
    """Options that vary between cases."""

    interleaved: bool
    adjoint: bool
    wide: bool  # cos and sin are f32
    shared: bool  # one cos for all of the batch


CHOICES = [Choice(*(bool(number >> bit & 1) for bit in range(4))) for number in (0, 15, 6, 9, 3, 12)]


def check(form: Any, dtype: Dtype, choice: Choice, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A case with fresh operands; cos and sin are independent random numbers."""
    _, batch, q_heads, k_heads, tokens, width, turned, order, gap, in_place = form
    factor, angles = F32 if choice.wide else dtype, (1 if choice.shared else batch, tokens, turned)
    lay = partial(place, device, order=order, gap=gap)
    q, k = (lay(normal(rng, dtype, (batch, heads, tokens, width))) for heads in (q_heads, k_heads))
    cos, sin = (place(device, normal(rng, factor, angles), gap=gap) for _ in range(2))
    request = RopeRequest(q.view, k.view, cos.view, sin.view, choice.interleaved, choice.adjoint)
    written: tuple[GuardedBuffer, ...] = (q, k)
    if not in_place:
        written = tuple(lay(normal(rng, dtype, each.view.shape)) for each in (q, k))
    request = request.replace(q_out=written[0].view, k_out=written[1].view)
    return checked(name, (request, written), evaluate, bounds)


def bounds(request: RopeRequest, expected: Results) -> Results:
    """The allowed error: two products and their sum, each rounded once, in the result and in the reference."""
    cos, sin = (np.abs(np.asarray(tensor).astype(np.float64))[:, None] for tensor in (request.cos, request.sin))
    dtype, turned, allowed = request.q.dtype, request.cos.shape[-1], {}
    for name, operand in (("q_out", request.q), ("k_out", request.k)):
        x = np.abs(np.asarray(operand).astype(np.float64))
        size, head = np.zeros(x.shape), x[..., :turned]
        if x.size and turned:  # each result combines two elements of a head, none above the largest
            size[..., :turned] = (cos + sin.max(-1, keepdims=True)) * head.max(-1, keepdims=True)
        allowed[name] = rounded(4 * unit(dtype) * size, expected[name], dtype)
    return allowed


def cases(row: Row) -> list[MadeCase]:
    """Every form, with alternating choices, and the plain forms with all of them."""
    dtype = row.dtypes[0]
    return [
        MadeCase(f"{dtype}-{form[0]}-{CHOICES.index(choice)}", partial(check, form, dtype, choice), form[0])
        for form, choice in in_turn(FORMS, CHOICES, plain=("primes", "vectors"))
    ]


# -- wrong results that every case must reject: see `dispatch/testing/mutations.py` --------------------
FEW = 16  # elements: with fewer, the two results may agree


def swapped(request: RopeRequest) -> Results | None:
    """cos and sin exchanged."""
    if request.q.size < FEW or not request.cos.size:
        return None
    return evaluate(request.replace(cos=request.sin, sin=request.cos), np.dtype(np.float64))


MUTATIONS = {
    "other pairs": with_fields(evaluate, FEW, interleaved=lambda request: not request.interleaved),
    "the transpose": with_fields(evaluate, FEW, adjoint=lambda request: not request.adjoint),
    "cos for sin": swapped,
    "cos of the next token": of_operand(evaluate, "cos", lambda cos: np.roll(cos, 1, axis=1)),
    "sin of the next token": of_operand(evaluate, "sin", lambda sin: np.roll(sin, 1, axis=1)),
    "q of the next head": lambda request: _other_head(request, "q"),
}


def _other_head(request: RopeRequest, name: str) -> Results | None:
    operand = getattr(request, name)
    if not operand.size:
        return None
    return of_operand(evaluate, name, lambda _: neighbour(operand, 1))(request)  # type: ignore[return-value]
