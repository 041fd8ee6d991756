"""cuSPARSELt's descriptors: of matrices, of a product, of the algorithm chosen for it, and its plan.

All are structs that the caller owns and the library initializes and destroys. The structured operand of a product is
always A; ops transpose the product if needed. Follows https://docs.nvidia.com/cuda/cusparselt/functions.html.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind.errors import CusparseLtError
from cudabind.sys import cusparseLt as lt
from dispatch.errors import Refused
from dispatch.libraries.finalizer import finalizer

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "ALIGNMENT",
    "LIBRARY_CHOICE",
    "Algorithm",
    "MatrixDescriptor",
    "MatrixSpec",
    "ProductDescriptor",
    "ProductSpec",
]

ALIGNMENT = 16  # bytes: the alignment of every address
UNSUPPORTED = ("CUSPARSE_STATUS_NOT_SUPPORTED", "CUSPARSE_STATUS_INVALID_VALUE", "CUSPARSE_STATUS_ARCH_MISMATCH")


class MatrixSpec(NamedTuple):
    """The fields of the descriptor of a matrix, or of a batch of them; extents and strides count elements."""

    rows: int
    cols: int
    ld: int
    dtype: int  # a cudaDataType
    by_rows: bool = True
    batch: int = 1
    stride: int = 0  # from matrix to matrix; 0 if it is shared
    structured: bool = False


class ProductSpec(NamedTuple):
    """D = activation(alpha · op(A) · op(B) + beta · C + bias), without addresses; A is structured."""

    a: MatrixSpec
    b: MatrixSpec
    c: MatrixSpec
    d: MatrixSpec
    op_a: int  # a cusparseOperation_t
    op_b: int
    compute: int  # a cusparseComputeType
    relu: tuple[float, float] | None = None  # the upper bound, and the threshold up to which it is 0
    gelu: float | None = None  # the factor of the result
    bias_stride: int | None = None  # from bias to bias of a batch; None without a bias
    alpha_vector: bool = False  # whether alpha is a vector on the device, with a number for each row
    beta_vector: bool = False


class Algorithm(NamedTuple):
    """Choices of the algorithm; None leaves a choice to the library."""

    config_id: int | None = None
    split_k: int | None = None
    split_k_mode: int | None = None  # a cusparseLtSplitKMode_t
    split_k_buffers: int | None = None


LIBRARY_CHOICE = Algorithm()
Kind = lt.cusparseLtMatmulAlgAttribute_t
ATTRIBUTES = (
    Kind.CUSPARSELT_MATMUL_ALG_CONFIG_ID,
    Kind.CUSPARSELT_MATMUL_SPLIT_K,
    Kind.CUSPARSELT_MATMUL_SPLIT_K_MODE,
    Kind.CUSPARSELT_MATMUL_SPLIT_K_BUFFERS,
)
Desc = lt.cusparseLtMatmulDescAttribute_t
INT_BYTES = 4


class MatrixDescriptor:
    """A `cusparseLtMatDescriptor_t`."""

    __slots__ = ("c", "is_created")

    def __init__(self, handle: Any, spec: MatrixSpec) -> None:
        self.is_created, self.c = False, lt.cusparseLtMatDescriptor_t()
        orders = lt.cusparseOrder_t
        order = orders.CUSPARSE_ORDER_ROW if spec.by_rows else orders.CUSPARSE_ORDER_COL
        arguments = (spec.rows, spec.cols, spec.ld, ALIGNMENT, lt.cudaDataType(spec.dtype), order)
        if spec.structured:
            half = lt.cusparseLtSparsity_t.CUSPARSELT_SPARSITY_50_PERCENT
            call_or_refuse("cusparseLtStructuredDescriptorInit", handle, self.c, *arguments, half)
        else:
            call_or_refuse("cusparseLtDenseDescriptorInit", handle, self.c, *arguments)
        self.is_created = True
        if spec.batch > 1:
            attributes = lt.cusparseLtMatDescAttribute_t
            for attribute, value in (
                (attributes.CUSPARSELT_MAT_NUM_BATCHES, ctypes.c_int(spec.batch)),
                (attributes.CUSPARSELT_MAT_BATCH_STRIDE, ctypes.c_int64(spec.stride)),
            ):
                size = ctypes.sizeof(value)
                call_or_refuse("cusparseLtMatDescSetAttribute", handle, self.c, attribute, ctypes.byref(value), size)

    @finalizer
    def __del__(self) -> None:
        if getattr(self, "is_created", False):
            lt.cusparseLtMatDescriptorDestroy.unchecked(self.c)
            self.is_created = False


class ProductDescriptor:
    """The descriptor of a product, its algorithm, and its plan, for one bias.

    The address of the bias is fixed when a plan is created. Another bias needs another set of all these structs: when a
    plan was destroyed and created again from the same descriptor and algorithm, 0.8.0 ended the process by SIGSEGV
    (sm_90).
    """

    def __init__(self, handle: Any, spec: ProductSpec, algorithm: Algorithm, bias: int) -> None:
        """`bias` is an address; it is not read before the product is called."""
        self._handle, self._spec = handle, spec
        self._selected = self._planned = False
        self._matrices = [MatrixDescriptor(handle, one) for one in (spec.a, spec.b, spec.c, spec.d)]
        self.matmul, self.algorithm = lt.cusparseLtMatmulDescriptor_t(), lt.cusparseLtMatmulAlgSelection_t()
        self.plan = lt.cusparseLtMatmulPlan_t()
        operations = (lt.cusparseOperation_t(spec.op_a), lt.cusparseOperation_t(spec.op_b))
        parts = (one.c for one in self._matrices)
        compute = lt.cusparseComputeType(spec.compute)
        call_or_refuse("cusparseLtMatmulDescriptorInit", handle, self.matmul, *operations, *parts, compute)
        self._set_epilogue(bias)
        default = lt.cusparseLtMatmulAlg_t.CUSPARSELT_MATMUL_ALG_DEFAULT
        call_or_refuse("cusparseLtMatmulAlgSelectionInit", handle, self.algorithm, self.matmul, default)
        self._selected = True
        self._check_kernel(algorithm.config_id)
        for attribute, wanted in zip(ATTRIBUTES, algorithm, strict=True):
            if wanted is not None and wanted != self._chosen(attribute):  # the library rejects setting some defaults
                number = ctypes.c_int(wanted)
                arguments = (attribute, ctypes.byref(number), INT_BYTES)
                call_or_refuse("cusparseLtMatmulAlgSetAttribute", handle, self.algorithm, *arguments)
        call_or_refuse("cusparseLtMatmulPlanInit", handle, self.plan, self.matmul, self.algorithm)
        self._planned = True

    def _check_kernel(self, config_id: int | None) -> None:
        """Refused for a kernel number beyond the library's number of kernels for the product."""
        if config_id is None:
            return
        kernels = self._chosen(Kind.CUSPARSELT_MATMUL_ALG_CONFIG_MAX_ID)
        if not 0 <= config_id < kernels:
            raise Refused(
                f"config_id {config_id} is not below {kernels}, the number of kernels that cuSPARSELt has for this"
                " product"
            )

    def _set_epilogue(self, bias: int) -> None:
        spec = self._spec
        if spec.relu is not None:
            upper, threshold = spec.relu
            self.set(Desc.CUSPARSELT_MATMUL_ACTIVATION_RELU, ctypes.c_int(1))
            self.set(Desc.CUSPARSELT_MATMUL_ACTIVATION_RELU_UPPERBOUND, ctypes.c_float(upper))
            self.set(Desc.CUSPARSELT_MATMUL_ACTIVATION_RELU_THRESHOLD, ctypes.c_float(threshold))
        if spec.gelu is not None:
            self.set(Desc.CUSPARSELT_MATMUL_ACTIVATION_GELU, ctypes.c_int(1))
            if spec.gelu != 1:
                self.set(Desc.CUSPARSELT_MATMUL_ACTIVATION_GELU_SCALING, ctypes.c_float(spec.gelu))
        if spec.alpha_vector:
            self.set(Desc.CUSPARSELT_MATMUL_ALPHA_VECTOR_SCALING, ctypes.c_int(1))
        if spec.beta_vector:
            self.set(Desc.CUSPARSELT_MATMUL_BETA_VECTOR_SCALING, ctypes.c_int(1))
        if spec.bias_stride is not None:
            if spec.bias_stride:  # 0 is the library's own default
                self.set(Desc.CUSPARSELT_MATMUL_BIAS_STRIDE, ctypes.c_int64(spec.bias_stride))
            self.set(Desc.CUSPARSELT_MATMUL_BIAS_POINTER, ctypes.c_void_p(bias))

    def set(self, attribute: Any, value: Any) -> None:
        """Set one attribute of the product from a ctypes value of the matching type."""
        arguments = (attribute, ctypes.byref(value), ctypes.sizeof(value))
        call_or_refuse("cusparseLtMatmulDescSetAttribute", self._handle, self.matmul, *arguments)

    @property
    def workspace(self) -> int:
        """The bytes of workspace of a call."""
        size = ctypes.c_size_t()
        lt.cusparseLtMatmulGetWorkspace(self._handle, self.plan, ctypes.byref(size))
        return size.value

    @property
    def chosen(self) -> Algorithm:
        """The present algorithm: the library's own choice, the caller's, or the result of a search."""
        return Algorithm(*map(self._chosen, ATTRIBUTES))

    def _chosen(self, attribute: Any) -> int:
        number = ctypes.c_int()
        arguments = (attribute, ctypes.byref(number), INT_BYTES)
        lt.cusparseLtMatmulAlgGetAttribute(self._handle, self.algorithm, *arguments)
        return number.value

    @finalizer
    def __del__(self) -> None:
        if getattr(self, "_planned", False):
            lt.cusparseLtMatmulPlanDestroy.unchecked(self.plan)
        if getattr(self, "_selected", False):
            lt.cusparseLtMatmulAlgSelectionDestroy.unchecked(self.algorithm)
        self._planned = self._selected = False


def call_or_refuse(name: str, *given: Any) -> None:
    """Call a function that describes a product to the library; Refused if the library does not support it."""
    arguments: Sequence[Any] = given
    try:
        getattr(lt, name)(*arguments)
    except CusparseLtError as error:
        if error.name not in UNSUPPORTED:
            raise
        raise Refused(f"{name} rejects the request: {error}") from error
