"""What collectives between processes of the host share, by MPI and by gloo: operands as bytes, and each rank's part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.ops.collective.reference import rank_input, reduce_inputs, work_dtype
from dispatch.ops.collective.request import RedOp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.device.layout import Array

    Finish = Callable[[], Array | None]

__all__ = [
    "MESSAGE_TAG",
    "POINT_TO_POINT",
    "bytes_per_rank",
    "finish_with",
    "operand_bytes",
    "reduction_operand",
    "rows_per_rank",
]

MESSAGE_TAG = 7  # the tag of messages between two ranks
POINT_TO_POINT = ("send", "recv", "sendrecv")  # ops between two ranks, in which the other ranks take no part


def operand_bytes(operand: Any) -> Array:
    """The bytes of an operand, copied, so that they do not change while the library reads them."""
    return np.array(operand, order="C").reshape(-1).view(np.uint8)


def reduction_operand(request: Any) -> Array:
    """This rank's operand of a reduction: in the working dtype, times its factor."""
    part = rank_input(request, work_dtype(request.x.dtype))
    x: Any = reduce_inputs([part], RedOp.PREMUL_SUM) if request.red_op is RedOp.PREMUL_SUM else part.x
    return np.ascontiguousarray(x)


def rows_per_rank(counts: Sequence[int] | None, size: int) -> list[int]:
    """The number of rows for each rank; without counts one block for each."""
    return [1] * size if counts is None else list(counts)


def bytes_per_rank(nbytes: int, counts: Sequence[int] | None, size: int) -> list[int]:
    """The number of bytes for each rank."""
    rows = rows_per_rank(counts, size)
    row = nbytes // max(sum(rows), 1)
    return [row * each for each in rows]


def finish_with(wait: Callable[[], object], result: Callable[[], Array | None]) -> Finish:
    """A function that waits for a call and returns this rank's result."""

    def finish() -> Array | None:
        wait()
        return result()

    return finish
