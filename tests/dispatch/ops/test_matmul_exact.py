"""Epilogues by kernels of this library: who gets them, what is left to cuBLASLt, and the kernels, run on the CPU.

g++ compiles the very source that NVRTC gets; plans run it over the memory of host tensors, behind a product that stands
in for `cublasLtMatmul`: of the problem that the plan describes to it, at the addresses that it hands over.
"""

from __future__ import annotations

import ctypes
import math
import platform
import shutil
import subprocess
import weakref

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import dispatch as dp
from cudabind.errors import NvrtcError
from cudabind.sys import cublasLt as lt
from dispatch.errors import NoRow, Refused
from dispatch.execute import shared_memory
from dispatch.keys import BF16, F16, F32, F64, HALF, HOST, Arch, Compute, Epilogue
from dispatch.libraries.cublaslt.kernel_recording import COMMUTING
from dispatch.ops.matmul import cublaslt, exact, exact_kernels
from dispatch.ops.matmul.bounds import Check
from dispatch.ops.matmul.cases import cases
from dispatch.ops.matmul.lower import lower
from dispatch.table.select import candidates, select

E = Epilogue
GELUS = [epilogue for epilogue in Epilogue if epilogue.activation == "gelu"]
NUMBERS = {name: number for number, name in enumerate(exact_kernels.NAMES, 1)}  # 0 would be no function
ON_A_CPU = """
#include <cmath>
#include <immintrin.h>
using std::exp;
#define __device__ static
#define __global__
#define __shared__ static
static void __syncthreads() {}
struct Dim { unsigned x, y, z; };
static Dim blockIdx, threadIdx, blockDim, gridDim;
struct Half { unsigned short bits; };
struct Brain { unsigned short bits; };
static double read(double x) { return x; }
static void write(double& at, double x) { at = x; }
static float read(Half x) { return _cvtsh_ss(x.bits); }
static void write(Half& at, float x) { at.bits = _cvtss_sh(x, 0); }
union Bits { unsigned whole; float x; };
static float read(Brain x) { Bits bits; bits.whole = unsigned(x.bits) << 16; return bits.x; }
static void write(Brain& at, float x)
{
    Bits bits; bits.x = x;
    at.bits = x != x ? 0x7fff : (bits.whole + 0x7fff + (bits.whole >> 16 & 1)) >> 16;
}
%s
#define ALL(i, space) for (i = 0; i < space; ++i)
extern "C" void run(int kind, Dim grid, Dim block, Work* work)
{
    gridDim = grid, blockDim = block;
    ALL(blockIdx.z, grid.z) ALL(blockIdx.y, grid.y) ALL(blockIdx.x, grid.x)
        for (int line = block.y - 1; line >= 0; --line) ALL(threadIdx.x, block.x) {  // line 0 adds up the others
            threadIdx.y = line;
            (kind == 0 ? forward : kind == 1 ? mask : kind == 2 ? backward : sum_columns)(*work);
        }
}
"""


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """`run(kind, grid, block, work)` of the kernels by dtype, compiled for the CPU."""
    if shutil.which("g++") is None or platform.machine() != "x86_64":
        pytest.skip("needs g++ and a CPU that converts f16")
    found, folder = {}, tmp_path_factory.mktemp("kernels")
    source = folder / "kernels.cpp"
    source.write_text(ON_A_CPU % exact_kernels.KERNELS)
    for dtype, (sums, stored) in exact_kernels.TYPES.items():
        names = {**exact_kernels.CONSTANTS, "SUM_TYPE": sums, "STORED_TYPE": stored}
        macros = [f"-D{name}={value}" for name, value in names.items()]
        library = folder / f"{dtype}.so"
        flags = ["-O0", "-mf16c", "-ffp-contract=off", "-Wall", "-Werror", "-Wno-unused-function"]
        subprocess.run(["g++", *flags, "-shared", "-fPIC", *macros, "-o", library, source], check=True)
        found[dtype] = ctypes.CDLL(str(library)).run
    return found


