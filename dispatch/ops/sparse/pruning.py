"""Requests that make a dense matrix sparse by dropping its small elements: up to a threshold, or a percentage.

Only the device knows how many elements remain, so one request counts them, and the other is passed the count, as for
other conversions.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.checks import MAX_FLOAT, check_int, check_number, shown
from dispatch.core.operands import Output, dense
from dispatch.core.request import R_co
from dispatch.errors import BadRequest
from dispatch.keys import I32, I64
from dispatch.ops.sparse.compression import DenseRequest

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["PruneNnzRequest", "PruneToCsrRequest"]

MAX_NNZ = 2**31 - 1
ALL = 100.0  # per cent


@dataclass(frozen=True, eq=False)
class PruneRequest(DenseRequest[R_co]):
    """A dense matrix, and the criterion for dropping elements.

    Attributes:
        a: (m, n), row-major or column-major.
        threshold: elements above it in magnitude are kept; NaN is not.
        percentage: in place of a threshold, the percentage of elements to drop: the threshold is the sorted magnitude
            at ⌈m · n · percentage / 100⌉, counted from 1.
        library: only rows of this library are considered, "cusparse"; None considers all, in the table's order.
    """

    _: KW_ONLY
    threshold: float | None = None
    percentage: float | None = None

    def check_fields(self) -> None:
        super().check_fields()
        names = [name for name in ("threshold", "percentage") if getattr(self, name) is not None]
        if len(names) != 1:
            raise BadRequest(
                "threshold", shown(self.threshold), "pass either a threshold or a percentage", "threshold=0.01"
            )
        check_number(names[0], getattr(self, names[0]), low=0.0, high=ALL if names == ["percentage"] else MAX_FLOAT)


@dataclass(frozen=True, eq=False)
class PruneNnzRequest(PruneRequest["Tensor"]):
    """The number of remaining elements of a dense matrix: one i64 on the device.

    The library reports it to the host during the enqueue, and so waits for all earlier work on its stream.

    Attributes:
        out: i64 (1,).
    """

    op: ClassVar[str] = "prune_nnz"
    _: KW_ONLY
    out: Tensor | None = None

    def outputs(self) -> dict[str, Output]:
        return {"out": dense((1,), I64)}


@dataclass(frozen=True, eq=False)
class PruneToCsrRequest(PruneRequest["tuple[Tensor, Tensor, Tensor]"]):
    """The remaining elements of a dense matrix, in CSR: (values, rows, columns).

    Attributes:
        nnz: the number of remaining elements, as `prune_nnz` counts them; another number raises BadRequest in the call,
            and then only offsets are written.
        out_values, out_rows, out_columns: the result, with indices of i32 from 0 on.
    """

    op: ClassVar[str] = "prune_to_csr"
    writes: ClassVar[tuple[str, ...]] = ("out_values", "out_rows", "out_columns")
    _: KW_ONLY
    nnz: int
    out_values: Tensor | None = None
    out_rows: Tensor | None = None
    out_columns: Tensor | None = None

    def check_fields(self) -> None:
        super().check_fields()
        check_int("nnz", self.nnz, 0, min(self.a.size, MAX_NNZ))

    def outputs(self) -> dict[str, Output]:
        return {
            "out_values": dense((self.nnz,), self.a.dtype),
            "out_rows": dense((self.a.shape[0] + 1,), I32),
            "out_columns": dense((self.nnz,), I32),
        }
