"""Plans of cuSPARSELt's calls: pruning, its check, compression, and products; all is ready but the addresses.

The ops say which matrices, and at which places of a run's arguments their addresses stand.
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
    Matrix,
    MatrixDescriptor,
    Product,
    ProductDescriptor,
)
from dispatch.libraries.cusparselt.handle import handle_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.core.row import Row
    from dispatch.device.storage import Storage
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["ONE", "Clear", "MatrixPlan", "Places", "ProductPlan", "Steps", "compressed_bytes"]

FLAG_BYTES = 4
MOST_BIASES = 16  # of which a plan keeps descriptors, or as many as a batch has
IS_A = 1  # whether the structured matrix is a product's A: it always is


def compressed_bytes(executor: CudaExecutor, said: Matrix) -> tuple[int, int]:
    """The bytes of one matrix once it is compressed, and those that its compression works in.

    Of a batch the library says no more than of one matrix (0.8.0, sm_90), so that batches are compressed one by one.
    """
    handle = handle_of(executor).c  # nothing is enqueued: the executor may be one that only copies
    size, work = ctypes.c_size_t(), ctypes.c_size_t()
    matrix = MatrixDescriptor(handle, said._replace(batch=1, stride=0))
    lt.cusparseLtSpMMACompressedSize2(handle, matrix.c, ctypes.byref(size), ctypes.byref(work))
    return -(-size.value // ALIGNMENT) * ALIGNMENT, work.value


class Steps(NamedTuple):
    """How many calls a batch takes, and the bytes from one to the next of each operand; 0 where it is one for all."""

    calls: int = 1
    a: int = 0
    b: int = 0
    c: int = 0
    d: int = 0
    bias: int = 0


ONE = Steps()


class SharingPlan(Plan):
    """A plan with memory that the executor's plans share."""

    __slots__ = ("_executor", "_handle", "_memory", "_work")

    def __init__(self, executor: CudaExecutor, row: Row) -> None:
        super().__init__(row, capture_safe=True)
        self._executor, self._handle = executor, handle_of(executor)
        self._memory: Storage | None = None
        self._work = ctypes.c_void_p()

    def work_in(self, nbytes: int) -> None:
        """Have so many bytes to work in."""
        if nbytes:
            self._memory, address = self._handle.memory(self._executor, nbytes)
            self._work.value = address

    def ready(self) -> Any:
        """The handle, once stream and memory are those that it enqueues on and works in."""
        memory = self._memory
        if memory is not None and memory.owner is not self._executor.stream:
            # Made while the caller captured the executor's stream, on another one, which was waited for since.
            memory.owner = memory.writer = self._executor.stream
        return self._handle.follow()

    def ended(self, function: Any, status: int) -> None:
        """Raise what a status says."""
        if status:
            self._executor.stream.done()  # raises DeviceFault where it is the device that is lost
            raise function.error(status)


class MatrixPlan(SharingPlan):
    """A call over one structured matrix: `cusparseLtSpMMAPrune2`, `…PruneCheck2` or `…Compress2`."""

    __slots__ = ("_behind", "_checks", "_function", "_given", "_matrix", "_operation", "_steps")

    def __init__(
        self,
        executor: CudaExecutor,
        row: Row,
        said: Matrix,
        operation: int,
        *,
        prune: int | None = None,
        steps: Steps = ONE,
    ) -> None:
        """The row says which function; `prune` is the algorithm of one that prunes, `steps` go from call to call."""
        super().__init__(executor, row)
        self._steps, self._checks = steps, row.function == "cusparseLtSpMMAPruneCheck2"
        self._function: Any = getattr(lt, row.function)
        self._matrix = MatrixDescriptor(self._handle.follow(), said)
        self._operation = lt.cusparseOperation_t(operation)
        self._given = (ctypes.c_void_p(), ctypes.c_void_p())
        self._behind: tuple[Any, ...] = ()
        if prune is not None:
            self._behind = (lt.cusparseLtPruneAlg_t(prune),)
        elif row.function == "cusparseLtSpMMACompress2":
            self.work_in(compressed_bytes(executor, said)[1])
            self._behind = (self._work,)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        handle = self.ready()
        call = (self._matrix.c, IS_A, self._operation, *self._given, *self._behind, self._handle.c_stream)
        one, other = self._given
        addresses: Any = arguments
        if self._checks:  # which writes 1, and of a matrix that is structured nothing: 0.8.0, sm_90
            driver.cuMemsetD8Async(addresses[1], 0, FLAG_BYTES, self._executor.target.value)
        for number in range(self._steps.calls):
            one.value = addresses[0] + number * self._steps.a
            other.value = addresses[1] + number * self._steps.d
            self.ended(self._function, self._function.unchecked(handle, *call))


