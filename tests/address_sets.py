"""Plans at many addresses: a few kinds of them, their operands in many places, and what the library's own call gives.

tests/gpu/test_relocation.py and test_relocation_many.py take them. operand_sets.py lays out the cases of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

import dispatch as dp
from dispatch.testing.memory import POISON_BYTE

if TYPE_CHECKING:
    from collections.abc import Mapping

N = 64
COPIES = 24  # of each operand, every other one of other numbers
SKEW = 16  # bytes: operands lie at odd multiples of it, which is all that their layouts promise
GUARD = 64


def at(memory: dp.Tensor, offset: int, dtype: str, shape: tuple[int, ...], order: tuple[int, ...] = ()) -> dp.Tensor:
    """A tensor in a piece of memory, from a byte on: dense, with its axes in memory in an order if that is given."""
    kind, home = dp.Dtype.of(dtype), memory.device
    strides, step = [0] * len(shape), 1
    for axis in reversed(order or range(len(shape))):
        strides[axis], step = step, step * shape[axis]
    ptr = memory.ptr + offset
    return dp.Tensor(memory.storage, ptr, home.layout(kind, shape, tuple(strides), ptr))


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) * dp.Dtype.of(dtype).itemsize


def pitch_of(nbytes: int) -> int:
    """Bytes from one operand to the next, so that all lie at odd multiples of SKEW, with guards between them."""
    return -(-nbytes // (2 * SKEW)) * 2 * SKEW + GUARD


def bits(tensor: dp.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def relocated(request: dp.Request) -> Any:
    """What is known of the plan of a request on the current stream, once all is learnt of its form of arguments."""
    executor = request.device.executor()
    plan = executor.plan(request)
    assert executor.relocate(plan, request.arguments({})) == ""
    return plan.relocation


def own_bits(request: dp.Request, out: dp.Tensor) -> bytes:
    """What the library's own call leaves in an output; what lay there before lies there again."""
    executor = request.device.executor()
    before = out.numpy()
    executor.call(executor.plan(request), request.arguments({}))
    executor.stream.synchronize()
    result = bits(out)
    out.copy_from(before)
    return result


@dataclass(frozen=True)
class Kind:
    """A plan: dtype and shapes of the operands and of the output, and the request of them."""

    dtype: str
    out: tuple[int, ...]
    request: type[dp.Request]
    shapes: Mapping[str, tuple[int, ...]]
    choices: dict[str, Any] = field(default_factory=dict)
    order: tuple[int, ...] = ()  # of the axes in memory, where there are four


LAST = (0, 2, 3, 1)
SQUARES = {"a": (N, N), "b": (N, N)}
GELU = {"epilogue": dp.Epilogue.GELU_BIAS}
IMAGE = (1, 16, 8, 8)
HEADS = (1, 2, 64, 64)
KINDS = {
    "matmul": Kind("bf16", (N, N), dp.MatmulRequest, SQUARES),
    "bias and GELU": Kind("bf16", (N, N), dp.MatmulRequest, SQUARES | {"bias": (N,)}, GELU),
    "softmax": Kind("f32", (16, 96), dp.SoftmaxRequest, {"x": (16, 96)}),
    "convolution": Kind("bf16", IMAGE, dp.ConvFwdRequest, {"x": IMAGE, "w": (16, 16, 3, 3)}, {"pad": 1}, LAST),
    "attention": Kind("bf16", HEADS, dp.SdpaFwdRequest, dict.fromkeys("qkv", HEADS)),
}


class Many:
    """COPIES of each operand and many outputs of a plan, in one piece of memory each."""

    def __init__(self, dev: dp.Device, rng: np.random.Generator, kind: Kind, outs: int) -> None:
        self.kind, self.outs = kind, outs
        self.operands = [self._copies(dev, rng, shape) for shape in kind.shapes.values()]
        self.nbytes = size_of(kind.dtype, kind.out)
        self.pitch = pitch_of(self.nbytes)
        self.memory = dev.empty((outs * self.pitch + 2 * SKEW,), "u8")
        self.places = [at(self.memory, SKEW + n * self.pitch, kind.dtype, kind.out, kind.order) for n in range(outs)]
        self.poison()

    def _copies(self, dev: dp.Device, rng: np.random.Generator, shape: tuple[int, ...]) -> list[dp.Tensor]:
        kind, order = self.kind, self.kind.order if len(shape) == 4 else ()
        pitch = pitch_of(size_of(kind.dtype, shape))
        memory = dev.array(np.full(COPIES * pitch + 2 * SKEW, POISON_BYTE, np.uint8))
        made = [at(memory, SKEW + n * pitch, kind.dtype, shape, order) for n in range(COPIES)]
        data = [rng.standard_normal(shape) / 2 for _ in range(2)]
        for number, tensor in enumerate(made):
            tensor.copy_from(data[number % 2])
        return made

    def poison(self) -> None:
        self.memory.copy_from(np.full(self.memory.shape, POISON_BYTE, np.uint8))

    def request(self, picked: Any, out: int) -> dp.Request:
        """The request of some copies of the operands and of an output, by their numbers."""
        made: dp.Request = self.kind.request(**self._fields(picked, out))
        return made

    def call(self, picked: Any, out: int) -> None:
        """The same by the request function."""
        getattr(dp, self.kind.request.op)(**self._fields(picked, out))

    def _fields(self, picked: Any, out: int) -> dict[str, Any]:
        tensors = [copies[number] for copies, number in zip(self.operands, picked, strict=True)]
        named = dict(zip(self.kind.shapes, tensors, strict=True))
        return {**named, **self.kind.choices, "out": self.places[out]}

    def left(self, count: int) -> Any:
        """The bytes of so many outputs; raises where something was written between them."""
        whole = self.memory.numpy()
        lines = whole[SKEW : SKEW + count * self.pitch].reshape(count, self.pitch)
        assert (whole[:SKEW] == POISON_BYTE).all()
        assert (lines[:, self.nbytes :] == POISON_BYTE).all(), "a guard was written"
        return lines[:, : self.nbytes]

    def expected(self) -> tuple[Any, bool]:
        """What the library's own call gives for each choice of numbers, and whether it does so twice."""
        executor = self.memory.device.executor()
        choices = list(np.ndindex(*(2,) * len(self.operands)))
        found = []
        for _ in range(2):
            self.poison()
            for number, chosen in enumerate(choices):
                request = self.request(chosen, number)
                executor.call(executor.plan(request), request.arguments({}))
            executor.stream.synchronize()
            found.append(self.left(len(choices)).copy())
        return found[0], bool((found[0] == found[1]).all())
