"""Requests of products with a sparse matrix whose operators are the caller's: compiled into cuSPARSE's kernels.

Follow https://docs.nvidia.com/cuda/cusparse/#cusparse-generic-functions, SpMMOp and SpMVOp. This file calls nothing.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dispatch.checks import shown
from dispatch.core.operands import Output, dense
from dispatch.core.request import Unpacked
from dispatch.errors import BadRequest
from dispatch.keys import F32, HALF
from dispatch.ops.sparse.base import Number, ScaledRequest, SparseRequest, check_matrix, check_vector
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.semirings import READY, Semiring, SparseOperator, check_operator, semiring_of

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["SpmmOpRequest", "SpmvOpRequest"]


@dataclass(frozen=True, eq=False)
class SpmmOpRequest(SparseRequest["Tensor"]):
    """C'[i, j] = epilogue(⊕ of A[i, k] ⊗ B[k, j] over the elements of row i, C[i, j]): cuSPARSE's SpMMOp.

    Attributes:
        b: (n, k), of A's dtype and of any strides.
        semiring: a `Semiring`, or the name of a ready one: "plus_times", "min_plus", "max_plus", "max_times", "or_and".
        c: what the epilogue has as `c`, of out's shape and dtype; it may be `out` itself.
        out: (m, k); of f16 and bf16 it may be f32, else it has A's dtype.

    A is in CSR. What is not stored takes no part: it is the identity of ⊕, and a stored 0 is a number as any other.
    f16 and bf16 are computed in f32, and rounded once. Complex numbers have no order, so that of the ready semirings
    they have "plus_times" alone. NVIDIA calls SpMMOp experimental, and its header marks it as deprecated from cuSPARSE
    12.9.4 on; it is there. The same bits come in each run.
    """

    op: ClassVar[str] = "spmm_op"
    reads: ClassVar[tuple[str, ...]] = ("values", "rows", "columns", "b", "c")
    mixed: ClassVar[tuple[str, ...]] = ("rows", "columns", "c")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "c")})
    same_bits: ClassVar[bool] = True
    b: Tensor
    semiring: Semiring | str = "plus_times"
    _: KW_ONLY
    c: Tensor | None = None
    out: Tensor | None = None

    @property
    def ring(self) -> Semiring:
        """The semiring, also of one that is given by its name."""
        return semiring_of(self.semiring)

    @property
    def out_dtype(self) -> Dtype:
        """The dtype of the result, and of what the epilogue has as `c`."""
        given = self.out if self.out is not None else self.c
        wide = given is not None and given.dtype is F32 and self.values.dtype in HALF
        return F32 if wide else self.values.dtype

    def check_operands(self) -> None:
        only_csr(self)
        m, n = self.form.shape
        check_matrix("b", self.b, (n, None), f"as A is [{m}, {n}]")
        check_matrix("c", self.c, (m, self.b.shape[1]), "the shape of the result")
        if self.c is not None and self.c.dtype is not self.out_dtype:
            hint = f'x.astype("{self.out_dtype}")'
            raise BadRequest("c", str(self.c.layout), f"{self.out_dtype}, the dtype of the result", hint)
        found, is_complex = self.ring, self.values.dtype.is_complex
        if isinstance(found.identity, complex) and not is_complex:
            raise BadRequest("semiring.identity", str(found.identity), f"a real number, as A is {self.values.dtype}")
        if is_complex and found.add in ORDERED:
            hint = "give a Semiring of operators that take complex numbers"
            given = next((name for name, one in READY.items() if one == found), shown(found))
            raise BadRequest("semiring", given, "plus_times, for complex numbers have no order", hint)

    def outputs(self) -> dict[str, Output]:
        return {"out": dense((self.form.shape[0], self.b.shape[1]), self.out_dtype)}

    def attributes(self) -> tuple[Any, ...]:
        return self.form, self.ring.lines, self.library


@dataclass(frozen=True, eq=False)
class SpmvOpRequest(ScaledRequest):
    """out[i] = epilogue(i, alpha · (A · x)[i] + beta · y[i]): cuSPARSE's SpMVOp.

    Attributes:
        x: (n,), dense.
        epilogue: a `SparseOperator` that finds `row`, a whole number from 0 on, and `x`, the sum of that row. None for
            the sum itself.
        y: added as beta · y, of out's shape; it may be `out` itself, and is not read where beta is 0.
        beta: a number; None for 1 where something is added.
        out: (m,).

    A is in CSR, f32 or f64, with i32 columns and rows of i32 or i64. NVIDIA calls it experimental. Each call analyses
    the matrix anew.
    """

    op: ClassVar[str] = "spmv_op"
    reads: ClassVar[tuple[str, ...]] = ("values", "rows", "columns", "x", "y")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "y")})
    numbers: ClassVar[tuple[str, ...]] = ("alpha", "beta")
    unpacked: ClassVar[Unpacked | None] = Unpacked(numbers=("alpha", "beta"))
    added: ClassVar[str] = "y"
    x: Tensor
    epilogue: SparseOperator | None = None
    _: KW_ONLY
    y: Tensor | None = None
    beta: Number | None = None
    out: Tensor | None = None

    def check_operands(self) -> None:
        only_csr(self)
        m, n = self.form.shape
        check_vector("x", self.x, n, f"as A is [{m}, {n}]")
        check_vector("y", self.y, m, f"as A is [{m}, {n}]")
        check_operator("epilogue", self.epilogue, may_be_none=True)

    def outputs(self) -> dict[str, Output]:
        return {"out": dense((self.form.shape[0],), self.values.dtype)}

    def attributes(self) -> tuple[Any, ...]:
        code = None if self.epilogue is None else self.epilogue.code
        return self.form, code, self.library, self.reads_added


ORDERED = tuple(one.add for name, one in READY.items() if name != "plus_times")


def only_csr(request: Any) -> None:
    """BadRequest for a matrix in another format than CSR."""
    kind = SparseFormat(request.form.format)
    if kind is not SparseFormat.CSR:
        raise BadRequest("form.format", kind.name, f"CSR, the one format of {request.op}", "dispatch.sparse.tocsr(a)")
