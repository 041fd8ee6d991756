"""What tests/differential.py calls: specs of calls, drawn at random or taken from the cases of the table's rows.

A Spec holds the bytes of its operands and how they lie, and no memory of a device: `Spec.at` lays it out in one piece
of memory as often as is wanted, with poison between the operands.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np

import dispatch as dp
from dispatch.core.row import refusals
from dispatch.keys import Dtype
from dispatch.ops import FAMILIES
from dispatch.ops.matmul.scales import NO_SCALES
from dispatch.row_check import cases_of
from dispatch.table.table import LATER

POISON = 0xA5
GUARD = 512  # bytes before, between and behind the operands
LINE = 256  # what layouts count an address's alignment to

# Of these the sizes of states and spaces are the library's, or the bounds of the cases the device's.
OF_THE_DEVICE = ("dropout", "rnn", "pooling_bwd", "ctc")
# What users draw, what reads nothing, and what is of its communicator's device alone.
ELSEWHERE = ("cudnn_graph", "dropout_states", "random_", *FAMILIES["collective"][1])
OPS = list(dict.fromkeys(op for ops in LATER.values() for op in ops if not op.startswith(ELSEWHERE)))


class Slot(NamedTuple):
    """Stands for an operand in the fields of a spec; `other` for another Tensor over the very same elements."""

    number: int
    other: bool = False


@dataclass(frozen=True)
class Operand:
    """How one operand lies: strides in elements, its address modulo LINE, and its bytes from `low` on."""

    dtype: Dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    skew: int
    low: int
    span: bytes
    readonly: bool = False

    @classmethod
    def of(cls, tensor: dp.Tensor) -> Operand:
        layout = tensor.layout
        home, u8 = tensor.device, Dtype.of("u8")
        start, size = tensor.ptr + layout.low, layout.high - layout.low
        window = dp.Tensor(tensor.storage, start, home.layout(u8, (size,), (1,), start))
        span = window.numpy().tobytes()
        return cls(layout.dtype, layout.shape, layout.strides, tensor.ptr % LINE, layout.low, span, layout.readonly)


@dataclass
class Spec:
    """One call: the request's class, its fields with a Slot for each operand, the operands, and what is known of it."""

    kind: type[dp.Request]
    given: dict[str, Any]
    operands: list[Operand]
    name: str = ""
    check: Any = None  # of the row's cases: what says how far off a result may be
    same_bits: bool = True  # promised by the library; otherwise the check is there wherever the operands' values are
    offsets: list[int] = field(default_factory=list)
    image: np.ndarray[Any, np.dtype[np.uint8]] = field(default_factory=lambda: np.empty(0, np.uint8))

    def __post_init__(self) -> None:
        end = GUARD
        for operand in self.operands:
            start = end - operand.low
            start += (operand.skew - start) % LINE
            self.offsets.append(start)
            end = start + operand.low + len(operand.span) + GUARD
        self.image = np.full(-(-end // LINE) * LINE, POISON, np.uint8)
        for start, operand in zip(self.offsets, self.operands, strict=True):
            first = start + operand.low
            self.image[first : first + len(operand.span)] = np.frombuffer(operand.span, np.uint8)

    def changed(self, given: dict[str, Any], operands: list[Operand], name: str, check: Any = None) -> Spec:
        """A spec of other fields or layouts and the same values: what bounds those that vary bounds it, too."""
        check = check if self.same_bits else self.check
        return Spec(self.kind, given, operands, name, check, self.same_bits)

    @property
    def function(self) -> str:
        return self.kind.op

    @property
    def callable_fields(self) -> bool:
        """Whether the request function can say all of it."""
        known = _parameters(self.function)
        return all(name in known for name, value in self.given.items() if value is not None)

    def at(self, arena: dp.Tensor) -> dict[str, Any]:
        """The fields of the request, with operands in a piece of memory of the size of `image`."""
        made: dict[Any, dp.Tensor] = {}
        home = arena.device

        def tensor(slot: Slot) -> dp.Tensor:
            if slot not in made:
                operand, ptr = self.operands[slot.number], arena.ptr + self.offsets[slot.number]
                layout = home.layout(operand.dtype, operand.shape, operand.strides, ptr, operand.readonly)
                made[slot] = dp.Tensor(arena.storage, ptr, layout)
            return made[slot]

        return {name: substituted(value, Slot, tensor) for name, value in self.given.items()}

    def arguments(self, values: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the request function for these fields."""
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        parts = [f"{o.dtype}{list(o.shape)} strides {list(o.strides)} at {o.skew} mod {LINE}" for o in self.operands]
        return f"{self.function} {self.name}: {self.given} of {'; '.join(parts)}"


_KNOWN: dict[str, set[str]] = {}


def _parameters(function: str) -> set[str]:
    if function not in _KNOWN:
        _KNOWN[function] = set(inspect.signature(getattr(dp, function)).parameters)
    return _KNOWN[function]


def substituted(value: Any, kind: type, change: Any) -> Any:
    """A field with each object of a kind changed, also those inside scales, mappings and sequences."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dp.Scales):
        parts = {f.name: substituted(getattr(value, f.name), kind, change) for f in fields(value)}
        return NO_SCALES if value is NO_SCALES else replace(value, **parts)
    if isinstance(value, Mapping):
        return {name: substituted(part, kind, change) for name, part in value.items()}
    if type(value) is tuple and any(isinstance(part, kind) for part in value):
        return tuple(substituted(part, kind, change) for part in value)
    return value


def spec_of(request: dp.Request, name: str = "", check: Any = None) -> Spec:
    """A request that was made somewhere as a spec."""
    operands: list[Operand] = []
    seen: dict[int, Slot] = {}

    def slot(tensor: dp.Tensor) -> Slot:
        if id(tensor) not in seen:
            seen[id(tensor)] = Slot(len(operands))
            operands.append(Operand.of(tensor))
        return seen[id(tensor)]

    given = {f.name: substituted(getattr(request, f.name), dp.Tensor, slot) for f in fields(request)}  # type: ignore[arg-type]
    return Spec(type(request), given, operands, name, check, getattr(request, "same_bits", True))


# -- from the rows' own cases -------------------------------------------------------------------------------------
def row_cases(device: dp.Device, op: str) -> list[tuple[Any, Any]]:
    """Every case of the rows of an op that are for a device."""
    return [(row, case) for row in dp.TABLE.of(op) if row.on(device.arch) for case in cases_of(row)]


def from_cases(device: dp.Device, op: str, rng: np.random.Generator, most: int, nbytes: int) -> Iterator[Spec]:
    """Specs of so many cases of an op, none with more bytes than that, and with outputs left open or in place."""
    found = 0
    everything = row_cases(device, op)
    # Operands are drawn on the host, where that is quicker and nothing depends on the device.
    home = device if op.startswith(OF_THE_DEVICE) else dp.device("host")
    for number in rng.permutation(len(everything)):
        row, case = everything[number]
        try:
            check = case.check(home, rng)
        except dp.errors.DispatchError:
            continue
        request = check.request
        if sum(tensor.layout.high - tensor.layout.low for _, tensor, _ in request.tensors()) > nbytes:
            continue
        if getattr(request, "autotune", False) or (refusals(row, request, request.signature()) and rng.random() < 0.9):
            continue  # what its row refuses is not of much use
        is_bounded = home is device or not getattr(request, "same_bits", True)
        spec = spec_of(request, f"{row.name}, {case.id}", check if is_bounded else None)
        for variant in variants(spec, rng, getattr(request, "in_place", ())):
            yield variant
            found += 1
        if found >= most:
            return


def variants(spec: Spec, rng: np.random.Generator, in_place: Iterable[tuple[str, str]]) -> list[Spec]:
    """A spec, one with its outputs left open (all of them, or one), and one for each pair that may be in place."""
    found = [spec]
    written = [name for name in ("out", *getattr(spec.kind, "writes", ())) if isinstance(spec.given.get(name), Slot)]
    if written:
        some = written if rng.random() < 0.5 else [written[int(rng.integers(len(written)))]]
        given = {**spec.given, **dict.fromkeys(some)}
        if given.get("out_dtype", 0) is None and "out" in some:
            given["out_dtype"] = spec.operands[spec.given["out"].number].dtype
        found.append(spec.changed(given, spec.operands, f"{spec.name}, {' '.join(some)} open", spec.check))
    for out, source in in_place:
        one, other = spec.given.get(out), spec.given.get(source)
        if (
            isinstance(one, Slot)
            and isinstance(other, Slot)
            and alike(spec.operands[one.number], spec.operands[other.number])
        ):
            given = {**spec.given, out: Slot(other.number, bool(rng.integers(2)))}
            found.append(spec.changed(given, spec.operands, f"{spec.name}, {out} is {source}"))
    return found


def alike(one: Operand, other: Operand) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape)
