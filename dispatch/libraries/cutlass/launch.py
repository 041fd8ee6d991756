"""A compiled kernel on a GPU: its module, its launch configuration, and the launch itself.

The plans of `dispatch.ops` hold a Launch. `fill` runs for each set of extents, on the executor's stream, and is waited
for. After that, the host writes the parameters of a launch and calls `cuLaunchKernelEx`.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from cudabind import driver
from dispatch.device.disposal import load_kernel
from dispatch.errors import Refused
from dispatch.keys import U8
from dispatch.libraries.cutlass.params import ALIGNED, Template, stand_ins
from dispatch.refusal import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dispatch.device.cuda import CudaDevice
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cutlass.visitors import Word

__all__ = ["Launch", "Module", "module"]

MAX_PARAMS = 4096  # bytes of a kernel's parameters
FACTS = 9  # 8-byte values that `fill` returns besides the parameters
PAIR = 2  # blocks of a cluster; in any GPU every multiprocessor can be in a cluster of two
MAX_BLOCKS = 65535  # of a grid along y and z
STATIC_SHARED = 48 << 10  # bytes that a kernel may use without requesting more


_modules: WeakKeyDictionary[CudaDevice, dict[str, Module]] = WeakKeyDictionary()


def module(device: CudaDevice, kernel: str, code: bytes, words: Sequence[Word]) -> Module:
    """The module of a kernel on a device, which is loaded once for all its plans."""
    loaded = _modules.setdefault(device, {})
    cached = loaded.get(kernel)
    if cached is None:
        cached = loaded[kernel] = Module(code, words)
    return cached


class Module:
    """A loaded cubin and its entry points."""

    def __init__(self, code: bytes, words: Sequence[Word]) -> None:
        self.words = tuple(words)
        self._module = driver.cuModuleLoadData(code)
        self.gemm = driver.cuModuleGetFunction(self._module, b"gemm")
        load_kernel(int(self.gemm))
        self._fill = driver.cuModuleGetFunction(self._module, b"fill")
        self.scale = driver.cuModuleGetFunction(self._module, b"scale")

    def function(self, name: bytes) -> Any:
        """Another entry point."""
        return driver.cuModuleGetFunction(self._module, name)

    def images(self, executor: CudaExecutor, values: Mapping[str, int], which: int) -> tuple[bytes, tuple[int, ...]]:
        """The result of `fill` for the words with stand-ins: the parameters, and the facts of the launch."""
        total = MAX_PARAMS + FACTS * 8
        memory = executor.empty((total,), (1,), U8)
        stream = executor.stream.c_handle.value or 0
        driver.cuMemsetD8Async(memory.ptr, 0, total, stream)
        words = (ctypes.c_int64 * len(self.words))(*stand_ins(self.words, values, which))
        addresses = (ctypes.c_uint64(memory.ptr), ctypes.c_uint64(memory.ptr + MAX_PARAMS))
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(x) for x in (words, *addresses)))
        driver.cuLaunchKernel(self._fill, 1, 1, 1, 1, 1, 1, 0, stream, ctypes.addressof(pointers), 0)
        host = (ctypes.c_uint8 * total)()
        driver.cuMemcpyDtoHAsync(ctypes.addressof(host), memory.ptr, total, stream)
        executor.stream.synchronize()
        facts = tuple((ctypes.c_int64 * FACTS).from_buffer(host, MAX_PARAMS))
        return bytes(host)[: facts[0]], facts


class Launch:
    """A kernel for one set of extents; `enqueue` launches it at any addresses and numbers."""

    def __init__(
        self, module: Module, executor: CudaExecutor, values: Mapping[str, int], cluster: tuple[int, int]
    ) -> None:
        self._executor = executor
        # CUTLASS's own `can_implement` is not used: it requires extents to be multiples of 16 bytes. Tensor maps
        # require this only of strides, which the table's rules check, and of lines that are written: see staged.py.
        self._gemm, self._scale = module.gemm, module.scale
        _, facts = module.images(executor, values, 0)
        if cluster[0] * cluster[1] > PAIR and any(word.name == "clusters" for word in module.words):
            values = {**values, "clusters": self._at_once(facts, cluster)}
            _, facts = module.images(executor, values, 0)
        _, shared, threads, *grid, _, barriers, workspace = facts
        if max(grid[1:]) > MAX_BLOCKS:  # multistage kernels have the columns along y, the batch along z
            blocks = " x ".join(map(str, grid))
            raise Refused(
                f"needs a grid of up to {MAX_BLOCKS} blocks along y and z, has {blocks}: split it into slices",
                Kind.RULE,
            )
        # Parameters contain addresses inside the workspace, so it is allocated before the template is made, and stays.
        self._workspace = executor.empty((workspace,), (1,), U8) if workspace else None
        at = 0 if self._workspace is None else self._workspace.ptr
        self._barriers = (at + barriers, workspace - barriers) if at else (0, 0)
        self._template = self._learn(module, {**values, "workspace": at})
        size = len(self._template.image)
        self._memory = (ctypes.c_uint8 * (size + ALIGNED))()
        self._params = -(-ctypes.addressof(self._memory) // ALIGNED) * ALIGNED
        self._pointers = (ctypes.c_void_p * 1)(self._params)
        self._allow(shared)
        self._config = _config((grid[0], grid[1], grid[2]), threads, shared, cluster)

    def _allow(self, shared: int) -> None:
        if shared > STATIC_SHARED:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            driver.cuFuncSetAttribute(self._gemm, attribute, shared)

    def _at_once(self, facts: tuple[int, ...], cluster: tuple[int, int]) -> int:
        """How many clusters the GPU runs at once; CUTLASS's own guess is 29 of four blocks on 132 multiprocessors."""
        _, shared, threads, *grid, _, _, _ = facts
        self._allow(shared)
        config = _config((grid[0], grid[1], grid[2]), threads, shared, cluster)
        return int(driver.cuOccupancyMaxActiveClusters(self._gemm, config))

    def _learn(self, module: Module, values: Mapping[str, int]) -> Template:
        """The template; a third run shows the places of padding that differs from run to run."""
        first, second, again = (module.images(self._executor, values, which)[0] for which in (0, 1, 0))
        padding = frozenset(o for o in range(0, len(first), 4) if first[o : o + 4] != again[o : o + 4])
        return Template.learn(module.words, (first, second), padding)

    def scale(self, address: int, count: int, factor: float, stream: int) -> None:
        """Multiply a vector of f32 in place: sums become means."""
        values = (ctypes.c_uint64(address), ctypes.c_int64(count), ctypes.c_float(factor))
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))
        blocks = min(-(-count // 256), 1024)
        driver.cuLaunchKernel(self._scale, blocks, 1, 1, 256, 1, 1, 0, stream, ctypes.addressof(pointers), 0)

    def enqueue(self, values: Mapping[str, int], stream: int) -> None:
        """Launch the kernel at these addresses and numbers; the parameters are read before this returns."""
        address, size = self._barriers
        if size:
            driver.cuMemsetD8Async(address, 0, size, stream)
        self._template.write(self._params, values)
        self._config.hStream = stream
        driver.cuLaunchKernelEx(self._config, self._gemm, ctypes.addressof(self._pointers), 0)


def _config(grid: tuple[int, int, int], threads: int, shared: int, cluster: tuple[int, int]) -> Any:
    """A launch configuration with the cluster attribute."""
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = driver.CUlaunchAttributeValue()
    size.clusterDim.x, size.clusterDim.y, size.clusterDim.z = *cluster, 1
    attribute.value = size
    config.attrs = [attribute]
    config.numAttrs = 1
    return config
