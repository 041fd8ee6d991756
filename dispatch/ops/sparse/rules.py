"""The operands that cuSPARSE supports beyond its dtypes: each rule returns "needs …, has …", or ""."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.core.matrix_choices import Operation
from dispatch.keys import I32, I64
from dispatch.ops.sparse.algorithms import SpmmAlgorithm
from dispatch.ops.sparse.batched_rules import nnz_of
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.sparse_products import REUSE_ALGORITHMS

if TYPE_CHECKING:
    from dispatch.device.layout import Layout

__all__ = ["adjacent_rows", "aligned", "base_zero", "base_zero_if_empty", "block_preconditioner"]
__all__ += ["both_triangles", "csr_alg3_formats", "default_algorithm", "dense_batch_orders", "dense_orders"]
__all__ += ["dense_results", "dense_vectors", "diagonal_preconditioner", "direct_operands"]
__all__ += ["elements_where_needed", "enough_columns", "factor_preconditioner", "few_elements"]
__all__ += ["first_matrix_layout", "i32_columns", "i32_count", "i32_indices", "index_dtypes", "krylov_operands"]
__all__ += ["leading_dimension", "no_blocks", "only_csr", "preconditioner_formats", "same_index_dtype"]
__all__ += ["sparse_vectors", "spgemm_reuse", "square_blocks", "triangular_formats", "tridiagonal"]
__all__ += ["with_elements"]

MAX_INT = 2**31 - 1
MIN_UNKNOWNS = 3  # the least number of unknowns of gtsv2
# Up to this size of a product with a vector this library's kernel was faster for every pattern. On an H200 it took 0.68
# of cuSPARSE's time at 10^5 elements in f64, at worst 0.87; at 10^6 0.97, at worst 1.2, and at 10^7 1.2 to 1.8.
MAX_STEPS = 2**18
# From so many columns of B on, this library's kernel computes SpMM of any size: for 2 to 32 it took 0.22 to 0.43 of
# cuSPARSE's time on an H200 (10^6 and 10^7 elements in f32), for 128 columns 0.76, for one 1.2 to 1.5.
MIN_COLUMNS = 2


def aligned(request: Any) -> str:
    """No operand begins between two elements."""
    for name in (*request.reads, *request.writes):
        if name in request.reads and getattr(request, name) is None:
            continue
        layout = request.layout_of(name)
        if layout.size and layout.alignment < layout.dtype.itemsize:
            return f"needs {name} at a multiple of {layout.dtype.itemsize} bytes, has {layout.alignment}: copy it"
    return ""


def index_dtypes(request: Any) -> str:
    """Offsets and indices of one dtype, or offsets of 64 bits and indices of 32."""
    offsets, indices = request.rows.dtype, request.columns.dtype
    if request.form.format == SparseFormat.CSC:
        offsets, indices = indices, offsets
    may_differ = request.form.format != SparseFormat.COO
    if offsets is indices or (may_differ and (offsets, indices) == (I64, I32)):
        return ""
    return f"needs rows and columns of one dtype, has {request.rows.dtype} and {request.columns.dtype}"


def square_blocks(request: Any) -> str:
    """For BSR, square blocks, and A not transposed; products with a vector need blocks of two rows or more."""
    if request.form.format != SparseFormat.BSR:
        return ""
    high, wide = request.form.block
    if high != wide:
        return f"needs square blocks, has {high}x{wide}"
    if high == 1 and not request.op.startswith("spmm"):  # cuSPARSE refuses them when it multiplies
        return "needs BSR in blocks of two rows or more, has 1x1: dispatch.sparse.tocsr(a) has the same elements"
    trans = getattr(request, "trans", Operation.N)
    return "" if trans is Operation.N else f"needs trans n with BSR, has {trans.name.lower()}"


def csr_alg3_formats(request: Any) -> str:
    """CSR_ALG3, which adds up in a fixed order, does not support matrices that are read by columns."""
    if request.algorithm != SpmmAlgorithm.CSR_ALG3:
        return ""
    kind, trans = SparseFormat(request.form.format), request.trans
    if kind is SparseFormat.CSR and trans is Operation.N:
        return ""
    return f"needs CSR and trans n with CSR_ALG3, has {kind.name} and {trans.name.lower()}"


def triangular_formats(request: Any) -> str:
    """CSR, CSC or COO; CSC is solved as CSR of the transposed matrix, which does not support conjugation."""
    kind = SparseFormat(request.form.format)
    if kind is SparseFormat.BSR:
        return "needs CSR, CSC or COO, has BSR"
    conjugated = request.trans is Operation.C and request.values.dtype.is_complex
    return "needs CSR or COO with trans c, has CSC" if kind is SparseFormat.CSC and conjugated else ""


def no_blocks(request: Any) -> str:
    """Any format but BSR."""
    kind = SparseFormat(request.form.format)
    return "" if kind is not SparseFormat.BSR else "needs CSR, CSC or COO, has BSR"


def only_csr(request: Any) -> str:
    """CSR, for patterns of dense products."""
    kind = SparseFormat(request.form.format)
    return "" if kind is SparseFormat.CSR else f"needs CSR, has {kind.name}"


def adjacent_rows(request: Any) -> str:
    """Contiguous rows of op(A): CSR as it is, or CSC transposed."""
    kind, trans = SparseFormat(request.form.format), request.trans
    if (kind is SparseFormat.CSR and trans is Operation.N) or (kind is SparseFormat.CSC and trans is not Operation.N):
        return ""
    return f"needs CSR with trans n, or CSC with trans t or c, has {kind.name} with {trans.name.lower()}"


def default_algorithm(request: Any) -> str:
    """No algorithm of cuSPARSE is requested."""
    return f"needs algorithm default, has {request.algorithm.name.lower()}" if request.algorithm else ""


def few_elements(request: Any) -> str:
    """Few enough rows and elements for a single launch to be faster; any number if the request names the library."""
    steps = request.layout_of("out").size + request.values.shape[0]
    if steps <= MAX_STEPS or request.library == "own" or request.autotune:
        return ""
    return f"needs at most {MAX_STEPS:,} rows and elements, or library own or autotune, has {steps:,}"


def enough_columns(request: Any) -> str:
    """A B of several columns, or few rows and elements; any number if the request names the library."""
    out = request.layout_of("out")
    steps, columns = out.shape[-2] + request.values.shape[0], out.shape[-1]
    if columns >= MIN_COLUMNS or steps <= MAX_STEPS or request.library == "own" or request.autotune:
        return ""
    return f"needs at least {MIN_COLUMNS} columns of b, or library own or autotune, has {columns}"


def dense_vectors(request: Any) -> str:
    """Contiguous vectors."""
    for name in ("x", request.added, "out"):
        if not name or (name != "out" and getattr(request, name) is None):
            continue
        layout = request.layout_of(name)
        if layout.size > 1 and layout.strides[0] != 1 and name != request.added:
            return f"needs {name} dense, has {layout}: copy it"
    return ""


def leading_dimension(layout: Layout, *, by_rows: bool) -> int | None:
    """The leading dimension of a row-major or a column-major matrix; None for other layouts."""
    (m, n), (row, column) = layout.shape, layout.strides
    if not by_rows:
        m, n, row, column = n, m, column, row
    if (column == 1 or n <= 1) and (row >= max(1, n) or m <= 1):
        return max(1, n) if m <= 1 else row
    return None


def dense_orders(request: Any) -> str:
    """Dense matrices are row-major or column-major."""
    for name in ("a", "b", "out"):
        if name not in (*request.reads, *request.writes):
            continue
        layout = request.layout_of(name)
        is_matrix = len(layout.shape) == 2 and layout.size
        if is_matrix and all(leading_dimension(layout, by_rows=order) is None for order in (True, False)):
            wanted = f"{name} row-major or column-major, with adjacent elements in each line"
            return f"needs {wanted}, has {layout}: copy it"
    return ""


def first_matrix_layout(request: Any, layout: Layout) -> Layout:
    """The layout of the first matrix of a batch."""
    found: Layout = request.device.layout(layout.dtype, layout.shape[1:], layout.strides[1:], layout.alignment)
    return found


def dense_batch_orders(request: Any) -> str:
    """Each matrix row-major or column-major, apart from the others; B may be one for all. A needs elements if something
    is added.
    """
    for name in ("b", "out"):
        layout = request.layout_of(name)
        one = first_matrix_layout(request, layout)
        if not layout.size:
            continue
        orders = [ld for order in (True, False) if (ld := leading_dimension(one, by_rows=order)) is not None]
        if not orders:
            wanted = f"each matrix of {name} row-major or column-major, with adjacent elements in each line"
            return f"needs {wanted}, has {layout}: copy it"
        step, is_shared = layout.strides[0], name == "b" and not layout.strides[0]
        if layout.shape[0] > 1 and not is_shared and step * layout.dtype.itemsize < one.high - one.low:
            return f"needs the matrices of {name} one after another, without common elements, has {layout}: copy it"
    if nnz_of(request) or not request.reads_added:
        return ""
    return "needs matrices with elements if an operand is added, has none"


def dense_results(request: Any) -> str:
    """Values and indices of results are dense."""
    for name in request.writes:
        layout = request.layout_of(name)
        if len(layout.shape) == 1 and layout.size > 1 and layout.strides[0] != 1:
            return f"needs {name} dense, has {layout}: pass {name}=None"
    return ""


def i32_indices(request: Any) -> str:
    """Indices of 32 bits, which also suffice for the numbers of elements, rows and columns."""
    for name in ("rows", "columns"):
        dtype = getattr(request, name).dtype
        if dtype is not I32:
            return f"needs {name} of i32, has {dtype}"
    most = max(*request.form.shape, request.values.shape[0])
    return "" if most <= MAX_INT else f"needs at most {MAX_INT} rows, columns and elements, has {most}"


def elements_where_needed(request: Any) -> str:
    """A matrix with elements, if the result would be more than zeros without any."""
    if request.values.shape[0] and getattr(request, "b_values", request.values).shape[0]:
        empty = request.op == "sddmm" and not request.a.shape[1]
        return "needs beta 0 if a has no columns" if empty and request.reads_added else ""
    if request.op in ("spsv", "spsm"):
        return "needs a matrix with elements, has none"
    if request.op in ("spgemm", "csr2csc") and request.form.base:
        return "needs base 0 if a matrix has no elements, has 1"
    adds = request.op in ("sparse_mv", "spmm") and request.reads_added
    return "needs a matrix with elements if an operand is added, has none" if adds else ""


def spgemm_reuse(request: Any) -> str:
    """Fixed patterns of i32 indices from 0 on for SpGEMMreuse's algorithms, which only multiply and do not count."""
    if request.algorithm not in REUSE_ALGORITHMS:
        return ""
    name = request.algorithm.name
    if request.op == "spgemm_nnz":
        hint = "leave it out here, and pass it to spgemm of a.fixed() and b.fixed()"
        return f"needs an algorithm that counts, has {name}, which only multiplies fixed patterns: {hint}"
    if None in (request.form.pattern, request.b_form.pattern):
        return f"needs spgemm of fixed patterns for {name}: pass a.fixed() and b.fixed()"
    if request.rows.dtype is not I32:
        return f"needs i32 indices for {name}, has {request.rows.dtype}"
    return f"needs base 0 for {name}, has {request.form.base}" if request.form.base else ""


