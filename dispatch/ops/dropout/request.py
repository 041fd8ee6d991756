"""The requests of dropout: the state of its random numbers, the forward pass and the backward pass.

The state is a tensor that every forward pass moves on, so that a program that starts from the same seed draws the same
masks in the same order. This file calls nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cudabind._cached import cached_property
from dispatch.core.operand_checks import check_opaque, check_probability
from dispatch.core.operands import Made, OperandRequest, dense, like, whole
from dispatch.device.device import Device
from dispatch.errors import BadRequest
from dispatch.keys import U8, Dtype
from dispatch.libraries.cudnn.dropout_states import STATES_ALIGNMENT, states_bytes

if TYPE_CHECKING:
    from dispatch.core.request import Argument, Operands
    from dispatch.device.tensor import Tensor

__all__ = [
    "DropoutBwdRequest",
    "DropoutRequest",
    "DropoutStatesRequest",
    "reserve_bytes",
]

MAX_SEED = 2**63 - 1
RESERVE_ALIGNMENT = 4  # bytes: it holds words of bits


def reserve_bytes(size: int) -> int:
    """The size of the reserve space of so many elements: a bit each, in words of four bytes."""
    return -(-size // 32) * 4


@dataclass(frozen=True, eq=False)
class DropoutStatesRequest(OperandRequest):
    """A fresh state of dropout's random numbers.

    Attributes:
        on: the device.
        seed: a whole number; equal seeds give equal states.
        out: u8, of the size that the device's library asks for.
    """

    op: ClassVar[str] = "dropout_states"
    reads: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = ("out",)

    on: Device
    seed: int
    out: Tensor | None = None

    def __post_init__(self) -> None:
        given: object = self.on
        if not isinstance(given, Device):
            raise BadRequest("on", repr(given), "a Device", "dispatch.device() gives one")
        super().__post_init__()

    @property
    def device(self) -> Device:
        return self.on

    @property
    def dtypes(self) -> tuple[Dtype, ...]:
        return U8, U8

    def check_fields(self) -> None:
        whole("seed", self.seed, 0, MAX_SEED)
        if self.out is not None:
            check_opaque("out", self.out, states_bytes(self.on), STATES_ALIGNMENT, "leave out=None")

    def made(self) -> dict[str, Made]:
        return {"out": self._out}

    @cached_property
    def _out(self) -> Made:
        return dense((states_bytes(self.on),), U8)

    def choices(self) -> tuple[Any, ...]:
        return ()

    def arguments(self, outputs: Operands) -> tuple[Argument, ...]:
        return (*super().arguments(outputs), self.seed)


@dataclass(frozen=True, eq=False)
class DropoutRequest(OperandRequest):
    """y = x / (1 - p) for elements that stay and 0 for those that are dropped, each with probability p.

    Attributes:
        x: any dense tensor, in any order of its axes.
        states: from `DropoutStatesRequest`; the pass moves it on.
        p: the probability that an element is dropped, below 1. cuDNN holds it in f32, so that its scale is off by up to
            2^-24 / (1 - p) of itself, for f64 as well.
        out: y, of x's shape and dtype, laid out like x; it may be x itself.
        reserve: u8, a bit for each element, for the backward pass; what it holds is the library's affair.
    """

    op: ClassVar[str] = "dropout_fwd"
    reads: ClassVar[tuple[str, ...]] = ("x", "states")
    writes: ClassVar[tuple[str, ...]] = ("out", "reserve")
    updates: ClassVar[tuple[str, ...]] = ("states",)
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "x")})

    x: Tensor
    states: Tensor
    p: float = 0.5
    out: Tensor | None = None
    reserve: Tensor | None = None

    def check_fields(self) -> None:
        check_probability("p", self.p)
        wanted = states_bytes(self.device)
        check_opaque("states", self.states, wanted, STATES_ALIGNMENT, "take what dropout_states(device, seed) gives")
        if self.reserve is not None:
            check_opaque("reserve", self.reserve, reserve_bytes(self.x.size), RESERVE_ALIGNMENT, "leave reserve=None")

    def made(self) -> dict[str, Made]:
        return {"out": like(self.x.layout), "reserve": dense((reserve_bytes(self.x.size),), U8)}

    def choices(self) -> tuple[Any, ...]:
        return (float(self.p),)


@dataclass(frozen=True, eq=False)
class DropoutBwdRequest(OperandRequest):
    """dx = dy / (1 - p) where the forward pass kept x, else 0: the gradient of `DropoutRequest`.

    Attributes:
        dy: the gradient of y, laid out as x was.
        reserve: what the forward pass left.
        p: that of the forward pass.
        out: dx, of dy's shape and dtype, laid out like dy; it may be dy itself.
    """

    op: ClassVar[str] = "dropout_bwd"
    reads: ClassVar[tuple[str, ...]] = ("dy", "reserve")
    writes: ClassVar[tuple[str, ...]] = ("out",)
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "dy")})

    dy: Tensor
    reserve: Tensor
    p: float = 0.5
    out: Tensor | None = None

    def check_fields(self) -> None:
        check_probability("p", self.p)
        hint = "pass on the one that the forward pass gave"
        check_opaque("reserve", self.reserve, reserve_bytes(self.dy.size), RESERVE_ALIGNMENT, hint)

    def made(self) -> dict[str, Made]:
        return {"out": like(self.dy.layout)}

    def choices(self) -> tuple[Any, ...]:
        return (float(self.p),)
