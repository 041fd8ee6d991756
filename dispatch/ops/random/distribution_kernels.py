"""The plans of numbers that are drawn element by element: the kernel of each request, and its launch.

streams.py documents the source of their bits. Bounded integers take one word each (bounded_integers.py), and so do
Poisson and binomial numbers that have a table (alias_table.py). Others are drawn by rejection, one element per thread:
f32, f16 and bf16 numbers in f32 if that accepts the same candidates (single_kernels.py), else in f64.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from cudabind import driver
from dispatch.errors import WorkerFailed
from dispatch.keys import F64, I8, I32, I64, U8, U32, U64
from dispatch.libraries.nvrtc.kernel import Kernel
from dispatch.libraries.nvrtc.number_types import NAMES, NUMBERS
from dispatch.libraries.nvrtc.philox import PHILOX
from dispatch.ops.random.alias_table import ALIAS, table_of
from dispatch.ops.random.bounded_integers import WORDS, is_narrow, word_values
from dispatch.ops.random.groups import GROUPS, elements_launch, groups_launch
from dispatch.ops.random.methods import METHODS, Hat, binomial_hat, poisson_hat
from dispatch.ops.random.permutations import ORDERS, ROUNDS, SMALL
from dispatch.ops.random.philox_kernels import NumbersPlan, defined, plan_of
from dispatch.ops.random.single_kernels import SINGLE
from dispatch.ops.random.single_precision import is_by_quads, is_single, single_values
from dispatch.ops.random.streams import BELOW, NEIGHBOURS, STREAM, SUM

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.nvrtc.kernel import Launch
    from dispatch.ops.random.alias_table import AliasTable

__all__ = ["MODES", "draws_kernel", "nvrtc_draws"]

HALF = 0.5
MODES = {
    name: number
    for number, name in enumerate(
        (
            *("random_integers", "random_poisson", "random_gamma", "random_beta", "random_binomial"),
            *("random_truncated_normal", "random_permutation", "random_choice", "random_multinomial"),
        )
    )
}
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
union DistributionParameters { double at[9]; Hat hat; };

extern "C" __global__ void FUNCTION(
#if MODE >= 7
    const double* list,
#endif
    Number* out, Whole seed, Whole offset, Whole count, Whole n, const DistributionParameters parameters,
    const unsigned* replays)
{
    const double* at = parameters.at;
    const Whole step = (Whole)gridDim.x * blockDim.x;
    const unsigned replay = replays ? *replays : 0;
    for (Whole i = (Whole)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        Draw d = stream_of(seed, offset + i, replay);
#if MODE == 1
        STORE(poisson(d, parameters.hat));
#elif MODE == 2
        STORE(at[0] > 0 ? exp(log_gamma(d, at[0])) * at[1] : 0.0);
#elif MODE == 3
        STORE(beta(d, at[0], at[1]));
#elif MODE == 4
        // If fewer trials fail than succeed, the failures are drawn.
        STORE(n ? n - binomial_by_rejection(d, parameters.hat) : binomial_by_rejection(d, parameters.hat));
#elif MODE == 5
        STORE(at[2] + at[3] * truncated(d, at[0], at[1]));
#elif MODE == 6
        if (n > SMALL) STORE(permuted(seed, offset, replay, i, n));
        else if (i == 0) shuffle(d, out, count, n);
#elif MODE == 7
        STORE(chosen(d, list, n));
#else
        outcomes(d, list, out + i * n, n, at[0]);
#endif
    }
}
"""
COMMON = NUMBERS + PHILOX + STREAM + BELOW
SOURCE = COMMON + METHODS + ORDERS + KERNEL
SINGLE_SOURCE = NUMBERS + PHILOX + STREAM + GROUPS + NEIGHBOURS + SINGLE
SINGLE_METHODS = {
    "random_gamma": ("GammaShapes", "gamma"),
    "random_beta": ("GammaShapes", "beta"),
    "random_truncated_normal": ("TruncationBounds", "truncated"),
}
TABLE_SOURCE = NUMBERS + PHILOX + STREAM + GROUPS + NEIGHBOURS + SUM + ALIAS
INTEGERS_SOURCE = COMMON + GROUPS + NEIGHBOURS + SUM + WORDS


