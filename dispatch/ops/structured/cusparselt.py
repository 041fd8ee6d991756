"""Structured matrices as calls of cuSPARSELt: the descriptions from which a request's plan is created.

A column-major matrix is described as the transpose of a row-major one; D is row-major or
column-major. Follows https://docs.nvidia.com/cuda/cusparselt/functions.html.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cudabind.sys import cusparseLt as lt
from dispatch.core.matrix_choices import Operation
from dispatch.core.request import IdlePlan
from dispatch.errors import BadRequest, Refused
from dispatch.keys import HALF, I8, Compute, Dtype
from dispatch.libraries.cusparselt.calls import (
    SINGLE_CALL,
    ArgumentPlaces,
    BatchStrides,
    MatrixPlan,
    ProductPlan,
    ZeroFill,
    compressed_bytes,
)
from dispatch.libraries.cusparselt.descriptors import Algorithm, MatrixSpec, ProductSpec
from dispatch.libraries.cusparselt.handle import library_stamp
from dispatch.ops.structured.kernels import kernel_of
from dispatch.ops.structured.layout import is_row_major, leading_dimension
from dispatch.ops.structured.product import Activation24, SplitKMode

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.layout import Layout
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.structured.form import StructuredForm

__all__ = ["bytes_on", "plan", "product_of"]

BATCH = 3  # axes
N, T = int(Operation.N), int(Operation.T)


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request."""
    if request.op == "matmul_2_4":
        return _product(request, executor, row)
    if request.op == "compress_2_4":
        spec, operation = structured(request.form)
        size, count = compressed_bytes(executor, spec)[0], spec.batch
        _check_size("out", request.layout_of("out"), count * size)
        strides = BatchStrides(count, a=spec.stride * request.a.dtype.itemsize, d=size)
        return MatrixPlan(executor, row, spec._replace(batch=1, stride=0), operation, strides=strides)
    spec, operation = matrix_of(request.a.layout, structured=True)
    if request.op == "check_2_4" and spec.batch > 1:
        # As one tall matrix: NVIDIA does not state which matrices of a batch the library checks.
        spec = spec._replace(rows=spec.batch * spec.rows, batch=1, stride=0)
    algorithm = int(request.algorithm) if request.op == "prune_2_4" else None
    return MatrixPlan(executor, row, spec, operation, prune=algorithm)


def bytes_on(executor: CudaExecutor, form: StructuredForm) -> int:
    """The size of a compressed matrix, reported by the device's library."""
    spec, _ = structured(form)
    return spec.batch * compressed_bytes(executor, spec)[0]


def _check_size(name: str, layout: Layout, wanted: int) -> None:
    if layout.shape != (wanted,):
        raise BadRequest(
            name, str(layout), f"u8[{wanted}], the size that the device's library reports", "leave out=None"
        )


# -- matrices ---------------------------------------------------------------------------------------------------------
def matrix_of(layout: Layout, *, structured: bool = False) -> tuple[MatrixSpec, int]:
    """The row-major matrix that describes an operand, and its operation: a column-major one is transposed."""
    m, n = layout.shape[-2:]
    is_batch = len(layout.shape) == BATCH
    batch, stride = (layout.shape[0], layout.strides[0]) if is_batch else (1, 0)
    by_rows = is_row_major(layout)
    ld = leading_dimension(layout, by_rows=by_rows) or max(1, n)
    rows, cols = (m, n) if by_rows else (n, m)
    matrix = MatrixSpec(rows, cols, ld, layout.dtype.cuda, batch=batch, stride=stride, structured=structured)
    return matrix, N if by_rows else T


def structured(form: StructuredForm) -> tuple[MatrixSpec, int]:
    """The row-major matrix for a compressed operand, as it was before compression, and its operation."""
    *batch, m, k = form.shape
    rows, cols = (m, k) if form.by_rows else (k, m)
    count, stride = (batch[0], m * k) if batch else (1, 0)
    matrix = MatrixSpec(rows, cols, cols, Dtype.of(form.dtype).cuda, batch=count, stride=stride, structured=True)
    return matrix, N if form.by_rows else T


def result_of(layout: Layout, dtype: Dtype) -> MatrixSpec:
    """C or D, in its own order."""
    spec, operation = matrix_of(layout)
    m, n = layout.shape[-2:]
    return spec._replace(rows=m, cols=n, dtype=dtype.cuda, by_rows=operation == N)


