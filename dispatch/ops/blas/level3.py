"""The requests of BLAS level 3: matrices with matrices. `cublas3.py` calls cuBLAS, `reference3.py` is NumPy.

Follows https://docs.nvidia.com/cuda/cublas/#cublas-level-3-function-reference, for row-major or column-major tensors.
Except for `trsm`, which supports leading axes, cuBLAS has no batched form of these routines.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.core.operands import Output, by_columns, dense, like
from dispatch.core.overlap import same_view
from dispatch.core.request import Unpacked
from dispatch.errors import BadRequest
from dispatch.keys import member
from dispatch.ops.blas.arrangements import leading_dimension
from dispatch.ops.blas.base import BlasRequest, Number, ScaledRequest, Shape, dims
from dispatch.ops.blas.choices import DiagType, FillMode, Operation, SideMode

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = [
    "DgmmRequest",
    "GeamRequest",
    "HemmRequest",
    "Her2kRequest",
    "HerkRequest",
    "HerkxRequest",
    "SymmRequest",
    "Syr2kRequest",
    "SyrkRequest",
    "SyrkxRequest",
    "TrmmRequest",
    "TrsmRequest",
]


@dataclass(frozen=True, eq=False)
class AddingRequest(ScaledRequest):
    """A product, optionally added to a matrix.

    Attributes:
        c: added as beta · c, of out's shape; it may be `out` itself, and is not read if beta is 0.
        beta: a number; by default 1 if there is a c. Without c it is 0.
    """

    numbers: ClassVar[tuple[str, ...]] = ("alpha", "beta")
    unpacked: ClassVar[Unpacked | None] = Unpacked(numbers=("alpha", "beta"))
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "c")})
    _: KW_ONLY
    c: Tensor | None = None
    beta: Number | None = None


# -- symmetric and Hermitian matrices --------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class SymmRequest(AddingRequest):
    """C = alpha · A · B + beta · C, or alpha · B · A + beta · C, where A is symmetric.

    Attributes:
        a: (m, m) for side "left", (n, n) for "right"; only its triangle `uplo` is read.
        b: (m, n).
        side: the side of A relative to B.
        uplo: which triangle of A is read: "lower" or "upper".
        out: C, (m, n), with the memory layout of b.
    """

    op: ClassVar[str] = "symm"
    reads: ClassVar[tuple[str, ...]] = ("a", "b", "c")
    a: Tensor
    b: Tensor
    _: KW_ONLY
    side: SideMode | str = SideMode.LEFT
    uplo: FillMode | str = FillMode.LOWER
    out: Tensor | None = None

    def extents(self) -> dict[str, Shape]:
        m, n = dims("b", self.b)
        order = m if self.side is SideMode.LEFT else n
        return {"a": (order, order), "b": (m, n), "c": (m, n), "out": (m, n)}

    def outputs(self) -> dict[str, Output]:
        return {"out": like(self.b.layout)}


@dataclass(frozen=True, eq=False)
class HemmRequest(SymmRequest):
    """C = alpha · A · B + beta · C, or alpha · B · A + beta · C, where A is Hermitian; only complex matrices.

    The imaginary parts of A's diagonal are treated as 0.
    """

    op: ClassVar[str] = "hemm"


@dataclass(frozen=True, eq=False)
class RankRequest(AddingRequest):
    """A sum of outer products; only one triangle is computed.

    Attributes:
        a: (n, k), or (k, n) for a `trans` other than "n".
        uplo: the triangle that is computed, and that is read from c: "lower" or "upper". The other triangle of the
            result is c's, unchanged, or 0 if there is no c.
        trans: "n" for a times its transpose or adjoint, "t" or "c" for its transpose or adjoint times a.
        out: (n, n), with the memory layout of a.
    """

    reads: ClassVar[tuple[str, ...]] = ("a", "c")
    a: Tensor
    _: KW_ONLY
    uplo: FillMode | str = FillMode.LOWER
    trans: Operation | str = Operation.N
    out: Tensor | None = None

    def extents(self) -> dict[str, Shape]:
        n, k = dims("a", self.a)
        n = n if self.trans is Operation.N else k
        shapes = {"a": self.a.shape, "c": (n, n), "out": (n, n)}
        return shapes | ({"b": self.a.shape} if "b" in self.reads else {})

    def outputs(self) -> dict[str, Output]:
        return {"out": like(self.a.layout, self.extents()["out"])}

    def check_fields(self) -> None:
        super().check_fields()
        is_complex, letter = self.a.dtype.is_complex, "C" if self.is_hermitian else "T"
        if is_complex and self.trans not in (Operation.N, Operation[letter]):
            operation = "the adjoint" if self.is_hermitian else "the transpose"
            raise BadRequest("trans", member(self.trans).name, f"N or {letter}: {self.op} multiplies by {operation}")

    @property
    def takes_c(self) -> bool:
        return self.c is not None

    @property
    def is_hermitian(self) -> bool:
        return self.op.startswith("he")


@dataclass(frozen=True, eq=False)
class SyrkRequest(RankRequest):
    """C = alpha · A · Aᵀ + beta · C, or with trans "t" alpha · Aᵀ · A + beta · C: a triangle of it."""

    op: ClassVar[str] = "syrk"


@dataclass(frozen=True, eq=False)
class HerkRequest(RankRequest):
    """C = alpha · A · Aᴴ + beta · C, or with trans "c" alpha · Aᴴ · A + beta · C: a triangle; only complex matrices.

    Alpha and beta are real; the imaginary parts of c's diagonal are treated as 0, and those of the result are 0. If
    alpha is 0, or there are no columns, and beta is 1, the result is c unchanged, including imaginary parts, as in
    LAPACK's BLAS.
    """

    op: ClassVar[str] = "herk"
    real: ClassVar[tuple[str, ...]] = ("alpha", "beta")


@dataclass(frozen=True, eq=False)
class RankTwoRequest(RankRequest):
    """Outer products of two matrices.

    Attributes:
        b: of a's shape, with the memory layout of a.
    """

    reads: ClassVar[tuple[str, ...]] = ("a", "b", "c")
    b: Tensor


@dataclass(frozen=True, eq=False)
class Syr2kRequest(RankTwoRequest):
    """C = alpha · (A · Bᵀ + B · Aᵀ) + beta · C, or with trans "t" alpha · (Aᵀ · B + Bᵀ · A) + beta · C: a triangle."""

    op: ClassVar[str] = "syr2k"


@dataclass(frozen=True, eq=False)
class Her2kRequest(RankTwoRequest):
    """C = alpha · A · Bᴴ + conj(alpha) · B · Aᴴ + beta · C: a triangle of it; only complex matrices.

    With trans "c" it is alpha · Aᴴ · B + conj(alpha) · Bᴴ · A + beta · C. Beta is real; the imaginary parts of c's
    diagonal are treated as 0, and those of the result are 0. If alpha is 0, or there are no columns, and beta is 1, the
    result is c unchanged, including imaginary parts, as in LAPACK's BLAS.
    """

    op: ClassVar[str] = "her2k"
    real: ClassVar[tuple[str, ...]] = ("beta",)


@dataclass(frozen=True, eq=False)
class SyrkxRequest(RankTwoRequest):
    """C = alpha · A · Bᵀ + beta · C, or with trans "t" alpha · Aᵀ · B + beta · C: a triangle of it.

    For products that are known to be symmetric, such as those of b = a · D with a diagonal D.
    """

    op: ClassVar[str] = "syrkx"


@dataclass(frozen=True, eq=False)
class HerkxRequest(RankTwoRequest):
    """C = alpha · A · Bᴴ + beta · C, or with trans "c" alpha · Aᴴ · B + beta · C: a triangle; only complex matrices.

    For products that are known to be Hermitian. Beta is real; the imaginary parts of c's diagonal are treated as 0, and
    those of the result are 0. If alpha is 0, or there are no columns, and beta is 1, the result is c unchanged,
    including imaginary parts, as for `her2k` in LAPACK's BLAS.
    """

    op: ClassVar[str] = "herkx"
    real: ClassVar[tuple[str, ...]] = ("beta",)


# -- triangular matrices ---------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class TriangularRequest(ScaledRequest):
    """A triangular matrix and another matrix; op(A) is A, Aᵀ or Aᴴ.

    Attributes:
        a: (m, m) for side "left", (n, n) for "right"; only its triangle `uplo` is read.
        b: (m, n); it may be `out` itself.
        side: the side of op(A) relative to the other matrix.
        uplo: which triangle of A is read: "lower" or "upper".
        trans: op: "n" for A, "t" for Aᵀ, "c" for Aᴴ.
        diag: "unit" treats the diagonal of A as ones, and does not read it.
        out: (m, n), with the memory layout of b.
    """

    reads: ClassVar[tuple[str, ...]] = ("a", "b")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "b")})
    a: Tensor
    b: Tensor
    _: KW_ONLY
    side: SideMode | str = SideMode.LEFT
    uplo: FillMode | str = FillMode.LOWER
    trans: Operation | str = Operation.N
    diag: DiagType | str = DiagType.NON_UNIT
    out: Tensor | None = None

    def extents(self) -> dict[str, Shape]:
        m, n = dims("b", self.b)
        order = m if self.side is SideMode.LEFT else n
        return {"a": (order, order), "b": (m, n), "out": (m, n)}

    def outputs(self) -> dict[str, Output]:
        return {"out": like(self.b.layout)}


@dataclass(frozen=True, eq=False)
class TrmmRequest(TriangularRequest):
    """C = alpha · op(A) · B, or alpha · B · op(A), where A is triangular."""

    op: ClassVar[str] = "trmm"


@dataclass(frozen=True, eq=False)
class TrsmRequest(TriangularRequest):
    """The X for which op(A) · X = alpha · B, or X · op(A) = alpha · B, where A is triangular.

    Attributes:
        a: (…, m, m) for side "left", (…, n, n) for "right"; only its triangle `uplo` is read. Its leading axes are
            those of b, or broadcast to them.
        b: (…, m, n), the right-hand sides; it may be `out` itself.
        out: X, (…, m, n). By default it is column-major for side "left" and row-major for "right", which cuBLAS solves
            in less time, unless that would need a conjugate of A's elements without a transposition.

    A singular A is not detected: a 0 on its diagonal gives infinities and NaN.
    """

    op: ClassVar[str] = "trsm"

    def extents(self) -> dict[str, Shape]:
        for name, tensor in (("a", self.a), ("b", self.b)):
            if tensor.ndim < 2:
                raise BadRequest(name, str(tensor.layout), "a matrix, or several along leading axes", "x[:, None]")
        *batch, m, n = self.b.shape
        order = m if self.side is SideMode.LEFT else n
        theirs = self.a.shape[:-2]
        padded = (1,) * (len(batch) - len(theirs)) + theirs
        if len(padded) > len(batch) or any(one not in (1, other) for one, other in zip(padded, batch, strict=True)):
            expected = f"{self.a.dtype}{[*batch, order, order]}, or leading axes that broadcast to those of b"
            raise BadRequest("a", str(self.a.layout), expected)
        return {"a": (*theirs, order, order), "b": self.b.shape, "out": self.b.shape}

    def outputs(self) -> dict[str, Output]:
        is_row = self.solves_rows
        if not self.may_transpose_a and leading_dimension(self.a.layout, row=is_row) is None:
            is_row = not is_row
        return {"out": (dense if is_row else by_columns)(self.b.shape, self.b.dtype)}

    @property
    def solves_rows(self) -> bool:
        """Whether cuBLAS solves a row-major result from the left, where it is faster than from the right."""
        return self.side is SideMode.RIGHT

    @property
    def may_transpose_a(self) -> bool:
        """Whether A may be read transposed: no operation conjugates without transposing."""
        return self.trans is not Operation.C or not self.a.dtype.is_complex


# -- matrices of any kind --------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class GeamRequest(ScaledRequest):
    """C = alpha · op(A) + beta · op(B): sums, transposes and copies of matrices.

    Attributes:
        a: (m, n), or (n, m) for a `trans_a` other than "n"; not read if alpha is 0. It may be `out` itself, unless it
            is transposed.
        b: (m, n), or (n, m) for a `trans_b` other than "n"; not read if beta is 0. It may be `out` itself, unless it is
            transposed.
        beta: a number; complex only for complex matrices.
        trans_a, trans_b: "n", "t", or "c" for the conjugate transpose.
        out: C, (m, n); by default it has the memory layout of a.
    """

    op: ClassVar[str] = "geam"
    reads: ClassVar[tuple[str, ...]] = ("a", "b")
    numbers: ClassVar[tuple[str, ...]] = ("alpha", "beta")
    unpacked: ClassVar[Unpacked | None] = Unpacked(numbers=("alpha", "beta"))
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "a"), ("out", "b")})
    a: Tensor
    b: Tensor
    _: KW_ONLY
    beta: Number = 1.0
    trans_a: Operation | str = Operation.N
    trans_b: Operation | str = Operation.N
    out: Tensor | None = None

    def extents(self) -> dict[str, Shape]:
        m, n = dims("a", self.a)
        m, n = (m, n) if self.trans_a is Operation.N else (n, m)
        return {"a": self.a.shape, "b": (m, n) if self.trans_b is Operation.N else (n, m), "out": (m, n)}

    def outputs(self) -> dict[str, Output]:
        return {"out": like(self.a.layout, self.extents()["out"])}

    def check_fields(self) -> None:
        super().check_fields()
        for name, trans in (("a", self.trans_a), ("b", self.trans_b)):
            if self.out is not None and trans is not Operation.N and same_view(self.out, getattr(self, name)):
                expected = f"memory other than that of {name}, which is transposed"
                raise BadRequest("out", f"{name} itself", expected, "leave out=None")


@dataclass(frozen=True, eq=False)
class DgmmRequest(BlasRequest):
    """C = diag(x) · A for side "left", or A · diag(x) for "right": each row or column times its own number.

    Attributes:
        a: (m, n); it may be `out` itself.
        x: (m,) for side "left", (n,) for "right".
        side: the side of the diagonal matrix relative to A.
        out: C, (m, n), with the memory layout of a.
    """

    op: ClassVar[str] = "dgmm"
    reads: ClassVar[tuple[str, ...]] = ("a", "x")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "a")})
    a: Tensor
    x: Tensor
    _: KW_ONLY
    side: SideMode | str = SideMode.LEFT
    out: Tensor | None = None

    def extents(self) -> dict[str, Shape]:
        m, n = dims("a", self.a)
        return {"a": (m, n), "x": (m if self.side is SideMode.LEFT else n,), "out": (m, n)}
