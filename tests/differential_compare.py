"""What a call left against what a fresh request left: bit by bit, or by a bound where the library varies.

Which ops vary, and why, stands in VARY; so do requests whose `same_bits` says that the library promises none.
Everything else must be equal in every byte, guards and gaps included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import differential_specs as specs
import numpy as np
from differential_specs import GUARD, POISON, Operand, Slot, Spec

import dispatch as dp
from dispatch.ops.conv.cases import bound as conv_bound
from dispatch.ops.conv.reference import reference as conv_reference
from dispatch.ops.reduction import reference as reduction_reference
from dispatch.ops.reduction.cases import bound as reduction_bound
from dispatch.ops.sdpa.cases import bounds_of as sdpa_bounds
from dispatch.ops.sdpa.reference import reference as sdpa_reference
from dispatch.testing.memory import Mismatch

VARY = {
    dp.ReduceRequest: "cuDNN's graphs let each block of threads add its part to the output by an atomic operation",
    dp.PoolingBwdRequest: "for MAX, gradients are added up in dx itself, in any order",
    dp.ConvBwdDataRequest: "unless it is to be deterministic, parts of a sum are added by atomic operations",
    dp.ConvBwdFilterRequest: "likewise",
    dp.SdpaFwdRequest: "one query is attended to by several blocks, whose parts are added as they end",
    dp.SdpaBwdRequest: "unless it is to be deterministic, dq is added up by atomic operations",
    dp.ContractBlockSparseRequest: "unless it is to be reproducible, parts of a sum are added in any order",
}
OF_CASES = (dp.PoolingBwdRequest, dp.ContractBlockSparseRequest)  # of which the cases know the bound
BOUNDED = tuple(kind for kind in VARY if kind not in OF_CASES)


@dataclass
class Outcome:
    """What a run left: the error's type, or the bytes of all operands and of each tensor that was allocated."""

    error: type | None
    arena: bytes
    outputs: list[tuple[Any, ...]]  # in order: given or made, offset or dtype, shape, strides, bytes with guards


@dataclass(eq=False)
class Live:
    """A spec on a device: its bytes there, and what a fresh request gave."""

    spec: Spec
    image: dp.Tensor
    fresh: Outcome
    names: list[str]  # of the outputs, in the order in which they are returned
    given_bounds: tuple[dict[str, Any], dict[str, Any]] | None = None
    loose: str = ""  # what the library gives other bits of each time
    copies: dict[int, list[Any]] = field(default_factory=dict)  # of each thread

    @property
    def varies(self) -> bool:
        """Whether its results may be other bits each time, and are held to a bound then."""
        kind = self.spec.kind
        may_vary = kind in VARY or not self.spec.same_bits
        return may_vary and (self.spec.check is not None or kind in BOUNDED)


def where(live: Live, got: Outcome) -> str:
    """The first byte that differs, in words."""
    fresh, spec = live.fresh, live.spec
    if [part[:4] for part in got.outputs] != [part[:4] for part in fresh.outputs]:
        return f"gave {[part[:4] for part in got.outputs]}, fresh {[part[:4] for part in fresh.outputs]}"
    for number, (one, other) in enumerate(zip(got.outputs, fresh.outputs, strict=True)):
        if one[4] != other[4]:
            places = np.flatnonzero(np.frombuffer(one[4], np.uint8) != np.frombuffer(other[4], np.uint8)) - GUARD
            size = len(one[4]) - 2 * GUARD
            return f"allocated output {number} ({one[:4]}) differs in bytes {places[0]} to {places[-1]} of {size}"
    places = np.flatnonzero(np.frombuffer(got.arena, np.uint8) != np.frombuffer(fresh.arena, np.uint8))
    owner = ["a guard"]
    for name, value in spec.given.items():
        if isinstance(value, Slot):
            start = spec.offsets[value.number] + spec.operands[value.number].low
            if start <= places[0] < start + len(spec.operands[value.number].span):
                owner.append(f"{name} from its byte {start}")
    return f"memory differs in {len(places)} bytes from {places[0]} to {places[-1]}: {' '.join(owner[-2:])}"


