"""The request for systems of equations with three diagonals: cuSPARSE's gtsv2, single and in batches."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.core.operands import OperandRequest, Output, by_columns, dense
from dispatch.errors import BadRequest

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["GtsvRequest"]


@dataclass(frozen=True, eq=False)
class GtsvRequest(OperandRequest["Tensor"]):
    """The x of A · x = b, where A has a diagonal and one on either side of it.

    Follows https://docs.nvidia.com/cuda/cusparse/#cusparse-t-gtsv2 and its `StridedBatch` version.

    Attributes:
        dl: (n,), the elements below the diagonal: a[i, i - 1] is dl[i], and dl[0] must be 0. (batch, n) for many.
        d: as dl, the diagonal.
        du: as dl, the elements above the diagonal: a[i, i + 1] is du[i], and du[n - 1] must be 0.
        b: (n,) or (n, k), the right-hand sides; (batch, n) for many systems, one for each.
        pivoting: whether rows may be exchanged, which large off-diagonal elements need. It must be False for many
            systems, which do not support it.
        library: only rows of this library are considered, "cusparse"; None considers all, in the table's order.
        out: x, of b's shape; of (n, k) with contiguous columns.

    The result for a singular matrix is not specified: infinities, NaN or large numbers.
    """

    op: ClassVar[str] = "gtsv"
    reads: ClassVar[tuple[str, ...]] = ("dl", "d", "du", "b")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "b")})
    dl: Tensor
    d: Tensor
    du: Tensor
    b: Tensor
    _: KW_ONLY
    pivoting: bool = True
    library: str | None = None
    out: Tensor | None = None

    @property
    def is_batch(self) -> bool:
        """Whether there are several systems."""
        return self.d.ndim == 2

    def check_fields(self) -> None:
        d, b = self.d, self.b
        if d.ndim not in (1, 2):
            raise BadRequest("d", str(d.layout), "(n,), or (batch, n)")
        for name, tensor in (("dl", self.dl), ("du", self.du)):
            if tensor.shape != d.shape:
                raise BadRequest(
                    name, str(tensor.layout), f"{d.dtype}{list(d.shape)}, like d", "set its last (first) element to 0"
                )
        fits = b.shape == d.shape if self.is_batch else b.ndim in (1, 2) and b.shape[0] == d.shape[0]
        if not fits:
            wanted = list(d.shape) if self.is_batch else f"[{d.shape[0]}] or [{d.shape[0]}, …]"
            raise BadRequest("b", str(b.layout), f"{d.dtype}{wanted}")
        if self.is_batch and self.pivoting:
            raise BadRequest("pivoting", "True", "False for several systems, which are solved without pivoting")

    def outputs(self) -> dict[str, Output]:
        one = self.b.ndim == 1 or self.is_batch
        return {"out": (dense if one else by_columns)(self.b.shape, self.b.dtype)}
