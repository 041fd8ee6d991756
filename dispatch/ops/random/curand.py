"""Random numbers by cuRAND's host API, which generates on a GPU or, with the same functions, in host memory.

https://docs.nvidia.com/cuda/curand/host-api-overview.html. cuRAND has no uniform numbers with other bounds than 0 and 1
or in [0, 1): a kernel with one multiplication, or NumPy, computes them from cuRAND's numbers.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from cudabind import driver
from cudabind.sys import curand
from dispatch.core.request import IdlePlan, Plan
from dispatch.errors import Refused
from dispatch.keys import F32, F64, U32, U64
from dispatch.libraries.curand.generators import (
    IN_PAIRS,
    Kind,
    SequencePosition,
    device_generator,
    host_generator,
    seek,
)
from dispatch.libraries.nvrtc.kernel import loaded
from dispatch.libraries.nvrtc.philox import QUAD, SUBSEQUENCES
from dispatch.ops.random.groups import MAX_BLOCKS, THREADS
from dispatch.ops.random.reference import numpy_random, units

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Argument, Operands
    from dispatch.core.row import Row
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["curand_on_host", "curand_random", "philox_on_host"]

SAME_IN_CURAND = {("random_bits", U32)} | {
    (f"random_{name}", dtype) for name in ("uniform", "normal", "lognormal") for dtype in (F32, F64)
}
NORMAL = ("random_normal", "random_lognormal")
PHILOX = 161  # CURAND_RNG_PSEUDO_PHILOX4_32_10
ROW = QUAD * SUBSEQUENCES  # numbers in one block of every subsequence of Philox
QUASI_DEFAULT = 201  # CURAND_ORDERING_QUASI_DEFAULT

FINISH = r"""
// In place: numbers in (0, 1], or words where HALF_OPEN, become low + (high - low) * u.
extern "C" __global__ void finish(NUMBER* out, unsigned long long count, double low, double high)
{
    const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        NUMBER u = out[i];
#if HALF_OPEN == 4
        u = (((const unsigned*)out)[i] >> 8) * (1.0f / (1 << 24));
#elif HALF_OPEN == 8
        const unsigned* w = (const unsigned*)(out + i);
        u = (w[0] ^ (unsigned long long)w[1] << 21) * 1.1102230246251565e-16;
#endif
        out[i] = (NUMBER)low + ((NUMBER)high - (NUMBER)low) * u;
    }
}
"""


def kind_of(request: Any) -> Kind:
    """The kind of generator of a request."""
    generator = request.generator
    ordering = QUASI_DEFAULT if generator.is_quasi else int(request.order)
    return Kind(int(generator), ordering, request.dimensions)


class Generation:
    """A request in cuRAND's terms, on a GPU or the host: the function, the number of elements, and the positions."""

    def __init__(self, request: Any) -> None:
        double = request.kind is F64
        self.kind: Kind = kind_of(request)
        self.count: int = request.count
        self.dtype, self.op = request.kind, request.op
        self.is_words = request.op == "random_uniform" and request.interval == "[0,1)"
        self.low, self.high = getattr(request, "low", 0.0), getattr(request, "high", 1.0)
        self.needs_finish = self.is_words or (request.op == "random_uniform" and (self.low, self.high) != (0, 1))
        self.words = 2 if self.is_words and double else 1  # words that are generated for each number
        self.element = np.dtype(np.uint32) if self.is_words else request.kind.numpy
        self.is_wide = self.kind.number == PHILOX and double and not self.is_words
        self.is_even = request.op in NORMAL and not request.generator.is_quasi
        in_pairs = self.is_even and self.kind.number in IN_PAIRS
        self._per_step = 2 if in_pairs else self.kind.dimensions  # numbers for each step of the offset
        ends = ("low", "high", "interval")
        self._numbers = tuple(float(getattr(request, name)) for name in request.parameters if name not in ends)
        self._function = self._curand_function(request, double)

    def _curand_function(self, request: Any, double: bool) -> Any:
        if self.is_words or (request.op == "random_bits" and request.kind is U32):
            return curand.curandGenerate
        return {
            "random_bits": curand.curandGenerateLongLong,
            "random_uniform": curand.curandGenerateUniformDouble if double else curand.curandGenerateUniform,
            "random_normal": curand.curandGenerateNormalDouble if double else curand.curandGenerateNormal,
            "random_lognormal": curand.curandGenerateLogNormalDouble if double else curand.curandGenerateLogNormal,
            "random_poisson": curand.curandGeneratePoisson,
        }[request.op]

    def pieces(self, seed: int, offset: int) -> list[tuple[SequencePosition, int]]:
        """The consecutive pieces that are generated: position and count of each.

        64-bit numbers of Philox take two blocks of a subsequence, but cuRAND's offset skips only one. So the rest of a
        row of subsequences is a separate piece. This way the numbers at an offset are always the same that one call
        from the beginning would generate there.
        """
        total = self.count * self.words
        if not self.is_wide:
            return [(SequencePosition(seed, offset * self.words), total)]
        row, before = divmod(offset, ROW)
        first = min(total, ROW - before) if before else 0
        pieces = [
            (SequencePosition(seed, 2 * row * ROW + before), first),
            (SequencePosition(seed, 2 * (row + bool(before)) * ROW), total - first),
        ]
        return [piece for piece in pieces if piece[1]]

    def padded_count(self, count: int) -> int:
        """The count rounded up to what cuRAND generates: pseudo-random normal numbers come in pairs."""
        return count + count % 2 if self.is_even else count

    def end(self, position: SequencePosition, count: int) -> SequencePosition:
        """The position of cuRAND's generator after it has generated `count` numbers."""
        return SequencePosition(position.seed, position.offset + count // self._per_step)

    def call(self, c_handle: Any, address: int, count: int) -> None:
        """Generate `count` numbers at an address."""
        self._function(c_handle, ctypes.c_void_p(address), count, *self._numbers)


# -- on a GPU ---------------------------------------------------------------------------------------------------------
def curand_random(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request on a GPU."""
    if not request.count:
        return IdlePlan(row)
    return DevicePlan(executor, row, Generation(request))


class DevicePlan(Plan):
    """A call of cuRAND. It is not captured: a replay would repeat its numbers, or continue at another position."""

    __slots__ = ("_executor", "_finish", "_generation", "_generator", "_itemsize")

    def __init__(self, executor: CudaExecutor, row: Row, generation: Generation) -> None:
        super().__init__(row, capture_safe=False)
        self._executor, self._generation = executor, generation
        self._generator = device_generator(generation.kind, executor)
        self._itemsize = generation.element.itemsize
        self._finish: Callable[[int], None] | None = None
        if generation.needs_finish:
            wide = generation.dtype is F64
            options = (
                f"-DNUMBER={'double' if wide else 'float'}",
                f"-DHALF_OPEN={(8 if wide else 4) * generation.is_words}",
            )
            function = loaded(FINISH, "finish", ("-std=c++17", *options), executor.device)
            self._finish = partial(self._launch, ctypes.c_void_p(function))

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        out, seed, offset = (int(argument.real) for argument in arguments)
        generation, generator, at = self._generation, self._generator, out
        handle = generator.follow()
        for position, needed in generation.pieces(seed, offset):
            count = generation.padded_count(needed)
            last, generator.position = generator.position, None  # if a call raises, the position is unknown
            seek(handle, generation.kind, last, position, self._skip)
            size = needed * self._itemsize
            if count == needed:
                generation.call(handle, at, count)
            else:
                padded: Tensor = self._executor.empty((count,), (1,), generation.dtype)
                generation.call(handle, padded.ptr, count)
                driver.cuMemcpyDtoDAsync(at, padded.ptr, size, self._executor.target.value)
            generator.position = generation.end(position, count)
            at += size
        if self._finish is not None:
            self._finish(out)

    def _skip(self, count: int) -> None:
        padded: Tensor = self._executor.empty((count,), (1,), U32)
        curand.curandGenerate(self._generator.follow(), ctypes.c_void_p(padded.ptr), count)

    def _launch(self, function: ctypes.c_void_p, out: int) -> None:
        generation = self._generation
        values = (
            *(ctypes.c_void_p(out), ctypes.c_uint64(generation.count)),
            *(ctypes.c_double(generation.low), ctypes.c_double(generation.high)),
        )
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        blocks = min(-(-generation.count // THREADS), MAX_BLOCKS)
        driver.cuLaunchKernel(function, blocks, 1, 1, THREADS, 1, 1, 0, self._executor.target, pointers, None)


# -- on the host ------------------------------------------------------------------------------------------------------
def curand_on_host(request: Any, _: Any, row: Row) -> Plan:
    """The plan of a request on the host; Refused if cuRAND is not installed."""
    host_generator(kind_of(request))
    return HostPlan(row, capture_safe=False)


def philox_on_host(request: Any, executor: Any, row: Row) -> Plan:
    """The host plan for ops with kernels of this library: cuRAND if it generates the same numbers, else NumPy."""
    is_same = (request.op, request.kind) in SAME_IN_CURAND and not curand_has_word_size(request)
    if is_same and request.library is None:
        with suppress(Refused):
            return curand_on_host(request, executor, row)
    return numpy_random(request, executor, row)


class HostPlan(Plan):
    """A call of cuRAND's host generator."""

    __slots__ = ()
    library: ClassVar[str] = "curand"

    def run(self, request: Any, outputs: Operands) -> None:
        """Generate into a request's output."""
        if not request.count:
            return
        target: Tensor = outputs.get("out", request.out)
        generation = Generation(request)
        numbers, at = np.empty(request.count * generation.words, generation.element), 0
        generator = host_generator(generation.kind)
        for position, needed in generation.pieces(request.seed, request.offset):
            count = generation.padded_count(needed)
            part = numbers[at : at + needed] if count == needed else np.empty(count, numbers.dtype)
            call = partial(generation.call, address=part.ctypes.data, count=count)
            generator.generate(position, generation.end(position, count), call)
            numbers[at : at + needed] = part[:needed]
            at += needed
        target.device.view(target)[...] = finished(generation, numbers).reshape(request.shape)


def finished(generation: Generation, numbers: Array) -> Array:
    """The results computed from cuRAND's numbers."""
    if not generation.needs_finish:
        return numbers
    if generation.is_words:
        numbers = units(numbers.reshape(-1, generation.words), generation.dtype, "[0,1)")
    low, high = (numbers.dtype.type(end) for end in (generation.low, generation.high))
    return np.asarray(low + (high - low) * numbers)


# -- rules of the rows ------------------------------------------------------------------------------------------------
def uses_philox(request: Any) -> str:
    """Kernels of this library use Philox in the order that cuRAND has by default, which equals its legacy order."""
    name, order = request.generator.name, request.order.name
    if name != "PHILOX4_32_10":
        return f"needs bit_generator PHILOX4_32_10, has {name}"
    return "" if order in ("DEFAULT", "LEGACY") else f"needs ordering DEFAULT or LEGACY, has {order}"


def curand_has_word_size(request: Any) -> str:
    """cuRAND generates words of 64 bits for 64-bit generators, else words of 32 bits."""
    is_64 = request.generator.is_64_bit
    if request.op == "random_uniform" and request.interval == "[0,1)":
        pairs = (
            request.kind is F64 and request.generator.name == "PHILOX4_32_10"
        )  # cuRAND generates them in another order
        return (
            f"needs interval (0,1] for {request.kind} of {request.generator.name}, has [0,1)" if is_64 or pairs else ""
        )
    if request.op != "random_bits" or (request.kind is U64) == is_64:
        return ""
    return f"needs {'u64' if is_64 else 'u32'} of {request.generator.name}, has {request.kind}"


def curand_has_mean(request: Any) -> str:
    """cuRAND's range of means."""
    return "" if 0 < request.lam <= 400_000 else f"needs lam above 0 and 400000 at most, has {request.lam:g}"


def restarts_sequence(request: Any) -> str:
    """Once used, cuRAND's MTGP32 on a GPU gives other numbers for a seed, even with new states (10.4, H100)."""
    if request.device.is_host or request.generator.name != "MTGP32":
        return ""
    return "needs a generator that can restart its sequence: cuRAND's MTGP32 can do so only on the host"


def curand_has_ordering(request: Any) -> str:
    """MTGP32 has one order. DYNAMIC (for XORWOW, MRG32K3A and Philox) and BEST of MT19937 exist only on a GPU."""
    name, order = request.generator.name, request.order.name
    if order == "BEST" and request.device.is_host and name == "MT19937":
        return f"needs ordering DEFAULT or LEGACY, has {order} of {name}"
    if order == "DYNAMIC" and (request.device.is_host or name.startswith("MT")):
        return f"needs ordering DEFAULT, BEST or LEGACY, has {order} of {name}"
    if order == "SEEDED" and name != "XORWOW":
        return f"needs ordering SEEDED of XORWOW, has it of {name}"
    return ""
