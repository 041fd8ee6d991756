"""Plans of `cutensorBlockSparseContract`: a contraction of tensors that store only some of their blocks.

The blocks of a tensor are in one piece of memory, at offsets that the op computes; cuTENSOR gets the address of each.
The documentation does not say how cuTENSOR uses these lists, or on which internal streams: a call is never recorded.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cudabind import driver
from cudabind.errors import CutensorError
from cudabind.sys import cutensor
from dispatch.core.request import Argument, Plan
from dispatch.errors import Refused
from dispatch.libraries.cublas.scalars import HostNumber
from dispatch.libraries.cutensor.descriptors import COMPUTE, REFUSALS, OwnedHandle, mode_numbers
from dispatch.libraries.cutensor.failures import failure
from dispatch.libraries.cutensor.handle import handle_of

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Compute, Dtype

__all__ = ["BlockSparseOperand", "BlockSparsePlan", "ZeroPlan"]

IDENTITY = 1  # cutensorOperator_t: the only operator that is supported
Shape = tuple[int, ...]


class BlockSparseOperand(NamedTuple):
    """A block-sparse tensor with blocks in C order: the index of its address in a run's arguments, and its form."""

    place: int
    modes: str
    sections: tuple[Shape, ...]
    blocks: tuple[Shape, ...]
    offsets: Shape  # of each block, in elements


class BlockAddresses:
    """The list of the addresses of a tensor's blocks, in host memory."""

    __slots__ = ("_offsets", "_values", "array", "place")

    def __init__(self, operand: BlockSparseOperand, itemsize: int) -> None:
        kind: Any = ctypes.c_void_p * max(len(operand.blocks), 1)
        self.array, self.place = kind(), operand.place
        self._values = np.frombuffer(self.array, np.uint64)[: len(operand.blocks)]
        self._offsets = np.array(operand.offsets, np.uint64) * np.uint64(itemsize)

    def set_base(self, address: int) -> None:
        np.add(self._offsets, np.uint64(address), out=self._values)