def beyond(live: Live, got: Outcome) -> str:
    """Of results that differ from run to run: what is beyond the bound of the row's case, or beside the outputs."""
    fresh, spec = live.fresh, live.spec
    if [part[:4] for part in got.outputs] != [part[:4] for part in fresh.outputs]:
        return where(live, got)
    free = np.zeros(len(got.arena), bool)
    values = {}
    for name, (_, dtype, shape, strides, data) in zip(live.names, got.outputs, strict=True):
        value = spec.given.get(name)
        if isinstance(value, Slot):
            operand, start = spec.operands[value.number], spec.offsets[value.number]
            window(operand, free, start)[...] = True
            values[name] = window(operand, np.frombuffer(got.arena, np.uint8), start)
        else:
            operand = Operand(specs.Dtype.of(dtype), shape, strides, 0, 0, b"")
            values[name] = window(operand, np.frombuffer(data, np.uint8), GUARD)
            if data[:GUARD] + data[-GUARD:] != bytes([POISON]) * 2 * GUARD:
                return f"a guard of the allocated {name} was written"
    changed = np.frombuffer(got.arena, np.uint8) != np.frombuffer(fresh.arena, np.uint8)
    if (changed & ~free).any():
        return where(live, got)
    expected, allowed = bounds(live)
    if not expected.keys() <= allowed.keys():  # a solver's case, which judges residuals
        host = dp.device("host")
        results = [host.array(value.copy().view(_dtype_of(live, name))[..., 0]) for name, value in values.items()]
        try:
            spec.check.verify(tuple(results))
        except Mismatch as wrong:
            return str(wrong)
        return ""
    for name, exact in expected.items():
        got_bytes = values.get(name)
        if got_bytes is None or got_bytes.shape[:-1] != exact.shape:
            continue  # left open, an output may be another, or none
        value = got_bytes.copy().view(_dtype_of(live, name))[..., 0]
        value = value.astype(np.complex128 if value.dtype.kind == "c" else np.float64)
        with np.errstate(invalid="ignore"):
            off = np.abs(value - exact)
            wrong = ~((off <= allowed[name]) | (value == exact) | np.isposinf(allowed[name]))
        if wrong.any():
            return f"{name} is beyond its bound in {wrong.sum()} places, by {np.nanmax(off - allowed[name])}"
    return ""


def bounds(live: Live) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the outputs are in f64, and how far off each may be: by the cases of the op, or by their bounds."""
    spec = live.spec
    if spec.kind not in BOUNDED:  # the row's case knows them
        return spec.check.expected, spec.check.allowed
    if live.given_bounds is None:
        request = spec.kind(**spec.at(live.image))
        if isinstance(request, dp.ReduceRequest):
            expected = reduction_reference(request)
            allowed = {"out": reduction_bound(request, expected), "index": np.zeros(())}
        elif isinstance(request, (dp.SdpaFwdRequest, dp.SdpaBwdRequest)):
            expected = sdpa_reference(request)
            allowed = sdpa_bounds(request, expected)
        else:
            expected = conv_reference(request)
            allowed = {"out": conv_bound(request, expected["out"])}
        live.given_bounds = expected, allowed
    return live.given_bounds


def _dtype_of(live: Live, name: str) -> np.dtype[Any]:
    value = live.spec.given.get(name)
    if isinstance(value, Slot):
        return live.spec.operands[value.number].dtype.numpy
    return specs.Dtype.of(live.fresh.outputs[live.names.index(name)][1]).numpy


def window(operand: Operand, data: np.ndarray[Any, Any], start: int) -> np.ndarray[Any, Any]:
    """The bytes of an operand's elements in a piece of memory, along one more axis."""
    item = operand.dtype.itemsize
    strides = (*(s * item for s in operand.strides), 1)
    return np.ndarray((*operand.shape, item), data.dtype, data.data, start, strides)
