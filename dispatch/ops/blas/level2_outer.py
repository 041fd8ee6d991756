"""The requests of BLAS level 2 that add outer products of vectors: `ger`, `syr` and similar ones.

Follows https://docs.nvidia.com/cuda/cublas/#cublas-level-2-function-reference; the implementations are those of
level2.py.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.core.operands import Output, dense, like
from dispatch.ops.blas.base import ScaledRequest, Shape, length
from dispatch.ops.blas.choices import FillMode

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["GerRequest", "GercRequest", "GeruRequest", "Her2Request", "HerRequest", "Hpr2Request", "HprRequest"]
__all__ += ["Spr2Request", "SprRequest", "Syr2Request", "SyrRequest"]


@dataclass(frozen=True, eq=False)
class OuterRequest(ScaledRequest):
    """An outer product, optionally added to a matrix.

    Attributes:
        x: (m,).
        y: (n,).
        a: (m, n), the matrix it is added to; None for 0. It may be `out` itself.
        out: (m, n); by default it has the memory layout of a.
    """

    added: ClassVar[str] = "a"
    reads: ClassVar[tuple[str, ...]] = ("x", "y", "a")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "a")})
    x: Tensor
    y: Tensor
    _: KW_ONLY
    a: Tensor | None = None
    out: Tensor | None = None

    def extents(self) -> dict[str, Shape]:
        m, n = length("x", self.x), length("y", self.y)
        return {"x": (m,), "y": (n,), "a": (m, n), "out": (m, n)}

    def outputs(self) -> dict[str, Output]:
        shape = self.extents()["out"]
        return {"out": dense(shape, self.x.dtype) if self.a is None else like(self.a.layout)}


@dataclass(frozen=True, eq=False)
class GerRequest(OuterRequest):
    """A = alpha · x · yᵀ + A; only real vectors."""

    op: ClassVar[str] = "ger"


@dataclass(frozen=True, eq=False)
class GeruRequest(OuterRequest):
    """A = alpha · x · yᵀ + A; only complex vectors."""

    op: ClassVar[str] = "geru"


@dataclass(frozen=True, eq=False)
class GercRequest(OuterRequest):
    """A = alpha · x · yᴴ + A; only complex vectors."""

    op: ClassVar[str] = "gerc"


@dataclass(frozen=True, eq=False)
class SymmetricOuterRequest(ScaledRequest):
    """A symmetric or Hermitian sum of outer products; only one triangle is computed.

    Attributes:
        x: (n,).
        a: (n, n), the matrix it is added to; None for 0. It may be `out` itself.
        uplo: the triangle that is computed, and that is read from a: "lower" or "upper". The other triangle of the
            result is a's, unchanged, or 0 if there is no a.
        out: (n, n); by default it has the memory layout of a.
    """

    added: ClassVar[str] = "a"
    reads: ClassVar[tuple[str, ...]] = ("x", "a")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "a")})
    x: Tensor
    _: KW_ONLY
    a: Tensor | None = None
    uplo: FillMode | str = FillMode.LOWER
    out: Tensor | None = None

    def extents(self) -> dict[str, Shape]:
        n = length("x", self.x)
        both: dict[str, Shape] = {"y": (n,)} if "y" in self.reads else {}
        return {"x": (n,), **both, "a": (n, n), "out": (n, n)}

    def outputs(self) -> dict[str, Output]:
        shape = self.extents()["out"]
        return {"out": dense(shape, self.x.dtype) if self.a is None else like(self.a.layout)}


@dataclass(frozen=True, eq=False)
class SyrRequest(SymmetricOuterRequest):
    """A = alpha · x · xᵀ + A: a triangle of it."""

    op: ClassVar[str] = "syr"


@dataclass(frozen=True, eq=False)
class HerRequest(SymmetricOuterRequest):
    """A = alpha · x · xᴴ + A: a triangle of it; only complex vectors, with a real alpha.

    The imaginary parts of a's diagonal are treated as 0, and those of the result are 0. If alpha is 0 nothing is added,
    and the result is a unchanged, including imaginary parts, as in LAPACK's BLAS.
    """

    op: ClassVar[str] = "her"
    real: ClassVar[tuple[str, ...]] = ("alpha",)


@dataclass(frozen=True, eq=False)
class Syr2Request(SymmetricOuterRequest):
    """A = alpha · (x · yᵀ + y · xᵀ) + A: a triangle of it.

    Attributes:
        y: (n,).
    """

    op: ClassVar[str] = "syr2"
    reads: ClassVar[tuple[str, ...]] = ("x", "y", "a")
    y: Tensor


@dataclass(frozen=True, eq=False)
class Her2Request(SymmetricOuterRequest):
    """A = alpha · x · yᴴ + conj(alpha) · y · xᴴ + A: a triangle of it; only complex vectors.

    Attributes:
        y: (n,).

    The imaginary parts of a's diagonal are treated as 0, and those of the result are 0. If alpha is 0 nothing is added,
    and the result is a unchanged, including imaginary parts, as in LAPACK's BLAS.
    """

    op: ClassVar[str] = "her2"
    reads: ClassVar[tuple[str, ...]] = ("x", "y", "a")
    y: Tensor


@dataclass(frozen=True, eq=False)
class PackedOuterRequest(ScaledRequest):
    """A symmetric or Hermitian sum of outer products; one triangle is computed, in packed storage.

    Attributes:
        x: (n,).
        ap: (n · (n + 1) / 2,), dense, the matrix it is added to; None for 0. It may be `out` itself.
        uplo: the triangle: "lower" or "upper".
        out: (n · (n + 1) / 2,), dense: the columns of the triangle, contiguous.
    """

    added: ClassVar[str] = "ap"
    reads: ClassVar[tuple[str, ...]] = ("x", "ap")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "ap")})
    x: Tensor
    _: KW_ONLY
    ap: Tensor | None = None
    uplo: FillMode | str = FillMode.LOWER
    out: Tensor | None = None

    def extents(self) -> dict[str, Shape]:
        n = length("x", self.x)
        both: dict[str, Shape] = {"y": (n,)} if "y" in self.reads else {}
        packed = (n * (n + 1) // 2,)
        return {"x": (n,), **both, "ap": packed, "out": packed}

    def outputs(self) -> dict[str, Output]:
        return {"out": dense(self.extents()["out"], self.x.dtype)}


@dataclass(frozen=True, eq=False)
class SprRequest(PackedOuterRequest):
    """A = alpha · x · xᵀ + A, packed; only real vectors."""

    op: ClassVar[str] = "spr"


@dataclass(frozen=True, eq=False)
class HprRequest(PackedOuterRequest):
    """A = alpha · x · xᴴ + A, packed; only complex vectors, with a real alpha.

    The imaginary parts of ap's diagonal are treated as 0, and those of the result are 0. If alpha is 0 nothing is
    added, and the result is ap unchanged, including imaginary parts, as in LAPACK's BLAS.
    """

    op: ClassVar[str] = "hpr"
    real: ClassVar[tuple[str, ...]] = ("alpha",)


@dataclass(frozen=True, eq=False)
class Spr2Request(PackedOuterRequest):
    """A = alpha · (x · yᵀ + y · xᵀ) + A, packed; only real vectors.

    Attributes:
        y: (n,).
    """

    op: ClassVar[str] = "spr2"
    reads: ClassVar[tuple[str, ...]] = ("x", "y", "ap")
    y: Tensor


@dataclass(frozen=True, eq=False)
class Hpr2Request(PackedOuterRequest):
    """A = alpha · x · yᴴ + conj(alpha) · y · xᴴ + A, packed; only complex vectors.

    Attributes:
        y: (n,).

    The imaginary parts of ap's diagonal are treated as 0, and those of the result are 0. If alpha is 0 nothing is
    added, and the result is ap unchanged, including imaginary parts, as in LAPACK's BLAS.
    """

    op: ClassVar[str] = "hpr2"
    reads: ClassVar[tuple[str, ...]] = ("x", "y", "ap")
    y: Tensor
