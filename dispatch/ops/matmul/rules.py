"""What a row of matmul may require of a request beyond dtypes and choices: order, extents, alignment, other operands.

Each rule returns the reason for a refusal in the words "needs …, has …", or "" where it is met. Rows of the table list
their rules; every one was found with `cublasLtMatmulAlgoGetHeuristic` on a GPU and holds for cuBLASLt 13.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.device.tensor import Tensor
from dispatch.keys import Epilogue
from dispatch.ops.matmul.lower import vector_alignment
from dispatch.ops.matmul.scales import NO_SCALES

if TYPE_CHECKING:
    from dispatch.ops.matmul.request import MatmulRequest

__all__ = [
    "aligned_factors",
    "aligned_vectors",
    "along_k",
    "bgrad_order",
    "bytes_by_16",
    "extents_by_4",
    "fp8_aux_scales",
    "fp8_d_scales",
    "full_precision",
    "gelu_asked",
    "k_by_32",
    "k_dense",
    "lines_by_4",
    "no_fast_accum",
    "no_scales",
    "one_product",
    "whole_workspace",
]


ALIGNED = 16  # bytes that kernels read at once of an epilogue's operands


def aligned_vectors(request: MatmulRequest) -> str:
    """bias, aux and bgrad start at a multiple of 16 bytes, in each library call of a batch.

    Kernels may read these 16 bytes at once. On an H200, products of random layouts ended in
    CUDA_ERROR_MISALIGNED_ADDRESS, which loses the device, where these were not aligned; of 180,000 with them aligned
    none did. The heuristic gets their alignment, too (cublaslt.py), but it is not documented that all kernels obey it.
    """
    wrong, hint = [], "copy it"
    for name in ("bias", "aux", "bgrad"):
        tensor: Tensor | None = getattr(request, name)
        if tensor is not None and tensor.size and tensor.layout.alignment < ALIGNED:
            wrong.append(f"{name} at a multiple of {ALIGNED} bytes, has {tensor.layout.alignment}")
        elif (alignment := vector_alignment(request, name)) < ALIGNED:
            wrong.append(f"{name} at multiples of {ALIGNED} bytes along the outer batch axis, has {alignment}")
            hint = "give one with such steps"
    return f"needs {' and '.join(wrong)}: {hint}" if wrong else ""


def aligned_factors(request: MatmulRequest) -> str:
    """Block scale factors start at a multiple of 16 bytes, as NVIDIA requires; the heuristic does not see addresses."""
    wrong = []
    for name in ("a", "b"):
        factors = getattr(request.scales, name)
        if isinstance(factors, Tensor) and factors.layout.alignment < ALIGNED:
            wrong.append(f"scales.{name} at a multiple of {ALIGNED} bytes, has {factors.layout.alignment}")
    return f"needs {' and '.join(wrong)}: copy it" if wrong else ""


def along_k(request: MatmulRequest, name: str) -> str:
    """A hint how to make an operand dense along k, in the terms of the library that the operand comes from."""
    if getattr(request.framework, "name", "") == "torch":
        return "copy it with a.contiguous()" if name == "a" else "make it as b.mT.contiguous().mT"
    return "copy it with dev.array(a)" if name == "a" else "make it as dev.array(b.mT).mT"


def k_dense(request: MatmulRequest) -> str:
    """Both operands are dense along k: a row-major, b column-major (Hopper's fp8 units read no other order)."""
    wrong = []
    if request.a.layout.strides[-1] != 1 and request.k > 1:
        wrong.append(f"a row-major (k dense): {along_k(request, 'a')}")
    if request.b.layout.strides[-2] != 1 and request.k > 1:
        wrong.append(f"b column-major (k dense): {along_k(request, 'b')}")
    return f"needs {' and '.join(wrong)}" if wrong else ""


def bytes_by_16(request: MatmulRequest) -> str:
    """fp8: k, and the rows of C and D, are multiples of 16 bytes; every operand starts at one."""
    wrong = []
    if request.k % 16:
        wrong.append(f"k a multiple of 16, has {request.k}")
    for name, dtype in (("c", request.c_dtype), ("out", request.d_dtype)):
        multiple = 16 * 8 // dtype.bits
        if request.n % multiple and request.n != 1:
            wrong.append(f"n a multiple of {multiple} for {name} of {dtype}, has {request.n}")
    for name in ("a", "b", "c", "out"):
        tensor = getattr(request, name)
        if tensor is not None and tensor.layout.alignment < 16:
            wrong.append(f"{name} at a multiple of 16 bytes, has {tensor.layout.alignment}")
    return f"needs {' and '.join(wrong)}" if wrong else ""


def extents_by_4(request: MatmulRequest) -> str:
    """i8: k and n are multiples of 4, and so are the strides between rows or columns."""
    wrong = [
        f"{name} a multiple of 4, has {extent}"
        for name, extent in (("k", request.k), ("n", request.n))
        if extent % 4 and extent != 1
    ]
    for name in ("a", "b"):
        tensor: Tensor = getattr(request, name)
        if tensor.layout.alignment < 4 or (
            max(tensor.layout.strides[-2:], default=0) % 4 and max(tensor.layout.strides[-2:]) > 1
        ):
            wrong.append(f"{name} with rows at multiples of 4 bytes, has {tensor.layout}")
    return f"needs {' and '.join(wrong)}" if wrong else ""


def bgrad_order(request: MatmulRequest) -> str:
    """BGRADA needs a column-major a, and BGRADB a row-major b."""
    if request.plain_epilogue is Epilogue.BGRADA and request.a.layout.strides[-2] != 1 and request.m > 1:
        return "needs a column-major for BGRADA: make it as dev.array(a.mT).mT"
    if request.plain_epilogue is Epilogue.BGRADB and request.b.layout.strides[-1] != 1 and request.n > 1:
        return "needs b row-major for BGRADB: copy it with dev.array(b)"
    return ""


def k_by_32(request: MatmulRequest) -> str:
    """The packed and block-scaled formats of sm_100: k is a multiple of the block."""
    return f"needs k a multiple of 32, has {request.k}" if request.k % 32 else ""


def one_product(request: MatmulRequest) -> str:
    """Vectors and blocks of scales exist for a single product only."""
    size = 1
    for extent in request.batch:
        size *= extent
    return f"needs a batch of one, has {size}" if size > 1 else ""


def lines_by_4(request: MatmulRequest) -> str:
    """i8 with cuBLAS: the lines of both operands start at multiples of 4 bytes; their extents are free."""
    wrong = []
    for name in ("a", "b"):
        layout = getattr(request, name).layout
        down, right = layout.strides[-2:]
        step = down if right == 1 and layout.shape[-1] > 1 else right  # k is dense, or the other axis
        several = layout.shape[-2 if step is down else -1] > 1
        batch = [stride for stride, extent in zip(layout.strides[:-2], layout.shape[:-2], strict=True) if extent > 1]
        if layout.alignment < 4 or any(stride % 4 for stride in (*([step] if several else []), *batch)):
            wrong.append(f"{name} with {'rows' if step is down else 'columns'} at multiples of 4 bytes, has {layout}")
    return f"needs {' and '.join(wrong)}" if wrong and request.k else ""


def whole_workspace(request: MatmulRequest) -> str:
    """No workspace limit: cuBLAS uses as much of the executor's workspace as it needs, so no limit can be kept."""
    return "" if request.workspace is None else f"needs workspace=None, has {request.workspace}"


def no_fast_accum(request: MatmulRequest) -> str:
    """Fast accumulation is offered only for fp8 products with one scale per tensor, or per row and column."""
    return "needs fast_accum=False, has True" if request.fast_accum else ""


def full_precision(request: MatmulRequest) -> str:
    """The request does not ask for reduced precision."""
    return "needs reduced_precision=False, has True" if request.reduced_precision else ""


def gelu_asked(request: MatmulRequest) -> str:
    """f64: a request with GELU asks for reduced precision, because this row uses the library's imprecise GELU."""
    if request.plain_epilogue.activation != "gelu" or request.reduced_precision:
        return ""
    return f"needs reduced_precision=True for epilogue {request.plain_epilogue.name}, has False"


def fp8_d_scales(request: MatmulRequest) -> str:
    """A scale or amax of D is only for an fp8 D."""
    return _without(request, ("d", "amax_d", "aux", "amax_aux"), f"a {request.d_dtype} D")


def fp8_aux_scales(request: MatmulRequest) -> str:
    """A scale or amax of aux is only for an fp8 aux."""
    if request.aux is not None and request.aux.dtype.is_fp8:
        return ""
    return _without(request, ("aux", "amax_aux"), f"an aux of {request.aux_dtype}")


def no_scales(request: MatmulRequest) -> str:
    """Scales are only for fp8 operands."""
    return _without(request, ("a", "b", "c", "d", "aux", "amax_d", "amax_aux"), f"{request.a.dtype} operands")


def _without(request: MatmulRequest, names: tuple[str, ...], companion: str) -> str:
    if request.scales is NO_SCALES:
        return ""
    fields = [f"scales.{name}" for name in names if getattr(request.scales, name) is not None]
    return f"needs no {' or '.join(fields)} with {companion}" if fields else ""
