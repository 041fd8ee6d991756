"""The request for many systems of equations with five diagonals: cuSPARSE's gpsvInterleavedBatch."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.core.operands import OperandRequest, Output, dense
from dispatch.errors import BadRequest

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["DIAGONALS", "GpsvRequest"]

DIAGONALS = {"ds": -2, "dl": -1, "d": 0, "du": 1, "dw": 2}  # and how far they are from the main one
MIN_UNKNOWNS = 3  # unknowns


@dataclass(frozen=True, eq=False)
class GpsvRequest(OperandRequest["Tensor"]):
    """The x of A · x = b for many matrices A that have a diagonal and two on either side of it, by QR.

    Follows https://docs.nvidia.com/cuda/cusparse/#cusparse-t-gpsvinterleavedbatch. The systems are interleaved:
    element i of system j is at [i, j].

    Attributes:
        ds, dl: (n, batch), the second and the first diagonal below the main one: a[i, i - 2] is ds[i], a[i, i - 1] is
            dl[i]; elements outside the matrix, the first two rows of ds and the first of dl, must be 0.
        d: (n, batch), the main diagonal.
        du, dw: (n, batch), the first and the second above it: a[i, i + 1] is du[i], a[i, i + 2] is dw[i]; the last row
            of du and the last two of dw must be 0.
        b: (n, batch), a right-hand side for each system.
        library: only rows of this library are considered, "cusparse"; None considers all, in the table's order.
        out: x, of b's shape; it may be b itself.

    The result for a singular matrix is not specified: infinities, NaN or large numbers.
    """

    op: ClassVar[str] = "gpsv"
    reads: ClassVar[tuple[str, ...]] = ("ds", "dl", "d", "du", "dw", "b")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "b")})
    ds: Tensor
    dl: Tensor
    d: Tensor
    du: Tensor
    dw: Tensor
    b: Tensor
    _: KW_ONLY
    library: str | None = None
    out: Tensor | None = None

    def check_fields(self) -> None:
        d = self.d
        if d.ndim != 2 or d.shape[0] < MIN_UNKNOWNS:
            hint = "x[:, None] is a batch of one" if d.ndim == 1 else ""
            raise BadRequest("d", str(d.layout), f"(n, batch), with at least {MIN_UNKNOWNS} unknowns", hint)
        for name in self.reads:
            tensor: Tensor = getattr(self, name)
            if tensor.shape != d.shape:
                raise BadRequest(
                    name,
                    str(tensor.layout),
                    f"{d.dtype}{list(d.shape)}, like d",
                    "set elements outside of the matrix to 0",
                )

    def outputs(self) -> dict[str, Output]:
        return {"out": dense(self.b.shape, self.b.dtype)}


def adjacent(request: GpsvRequest) -> str:
    """Diagonals, right-hand sides and results that are row-major and dense."""
    for name in (*request.reads, "out"):
        layout = request.layout_of(name)
        if layout.size > 1 and not layout.is_contiguous:
            return f"needs {name} dense, has {layout}: copy it"
    return ""