class Places(NamedTuple):
    """Where the addresses and numbers of a product stand in a run's arguments; None for what it has not."""

    a: int
    b: int
    c: int | None
    d: int
    alpha: int
    beta: int
    bias: int | None = None


class Clear(NamedTuple):
    """Lines of a matrix, or of a batch of them, that are 0 before a product; all but the counts in bytes."""

    width: int
    pitch: int
    lines: int
    matrices: int = 1
    step: int = 0

    def enqueue(self, address: int, stream: Any) -> None:
        """Set them to 0, and nothing beside them."""
        for number in range(self.matrices):
            at: Any = address + number * self.step
            if self.pitch == self.width or self.lines == 1:
                driver.cuMemsetD8Async(at, 0, self.width * self.lines, stream)
            else:
                driver.cuMemsetD2D8Async(at, self.pitch, 0, self.width, self.lines, stream)


class ProductPlan(SharingPlan):
    """A product over a compressed matrix, with descriptors of their own for each of the biases that it met last."""

    __slots__ = (
        *("_algorithm", "_alpha", "_beta", "_by_bias", "_clear", "_places", "_product", "_said", "_slots", "_steps"),
    )

    def __init__(
        self,
        executor: CudaExecutor,
        row: Row,
        said: Product,
        places: Places,
        algorithm: Algorithm,
        steps: Steps = ONE,
        clear: Clear | None = None,
    ) -> None:
        """Without a C its factor is 0 in every run, and D stands for it; `steps` go from call to call of a batch.

        `clear` says of D what is 0 before, for a library that reads C though its factor is 0.
        """
        super().__init__(executor, row)
        self._clear = clear
        self._said, self._places, self._steps, self._algorithm = said, places, steps, algorithm
        anywhere = int(executor.workspace.c_ptr.value or 0)  # in place of a bias, whose address a run gives
        self._product = ProductDescriptor(self._handle.follow(), said, algorithm, anywhere)
        self._by_bias: dict[int, ProductDescriptor] = {}  # by its address; the one that was made first leaves first
        self._alpha, self._beta = (ctypes.c_float() for _ in range(2))
        self._slots = tuple(ctypes.c_void_p() for _ in range(6))
        self.work_in(self._product.workspace)

    @property
    def algorithm(self) -> Algorithm:
        """The one that the product is carried out by."""
        return self._product.chosen

    def _product_for(self, arguments: Sequence[Any], number: int) -> ProductDescriptor:
        """That of a call's bias."""
        place = self._places.bias
        if place is None:
            return self._product
        address = arguments[place] + number * self._steps.bias
        found = self._by_bias.get(address)
        if found is None:
            if len(self._by_bias) >= max(MOST_BIASES, self._steps.calls):
                del self._by_bias[next(iter(self._by_bias))]
            found = ProductDescriptor(self._handle.c, self._said, self._algorithm, address)
            self._by_bias[address] = found
        return found

    def _ready_for(self, product: ProductDescriptor, arguments: Sequence[Any], number: int = 0) -> tuple[Any, ...]:
        """The arguments of a call of a batch, whose order is that of alpha, A, B, beta, C and D."""
        places, said, steps = self._places, self._said, self._steps
        alpha, a, b, beta, c, d = self._slots
        a.value = arguments[places.a] + number * steps.a
        b.value = arguments[places.b] + number * steps.b
        d.value = arguments[places.d] + number * steps.d
        c.value = d.value if places.c is None else arguments[places.c] + number * steps.c
        for slot, factor, place, is_vector in (
            (alpha, self._alpha, places.alpha, said.alpha_vector),
            (beta, self._beta, places.beta, said.beta_vector),
        ):
            if is_vector:
                slot.value = arguments[place]
            else:
                factor.value = 0.0 if slot is beta and places.c is None else arguments[place]
                slot.value = ctypes.addressof(factor)
        return (product.plan, *self._slots, self._work, ctypes.byref(self._handle.c_stream), 1)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        handle = self.ready()
        if self._clear is not None:
            address: Any = arguments[self._places.d]
            self._clear.enqueue(address, self._executor.target.value)
        for number in range(self._steps.calls):
            call = self._ready_for(self._product_for(arguments, number), arguments, number)
            self.ended(lt.cusparseLtMatmul, lt.cusparseLtMatmul.unchecked(handle, *call))

    def search(self, arguments: tuple[Argument, ...]) -> Algorithm:
        """The fastest algorithm, which the library finds by running all, into D; from now on it is this plan's."""
        handle = self.ready()
        self._product = self._product_for(arguments, 0)
        lt.cusparseLtMatmulSearch(handle, *self._ready_for(self._product, arguments))
        self._executor.stream.synchronize()
        self.work_in(self._product.workspace)
        self._algorithm = self.algorithm
        return self._algorithm
