"""A sparse matrix in another format, in SciPy's words: `tocsr`, `tocsc` and `tocoo`.

The requests behind them take indices of i32 alone. Those of i64 become such, as far as the matrix's extents allow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.request import run
from dispatch.errors import BadRequest
from dispatch.keys import I32
from dispatch.ops import sparse as ops
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.sources import sparse_tensor
from dispatch.ops.sparse.tensor import SparseTensor

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["of", "tocoo", "tocsc", "tocsr"]

MAX_I32 = np.iinfo(np.int32).max


def of(a: Any) -> SparseTensor:
    """A sparse operand as a SparseTensor."""
    return a if isinstance(a, SparseTensor) else sparse_tensor(a)


def tocsr(a: Any) -> SparseTensor:
    """The matrix in CSR: itself, of CSC by the request `csr2csc`, or of COO by `coo2csr`.

    Another format's indices of i64 become i32 on the host, which is waited for.
    """
    found = of(a)
    if found.format is SparseFormat.COO:
        found = _narrow(found)
        rows = run(ops.Coo2csrRequest(found.rows, m=found.shape[0], base=found.form.base))
        form = found.form._replace(format=SparseFormat.CSR, pattern=None)
        return SparseTensor(found.values, rows, found.columns, form)
    return found if found.format is SparseFormat.CSR else _exchanged(found, SparseFormat.CSR)


def tocsc(a: Any) -> SparseTensor:
    """The matrix in CSC: itself, or of CSR by the request `csr2csc`, of COO by way of CSR; i64 as `tocsr` has it."""
    found = of(a)
    if found.format is SparseFormat.CSC:
        return found
    return _exchanged(tocsr(found) if found.format is SparseFormat.COO else found, SparseFormat.CSC)


def tocoo(a: Any) -> SparseTensor:
    """The matrix in COO: itself, or of CSR by the request `csr2coo`, of CSC by way of CSR; i64 as `tocsr` has it."""
    found = of(a)
    if found.format is SparseFormat.COO:
        return found
    found = _narrow(tocsr(found))
    rows = run(ops.Csr2cooRequest(found.rows, nnz=found.nnz, base=found.form.base))
    form = found.form._replace(format=SparseFormat.COO, pattern=None)
    return SparseTensor(found.values, rows, found.columns, form)


def _narrow(a: SparseTensor) -> SparseTensor:
    """The matrix with indices of i32; BadRequest where these do not count its rows, columns or elements."""
    if a.rows.dtype is I32 and a.columns.dtype is I32:
        return a
    if max(*a.shape, a.nnz) + a.form.base > MAX_I32:
        expected = f"at most {MAX_I32} rows, columns and elements, which indices of i32 count"
        raise BadRequest("a", repr(a), expected, "convert it before: a.tocsr() of SciPy or CuPy")
    return SparseTensor(a.values, _of_i32("rows", a.rows), _of_i32("columns", a.columns), a.form)


def _of_i32(name: str, part: Tensor) -> Tensor:
    """Indices in i32, by the host, which looks whether each is one: it would become another."""
    if part.dtype is I32:
        return part
    given = part.numpy()
    if given.size and not 0 <= given.min() <= given.max() <= MAX_I32:
        raise BadRequest(name, f"indices from {given.min()} to {given.max()}", f"those from 0 to {MAX_I32}")
    return part.device.array(given.astype(np.int32))


def _exchanged(a: SparseTensor, wanted: SparseFormat) -> SparseTensor:
    if a.format is SparseFormat.BSR:
        hint = f"a.to{wanted.name.lower()}() of SciPy or CuPy"
        raise BadRequest("a", repr(a), "CSR, CSC or COO", hint)
    values, rows, columns = run(ops.Csr2cscRequest(*_narrow(a).parts))
    return SparseTensor(values, rows, columns, a.form._replace(format=wanted, pattern=None))
