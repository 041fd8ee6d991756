"""The request of a batch of products of sparse matrices of one size with dense ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.core.operands import Output, dense
from dispatch.errors import BadRequest
from dispatch.ops.sparse.form import SparseFormat, check_form, check_parts, shape_of
from dispatch.ops.sparse.products import SpmmRequest, check_algorithm

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["BatchedSpmmRequest"]

BATCH = 3  # axes
PARTS = ("values", "rows", "columns")


@dataclass(frozen=True, eq=False)
class BatchedSpmmRequest(SpmmRequest):
    """C[i] = alpha · op(A[i]) · B[i] + beta · C[i]: cuSPARSE's SpMM over a strided batch.

    Attributes:
        values, columns: (batch, nnz), or (nnz,) both where one A is for all; the A of a batch have as many elements.
        rows: (batch, m + 1), or (m + 1,) where all A have their rows begin at the same places.
        form: that of each A, which is in CSR.
        b: (batch, n, k), or (batch, m, k) for a `trans` other than "n"; each matrix row-major or column-major.
        c: added as beta · c, of out's shape; it may be `out` itself, and is not read where beta is 0.
        out: (batch, m, k), or (batch, n, k).
    """

    op: ClassVar[str] = "spmm_batched"

    @property
    def batch(self) -> int:
        """How many products there are."""
        return self.b.shape[0]

    @property
    def same_bits(self) -> bool:
        """Not promised."""
        return False

    def check_fields(self) -> None:
        object.__setattr__(self, "form", check_form("form", self.form))
        if self.form.format != SparseFormat.CSR:
            kind = SparseFormat(self.form.format)  # type: ignore[arg-type]  # it is a member since it was checked
            raise BadRequest("form.format", kind.name, "CSR", "csr2csc makes one of CSC")
        if self.b.ndim != BATCH or not self.b.shape[0]:
            hint = "spmm takes one matrix" if self.b.ndim == len(("n", "k")) else ""
            raise BadRequest("b", str(self.b.layout), "(batch, n, k) of at least one matrix", hint)
        one = {name: self._one(name) for name in PARTS}
        check_parts(self.form, one)
        if self.values.ndim != self.columns.ndim or self.rows.ndim > self.values.ndim:
            wanted = "(batch, nnz) with values (batch, nnz), or one of each for all"
            raise BadRequest("columns", str(self.columns.layout), wanted)
        self.check_operands()
        self.check_factors()

    def _one(self, name: str) -> Tensor:
        """The first of a batch of parts, or the one for all."""
        part: Tensor = getattr(self, name)
        if part.ndim == 1:
            return part
        if part.ndim != len(("batch", "nnz")) or part.shape[0] != self.batch:
            raise BadRequest(name, str(part.layout), f"a batch of {self.batch}, as b is, or one for all")
        return part[0]

    def check_operands(self) -> None:
        m, n = shape_of(self.form, self.trans)
        if self.b.shape[1] != n:
            raise BadRequest("b", str(self.b.layout), f"{self.b.dtype}[{self.batch}, {n}, …], as op(A) is [{m}, {n}]")
        wanted = (self.batch, m, self.b.shape[2])
        if self.c is not None and self.c.shape != wanted:
            raise BadRequest("c", str(self.c.layout), f"{self.c.dtype}{list(wanted)}, the shape of the result")
        self.check_added()
        check_algorithm(self.form.format, self.algorithm)

    def outputs(self) -> dict[str, Output]:
        return {"out": dense((self.batch, shape_of(self.form, self.trans)[0], self.b.shape[2]), self.out_dtype)}
