"""The plan of grouped_matmul with `cublasLtMatmul` and grouped layouts.

`plan` serves cuBLASLt's GPU rows: plans.py has the sequence of launches, this file the setup kernels for the library's
arrays, and the call. libraries/cublaslt/grouped.py describes the layouts.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from cudabind.sys import cublasLt as lt
from dispatch.keys import F32, U8
from dispatch.libraries.cublaslt.grouped import GroupedDescriptors, Groups, grouped_heuristic
from dispatch.libraries.cublaslt.handle import handle_of
from dispatch.libraries.cutlass.emit.sm90_grouped_gemm import PLACED
from dispatch.libraries.cutlass.layout import order_of
from dispatch.libraries.nvrtc.kernel import loaded
from dispatch.ops.grouped_matmul import plans
from dispatch.ops.grouped_matmul.request_lists import GroupedMatmulListRequest

if TYPE_CHECKING:
    from dispatch.core.request import Argument, Plan
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.grouped_matmul.plans import Requests

__all__ = ["SETUP_SOURCE", "CublasLtProduct", "mean_extents", "plan"]

# `numbers` and `addresses` are those of `Groups`: six arrays of i32 and four of addresses, each for `room` groups.
SETUP_SOURCE = f"""\
typedef long long Int;
__device__ void tell(Int g, Int groups, Int const* words, int* numbers, Int* addresses) {{
  Int const room = (groups + 3) / 4 * 4;
  for (int i = 0; i < 3; ++i) {{
    numbers[i * room + g] = int(words[i]);
    addresses[i * room + g] = words[3 + i];
    numbers[(3 + i) * room + g] = int(words[6 + i]);
  }}
  float* const factor = (float*)(numbers + 6 * room);  // all write the same
  *factor = 1;
  addresses[3 * room + g] = Int(factor);
}}

// From where each group ends along the rows of A and D.
extern "C" __global__ void arrange(
    int const* ends, Int groups, Int n, Int k, Int a, Int a_step, Int b, Int b_step, Int b_group, Int d, Int d_step,
    int* numbers, Int* addresses) {{
  for (Int g = threadIdx.x; g < groups; g += blockDim.x) {{
    Int const begin = g > 0 ? ends[g - 1] : 0;
    Int const words[9] = {{
        ends[g] - begin, n, k, a + begin * a_step * SIZE, b + g * b_group * SIZE, d + begin * d_step * SIZE_D,
        a_step, b_step, d_step}};
    tell(g, groups, words, numbers, addresses);
  }}
}}

// From what the host knows, a few groups at a time.
struct Placed {{ Int words[{PLACED}][9]; }};
extern "C" __global__ void place(
    __grid_constant__ Placed const placed, Int first, Int count, Int groups, int* numbers, Int* addresses) {{
  for (Int i = threadIdx.x; i < count; i += blockDim.x) {{
    tell(first + i, groups, placed.words[i], numbers, addresses);
  }}
}}
"""


def plan(request: Requests, executor: CudaExecutor, row: Row) -> Plan:
    """Bind a request to an executor: compile the setup kernels, describe the groups, choose the algorithm."""
    return plans.plan(request, executor, row, CublasLtProduct(request, executor))


class CublasLtProduct:
    """One `cublasLtMatmul` with arrays in its own device memory."""

    __slots__ = ("_alpha", "_beta", "_descriptors", "_executor", "_groups", "_memory", "_options", "_result")

    def __init__(self, request: Requests, executor: CudaExecutor) -> None:
        self._executor = executor
        count = request.groups
        self._memory: Tensor = executor.empty((Groups(0, count).size,), (1,), U8)
        self._groups = Groups(self._memory.ptr, count)
        a, b, d = request.first("a"), request.first("b"), request.d_dtype
        self._options = ("-std=c++17", f"-DSIZE={a.dtype.itemsize}", f"-DSIZE_D={d.itemsize}")
        self._alpha, self._beta = ctypes.c_float(), ctypes.c_float()
        on_device = hasattr(request.alpha, "ptr")
        self._descriptors = GroupedDescriptors(
            self._groups,
            (a.dtype, b.dtype, d),
            order_of(b),
            device_alpha=on_device,
            fast_accum=request.fast_accum,
        )
        limit = executor.workspace.nbytes
        self._result = grouped_heuristic(handle_of(executor), self._descriptors, limit, mean_extents(request))

    @property
    def shapes(self) -> int:
        """The address of the extents and strides."""
        return self._groups.numbers("m")

    @property
    def arrays(self) -> int:
        """The address of the matrices' addresses."""
        return self._groups.addresses("a")

    def setup_kernel(self, entry: str) -> int:
        """One of the two setup kernels."""
        return loaded(SETUP_SOURCE, entry, self._options, self._executor.device)

    def enqueue(self, alpha: Argument) -> None:
        """Call the library for an alpha: its address, or the number."""
        executor, layouts = self._executor, self._descriptors.layouts
        if type(alpha) is int:
            scalars = (alpha, executor.scalar(0.0, F32))
        else:
            self._alpha.value = alpha.real
            scalars = (ctypes.addressof(self._alpha), ctypes.addressof(self._beta))
        a, b, d = (self._groups.addresses(name) for name in "abd")
        status = lt.cublasLtMatmul.unchecked(
            *(handle_of(executor), self._descriptors.matmul, scalars[0]),
            *(b, layouts["a"], a, layouts["b"], scalars[1], d, layouts["c"], d, layouts["d"]),
            *(self._result.algo, executor.workspace.c_ptr, self._result.workspaceSize, executor.target.value),
        )
        if status:
            executor.stream.done()  # raises DeviceFault if the device is lost
            raise lt.cublasLtMatmul.error(status)


def mean_extents(request: Requests) -> tuple[int, int, int]:
    """The mean rows, columns and k of a group, as far as the host has them."""
    if not isinstance(request, GroupedMatmulListRequest):
        return max(request.rows // request.groups, 1), request.n, request.k
    m, n, k = (max(sum(column) // request.groups, 1) for column in zip(*request.extents, strict=True))
    return m, n, k
