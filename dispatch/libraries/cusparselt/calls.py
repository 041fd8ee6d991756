"""Plans of cuSPARSELt's calls: pruning, its check, compression, and products; only the addresses change per run.

The ops pass the matrices, and the indices of their addresses among a run's arguments.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind import driver
from cudabind.sys import cusparseLt as lt
from dispatch.core.request import Argument, Plan
from dispatch.libraries.cusparselt.descriptors import (
    ALIGNMENT,
    Algorithm,
    MatrixDescriptor,
    MatrixSpec,
    ProductDescriptor,
    ProductSpec,
)
from dispatch.libraries.cusparselt.handle import handle_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.core.row import Row
    from dispatch.device.storage import Storage
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["SINGLE_CALL", "ArgumentPlaces", "BatchStrides", "MatrixPlan", "ProductPlan", "ZeroFill", "compressed_bytes"]

FLAG_BYTES = 4
MAX_BIASES = 16  # the number of biases for which a plan keeps descriptors; more for a larger batch
IS_A = 1  # the structured matrix is always a product's A


def compressed_bytes(executor: CudaExecutor, spec: MatrixSpec) -> tuple[int, int]:
    """The size in bytes of one compressed matrix, and of the workspace of its compression.

    For a batch the library reports the size of one matrix (0.8.0, sm_90), so the matrices of a batch are compressed one
    by one.
    """
    handle = handle_of(executor).c  # nothing is enqueued: the executor may only support copies
    size, work = ctypes.c_size_t(), ctypes.c_size_t()
    matrix = MatrixDescriptor(handle, spec._replace(batch=1, stride=0))
    lt.cusparseLtSpMMACompressedSize2(handle, matrix.c, ctypes.byref(size), ctypes.byref(work))
    return -(-size.value // ALIGNMENT) * ALIGNMENT, work.value


class BatchStrides(NamedTuple):
    """The number of calls for a batch, and the stride in bytes of each operand from call to call; 0 if it is shared."""

    calls: int = 1
    a: int = 0
    b: int = 0
    c: int = 0
    d: int = 0
    bias: int = 0


SINGLE_CALL = BatchStrides()


class SharedWorkspacePlan(Plan):
    """A plan with memory that the executor's plans share."""

    __slots__ = ("_executor", "_handle", "_memory", "_work")

    def __init__(self, executor: CudaExecutor, row: Row) -> None:
        super().__init__(row, capture_safe=True)
        self._executor, self._handle = executor, handle_of(executor)
        self._memory: Storage | None = None
        self._work = ctypes.c_void_p()

    def reserve_workspace(self, nbytes: int) -> None:
        """Reserve so many bytes of workspace."""
        if nbytes:
            self._memory, address = self._handle.memory(self._executor, nbytes)
            self._work.value = address

    def current_handle(self) -> Any:
        """The handle, set to the current stream; workspace is owned by that stream from now on."""
        memory = self._memory
        if memory is not None and memory.owner is not self._executor.stream:
            # Created during a capture of the executor's stream, on another stream that has been synchronized since.
            memory.owner = memory.writer = self._executor.stream
        return self._handle.follow()

    def check_status(self, function: Any, status: int) -> None:
        """Raise the error of a status other than 0."""
        if status:
            self._executor.stream.done()  # raises DeviceFault if the device is lost
            raise function.error(status)


class MatrixPlan(SharedWorkspacePlan):
    """A call over one structured matrix: `cusparseLtSpMMAPrune2`, `…PruneCheck2` or `…Compress2`."""

    __slots__ = ("_behind", "_checks", "_function", "_given", "_matrix", "_operation", "_strides")

    def __init__(
        self,
        executor: CudaExecutor,
        row: Row,
        spec: MatrixSpec,
        operation: int,
        *,
        prune: int | None = None,
        strides: BatchStrides = SINGLE_CALL,
    ) -> None:
        """The row names the function; `prune` is the algorithm for pruning, `strides` are those from call to call."""
        super().__init__(executor, row)
        self._strides, self._checks = strides, row.function == "cusparseLtSpMMAPruneCheck2"
        self._function: Any = getattr(lt, row.function)
        self._matrix = MatrixDescriptor(self._handle.follow(), spec)
        self._operation = lt.cusparseOperation_t(operation)
        self._given = (ctypes.c_void_p(), ctypes.c_void_p())
        self._behind: tuple[Any, ...] = ()
        if prune is not None:
            self._behind = (lt.cusparseLtPruneAlg_t(prune),)
        elif row.function == "cusparseLtSpMMACompress2":
            self.reserve_workspace(compressed_bytes(executor, spec)[1])
            self._behind = (self._work,)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        handle = self.current_handle()
        call = (self._matrix.c, IS_A, self._operation, *self._given, *self._behind, self._handle.c_stream)
        one, other = self._given
        addresses: Any = arguments
        if self._checks:  # the check writes 1, but nothing if the matrix is structured: 0.8.0, sm_90
            driver.cuMemsetD8Async(addresses[1], 0, FLAG_BYTES, self._executor.target.value)
        for number in range(self._strides.calls):
            one.value = addresses[0] + number * self._strides.a
            other.value = addresses[1] + number * self._strides.d
            self.check_status(self._function, self._function.unchecked(handle, *call))


