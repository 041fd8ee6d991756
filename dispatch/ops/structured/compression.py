"""Requests over a dense matrix: prune it to 2:4 sparsity, check that it is 2:4 sparse, compress it."""

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
        a: (rows, k), or (batch, rows, k), of f16, bf16, i8, f8e4m3, f8e5m2 or f32, row-major or column-major (8-bit
            ones row-major); rows and k are multiples of 16, of 32 for 8-bit elements, and of 8 for f32.
        library: only rows of this library are considered, "cusparseLt"; None considers all, in the table's order.
    """

    reads: ClassVar[tuple[str, ...]] = ("a",)
    a: Tensor
    _: KW_ONLY
    library: str | None = None

    def check_fields(self) -> None:
        check_structured("a", self.a)


@dataclass(frozen=True, eq=False)
class Prune24Request(DenseRequest["Tensor"]):
    """The matrix with small elements set to zero: two of four elements along k stay, in f32 one of two.

    Attributes:
        algorithm: STRIP keeps the largest magnitudes of each group of four along k; TILE keeps two in each row and each
            column of each tile of 4 x 4, with the largest sum of magnitudes, so that the transposed matrix is
            structured, too. Among equal magnitudes the host keeps those of the lowest index, and among tiles the first
            pattern in lexicographic order; the library's choice is not specified.
        out: like a, with the same layout; it may be a itself.
    """

    op: ClassVar[str] = "prune_2_4"
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "a")})
    _: KW_ONLY
    algorithm: PruneAlgorithm | str = PruneAlgorithm.STRIP
    out: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Check24Request(DenseRequest["Tensor"]):
    """Whether a matrix is structured: one number on the device, 0 if it is and 1 if it is not.

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
    """The elements of a structured matrix that are stored, and their positions, in a layout specific to the library.

    A GPU does not check whether the matrix is structured; `check_2_4` does. The host refuses one that is not.

    Attributes:
        a: the matrix, contiguous in memory.
        out: u8, of the size that the device's library requires: 9/16 of the matrix on the host.

    `structured.compress` returns it as a StructuredTensor, which has the description of the bytes.
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
        """The description of the result without its memory; the caller adds who compressed it."""
        return StructuredForm(self.a.shape, self.a.dtype.name, is_row_major(self.a.layout))

    def outputs(self) -> dict[str, Output]:
        if self.device.is_host:
            return {"out": dense((host_bytes(self.a.shape, self.a.dtype),), U8)}
        return {"out": unsized()}

    def bytes_of(self, name: str) -> int:
        from dispatch.ops.structured.cusparselt import bytes_on  # at first use: requests load no library

        del name
        executor: Any = self.device.executor()
        return bytes_on(executor, self.form)
