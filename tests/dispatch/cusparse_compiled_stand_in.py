"""SpMMOp and SpMVOp over memory of the host, beside cuSPARSE's stand-in: the operators' own lines, compiled by g++.

As cuSPARSE does, it begins partial sums with 0, and knows operands by the addresses that they had as a plan was made.
"""

import ctypes
import hashlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from dispatch.libraries.cusparse import compiled_product
from dispatch.libraries.nvrtc import launching

spec = importlib.util.spec_from_file_location("cusparse_stand_in", Path(__file__).with_name("cusparse_stand_in.py"))
stand_in = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_in)
spec = importlib.util.spec_from_file_location("by_gcc", Path(__file__).with_name("by_gcc.py"))
by_gcc = importlib.util.module_from_spec(spec)
spec.loader.exec_module(by_gcc)
DTYPES, WORK, address_of, memory_at = stand_in.DTYPES, stand_in.WORK, stand_in.address_of, stand_in.memory_at

# What of CUDA the programs are written in.
BEFORE = """
#define __device__
#define __global__
static struct { unsigned x; } blockIdx, blockDim, threadIdx;
struct float2 { float x, y; };
struct double2 { double x, y; };
extern "C" double hypot(double, double); extern "C" float hypotf(float, float);
static inline float hypot(float x, float y) { return hypotf(x, y); }
template <class T> static T min(T a, T b) { return b < a ? b : a; }
template <class T> static T max(T a, T b) { return a < b ? b : a; }
"""
EACH = """
extern "C" void each_NAME(const Given* a, const Given* b, Given* out, long long n)
{
    for (long long k = 0; k < n; ++k) out[k] = NAME(a[k], b[k]);
}
"""
EACH_ROW = """
extern "C" void each_spmvop_epilogue(const Real* x, Real* out, long long n)
{
    for (long long k = 0; k < n; ++k) out[k] = spmvop_epilogue(int(k), x[k]);
}
"""


EACH_PLACE = """
extern "C" void each_empty_rows(
    unsigned blocks, unsigned threads, const INDEX* begins, Given* out, long long m, long long n)
{
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) empty_rows(begins, out, m, n);
}
"""


class Compiler:
    """Programs by their text, each compiled once in a folder."""

    def __init__(self, folder):
        self.folder = folder

    def compiled(self, source, function, options):
        assert function == "empty_rows" or {"-dlto", "-rdc=true", "-arch=sm_90"} <= set(options)
        defined = [each for each in options if each.startswith("-D")]
        name = self.folder / hashlib.sha256("\0".join([function, source, *defined]).encode()).hexdigest()
        if not Path(f"{name}.so").exists():
            others = {"spmvop_epilogue": EACH_ROW, "empty_rows": EACH_PLACE}
            behind = others.get(function) or EACH.replace("NAME", function)
            by_gcc.built(name, BEFORE + source + behind, "-std=c++17", *defined)
        return f"{name}.so".encode()


class Launches:
    """Kernels of ours, thread by thread."""

    def __init__(self, compiler):
        self.compiler, self.known = compiler, []

    def loaded(self, source, name, options, _device):
        path = self.compiler.compiled(source, name, options).decode()
        self.known.append(getattr(ctypes.CDLL(path), f"each_{name}"))
        return len(self.known)

    def launch(self, function, blocks, *rest):
        *extents, _, _, pointers, _ = rest
        assert (extents[:2], extents[3:]) == ([1, 1], [1, 1])
        kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        given = [kind.from_address(at) for kind, at in zip(kinds, pointers, strict=True)]
        self.known[function.value - 1](ctypes.c_uint(blocks), ctypes.c_uint(extents[2]), *given)
        return 0


def linked(pointer, length, function):
    """An operator of arrays, from the bytes that a plan is given for it."""
    assert length
    path = ctypes.string_at(address_of(pointer), length).decode()
    run = getattr(ctypes.CDLL(path), f"each_{function}")

    def operator(*arrays):
        arrays = [np.ascontiguousarray(array) for array in np.broadcast_arrays(*arrays)]
        out = np.empty_like(arrays[0])
        run(*(ctypes.c_void_p(one.ctypes.data) for one in (*arrays, out)), ctypes.c_longlong(out.size))
        return out

    return operator