def nvrtc_draws(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request: one launch."""
    plan, table = plan_of(draws_kernel(request), request, executor, row), table_of(request)
    if table is not None and isinstance(plan, NumbersPlan):
        plan.keep(on_device(executor, table))
    return plan


def on_device(executor: CudaExecutor, table: AliasTable) -> Tensor:
    """A copy of a table on the device, for a plan. Plans are made outside of captures and recordings."""
    copy: Tensor = executor.empty(table.memory.shape, (1,), U32)
    address, nbytes = table.memory.ctypes.data, table.memory.nbytes
    driver.cuMemcpyHtoDAsync(copy.ptr, address, nbytes, executor.stream.c_handle.value)
    executor.stream.synchronize()  # the table in host memory may be freed before the copy has run
    return copy


def draws_kernel(request: Any) -> Kernel:
    """The kernel for a request's op and dtype."""
    if request.op == "random_integers":
        return _integers_kernel(request.kind, not is_narrow(request))
    if is_single(request):
        return _single_kernel(request.op, request.kind, is_by_quads(request))
    if table_of(request) is not None:
        return _table_kernel(request.op, request.kind)
    return _rejection_kernel(request.op, request.kind)


@cache
def _integers_kernel(kind: Any, is_wide: bool) -> Kernel:
    options = defined(NUMBER=TYPES[kind], WIDE=int(is_wide), FUNCTION="random_integers")
    return Kernel(INTEGERS_SOURCE, "random_integers", words_launch, options)


@cache
def _rejection_kernel(op: str, kind: Any) -> Kernel:
    macros = {
        "NUMBER": (TYPES | NAMES)[kind],
        "SUM": "double" if kind is F64 else "float",
        "MODE": MODES[op],
        "FUNCTION": op,
        "SMALL": SMALL,
        "ROUNDS": ROUNDS,
    }
    return Kernel(SOURCE, op, rejection_launch, defined(**macros))


@cache
def _table_kernel(op: str, kind: Any) -> Kernel:
    return Kernel(TABLE_SOURCE, op, table_launch, defined(NUMBER=TYPES[kind], FUNCTION=op))


@cache
def _single_kernel(op: str, kind: Any, by_quads: bool) -> Kernel:
    parameters, method = SINGLE_METHODS[op]
    options = defined(NUMBER=NAMES[kind], FUNCTION=op, PARAMETERS=parameters, METHOD=method, BY_QUADS=int(by_quads))
    return Kernel(SINGLE_SOURCE, op, single_launch, options)


def words_launch(request: Any) -> Launch:
    """The launch for bounded integers."""
    return groups_launch(request, word_values(request))


def table_launch(request: Any) -> Launch:
    """The launch for numbers drawn by table; the plan sets the last argument, the table's address."""
    table = table_of(request)
    if table is None:
        raise WorkerFailed("there is no table for this distribution")
    numbers = (request.count, table.first, table.bits)
    return groups_launch(request, (*map(ctypes.c_uint64, numbers), ctypes.c_void_p()))


def rejection_launch(request: Any) -> Launch:
    """The launch for numbers drawn in f64."""
    n, numbers = numbers_of(request)
    parameters = DistributionParameters((ctypes.c_double * len(Hat._fields))(*numbers))
    return elements_launch(request, (ctypes.c_uint64(request.count), ctypes.c_uint64(n), parameters))


def single_launch(request: Any) -> Launch:
    """The launch for numbers drawn in f32."""
    launch = groups_launch if is_by_quads(request) else elements_launch
    return launch(request, single_values(request))


class DistributionParameters(ctypes.Structure):
    """The floating-point arguments of a kernel."""

    _fields_: ClassVar[Any] = [("at", ctypes.c_double * len(Hat._fields))]


def numbers_of(request: Any) -> tuple[int, tuple[float, ...]]:
    """The arguments of an op's kernel: an integer, and several floating-point numbers."""
    op = request.op
    if op == "random_poisson":
        return 0, poisson_hat(float(request.lam))
    if op == "random_gamma":
        return 0, (float(request.shape_parameter), float(request.scale))
    if op == "random_beta":
        return 0, (float(request.a), float(request.b))
    if op == "random_binomial":
        n, p = request.n, float(request.p)
        return (n if p > HALF else 0), binomial_hat(float(n), min(p, 1 - p))
    if op == "random_truncated_normal":
        return 0, (*request.standard, float(request.mean), float(request.std))
    if op == "random_permutation":
        return request.population, ()
    return getattr(request, request.reads[0]).size, (float(getattr(request, "n", 0)),)
