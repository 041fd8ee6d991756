"""Sparse matrices of SciPy, CuPy and torch to and from SparseTensors over the same memory, without a copy.

SciPy's are on the host; `device` copies them to a GPU. Requests with tensors of torch and CuPy return tensors of these
libraries, as for dense operands. The matrices are recognized by their attributes, and a library is imported only to
create one of its matrices.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dispatch.checks import check_type, names_arguments, shown
from dispatch.device.device import Device
from dispatch.device.external_memory import from_dlpack
from dispatch.device.registry import device as device_of
from dispatch.errors import BadRequest, BadType, type_shown
from dispatch.keys import F16, Dtype
from dispatch.ops.sparse.form import SparseForm, SparseFormat
from dispatch.ops.sparse.tensor import SparseTensor

__all__ = ["is_sparse", "sparse_tensor", "to_scipy", "to_torch"]

COMPRESSED = ("csr", "csc", "bsr")
TORCH_LAYOUTS = {
    "torch.sparse_csr": (SparseFormat.CSR, "crow_indices", "col_indices"),
    "torch.sparse_csc": (SparseFormat.CSC, "row_indices", "ccol_indices"),
    "torch.sparse_bsr": (SparseFormat.BSR, "crow_indices", "col_indices"),
}


@names_arguments
def sparse_tensor(matrix: Any, *, device: Device | str | None = None, validate: bool = False) -> SparseTensor:
    """A matrix of scipy.sparse, cupyx.scipy.sparse or torch in CSR, CSC, COO or BSR, over the same memory.

    With a `device` it is copied there, whatever its library. COO is assumed to be sorted by row, as after
    `sum_duplicates()` and `coalesce()`; `validate` checks that, and all indices.
    """
    parts: tuple[Any, ...]
    if isinstance(matrix, SparseTensor):
        parts, form = (matrix.values, matrix.rows, matrix.columns), matrix.form
    elif str(getattr(matrix, "layout", "")) in (*TORCH_LAYOUTS, "torch.sparse_coo"):
        parts, form = of_torch(matrix)
    elif hasattr(matrix, "format") and hasattr(matrix, "nnz") and hasattr(matrix, "shape"):
        parts, form = of_scipy(matrix)
    elif str(getattr(matrix, "layout", "")).startswith("torch.sparse"):
        raise BadRequest(
            "matrix", f"a tensor of layout {matrix.layout}", "CSR, CSC, COO or BSR", "matrix.to_sparse_csr()"
        )
    else:
        hint = "dispatch.sparse.csr(values, rows, columns, shape) makes one from arrays"
        raise BadType("matrix", type_shown(matrix), "a sparse matrix of SciPy, CuPy or torch", hint)
    if device is not None:
        home = device if isinstance(device, Device) else device_of(device)
        parts = tuple(home.array(part) for part in parts)
        form = form._replace(pattern=None)
    values, rows, columns = parts
    return SparseTensor(values, rows, columns, form, validate=validate)


def is_sparse(given: Any) -> bool:
    """Whether something is a sparse matrix of SciPy, CuPy or torch."""
    return hasattr(given, "tocsr") or str(getattr(given, "layout", "")).startswith("torch.sparse")


def of_scipy(matrix: Any) -> tuple[tuple[Any, ...], SparseForm]:
    """The arrays of a matrix of SciPy, or of CuPy, which has the same attributes."""
    kind = matrix.format
    if len(matrix.shape) != 2:
        raise BadRequest("matrix", f"shape {shown(matrix.shape)}", "a matrix, with two axes")
    if kind in COMPRESSED:
        parts = (matrix.data, matrix.indptr, matrix.indices)
        if kind == "csc":
            parts = (matrix.data, matrix.indices, matrix.indptr)
        block = tuple(matrix.data.shape[1:]) if kind == "bsr" else (1, 1)
        form = SparseForm(SparseFormat[kind.upper()], tuple(map(int, matrix.shape)), 0, block)  # type: ignore[arg-type]
    elif kind == "coo":
        parts = (matrix.data, matrix.row, matrix.col)
        form = SparseForm(SparseFormat.COO, tuple(map(int, matrix.shape)))  # type: ignore[arg-type]
    else:
        raise BadRequest("matrix", f"a matrix in {kind.upper()}", "CSR, CSC, COO or BSR", "matrix.tocsr()")
    return tuple(_host_tensor(part) if isinstance(part, np.ndarray) else part for part in parts), form


def _host_tensor(array: Any) -> Any:
    """An array of SciPy's as a tensor of the host, over its memory; its results are tensors, too."""
    if array.dtype not in Dtype.by_numpy:
        raise BadRequest(
            "matrix", f"elements or indices of {array.dtype}", "a dtype that sparse rows support", "matrix.astype(…)"
        )
    return from_dlpack(array) if array.flags.writeable else array


