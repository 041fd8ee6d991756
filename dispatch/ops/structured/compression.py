"""Requests over a dense matrix that is to be structured: prune it, see whether it is, compress it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dispatch.core.operands import OperandRequest, Output, dense, unsized
from dispatch.core.request import R_co
from dispatch.errors import BadRequest
from dispatch.keys import I32, U8
from dispatch.ops.structured.form import PruneAlgorithm, StructuredForm, check_structured
from dispatch.ops.structured.layout import host_bytes, is_row_major

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["Check24Request", "Compress24Request", "Prune24Request"]


@dataclass(frozen=True, eq=False)
class DenseRequest(OperandRequest[R_co]):
    """A dense matrix.

    Attributes:
        a: (rows, k), or (batch, rows, k), of f16, bf16, i8, f8e4m3, f8e5m2 or f32, row-major or column-major (those of
            8 bits row-major); rows and k are multiples of 16, of 32 where elements have 8 bits, and of 8 in f32.
        library: the one whose rows alone are asked, "cusparseLt"; None asks all in the table's order.
    """

    reads: ClassVar[tuple[str, ...]] = ("a",)
    a: Tensor
    _: KW_ONLY
    library: str | None = None

    def check_fields(self) -> None:
        check_structured("a", self.a)


@dataclass(frozen=True, eq=False)
class Prune24Request(DenseRequest["Tensor"]):
    """The matrix with zeros where it is to have none: two of four elements along k stay, in f32 one of two.

    Attributes:
        algorithm: STRIP keeps the largest magnitudes of each group of four along k; TILE two in each row and each
            column of each tile of 4 x 4, of the largest sum of magnitudes, so that the transposed matrix is structured,
            too. Among equal magnitudes the host keeps those of the lowest index, and of tiles the first of the patterns
            in lexicographic order; which ones the library keeps is its choice.
        out: like a, laid out as it; it may be a itself.
    """

    op: ClassVar[str] = "prune_2_4"
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "a")})
    _: KW_ONLY
    algorithm: PruneAlgorithm | str = PruneAlgorithm.STRIP
    out: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Check24Request(DenseRequest["Tensor"]):
    """Whether a matrix is structured: one number on the device, 0 where it is and 1 where it is not.

    Attributes:
        out: i32 (1,).
    """

    op: ClassVar[str] = "check_2_4"
    _: KW_ONLY
    out: Tensor | None = None

    def outputs(self) -> dict[str, Output]:
        return {"out": dense((1,), I32)}


@dataclass(frozen=True, eq=False)
class Compress24Request(DenseRequest["Tensor"]):
    """The elements of a structured matrix and where they stand, in a layout of the library's own.

    Nobody looks whether the matrix is structured, but the host, which refuses one that is not: `check_2_4` does.

    Attributes:
        a: the matrix, dense in memory.
        out: u8, of the size that the device's library asks for: 9/16 of the matrix on the host.

    `structured.compress` makes a StructuredTensor of it, which knows what the bytes mean.
    """

    op: ClassVar[str] = "compress_2_4"
    _: KW_ONLY
    out: Tensor | None = None

    def check_fields(self) -> None:
        super().check_fields()
        out = self.out
        if out is not None and (out.dtype is not U8 or out.ndim != 1 or not out.layout.is_contiguous):
            raise BadRequest("out", str(out.layout), "dense bytes, u8", "leave out=None to have it allocated")

    @property
    def form(self) -> StructuredForm:
        """What of the result is no memory, but for who makes it."""
        return StructuredForm(self.a.shape, self.a.dtype.name, is_row_major(self.a.layout))

    def outputs(self) -> dict[str, Output]:
        if self.device.is_host:
            return {"out": dense((host_bytes(self.a.shape, self.a.dtype),), U8)}
        return {"out": unsized()}

    def bytes_of(self, name: str) -> int:
        from dispatch.ops.structured.cusparselt import bytes_on  # at first use: requests bind no library

        del name
        executor: Any = self.device.executor()
        return bytes_on(executor, self.form)
