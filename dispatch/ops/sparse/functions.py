"""Sparse matrices under SciPy's and cuSPARSE's names: `dispatch.sparse`. Each function is one request, or says which.

They take a `SparseTensor`, or a sparse matrix of SciPy, CuPy or torch, which is converted to one without a copy.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from dispatch.checks import check_bool, names_arguments
from dispatch.core.matrix_choices import DiagType, FillMode, Operation
from dispatch.core.operand_checks import check_array
from dispatch.core.request import run
from dispatch.errors import BadRequest
from dispatch.ops import sparse as ops
from dispatch.ops.sparse.block_jacobi_functions import BlockJacobi, block_jacobi
from dispatch.ops.sparse.direct_functions import SparseLu, factorized, splu, spsolve
from dispatch.ops.sparse.ell_functions import BlockedEllMatrix, SlicedEllMatrix, toblocked_ell, tosell
from dispatch.ops.sparse.form import SparseForm, SparseFormat
from dispatch.ops.sparse.format_functions import as_sparse, tobsr, tocoo, tocsc, tocsr
from dispatch.ops.sparse.incomplete_functions import IncompleteFactors, ic0, ilu0
from dispatch.ops.sparse.semirings import Semiring, SparseOperator
from dispatch.ops.sparse.solver_functions import LinAlgError, bicgstab, cg, gmres, minres
from dispatch.ops.sparse.sources import is_sparse, sparse_tensor, to_scipy, to_torch
from dispatch.ops.sparse.tensor import SparseTensor, bsr, coo, csc, csr

if TYPE_CHECKING:
    from dispatch.ops.sparse.algorithms import SpgemmAlgorithm, SpmmAlgorithm, SpmvAlgorithm, SpsvAlgorithm
    from dispatch.ops.sparse.base import Number

__all__ = ["SparseTensor", "bsr", "coo", "csc", "csr", "sparse_tensor", "to_scipy", "to_torch"]
__all__ += ["sddmm", "spgemm", "spmm", "spmv", "spsm", "spsolve_triangular", "spsv"]
__all__ += ["tobsr", "tocoo", "tocsc", "tocsr"]
__all__ += ["Semiring", "SparseOperator", "spmm_op", "spmv_op"]
__all__ += ["fromdense", "prune", "sort", "todense"]
__all__ += ["BlockedEllMatrix", "SlicedEllMatrix", "toblocked_ell", "tosell"]
__all__ += ["BlockJacobi", "IncompleteFactors", "block_jacobi", "ic0", "ilu0"]
__all__ += ["SparseLu", "factorized", "splu", "spsolve"]
__all__ += ["LinAlgError", "bicgstab", "cg", "gmres", "minres"]

N = Operation.N
BATCH = 3  # axes
MAX_COUNTED = 1024
NAMES_OF_PAIR = {
    "form.format": "a.format",
    "b_form.format": "b.format",
    "b_form.shape": "b.shape",
    "b_form.base": "b.base",
    **{f"b_{part}": f"b.{part}" for part in ("values", "rows", "columns")},
}  # from a field of the request to the part of a SparseTensor
_known_nnz: dict[tuple[SparseForm, SparseForm], int] = {}  # the elements of products of fixed patterns
_stamps = count(1)


# -- products ---------------------------------------------------------------------------------------------------------
@names_arguments
def spmv(
    a: Any,
    x: Any,
    *,
    y: Any = None,
    alpha: Number = 1.0,
    beta: Number | None = None,
    trans: Operation | str = N,
    algorithm: SpmvAlgorithm | str = "default",
    autotune: bool = False,
    out: Any = None,
) -> Any:
    """alpha · op(A) · x + beta · y: the request `sparse_mv`."""
    return ops.sparse_mv(
        *as_sparse(a).parts,
        x,
        y=y,
        alpha=alpha,
        beta=beta,
        trans=trans,
        algorithm=algorithm,
        autotune=autotune,
        out=out,
    )


@names_arguments
def spmm(
    a: Any,
    b: Any,
    *,
    values: Any = None,
    c: Any = None,
    alpha: Number = 1.0,
    beta: Number | None = None,
    trans: Operation | str = N,
    algorithm: SpmmAlgorithm | str = "default",
    autotune: bool = False,
    out: Any = None,
) -> Any:
    """alpha · op(A) · B + beta · C of a dense B: the request `spmm`, or `spmm_batched` for a batch (batch, n, k).

    `values` replace the elements of A: (nnz,), or (batch, nnz) for a batch with a matrix each.
    """
    function = ops.spmm_batched if getattr(b, "ndim", 2) == BATCH else ops.spmm
    held, rows, columns, form = as_sparse(a).parts
    choices: dict[str, Any] = {"c": c, "alpha": alpha, "beta": beta, "trans": trans, "out": out}
    elements = held if values is None else values
    return function(elements, rows, columns, form, b, algorithm=algorithm, autotune=autotune, **choices)


@names_arguments
def spmm_op(a: Any, b: Any, semiring: Semiring | str = "plus_times", *, c: Any = None, out: Any = None) -> Any:
    """A · B over a semiring, with C as an operand of the epilogue: the request `spmm_op`."""
    return ops.spmm_op(*as_sparse(a).parts, b, semiring, c=c, out=out)


@names_arguments
def spmv_op(
    a: Any,
    x: Any,
    epilogue: SparseOperator | None = None,
    *,
    y: Any = None,
    alpha: Number = 1.0,
    beta: Number | None = None,
    out: Any = None,
) -> Any:
    """An operator applied to each row of alpha · A · x + beta · y: the request `spmv_op`."""
    return ops.spmv_op(*as_sparse(a).parts, x, epilogue, y=y, alpha=alpha, beta=beta, out=out)


@names_arguments
def sddmm(
    c: Any, a: Any, b: Any, *, values: Any = None, alpha: Number = 1.0, beta: Number | None = None, out: Any = None
) -> Any:
    """alpha · A · B where C has elements, + beta · C, as a matrix of C's pattern: the request `sddmm`.

    For a batch, A (batch, m, k) or B (batch, k, n) or both, the result is the elements (batch, nnz) at the places of C:
    the request `sddmm_batched`. `values` replace the elements of C: (nnz,), or (batch, nnz) for a batch.
    """
    pattern = as_sparse(c, "c")
    if BATCH in (getattr(a, "ndim", 2), getattr(b, "ndim", 2)):
        held, rows, columns, form = pattern.parts
        elements = held if values is None else values
        return ops.sddmm_batched(elements, rows, columns, form, a, b, alpha=alpha, beta=beta, out=out)
    pattern = pattern if values is None else pattern.with_values(values)
    return pattern.with_values(ops.sddmm(*pattern.parts, a, b, alpha=alpha, beta=beta, out=out))


@names_arguments
def spgemm(
    a: Any,
    b: Any,
    *,
    nnz: int | None = None,
    alpha: Number = 1.0,
    algorithm: SpgemmAlgorithm | str = "default",
    autotune: bool = False,
) -> SparseTensor:
    """alpha · A · B of two sparse matrices in CSR: the request `spgemm`.

    Without `nnz`, the number of elements of the product, the request `spgemm_nnz` counts them first, and the call waits
    for it; for two fixed patterns only once.
    """
    first, second = as_sparse(a), as_sparse(b, "b")
    stamp = None
    if nnz is None:
        try:
            nnz, stamp = count_product(first, second, alpha, algorithm)
        except BadRequest as error:
            raise error.renamed(NAMES_OF_PAIR) from None
    choices: dict[str, Any] = {"alpha": alpha, "algorithm": algorithm, "autotune": autotune}
    try:
        values, rows, columns = ops.spgemm(*first.parts, *second.parts, nnz=nnz, stamp=stamp, **choices)
    except BadRequest as error:
        raise error.renamed(NAMES_OF_PAIR) from None
    form = SparseForm(SparseFormat.CSR, (first.shape[0], second.shape[1]), first.form.base)
    return SparseTensor.of_results(values, rows, columns, form)


def count_product(
    first: SparseTensor, second: SparseTensor, alpha: Number, algorithm: SpgemmAlgorithm | str
) -> tuple[int, int | None]:
    """The number of elements of a product, and the stamp with which `spgemm` reuses the results of the count.

    For fixed patterns the number is cached, and there is no stamp, since such a product is computed in another way.
    """
    forms, operands = (first.form, second.form), (*first.parts, *second.parts)
    if None in (forms[0].pattern, forms[1].pattern):
        stamp = next(_stamps)
        return int(ops.spgemm_nnz(*operands, alpha=alpha, algorithm=algorithm, stamp=stamp).item()), stamp
    nnz = _known_nnz.get(forms)
    if nnz is None:
        nnz = int(ops.spgemm_nnz(*operands).item())
        while len(_known_nnz) >= MAX_COUNTED:
            _known_nnz.pop(next(iter(_known_nnz)), None)
        _known_nnz[forms] = nnz
    return nnz, None


# -- triangles --------------------------------------------------------------------------------------------------------
@names_arguments
def spsv(
    a: Any,
    x: Any,
    *,
    alpha: Number = 1.0,
    uplo: FillMode | str = "lower",
    diag: DiagType | str = "non_unit",
    trans: Operation | str = N,
    algorithm: SpsvAlgorithm | str = "default",
    out: Any = None,
) -> Any:
    """The y of op(A) · y = alpha · x for a triangle A: the request `spsv`."""
    return ops.spsv(
        *as_sparse(a).parts, x, alpha=alpha, uplo=uplo, diag=diag, trans=trans, algorithm=algorithm, out=out
    )


@names_arguments
def spsm(
    a: Any,
    b: Any,
    *,
    alpha: Number = 1.0,
    uplo: FillMode | str = "lower",
    diag: DiagType | str = "non_unit",
    trans: Operation | str = N,
    out: Any = None,
) -> Any:
    """The C of op(A) · C = alpha · B for a triangle A: the request `spsm`."""
    return ops.spsm(*as_sparse(a).parts, b, alpha=alpha, uplo=uplo, diag=diag, trans=trans, out=out)


@names_arguments
def spsolve_triangular(A: Any, b: Any, lower: bool = True, *, unit_diagonal: bool = False) -> Any:
    """The x of A · x = b, like `scipy.sparse.linalg`: `spsv` of a vector, `spsm` of a matrix.

    A's other triangle, and with `unit_diagonal` its diagonal, may be stored, and are not read.
    """
    check_array("b", b)
    check_bool("lower", lower)
    check_bool("unit_diagonal", unit_diagonal)
    uplo = FillMode.LOWER if lower else FillMode.UPPER
    diag = DiagType.UNIT if unit_diagonal else DiagType.NON_UNIT
    return (spsv if len(b.shape) == 1 else spsm)(A, b, uplo=uplo, diag=diag)


# -- conversions ------------------------------------------------------------------------------------------------------
@names_arguments
def todense(a: Any) -> Any:
    """The dense matrix: the request `sparse_to_dense`."""
    return ops.sparse_to_dense(*as_sparse(a).parts)


@names_arguments
def fromdense(a: Any, *, nnz: int | None = None, format: str = "csr", index_dtype: Any = "i32") -> SparseTensor:  # noqa: A002
    """The elements of a dense matrix that are not 0: the request `dense_to_sparse`.

    Without `nnz`, their number, the request `dense_nnz` counts them first, and the call waits for it.
    """
    if nnz is None:
        count = run(ops.DenseNnzRequest(a))
        nnz = int(count.item())
    request = ops.DenseToSparseRequest(a, nnz=nnz, format=format, index_dtype=index_dtype)
    values, rows, columns = run(request)
    m, n = request.a.shape
    return SparseTensor(values, rows, columns, SparseForm(request.format, (m, n)))


@names_arguments
def prune(
    a: Any, *, threshold: float | None = None, percentage: float | None = None, nnz: int | None = None
) -> SparseTensor:
    """A dense matrix in CSR without its small elements: the request `prune_to_csr`.

    Without `nnz`, the number of remaining elements, the request `prune_nnz` counts them first, and the call waits for
    it.
    """
    if nnz is None:
        nnz = int(run(ops.PruneNnzRequest(a, threshold=threshold, percentage=percentage)).item())
    request = ops.PruneToCsrRequest(a, threshold=threshold, percentage=percentage, nnz=nnz)
    m, n = request.a.shape
    return csr(*run(request), (m, n))


@names_arguments
def sort(a: Any) -> SparseTensor:
    """The matrix with its elements sorted by row and column: the request `sparse_sort`, for COO or CSR."""
    matrix = as_sparse(a)
    values, rows, columns = run(ops.SparseSortRequest(*matrix.parts))
    return SparseTensor(values, rows, columns, matrix.form._replace(pattern=None))


# -- the operators of a SparseTensor ----------------------------------------------------------------------------------
def product(a: SparseTensor, other: Any) -> Any:
    """`a @ other`."""
    if isinstance(other, SparseTensor) or is_sparse(other):
        return spgemm(a, other)
    return (spmv if getattr(other, "ndim", 2) == 1 else spmm)(a, other)


def left_product(a: SparseTensor, other: Any) -> Any:
    """`x @ a`, as the transpose of Aᵀ times the transposed operand, or of each matrix of a batch."""
    if is_sparse(other):
        return spgemm(other, a)
    check_array("x", other)
    axes = getattr(other, "ndim", 2)
    if axes == 1:
        return spmv(a, other, trans=Operation.T)
    if axes == BATCH:
        return spmm(a, other.mT, trans=Operation.T).mT
    return spmm(a, other.T, trans=Operation.T).T


def flaws(a: SparseTensor) -> list[int]:
    """The counts of errors in the indices."""
    counts = run(ops.SparseCheckRequest(*a.parts))
    found: list[int] = counts.tolist()
    return found


SparseTensor.product, SparseTensor.left_product = staticmethod(product), staticmethod(left_product)
SparseTensor.densified, SparseTensor.flaws = staticmethod(todense), staticmethod(flaws)
