"""Requests of batches of products: a batch of sparse matrices of one size times dense ones, and batched SDDMM.

All matrices of a batch have the same number of elements. Each of the three parts of A either has a batch axis in front,
or is shared by all matrices. Follows https://docs.nvidia.com/cuda/cusparse/#cusparsespmm and #cusparsesddmm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dispatch.core.operands import Output, dense
from dispatch.errors import BadRequest
from dispatch.ops.sparse.base import check_added
from dispatch.ops.sparse.batched_rules import axes_of
from dispatch.ops.sparse.form import SparseFormat, check_form, check_parts, shape_of
from dispatch.ops.sparse.products import SddmmRequest, SpmmRequest, check_algorithm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.device.tensor import Tensor

__all__ = ["BatchedSddmmRequest", "BatchedSpmmRequest"]

BATCH = 3  # axes
PARTS = ("values", "rows", "columns")


def check_batch(request: Any, formats: Sequence[SparseFormat], hint: str = "") -> None:
    """Set a request's form; BadRequest for another format, and for parts that are neither batched nor shared."""
    form = check_form("form", request.form)
    object.__setattr__(request, "form", form)
    if form.format not in formats:
        kind = SparseFormat(form.format)  # type: ignore[arg-type]  # it is a member since it was checked
        *others, last = (one.name for one in formats)
        raise BadRequest("form.format", kind.name, f"{', '.join(others)} or {last}", hint)
    check_parts(form, {name: first_part(request, name) for name in PARTS})


def first_part(request: Any, name: str) -> Tensor:
    """The first of a batch of parts, or the shared one."""
    part: Tensor = getattr(request, name)
    axes = axes_of(request, name)
    if part.ndim == axes:
        return part
    if part.ndim != axes + 1 or part.shape[0] != request.batch:
        expected = f"a batch of {request.batch}, like {request.batch_operand}, or one matrix for all"
        raise BadRequest(name, str(part.layout), expected)
    return part[0]


@dataclass(frozen=True, eq=False)
class BatchedSpmmRequest(SpmmRequest):
    """C[i] = alpha · op(A[i]) · B[i] + beta · C[i]: a batch of SpMM.

    Follows https://docs.nvidia.com/cuda/cusparse/#cusparsespmm. Indices beyond a matrix are read beyond other operands.

    Attributes:
        values: (batch, nnz), or (nnz,) if all A share them; of BSR (batch, blocks, block rows, block columns), or the
            same without the batch axis. All A of a batch have the same number of elements. For f16 and bf16 sums are
            f32, and results may be f32.
        rows: of CSR (batch, m + 1), or (m + 1,) if all A share the row offsets; of CSC and COO (batch, nnz), or (nnz,)
            if all A share the row indices; of BSR as of CSR, by rows of blocks.
        columns: of CSC (batch, n + 1), or (n + 1,) if shared; of the others (batch, nnz), or (nnz,) if shared.
        form: that of each A.
        b: (batch, n, k), or (batch, m, k) for a `trans` other than "n".
        c: added as beta · c, of out's shape; it may be `out` itself, and is not read if beta is 0.
        out: (batch, m, k), or (batch, n, k).
        algorithm: a `SpmmAlgorithm` for the format of A; for COO not COO_ALG3, which does not support batches. If left
            out it is COO_ALG4 for COO.

    CSR and BSR with `trans` "n", and CSC with another `trans`, run as one launch of a kernel of `spmm` if `algorithm`
    is left out: for B and C of any strides, with the same bits in each run. All else is computed by cuSPARSE, which
    needs row-major or column-major matrices of B and C: in one call if cuSPARSE supports such a batch, which it does
    for CSR with an algorithm and for COO with one A for all, else with a call for each matrix.
    """

    op: ClassVar[str] = "spmm_batched"
    batch_operand: ClassVar[str] = "b"  # its first axis is the batch size

    @property
    def batch(self) -> int:
        """The number of products."""
        return self.b.shape[0]

    @property
    def same_bits(self) -> bool:
        """Whether the same bits in each run are promised: not if the product may be cuSPARSE's."""
        return self.library == "own"

    def check_fields(self) -> None:
        if self.b.ndim != BATCH or not self.b.shape[0]:
            hint = "for one matrix use spmm" if self.b.ndim == len(("n", "k")) else ""
            raise BadRequest("b", str(self.b.layout), "(batch, n, k) of at least one matrix", hint)
        check_batch(self, tuple(SparseFormat))
        is_one = self.values.ndim == axes_of(self, "values")
        for name in ("rows", "columns"):
            part: Tensor = getattr(self, name)
            if is_one and part.ndim > 1:
                wanted = "one for all matrices, like values, or values (batch, nnz)"
                raise BadRequest(name, str(part.layout), wanted)
        self.check_operands()
        self.check_factors()

    def check_operands(self) -> None:
        m, n = shape_of(self.form, self.trans)
        if self.b.shape[1] != n:
            raise BadRequest(
                "b", str(self.b.layout), f"{self.b.dtype}[{self.batch}, {n}, …], because op(A) is [{m}, {n}]"
            )
        wanted = (self.batch, m, self.b.shape[2])
        if self.c is not None and self.c.shape != wanted:
            raise BadRequest("c", str(self.c.layout), f"{self.c.dtype}{list(wanted)}, the shape of the result")
        check_added(self, self.added)
        check_algorithm(self.form.format, self.algorithm)

    def outputs(self) -> dict[str, Output]:
        return {"out": dense((self.batch, shape_of(self.form, self.trans)[0], self.b.shape[2]), self.out_dtype)}