def product_of(request: Any) -> ProductSpec:
    """The description of a product for the library; an operand that is shared by a batch has a stride of 0.

    If A is a batch it describes one product, because each is a separate call: the matrices are compressed separately.
    """
    count, kinds = request.batch or 1, lt.cusparseComputeType
    (a, op_a), (b, op_b) = structured(request.form), matrix_of(request.b.layout)
    out = request.layout_of("out")
    c, d = result_of(out, request.c_dtype), result_of(out, request.d_dtype)
    if a.batch > 1:
        a, b, c, d = (one._replace(batch=1, stride=0) for one in (a, b, c, d))
    else:
        a, b = (one if one.batch == count else one._replace(batch=count, stride=0) for one in (a, b))
    compute = kinds.CUSPARSE_COMPUTE_32I if request.a_dtype is I8 else kinds.CUSPARSE_COMPUTE_32F
    if request.compute is Compute.COMPUTE_16F:
        compute = kinds.CUSPARSE_COMPUTE_16F
    bias = request.bias
    is_separate = bias is not None and bias.ndim > 1 and c.batch > 1
    step = None if bias is None else bias.layout.strides[0] if is_separate else 0
    return ProductSpec(
        a,
        b,
        c,
        d,
        op_a,
        op_b,
        int(compute),
        relu=(request.upper_bound, request.threshold) if request.activation is Activation24.RELU else None,
        gelu=request.gelu_scaling if request.activation is Activation24.GELU else None,
        bias_stride=step,
        alpha_vector=request.alpha_vector is not None,
        beta_vector=request.beta_vector is not None,
    )


# -- products ---------------------------------------------------------------------------------------------------------
def requested_algorithm(request: Any) -> Algorithm:
    """The algorithm choices of a request."""
    mode = None if request.split_k_mode is SplitKMode.DEFAULT else int(request.split_k_mode)
    return Algorithm(request.config_id, request.split_k, mode, request.split_k_buffers)


def places_of(request: Any) -> ArgumentPlaces:
    """The places of a product's addresses and numbers."""
    behind = len(request.reads) + len(request.writes)
    vectors = {name: request.place_of(name) for name in ("alpha_vector", "beta_vector")}
    return ArgumentPlaces(
        a=request.place_of("a"),
        b=request.place_of("b"),
        c=request.place_of("c") if request.reads_added else None,
        d=request.place_of("out"),
        alpha=behind if request.alpha_vector is None else vectors["alpha_vector"],
        beta=behind + 1 if request.beta_vector is None else vectors["beta_vector"],
        bias=None if request.bias is None else request.place_of("bias"),
    )


def batch_strides(request: Any, size: int) -> BatchStrides:
    """The strides from product to product if A is a batch, each of whose matrices has `size` bytes."""
    count = request.form.shape[0] if len(request.form.shape) == BATCH else 1
    if count == 1:
        return SINGLE_CALL

    def step(layout: Layout, single: int) -> int:
        return 0 if len(layout.shape) == single else layout.strides[0] * layout.dtype.itemsize

    d = step(request.layout_of("out"), 2)
    c = d if request.c is None else step(request.c.layout, 2)
    bias = 0 if request.bias is None else step(request.bias.layout, 1)
    return BatchStrides(count, a=size, b=step(request.b.layout, 2), c=c, d=d, bias=bias)


def zero_fill_of(request: Any) -> ZeroFill | None:
    """The part of D to set to 0 before a product without C: for i8 to 16 bits, because some kernels of 0.8.0 read D.

    On an H100 such results were NaN if D had held NaN, because 0 times NaN is NaN.
    """
    if request.reads_added or request.a_dtype is not I8 or request.d_dtype not in HALF:
        return None
    layout, item = request.layout_of("out"), request.d_dtype.itemsize
    by_rows = is_row_major(layout)
    long, lines = layout.shape[:-3:-1] if by_rows else layout.shape[-2:]
    pitch = (leading_dimension(layout, by_rows=by_rows) or long) * item
    is_batch = len(layout.shape) == BATCH
    count, step = (layout.shape[0], layout.strides[0] * item) if is_batch else (1, 0)
    if step == pitch * lines:  # contiguous matrices
        return ZeroFill(long * item, pitch, lines * count)
    return ZeroFill(long * item, pitch, lines, count, step)


def _product(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    stamp = library_stamp(executor)
    if request.form.made_by != stamp:
        hint = "compress the matrix again"
        raise BadRequest("form.made_by", repr(request.form.made_by), f"{stamp!r}, the library and GPU in use", hint)
    spec = product_of(request)
    matrix, _ = structured(request.form)
    size = compressed_bytes(executor, matrix)[0]
    _check_size("a", request.a.layout, matrix.batch * size)
    strides = batch_strides(request, size)
    if not request.layout_of("out").size:
        return IdlePlan(row)

    def make(algorithm: Algorithm) -> ProductPlan:
        return ProductPlan(executor, row, spec, places_of(request), algorithm, strides, zero_fill_of(request))

    wanted = requested_algorithm(request)
    if request.autotune and not any(part is not None for part in wanted):
        from dispatch.ops.structured.tune import fastest_plan  # imported at first use: few requests are tuned

        return fastest_plan(request, executor, spec, make)
    timed = None if any(part is not None for part in wanted) else kernel_of(request)
    if timed is not None:
        with suppress(Refused):  # the kernel does not support these operands
            return make(wanted._replace(config_id=timed))
    return make(wanted)
