"""cuFFT's plans over several GPUs (Xt) by NumPy, over the memory of a stand-in for the driver (stand_in.py).

It is as strict as the library was seen to be with CUDA 13.0: one transform along one axis takes no result of another,
a plan for R2C none of C2R, memory of cuFFT goes once, and before its plan. Each call leaves the last GPU's context as
the current one. What a transform finds in use on a stream that its own is not behind is noted in `early`.
"""

import ctypes
from collections import Counter
from itertools import count, permutations
from types import SimpleNamespace

import numpy as np

from cudabind.sys import cufft
from dispatch.keys import C64, C128, F32, F64
from dispatch.libraries.cufft.xt_layouts import Factors, Problem, layouts_of

DTYPES = {0: F32, 1: F64, 4: C64, 5: C128}
NATURAL = cufft.cufftXtSubFormat.CUFFT_XT_FORMAT_INPLACE
SHUFFLED = cufft.cufftXtSubFormat.CUFFT_XT_FORMAT_INPLACE_SHUFFLED
RESULTS = cufft.cufftResult


class Call:
    def __init__(self, library, name, function):
        self.library, self.name, self.function = library, name, function

    def __call__(self, *arguments):
        status = self.unchecked(*arguments)
        if status:
            raise self.error(status)

    def unchecked(self, *arguments):
        library = self.library
        library.called.append(self.name)
        library.driver.stack[-1] = library.driver.contexts[-1]  # as cudaSetDevice leaves it
        if self.name in library.failing:
            return library.failing.pop(self.name)
        arguments = [one.value if isinstance(one, (ctypes.c_int, ctypes.c_void_p)) else one for one in arguments]
        return int(self.function(*arguments) or 0)

    def error(self, status):
        return getattr(cufft, self.name).error(status)


