"""The rules of the rows of linear algebra, beyond dtypes: "needs …, has …", or "" if the request is supported."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dispatch.libraries.cusolver.matrix import batch_step
from dispatch.libraries.nvrtc.small_kernels import MAX_ROWS as MAX_OWN
from dispatch.ops.linalg.derived import InverseKind, LstsqDriver
from dispatch.ops.linalg.refined import Refinement
from dispatch.ops.linalg.request import MatrixKind

if TYPE_CHECKING:
    from dispatch.ops.linalg.base import LinalgRequest
    from dispatch.ops.linalg.derived import InvRequest, LstsqRequest
    from dispatch.ops.linalg.refined import RefinedLstsqRequest, RefinedSolveRequest
    from dispatch.ops.linalg.request import ChoSolveRequest, SolveRequest
    from dispatch.ops.linalg.spectral import EighRequest, GeneralizedEighRequest, SvdRequest

__all__ = [
    "MAX_INVERSE_ROWS",
    "MAX_ROWS",
    "by_lu_or_cholesky",
    "economical",
    "even_batches",
    "few_right_sides",
    "general",
    "gmres_of_square",
    "hermitian",
    "many_small",
    "not_hermitian",
    "of_full_rank",
    "several_right_sides",
    "square",
    "tall",
    "up_to_32",
    "up_to_64",
    "whole_spectrum",
]

MAX_ROWS = 128  # the largest matrices for cuBLAS's batched routines
MAX_INVERSE_ROWS = 32  # the most rows that `matinvBatched` supports


def even_batches(request: LinalgRequest) -> str:
    """The matrices of a batch are at equal distances."""
    before = len(request.batch)
    for name, tensor, _ in request.tensors():
        layout = tensor.layout
        if layout.size and batch_step(layout.shape[:before], layout.strides[:before]) is None:
            return f"needs the matrices of {name} at equal distances, has {layout}: copy it with dev.array(x.numpy())"
    return ""


def many_small(request: LinalgRequest) -> str:
    """Several non-empty matrices, each too small to fill a GPU."""
    count = math.prod(request.batch)
    if count <= 1:
        return f"needs a batch of two or more, has {count}"
    extents = request.matrices.shape[-2:]
    if not 0 < min(extents) <= max(extents) <= MAX_ROWS:
        return f"needs matrices of 1 to {MAX_ROWS} rows and columns, has {list(extents)}"
    empty = [name for name in request.reads if not request.layout_of(name).size]
    return f"needs {empty[0]} with elements, has none" if empty else ""


def several_right_sides(request: ChoSolveRequest) -> str:
    """Two right-hand sides or more; for one `potrsBatched` solves with both triangles at once."""
    return "" if request.b.shape[-1] > 1 else f"needs at least 2 right-hand sides, has {request.b.shape[-1]}"


def square(request: LinalgRequest) -> str:
    """As many rows as columns."""
    rows, columns = request.matrices.shape[-2:]
    return "" if rows == columns else f"needs square matrices, has {rows} x {columns}"


def tall(request: LinalgRequest) -> str:
    """As many rows as columns, or more."""
    rows, columns = request.matrices.shape[-2:]
    return "" if rows >= columns else f"needs at least as many rows as columns, has {rows} x {columns}"


def up_to_32(request: LinalgRequest) -> str:
    """No more rows than `matinvBatched` supports."""
    rows = request.matrices.shape[-1]
    return "" if rows <= MAX_INVERSE_ROWS else f"needs matrices of at most {MAX_INVERSE_ROWS} rows, has {rows}"


def up_to_64(request: LinalgRequest) -> str:
    """No more rows than the kernels of this library support."""
    rows = request.matrices.shape[-1]
    return "" if rows <= MAX_OWN else f"needs matrices of at most {MAX_OWN} rows, has {rows}"


def few_right_sides(request: Any) -> str:
    """No more right-hand sides than the threads of one matrix can solve efficiently."""
    sides = 1 if request.b.ndim == 1 else request.b.shape[-1]
    return "" if sides <= MAX_OWN else f"needs at most {MAX_OWN} right-hand sides, has {sides}"


def general(request: InvRequest) -> str:
    """The general case, by LU with pivots; other kinds of matrices have their own routines."""
    return "" if request.assume_a is InverseKind.GEN else f"needs assume_a=GEN, has {request.assume_a.name}"  # type: ignore[union-attr]


def of_full_rank(request: LstsqRequest) -> str:
    """By QR, which determines neither rank nor singular values."""
    return "" if request.driver is LstsqDriver.GELS else f"needs driver=GELS, has {request.driver.name}"  # type: ignore[union-attr]


def gmres_of_square(request: RefinedSolveRequest | RefinedLstsqRequest) -> str:
    """cuSOLVER 12.0's `IRSXgels` with GMRES returns CUSOLVER_STATUS_IRS_NOT_SUPPORTED for more rows than columns."""
    rows, columns = request.a.shape[-2:]
    if rows == columns or request.refinement is not Refinement.GMRES:
        return ""
    return f"needs refinement=CLASSICAL or square matrices, has GMRES and {rows} x {columns}"


def whole_spectrum(request: EighRequest | GeneralizedEighRequest) -> str:
    """No subset of the eigenvalues."""
    is_part = request.subset_by_index is not None or request.subset_by_value is not None
    return "needs all eigenvalues, has a subset" if is_part else ""


def by_lu_or_cholesky(request: SolveRequest) -> str:
    """A kind of matrix for which cuBLAS has batched routines."""
    if request.assume_a in (MatrixKind.GEN, MatrixKind.POS):
        return ""
    return f"needs assume_a=GEN or POS, has {request.assume_a.name}"  # type: ignore[union-attr]


def _is_hermitian(request: Any) -> bool:
    """Whether a complex matrix is treated as Hermitian and need not be definite."""
    kind = request.assume_a is MatrixKind.HER if request.op == "solve" else request.hermitian
    return bool(kind and request.matrices.dtype.is_complex)


def not_hermitian(request: Any) -> str:
    """`sytrf` supports complex matrices that are symmetric."""
    if not _is_hermitian(request):
        return ""
    dtype = request.matrices.dtype
    if request.op == "solve":
        return f"needs assume_a=SYM, or a real matrix, has HER of {dtype}: assume_a='gen' reads the whole matrix"
    return f"needs hermitian=False, or a real matrix, has True of {dtype}: use lu_factor or eigh"


def hermitian(request: Any) -> str:
    """`hetrf` supports Hermitian matrices."""
    if _is_hermitian(request):
        return ""
    if request.op == "solve":
        return f"needs assume_a=HER, has {request.assume_a.name}"
    return "needs hermitian=True, has False"


def economical(request: SvdRequest) -> str:
    """No vectors other than those of the singular values."""
    rows, columns = request.a.shape[-2:]
    if not (request.compute_uv and request.full_matrices) or rows == columns:
        return ""
    return f"needs full_matrices=False or square matrices, has full_matrices=True and {rows} x {columns}"
