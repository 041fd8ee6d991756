"""The requests of BLAS level 2 that add outer products of vectors: `ger`, `syr` and their kind.

Follows https://docs.nvidia.com/cuda/cublas/#cublas-level-2-function-reference; called as those of level2.py are.
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
    """An outer product, which may be added to a matrix.

    Attributes:
        x: (m,).
        y: (n,).
        a: (m, n), what it is added to; None for 0. It may be `out` itself.
        out: (m, n); left open it lies in memory as a does.
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
    """A = alpha · x · yᵀ + A; real vectors alone."""

    op: ClassVar[str] = "ger"


@dataclass(frozen=True, eq=False)
class GeruRequest(OuterRequest):
    """A = alpha · x · yᵀ + A; complex vectors alone."""

    op: ClassVar[str] = "geru"


@dataclass(frozen=True, eq=False)
class GercRequest(OuterRequest):
    """A = alpha · x · yᴴ + A; complex vectors alone."""

    op: ClassVar[str] = "gerc"


@dataclass(frozen=True, eq=False)
class SymmetricOuterRequest(ScaledRequest):
    """A symmetric or Hermitian sum of outer products, of which one triangle is computed.

    Attributes:
        x: (n,).
        a: (n, n), what it is added to; None for 0. It may be `out` itself.
        uplo: which triangle is computed, and of a added: "lower" or "upper". The other triangle of the result is a's as
            it is, and 0 where there is no a.
        out: (n, n); left open it lies in memory as a does.
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
    """A = alpha · x · xᴴ + A: a triangle of it; complex vectors alone, with a real alpha.

    The imaginary parts of a's diagonal are taken to be 0, and those of the result are. With an alpha of 0 nothing is
    added, and the result is a as it is, imaginary parts and all, as in LAPACK's BLAS.
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
    """A = alpha · x · yᴴ + conj(alpha) · y · xᴴ + A: a triangle of it; complex vectors alone.

    Attributes:
        y: (n,).

    The imaginary parts of a's diagonal are taken to be 0, and those of the result are. With an alpha of 0 nothing is
    added, and the result is a as it is, imaginary parts and all, as in LAPACK's BLAS.
    """

    op: ClassVar[str] = "her2"
    reads: ClassVar[tuple[str, ...]] = ("x", "y", "a")
    y: Tensor


@dataclass(frozen=True, eq=False)
class PackedOuterRequest(ScaledRequest):
    """A symmetric or Hermitian sum of outer products, of which one triangle is computed and packed.

    Attributes:
        x: (n,).
        ap: (n · (n + 1) / 2,), dense, what it is added to; None for 0. It may be `out` itself.
        uplo: which triangle it is: "lower" or "upper".
        out: (n · (n + 1) / 2,), dense: the columns of the triangle, one behind the other.
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
    """A = alpha · x · xᵀ + A, packed; real vectors alone."""

    op: ClassVar[str] = "spr"


@dataclass(frozen=True, eq=False)
class HprRequest(PackedOuterRequest):
    """A = alpha · x · xᴴ + A, packed; complex vectors alone, with a real alpha.

    The imaginary parts of ap's diagonal are taken to be 0, and those of the result are. With an alpha of 0 nothing is
    added, and the result is ap as it is, imaginary parts and all, as in LAPACK's BLAS.
    """

    op: ClassVar[str] = "hpr"
    real: ClassVar[tuple[str, ...]] = ("alpha",)


@dataclass(frozen=True, eq=False)
class Spr2Request(PackedOuterRequest):
    """A = alpha · (x · yᵀ + y · xᵀ) + A, packed; real vectors alone.

    Attributes:
        y: (n,).
    """

    op: ClassVar[str] = "spr2"
    reads: ClassVar[tuple[str, ...]] = ("x", "y", "ap")
    y: Tensor


@dataclass(frozen=True, eq=False)
class Hpr2Request(PackedOuterRequest):
    """A = alpha · x · yᴴ + conj(alpha) · y · xᴴ + A, packed; complex vectors alone.

    Attributes:
        y: (n,).

    The imaginary parts of ap's diagonal are taken to be 0, and those of the result are. With an alpha of 0 nothing is
    added, and the result is ap as it is, imaginary parts and all, as in LAPACK's BLAS.
    """

    op: ClassVar[str] = "hpr2"
    reads: ClassVar[tuple[str, ...]] = ("x", "y", "ap")
    y: Tensor
