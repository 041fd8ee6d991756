"""cuFFT over memory of the host, by NumPy, and the kernels around its transforms by g++: plans run without a GPU.

It is as strict as the library, and as rude: C2R overwrites what it reads, and every transform what it works in.
"""

import ctypes
import subprocess
from collections import defaultdict, deque
from itertools import count
from types import SimpleNamespace

import numpy as np

from cudabind.sys import cufft
from dispatch.libraries.cufft import cosines, moves, transforms
from dispatch.libraries.nvrtc.number_types import NUMBERS

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

    def __init__(self):
        self.plans, self.numbers, self.executed = {}, count(1), []
        self.destroyed, self.refused = [], set()

    def __getattr__(self, name):
        assert hasattr(cufft, name)
        function = Call(getattr(self, f"_{name.removeprefix('cufft')}"))
        setattr(self, name, function)
        return function

    def _Create(self, pointer):
        pointer._obj.value = next(self.numbers)
        self.plans[pointer._obj.value] = SimpleNamespace(work=None, stream=None, allocates=True)

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
        assert execution in COMPLEX
        if tuple(sizes) in self.refused:
            return cufft.cufftResult.CUFFT_NOT_SUPPORTED
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

    def _XtExec(self, handle, source, target, direction):
        plan = self.plans[handle]
        size = np.dtype(COMPLEX[plan.execution]).itemsize
        assert source % size == target % size == 0, "the library takes addresses of complex numbers"
        ctypes.memset(plan.work, 0xFF, WORK)
        read, written = (strided(at, *side) for at, side in zip((source, target), plan.sides, strict=True))
        self.executed.append(plan.sizes)
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
        return 0


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
        key = source, options
        if key not in self.known:
            name = self.folder / f"move{len(self.known)}"
            name.with_suffix(".cpp").write_text(self.before + TURNS + source.replace(NUMBERS, "") + calls_of(source))
            sanitized = ("-fsanitize=undefined", "-fno-sanitize-recover=all", "-static-libubsan")
            command = ["g++", *options, *sanitized, "-shared", "-fPIC", f"{name}.cpp", "-o", f"{name}.so"]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[:2000]
            self.known[key] = ctypes.CDLL(f"{name}.so")
        run = getattr(self.known[key], f"run_{function}")
        if run not in self.numbers:
            self.numbers.append(run)
        return 1 + self.numbers.index(run)

    def launch(self, function, *rest):
        blocks, _, _, threads, _, _, shared, _, pointers, _ = rest
        assert (threads, shared) == (256, 0)
        *operands, work = pointers
        source, target, *factors = map(ctypes.c_void_p.from_address, operands)
        self.numbers[function.value - 1](blocks, source, target, *(factors or [None]), ctypes.c_void_p(work))
        return 0


def executor_of(monkeypatch, kernels):
    """What plans are made for, with the `library`; `monkeypatch` puts this file in the library's place."""
    library = Library()
    monkeypatch.setattr(transforms, "cufft", library)
    launch = SimpleNamespace(unchecked=kernels.launch)
    for module in (cosines, moves):
        monkeypatch.setattr(module, "loaded", kernels.loaded)
        monkeypatch.setattr(module, "driver", SimpleNamespace(cuLaunchKernel=launch))
    stream = SimpleNamespace(wait_for_uses=lambda _: None)
    device = SimpleNamespace(
        idle=defaultdict(deque),
        releases=SimpleNamespace(side=stream),
        fault=None,
        alive=True,
        allocate=lambda nbytes, _: Memory(nbytes),
    )
    made = SimpleNamespace(
        device=device, stream=stream, target=ctypes.c_void_p(7), handles={}, workspace=Memory(WORKSPACE), forgotten=[]
    )
    made.forget = lambda: made.forgotten.append(True)
    made.library = library
    return made
