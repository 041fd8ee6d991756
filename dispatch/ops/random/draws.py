"""The plans of numbers that are drawn element by element: which kernel a request takes, and how it is launched.

streams.py says where their bits come from. Whole numbers of a range take a word each (words.py). Others are drawn
by rejection, an element a thread: of f32, f16 and bf16 in f32 where that decides the same (single_kernels.py), else in f64.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from dispatch.keys import F64, I8, I32, I64, U8, U32, U64
from dispatch.libraries.nvrtc.kernel import IdlePlan, Kernel, Launch, loaded
from dispatch.libraries.nvrtc.number_types import NAMES, NUMBERS
from dispatch.libraries.nvrtc.philox import PHILOX, QUAD
from dispatch.ops.random.methods import METHODS
from dispatch.ops.random.orders import ORDERS, ROUNDS, SMALL
from dispatch.ops.random.own import ADVANCE, OPTIONS, NumbersPlan
from dispatch.ops.random.single import is_single, single_values
from dispatch.ops.random.single_kernels import SINGLE
from dispatch.ops.random.streams import BELOW, NEIGHBOURS, STREAM, THREADS
from dispatch.ops.random.words import WORDS, is_narrow, word_values

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["MODES", "draws_kernel", "nvrtc_draws"]

MOST_BLOCKS = 1 << 14
MODES = {
    name: number
    for number, name in enumerate(
        (
            *("random_integers", "random_poisson", "random_gamma", "random_beta", "random_binomial"),
            *("random_truncated_normal", "random_permutation", "random_choice", "random_multinomial"),
        )
    )
}
WITH_LIST = ("random_choice", "random_multinomial")
TYPES = {
    I8: "signed char",
    U8: "unsigned char",
    I32: "int",
    U32: "unsigned",
    I64: "long long",
    U64: "unsigned long long",
}

KERNEL = r"""
typedef NUMBER Number;
#if MODE == 2 || MODE == 3 || MODE == 5
#define STORE(x) write(out[i], (SUM)(x))
#else
#define STORE(x) out[i] = (Number)(x)
#endif

extern "C" __global__ void FUNCTION(
#if MODE >= 7
    const double* list,
#endif
    Number* out, Whole seed, Whole offset, Whole count, Whole m, Whole n, double a, double b, double c,
    const unsigned* replays)
{
    const Whole step = (Whole)gridDim.x * blockDim.x;
    const unsigned replay = replays ? *replays : 0;
    for (Whole i = (Whole)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        Draw d = stream_of(seed, offset + i, replay);
#if MODE == 1
        STORE(poisson(d, a));
#elif MODE == 2
        STORE(a > 0 ? exp(log_gamma(d, a)) * b : 0.0);
#elif MODE == 3
        STORE(beta(d, a, b));
#elif MODE == 4
        STORE(binomial(d, (double)n, a));
#elif MODE == 5
        STORE(b + c * truncated(d, __longlong_as_double(m), a));
#elif MODE == 6
        if (n > SMALL) STORE(placed(seed, offset, replay, i, n));
        else if (i == 0) ordered(d, out, count, n);
#elif MODE == 7
        STORE(found(d, list, n));
#else
        outcomes(d, list, out + i * n, n, a);
#endif
    }
}
"""
COMMON = NUMBERS + PHILOX + STREAM + BELOW
SOURCE = COMMON + METHODS + ORDERS + KERNEL
OF_SINGLE = NUMBERS + PHILOX + STREAM + SINGLE
METHODS_OF_SINGLE = {
    "random_gamma": ("Shapes", "gamma"),
    "random_beta": ("Shapes", "beta"),
    "random_truncated_normal": ("Bounds", "truncated"),
}
OF_WORDS = COMMON + NEIGHBOURS + WORDS


def nvrtc_draws(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request: one launch."""
    kernel = draws_kernel(request)
    launch = kernel.launch(request)
    if 0 in launch.grid:
        return IdlePlan(row, capture_safe=False)
    device = executor.device
    function = loaded(kernel.source, kernel.function, kernel.options, device)
    advance = partial(loaded, ADVANCE, "advance", OPTIONS, device)
    return NumbersPlan(executor, row, function, launch, advance, addresses=len(request.reads) + 1)


def draws_kernel(request: Any) -> Kernel:
    """The kernel for a request's op and dtype."""
    if request.op == "random_integers":
        return _of_words(request.kind, not is_narrow(request))
    if is_single(request):
        return _single(request.op, request.kind)
    return _by_rejection(request.op, request.kind)


@cache
def _of_words(kind: Any, is_wide: bool) -> Kernel:
    options = defined(NUMBER=TYPES[kind], WIDE=int(is_wide), FUNCTION="random_integers")
    return Kernel(OF_WORDS, "random_integers", words_launch, options)


@cache
def _by_rejection(op: str, kind: Any) -> Kernel:
    chosen = {
        "NUMBER": (TYPES | NAMES)[kind],
        "SUM": "double" if kind is F64 else "float",
        "MODE": MODES[op],
        "FUNCTION": op,
        "SMALL": SMALL,
        "ROUNDS": ROUNDS,
    }
    return Kernel(SOURCE, op, rejection_launch, defined(**chosen))


@cache
def _single(op: str, kind: Any) -> Kernel:
    given, method = METHODS_OF_SINGLE[op]
    options = defined(NUMBER=NAMES[kind], FUNCTION=op, GIVEN=given, METHOD=method)
    return Kernel(OF_SINGLE, op, single_launch, options)


def defined(**chosen: Any) -> tuple[str, ...]:
    """NVRTC's options with which a source has these names."""
    return (*OPTIONS, *(f"-D{name}={value}" for name, value in chosen.items()))


def words_launch(request: Any) -> Launch:
    """A thread for each quad, and of many for several."""
    quads = request.count and -(-request.count // QUAD) + 1  # one more, where the offset is in the middle of one
    return Launch((min(-(-quads // THREADS), MOST_BLOCKS),), (THREADS,), word_values(request))


def rejection_launch(request: Any) -> Launch:
    """A thread for each element, and of many for several."""
    blocks = min(-(-request.count // THREADS), MOST_BLOCKS)
    m, n, a, b, c = numbers_of(request)
    values = (*(ctypes.c_uint64(one % 2**64) for one in (request.count, m, n)), *map(ctypes.c_double, (a, b, c)))
    return Launch((blocks,), (THREADS,), values)


def single_launch(request: Any) -> Launch:
    """A thread for each element, and of many for several."""
    return Launch((min(-(-request.count // THREADS), MOST_BLOCKS),), (THREADS,), single_values(request))


def numbers_of(request: Any) -> tuple[int, int, float, float, float]:
    """What the kernel of an op takes: two whole numbers, and three others."""
    op = request.op
    if op == "random_poisson":
        return 0, 0, float(request.lam), 0.0, 0.0
    if op == "random_gamma":
        return 0, 0, float(request.shape_parameter), float(request.scale), 0.0
    if op == "random_beta":
        return 0, 0, float(request.a), float(request.b), 0.0
    if op == "random_binomial":
        return 0, request.n, float(request.p), 0.0, 0.0
    if op == "random_truncated_normal":
        low, high = request.standard
        (bits,) = struct.unpack("<Q", struct.pack("<d", low))
        return bits, 0, high, float(request.mean), float(request.std)
    if op == "random_permutation":
        return 0, request.population, 0.0, 0.0, 0.0
    listed = getattr(request, request.reads[0]).size
    return 0, listed, float(getattr(request, "n", 0)), 0.0, 0.0
