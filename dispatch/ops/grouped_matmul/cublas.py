"""The plan of a list of products with `cublasGemmGroupedBatchedEx`, which reads extents, strides and alpha on the host.

It reads addresses on the device, where a kernel of this library writes them before each call. Products with the same
extents and strides form one group. cuBLAS's matrices are column-major: a row-major D is the transpose of a column-major
one, which is the product of the transposed operands in reverse order. Follows
https://docs.nvidia.com/cuda/cublas/#cublasgemmgroupedbatchedex.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind.sys import cublas
from cudabind.sys import cublas_types as cb
from dispatch.core.request import Argument, Plan
from dispatch.errors import Refused
from dispatch.keys import Compute
from dispatch.libraries.cublas.handle import handle_of
from dispatch.libraries.cublas.pointers import PointerArrays
from dispatch.libraries.cublaslt.kernel_recording import kernels
from dispatch.libraries.cutlass.layout import order, pitch

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype
    from dispatch.ops.grouped_matmul.request_lists import GroupedMatmulListRequest

__all__ = ["GroupedGemmPlan", "plan"]

NOT_TRANSPOSED, TRANSPOSED = cb.cublasOperation_t.CUBLAS_OP_N, cb.cublasOperation_t.CUBLAS_OP_T
OPERANDS = 3  # the number of operands of a product
Pair = tuple[int, ...]


class Group(NamedTuple):
    """The properties that the products of a group share, with cuBLAS's A, B and C."""

    op_a: cb.cublasOperation_t
    op_b: cb.cublasOperation_t
    m: int
    n: int
    k: int
    ld_a: int
    ld_b: int
    ld_c: int


def plan(request: GroupedMatmulListRequest, executor: CudaExecutor, row: Row) -> Plan:
    """Bind a request to an executor; Refused where cuBLAS says that it has no kernel for it."""
    plan = GroupedGemmPlan(request, executor, row)
    plan.check_supported()
    return plan


def lowered(a: tuple[Pair, Pair], b: tuple[Pair, Pair], d: tuple[Pair, Pair]) -> tuple[bool, Group]:
    """Whether the operands are exchanged, and the product in column-major terms, from shapes and strides."""
    is_transposed = order(*d) == "row"
    (m, n), k = d[0], a[0][1]
    first, second = (b, a) if is_transposed else (a, b)
    rows, columns = (n, m) if is_transposed else (m, n)
    plain = "row" if is_transposed else "column"
    op_a, op_b = (NOT_TRANSPOSED if order(*one) == plain else TRANSPOSED for one in (first, second))
    return is_transposed, Group(op_a, op_b, rows, columns, k, pitch(*first), pitch(*second), pitch(*d))


class GroupedGemmPlan(Plan):
    """One call for one set of layouts, at any addresses and with any alpha."""

    __slots__ = ("_alpha", "_call_arguments", "_executor", "_function", "_handle", "_keep", "_places", "_pointers")

    def __init__(self, request: GroupedMatmulListRequest, executor: CudaExecutor, row: Row) -> None:
        super().__init__(row, capture_safe=True)
        self._executor, self._handle = executor, handle_of(executor)
        self._handle.follow(executor)  # sets the workspace before anything is captured
        groups = group_products(request)
        self._places = [places for products in groups.values() for places in products]
        self._pointers = PointerArrays(executor, len(self._places), OPERANDS)
        self._function: Any = cublas.cublasGemmGroupedBatchedEx
        compute = row.compute or Compute.COMPUTE_32F
        dtypes = (request.first("a").dtype, request.first("b").dtype, request.d_dtype)
        self._call_arguments = self._arguments(groups, dtypes, compute)

    def _arguments(
        self, groups: dict[Group, list[Pair]], dtypes: tuple[Dtype, Dtype, Dtype], compute: Compute
    ) -> tuple[Any, ...]:
        """The arguments after the handle; alpha's array is written before each call."""
        count = len(groups)
        number = ctypes.c_double if compute is Compute.COMPUTE_64F else ctypes.c_float
        self._alpha, beta = (number * count)(), (number * count)()
        columns = [(ctypes.c_int32 * count)(*column) for column in zip(*groups, strict=True)]
        sizes = (ctypes.c_int32 * count)(*map(len, groups.values()))
        self._keep = (*columns, beta, sizes)
        op_a, op_b, m, n, k, ld_a, ld_b, ld_c = map(_address, columns)
        a, b, d = (cublas.cudaDataType_t(dtype.cuda) for dtype in dtypes)
        at_a, at_b, at_d = self._pointers.addresses
        return (
            *(op_a, op_b, m, n, k, _address(self._alpha), at_a, a, ld_a, at_b, b, ld_b, _address(beta)),
            *(at_d, d, ld_c, count, _address(sizes), cb.cublasComputeType_t(compute)),
        )

    def check_supported(self) -> None:
        """Raise Refused if the library has no kernel for the call, which it reports only when called: in a capture."""
        statuses: list[int] = []

        def call() -> int:
            statuses.append(self._call())
            return statuses[-1]

        kernels(self._executor, call)
        if statuses and statuses[-1]:
            raise Refused(f"{self._function.__name__} returned {self._function.error(statuses[-1])}")

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        *addresses, alpha = arguments
        self._pointers.enqueue([tuple(int(addresses[place].real) for place in places) for places in self._places])
        self._alpha[:] = [alpha.real] * len(self._alpha)
        if status := self._call():
            self._executor.stream.done()  # raises DeviceFault if the device is lost
            raise self._function.error(status)

    def _call(self) -> int:
        return int(self._function.unchecked(self._handle.follow(self._executor), *self._call_arguments))


def group_products(request: GroupedMatmulListRequest) -> dict[Group, list[Pair]]:
    """For each group, the indices of its products' A, B and C, in cuBLAS's terms, among a plan's addresses."""
    count = request.groups
    if request.out is None:
        results = [(shape, strides) for shape, strides, _ in request.unallocated().values()]
    else:
        results = [(tensor.shape, tensor.layout.strides) for tensor in request.out]
    products: dict[Group, list[Pair]] = {}
    for number, (a, b, d) in enumerate(zip(request.a, request.b, results, strict=True)):
        is_transposed, group = lowered((a.shape, a.layout.strides), (b.shape, b.layout.strides), d)
        first, second = (1, 0) if is_transposed else (0, 1)
        places = (first * count + number, second * count + number, 2 * count + number)
        products.setdefault(group, []).append(places)
    return products


def _address(array: ctypes.Array[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(array))
