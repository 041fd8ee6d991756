"""Requests that solve systems of equations with a sparse matrix by iteration: Krylov methods.

All four use SciPy's criterion: ‖b - A·x‖ ≤ max(rtol · ‖b‖, atol). This file calls no library.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.checks import check_int, check_number
from dispatch.core.operands import Output, dense
from dispatch.errors import BadRequest
from dispatch.keys import C64, C128, F32, F64, I32, Choice
from dispatch.ops.sparse.algorithms import SpmvAlgorithm
from dispatch.ops.sparse.base import SparseRequest, check_vector
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.products import check_algorithm

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["BREAKDOWN", "MAX_BLOCK", "NOT_FINITE", "STAGNATED"]
__all__ += ["BicgstabRequest", "CgRequest", "GmresRequest", "KrylovRequest", "MinresRequest", "Preconditioner"]

BREAKDOWN, NOT_FINITE, STAGNATED = -1, -2, -3
REALS = {C64: F32, C128: F64}
MAX_ITERATIONS = 2**31 - 1
MAX_RESTART = 256
MAX_BLOCK = 32  # the most rows of a block


class Preconditioner(Choice):
    """The approximation of the inverse of A: none, the reciprocals of its diagonal, incomplete factors, or the inverses
    of the blocks along its diagonal.
    """

    NONE = 0
    JACOBI = 1
    ILU0 = 2
    IC0 = 3
    BLOCK_JACOBI = 4

    @property
    def is_factored(self) -> bool:
        """Whether it is two triangular solves, with factors that have elements only where A has some."""
        return self in (Preconditioner.ILU0, Preconditioner.IC0)


@dataclass(frozen=True, eq=False)
class KrylovRequest(SparseRequest["tuple[Tensor, Tensor, Tensor, Tensor]"]):
    """The x of A · x = b; returns (x, info, iterations, residual), all on the device: nothing waits for it.

    On a GPU all iterations are one launch of a CUDA graph with a while node, which the device ends (from CUDA 12.4 on).

    Attributes:
        b: (n,), the right-hand side.
        x0: (n,), the initial guess; None for zeros. It may be `out` itself.
        M: (n,), the diagonal of a matrix that approximates the inverse of A; None for none. With the preconditioner
            "ilu0" or "ic0" (nnz,), the factors from the request of that name, at the places of A's elements. With
            "block_jacobi" (blocks, size, size) of any strides and a size of up to 32: the result of the request of that
            name, or inverses of other blocks along the diagonal. Elements of the last block beyond n are not read.
        rtol, atol: the iteration ends when ‖b - A·x‖ ≤ max(rtol · ‖b‖, atol).
        maxiter: the iteration is given up after so many iterations; None for 10 · n.
        preconditioner: "jacobi" uses the reciprocals of A's diagonal as M, and 1 where an element is 0. "ilu0" and
            "ic0" solve with the factors in M twice in each iteration; A is in CSR, and its form has a `pattern`.
            "block_jacobi" multiplies with the blocks in M, for any format of A.
        algorithm: a `SpmvAlgorithm` of the product, for the format of A. With CSR_ALG2 two solves give the same bits.
        out: x, (n,).
        info: i32: 0 once the criterion holds, else the number of iterations, or -1 if the method breaks down, -2 if
            something is NaN or infinite, and -3 if the residual stops decreasing.
        iterations: i32, the number of iterations.
        residual: the norm of b - A·x that was compared with the criterion: f32 or f64.

    If b = 0, x is 0, whatever x0 is. Complex dot products conjugate the first vector.
    """

    writes: ClassVar[tuple[str, ...]] = ("out", "info", "iterations", "residual")
    reads: ClassVar[tuple[str, ...]] = ("values", "rows", "columns", "b", "x0", "M")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "x0")})
    b: Tensor
    x0: Tensor | None = None
    _: KW_ONLY
    M: Tensor | None = None
    rtol: float = 1e-5
    atol: float = 0.0
    maxiter: int | None = None
    preconditioner: Preconditioner | str = Preconditioner.NONE
    algorithm: SpmvAlgorithm | str = SpmvAlgorithm.DEFAULT
    out: Tensor | None = None
    info: Tensor | None = None
    iterations: Tensor | None = None
    residual: Tensor | None = None

    def check_operands(self) -> None:
        m, n = self.form.shape
        if m != n or not n:
            raise BadRequest("form.shape", f"({m}, {n})", "a square matrix of at least one row")
        for name in ("b", "x0"):
            check_vector(name, getattr(self, name), n, f"because A is [{n}, {n}]")
        for name in ("rtol", "atol"):
            check_number(name, getattr(self, name), low=0.0)
        check_algorithm(self.form.format, self.algorithm)
        if self.maxiter is not None:
            check_int("maxiter", self.maxiter, 1, MAX_ITERATIONS)
        if self.is_factored:
            self.check_factors()
            return
        if self.is_blocked:
            self.check_blocks()
            return
        check_vector("M", self.M, n, f"because A is [{n}, {n}]")
        if self.M is not None and self.preconditioner is not Preconditioner.NONE:
            raise BadRequest("M", str(self.M.layout), "None, because this preconditioner is computed from A")

    @property
    def is_factored(self) -> bool:
        """Whether the preconditioner is two triangular solves."""
        return isinstance(self.preconditioner, Preconditioner) and self.preconditioner.is_factored

    @property
    def is_blocked(self) -> bool:
        """Whether the preconditioner is the inverses of the diagonal blocks."""
        return self.preconditioner is Preconditioner.BLOCK_JACOBI

    @property
    def same_bits(self) -> bool:
        """Whether cuSPARSE promises the same bits in each run: for some products it does, for triangular solves not."""
        return not self.is_factored and self.algorithm in (SpmvAlgorithm.CSR_ALG2, SpmvAlgorithm.COO_ALG2)

    def check_blocks(self) -> None:
        """BadRequest unless M has square blocks that cover the rows of A."""
        if self.M is None:
            raise BadRequest("M", "None", "the inverses that the request block_jacobi returns for A and a block_size")
        n, shape = self.form.shape[0], self.M.shape
        size = shape[-1] if len(shape) == len(("block", "row", "column")) else 0
        if not 0 < size <= MAX_BLOCK or shape != (-(-n // size), size, size):
            wanted = (
                f"{self.values.dtype}[blocks, size, size] with as many blocks as {n} rows need, size 1 to {MAX_BLOCK}"
            )
            raise BadRequest("M", str(self.M.layout), wanted, "block_jacobi(A, size) computes them")

    def check_factors(self) -> None:
        """BadRequest unless M has one element of the factors for each of A's, and A is in CSR with a `pattern`."""
        name = getattr(self.preconditioner, "name", "").lower()
        if self.M is None:
            raise BadRequest("M", "None", f"the factors that the request {name} returns, for preconditioner={name!r}")
        nnz = self.values.shape[0]
        if SparseFormat(self.form.format) is not SparseFormat.CSR:  # type: ignore[arg-type]  # it is a member by now
            raise BadRequest("form.format", str(self.form.format), f"CSR, with preconditioner={name!r}", "a.tocsr()")
        check_vector("M", self.M, nnz, f"a value of the factors for each of the {nnz} elements of A")
        if self.form.pattern is None:
            hint = "a.fixed() promises that the pattern does not change"
            raise BadRequest("form.pattern", "None", f"a number, with preconditioner={name!r}", hint)

    @property
    def limit(self) -> int:
        """The maximum number of iterations, or of cycles."""
        return min(MAX_ITERATIONS, 10 * self.form.shape[0]) if self.maxiter is None else int(self.maxiter)

    def outputs(self) -> dict[str, Output]:
        kind = self.values.dtype
        return {
            "out": dense(self.b.shape, kind),
            "info": dense((), I32),
            "iterations": dense((), I32),
            "residual": dense((), REALS.get(kind, kind)),
        }