def same_index_dtype(request: Any) -> str:
    """Offsets and indices of one dtype."""
    rows, columns = request.rows.dtype, request.columns.dtype
    return "" if rows is columns else f"needs rows and columns of one dtype, has {rows} and {columns}"


def i32_columns(request: Any) -> str:
    """Columns of 32 bits: for wider block columns cusparseSpMM_bufferSize returns CUSPARSE_STATUS_NOT_SUPPORTED."""
    dtype = request.columns.dtype
    return "" if dtype is I32 else f"needs columns of i32, has {dtype}"


def base_zero(request: Any) -> str:
    """Indices from 0 on."""
    return f"needs base 0, has {request.form.base}" if request.form.base else ""


def with_elements(request: Any) -> str:
    """A matrix with elements; without any it has no diagonal."""
    return "" if request.values.shape[0] else "needs a matrix with elements, has none"


def i32_count(request: Any) -> str:
    """A number of elements that fits in 32 bits."""
    size = request.rows.size
    return "" if size <= MAX_INT else f"needs at most {MAX_INT} rows and elements, has {size}"


def base_zero_if_empty(request: Any) -> str:
    """Base 0 if there are no elements, because offsets are zeros then."""
    count = request.rows.size if request.op == "coo2csr" else request.nnz
    return "" if count or not request.base else "needs base 0 if there are no elements, has 1"