class ArgumentPlaces(NamedTuple):
    """The places of a product's addresses and numbers among a run's arguments; None for absent operands."""

    a: int
    b: int
    c: int | None
    d: int
    alpha: int
    beta: int
    bias: int | None = None


class ZeroFill(NamedTuple):
    """Lines of a matrix, or of a batch of them, that are set to 0 before a product; sizes are in bytes."""

    width: int
    pitch: int
    lines: int
    matrices: int = 1
    step: int = 0

    def enqueue(self, address: int, stream: Any) -> None:
        """Set the lines to 0, but not the gaps between them."""
        for number in range(self.matrices):
            at: Any = address + number * self.step
            if self.pitch == self.width or self.lines == 1:
                driver.cuMemsetD8Async(at, 0, self.width * self.lines, stream)
            else:
                driver.cuMemsetD2D8Async(at, self.pitch, 0, self.width, self.lines, stream)


class ProductPlan(SharedWorkspacePlan):
    """A product over a compressed matrix, with a descriptor for each of its most recent biases."""

    __slots__ = (
        *(
            "_algorithm",
            "_alpha",
            "_beta",
            "_by_bias",
            "_places",
            "_product",
            "_slots",
            "_spec",
            "_strides",
            "_zero_fill",
        ),
    )

    def __init__(
        self,
        executor: CudaExecutor,
        row: Row,
        spec: ProductSpec,
        places: ArgumentPlaces,
        algorithm: Algorithm,
        strides: BatchStrides = SINGLE_CALL,
        zero_fill: ZeroFill | None = None,
    ) -> None:
        """Without a C its factor is 0 in every run, and D is passed as C; `strides` are those between calls of a batch.

        `zero_fill` is the part of D that is set to 0 first, for a library that reads C even if its factor is 0.
        """
        super().__init__(executor, row)
        self._zero_fill = zero_fill
        self._spec, self._places, self._strides, self._algorithm = spec, places, strides, algorithm
        anywhere = int(executor.workspace.c_ptr.value or 0)  # in place of the bias, whose address a run sets
        self._product = ProductDescriptor(self._handle.follow(), spec, algorithm, anywhere)
        self._by_bias: dict[int, ProductDescriptor] = {}  # by the bias's address; the oldest is removed first
        self._alpha, self._beta = (ctypes.c_float() for _ in range(2))
        self._slots = tuple(ctypes.c_void_p() for _ in range(6))
        self.reserve_workspace(self._product.workspace)

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the product."""
        return self._product.chosen

    def _descriptor_for(self, arguments: Sequence[Any], number: int) -> ProductDescriptor:
        """The descriptor for a call's bias."""
        place = self._places.bias
        if place is None:
            return self._product
        address = arguments[place] + number * self._strides.bias
        descriptor = self._by_bias.get(address)
        if descriptor is None:
            if len(self._by_bias) >= max(MAX_BIASES, self._strides.calls):
                del self._by_bias[next(iter(self._by_bias))]
            descriptor = ProductDescriptor(self._handle.c, self._spec, self._algorithm, address)
            self._by_bias[address] = descriptor
        return descriptor

    def _call_arguments(self, product: ProductDescriptor, arguments: Sequence[Any], number: int = 0) -> tuple[Any, ...]:
        """The arguments of one call of a batch, in the order of alpha, A, B, beta, C and D."""
        places, spec, strides = self._places, self._spec, self._strides
        alpha, a, b, beta, c, d = self._slots
        a.value = arguments[places.a] + number * strides.a
        b.value = arguments[places.b] + number * strides.b
        d.value = arguments[places.d] + number * strides.d
        c.value = d.value if places.c is None else arguments[places.c] + number * strides.c
        for slot, factor, place, is_vector in (
            (alpha, self._alpha, places.alpha, spec.alpha_vector),
            (beta, self._beta, places.beta, spec.beta_vector),
        ):
            if is_vector:
                slot.value = arguments[place]
            else:
                factor.value = 0.0 if slot is beta and places.c is None else arguments[place]
                slot.value = ctypes.addressof(factor)
        return (product.plan, *self._slots, self._work, ctypes.byref(self._handle.c_stream), 1)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        handle = self.current_handle()
        if self._zero_fill is not None:
            address: Any = arguments[self._places.d]
            self._zero_fill.enqueue(address, self._executor.target.value)
        for number in range(self._strides.calls):
            call = self._call_arguments(self._descriptor_for(arguments, number), arguments, number)
            self.check_status(lt.cusparseLtMatmul, lt.cusparseLtMatmul.unchecked(handle, *call))

    def search(self, arguments: tuple[Argument, ...]) -> Algorithm:
        """The fastest algorithm, which the library determines by running all, into D; the plan uses it from now on."""
        handle = self.current_handle()
        self._product = self._descriptor_for(arguments, 0)
        lt.cusparseLtMatmulSearch(handle, *self._call_arguments(self._product, arguments))
        self._executor.stream.synchronize()
        self.reserve_workspace(self._product.workspace)
        self._algorithm = self.algorithm
        return self._algorithm
