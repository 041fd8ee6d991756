"""Requests of products with a sparse matrix and the caller's operators, compiled by NVRTC for our kernels or cuSPARSE.

Follows https://docs.nvidia.com/cuda/cusparse/#cusparse-generic-functions, SpMMOp and SpMVOp. This file calls no
library.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dispatch.checks import shown
from dispatch.core.operands import Output, dense
from dispatch.core.request import Unpacked
from dispatch.errors import BadRequest
from dispatch.ops.sparse.base import (
    Number,
    ScaledSparseRequest,
    SparseRequest,
    check_added,
    check_matrix,
    check_vector,
    result_dtype,
)
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.semirings import NAMED_SEMIRINGS, Semiring, SparseOperator, check_operator, semiring_of

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["SpmmOpRequest", "SpmvOpRequest"]


@dataclass(frozen=True, eq=False)
class SpmmOpRequest(SparseRequest["Tensor"]):
    """C'[i, j] = epilogue(⊕ of A[i, k] ⊗ B[k, j] over the elements of row i, C[i, j]).

    Attributes:
        b: (n, k), of A's dtype and of any strides.
        semiring: a `Semiring`, or the name of a predefined one: "plus_times", "min_plus", "max_plus", "max_times",
            "or_and".
        c: the operand `c` of the epilogue, of out's shape and dtype; it may be `out` itself.
        out: (m, k); for f16 and bf16 it may be f32, else it has A's dtype.

    A is in CSR. Elements that are not stored take no part: they are the identity of ⊕; a stored 0 is a number like any
    other. f16 and bf16 are computed in f32, and rounded once. Complex numbers have no order, so that "plus_times" is
    the only predefined semiring for them. The same bits come in each run. The product is one launch of a kernel of this
    library, into which the operators are compiled. With `library="cusparse"` it is cuSPARSE's SpMMOp, which NVIDIA
    calls experimental, and its header deprecated from 12.9.4 on.
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
        """The semiring, also if the request has its name."""
        return semiring_of(self.semiring)

    @property
    def out_dtype(self) -> Dtype:
        """The dtype of the result, and of the epilogue's `c`."""
        return result_dtype(self, "c")

    def check_operands(self) -> None:
        only_csr(self)
        m, n = self.form.shape
        check_matrix("b", self.b, (n, None), f"because A is [{m}, {n}]")
        check_matrix("c", self.c, (m, self.b.shape[1]), "the shape of the result")
        check_added(self, "c")
        ring, is_complex = self.ring, self.values.dtype.is_complex
        if isinstance(ring.identity, complex) and not is_complex:
            raise BadRequest(
                "semiring.identity", str(ring.identity), f"a real number, because A is {self.values.dtype}"
            )
        if is_complex and ring.add in ORDERED:
            hint = "pass a Semiring whose operators support complex numbers"
            given = next((name for name, one in NAMED_SEMIRINGS.items() if one == ring), shown(ring))
            raise BadRequest("semiring", given, "plus_times, because complex numbers have no order", hint)

    def outputs(self) -> dict[str, Output]:
        return {"out": dense((self.form.shape[0], self.b.shape[1]), self.out_dtype)}

    def attributes(self) -> tuple[Any, ...]:
        return self.form, self.ring.code_key, self.library


@dataclass(frozen=True, eq=False)
class SpmvOpRequest(ScaledSparseRequest):
    """out[i] = epilogue(i, alpha · (A · x)[i] + beta · y[i]).

    Attributes:
        x: (n,), dense.
        epilogue: a `SparseOperator` of `row`, a whole number from 0 on, and `x`, the sum of that row. None for the sum
            itself.
        y: added as beta · y, of out's shape; it may be `out` itself, and is not read if beta is 0.
        beta: a number; None for 1 if something is added.
        out: (m,); for f16 and bf16 it may be f32, else it has A's dtype.

    A is in CSR. f16 and bf16 are computed in f32, and rounded once. The same bits come in each run. The product is one
    launch of the kernel of `sparse_mv`, into which the epilogue is compiled. With `library="cusparse"` it is cuSPARSE's
    SpMVOp, which NVIDIA calls experimental: for f32 and f64, with base 0 and i32 columns. SpMVOp analyses the matrix in
    each call, unless its pattern is fixed.
    """

    op: ClassVar[str] = "spmv_op"
    reads: ClassVar[tuple[str, ...]] = ("values", "rows", "columns", "x", "y")
    mixed: ClassVar[tuple[str, ...]] = ("rows", "columns", "y")
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

    @property
    def same_bits(self) -> bool:
        """Whether the same bits in each run are promised: not if the product may be cuSPARSE's."""
        return self.library == "own"

    @property
    def out_dtype(self) -> Dtype:
        """The dtype of the result, and of the added operand."""
        return result_dtype(self, "y")

    def check_operands(self) -> None:
        only_csr(self)
        m, n = self.form.shape
        check_vector("x", self.x, n, f"because A is [{m}, {n}]")
        check_vector("y", self.y, m, f"because A is [{m}, {n}]")
        check_added(self, "y")
        check_operator("epilogue", self.epilogue, may_be_none=True)

    def outputs(self) -> dict[str, Output]:
        return {"out": dense((self.form.shape[0],), self.out_dtype)}

    def attributes(self) -> tuple[Any, ...]:
        code = None if self.epilogue is None else self.epilogue.code
        return self.form, code, self.library, self.reads_added


ORDERED = tuple(one.add for name, one in NAMED_SEMIRINGS.items() if name != "plus_times")


def only_csr(request: Any) -> None:
    """BadRequest for a matrix in another format than CSR."""
    kind = SparseFormat(request.form.format)
    if kind is not SparseFormat.CSR:
        raise BadRequest(
            "form.format", kind.name, f"CSR, the only format that {request.op} supports", "dispatch.sparse.tocsr(a)"
        )