def sparse_vectors(request: Any) -> str:
    """A sparse vector with elements; and contiguous vectors, except y if it is copied."""
    if not request.indices.size:
        return "needs a sparse vector with elements, has none"
    copied = request.op in ("sparse_axpby", "sparse_scatter", "sparse_rot")
    for name in request.reads:
        layout = request.layout_of(name)
        if layout.size > 1 and layout.strides[0] != 1 and not (copied and name == "y"):
            return f"needs {name} dense, has {layout}: copy it"
    return ""


def tridiagonal(request: Any) -> str:
    """Contiguous diagonals and batches, column-major results, and at least three unknowns."""
    n = request.d.shape[-1]
    if n < MIN_UNKNOWNS:
        return f"needs at least {MIN_UNKNOWNS} unknowns, has {n}"
    for name in ("dl", "d", "du", *(("b", "out") if request.is_batch else ())):
        layout = request.layout_of(name)
        if name != "b" and layout.size > 1 and not layout.is_contiguous:
            return f"needs {name} dense, has {layout}: copy it"
    out = request.layout_of("out")
    if len(out.shape) == 2 and not request.is_batch and out.size and leading_dimension(out, by_rows=False) is None:
        return f"needs out with contiguous columns, has {out}: pass out=None"
    return ""


def krylov_operands(request: Any) -> str:
    """A matrix with elements, and contiguous vectors."""
    if not request.values.shape[0]:
        return "needs a matrix with elements, has none"
    for name in ("b", "x0") if request.is_blocked else ("b", "x0", "M"):
        if getattr(request, name) is not None and request.layout_of(name).strides[0] != 1 and request.b.size > 1:
            return f"needs {name} dense, has {request.layout_of(name)}: copy it"
    return ""