def of_torch(matrix: Any) -> tuple[tuple[Any, ...], SparseForm]:
    """The tensors of a sparse tensor of torch."""
    import torch

    if matrix.dim() != 2:
        raise BadRequest(
            "matrix",
            f"shape {tuple(matrix.shape)}",
            "a matrix, with two axes",
            "pass the matrices of a batch one by one",
        )
    if matrix.requires_grad and torch.is_grad_enabled():
        hint = "x.detach(), or torch.no_grad() around the call"
        raise BadRequest("matrix", "a tensor that requires grad", "one that does not require grad", hint)
    shape = (int(matrix.shape[0]), int(matrix.shape[1]))
    name = str(matrix.layout)
    if name == "torch.sparse_coo":
        if not matrix.is_coalesced():
            raise BadRequest(
                "matrix", "a tensor that is not coalesced", "each element once, sorted", "matrix.coalesce()"
            )
        indices = matrix.indices()
        values = matrix.values().detach()
        if values.dim() != 1:
            raise BadRequest("matrix", f"values of {values.dim()} axes", "one number for each element")
        return (values, indices[0], indices[1]), SparseForm(SparseFormat.COO, shape)
    kind, rows, columns = TORCH_LAYOUTS[name]
    values = matrix.values().detach()
    block = (int(values.shape[1]), int(values.shape[2])) if kind is SparseFormat.BSR else (1, 1)
    parts = (values, getattr(matrix, rows)(), getattr(matrix, columns)())
    return parts, SparseForm(kind, shape, 0, block)


# -- the reverse --------------------------------------------------------------------------------------------------
@names_arguments
def to_scipy(a: SparseTensor) -> Any:
    """The matrix as an array of scipy.sparse: over the same memory on the host, and copied from a GPU, with base 0.

    BadRequest for elements of a dtype that SciPy lacks: f16, bf16 and f8.
    """
    import scipy.sparse as sp

    check_type("a", a, SparseTensor)
    if a.dtype.numpy.isbuiltin != 1 or a.dtype is F16:
        hint = 'a.with_values(a.values.astype("f32"))'
        raise BadRequest("a", repr(a), f"a dtype that SciPy supports, which {a.dtype} is not", hint)
    values, rows, columns = (np.asarray(part) for part in (a.values, a.rows, a.columns))
    if a.form.base:
        rows, columns = rows - a.form.base, columns - a.form.base
    name = a.format.name.lower()
    if a.format is SparseFormat.COO:
        return sp.coo_array((values, (rows, columns)), shape=a.shape)
    offsets, indices = (columns, rows) if a.format is SparseFormat.CSC else (rows, columns)
    made: Any = getattr(sp, f"{name}_array")
    return made((values, indices, offsets), shape=a.shape, copy=False)


@names_arguments
def to_torch(a: SparseTensor) -> Any:
    """The matrix as a sparse tensor of torch over the same memory; BadRequest with base 1, which torch lacks."""
    import torch

    check_type("a", a, SparseTensor)
    if a.form.base:
        raise BadRequest("a", repr(a), "base 0, the only one that torch supports")
    values, rows, columns = (_to_torch(torch, part) for part in (a.values, a.rows, a.columns))
    if a.format is SparseFormat.COO:
        places = torch.stack((rows, columns))
        return torch.sparse_coo_tensor(places, values, a.shape, device=values.device, is_coalesced=True)
    offsets, indices = (columns, rows) if a.format is SparseFormat.CSC else (rows, columns)
    layout = getattr(torch, f"sparse_{a.format.name.lower()}")
    return torch.sparse_compressed_tensor(offsets, indices, values, a.shape, layout=layout, device=values.device)


def _to_torch(torch: Any, part: Any) -> Any:
    source = getattr(part.storage, "keep", None)
    return source if isinstance(source, torch.Tensor) and source.data_ptr() == part.ptr else torch.from_dlpack(part)