@dataclass(frozen=True, eq=False)
class CgRequest(KrylovRequest):
    """Conjugate gradients, for a Hermitian positive definite A, and such an M if there is one."""

    op: ClassVar[str] = "cg"


@dataclass(frozen=True, eq=False)
class BicgstabRequest(KrylovRequest):
    """The stabilized biconjugate gradient method, for any A; an iteration multiplies by A twice."""

    op: ClassVar[str] = "bicgstab"


@dataclass(frozen=True, eq=False)
class MinresRequest(KrylovRequest):
    """The minimal residual method by Lanczos, for a real symmetric A, which may be indefinite or singular.

    M must be positive definite; `block_jacobi` makes it so with `absolute` if A's blocks are not. If rᵀ·M·r is negative
    the method breaks down. With M the criterion uses its norm, of r and of b: (rᵀ·M·r)½. The residual decreases in each
    iteration; for a system without a solution it ends with -3 and a least squares solution. Incomplete factors are not
    supported: A with such factors (ic0) is positive definite, and `cg` solves it.
    """

    op: ClassVar[str] = "minres"

    def check_factors(self) -> None:
        shown_name = getattr(self.preconditioner, "name", "").lower()
        wanted = "none, jacobi, block_jacobi or a diagonal M with minres"
        raise BadRequest("preconditioner", shown_name, wanted, "cg supports incomplete factors")


@dataclass(frozen=True, eq=False)
class GmresRequest(KrylovRequest):
    """The generalized minimal residual method, for any A; M is on the right, so that the residual is the true one.

    Attributes:
        restart: the iterations of a cycle, and thus the number of vectors that are stored; up to 256, and n.
        maxiter: the iteration is given up after so many cycles, which SciPy counts, too; None for 10 · n.

    Vectors are orthogonalized twice against the previous ones. `iterations` counts those of all cycles.
    """

    op: ClassVar[str] = "gmres"
    _: KW_ONLY
    restart: int = 20

    def check_operands(self) -> None:
        super().check_operands()
        check_int("restart", self.restart, 1, MAX_RESTART)

    @property
    def length(self) -> int:
        """The number of iterations of a cycle."""
        return min(int(self.restart), self.form.shape[0])
