"""Products by experts that are on several ranks: rows are sent to their expert's rank, multiplied, and sent back.

A router has sorted the rows by expert. An expert gets a different number of rows from each rank. So an all_to_all with
uneven parts sends the rows, and they are grouped by expert when they arrive. Follows GShard,
https://arxiv.org/abs/2006.16668, without a capacity limit: no row is dropped.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.checks import as_array
from dispatch.errors import BadRequest
from dispatch.keys import BF16, F16
from dispatch.ops.collective import all_gather, all_to_all, collective_group, recv, send
from dispatch.ops.grouped_matmul import grouped_matmul
from dispatch.parallel.side_stream import SideStream, check_operand

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.core.communicator import Ranks
    from dispatch.device.tensor import Tensor

__all__ = ["ExpertExchange", "expert_matmul"]


class ExpertExchange:
    """The exchange of one batch's rows between ranks and experts; create a new one for each batch.

    Expert e is on rank e // (experts / ranks). The constructor exchanges the counts of all ranks and waits for the GPU,
    because libraries need the counts on the host.

    Attributes:
        ends: the end of the rows of each of this rank's experts in the result of `to_experts`, in the form that
            `grouped_matmul` needs.
        rows: how many rows this rank receives.
    """

    def __init__(self, counts: Sequence[int], *, comm: Ranks) -> None:
        """`counts`: the number of this rank's rows for each expert of all ranks."""
        self._side = SideStream(comm)
        ranks = self._side.comm
        counts_array = as_array("counts", counts)
        is_valid = (
            counts_array.ndim == 1
            and counts_array.dtype.kind in "iu"
            and counts_array.size > 0
            and counts_array.size % ranks.size == 0
        )
        if not is_valid or (counts_array < 0).any():
            raise BadRequest(
                "counts",
                repr(counts),
                f"a number of rows for each of all experts, {ranks.size} times the number on a rank",
            )
        self._local = counts_array.size // ranks.size
        device_counts = self._side.device.array(counts_array.astype(np.int64))
        table = all_gather(device_counts, comm=ranks).numpy()  # (from rank, expert)
        self._sent = counts_array.reshape(ranks.size, self._local).astype(np.int64)  # (to rank, its expert)
        first = ranks.rank * self._local
        self._received = table[:, first : first + self._local].T  # (own expert, from rank)
        self.rows = int(self._received.sum())
        self.ends = np.cumsum(self._received.sum(1)).astype(np.int32)

    def to_experts(self, x: Tensor) -> Tensor:
        """Send rows, x (rows, …) sorted by expert, to their ranks; returns the rows of this rank's experts."""
        return self._move_rows(x, int(self._sent.sum()), self.rows, self._sent, self._received)

    def from_experts(self, y: Tensor) -> Tensor:
        """Send rows back, y in the order of `to_experts`; returns this rank's batch in the original order."""
        return self._move_rows(y, self.rows, int(self._sent.sum()), self._received, self._sent)

    def _move_rows(self, given: Tensor, rows: int, into: int, sent: Any, received: Any) -> Tensor:
        x, ranks = check_operand("x", given, self._side), self._side.comm
        if x.ndim < 1 or x.shape[0] != rows or not x.layout.is_contiguous:
            raise BadRequest("x", str(x.layout), f"{rows} dense rows, the sum of the counts")
        if self._local == 1:  # one piece for each rank, and one from each
            counts: list[tuple[int, ...]] = [tuple(map(int, each.reshape(-1))) for each in (sent, received)]
            return all_to_all(x, comm=ranks, send_counts=counts[0], recv_counts=counts[1])
        out = self._side.device.empty((into, *x.shape[1:]), x.dtype)
        with collective_group():
            for peer, rows_there in self._pieces(sent):
                send(x[rows_there], comm=ranks, peer=peer)
            for peer, rows_here in self._pieces(received):
                recv(out[rows_here], comm=ranks, peer=peer)
        return out

    def _pieces(self, counts: Any) -> list[tuple[int, slice]]:
        """The rank and the rows of each non-empty piece; pieces between the same ranks are in the order of experts."""
        by_rank = counts is self._sent
        result, first = [], 0
        for row, pieces in enumerate(counts):
            for column, count in enumerate(pieces):
                if count:
                    result.append((row if by_rank else column, slice(first, first + int(count))))
                first += int(count)
        return result


def expert_matmul(x: Tensor, weights: Tensor, counts: Sequence[int], *, comm: Ranks) -> Tensor:
    """x[i] · W[expert of row i] for the experts of all ranks, in the order of x.

    Args:
        x: (rows, k), sorted by expert, dense.
        weights: (experts of this rank, k, n), of x's dtype.
        counts: as in `ExpertExchange`; use that for more than one product between sending and sending back.
        comm: the ranks.

    Returns (rows, n). Waits for the GPU, to learn how many rows come from which rank.
    """
    exchange = ExpertExchange(counts, comm=comm)
    side = SideStream(comm)
    w = check_operand("weights", weights, side, 3)
    if w.shape[0] != len(exchange.ends):
        raise BadRequest("weights", str(w.layout), f"{len(exchange.ends)} experts, the number of counts")
    expert_rows = exchange.to_experts(x)
    return exchange.from_experts(_products(expert_rows, w, exchange.ends, side))


def _products(x: Tensor, w: Tensor, ends: Any, side: SideStream) -> Tensor:
    """Each expert's rows times its matrix; for f16 and bf16 one plan serves all numbers of rows."""
    out = side.device.empty((x.shape[0], w.shape[2]), x.dtype)
    if not out.size or not w.shape[1]:
        side.device.fill_zero(out)  # empty sums
        return out
    if x.dtype in (F16, BF16):
        return grouped_matmul(x, w, ends, out=out)
    parts = [(e, slice(first, last)) for e, (first, last) in enumerate(itertools.pairwise([0, *map(int, ends)]))]
    parts = [(e, rows) for e, rows in parts if rows.stop > rows.start]
    grouped_matmul([x[rows] for _, rows in parts], [w[e] for e, _ in parts], out=[out[rows] for _, rows in parts])
    return out
