"""cuFFT over memory of the host, by NumPy, and the kernels around its transforms by g++: plans run without a GPU.

It is as strict as the library, and as rude: C2R overwrites what it reads, and every transform what it works in.
"""

import ctypes
import importlib.util
import re
import sys
from collections import defaultdict, deque
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from cudabind.sys import cufft
from dispatch.libraries.cufft import callbacks, transforms
from dispatch.libraries.nvrtc import launching
from dispatch.libraries.nvrtc.number_types import NUMBERS

spec = importlib.util.spec_from_file_location("by_gcc", Path(__file__).with_name("by_gcc.py"))
by_gcc = importlib.util.module_from_spec(spec)
spec.loader.exec_module(by_gcc)

COMPLEX = {4: np.complex64, 5: np.complex128}
KINDS = {**COMPLEX, 0: np.float32, 1: np.float64}
WORK = 1024  # bytes that every plan works in
WORKSPACE = 1 << 14  # bytes: some requests need more


def strided(address, dtype, shape, strides):
    """An array over memory; strides in elements, none below 0."""
    size = np.dtype(dtype).itemsize
    reach = (1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))) * size
    flat = np.frombuffer((ctypes.c_char * reach).from_address(address), np.uint8)
    return np.ndarray(shape, dtype, flat, 0, tuple(stride * size for stride in strides))


