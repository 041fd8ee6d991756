"""Plans of `cutensorBlockSparseContract`: a contraction of tensors of which some blocks are there.

Each tensor's blocks lie in one piece of memory, at places that the op says; cuTENSOR is given the address of each. What
it does with these lists, and on which streams of its own, it says nowhere: a call is never recorded.
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

IDENTITY = 1  # cutensorOperator_t: no other is there
Shape = tuple[int, ...]


class BlockSparseOperand(NamedTuple):
    """A block-sparse tensor whose blocks are in C order: where its address is in a run's arguments, and its form."""

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
        """`zeroed` is how many bytes of the result are set to 0 first, unless it is what is added."""
        super().__init__(row, capture_safe=False)
        self._zeroed, self._adds = zeroed, operands[2].place != operands[3].place
        self._executor, self._handle = executor, handle_of(executor)
        compute: Any = row.compute
        try:
            needed = self._make(operands, dtype, compute, reproducible)
        except CutensorError as error:
            if error.name in REFUSALS:
                raise Refused(f"cuTENSOR has no kernel for it: {error}") from error
            raise failure(executor, error) from error
        self._memory, address = self._handle.memory(executor, needed) if needed else (None, 0)
        self._workspace = ctypes.c_void_p(address or None), needed
        self._lists = tuple(BlockAddresses(operand, dtype.itemsize) for operand in operands)
        self._numbers = HostNumber(dtype), HostNumber(dtype)

    def _make(
        self, operands: tuple[BlockSparseOperand, ...], dtype: Dtype, compute: Compute, reproducible: bool
    ) -> int:
        """The plan, and how many bytes it works in."""
        handle = self._handle.follow()
        a, b, _, d = operands
        tensors = [tensor_descriptor(handle, operand, dtype) for operand in (a, b, d)]
        given: list[Any] = []
        for operand, tensor in zip((a, b, d), tensors, strict=True):  # c has the very descriptor of d
            given += [tensor.handle, mode_numbers(operand.modes[::-1]), IDENTITY]
        described, chosen = (
            OwnedHandle("cutensorOperationDescriptor_t", *tensors),
            OwnedHandle("cutensorPlanPreference_t"),
        )
        word = getattr(cutensor, f"CUTENSOR_COMPUTE_DESC_{COMPUTE[compute]}")
        create: Any = cutensor.cutensorCreateBlockSparseContraction
        create(handle, ctypes.byref(described.handle), *given, tensors[-1].handle, given[-2], word)
        if reproducible:
            named = cutensor.cutensorOperationDescriptorAttribute_t
            attribute, number = named.CUTENSOR_OPERATION_DESCRIPTOR_BLOCKSPARSE_REPRODUCIBLE, ctypes.c_int32(1)
            cutensor.cutensorOperationDescriptorSetAttribute(
                handle, described.handle, attribute, ctypes.byref(number), ctypes.sizeof(number)
            )
        algo, jit = cutensor.cutensorAlgo_t, cutensor.cutensorJitMode_t
        cutensor.cutensorCreatePlanPreference(
            handle, ctypes.byref(chosen.handle), algo.CUTENSOR_ALGO_DEFAULT, jit.CUTENSOR_JIT_MODE_NONE
        )
        needed, kind = ctypes.c_uint64(), cutensor.cutensorWorksizePreference_t.CUTENSOR_WORKSPACE_DEFAULT
        cutensor.cutensorEstimateWorkspaceSize(
            handle, described.handle, chosen.handle, kind, ctypes.byref(needed)
        )  # which is exact here, as the documentation says
        self._plan = OwnedHandle("cutensorPlan_t", described, chosen)
        cutensor.cutensorCreatePlan(
            handle, ctypes.byref(self._plan.handle), described.handle, chosen.handle, needed.value
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
    """A sum of nothing: all bytes of an operand are set to 0."""

    __slots__ = ("_executor", "_nbytes", "_place")

    def __init__(self, executor: CudaExecutor, row: Row, place: int, nbytes: int) -> None:
        super().__init__(row, capture_safe=True)
        self._executor, self._place, self._nbytes = executor, place, nbytes

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        address: Any = arguments[self._place]  # addresses are ints
        driver.cuMemsetD8Async(address, 0, self._nbytes, self._executor.target.value)


def tensor_descriptor(handle: Any, operand: BlockSparseOperand, dtype: Dtype) -> OwnedHandle:
    """The descriptor of a tensor: its modes the other way round, so that blocks in C order are column-major there.

    That is what cuTENSOR takes where no strides are given; of blocks with extents of 1 strides in C order would not
    always be in one order.
    """
    made = OwnedHandle("cutensorBlockSparseTensorDescriptor_t")
    sections = operand.sections[::-1]
    counts = _array(ctypes.c_uint32, [len(one) for one in sections])
    extents = _array(ctypes.c_int64, [extent for one in sections for extent in one])
    places = _array(ctypes.c_int32, [place for block in operand.blocks for place in block[::-1]])
    kind = cutensor.cudaDataType_t(dtype.cuda)
    cutensor.cutensorCreateBlockSparseTensorDescriptor(
        handle, ctypes.byref(made.handle), len(sections), len(operand.blocks), counts, extents, places, None, kind
    )
    return made


def _array(kind: Any, values: list[int]) -> Any:
    """Numbers in host memory, of which there may be none."""
    return (kind * max(len(values), 1))(*values)