def preconditioner_formats(request: Any) -> str:
    """CSR or CSC if the diagonal is read."""
    kind = SparseFormat(request.form.format)
    takes = getattr(request.preconditioner, "name", "NONE") not in ("NONE", "BLOCK_JACOBI")
    is_fit = not takes or kind in (SparseFormat.CSR, SparseFormat.CSC)
    return "" if is_fit else f"needs CSR or CSC with a preconditioner that is computed from A, has {kind.name}"


def diagonal_preconditioner(request: Any) -> str:
    """A diagonal preconditioner, or none."""
    is_apart = request.is_factored or request.is_blocked
    return f"needs a diagonal or no preconditioner, has {request.preconditioner.name}" if is_apart else ""


def block_preconditioner(request: Any) -> str:
    """Inverses of blocks as the preconditioner."""
    return "" if request.is_blocked else f"needs preconditioner block_jacobi, has {request.preconditioner.name}"


def factor_preconditioner(request: Any) -> str:
    """Incomplete factors as the preconditioner."""
    return "" if request.is_factored else f"needs preconditioner ilu0 or ic0, has {request.preconditioner.name}"


def direct_operands(request: Any) -> str:
    """A matrix with elements, and a solution with contiguous columns."""
    if not request.values.shape[0]:
        return "needs a matrix with elements, has none"
    out = request.layout_of("out")
    if len(out.shape) == 2 and leading_dimension(out, by_rows=False) is None:
        return f"needs out with contiguous columns, has {out}: pass out=None"
    return ""


def is_dense_batch(layout: Layout) -> bool:
    """Whether vectors, or column-major matrices, are contiguous without gaps; the first axis is the batch."""
    order = (0, 1) if len(layout.shape) == len(("batch", "n")) else (0, 2, 1)
    step = 1
    for axis in reversed(order):
        if layout.shape[axis] > 1 and layout.strides[axis] != step:
            return False
        step *= layout.shape[axis]
    return True


def direct_batch_operands(request: Any) -> str:
    """Matrices with elements, and contiguous solutions, each with contiguous columns."""
    if not request.values.shape[1]:
        return "needs matrices with elements, has none"
    out = request.layout_of("out")
    return "" if is_dense_batch(out) else f"needs out with contiguous matrices and columns, has {out}: pass out=None"


def factors_on_device(request: Any) -> str:
    """Factors in the GPU's memory."""
    return "needs memory device, has hybrid" if request.is_hybrid else ""


def same_precision(request: Any) -> str:
    """Factors in the precision of the matrix."""
    return "" if request.precision is None else f"needs precision None, has {request.precision.name}"


def no_refinement(request: Any) -> str:
    """A solution that is not refined."""
    return f"needs no refinements, has {request.refinements}" if request.refinements else ""


def refactorization(request: Any) -> str:
    """Factors that are kept, of a matrix that need not be positive definite, with indices from 0 on."""
    if request.stamp is None or request.form.pattern is None:
        return "needs a stamp and a fixed pattern, as splu passes them"
    if request.assume_a.name == "POS":
        return "needs assume_a other than pos, which LU does not check"
    return f"needs base 0, has {request.form.base}" if request.form.base else ""


def both_triangles(request: Any) -> str:
    """A matrix that is stored whole."""
    uplo = request.uplo
    return "" if uplo is None else f"needs both triangles, has uplo {uplo.name.lower()}"
