"""Dropout with a seed: `dropout_states` makes the random state, `dropout` draws a mask, `dropout_bwd` uses it again.

The state is a tensor that every forward pass advances, so a program that starts with the same seed draws the same masks
in the same order. On a GPU it is cuDNN's state (`cudnnSetDropoutDescriptor`, `cudnnDropoutForward`,
`cudnnDropoutBackward`). On the host it is Philox's: the key is the seed, and the counter is the number of the pass. A
cuDNN descriptor is bound to the memory of a state, so it is bound again for another state. Follows
https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-ops-library.html#cudnndropoutforward.
"""

from __future__ import annotations

import ctypes
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from cudabind.sys import cudnn
from dispatch.checks import check_int
from dispatch.core.axes import describable, merge
from dispatch.core.host_plan import Results, draw, exactly, numpy_call, values
from dispatch.core.operand_checks import check_opaque, check_probability
from dispatch.core.operands import OperandRequest, Output, dense, like, unsized
from dispatch.core.request import IdlePlan, NamedArguments, Number, Unpacked
from dispatch.core.request_function import request_function
from dispatch.device.device import Device
from dispatch.errors import BadRequest, Refused
from dispatch.keys import U8, Dtype
from dispatch.libraries.cudnn.calls import CallPlan, Operand
from dispatch.libraries.cudnn.dropout_states import check_states, known_states_bytes, states_bytes
from dispatch.libraries.cudnn.tensors import Descriptor, tensor

if TYPE_CHECKING:
    from dispatch.core.request import Argument, Operands, Plan
    from dispatch.core.row import Row
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = [
    "DropoutBwdRequest",
    "DropoutRequest",
    "DropoutStatesRequest",
    "dropout",
    "dropout_bwd",
    "dropout_states",
]


MAX_SEED = 2**63 - 1

RESERVE_ALIGNMENT = 4  # bytes: the reserve space contains words of bits


def reserve_bytes(size: int) -> int:
    """The bytes of the reserve space for `size` elements: a bit each, in words of four bytes."""
    return -(-size // 32) * 4


@dataclass(frozen=True, eq=False)
class DropoutStatesRequest(OperandRequest["Tensor"]):
    """A new random state for dropout.

    Attributes:
        on: the device.
        seed: a whole number; equal seeds give equal states.
        out: u8, of the size that the device's library requires.
    """

    op: ClassVar[str] = "dropout_states"
    reads: ClassVar[tuple[str, ...]] = ()
    unpacked: ClassVar[Unpacked | None] = Unpacked(numbers=("seed",), device="on")

    on: Device
    seed: int
    _: KW_ONLY
    out: Tensor | None = None

    def __post_init__(self) -> None:
        on: object = self.on
        if not isinstance(on, Device):
            raise BadRequest("on", repr(on), "a Device", "dispatch.device() returns one")
        super().__post_init__()

    @property
    def device(self) -> Device:
        return self.on

    @property
    def dtypes(self) -> tuple[Dtype, ...]:
        return U8, U8

    def check_fields(self) -> None:
        check_int("seed", self.seed, 0, MAX_SEED)
        if self.out is not None:
            check_states("out", self.out)

    def outputs(self) -> dict[str, Output]:
        size = known_states_bytes(self.on)
        return {"out": unsized() if size is None else dense((size,), U8)}

    def bytes_of(self, _: str) -> int:
        return states_bytes(self.on)

    def attributes(self) -> tuple[Any, ...]:
        return ()

    def arguments(self, outputs: Operands) -> tuple[Argument, ...]:
        return (*super().arguments(outputs), self.seed)

    def named_arguments(self) -> NamedArguments:
        return NamedArguments(("out", "seed"), {"seed": Number(0, MAX_SEED, is_whole=True)})


@dataclass(frozen=True, eq=False)
class DropoutRequest(OperandRequest["tuple[Tensor, Tensor]"]):
    """y = x / (1 - p) for elements that are kept and 0 for dropped ones; each is dropped with probability p.

    Attributes:
        x: any dense tensor, in any order of its axes.
        states: from `DropoutStatesRequest`; the pass advances it.
        p: the probability that an element is dropped, below 1. cuDNN stores it in f32, so the relative error of its
            scale is up to 2^-24 / (1 - p), for f64 as well.
        out: y, of x's shape and dtype, with the layout of x; it may be x itself.
        reserve: u8, a bit for each element, for the backward pass; its content depends on the library.

    Returns (y, reserve), and advances `states`: the same seed gives the same masks in the same order, on one kind of
    device (cuDNN's and NumPy's masks differ).
    """

    op: ClassVar[str] = "dropout"
    reads: ClassVar[tuple[str, ...]] = ("x", "states")
    mixed: ClassVar[tuple[str, ...]] = ("states",)
    writes: ClassVar[tuple[str, ...]] = ("out", "reserve")
    updates: ClassVar[tuple[str, ...]] = ("states",)
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "x")})

    x: Tensor
    states: Tensor
    p: float = 0.5
    _: KW_ONLY
    out: Tensor | None = None
    reserve: Tensor | None = None

    def check_fields(self) -> None:
        check_probability("p", self.p)
        check_states("states", self.states)
        if self.reserve is not None:
            check_opaque("reserve", self.reserve, reserve_bytes(self.x.size), RESERVE_ALIGNMENT, "leave reserve=None")

    def outputs(self) -> dict[str, Output]:
        return {"out": like(self.x.layout), "reserve": dense((reserve_bytes(self.x.size),), U8)}


