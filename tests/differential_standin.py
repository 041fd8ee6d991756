"""A stand-in for a GPU with cuBLASLt, on host memory: tests/differential.py runs all of matmul on it without a GPU.

Plans, descriptors, shortcuts, relocated graphs and refits are the real code. `cublasLtMatmul` is replaced by a product
in NumPy that believes nothing but what the library would be told: the attributes of real cuBLASLt descriptors, read
back, and addresses. Its results depend on the algorithm, and the algorithm on every part of the problem, so that a call
with the descriptors or the algorithm of another problem gives other numbers or writes other memory.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
import struct
import threading
import zlib
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind import driver
from cudabind.sys import cublasLt as lt
from dispatch.bind import refit
from dispatch.device.host import HostDevice
from dispatch.device.stream import DeviceStream, Stream
from dispatch.errors import Refused
from dispatch.execute.cuda_executor import CudaExecutor
from dispatch.execute.graph_nodes import KERNEL, Node
from dispatch.keys import Arch, Dtype
from dispatch.ops.matmul import cublaslt, empty

if TYPE_CHECKING:
    from collections.abc import Callable


DESC = lt.cublasLtMatmulDescAttributes_t
LAYOUT = lt.cublasLtMatrixLayoutAttribute_t
DTYPES = {dtype.cuda: dtype for dtype in Dtype.by_name.values()}
TOLD: dict[int, tuple[tuple[int, ...], int, int]] = {}  # what addresses of A to D, bias and aux are multiples of
REFUSES = 47  # one problem in so many has no algorithm


class NoContext(nullcontext):  # type: ignore[type-arg]
    def push(self) -> int:
        return 0

    def pop(self) -> None:
        pass


class StandinStream(DeviceStream):
    """All that is enqueued is done at once."""

    def __init__(self, device: Standin) -> None:
        super().__init__(device, next(device.handles), owned=False)
        self.external = False

    def synchronize(self) -> None:
        pass

    def done(self) -> bool:
        return True

    def wait_for(self, other: Stream) -> None:
        pass

    def wait_for_uses(self, other: Stream) -> None:
        pass

    def is_capturing(self) -> bool:
        return False


class Standin(HostDevice):
    """Host memory under the rows of an sm_90."""

    is_host = False
    context: Any

    def __init__(self) -> None:
        self.handles = itertools.count(1000)
        super().__init__(1)
        self.name, self.arch, self.context, self.model = "cuda:7", Arch(90), NoContext(), "stand-in"
        self._stream = self.stream()

    def stream(self) -> Stream:
        return StandinStream(self)

    def recycle(self, event: ctypes.c_void_p) -> None:
        pass


class Recorded:
    """A recorded call: what the library was told then, told again."""

    def __init__(self, jobs: list[Job]) -> None:
        self._jobs = jobs

    def launch(self) -> int:
        for job in self._jobs:
            job()
        return 0


class StandinExecutor(CudaExecutor):
    """An executor whose recordings keep what the library is told, and whose numbers and zeros lie in host memory."""

    versions = {"cublasLt": (13, 1, 0)}  # noqa: RUF012

    def capture(self, enqueue: Callable[[], None]) -> Any:
        return Recorded(_jobs(enqueue))

    def recorded(self, plan: Any, arguments: Any) -> Any:
        return _jobs(lambda: plan.enqueue(arguments))

    def launcher(self, executable: Any, _nodes: int) -> Callable[[], int]:
        return Recorded(graphs[executable.value]).launch

    def write(self, address: int, value: complex, dtype: Dtype) -> None:
        number = np.array(value, dtype.numpy)
        ctypes.memmove(address, number.ctypes.data, number.nbytes)


Standin.open_executor = StandinExecutor


def _jobs(enqueue: Callable[[], None]) -> list[Job]:
    """What the library is told to do."""
    recording.jobs = jobs = []
    try:
        enqueue()
    finally:
        recording.jobs = None
    return jobs


# -- executable graphs: the jobs of a recording, each of which does what its image says -------------------------------
graphs: dict[int, list[Job]] = {}
numbers = itertools.count(1)


class Nodes:
    """What graph_nodes.Nodes reads off a graph, of a list of jobs."""

    def __init__(self, jobs: list[Job], _sizes: Any) -> None:
        self.handles, self.edges = tuple(range(len(jobs))), ()
        self.nodes = [Node(KERNEL, job.form(), job.image()) for job in jobs]


def instantiated(jobs: list[Job]) -> int:
    """The handle of an executable graph."""
    number = next(numbers)
    graphs[number] = [copy.copy(job) for job in jobs]
    return number


def setter(executable: Any, handle: int, node: Node, image: int) -> tuple[Callable[[], int], None]:
    """What has a job do what its new image says."""
    job, size = graphs[executable.value][handle], len(node.image)

    def put() -> int:
        job.take(ctypes.string_at(image, size))
        return 0

    return put, None


class Recording(threading.local):
    """What this thread records at present."""

    jobs: list[Job] | None = None


recording = Recording()


def told(get: Any, descriptor: Any, attribute: int, kind: Any) -> Any:
    """One attribute of a descriptor, as the library has it."""
    value, size = kind(), ctypes.c_size_t()
    status = get.unchecked(descriptor, attribute, ctypes.byref(value), ctypes.sizeof(value), ctypes.byref(size))
    return value.value if status == 0 else None


class Laid:
    """A matrix layout, as the library has it."""

    def __init__(self, layout: Any) -> None:
        def get(name: str, kind: Any) -> int:
            return int(
                told(lt.cublasLtMatrixLayoutGetAttribute, layout, LAYOUT[f"CUBLASLT_MATRIX_LAYOUT_{name}"], kind)
            )

        self.dtype = DTYPES[get("TYPE", ctypes.c_uint32)]
        self.rows, self.cols = get("ROWS", ctypes.c_uint64), get("COLS", ctypes.c_uint64)
        self.ld, self.batch = get("LD", ctypes.c_int64), get("BATCH_COUNT", ctypes.c_int32)
        self.step = get("STRIDED_BATCH_OFFSET", ctypes.c_int64)

    def view(self, address: int) -> Any:
        """(batch, rows, columns) over memory."""
        strides = tuple(s * self.dtype.itemsize for s in (self.step, 1, self.ld))
        return _at(address, self.dtype, (self.batch, self.rows, self.cols), strides)


def _at(address: int, dtype: Dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """An array over memory; strides in bytes, all of them forward."""
    reach = sum((e - 1) * s for e, s in zip(shape, strides, strict=True)) + dtype.itemsize
    window = (ctypes.c_uint8 * reach).from_address(address)
    return np.ndarray(shape, dtype.numpy, memoryview(window), 0, strides)


class Job:
    """One product with all that the library was told when it was called."""

    def __init__(self, *given: Any) -> None:
        _, desc, alpha, a, la, b, lb, beta, c, lc, d, ld, algo, _, _, _ = given

        def get(name: str, kind: Any = ctypes.c_uint64) -> int:
            return int(told(lt.cublasLtMatmulDescGetAttribute, desc, DESC[f"CUBLASLT_MATMUL_DESC_{name}"], kind) or 0)

        self.a, self.b, self.c, self.d = (Laid(layout) for layout in (la, lb, lc, ld))
        self.places = (a.value, b.value, c.value, d.value)
        scale = DTYPES[get("SCALE_TYPE", ctypes.c_int32)]
        self.scale, self.on_device = scale, bool(on_device := get("POINTER_MODE", ctypes.c_int32))
        # Numbers on the host are read as the library is called, those on the device as it runs.
        self.bits = [
            struct.pack("<2Q", x.value, 0) if on_device else _at(x.value, scale, (), ()).tobytes().ljust(16, b"\0")
            for x in (alpha, beta)
        ]
        # As an H200's library: of a beta that it cannot see it must take it that C is read.
        self.is_refused = (on_device and not c.value) or (self.c.dtype != self.d.dtype and c.value == d.value)
        self.trans = get("TRANSA", ctypes.c_int32), get("TRANSB", ctypes.c_int32)
        self.epilogue = get("EPILOGUE", ctypes.c_uint32)
        self.bias, self.bias_step = get("BIAS_POINTER"), get("BIAS_BATCH_STRIDE", ctypes.c_int64)
        self.bias_dtype = get("BIAS_DATA_TYPE", ctypes.c_int32)
        self.aux, self.aux_ld = get("EPILOGUE_AUX_POINTER"), get("EPILOGUE_AUX_LD", ctypes.c_int64)
        self.aux_step = get("EPILOGUE_AUX_BATCH_STRIDE", ctypes.c_int64)
        self.aux_dtype = get("EPILOGUE_AUX_DATA_TYPE", ctypes.c_int32)
        self.factors = [get(f"{name}_SCALE_POINTER") for name in "ABCD"]
        self._check_aligned(algo._obj.data[0])
        self.turn = (algo._obj.data[0] % 8) / 16 if algo._obj.data[0] else 0.0

    def _check_aligned(self, algorithm: int) -> None:
        """A kernel reads as many bytes at once as the heuristic was told it may; else the device is lost."""
        matrices, bias, aux = TOLD[algorithm]
        given = [*zip(self.places, matrices, strict=True), (self.bias, bias), (self.aux, aux)]
        wrong = [
            f"{address:#x} is not at a multiple of {known}" for address, known in given if address and address % known
        ]
        assert not wrong, f"CUDA_ERROR_MISALIGNED_ADDRESS: {wrong}, {given}"

    def form(self) -> tuple[Any, ...]:
        """All but what the image has."""
        laid = [tuple(vars(matrix).values()) for matrix in (self.a, self.b, self.c, self.d)]
        steps = (self.bias_step, self.bias_dtype, self.aux_ld, self.aux_step, self.aux_dtype)
        return (*laid, self.scale, self.on_device, self.trans, self.epilogue, *steps, self.turn)

    def image(self) -> bytes:
        """Addresses, and the numbers or theirs."""
        addresses = (*(place or 0 for place in self.places), self.bias, self.aux, *self.factors)
        return struct.pack("<10Q", *addresses) + b"".join(self.bits)

    def take(self, image: bytes) -> None:
        """Have the addresses and numbers of another image."""
        *places, self.bias, self.aux, one, two, three, four = struct.unpack_from("<10Q", image)
        self.places, self.factors = tuple(places), [one, two, three, four]
        self.bits = [image[80:96], image[96:112]]

    @property
    def numbers(self) -> list[Any]:
        """Alpha and beta."""
        if self.on_device:
            return [_at(*struct.unpack_from("<Q", bits), self.scale, (), ()) for bits in self.bits]
        return [np.frombuffer(bits, self.scale.numpy, 1)[0] for bits in self.bits]

    def __call__(self) -> None:
        a, b = self.a.view(self.places[0]), self.b.view(self.places[1])
        a, b = (np.swapaxes(x, 1, 2) if t else x for x, t in zip((a, b), self.trans, strict=True))
        work = np.complex128 if self.a.dtype.is_complex else np.int64 if self.a.dtype.name == "i8" else np.float64
        a, b = a.astype(work), b.astype(work)
        total = (a @ b) * self.numbers[0].astype(work) * self._factor(0) * self._factor(1)
        if self.numbers[1] != 0:
            total = total + self.c.view(self.places[2]).astype(work) * self.numbers[1].astype(work)
        if work is not np.int64:
            total = total * (1 + self.turn)
        total = self._fused(total, a, b)
        with np.errstate(over="ignore", invalid="ignore"):
            self.d.view(self.places[3])[...] = total.astype(self.d.dtype.numpy)

    def _factor(self, number: int) -> Any:
        address = self.factors[number]
        return _at(address, Dtype.of("f32"), (), ()).astype(np.float64) if address else 1

    def _vector(self, extent: int) -> Any:
        dtype = DTYPES[self.bias_dtype]
        steps = (self.bias_step * dtype.itemsize, dtype.itemsize)
        return _at(self.bias, dtype, (self.d.batch, extent), steps)

    def _fused(self, total: Any, a: Any, b: Any) -> Any:
        e = self.epilogue
        if e & 4:
            total = total + self._vector(self.d.rows).astype(np.float64)[:, :, None]
        if e & (8 | 64):
            total = total * self._aux(relu=bool(e & 8))
        elif e & 128:
            self._keep(total, relu=bool(e & 2))
        if e & 2:
            total = np.maximum(total, 0)
        elif e & 32:
            total = total * np.tanh(total)  # some curve
        if e & 16:
            self._vector(self.d.rows)[...] = total.sum(axis=2)
        if e & 256:
            self._vector(self.d.rows)[...] = a.sum(axis=2)
        if e & 512:
            self._vector(self.d.cols)[...] = b.sum(axis=1)
        return total

    def _bits(self) -> Any:
        shape = (self.d.batch, self.d.cols, -(-self.d.rows // 8))
        return _at(self.aux, Dtype.of("u8"), shape, (self.aux_step // 8, self.aux_ld // 8, 1))

    def _values(self) -> Any:
        dtype = DTYPES[self.aux_dtype]
        steps = tuple(s * dtype.itemsize for s in (self.aux_step, 1, self.aux_ld))
        return _at(self.aux, dtype, (self.d.batch, self.d.rows, self.d.cols), steps)

    def _aux(self, *, relu: bool) -> Any:
        if not relu:
            return self._values().astype(np.float64)
        bits = np.unpackbits(self._bits(), axis=2, count=self.d.rows, bitorder="little")
        return np.swapaxes(bits, 1, 2).astype(np.float64)

    def _keep(self, total: Any, *, relu: bool) -> None:
        if relu:
            self._bits()[...] = np.packbits(np.swapaxes(total > 0, 1, 2), axis=2, bitorder="little")
        else:
            values = self._values()
            values[...] = total.astype(values.dtype)


def product(*given: Any) -> int:
    """`cublasLtMatmul`."""
    job = Job(*given)
    if job.is_refused:
        return int(lt.cublasStatus_t.CUBLAS_STATUS_INVALID_VALUE)
    if recording.jobs is not None:
        recording.jobs.append(job)
    else:
        job()
    return 0


def heuristic(_handle: Any, _descriptors: Any, problem: Any, workspace: int, _count: int = 1) -> list[Any]:
    """An algorithm that depends on all of a problem; some problems have none."""
    number = zlib.crc32(repr((problem, workspace)).encode())
    if number % REFUSES == 0:
        raise Refused("the stand-in's heuristic finds no algorithm")
    result = lt.cublasLtMatmulHeuristicResult_t()
    result.algo.data[0] = number
    matrices = tuple(matrix.alignment for matrix in (problem.a, problem.b, problem.c, problem.d))
    TOLD[number] = (matrices, problem.bias_alignment, problem.aux_alignment)
    return [result]


def _move(to: int, source: int, nbytes: int, _stream: int) -> None:
    ctypes.memmove(to, source, nbytes)


def _move_lines(copy: Any, _stream: int) -> None:
    assert min(copy.dstPitch, copy.srcPitch) >= copy.WidthInBytes, "CUDA_ERROR_INVALID_VALUE"
    for line in range(copy.Height):
        start, source = copy.dstDevice + line * copy.dstPitch, copy.srcDevice + line * copy.srcPitch
        ctypes.memmove(start, source, copy.WidthInBytes)


def _set(address: int, value: int, nbytes: int, _stream: int) -> None:
    ctypes.memset(address, value, nbytes)


def _gone(_handle: Any) -> int:
    return 0


DRIVER = SimpleNamespace(
    cuGraphDestroy=SimpleNamespace(unchecked=_gone),
    cuGraphExecDestroy=SimpleNamespace(unchecked=lambda handle: graphs.pop(handle.value, None) and 0),
    cuMemcpyDtoDAsync=_move,
    cuMemcpy2DAsync=_move_lines,
    cuMemsetD8Async=_set,
    CUDA_MEMCPY2D=SimpleNamespace,
    CUmemorytype=driver.CUmemorytype,
)


def install(patch: Callable[[Any, str, Any], None]) -> None:
    """Put the stand-in where the real libraries are called; `patch` is pytest's `monkeypatch.setattr`, or `setattr`."""
    from dispatch.execute import cuda_executor, learner, plan_relocation, relocated_graph

    patch(cublaslt, "heuristic", heuristic)
    patch(cublaslt, "handle_of", lambda _: None)
    patch(cublaslt, "_bare_matmul", lambda: product)
    for module in (empty, refit, cuda_executor, learner, relocated_graph):
        patch(module, "driver", DRIVER)
    patch(learner, "Nodes", Nodes)
    patch(learner, "instantiated", instantiated)
    patch(plan_relocation, "FIRST", 2)  # soon
    patch(plan_relocation, "EVERY", 1)
    patch(relocated_graph, "setter", setter)
