"""The test cases of the dropout rows: they check that masks are consistent, as their values cannot be predicted.

A check takes the mask from the result, and compares everything else with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.request import run
from dispatch.keys import U8
from dispatch.libraries.cudnn.dropout_states import states_bytes
from dispatch.ops.dropout import (
    DropoutBwdRequest,
    DropoutRequest,
    DropoutStatesRequest,
    reserve_bytes,
)
from dispatch.testing.check import Check, MadeCase, Mismatch, by_numpy, normal, place, poison, rounded, unit

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["MUTATIONS", "cases", "named"]

Form = tuple[str, tuple[int, ...], tuple[int, ...] | None, int, float, bool]
# Name, shape, order of the axes in memory, gap after every axis, probability, and whether y is x itself.
# fmt: off
FORMS: tuple[Form, ...] = (
    ("one element",   (1,),         None,         0, 0.5,  False),
    ("primes",        (7, 13, 31),  None,         0, 0.3,  False),
    ("channels last", (2, 9, 5, 7), (0, 2, 3, 1), 0, 0.5,  False),
    ("in place",      (11, 37),     None,         0, 0.25, True),
    ("gaps",          (3, 5, 7),    None,         1, 0.5,  False),
    ("nothing",       (0, 4),       None,         0, 0.5,  False),
    ("keep all",      (129,),       None,         0, 0.0,  False),
    ("keep few",      (5003,),      None,         0, 0.95, False),
    ("large",         (1 << 18,),   None,         0, 0.1,  False),
)
# fmt: on
SEED = 1234567
SIGMAS = 6  # the allowed deviation of the dropped share from p


@dataclass(frozen=True)
class MaskTrial(Check):
    """A forward pass: y is x / (1 - p), or 0 for a share of about p."""

    p: float = 0.5

    def drawn(self, rng: np.random.Generator) -> dict[str, Array]:
        """A valid result, with a mask drawn by NumPy."""
        scaled = self.expected["out"]
        return {"out": np.where(rng.random(scaled.shape) < self.p, 0, scaled)}

    def verify(self, result: Any) -> None:
        """Raise Mismatch unless a share near p is dropped, and the other elements are scaled."""
        scaled = self.expected["out"]
        y = result[0].numpy().astype(np.float64)
        is_kept = (y != 0) | (scaled == 0)
        wrong = is_kept & ~(np.abs(y - scaled) <= self.allowed["out"])  # a NaN is neither 0 nor near
        if wrong.any():
            raise Mismatch(f"{self.name}: {wrong.sum()} of {y.size} elements are neither dropped nor scaled")
        share, spread = 1 - is_kept.mean() if y.size else self.p, math.sqrt(self.p * (1 - self.p) / max(y.size, 1))
        if abs(share - self.p) > SIGMAS * spread:
            raise Mismatch(f"{self.name}: {share:.4f} are dropped, expected {self.p} within {SIGMAS * spread:.4f}")
        self._check_memory()


@dataclass(frozen=True)
class SeedTrial(Check):
    """A state, and another one with the same seed, which must draw the same masks.

    Their bytes may differ: cuDNN's states have gaps that are never written.
    """

    same: Any = None

    def renew(self, result: Any = None) -> None:
        """Poison the state, and initialize the other one again, because `verify` has drawn from it."""
        super().renew(result)
        run(DropoutStatesRequest(self.same.device, SEED, out=self.same))

    def verify(self, result: Any) -> None:
        """Raise Mismatch unless the masks are the same, and nothing around the state was written."""
        self._check_memory()
        x = result.device.array(np.ones(10_000, np.float32))
        for _ in range(2):
            one, other = (run(DropoutRequest(x, states))[0].numpy() for states in (result, self.same))
            if (one != other).any():
                raise Mismatch(f"{self.name}: two states of one seed draw different masks")


def seeded(name: str, device: Device, _: np.random.Generator) -> Check:
    """A new state, and another one with the same seed."""
    memory = place(device, poison(U8, (states_bytes(device),)), gap=7, aligned=True)
    request = DropoutStatesRequest(device, SEED, out=memory.view)
    same: Tensor = run(DropoutStatesRequest(device, SEED))
    return SeedTrial(name, request, {}, {}, (memory,), same=same)


def check(form: Form, dtype: Dtype, backward: bool, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A pass with fresh operands and a new state."""
    _, shape, order, gap, p, in_place = form
    states: Tensor = run(DropoutStatesRequest(device, int(rng.integers(1 << 40))))
    x = place(device, normal(rng, dtype, shape), order, gap)
    memory = x if in_place else place(device, poison(dtype, shape), order, gap)
    scaled = x.view.numpy().astype(np.float64) * (1 / (1 - p))
    if not backward:
        reserve = place(device, poison(U8, (reserve_bytes(x.view.size),)), gap=5, aligned=True)
        request = DropoutRequest(x.view, states, p, out=memory.view, reserve=reserve.view)
        return MaskTrial(name, request, {"out": scaled}, bounds(request, scaled), (memory, reserve), p=p)
    ones = place(device, np.ones(shape, dtype.numpy), order)
    y, mask = run(DropoutRequest(ones.view, states, p))
    gradient = DropoutBwdRequest(x.view, mask, p, out=memory.view)
    expected = scaled * (y.numpy() != 0)
    return Check(name, gradient, {"out": expected}, bounds(gradient, expected), (memory,))


def bounds(request: DropoutRequest | DropoutBwdRequest, expected: Array) -> Results:
    """The allowed error: a GPU stores p in f32, and so the scale, whatever the dtype."""
    dtype = request.layout_of("out").dtype
    scale = 0.0 if by_numpy(request.device) else 2.0**-23 / (1 - request.p)
    return {"out": rounded((2 * unit(dtype) + scale) * np.abs(expected), expected, dtype)}


def cases(row: Row) -> list[MadeCase]:
    """Every form; one case for the state."""
    dtype = row.dtypes[0]
    if row.op == "dropout_states":
        return [MadeCase(f"{dtype}-{FORMS[0][0]}", seeded, FORMS[0][0])]
    backward = row.op == "dropout_bwd"
    return [MadeCase(f"{dtype}-{form[0]}", partial(check, form, dtype, backward), form[0]) for form in FORMS]


# -- wrong results that every case must reject: see `dispatch/testing/mutations.py` --------------------
FEW = 16  # elements: with fewer, all may be kept by chance


def named(request: Any, result: Any) -> dict[str, Tensor]:
    """Only the result: the contents of the reserve space and the state depend on the library."""
    if isinstance(request, DropoutRequest):
        return {"out": result[0]}
    return {"out": result} if isinstance(request, DropoutBwdRequest) else {}


def nothing_dropped(request: Any) -> Results | None:
    """All elements are kept and scaled."""
    if not isinstance(request, (DropoutRequest, DropoutBwdRequest)) or not request.p:
        return None
    source = request.x if isinstance(request, DropoutRequest) else request.dy
    return {"out": np.asarray(source).astype(np.float64) / (1 - request.p)} if source.size >= FEW else None


def everything_dropped(request: Any) -> Results | None:
    """No elements are kept."""
    if not isinstance(request, (DropoutRequest, DropoutBwdRequest)):
        return None
    source = request.x if isinstance(request, DropoutRequest) else request.dy
    return {"out": np.zeros(source.shape)} if source.size >= FEW else None


MUTATIONS = {"nothing dropped": nothing_dropped, "everything dropped": everything_dropped}