@dataclass(frozen=True, eq=False)
class DropoutBwdRequest(OperandRequest["Tensor"]):
    """dx = dy / (1 - p) where the forward pass kept x, else 0: the gradient of `DropoutRequest`.

    Attributes:
        dy: the gradient of y, with the layout of x.
        reserve: the reserve space of the forward pass.
        p: that of the forward pass.
        out: dx, of dy's shape and dtype, with the layout of dy; it may be dy itself.
    """

    op: ClassVar[str] = "dropout_bwd"
    reads: ClassVar[tuple[str, ...]] = ("dy", "reserve")
    mixed: ClassVar[tuple[str, ...]] = ("reserve",)
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "dy")})

    dy: Tensor
    reserve: Tensor
    p: float = 0.5
    _: KW_ONLY
    out: Tensor | None = None

    def check_fields(self) -> None:
        check_probability("p", self.p)
        hint = "pass the mask that the forward pass returned"
        check_opaque("reserve", self.reserve, reserve_bytes(self.dy.size), RESERVE_ALIGNMENT, hint)


# -- rules of the rows: "needs …, has …", or "" if a rule is met ------------------------------------------------------
def one_axis(request: DropoutRequest | DropoutBwdRequest) -> str:
    """The mask numbers elements by their order in memory, so input and output are dense and have one layout."""
    layouts = [request.layout_of(request.reads[0]), request.layout_of("out")]
    if reason := describable(*layouts):
        return reason
    axes = merge(layouts, [0] * len(layouts[0].shape)) if layouts[0].size else []
    if len(axes) > 1 or any(step != 1 for axis in axes for step in axis.strides):
        return f"needs {request.reads[0]} and out dense and with the same layout, has {layouts[0]} and {layouts[1]}"
    return ""


# -- in NumPy: for the host's rows in their own precision, and as the reference in f64 --------------------------------
def evaluate(request: DropoutStatesRequest | DropoutRequest | DropoutBwdRequest, work: np.dtype[Any]) -> Results:
    """The outputs of a request by name, computed in a working dtype; for the forward pass with the new state."""
    if isinstance(request, DropoutStatesRequest):
        return {"out": np.array([request.seed, 0], np.uint64).view(np.uint8)}
    if isinstance(request, DropoutBwdRequest):
        mask = mask_of(np.asarray(request.reserve), request.dy.size).reshape(request.dy.shape)
        return {"out": np.where(mask, values(request.dy, work) * _scale(request.p, work), work.type(0))}
    return _forward(request, work)


def _forward(request: DropoutRequest, work: np.dtype[Any]) -> Results:
    mask, states = draw(np.asarray(request.states), request.x.size, request.p)
    reserve = np.zeros(reserve_bytes(request.x.size), np.uint8)
    bits = np.packbits(mask, bitorder="little")
    reserve[: len(bits)] = bits
    x = values(request.x, work)
    y = np.where(mask.reshape(x.shape), x * _scale(request.p, work), work.type(0))
    return {"out": y, "reserve": reserve, "states": states}