class Dim(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in "xyz"]


class Cpu:
    """Stands for `cuLaunchKernel`: runs what is launched, at once, on the CPU."""

    def __init__(self, runs):
        self._runs, self.dtype, self.launched = runs, F64, []

    def __call__(self, function, *arguments):
        grid, block, (shared, _stream, pointers, extra) = arguments[:3], arguments[3:6], arguments[6:]
        assert (shared, extra) == (0, None)
        assert block[0] * block[1] * block[2] <= 1024
        self.launched.append(exact_kernels.NAMES[function.value - 1])
        self._runs[self.dtype](function.value - 1, Dim(*grid), Dim(*block), ctypes.c_void_p(pointers[0]))
        return 0


class Executor:
    """What a plan takes from its executor, with memory of the host."""

    workspace = type("W", (), {"nbytes": 1 << 25, "c_ptr": ctypes.c_void_p()})
    stream = None
    _pages = ()  # of its numbers

    def __init__(self):
        self.device, self.target = dp.device("host"), ctypes.c_void_p()
        self.handles = {"cublasLt": lt.cublasLtHandle_t()}

    def refuse_capture(self, what):
        """Nobody captures."""

    def zeros(self, nbytes):
        self._zeros = self.device.zeros((nbytes,), "u8")
        return self._zeros.ptr


@pytest.fixture
def cpu(on_cpu, monkeypatch):
    stand_in = Cpu(on_cpu)
    monkeypatch.setattr(exact_kernels, "_launch_function", lambda: stand_in)
    monkeypatch.setattr(exact, "functions", lambda *_: NUMBERS)
    monkeypatch.setattr(cublaslt, "heuristic", lambda *_, **__: [lt.cublasLtMatmulHeuristicResult_t()])
    monkeypatch.setattr(cublaslt.CublasLtPlan, "_bind", bind)
    return stand_in


DTYPES = {dtype.cuda: dtype for dtype in (BF16, F16, F32, F64)}


def view(address, matrix, batch):
    """The memory of one matrix of a batch, (rows, cols)."""
    dtype = DTYPES[matrix.dtype]
    item, span = dtype.itemsize, (matrix.cols - 1) * matrix.ld + matrix.rows
    memory = (ctypes.c_uint8 * (span * item)).from_address(address + batch * matrix.batch_stride * item)
    return as_strided(np.frombuffer(memory, dtype.numpy), (matrix.rows, matrix.cols), (item, matrix.ld * item))


def bind(plan, _algo, _workspace_bytes):
    """In the place of `CublasLtPlan._bind`: the call is a product on the host, from the addresses that were set."""
    places, plan = tuple(ctypes.c_void_p() for _ in range(4)), weakref.proxy(plan)
    return lambda: product(plan, *(place.value for place in places)), places


def product(plan, a, b, c, d):
    """`cublasLtMatmul` of what the plan has described: no epilogue but a bias, and no C in f32."""
    problem = plan.lowered.problem
    assert problem.epilogue in (E.NONE, E.BIAS)
    if (problem.device_scalars and not c) or (problem.c.dtype != problem.d.dtype and c == d):
        return lt.cublasStatus_t.CUBLAS_STATUS_INVALID_VALUE  # as on an H200
    scalars = [plan._alpha, plan._beta]
    if problem.device_scalars:
        kind = ctypes.c_double if problem.d.dtype == F64.cuda else ctypes.c_float
        scalars = [kind.from_address(scalar.value) for scalar in scalars]
    alpha, beta = (scalar.value for scalar in scalars)
    assert (beta != 0) <= problem.adds_c
    for batch in range(problem.batch):
        left, right = (
            view(address, matrix, batch).astype(np.float64) for address, matrix in ((a, problem.a), (b, problem.b))
        )
        x = alpha * (left.T if problem.op_a else left) @ (right.T if problem.op_b else right)
        if beta:
            x += beta * view(c, problem.c, batch)
        if problem.epilogue == E.BIAS:
            ((_, index, _),) = plan._vectors
            assert index == cublaslt.BIAS
            (bias_at,) = plan._pointers
            bias = (ctypes.c_double * problem.d.rows).from_address(bias_at + 8 * batch * problem.bias_stride)
            x += np.asarray(bias)[:, None]
        view(d, problem.d, batch)[...] = x
    return 0