class BlockSparsePlan(Plan):
    """D = alpha · Σ A · B + beta · C; Refused where cuTENSOR has no kernel for it."""

    __slots__ = (*("_adds", "_executor", "_handle", "_lists", "_memory", "_numbers", "_plan", "_workspace", "_zeroed"),)

    def __init__(
        self,
        executor: CudaExecutor,
        row: Row,
        operands: tuple[BlockSparseOperand, BlockSparseOperand, BlockSparseOperand, BlockSparseOperand],
        dtype: Dtype,
        *,
        reproducible: bool,
        zeroed: int = 0,
    ) -> None:
        """`zeroed` is the number of bytes of the result to set to 0 first, unless the result is the added operand."""
        super().__init__(row, capture_safe=False)
        self._zeroed, self._adds = zeroed, operands[2].place != operands[3].place
        self._executor, self._handle = executor, handle_of(executor)
        compute: Any = row.compute
        try:
            needed = self._make(operands, dtype, compute, reproducible)
        except CutensorError as error:
            if error.name in REFUSALS:
                raise Refused(f"cuTENSOR has no kernel for this contraction: {error}") from error
            raise failure(executor, error) from error
        self._memory, address = self._handle.memory(executor, needed) if needed else (None, 0)
        self._workspace = ctypes.c_void_p(address or None), needed
        self._lists = tuple(BlockAddresses(operand, dtype.itemsize) for operand in operands)
        self._numbers = HostNumber(dtype), HostNumber(dtype)

    def _make(
        self, operands: tuple[BlockSparseOperand, ...], dtype: Dtype, compute: Compute, reproducible: bool
    ) -> int:
        """Make the plan; return the size of its workspace in bytes."""
        handle = self._handle.follow()
        a, b, _, d = operands
        tensors = [tensor_descriptor(handle, operand, dtype) for operand in (a, b, d)]
        operand_arguments: list[Any] = []
        for operand, tensor in zip((a, b, d), tensors, strict=True):  # c uses the same descriptor object as d
            operand_arguments += [tensor.handle, mode_numbers(operand.modes[::-1]), IDENTITY]
        operation, preference = (
            OwnedHandle("cutensorOperationDescriptor_t", *tensors),
            OwnedHandle("cutensorPlanPreference_t"),
        )
        word = getattr(cutensor, f"CUTENSOR_COMPUTE_DESC_{COMPUTE[compute]}")
        create: Any = cutensor.cutensorCreateBlockSparseContraction
        create(
            handle, ctypes.byref(operation.handle), *operand_arguments, tensors[-1].handle, operand_arguments[-2], word
        )
        if reproducible:
            attributes = cutensor.cutensorOperationDescriptorAttribute_t
            attribute, number = attributes.CUTENSOR_OPERATION_DESCRIPTOR_BLOCKSPARSE_REPRODUCIBLE, ctypes.c_int32(1)
            cutensor.cutensorOperationDescriptorSetAttribute(
                handle, operation.handle, attribute, ctypes.byref(number), ctypes.sizeof(number)
            )
        algo, jit = cutensor.cutensorAlgo_t, cutensor.cutensorJitMode_t
        cutensor.cutensorCreatePlanPreference(
            handle, ctypes.byref(preference.handle), algo.CUTENSOR_ALGO_DEFAULT, jit.CUTENSOR_JIT_MODE_NONE
        )
        needed, kind = ctypes.c_uint64(), cutensor.cutensorWorksizePreference_t.CUTENSOR_WORKSPACE_DEFAULT
        cutensor.cutensorEstimateWorkspaceSize(
            handle, operation.handle, preference.handle, kind, ctypes.byref(needed)
        )  # the estimate is exact here, according to the documentation
        self._plan = OwnedHandle("cutensorPlan_t", operation, preference)
        cutensor.cutensorCreatePlan(
            handle, ctypes.byref(self._plan.handle), operation.handle, preference.handle, needed.value
        )
        return needed.value

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        """Call cuTENSOR on the executor's stream; raises its own error."""
        memory = self._memory
        if memory is not None and memory.owner is not self._executor.stream:
            memory.owner = memory.writer = self._executor.stream
        for one in self._lists:
            address: Any = arguments[one.place]  # addresses are ints
            one.set_base(address)
        added, out = (arguments[one.place] for one in self._lists[2:])
        if self._zeroed and not (self._adds and added == out):
            driver.cuMemsetD8Async(out, 0, self._zeroed, self._executor.target.value)
        a, b, c, d = (one.array for one in self._lists)
        alpha, beta = self._numbers
        alpha.set(arguments[-2])
        beta.set(arguments[-1])
        status = cutensor.cutensorBlockSparseContract.unchecked(
            *(self._handle.follow(), self._plan.handle, alpha.address, a, b, beta.address, c, d),
            *(*self._workspace, self._handle.c_stream),
        )
        if status:
            raise failure(self._executor, cutensor.cutensorBlockSparseContract.error(status))


class ZeroPlan(Plan):
    """The contraction of no blocks: all bytes of the result are set to 0."""

    __slots__ = ("_executor", "_nbytes", "_place")

    def __init__(self, executor: CudaExecutor, row: Row, place: int, nbytes: int) -> None:
        super().__init__(row, capture_safe=True)
        self._executor, self._place, self._nbytes = executor, place, nbytes

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        address: Any = arguments[self._place]  # addresses are ints
        driver.cuMemsetD8Async(address, 0, self._nbytes, self._executor.target.value)


def tensor_descriptor(handle: Any, operand: BlockSparseOperand, dtype: Dtype) -> OwnedHandle:
    """The descriptor of a tensor: its modes in reverse order, so that blocks in C order are column-major there.

    cuTENSOR assumes column-major blocks where no strides are given. Strides are not given, because for blocks with
    extents of 1 the strides of C order would not always be in the same order.
    """
    descriptor = OwnedHandle("cutensorBlockSparseTensorDescriptor_t")
    sections = operand.sections[::-1]
    counts = _array(ctypes.c_uint32, [len(one) for one in sections])
    extents = _array(ctypes.c_int64, [extent for one in sections for extent in one])
    places = _array(ctypes.c_int32, [place for block in operand.blocks for place in block[::-1]])
    kind = cutensor.cudaDataType_t(dtype.cuda)
    cutensor.cutensorCreateBlockSparseTensorDescriptor(
        handle, ctypes.byref(descriptor.handle), len(sections), len(operand.blocks), counts, extents, places, None, kind
    )
    return descriptor


def _array(kind: Any, values: list[int]) -> Any:
    """Numbers in host memory; the list may be empty."""
    return (kind * max(len(values), 1))(*values)