class Library(stand_in.Library):
    """The stand-in with products that are compiled."""

    def _SpMMOp_createPlan(self, handle, plan, op_a, op_b, a, b, c, kind, algorithm, *rest):
        *codes, size = rest
        assert (int(op_a), int(op_b), int(algorithm)) == (0, 0, 0)
        a, b, c = (type(one)(**vars(one)) for one in map(self.of, (a, b, c)))  # as they are now
        assert a.format == stand_in.CSR
        assert len(set(a.kinds)) == 1
        assert a.value_type == b.value_type == c.value_type == int(kind)
        assert (a.m, a.n, b.n) == (c.m, b.m, c.n)
        assert a.nnz
        assert not any(one.values % 256 for one in (a, b, c))
        names = ("add_op", "mul_op", "epilogue")
        operators = {name: linked(*codes[2 * k : 2 * k + 2], name) for k, name in enumerate(names)}
        self.put(plan, SimpleNamespace(a=a, b=b, c=c, **operators))
        size._obj.value = WORK

    def _SpMMOp(self, plan, buffer):
        plan = self.of(plan)
        self.work_in(buffer)
        row, column, values = plan.a.places()
        right, out = plan.b.array(), plan.c.array()
        sums = np.zeros((2, *out.shape), out.dtype)  # of even elements and of odd ones
        for place, (i, k, value) in enumerate(zip(row, column, values, strict=True)):
            part = sums[place % 2]
            part[i] = plan.add_op(part[i], plan.mul_op(value, right[k]))
        some = np.unique(row)  # it leaves the others alone
        out[some] = plan.epilogue(plan.add_op(*sums)[some], out[some])

    def _SpMMOp_destroyPlan(self, plan):
        del self.alive[plan.value]

    _SpMVOp_destroyPlan = _SpMVOp_destroyDescr = _SpMMOp_destroyPlan

    def _SpMVOp_bufferSize(self, *given):
        given[-1]._obj.value = WORK

    def _SpMVOp_createDescr(self, handle, descriptor, op, a, x, y, z, kind, algorithm, buffer):
        assert (int(op), int(algorithm)) == (0, 0)
        a, x, y, z = map(self.of, (a, x, y, z))
        assert a.format == stand_in.CSR
        assert stand_in.INDICES[a.kinds[1]].itemsize == 4
        assert a.is_at_vectors()
        assert a.base == 0
        assert not any(one.values % 16 for one in (x, y, z))
        assert y.values != z.values
        assert a.value_type == x.value_type == y.value_type == z.value_type == int(kind)
        self.put(descriptor, SimpleNamespace(matrix=a, pattern=a.places()[:2], buffer=address_of(buffer)))
        memory_at(address_of(buffer), WORK)[...] = 7

    def _SpMVOp_createPlan(self, handle, descriptor, plan, code, length):
        epilogue = linked(code, length, "spmvop_epilogue") if length else lambda x: x
        self.put(plan, SimpleNamespace(of=self.of(descriptor), epilogue=epilogue))

    def _SpMVOp(self, handle, plan, alpha, beta, x, y, z):
        plan, x, y, z = map(self.of, (plan, x, y, z))
        assert (memory_at(plan.of.buffer, WORK) == 7).all(), "the analysis was overwritten"
        alpha, beta = (stand_in.number_at(one, z.value_type) for one in (alpha, beta))
        assert all(map(np.array_equal, plan.of.matrix.places()[:2], plan.of.pattern)), "the pattern is another"
        found = alpha * (plan.of.matrix.dense() @ x.array().astype(np.float64)) + beta * y.array()
        z.array()[...] = plan.epilogue(found.astype(z.array().dtype))


stand_in.Library = Library


def executor_of(monkeypatch, folder):
    """As the stand-in's, for plans with operators, too."""
    executor = stand_in.executor_of(monkeypatch)
    monkeypatch.setattr(compiled_product, "cusparse", executor.library)
    monkeypatch.setattr(compiled_product, "handle_of", stand_in.calls.handle_of)
    compiler = Compiler(folder)
    launches = Launches(compiler)
    monkeypatch.setattr(compiled_product, "compiled", compiler.compiled)
    monkeypatch.setattr(launching, "loaded", launches.loaded)
    monkeypatch.setattr(launching.driver, "cuLaunchKernel", SimpleNamespace(unchecked=launches.launch))
    monkeypatch.setattr(compiled_product, "why_not", lambda: "")
    executor.device.arch = "sm_90"
    return executor