def exact_cases():
    """Every case of the rows whose epilogues may end in these kernels, in which there is something to compute."""
    for row in dp.TABLE.of("matmul"):
        if (
            row.min_arch != HOST
            or not row.of("cublasLt")
            or row.dtypes[0] is not row.dtypes[3]
            or row.dtypes[3] not in exact_kernels.TYPES
        ):
            continue
        for case in cases(row):
            wanted = case.epilogue in GELUS if row.dtypes[3] is F64 else case.epilogue not in COMMUTING
            if wanted and 0 not in case.form.sizes[:2] and not case.reduced_precision:
                yield pytest.param(row, case, id=case.id)


@pytest.mark.parametrize(("row", "case"), [*exact_cases()])
def test_every_case_is_right_by_the_kernels(cpu, rng, row, case):
    """Within the bounds of sums and epilogues in the compute type, in D's own memory and nowhere beside it."""
    check = case.check(dp.device("host"), rng)
    request, executor = check.request, Executor()
    executor.scalar = lambda value, dtype: executor.numbers.setdefault(value, executor.device.array([value], dtype)).ptr
    executor.numbers = {}
    cpu.dtype = request.d_dtype
    plan = (
        exact.plan(request, executor, row)
        if cpu.dtype is F64
        else exact.plan_unfused(request, executor, row, Refused("not to be raised"))
    )
    outputs = dp.device("host").executor().outputs(request)
    plan.enqueue(request.arguments(outputs))
    check.verify(request.result(outputs))
    wanted = ["backward" if request.epilogue.is_gradient else "forward"]
    wanted += ["mask"] if request.epilogue.writes_aux and request.epilogue.activation == "relu" else []
    wanted += ["sum_columns"] if request.epilogue.writes_bgrad else []
    assert sorted(set(cpu.launched)) == sorted(wanted)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("epilogue", [E.BIAS, E.RELU_BIAS, E.GELU_BIAS, E.RELU_AUX_BIAS, E.GELU_AUX_BIAS])
def test_what_a_bias_takes_away_is_not_lost_before(cpu, dtype, epilogue):
    """Of a product that 16 bits do not hold, a bias leaves what they would have lost."""
    dev, executor = dp.device("host"), Executor()
    cpu.dtype = dtype
    large = 2 ** (8 if dtype is BF16 else 11)  # one more has a bit too many
    a, b = dev.array(np.ones((16, large + 1)), dtype), dev.array(np.ones((large + 1, 24)), dtype)
    request = dp.MatmulRequest(a, b, bias=dev.array(np.full(24, -float(large)), dtype), epilogue=epilogue)
    row = select(request, Arch(90))
    outputs = dev.executor().outputs(request)
    exact.plan_unfused(request, executor, row, Refused("")).enqueue(request.arguments(outputs))
    one = 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * 1.044715)) if epilogue.activation == "gelu" else 1.0
    assert (outputs["out"].numpy() == np.asarray(one).astype(dtype.numpy)).all()


@pytest.mark.usefixtures("cpu")
def test_products_with_scratch_memory_share_it_as_long_as_a_plan_needs_it():
    dev, executor = dp.device("host"), Executor()
    a, bias = dev.zeros((64, 64), "bf16"), dev.zeros((64,), "bf16")

    def plan(rows):
        request = dp.MatmulRequest(a[:rows], a, bias=bias, epilogue=E.BIAS)
        row = select(request, Arch(90))
        return exact.plan_unfused(request, executor, row, Refused(""))

    first, second, small = plan(64), plan(60), plan(8)
    assert first._scratch is second._scratch
    assert small._scratch is not first._scratch
    assert first._scratch.nbytes >= 64 * 64 * 4
    with pytest.raises(Refused):
        first.resized(first.lowered.problem)
    known = executor.handles[shared_memory.NAME]
    del first, second, small
    assert not known