@dataclass(frozen=True, eq=False)
class BatchedSddmmRequest(SddmmRequest):
    """C[i] = alpha · (A[i] · B[i] where C[i] has elements) + beta · C[i]: SDDMM over a batch, as one launch.

    The result is the values of matrices with the rows and columns of C, with the same bits in each run. Follows
    https://docs.nvidia.com/cuda/cusparse/#cusparsesddmm, by a kernel of this library. Indices beyond a matrix are read
    beyond other operands.

    Attributes:
        values: those of C, (batch, nnz), or (nnz,) if shared; not read if beta is 0. All operands have their dtype: f32
            f64 c64 c128 f16 or bf16. For the 16-bit dtypes sums are f32.
        rows: of CSR (batch, m + 1), or (m + 1,) if shared; of CSC and COO (batch, nnz), or (nnz,) if shared.
        columns: of CSC (batch, n + 1), or (n + 1,) if shared; of CSR and COO (batch, nnz), or (nnz,) if shared. All C
            of a batch have the same number of elements.
        form: that of each C, in CSR, CSC or COO.
        a: (batch, m, k), of any strides, or (m, k) if shared.
        b: (batch, k, n), of any strides, or (k, n) if shared. At least one of a and b is a batch.
        beta: a number; None for 0.
        out: (batch, nnz); it may be `values` itself.
    """

    op: ClassVar[str] = "sddmm_batched"

    @property
    def batch_operand(self) -> str:
        """The operand that determines the batch size."""
        return "a" if self.a.ndim == BATCH else "b"

    @property
    def batch(self) -> int:
        """The number of products."""
        first: Tensor = getattr(self, self.batch_operand)
        return first.shape[0]

    def check_fields(self) -> None:
        first: Tensor = getattr(self, self.batch_operand)
        if first.ndim != BATCH or not first.shape[0]:
            hint = "for one matrix of each operand use sddmm" if first.ndim == len(("k", "n")) else ""
            wanted = "(batch, k, n) of at least one matrix, or such an a of (batch, m, k)"
            raise BadRequest(self.batch_operand, str(first.layout), wanted, hint)
        formats = (SparseFormat.CSR, SparseFormat.CSC, SparseFormat.COO)
        check_batch(self, formats, "dispatch.sparse.tocsr converts BSR")
        self.check_operands()
        self.check_factors()

    def check_operands(self) -> None:
        m, n = self.form.shape
        self._check_batch("a", (m, None), f"because C is [{m}, {n}]")
        self._check_batch("b", (self.a.shape[-1], n), f"because C is [{m}, {n}] and a is {list(self.a.shape)}")

    def _check_batch(self, name: str, shape: tuple[int | None, int | None], reason: str) -> None:
        """BadRequest unless an operand is a matrix, or a batch of matrices, of these extents; None allows any."""
        tensor: Tensor = getattr(self, name)
        extents = (self.batch, *shape)[-tensor.ndim :]
        fits = tensor.ndim in (BATCH, BATCH - 1) and all(
            w in (None, e) for w, e in zip(extents, tensor.shape, strict=True)
        )
        if not fits:
            one = ", ".join("…" if extent is None else str(extent) for extent in shape)
            expected = f"{tensor.dtype}[{self.batch}, {one}], or [{one}] for all, {reason}"
            raise BadRequest(name, str(tensor.layout), expected)

    def outputs(self) -> dict[str, Output]:
        return {"out": dense((self.batch, self.values.shape[-1]), self.values.dtype)}
