"""Random numbers by cuRAND's host API, which generates on a GPU or, by the same functions, in the host's memory.

https://docs.nvidia.com/cuda/curand/host-api-overview.html. Uniform numbers between others than 0 and 1, and those of
[0, 1), which cuRAND does not have, are made of its own by a kernel of one multiplication, or by NumPy.
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
from dispatch.ops.random.groups import MOST_BLOCKS, THREADS
from dispatch.ops.random.reference import numpy_random, units

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Argument, Operands
    from dispatch.core.row import Row
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["curand_on_host", "curand_random", "philox_on_host"]

WITH_COUNTERPART = {("random_bits", U32)} | {
    (f"random_{name}", dtype) for name in ("uniform", "normal", "lognormal") for dtype in (F32, F64)
}
NORMAL = ("random_normal", "random_lognormal")
PHILOX = 161  # of `curandRngType_t`
ROW = QUAD * SUBSEQUENCES  # numbers of one block of each subsequence of Philox
QUASI_DEFAULT = 201  # of `curandOrdering_t`

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
    """The generator that a request asks for."""
    generator = request.generator
    ordering = QUASI_DEFAULT if generator.is_quasi else int(request.order)
    return Kind(int(generator), ordering, request.dimensions)


class Generation:
    """What a request has cuRAND generate, wherever that is: by which function, how many numbers, from where on."""

    def __init__(self, request: Any) -> None:
        double = request.kind is F64
        self.kind: Kind = kind_of(request)
        self.count: int = request.count
        self.dtype, self.op = request.kind, request.op
        self.is_words = request.op == "random_uniform" and request.interval == "[0,1)"
        self.low, self.high = getattr(request, "low", 0.0), getattr(request, "high", 1.0)
        self.is_finished = self.is_words or (request.op == "random_uniform" and (self.low, self.high) != (0, 1))
        self.words = 2 if self.is_words and double else 1  # that are generated for each number
        self.element = np.dtype(np.uint32) if self.is_words else request.kind.numpy
        self.is_wide = self.kind.number == PHILOX and double and not self.is_words
        self.is_even = request.op in NORMAL and not request.generator.is_quasi
        in_pairs = self.is_even and self.kind.number in IN_PAIRS
        self._per_step = 2 if in_pairs else self.kind.dimensions  # numbers for each step of the offset
        ends = ("low", "high", "interval")
        self._numbers = tuple(float(getattr(request, name)) for name in request.parameters if name not in ends)
        self._function = self._chosen(request, double)

    def _chosen(self, request: Any, double: bool) -> Any:
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
        """From where on how many numbers are generated, one piece behind the other.

        Numbers of 64 bits of Philox take two blocks of a subsequence, of which cuRAND's offset passes over one alone:
        what is left of a row of subsequences is a piece of its own, and so the numbers of an offset are always those
        that one call from the beginning would give there.
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
        """How many numbers are generated for so many: pseudo-random normal ones come in pairs."""
        return count + count % 2 if self.is_even else count

    def end(self, place: SequencePosition, count: int) -> SequencePosition:
        """Where cuRAND's generator stands then."""
        return SequencePosition(place.seed, place.offset + count // self._per_step)

    def call(self, c_handle: Any, address: int, count: int) -> None:
        """Generate so many numbers to an address."""
        self._function(c_handle, ctypes.c_void_p(address), count, *self._numbers)


# -- on a GPU ---------------------------------------------------------------------------------------------------------
def curand_random(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request on a GPU."""
    if not request.count:
        return IdlePlan(row)
    return DevicePlan(executor, row, Generation(request))


class DevicePlan(Plan):
    """A call of cuRAND. Nobody captures it: a replay would repeat its numbers, or continue where nobody expects it."""

    __slots__ = ("_executor", "_finish", "_generation", "_generator", "_itemsize")

    def __init__(self, executor: CudaExecutor, row: Row, generation: Generation) -> None:
        super().__init__(row, capture_safe=False)
        self._executor, self._generation = executor, generation
        self._generator = device_generator(generation.kind, executor)
        self._itemsize = generation.element.itemsize
        self._finish: Callable[[int], None] | None = None
        if generation.is_finished:
            wide = generation.dtype is F64
            chosen = (
                f"-DNUMBER={'double' if wide else 'float'}",
                f"-DHALF_OPEN={(8 if wide else 4) * generation.is_words}",
            )
            function = loaded(FINISH, "finish", ("-std=c++17", *chosen), executor.device)
            self._finish = partial(self._launch, ctypes.c_void_p(function))

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        out, seed, offset = (int(argument.real) for argument in arguments)
        generation, generator, at = self._generation, self._generator, out
        handle = generator.follow()
        for place, wanted in generation.pieces(seed, offset):
            count = generation.padded_count(wanted)
            last, generator.place = generator.place, None  # of a call that raises nobody knows how far it came
            seek(handle, generation.kind, last, place, self._skip)
            size = wanted * self._itemsize
            if count == wanted:
                generation.call(handle, at, count)
            else:
                padded: Tensor = self._executor.empty((count,), (1,), generation.dtype)
                generation.call(handle, padded.ptr, count)
                driver.cuMemcpyDtoDAsync(at, padded.ptr, size, self._executor.target.value)
            generator.place = generation.end(place, count)
            at += size
        if self._finish is not None:
            self._finish(out)

    def _skip(self, count: int) -> None:
        padded: Tensor = self._executor.empty((count,), (1,), U32)
        curand.curandGenerate(self._generator.follow(), ctypes.c_void_p(padded.ptr), count)

    def _launch(self, function: ctypes.c_void_p, out: int) -> None:
        generation = self._generation
        taken = (
            *(ctypes.c_void_p(out), ctypes.c_uint64(generation.count)),
            *(ctypes.c_double(generation.low), ctypes.c_double(generation.high)),
        )
        pointers = (ctypes.c_void_p * len(taken))(*map(ctypes.addressof, taken))
        blocks = min(-(-generation.count // THREADS), MOST_BLOCKS)
        driver.cuLaunchKernel(function, blocks, 1, 1, THREADS, 1, 1, 0, self._executor.target, pointers, None)


# -- on the host ------------------------------------------------------------------------------------------------------
def curand_on_host(request: Any, _: Any, row: Row) -> Plan:
    """The plan of a request on the host; Refused where cuRAND is not installed."""
    host_generator(kind_of(request))
    return HostPlan(row, capture_safe=False)


def philox_on_host(request: Any, executor: Any, row: Row) -> Plan:
    """The plan of what kernels of this library do on a GPU: by cuRAND where it has the same numbers, else by NumPy."""
    has = (request.op, request.kind) in WITH_COUNTERPART and not words_of_library(request)
    if has and request.library is None:
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
        made, at = np.empty(request.count * generation.words, generation.element), 0
        generator = host_generator(generation.kind)
        for place, wanted in generation.pieces(request.seed, request.offset):
            count = generation.padded_count(wanted)
            part = made[at : at + wanted] if count == wanted else np.empty(count, made.dtype)
            call = partial(generation.call, address=part.ctypes.data, count=count)
            generator.generate(place, generation.end(place, count), call)
            made[at : at + wanted] = part[:wanted]
            at += wanted
        target.device.view(target)[...] = finished(generation, made).reshape(request.shape)


def finished(generation: Generation, found: Array) -> Array:
    """What is made of cuRAND's numbers."""
    if not generation.is_finished:
        return found
    if generation.is_words:
        found = units(found.reshape(-1, generation.words), generation.dtype, "[0,1)")
    low, high = (found.dtype.type(end) for end in (generation.low, generation.high))
    return np.asarray(low + (high - low) * found)


# -- rules of the rows ------------------------------------------------------------------------------------------------
def by_philox(request: Any) -> str:
    """Kernels of this library draw from Philox, in the order of cuRAND's default, which was its order before, too."""
    name, order = request.generator.name, request.order.name
    if name != "PHILOX4_32_10":
        return f"needs bit_generator PHILOX4_32_10, has {name}"
    return "" if order in ("DEFAULT", "LEGACY") else f"needs ordering DEFAULT or LEGACY, has {order}"


def words_of_library(request: Any) -> str:
    """cuRAND gives words of 64 bits where the generator has such, and words of 32 where it has those."""
    is_64 = request.generator.is_64_bit
    if request.op == "random_uniform" and request.interval == "[0,1)":
        pairs = request.kind is F64 and request.generator.name == "PHILOX4_32_10"  # cuRAND has them in another order
        return (
            f"needs interval (0,1] for {request.kind} of {request.generator.name}, has [0,1)" if is_64 or pairs else ""
        )
    if request.op != "random_bits" or (request.kind is U64) == is_64:
        return ""
    return f"needs {'u64' if is_64 else 'u32'} of {request.generator.name}, has {request.kind}"


def some_events(request: Any) -> str:
    """cuRAND's means."""
    return "" if 0 < request.lam <= 400_000 else f"needs lam above 0 and 400000 at most, has {request.lam:g}"


def begins_anew(request: Any) -> str:
    """cuRAND's MTGP32 on a GPU gives other numbers of a seed once it was used (10.4, an H100), new states or not."""
    if request.device.is_host or request.generator.name != "MTGP32":
        return ""
    return "needs a generator that begins its sequence anew: cuRAND's MTGP32 does so on the host alone"


def orders_of_library(request: Any) -> str:
    """MTGP32 has one order; cuRAND's DYNAMIC is for XORWOW, MRG32K3A and Philox on a GPU alone, as BEST of MT19937."""
    name, order = request.generator.name, request.order.name
    if order == "BEST" and request.device.is_host and name == "MT19937":
        return f"needs ordering DEFAULT or LEGACY, has {order} of {name}"
    if order == "DYNAMIC" and (request.device.is_host or name.startswith("MT")):
        return f"needs ordering DEFAULT, BEST or LEGACY, has {order} of {name}"
    if order == "SEEDED" and name != "XORWOW":
        return f"needs ordering SEEDED of XORWOW, has it of {name}"
    return ""
