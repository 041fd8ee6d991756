"""Requests of a sparse matrix times something dense, and of a dense product of which a sparse pattern is wanted.

Follow https://docs.nvidia.com/cuda/cusparse/#cusparse-generic-functions. This file calls nothing.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.core.matrix_choices import Operation
from dispatch.core.operands import Output, dense
from dispatch.core.request import Unpacked
from dispatch.errors import BadRequest
from dispatch.keys import F32, HALF
from dispatch.ops.sparse.algorithms import SpmmAlgorithm, SpmvAlgorithm
from dispatch.ops.sparse.base import Number, ScaledSparseRequest, check_matrix, check_vector
from dispatch.ops.sparse.form import SparseFormat, shape_of

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["SddmmRequest", "SparseMvRequest", "SpmmRequest"]


@dataclass(frozen=True, eq=False)
class ProductRequest(ScaledSparseRequest):
    """What is added to the product, and where it goes.

    Attributes:
        beta: a number; None for 1 where something is added.
        trans: op: "n" for A, "t" for Aᵀ, "c" for Aᴴ.
        autotune: time the algorithms for A's format once, where `algorithm` is left open, keep the fastest for all
            matrices of these layouts, and remember it on disk.

    Of f16 and bf16 the result is what `out` is, else what is added, else what A is; it may be f32. All is computed in
    f32. Elements that are stored twice count twice.
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
        """The dtype of the result, and of what is added."""
        given: Tensor | None = self.out if self.out is not None else getattr(self, self.added)
        wide = given is not None and given.dtype is F32 and self.values.dtype in HALF
        return F32 if wide else self.values.dtype

    def check_added(self) -> None:
        """BadRequest unless what is added has the dtype of the result."""
        tensor: Tensor | None = getattr(self, self.added)
        if tensor is not None and tensor.dtype is not self.out_dtype:
            hint = f'x.astype("{self.out_dtype}")'
            raise BadRequest(self.added, str(tensor.layout), f"{self.out_dtype}, the dtype of the result", hint)


@dataclass(frozen=True, eq=False)
class SparseMvRequest(ProductRequest):
    """y = alpha · op(A) · x + beta · y: SpMV.

    (`spmv` is that of BLAS: a symmetric matrix whose triangle is packed.)

    Attributes:
        x: (n,), or (m,) for a `trans` other than "n".
        y: added as beta · y, of out's shape; it may be `out` itself, and is not read where beta is 0.
        out: (m,), or (n,).
        algorithm: a `SpmvAlgorithm`, for the format of A.

    A kernel of this library gives the same bits in each run: of CSR with `trans` "n", and of CSC with another, where
    `algorithm` is left open. It is taken up to 262,144 rows and elements together, beyond which cuSPARSE is faster;
    `library="own"` asks for it alone. Else, and without NVRTC, a product is cuSPARSE's, which promises the same bits,
    also of a graph, for CSR_ALG2 and COO_ALG2 with `trans` "n" alone.
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
        check_vector("x", self.x, short, f"as op(A) is [{long}, {short}]")
        check_vector("y", self.y, long, f"as op(A) is [{long}, {short}]")
        self.check_added()
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
        c: added as beta · c, of out's shape; it may be `out` itself, and is not read where beta is 0.
        out: (m, k), or (n, k).
        algorithm: a `SpmmAlgorithm`, for the format of A.

    A kernel of this library gives the same bits in each run, and takes B and C of any strides: of CSR with `trans` "n",
    and of CSC with another, where `algorithm` is left open and B has four columns or more, or A few elements;
    `library="own"` asks for it alone. Else, and without NVRTC, a product is cuSPARSE's, which promises the same bits,
    also of a graph, for CSR_ALG3 and COO_ALG2 with `trans` "n" alone.
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
        check_matrix("b", self.b, (n, None), f"as op(A) is [{m}, {n}]")
        check_matrix("c", self.c, (m, self.b.shape[1]), "the shape of the result")
        self.check_added()
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
        values: those of C, not read where beta is 0; their dtype is that of all.
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
        check_matrix("a", self.a, (m, None), f"as C is [{m}, {n}]")
        check_matrix("b", self.b, (self.a.shape[1], n), f"as C is [{m}, {n}] and a {list(self.a.shape)}")

    def outputs(self) -> dict[str, Output]:
        return {"out": dense(self.values.shape, self.values.dtype)}


def check_algorithm(kind: SparseFormat | str, algorithm: SpmvAlgorithm | SpmmAlgorithm | str) -> None:
    """BadRequest for an algorithm of another format than A's."""
    name = getattr(algorithm, "name", "")
    found = SparseFormat(kind)  # type: ignore[arg-type]  # it is a member once the form was checked
    if name and name != "DEFAULT" and name.partition("_")[0] != found.name:
        if found is SparseFormat.CSC and name.startswith("CSR"):
            return  # a CSC is the transpose of a CSR
        raise BadRequest("algorithm", name, f"DEFAULT, or one of {found.name}, the format of A")
