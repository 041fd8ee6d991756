"""Sparse vectors by cuSPARSE: Gather, Scatter, Axpby, Rot and SpVV.

NVIDIA requires the indices and the values of a sparse vector to be aligned to 16 bytes. Unaligned ones, as in a slice,
are copied before the call, and gathered results after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudabind.sys import cusparse
from dispatch.keys import BF16, F16, F32
from dispatch.libraries.cublas.calls import Constant, Scalar
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
from dispatch.libraries.cusparse.calls import Call, DeviceResultCall, Steps
from dispatch.libraries.cusparse.descriptors import DenseVector, SparseVector

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["plan"]

COMPUTE = {F16: F32, BF16: F32}  # the dtype of factors, and of the arithmetic of rotations


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; a vector that is modified is first copied to the result."""
    operands = len(request.reads) + len(request.writes)
    steps = Steps(executor, row, operands + len(getattr(request, "numbers", ())))
    dtype, size = request.y.dtype, request.y.size
    target = {"sparse_gather": "y", "spvv": "y", "sparse_rot": "out_y"}.get(request.op, "out")
    values = {"sparse_gather": "out", "sparse_rot": "out_values"}.get(request.op, "values")
    parts = [steps.aligned_operand(request.layout_of(name), request.place_of(name)) for name in ("indices", values)]
    places = parts[0].pointer.operand, parts[1].pointer.operand
    steps.copy(_column(request, "indices"), parts[0])
    if request.op != "sparse_gather":
        steps.copy(_column(request, "values"), parts[1])
    sizes = size, request.indices.size
    item = request.indices.dtype.itemsize
    sparse = SparseVector(sizes, item, request.base, dtype.cuda, places, steps.placeholder)
    dense = DenseVector(size, dtype.cuda, request.place_of(target), steps.placeholder)
    if request.op in ("sparse_scatter", "sparse_rot") or (target == "out" and request.reads_added):
        steps.copy(_column(request, "y"), _column(request, target))
    elif request.op == "sparse_axpby":
        steps.fill_zeros(_column(request, "out"))  # 0 times unwritten memory may be NaN
    if request.op == "sparse_gather":
        steps.append(Call(executor, "cusparseGather", (dense, sparse)))
        steps.copy(parts[1], _column(request, "out"))
    elif request.op == "sparse_scatter":
        steps.append(Call(executor, "cusparseScatter", (sparse, dense)))
    elif request.op == "sparse_axpby":
        beta = Scalar(operands + 1, dtype) if request.reads_added else Constant(0.0, dtype)
        steps.append(Call(executor, "cusparseAxpby", (Scalar(operands, dtype), sparse, beta, dense)))
    elif request.op == "sparse_rot":
        compute = COMPUTE.get(dtype, dtype)
        factors = Scalar(operands, compute), Scalar(operands + 1, compute)
        steps.append(Call(executor, "cusparseRot", (*factors, sparse, dense)))
        steps.copy(parts[1], _column(request, "out_values"))
    else:
        operation = cusparse.cusparseOperation_t(2 if request.conj and dtype.is_complex else 0)
        result = OperandPointer(request.place_of("out"))
        arguments = (operation, sparse, dense, result, cusparse.cudaDataType(dtype.cuda))
        steps.call("cusparseSpVV", *arguments, kind=DeviceResultCall)
    return steps.plan(capture_safe=True)


def _column(request: Any, name: str) -> Matrix:
    layout = request.layout_of(name)
    step = layout.strides[0] if layout.size > 1 else 1
    return Matrix(OperandPointer(request.place_of(name)), layout.dtype, layout.size, 1, step, max(1, layout.size))