class Memory:
    """Memory of a device that holds NaN."""

    def __init__(self, nbytes):
        self.array = np.full(nbytes + 256, 0xFF, np.uint8)
        self.base = -(-self.array.ctypes.data // 256) * 256
        self.nbytes, self.c_ptr = nbytes, ctypes.c_void_p(self.base)
        self.owner = self.writer = None


class Call:
    def __init__(self, function):
        self.function = function

    def __call__(self, *arguments):
        status = self.unchecked(*arguments)
        if status:
            raise self.error(status)

    def unchecked(self, *arguments):
        return self.function(*arguments) or 0

    def error(self, status):
        return cufft.cufftXtExec.error(status)


class Library:
    """The functions of cuFFT that plans call."""

    CUFFT_FORWARD, CUFFT_INVERSE = cufft.CUFFT_FORWARD, cufft.CUFFT_INVERSE
    cudaDataType_t, cudaStream_t = cufft.cudaDataType_t, cufft.cudaStream_t
    cufftXtCallbackType, cufftType_t = cufft.cufftXtCallbackType, cufft.cufftType_t

    def __init__(self):
        self.plans, self.numbers, self.executed = {}, count(1), []
        self.destroyed, self.refused = [], set()
        self.takes_callbacks, self.called = True, []  # the names of callbacks that were called

    def __getattr__(self, name):
        assert hasattr(cufft, name)
        function = Call(getattr(self, f"_{name.removeprefix('cufft')}"))
        setattr(self, name, function)
        return function

    def _Create(self, pointer):
        pointer._obj.value = next(self.numbers)
        self.plans[pointer._obj.value] = SimpleNamespace(
            work=None, stream=None, allocates=True, sides=None, callbacks={}
        )

    def _Destroy(self, handle):
        self.destroyed.append(handle)
        del self.plans[handle]

    def _SetAutoAllocation(self, handle, allocates):
        self.plans[handle].allocates = bool(allocates)

    def _SetWorkArea(self, handle, address):
        assert address % 256 == 0
        self.plans[handle].work = address

    def _SetStream(self, handle, stream):
        self.plans[handle].stream = stream.value

    def _XtMakePlanMany(self, handle, rank, sizes, *rest):
        in_embed, in_stride, in_dist, in_type, out_embed, out_stride, out_dist, out_type, batch, work, execution = rest
        plan = self.plans[handle]
        assert not plan.allocates
        assert 1 <= rank <= 3
        assert min(in_stride, out_stride, in_dist, out_dist, batch, *sizes) > 0
        if tuple(sizes) in self.refused or execution not in COMPLEX:
            return cufft.cufftResult.CUFFT_NOT_SUPPORTED
        if plan.callbacks and not self.takes_callbacks:
            return cufft.cufftResult.CUFFT_INTERNAL_ERROR
        wanted = {side.value: kind for side, kind in zip(SIDES, (in_type, out_type), strict=True)}
        for callback in plan.callbacks.values():
            assert lasts(callback.told)
            assert CALLBACKS[callback.kind] == (callback.side, KINDS[int(wanted[callback.side])])
        half = (*list(sizes)[:-1], sizes[rank - 1] // 2 + 1)
        plan.sizes, plan.execution = tuple(sizes), int(execution)
        plan.sides = []
        for embed, stride, dist, kind in (
            (in_embed, in_stride, in_dist, in_type),
            (out_embed, out_stride, out_dist, out_type),
        ):
            other = out_type if kind is in_type else in_type
            extents = half if kind in COMPLEX and other not in COMPLEX else tuple(sizes)
            assert all(least <= most for least, most in zip(extents[1:], list(embed)[1:], strict=True))
            steps_of = [stride]
            for extent in reversed(list(embed)[1:]):
                steps_of.insert(0, steps_of[0] * extent)
            plan.sides.append((KINDS[int(kind)], (batch, *extents), (dist, *steps_of)))
        work._obj.value = WORK
        return 0

    def _MakePlan1d(self, handle, n, kind, batch, work):
        """Dense transforms of numbers in 32 bits."""
        assert max(n, batch, n * batch) < 2**31
        given, wanted = BASIC[cufft.cufftType_t(kind).name[6:]]
        dense = [
            n // 2 + 1 if one in COMPLEX and one != other else n for one, other in ((given, wanted), (wanted, given))
        ]
        sides = ([n], 1, dense[0], given), ([n], 1, dense[1], wanted)
        execution = wanted if wanted in COMPLEX else given
        return self._XtMakePlanMany(handle, 1, [n], *sides[0], *sides[1], batch, work, execution)

    def _XtExec(self, handle, source, target, direction):
        plan = self.plans[handle]
        size = np.dtype(COMPLEX[plan.execution]).itemsize
        assert source % size == target % size == 0, "the library takes addresses of complex numbers"
        ctypes.memset(plan.work, 0xFF, WORK)
        self.executed.append(plan.sizes)
        if plan.callbacks:
            return self._execute_through(plan, source, target, direction)
        read, written = (strided(at, *side) for at, side in zip((source, target), plan.sides, strict=True))
        self._transform(plan, read, written, direction)
        self._spoil_gaps(plan, target)
        return 0

    def _spoil_gaps(self, plan, target):
        """As seen of cuFFT 12.0: C2R works in the lines of its result if half a spectrum exactly fits into each."""
        kind, made, steps = plan.sides[1]
        room, n = 2 * (made[-1] // 2 + 1), made[-1]
        if kind in (np.float32, np.float64) and len(made) > 1 and made[-2] > 1 and steps[-2] == room * steps[-1]:
            strided(target, kind, (*made[:-1], room), steps)[..., n:] = np.nan

    def _execute_through(self, plan, source, target, direction):
        """All is read before, and cuFFT's own memory is spoilt in between: the output, and the input of C2R."""
        load, store = plan.callbacks.get("load"), plan.callbacks.get("store")
        assert all(lasts(callback.told) for callback in plan.callbacks.values())
        (kind, shape, steps), (other, made, behind) = plan.sides
        read = np.empty(shape, kind)
        if load is None:
            read[...] = strided(source, *plan.sides[0])
        else:
            self.called.append(load.symbol)
            load.run(source, offsets(shape, steps), read)
        written = np.empty(made, other)
        if other in (np.float32, np.float64):
            strided(source, *plan.sides[0])[...] = np.nan
        if source != target or (other in COMPLEX.values() and kind in COMPLEX.values()):
            strided(target, *plan.sides[1])[...] = np.nan
        self._transform(plan, read, written, direction)
        if store is None:
            strided(target, *plan.sides[1])[...] = written
        else:
            self.called.append(store.symbol)
            store.run(target, offsets(made, behind), written)
        return 0

    def _GetVersion(self, pointer):
        pointer._obj.value = 12500

    def _XtSetJITCallback(self, handle, symbol, code, size, kind, at):
        """Between the making of a handle and that of its plan, once for each side. Nothing is copied."""
        plan, (side, _) = self.plans[handle], CALLBACKS[int(kind)]
        assert plan.sides is None
        assert side not in plan.callbacks
        assert len(code) == size
        library = ctypes.CDLL(code.decode())
        run = getattr(library, f"each_{symbol.decode()}")
        told = [symbol, code, at]

        def call(data, places, values):
            flat = np.ascontiguousarray(values).reshape(-1)
            run(*map(ctypes.c_void_p, (data, places.ctypes.data, places.size, told[2][0], flat.ctypes.data)))
            values[...] = flat.reshape(values.shape)

        plan.callbacks[side] = SimpleNamespace(side=side, kind=int(kind), symbol=symbol.decode(), run=call, told=told)

    @staticmethod
    def _transform(plan, read, written, direction):
        given, axes = read.copy(), tuple(range(1, read.ndim))
        if read.dtype.kind == "f":
            written[...] = np.fft.rfftn(given, plan.sizes, axes)
        elif written.dtype.kind == "f":
            read[...] = np.nan
            written[...] = np.fft.irfftn(given, plan.sizes, axes, norm="forward")
        elif direction == cufft.CUFFT_FORWARD:
            written[...] = np.fft.fftn(given, plan.sizes, axes)
        else:
            assert direction == cufft.CUFFT_INVERSE
            written[...] = np.fft.ifftn(given, plan.sizes, axes, norm="forward")


def lasts(told):
    """Whether what cuFFT keeps pointers to is there because of its caller, not of this list."""
    return all(sys.getrefcount(told[place]) > 2 for place in range(len(told)))


def offsets(shape, steps):
    """Where each element lies, in elements, in an order that nobody should count on."""
    places = sum(np.arange(n).reshape(-1, *(1,) * (len(shape) - 1 - k)) * steps[k] for k, n in enumerate(shape))
    return np.ascontiguousarray(np.broadcast_to(places, shape).reshape(-1).astype(np.uint64))


BASIC = {"C2C": (4, 4), "R2C": (0, 4), "C2R": (4, 0), "Z2Z": (5, 5), "D2Z": (1, 5), "Z2D": (5, 1)}  # cudaDataType_t
SIDES = (SimpleNamespace(value="load"), SimpleNamespace(value="store"))
CALLBACKS = dict(
    enumerate((side, kind) for side in ("load", "store") for kind in (*COMPLEX.values(), np.float32, np.float64))
)
# What of CUDA callbacks are written in.
CALLBACK_BEFORE = """
#undef __device__
#define __device__
struct float2 { float x, y; };
struct double2 { double x, y; };
extern "C" double hypot(double, double); extern "C" float hypotf(float, float);
static inline float hypot(float x, float y) { return hypotf(x, y); }
FOR_FLOAT_TOO(sqrt)
FOR_FLOAT_TOO(rint)
FOR_FLOAT_TOO(cos)
FOR_FLOAT_TOO(sin)
"""
EACH = {
    "dispatch_load": """
extern "C" void each_dispatch_load(void* data, const unsigned long long* at, unsigned long long n, void* info, PAIR* y)
{
    for (unsigned long long k = n; k-- > 0;) y[k] = dispatch_load(data, at[k], info, nullptr);
}
""",
    "dispatch_store": """
extern "C" void each_dispatch_store(void* data, const unsigned long long* at, unsigned long long n, void* info, PAIR* y)
{
    for (unsigned long long k = n; k-- > 0;) dispatch_store(data, at[k], y[k], info, nullptr);
}
""",
}
PASSES = {
    "load_pass": "load_pass(*(const Stored**)p[0], *(Number**)p[1], *(long long*)p[2], *(Block*)p[3]);",
    "store_pass": "store_pass(*(const Number**)p[0], *(Stored**)p[1], *(long long*)p[2], *(Block*)p[3]);",
    "write_words": "write_words(*(Blocks**)p[0], *(Blocks*)p[1]);",
}
LAUNCHED = """
extern "C" void run_NAME(unsigned blocks, unsigned threads, void** p)
{
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) { CALL }
}
"""
TURNS = """
const double pi = 3.14159265358979323846;
template <class T> static void turned(double x, T* sine, T* cosine)
{
    *sine = T(__builtin_sin(pi * x));
    *cosine = T(__builtin_cos(pi * x));
}
static void sincospi(double x, double* sine, double* cosine) { turned(x, sine, cosine); }
static void sincospif(float x, float* sine, float* cosine) { turned(x, sine, cosine); }
"""
BEHIND = """
extern "C" void run_NAME(unsigned blocks, const void* source, void* target, const void* factors, const void* work)
{
    blockDim.x = 256;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < 256; ++threadIdx.x)
            CALL *(const Work*)work);
}
"""
CALLS = {
    "fold": "fold((const Number*)source, (Folded*)target,",
    "unfold": "unfold((const Found*)source, (REAL*)target,",
    "move": "move((const Given*)source, (Made*)target, (const Factor*)factors,",
    "roll": "roll((const Element*)source, (Element*)target,",
}


def calls_of(source):
    return "".join(
        BEHIND.replace("NAME", name).replace("CALL", CALLS[name]) for name in CALLS if f"void {name}(" in source
    )


class Kernels:
    """Kernels by their source and options, each compiled once; `before` is what they find on the CPU."""

    def __init__(self, folder, before):
        self.folder, self.before, self.known, self.numbers = folder, before, {}, []

    def loaded(self, source, function, options, device):
        if function not in CALLS:
            return self.numbered(getattr(ctypes.CDLL(self.callback(source, function)), f"run_{function}"))
        key = source, options
        if key not in self.known:
            name = self.folder / f"move{len(self.known)}"
            text = self.before + TURNS + source.replace(NUMBERS, "") + calls_of(source)
            self.known[key] = ctypes.CDLL(by_gcc.built(name, text, *options))
        return self.numbered(getattr(self.known[key], f"run_{function}"))

    def numbered(self, run):
        """Which one a kernel is, from 1 on."""
        if run not in self.numbers:
            self.numbers.append(run)
        return 1 + self.numbers.index(run)

    def callback(self, source, function):
        """The file that a program of a callback, or of what writes for it, is compiled to."""
        key = source, "callback"
        if key not in self.known:
            name = self.folder / f"callback{len(self.known)}"
            pair = re.search(r"(\w+) (?:dispatch_load\(|y, void\* info)", source)
            behind = "".join(text.replace("PAIR", pair.group(1)) for one, text in EACH.items() if one in source)
            for one, call in PASSES.items():
                if f"void {one}(" in source:
                    behind += LAUNCHED.replace("NAME", one).replace("CALL", call)
            text = self.before + CALLBACK_BEFORE + source + behind
            self.known[key] = by_gcc.built(name, text, "-std=c++17")
        return self.known[key]

    def compiled(self, source, function, options):
        """What NVRTC gives of a callback."""
        assert "-dlto" in options
        return self.callback(source, function).encode()

    def launch(self, function, *rest):
        blocks, _, _, threads, _, _, shared, _, pointers, _ = rest
        run = self.numbers[function.value - 1]
        assert shared == 0
        if run.__name__.removeprefix("run_") not in CALLS:
            run(blocks, threads, pointers)
            return 0
        assert threads == 256
        *operands, work = pointers
        source, target, *factors = map(ctypes.c_void_p.from_address, operands)
        run(blocks, source, target, *(factors or [None]), ctypes.c_void_p(work))
        return 0


def executor_of(monkeypatch, kernels):
    """What plans are made for, with the `library`; `monkeypatch` puts this file in the library's place."""
    library = Library()
    monkeypatch.setattr(transforms, "cufft", library)
    monkeypatch.setattr(launching, "loaded", kernels.loaded)
    monkeypatch.setattr(launching, "driver", SimpleNamespace(cuLaunchKernel=SimpleNamespace(unchecked=kernels.launch)))
    monkeypatch.setattr(callbacks, "cufft", library)
    monkeypatch.setattr(callbacks, "compiled", kernels.compiled)
    callbacks.why_not.cache_clear()
    stream = SimpleNamespace(wait_for_uses=lambda _: None)
    device = SimpleNamespace(
        idle=defaultdict(deque),
        releases=SimpleNamespace(side=stream),
        fault=None,
        alive=True,
        arch="sm_90",
        allocate=lambda nbytes, _: Memory(nbytes),
    )
    made = SimpleNamespace(
        device=device, stream=stream, target=ctypes.c_void_p(7), handles={}, workspace=Memory(WORKSPACE), forgotten=[]
    )
    made.forget = lambda: made.forgotten.append(True)
    made.library = library
    return made
