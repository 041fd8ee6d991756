"""The cuSPARSE handle of an executor, with the memory that plans share. Factors are read from host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from cudabind.sys import cusparse
from dispatch.execute.shared_memory import shared
from dispatch.libraries.handle import StreamHandle

if TYPE_CHECKING:
    from dispatch.device.storage import Storage
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["Handle", "handle_of"]


class Handle(StreamHandle):
    """A `cusparseHandle_t` on the stream of one executor; its pointer mode is always that of the host.

    `counted_product` passes results from counting the elements of a product to the plan that computes it: the stamp,
    the inputs that it depends on, and the product.
    """

    __slots__ = ("counted_product",)

    name: ClassVar[str] = "cusparse"
    kind = cusparse.cusparseHandle_t

    def __init__(self, executor: CudaExecutor) -> None:
        self.counted_product: tuple[int, Any, Any] | None = None
        super().__init__(executor)

    @staticmethod
    def create(c_handle: cusparse.cusparseHandle_t) -> None:
        cusparse.cusparseCreate(c_handle)

    @staticmethod
    def destroy(c_handle: cusparse.cusparseHandle_t) -> int:
        status: int = cusparse.cusparseDestroy.unchecked(c_handle)
        return status

    @staticmethod
    def set_stream(c_handle: cusparse.cusparseHandle_t, stream: int | None) -> None:
        cusparse.cusparseSetStream(c_handle, cusparse.cudaStream_t(stream))

    def memory(self, executor: CudaExecutor, nbytes: int) -> Storage | None:
        """So many bytes, shared by the executor's plans, which run one after another; None if 0."""
        return shared(executor, nbytes, self.name)


handle_of = Handle.of
"""The only handle of an executor."""
