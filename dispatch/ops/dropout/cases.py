"""The cases that the dropout rows are tried with: masks that must hold together, not values that must be hit.

What a GPU draws nobody can predict, so a check takes the mask from the result and holds everything else against it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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
from dispatch.testing.check import Check, GuardedBuffer, Mismatch, by_numpy, normal, place, poison, rounded, unit

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor

    Results = dict[str, Array]
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype

__all__ = ["MUTATIONS", "DropoutCase", "cases", "named"]

# Name, shape, order of the axes in memory, gap behind every axis, probability, and whether y is x itself.
# fmt: off
FORMS: tuple[tuple[str, tuple[int, ...], tuple[int, ...] | None, int, float, bool], ...] = (
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
SIGMAS = 6  # how far from p the dropped share may be


@dataclass(frozen=True)
class MaskTrial(Check):
    """A forward pass: y is x / (1 - p) or 0, as often as p says."""

    p: float = 0.5

    def drawn(self, rng: np.random.Generator) -> dict[str, Array]:
        """A result as it may be: with a mask of NumPy's."""
        scaled = self.expected["out"]
        return {"out": np.where(rng.random(scaled.shape) < self.p, 0, scaled)}

    def verify(self, result: Any) -> None:
        """Raise Mismatch unless a share near p is dropped, and what stays is scaled."""
        scaled = self.expected["out"]
        y = result[0].numpy().astype(np.float64)
        kept = (y != 0) | (scaled == 0)
        wrong = kept & ~(np.abs(y - scaled) <= self.allowed["out"])  # a NaN is neither 0 nor near
        if wrong.any():
            raise Mismatch(f"{self.name}: {wrong.sum()} of {y.size} elements are neither dropped nor scaled")
        share, spread = 1 - kept.mean() if y.size else self.p, math.sqrt(self.p * (1 - self.p) / max(y.size, 1))
        if abs(share - self.p) > SIGMAS * spread:
            raise Mismatch(f"{self.name}: {share:.4f} are dropped, expected {self.p} within {SIGMAS * spread:.4f}")
        self._check_memory()


@dataclass(frozen=True)
class SeedTrial(Check):
    """A state, and another from the same seed: masks drawn from both are the same.

    Their bytes need not be: cuDNN's states have gaps that nobody writes.
    """

    same: Any = None

    def renew(self, result: Any = None) -> None:
        """Poison the state, and seed the other anew, from which `check` has drawn."""
        super().renew(result)
        run(DropoutStatesRequest(self.same.device, SEED, out=self.same))

    def verify(self, result: Any) -> None:
        """Raise Mismatch unless the masks are the same, and nothing beside the state was written."""
        self._check_memory()
        x = result.device.array(np.ones(10_000, np.float32))
        for _ in range(2):
            one, other = (run(DropoutRequest(x, states))[0].numpy() for states in (result, self.same))
            if (one != other).any():
                raise Mismatch(f"{self.name}: two states of one seed draw different masks")


@dataclass(frozen=True)
class DropoutCase:
    """One request, by all that is chosen about it but the numbers in it."""

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    gap: int
    p: float
    in_place: bool
    dtype: Dtype
    op: str

    @property
    def id(self) -> str:
        return f"{self.dtype}-{self.name}"

    def check(self, device: Device, rng: np.random.Generator) -> Check:
        """The case with fresh operands and a fresh state."""
        if self.op == "dropout_states":
            return self._seeded(device)
        states: Tensor = run(DropoutStatesRequest(device, int(rng.integers(1 << 40))))
        x = self._lay(device, normal(rng, self.dtype, self.shape))
        memory = x if self.in_place else self._lay(device, poison(self.dtype, self.shape))
        scale = 1 / (1 - self.p)
        if self.op == "dropout":
            reserve = place(device, poison(U8, (reserve_bytes(x.view.size),)), gap=5, aligned=True)
            request = DropoutRequest(x.view, states, self.p, out=memory.view, reserve=reserve.view)
            scaled = x.view.numpy().astype(np.float64) * scale
            return MaskTrial(
                self.id, request, {"out": scaled}, {"out": self._bound(device, scaled)}, (memory, reserve), p=self.p
            )
        ones = place(device, np.ones(self.shape, self.dtype.numpy), self.order)
        y, mask = run(DropoutRequest(ones.view, states, self.p))
        gradient = DropoutBwdRequest(x.view, mask, self.p, out=memory.view)
        expected = {"out": x.view.numpy().astype(np.float64) * scale * (y.numpy() != 0)}
        return Check(self.id, gradient, expected, {"out": self._bound(device, expected["out"])}, (memory,))

    def _seeded(self, device: Device) -> Check:
        memory = place(device, poison(U8, (states_bytes(device),)), gap=7, aligned=True)
        request = DropoutStatesRequest(device, SEED, out=memory.view)
        same: Tensor = run(DropoutStatesRequest(device, SEED))
        return SeedTrial(self.id, request, {}, {}, (memory,), same=same)

    def _bound(self, device: Device, expected: Array) -> Array:
        """A GPU holds p and so the scale in f32, whatever the dtype."""
        scale = 0.0 if by_numpy(device) else 2.0**-23 / (1 - self.p)
        return rounded((2 * unit(self.dtype) + scale) * np.abs(expected), expected, self.dtype)

    def _lay(self, device: Device, values: Array) -> GuardedBuffer:
        return place(device, values, self.order, self.gap)


def cases(row: Row) -> list[DropoutCase]:
    """Every form; of the state, one."""
    forms = FORMS[:1] if row.op == "dropout_states" else FORMS
    return [DropoutCase(*form, row.dtypes[0], row.op) for form in forms]


# -- wrong results that every case must reject: see `dispatch/testing/mutations.py` --------------------
FEW = 16  # elements, of which by chance all may stay


def named(request: Any, result: Any) -> dict[str, Tensor]:
    """The result alone: a reserve space and a state are the library's own."""
    if isinstance(request, DropoutRequest):
        return {"out": result[0]}
    return {"out": result} if isinstance(request, DropoutBwdRequest) else {}


def nothing_dropped(request: Any) -> Results | None:
    """Everything stays, and is scaled."""
    if not isinstance(request, (DropoutRequest, DropoutBwdRequest)) or not request.p:
        return None
    given = request.x if isinstance(request, DropoutRequest) else request.dy
    return {"out": np.asarray(given).astype(np.float64) / (1 - request.p)} if given.size >= FEW else None


def everything_dropped(request: Any) -> Results | None:
    """Nothing stays."""
    if not isinstance(request, (DropoutRequest, DropoutBwdRequest)):
        return None
    given = request.x if isinstance(request, DropoutRequest) else request.dy
    return {"out": np.zeros(given.shape)} if given.size >= FEW else None


MUTATIONS = {"nothing dropped": nothing_dropped, "everything dropped": everything_dropped}