class Library:
    """The functions of cuFFT that plans over several GPUs call; types and constants are its own."""

    def __init__(self, driver):
        self.driver, self.plans, self.numbers = driver, {}, count(1)
        self.descriptors, self.called, self.failing, self.early = {}, [], {}, []
        self.strings = 4  # of a result along one axis
        self.peers = set()  # pairs of contexts, of which the first may use the other's memory

    def __getattr__(self, name):
        if not name.startswith("cufft") or not hasattr(type(self), f"_{name.removeprefix('cufft')}"):
            return getattr(cufft, name)
        function = Call(self, name, getattr(self, f"_{name.removeprefix('cufft')}"))
        setattr(self, name, function)
        return function

    def _Create(self, pointer):
        pointer._obj.value = next(self.numbers)
        self.plans[pointer._obj.value] = SimpleNamespace(gpus=None, stream=None, problem=None, held=0)

    def _Destroy(self, handle):
        assert not self.plans[handle].held, "memory goes before its plan"
        self.peers -= self.pairs(self.plans.pop(handle))  # nothing says that it does not

    def pairs(self, plan):
        return set(permutations({self.driver.contexts[gpu] for gpu in plan.gpus or ()}, 2))

    def _SetStream(self, handle, stream):
        self.plans[handle].stream = int(stream.value if hasattr(stream, "value") else stream)

    def _XtSetGPUs(self, handle, number, gpus):
        self.plans[handle].gpus = list(gpus)[:number]
        self.peers |= self.pairs(self.plans[handle])

    def _XtMakePlanMany(self, handle, rank, sizes, *rest):
        in_embed, _, _, in_type, out_embed, _, _, out_type, batch, work, execution = rest
        plan = self.plans[handle]
        assert (in_embed, out_embed, len(work), len(sizes)) == (None, None, len(plan.gpus), rank)
        given, wanted = DTYPES[int(in_type)], DTYPES[int(out_type)]
        real, spectrum = sorted((given, wanted), key=lambda dtype: dtype.is_complex)
        assert DTYPES[int(execution)] is spectrum
        plan.inverse = spectrum is given and real is wanted and real is not spectrum
        plan.problem = Problem(tuple(sizes), batch, real, spectrum)
        factors = None
        if plan.problem.in_strings:
            factor2 = 1 << (sizes[0].bit_length() - 1) // 2
            factors = Factors(factor2, self.strings, sizes[0] // factor2 // self.strings)
        plan.factors, (plan.signal, plan.spectrum) = factors, layouts_of(plan.problem, factors, len(plan.gpus))

    def _XtQueryPlan(self, handle, pointer, _):
        found, factors = pointer._obj, self.plans[handle].factors
        found.factor2, found.stringCount, found.substringLength = factors

    def _XtMalloc(self, handle, pointer, form):
        plan, driver = self.plans[handle], self.driver
        outer, inner = cufft.cudaLibXtDesc(), cufft.cudaXtDesc()
        every = [*plan.signal, *plan.spectrum]
        for number, gpu in enumerate(plan.gpus):
            size = max(one.parts[number].nbytes(one.dtype) for one in every)
            block = (ctypes.c_uint8 * (size + 256))(*[0xFF] * (size + 256))
            base = (ctypes.addressof(block) + 255) // 256 * 256
            driver.memory[base] = block, size, driver.contexts[gpu]
            driver.fresh.add(base)
            inner.GPUs[number], inner.data[number], inner.size[number] = gpu, base, size
        inner.nGPUs, outer.subFormat, outer.descriptor = len(plan.gpus), int(form), ctypes.addressof(inner)
        self.descriptors[ctypes.addressof(outer)] = outer, inner, plan
        plan.held += 1
        pointer._obj.value = ctypes.addressof(outer)

    def _XtFree(self, pointer):
        _, inner, plan = self.descriptors.pop(ctypes.addressof(pointer._obj))
        plan.held -= 1
        for number in range(inner.nGPUs):
            self.look([inner.data[number]], self.driver.host)
            del self.driver.memory[inner.data[number]]

    def look(self, bases, behind):
        """Note memory that something uses which is not behind."""
        for base in bases:
            for identity, number in self.driver.uses.get(base, {}).items():
                if behind[identity] < number:
                    self.early.append(base)

    def arrays(self, inner, layout):
        made = []
        for number, part in enumerate(layout.parts):
            flat = np.frombuffer((ctypes.c_char * inner.size[number]).from_address(inner.data[number]), np.uint8)
            steps = tuple(step * layout.dtype.itemsize for step in part.steps)
            made.append(np.ndarray(part.extents, layout.dtype.numpy, flat, 0, steps))
        return made

    def gathered(self, inner, layout):
        whole = np.empty(layout.shape, layout.dtype.numpy)
        for piece, array in zip(layout.pieces(whole), self.arrays(inner, layout), strict=True):
            piece[...] = array
        return whole

    def scattered(self, inner, layout, whole):
        for piece, array in zip(layout.pieces(whole), self.arrays(inner, layout), strict=True):
            array[...] = piece

    def _XtExecDescriptor(self, handle, given, wanted, direction):
        plan, outer = self.plans[handle], given._obj
        assert outer is wanted._obj
        assert self.pairs(plan) <= self.peers, "GPUs that do not see one another's memory"
        problem, inner = plan.problem, self.descriptors[ctypes.addressof(outer)][1]
        is_shuffled = outer.subFormat == SHUFFLED
        if problem.in_strings and is_shuffled:
            return RESULTS.CUFFT_INVALID_TYPE
        inverse = plan.inverse if problem.is_real else direction == cufft.CUFFT_INVERSE
        sides = (plan.spectrum, plan.signal) if inverse else (plan.signal, plan.spectrum)
        if problem.is_real and problem.batch == 1 and is_shuffled != inverse:
            return RESULTS.CUFFT_INVALID_TYPE
        self.look(inner.data[: inner.nGPUs], self.driver.clock(plan.stream))
        values = self.gathered(inner, sides[0][is_shuffled])
        axes = tuple(range(-len(problem.sizes), 0))
        if problem.is_real:
            found = (
                np.fft.irfftn(values, problem.sizes, axes, "forward") if inverse else np.fft.rfftn(values, axes=axes)
            )
        else:
            found = np.fft.ifftn(values, axes=axes, norm="forward") if inverse else np.fft.fftn(values, axes=axes)
        if problem.batch == 1:
            outer.subFormat = int(NATURAL if is_shuffled else SHUFFLED)
        for number in range(inner.nGPUs):
            ctypes.memset(inner.data[number], 0xFF, inner.size[number])  # what is padding means nothing
        self.scattered(inner, sides[1][problem.batch == 1 and not is_shuffled], found)
        self.driver.step(plan.stream, *inner.data[: inner.nGPUs])
        return 0

    def _XtMemcpy(self, handle, target, source, kind):
        """Into natural order, as the host waits."""
        assert kind == cufft.cufftXtCopyType.CUFFT_COPY_DEVICE_TO_DEVICE
        plan, (to, inner, _), (given, other, _) = self.plans[handle], *map(self.descriptors.get, (target, source))
        if to.subFormat != NATURAL:
            return RESULTS.CUFFT_INTERNAL_ERROR
        for one in (inner, other):
            self.look(one.data[: one.nGPUs], self.driver.host)
        whole = self.gathered(other, plan.spectrum[given.subFormat == SHUFFLED])
        self.scattered(inner, plan.signal[0], whole)
        return 0


def install(monkeypatch, driver, modules):
    """Have the driver's stand-in copy between GPUs, and a Library over it be the modules' cuFFT."""

    def wait(handle, event, _):  # an event of another context may be waited for
        own, (clock, capture) = driver.clock(handle), driver.events.get(event, (Counter(), None))
        assert capture is None
        own.update(clock - own)
        return 0, None

    def rows(copy, handle, contexts):
        target, source = int(copy.dstDevice), int(copy.srcDevice)
        assert (driver.lies_in(target), driver.lies_in(source)) == contexts
        assert min(copy.dstPitch, copy.srcPitch) >= copy.WidthInBytes
        driver.step(handle, target, source)
        for row in range(copy.Height):
            at = target + row * copy.dstPitch, source + row * copy.srcPitch
            ctypes.memmove(*at, copy.WidthInBytes)
        return 0, None

    def pitched(copy, handle):
        return rows(copy, handle, (driver.current, driver.current))

    def pitched_peer(copy, handle):
        assert copy.Depth == 1
        assert min(copy.srcHeight, copy.dstHeight) >= copy.Height
        return rows(copy, handle, (int(copy.dstContext), int(copy.srcContext)))

    def dense_peer(target, to, source, at, size, handle):
        assert (driver.lies_in(target), driver.lies_in(source)) == (to, at)
        driver.step(handle, target, source)
        ctypes.memmove(target, source, size)
        return 0, None

    def enable(other, flags):
        assert (other != driver.current, flags) == (True, 0)
        library.peers.add((driver.current, other))
        return 0, None

    functions = {
        "cuCtxEnablePeerAccess": enable,
        "cuStreamWaitEvent": wait,
        "cuMemcpy2DAsync": pitched_host(driver, pitched),
        "cuMemcpy3DPeerAsync": pitched_peer,
        "cuMemcpyPeerAsync": dense_peer,
    }
    for name, function in functions.items():
        monkeypatch.setattr(driver, f"_{name}", function, raising=False)
    library = Library(driver)
    for module in modules:
        monkeypatch.setattr(module, "cufft", library)
    return library


def pitched_host(driver, within):
    """Copies of rows between a device and the host, and those within a device."""

    def copy(call, handle):
        kinds = driver.CUmemorytype
        sides = call.dstMemoryType, call.srcMemoryType
        if sides == (kinds.CU_MEMORYTYPE_DEVICE, kinds.CU_MEMORYTYPE_DEVICE):
            return within(call, handle)
        into = sides[0] == kinds.CU_MEMORYTYPE_DEVICE
        target = int(call.dstDevice) if into else int(call.dstHost)
        source = int(call.srcHost) if into else int(call.srcDevice)
        driver.step(handle, target if into else source)
        for row in range(call.Height):
            ctypes.memmove(target + row * call.dstPitch, source + row * call.srcPitch, call.WidthInBytes)
        return 0, None

    return copy