@pytest.mark.usefixtures("cpu")
def test_an_epilogue_that_the_kernels_do_not_know_is_the_refusal_it_was():
    dev, refusal = dp.device("host"), Refused("no algorithm")
    a, b = dev.zeros((32, 32), "f8e4m3"), dev.zeros((32, 32), "f8e4m3").T
    bias, c = dev.zeros((32,), "bf16"), dev.zeros((32, 32), "bf16")
    for fields in ({"out_dtype": "f8e4m3"}, {"c": c, "scales": dp.Scales(c=2.0)}):
        request = dp.MatmulRequest(a, b, bias=bias, epilogue=E.GELU_BIAS, **fields)
        with pytest.raises(Refused) as caught:
            exact.plan_unfused(request, Executor(), dp.TABLE[0], refusal)
        assert caught.value is refusal


@pytest.mark.parametrize(("arch", "dtype"), [("sm_80", F16), ("sm_90", BF16), ("sm_100", F64)], ids=str)
def test_nvrtc_takes_the_source(arch, dtype):
    """A cubin with all the kernels in it."""
    code = exact_kernels.cubin(arch, dtype)
    assert code.startswith(b"\x7fELF")
    assert all(name.encode() in code for name in exact_kernels.NAMES)


def test_a_compiler_that_is_missing_or_too_old_is_a_refusal_with_the_way_out(monkeypatch):
    dev = dp.device("host")
    a = dev.zeros((8, 8), "f64")
    executor = Executor()
    executor.device = type("Old", (), {"arch": Arch(35)})()
    request = dp.MatmulRequest(a, a, epilogue=E.GELU)
    with pytest.raises(Refused, match=r"NVRTC compiles no kernel(?s:.*)reduced_precision=True"):
        exact.plan(request, executor, select(request, Arch(90)))

    def fail(*_):
        raise NvrtcError("nvrtc", "nvrtcCompileProgram", 6, "NVRTC_ERROR_COMPILATION")

    monkeypatch.setattr(exact_kernels, "compiled", fail)
    with pytest.raises(Refused, match="NVRTC compiles no kernel"):
        exact_kernels.cubin("sm_99", BF16)


@pytest.mark.parametrize("arch", [Arch(90), dp.device("host").arch], ids=str)
@pytest.mark.parametrize("epilogue", [E.NONE, E.RELU, *GELUS], ids=lambda e: e.name)
def test_a_gelu_in_f64_is_exact_unless_the_request_allows_less(arch, epilogue):
    dev = dp.device("host")
    a = dev.zeros((8, 8), "f64")
    given = {"bias": dev.zeros((8,), "f64")} if epilogue.adds_bias else {}
    if epilogue.is_gradient:
        given["aux"] = a
    precise, rough = (
        select(dp.MatmulRequest(a, a, epilogue=epilogue, reduced_precision=choice, **given), arch)
        for choice in (False, True)
    )
    assert precise.variant == ("exact GELU" if epilogue in GELUS else "")
    assert rough.variant == ""
    assert ("3e-10" in rough.note) == (arch == Arch(90))


def test_where_the_exact_one_is_refused_nobody_gets_the_other_without_a_word(monkeypatch):
    def refuse(*_):
        raise Refused("NVRTC compiles no kernel")

    dev = dp.device("host")
    a = dev.zeros((8, 8), "f64")
    for row in candidates(dp.MatmulRequest(a, a, epilogue=E.GELU), dev.arch):
        monkeypatch.setitem(row.__dict__, "call", refuse)
    with pytest.raises(NoRow) as caught:
        dp.matmul(a, a, epilogue=E.GELU)
    assert "needs reduced_precision=True for epilogue GELU, has False" in str(caught.value)
    assert "NVRTC compiles no kernel" in str(caught.value)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("where", ["both on the device", "alpha on the device", "beta 0 on the device"])
