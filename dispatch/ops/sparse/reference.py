"""Sparse linear algebra by SciPy: the host's results, and the expected ones in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import NumpyPlan, numpy_call, work_of
from dispatch.core.matrix_choices import DiagType, FillMode, Operation
from dispatch.errors import BadRequest, Refused
from dispatch.ops.sparse.batched_rules import axes_of
from dispatch.ops.sparse.bsr_reference import BLOCKS
from dispatch.ops.sparse.compiled_reference import COMPILED
from dispatch.ops.sparse.ell_reference import ELL
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.incomplete_reference import INCOMPLETE
from dispatch.ops.sparse.matrix_reference import coo_of, coordinates, flaws, matrix_of, numbers, op_of, scaled
from dispatch.ops.sparse.pentadiagonal_reference import PENTADIAGONAL
from dispatch.ops.sparse.pruning_reference import PRUNING
from dispatch.ops.sparse.tridiagonal_reference import TRIDIAGONAL
from dispatch.refusal import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.layout import Array

__all__ = ["evaluate", "numpy_check", "numpy_compressed", "numpy_dense_count", "scipy_sparse"]

NEEDS_SCIPY = "needs scipy: pip install 'cudabind[host]'"


def scipy_sparse(request: Any, executor: object, row: Row) -> NumpyPlan:
    """A plan that computes with SciPy; Refused if it is not installed."""
    del request, executor
    try:
        import scipy.sparse.linalg  # noqa: F401  # looked for now, used by the plan
    except ImportError as error:
        raise Refused(NEEDS_SCIPY, Kind.RULE) from error
    return NumpyPlan(row, evaluate, work_of(row.dtypes[0]))


def evaluate(request: Any, work: np.dtype[Any]) -> Results:
    """The outputs of a request by name, in a working dtype."""
    return OPS[request.op](request, work)


# -- the ops ----------------------------------------------------------------------------------------------------------
def product(request: Any, work: np.dtype[Any]) -> Results:
    """alpha · op(A) · B + beta · C, for a vector or a matrix; SciPy refuses a matrix without columns."""
    a = op_of(matrix_of(request, work), request.trans).tocsr()
    right = numbers(request.x if request.op == "sparse_mv" else request.b, work)
    out = scaled(request, "alpha", a @ right)
    if request.reads_added:
        out = out + scaled(request, "beta", numbers(getattr(request, request.added), work))
    return {"out": out}


def batch_of_products(request: Any, work: np.dtype[Any]) -> Results:
    """The same for each product of a batch."""
    import scipy.sparse as sp

    parts = (numbers(request.values, work), *(np.asarray(part) for part in (request.rows, request.columns)))
    products = []
    axes = [axes_of(request, name) for name in ("values", "rows", "columns")]
    for number, right in enumerate(numbers(request.b, work)):
        pairs = zip(parts, axes, strict=True)
        elements, rows, columns = (part if part.ndim == alone else part[number] for part, alone in pairs)
        a = coo_of(sp, request.form, elements, *coordinates(request.form, rows, columns))
        products.append(op_of(a, request.trans).tocsr() @ right)
    out = scaled(request, "alpha", np.stack(products))
    return {"out": out + scaled(request, "beta", numbers(request.c, work)) if request.reads_added else out}


CHUNK = 1 << 22  # products computed at a time for SDDMM


def sampled(request: Any, work: np.dtype[Any]) -> Results:
    """The elements of a dense product at the places of a pattern."""
    places = coordinates(request.form, request.rows, request.columns)
    elements = elements_of_product(numbers(request.a, work), numbers(request.b, work), *places)
    elements = scaled(request, "alpha", elements)
    if request.reads_added:
        elements = elements + scaled(request, "beta", numbers(request.values, work))
    return {"out": elements}


def elements_of_product(a: Array, b: Array, row: Array, column: Array) -> Array:
    """A · B at some places only."""
    elements = np.zeros(len(row), a.dtype)
    step = max(1, CHUNK // max(1, a.shape[1]))
    for first in range(0, len(row), step):
        part = slice(first, first + step)
        elements[part] = (a[row[part]] * b.T[column[part]]).sum(axis=1)
    return elements


def batch_of_samples(request: Any, work: np.dtype[Any]) -> Results:
    """The same for each product of a batch; the pattern and the added values may be shared."""
    dense = (numbers(request.a, work), numbers(request.b, work))
    indices = (np.asarray(request.rows), np.asarray(request.columns))
    samples = []
    for number in range(request.batch):
        a, b = (each if each.ndim == len(("m", "n")) else each[number] for each in dense)
        rows, columns = (each if each.ndim == 1 else each[number] for each in indices)
        samples.append(elements_of_product(a, b, *coordinates(request.form, rows, columns)))
    out = scaled(request, "alpha", np.stack(samples))
    return {"out": out + scaled(request, "beta", numbers(request.values, work)) if request.reads_added else out}


def triangle_of(request: Any, work: np.dtype[Any]) -> tuple[Any, bool]:
    """op of the triangle that is read, in CSR, and whether it is the lower one."""
    import scipy.sparse as sp

    lower, unit = request.uplo is FillMode.LOWER, request.diag is DiagType.UNIT
    matrix = matrix_of(request, work)
    offset = (-1 if lower else 1) if unit else 0
    triangle = sp.tril(matrix, offset) if lower else sp.triu(matrix, offset)
    if unit:
        triangle = triangle + sp.eye_array(matrix.shape[0], dtype=triangle.dtype)
    return op_of(triangle, request.trans).tocsr(), lower == (request.trans is Operation.N)


def solved(request: Any, work: np.dtype[Any]) -> Results:
    """The solution, computed row by row if a diagonal element is 0, which SciPy refuses."""
    from scipy.sparse.linalg import spsolve_triangular

    right = scaled(request, "alpha", numbers(request.x if request.op == "spsv" else request.b, work))
    matrix, lower = triangle_of(request, work)
    if not right.size:
        return {"out": right}
    if matrix.diagonal().all() and np.isfinite(matrix.data).all() and np.isfinite(right).all():
        return {"out": np.asarray(spsolve_triangular(matrix, right, lower=lower)).astype(right.dtype)}
    return {"out": substituted(matrix, right, lower=lower)}


def substituted(matrix: Any, right: Array, *, lower: bool) -> Array:
    """Forward or backward substitution, with IEEE 754 division by 0."""
    solution, diagonal = right.copy(), matrix.diagonal()
    order = range(len(right)) if lower else range(len(right) - 1, -1, -1)
    for i in order:
        inside = slice(matrix.indptr[i], matrix.indptr[i + 1])
        columns, elements = matrix.indices[inside], matrix.data[inside]
        off_diagonal = columns != i
        solution[i] = (solution[i] - elements[off_diagonal] @ solution[columns[off_diagonal]]) / diagonal[i]
    return np.asarray(solution)


def multiplied(request: Any, work: np.dtype[Any]) -> Results:
    """The product of two sparse matrices, sorted; BadRequest unless the number of elements is the expected one."""
    product = product_of_patterns(request, work)
    if product.nnz != request.nnz:
        raise BadRequest("nnz", str(request.nnz), f"{product.nnz}, the number that spgemm_nnz counts")
    values = np.asarray(product.data * product.dtype.type(request.alpha))
    return {
        "out_values": values,
        "out_rows": product.indptr.astype(np.int64) + request.form.base,
        "out_columns": product.indices.astype(np.int64) + request.form.base,
    }


def product_of_patterns(request: Any, work: np.dtype[Any]) -> Any:
    """A · B in CSR, sorted, including elements that add up to 0.

    SciPy drops these. The places are taken from the product of matrices of ones, whose elements are positive.
    """
    import scipy.sparse as sp

    def at_places_of(matrix: Any, values: Array) -> Any:
        return sp.csr_array((values, matrix.indices, matrix.indptr), shape=matrix.shape)

    a, b = matrix_of(request, work).tocsr(), matrix_of(request, work, "b_").tocsr()
    product = (a @ b).tocsr()
    places = (at_places_of(a, np.ones(a.nnz)) @ at_places_of(b, np.ones(b.nnz))).tocsr()
    for each in (product, places):
        each.sort_indices()
    if product.nnz < places.nnz:
        numbered = at_places_of(places, np.arange(1.0, places.nnz + 1))
        there = at_places_of(product, np.ones(product.nnz)).multiply(numbered).tocsr()
        there.sort_indices()
        values = np.zeros(places.nnz, product.dtype)
        values[there.data.astype(np.int64) - 1] = product.data
        product = at_places_of(places, values)
    return product


def counted(request: Any, work: np.dtype[Any]) -> Results:
    """How many elements the product has."""
    return {"out": np.array([product_of_patterns(request, work).nnz], np.int64)}


def unpacked(request: Any, work: np.dtype[Any]) -> Results:
    """The dense matrix; for elements that are stored twice, the last one."""
    matrix = matrix_of(request, work)
    dense = np.zeros(matrix.shape, matrix.dtype)
    dense[matrix.row, matrix.col] = matrix.data
    return {"out": dense}


def exchanged(request: Any, work: np.dtype[Any]) -> Results:
    """CSR from CSC or CSC from CSR; duplicates keep their order, as in SciPy."""
    row, column = coordinates(request.form, request.rows, request.columns)
    major, minor = (column, row) if request.from_csr else (row, column)
    order = np.argsort(major, kind="stable")
    extent = request.form.shape[1 if request.from_csr else 0]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(major, minlength=extent))]) + request.form.base
    indices = minor[order] + request.form.base
    rows, columns = (indices, offsets) if request.from_csr else (offsets, indices)
    return {"out_values": numbers(request.values, work)[order], "out_rows": rows, "out_columns": columns}


def put_in_order(request: Any, work: np.dtype[Any]) -> Results:
    """The elements by row and column; duplicates keep their order."""
    row, column = coordinates(request.form, request.rows, request.columns)
    order = np.lexsort((column, row))
    rows, columns = np.asarray(request.rows), np.asarray(request.columns)
    sorted_rows = rows[order] if request.form.format == SparseFormat.COO else rows
    return {
        "out_values": numbers(request.values, work)[order],
        "out_rows": sorted_rows,
        "out_columns": columns[order],
    }


def checked(request: Any, work: np.dtype[Any]) -> Results:
    """The counts of errors in the indices."""
    del work
    return {"out": flaws(request.form, np.asarray(request.rows), np.asarray(request.columns))}


def dense_counted(request: Any, work: np.dtype[Any]) -> Results:
    """The number of nonzero elements."""
    return {"out": np.array([np.count_nonzero(numbers(request.a, work))], np.int64)}


def compressed(request: Any, work: np.dtype[Any]) -> Results:
    """The nonzero elements, by rows or columns; BadRequest unless their number is the expected one."""
    a = numbers(request.a, work)
    by_columns = request.format == SparseFormat.CSC
    major, minor = np.nonzero(a.T if by_columns else a)
    if len(major) != request.nnz:
        raise BadRequest("nnz", str(request.nnz), f"{len(major)}, the number that dense_nnz counts")
    row, column = (minor, major) if by_columns else (major, minor)
    outputs = {"out_values": a[row, column], "out_rows": row, "out_columns": column}
    if request.format != SparseFormat.COO:
        ends = np.concatenate([[0], np.cumsum(np.bincount(major, minlength=a.shape[1 if by_columns else 0]))])
        outputs["out_columns" if by_columns else "out_rows"] = ends
    return outputs


def to_offsets(request: Any, work: np.dtype[Any]) -> Results:
    """The index at which each row begins; BadRequest for rows that are unsorted, or beyond the matrix."""
    del work
    rows = np.asarray(request.rows).astype(np.int64) - request.base
    if (np.diff(rows) < 0).any() or (rows < 0).any() or (rows >= request.m).any():
        raise BadRequest("rows", "unsorted rows, or rows outside of the matrix", f"sorted rows below {request.m}")
    return {"out": np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=request.m))]) + request.base}


def to_rows(request: Any, work: np.dtype[Any]) -> Results:
    """The row of each element; BadRequest for offsets that do not fit the number of elements."""
    del work
    ends = np.asarray(request.rows).astype(np.int64) - request.base
    if (np.diff(ends) < 0).any() or ends[0] != 0 or ends[-1] != request.nnz:
        raise BadRequest("rows", "decreasing offsets, or a wrong last offset", f"the offsets of {request.nnz} elements")
    return {"out": np.repeat(np.arange(len(ends) - 1), np.diff(ends)) + request.base}


def vector_indices(request: Any) -> Array:
    """The places of the elements of a sparse vector, from 0 on; BadRequest for places beyond the dense vector."""
    places: Array = np.asarray(request.indices).astype(np.int64) - request.base
    if ((places < 0) | (places >= request.y.size)).any():
        wrong = int(((places < 0) | (places >= request.y.size)).sum())
        raise BadRequest("indices", f"{wrong} beyond the vector", f"indices of {request.y.size} elements")
    return places


def gathered(request: Any, work: np.dtype[Any]) -> Results:
    """Elements of a dense vector."""
    return {"out": numbers(request.y, work)[vector_indices(request)]}


def scattered(request: Any, work: np.dtype[Any]) -> Results:
    """A dense vector with some elements replaced."""
    dense = numbers(request.y, work).copy()
    dense[vector_indices(request)] = numbers(request.values, work)
    return {"out": dense}


def dotted(request: Any, work: np.dtype[Any]) -> Results:
    """The sum of products of a sparse vector and a dense one."""
    values = numbers(request.values, work)
    values = values.conj() if request.conj else values
    return {"out": np.array([(values * numbers(request.y, work)[vector_indices(request)]).sum()], values.dtype)}


def added(request: Any, work: np.dtype[Any]) -> Results:
    """A multiple of a sparse vector added to one of a dense one."""
    y, values = numbers(request.y, work), numbers(request.values, work)
    result = scaled(request, "beta", y) if request.reads_added else np.zeros_like(y)
    np.add.at(result, vector_indices(request), scaled(request, "alpha", values))
    return {"out": result}


def rotated(request: Any, work: np.dtype[Any]) -> Results:
    """A sparse vector and a dense one, rotated at the places of the sparse one."""
    at, values, y = vector_indices(request), numbers(request.values, work), numbers(request.y, work).copy()
    y_there = y[at]
    y[at] = scaled(request, "c", y_there) - scaled(request, "s", values)
    return {"out_values": scaled(request, "c", values) + scaled(request, "s", y_there), "out_y": y}


OPS: dict[str, Callable[[Any, np.dtype[Any]], Results]] = {
    "sparse_mv": product,
    "spmm": product,
    "spmm_batched": batch_of_products,
    "sddmm": sampled,
    "sddmm_batched": batch_of_samples,
    "spsv": solved,
    "spsm": solved,
    "spgemm": multiplied,
    "spgemm_nnz": counted,
    "sparse_to_dense": unpacked,
    "csr2csc": exchanged,
    "sparse_check": checked,
    "sparse_gather": gathered,
    "sparse_scatter": scattered,
    "sparse_axpby": added,
    "sparse_rot": rotated,
    "spvv": dotted,
    "dense_nnz": dense_counted,
    "dense_to_sparse": compressed,
    "coo2csr": to_offsets,
    "csr2coo": to_rows,
    "sparse_sort": put_in_order,
    **BLOCKS,
    **COMPILED,
    **ELL,
    **TRIDIAGONAL,
    **PENTADIAGONAL,
    **PRUNING,
    **INCOMPLETE,
}

numpy_check, numpy_dense_count = numpy_call(checked), numpy_call(dense_counted)
numpy_compressed = numpy_call(compressed)