def mask_of(reserve: Array, size: int) -> Array:
    """The mask of the elements that a forward pass on the host kept."""
    return np.unpackbits(reserve, count=size, bitorder="little").astype(np.bool_)


def _scale(p: float, work: np.dtype[Any]) -> Any:
    return work.type(1 / (1 - p))


# -- with cuDNN -------------------------------------------------------------------------------------------------------
def cudnn_dropout(
    request: DropoutStatesRequest | DropoutRequest | DropoutBwdRequest, executor: CudaExecutor, row: Row
) -> Plan:
    """The plan of any of the requests; without elements it launches nothing."""
    if isinstance(request, DropoutStatesRequest):
        if request.out is not None:
            check_states("out", request.out, binding=True)
        return StatesPlan(executor, row)
    if isinstance(request, DropoutRequest):
        check_states("states", request.states, binding=True)
    source = request.dy if isinstance(request, DropoutBwdRequest) else request.x
    if source.size == 0:
        return IdlePlan(row)
    flat = tensor(source.dtype, (source.size,), (1,))
    size = ctypes.c_size_t()
    cudnn.cudnnDropoutGetReserveSpaceSize(flat.handle, ctypes.byref(size))
    reserve = request.layout_of("reserve").size
    if size.value != reserve:
        raise Refused(f"cudnnDropoutGetReserveSpaceSize asks for {size.value} bytes, the request has {reserve}")
    if isinstance(request, DropoutBwdRequest):
        operands = (flat, Operand(0), flat, Operand(2), Operand(1), size)
        return DropoutPlan(executor, row, cudnn.cudnnDropoutBackward, operands, float(request.p), None)
    operands = (flat, Operand(0), flat, Operand(2), Operand(3), size)
    return DropoutPlan(executor, row, cudnn.cudnnDropoutForward, operands, float(request.p), 1)


class DropoutPlan(CallPlan):
    """A pass; `states` is the index of the state among the arguments, None for the backward pass, which needs none."""

    __slots__ = ("_bound", "_dropout", "_p", "_states")

    def __init__(
        self, executor: CudaExecutor, row: Row, function: Any, arguments: tuple[Any, ...], p: float, states: int | None
    ) -> None:
        dropout = Descriptor("Dropout")
        super().__init__(executor, row, function, (dropout, *arguments))
        self._dropout, self._p, self._states = dropout, p, states
        self._bound: Argument = -1
        if states is None:  # it draws nothing, but cuDNN 9.19 refuses a descriptor without memory for a state
            self._bind(executor.workspace.c_ptr.value or 0)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        if self._states is not None and arguments[self._states] != self._bound:
            self._bind(arguments[self._states])
        super().enqueue(arguments)

    def _bind(self, address: Argument) -> None:
        """Bind the descriptor to the state at an address; this launches nothing."""
        states: Any = address
        size = states_bytes(self._executor.device)
        cudnn.cudnnRestoreDropoutDescriptor(
            self._dropout.handle, self._handle.follow(), self._p, ctypes.c_void_p(states), size, 0
        )
        self._bound = address


class StatesPlan(CallPlan):
    """Initializes a state from a seed; its descriptor is not used for anything else."""

    __slots__ = ("_dropout",)

    def __init__(self, executor: CudaExecutor, row: Row) -> None:
        super().__init__(executor, row, cudnn.cudnnSetDropoutDescriptor, (), capture_safe=False)
        self._dropout = Descriptor("Dropout")

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        address, seed = arguments
        states: Any = address
        cudnn.cudnnSetDropoutDescriptor(
            *(self._dropout.handle, self._handle.follow(), 0.5, ctypes.c_void_p(states)),
            *(states_bytes(self._executor.device), int(seed.real)),
        )


# -- the public functions, and the calls of the rows ------------------------------------------------------------------
reference = exactly(evaluate)
numpy_dropout = numpy_call(evaluate)
dropout_states = request_function(DropoutStatesRequest, "dropout_states")
dropout = request_function(DropoutRequest, "dropout")
dropout_bwd = request_function(DropoutBwdRequest, "dropout_bwd")
