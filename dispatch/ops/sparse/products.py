"""Requests of a sparse matrix times a dense operand, and of a dense product at the places of a sparse pattern.

Follows https://docs.nvidia.com/cuda/cusparse/#cusparse-generic-functions. This file calls no library.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.core.matrix_choices import Operation
from dispatch.core.operands import Output, dense
from dispatch.core.request import Unpacked
from dispatch.errors import BadRequest
from dispatch.ops.sparse.algorithms import SpmmAlgorithm, SpmvAlgorithm
from dispatch.ops.sparse.base import Number, ScaledSparseRequest, check_added, check_matrix, check_vector, result_dtype
from dispatch.ops.sparse.form import SparseFormat, shape_of

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["SddmmRequest", "SparseMvRequest", "SpmmRequest"]


@dataclass(frozen=True, eq=False)
class ProductRequest(ScaledSparseRequest):
    """The operand that is added to the product, and the result.

    Attributes:
        beta: a number; None for 1 if something is added.
        trans: op: "n" for A, "t" for Aᵀ, "c" for Aᴴ.
        autotune: if `algorithm` is left out, time the algorithms for A's format once, keep the fastest for all matrices
            of these layouts, and store it on disk.

    For f16 and bf16 the result has the dtype of `out`, else of the added operand, else of A; it may be f32. All is
    computed in f32. Elements that are stored twice are added up.
    """

    numbers: ClassVar[tuple[str, ...]] = ("alpha", "beta")
    unpacked: ClassVar[Unpacked | None] = Unpacked(numbers=("alpha", "beta"))
    _: KW_ONLY
    beta: Number | None = None
    trans: Operation | str = Operation.N
    autotune: bool = False
    out: Tensor | None = None

    @property
    def out_dtype(self) -> Dtype:
        """The dtype of the result, and of the added operand."""
        return result_dtype(self, self.added)


@dataclass(frozen=True, eq=False)
class SparseMvRequest(ProductRequest):
    """y = alpha · op(A) · x + beta · y: SpMV.

    (`spmv` is the BLAS function: a symmetric matrix with a packed triangle.)

    Attributes:
        x: (n,), or (m,) for a `trans` other than "n".
        y: added as beta · y, of out's shape; it may be `out` itself, and is not read if beta is 0.
        out: (m,), or (n,).
        algorithm: a `SpmvAlgorithm` for the format of A.

    A kernel of this library gives the same bits in each run. It supports CSR with `trans` "n", and CSC with another
    `trans`, if `algorithm` is left out. It is used up to 262,144 rows and elements together, beyond which cuSPARSE is
    faster; `library="own"` selects only this kernel. Else, and without NVRTC, cuSPARSE computes the product; it
    promises the same bits, also for a graph, only for CSR_ALG2 and COO_ALG2 with `trans` "n".
    """

    op: ClassVar[str] = "sparse_mv"
    reads: ClassVar[tuple[str, ...]] = ("values", "rows", "columns", "x", "y")
    mixed: ClassVar[tuple[str, ...]] = ("rows", "columns", "y")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "y")})
    added: ClassVar[str] = "y"
    x: Tensor
    _: KW_ONLY
    y: Tensor | None = None
    algorithm: SpmvAlgorithm | str = SpmvAlgorithm.DEFAULT

    def check_operands(self) -> None:
        long, short = shape_of(self.form, self.trans)
        check_vector("x", self.x, short, f"because op(A) is [{long}, {short}]")
        check_vector("y", self.y, long, f"because op(A) is [{long}, {short}]")
        check_added(self, self.added)
        check_algorithm(self.form.format, self.algorithm)

    def outputs(self) -> dict[str, Output]:
        return {"out": dense((shape_of(self.form, self.trans)[0],), self.out_dtype)}

    @property
    def same_bits(self) -> bool:
        """Whether the library promises the same bits in each run."""
        if self.library == "own":
            return True
        steady = self.algorithm in (SpmvAlgorithm.CSR_ALG2, SpmvAlgorithm.COO_ALG2)
        return steady and self.trans is Operation.N and self.form.format != SparseFormat.CSC


@dataclass(frozen=True, eq=False)
class SpmmRequest(ProductRequest):
    """C = alpha · op(A) · B + beta · C, where A is sparse: SpMM.

    Attributes:
        b: (n, k), or (m, k) for a `trans` other than "n"; row-major or column-major, and so may be `b.T`.
        c: added as beta · c, of out's shape; it may be `out` itself, and is not read if beta is 0.
        out: (m, k), or (n, k).
        algorithm: a `SpmmAlgorithm` for the format of A.

    Kernels of this library give the same bits in each run, and support B and C of any strides. If `algorithm` is left
    out, one computes CSR with `trans` "n", and CSC with another `trans`, if B has two columns or more, or A few
    elements; another one computes BSR with `trans` "n", if blocks have 32 rows or more, or 16 and B has 2 to 8 columns,
    or if they are not square. `library="own"` selects only these kernels, for any B and any blocks. Else, and without
    NVRTC, cuSPARSE computes the product, of BSR only with square blocks; it promises the same bits, also for a graph,
    only for CSR_ALG3 and COO_ALG2 with `trans` "n".
    """

    op: ClassVar[str] = "spmm"
    reads: ClassVar[tuple[str, ...]] = ("values", "rows", "columns", "b", "c")
    mixed: ClassVar[tuple[str, ...]] = ("rows", "columns", "c")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "c")})
    added: ClassVar[str] = "c"
    b: Tensor
    _: KW_ONLY
    c: Tensor | None = None
    algorithm: SpmmAlgorithm | str = SpmmAlgorithm.DEFAULT

    def check_operands(self) -> None:
        m, n = shape_of(self.form, self.trans)
        check_matrix("b", self.b, (n, None), f"because op(A) is [{m}, {n}]")
        check_matrix("c", self.c, (m, self.b.shape[1]), "the shape of the result")
        check_added(self, self.added)
        check_algorithm(self.form.format, self.algorithm)

    def outputs(self) -> dict[str, Output]:
        return {"out": dense((shape_of(self.form, self.trans)[0], self.b.shape[1]), self.out_dtype)}

    @property
    def same_bits(self) -> bool:
        """Whether the library promises the same bits in each run."""
        if self.library == "own":
            return True
        steady = self.algorithm in (SpmmAlgorithm.CSR_ALG3, SpmmAlgorithm.COO_ALG2)
        return steady and self.trans is Operation.N and self.form.format != SparseFormat.CSC


@dataclass(frozen=True, eq=False)
class SddmmRequest(ScaledSparseRequest):
    """C = alpha · (A · B where C has elements) + beta · C, where C is sparse: cuSPARSE's SDDMM.

    The result is the values of a matrix with the rows and columns of C.

    Attributes:
        values: those of C, not read if beta is 0; all operands have their dtype.
        a: (m, k), row-major or column-major.
        b: (k, n), row-major or column-major.
        beta: a number; None for 0.
        out: the values of the result; it may be `values` itself.
    """

    op: ClassVar[str] = "sddmm"
    reads: ClassVar[tuple[str, ...]] = ("values", "rows", "columns", "a", "b")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "values")})
    numbers: ClassVar[tuple[str, ...]] = ("alpha", "beta")
    unpacked: ClassVar[Unpacked | None] = Unpacked(numbers=("alpha", "beta"))
    added: ClassVar[str] = "values"
    a: Tensor
    b: Tensor
    _: KW_ONLY
    beta: Number | None = None
    out: Tensor | None = None

    def factor(self, name: str) -> complex:
        return 0.0 if getattr(self, name) is None else super().factor(name)

    def check_operands(self) -> None:
        m, n = self.form.shape
        check_matrix("a", self.a, (m, None), f"because C is [{m}, {n}]")
        check_matrix("b", self.b, (self.a.shape[1], n), f"because C is [{m}, {n}] and a is {list(self.a.shape)}")

    def outputs(self) -> dict[str, Output]:
        return {"out": dense(self.values.shape, self.values.dtype)}


def check_algorithm(kind: SparseFormat | str, algorithm: SpmvAlgorithm | SpmmAlgorithm | str) -> None:
    """BadRequest for an algorithm of another format than A's."""
    name = getattr(algorithm, "name", "")
    form = SparseFormat(kind)  # type: ignore[arg-type]  # it is a member once the form was checked
    if name and name != "DEFAULT" and name.partition("_")[0] != form.name:
        if form is SparseFormat.CSC and name.startswith("CSR"):
            return  # CSC is the transpose of CSR
        raise BadRequest("algorithm", name, f"DEFAULT, or an algorithm for {form.name}, the format of A")