@pytest.mark.parametrize("epilogue", [E.GELU_BIAS, E.RELU_AUX_BIAS], ids=lambda e: e.name)
def test_numbers_in_device_memory_are_read_there(cpu, rng, dtype, where, epilogue):
    """The library gets a beta of 0, for C is added behind it; its C is some address, for it does not know that."""
    dev, executor = dp.device("host"), Executor()
    cpu.dtype = dtype
    fields = {"a": (32, 24), "b": (24, 48), "c": (32, 48), "bias": (48,)}
    given = {name: dev.array(rng.standard_normal(shape), dtype) for name, shape in fields.items()}
    beta = 0.0 if "0" in where else -0.5
    numbers = {"alpha": dev.array([1.5], "f32"), "beta": beta if "alpha" in where else dev.array([beta], "f32")}
    check = Check.of(where, dp.MatmulRequest(**given, **numbers, epilogue=epilogue), Compute.COMPUTE_32F, ())
    zero = dev.array([0.0], "f32")
    executor.scalar = lambda value, _: zero.ptr if value == 0 else None
    row = select(check.request, Arch(90))
    plan = exact.plan_unfused(check.request, executor, row, Refused(""))
    outputs = dev.executor().outputs(check.request)
    plan.enqueue(check.request.arguments(outputs))
    check.verify(check.request.result(outputs))


def test_what_is_left_to_the_library():
    """In f64 all but the GELU, in D itself; in 16 bits the product alone, dense, in f32, with nothing added to it."""
    dev = dp.device("host")
    for dtype, epilogue in ((F64, E.GELU_AUX_BIAS), (F64, E.DGELU_BGRAD), (BF16, E.GELU_AUX_BIAS), (BF16, E.DGELU)):
        a = dev.zeros((3, 8, 8), dtype)
        given = {"bias": dev.zeros((8,), dtype)} if epilogue.adds_bias else {}
        if epilogue.is_gradient:
            given["aux"] = dev.zeros((3, 8, 8), dtype)
        request = dp.MatmulRequest(a, a, c=dev.zeros((3, 8, 8), dtype), epilogue=epilogue, **given)
        problem = lower(request, Compute.COMPUTE_64F if dtype is F64 else Compute.COMPUTE_32F).problem
        left = exact.product_of(problem, epilogue)
        assert (left.aux_dtype, left.aux_ld, left.aux_stride) == (-1, 0, 0)
        assert (left.a, left.b, left.op_a, left.op_b, left.batch) == (
            *(problem.a, problem.b, problem.op_a, problem.op_b, problem.batch),
        )
        own = dtype is F64
        assert left.adds_c is own
        assert left.epilogue == (E.BIAS if own and epilogue.adds_bias else E.NONE)
        assert (left.bias_dtype >= 0) == (own and epilogue.adds_bias)
        assert (left.d == problem.d) == (left.c == problem.c) == own
        assert left.d.dtype == (F64 if own else F32).cuda
        assert own or (left.c, left.d.ld, left.d.batch_stride) == (left.d, 8, 64)


def test_scratch_memory_belongs_to_the_stream_that_uses_it(cpu, rng):
    """It may have been made on another one, beside a capture: freed there, it would be given on while it is used."""
    dev, executor = dp.device("host"), Executor()
    cpu.dtype = BF16
    a, bias = dev.array(rng.standard_normal((16, 16)), "bf16"), dev.zeros((16,), "bf16")
    request = dp.MatmulRequest(a, a, bias=bias, epilogue=E.BIAS)
    row = select(request, Arch(90))
    plan = exact.plan_unfused(request, executor, row, Refused(""))
    executor.stream = object()
    plan.enqueue(request.arguments(dev.executor().outputs(request)))
    assert plan._scratch.owner is plan._scratch.writer is executor.stream
    plan._scratch.owner = plan._scratch.writer = None  # a stand-in cannot free it
