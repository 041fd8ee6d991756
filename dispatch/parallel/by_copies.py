"""Products whose rows or columns are on several ranks of one machine, overlapped with copies between the ranks.

In shards.py NCCL's kernels move the data; here copy engines do (peers.py), in chunks of rows. Sums need no kernels
either: a rank's product adds what the previous rank has of the same rows, and passes the sum on, as in a ring
reduce-scatter; each addition is the product's own epilogue, and is rounded to the dtype of A, as NCCL's steps are.

Data that another rank reads in place is put into its memory, which saves a copy. Results cannot be accessed by the
other ranks, so each rank pulls the parts of its result itself.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dispatch.errors import CollectiveError
from dispatch.ops.matmul import matmul
from dispatch.parallel.chunks import cut
from dispatch.parallel.peers import MAX_SLOTS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from dispatch.device.tensor import Tensor
    from dispatch.parallel.peers import Peers
    from dispatch.parallel.side_stream import SideStream

__all__ = ["all_gather_matmul", "matmul_all_gather", "matmul_all_reduce", "matmul_reduce_scatter"]


class _CopyBlock:
    """Context manager around a rank's part in a block of products and copies; an exception ends the communicator."""

    def __init__(self, side: SideStream, peers: Peers, name: str) -> None:
        self.side, self.peers, self.name = side, peers, name

    def __enter__(self) -> None:
        side = self.side
        side.comm.check()
        side.stream.wait_for(side.main)  # for what wrote the operands, and used the results' memory before
        side.device.context.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        comm: Any = self.side.comm
        try:
            if error is None:
                self.peers.finish(self.side)
        finally:
            comm.device.context.__exit__(None, None, None)
        if error is not None:  # the other ranks would wait for data that does not come
            comm.fail(CollectiveError(f"{comm!r}: {self.name} was left by {type(error).__name__}: {error}"))
        elif not self.side.is_captured:
            comm.record_work(self.side.stream.c_handle, self.name)


def _chunks(peers: Peers, rows: int, count: int) -> list[slice]:
    """Rows in `count` chunks, or in as many as there are flags for."""
    return cut(rows, min(count, MAX_SLOTS // peers.size))


def _nbytes(shape: tuple[int, ...], tensor: Tensor) -> int:
    """The size of a dense array with a tensor's dtype."""
    return math.prod(shape) * tensor.dtype.itemsize


def _reduce_around_ring(
    side: SideStream,
    peers: Peers,
    x: Tensor,
    w: Tensor,
    chunks: list[slice],
    compute: Any,
    outs: list[Tensor],
    signal_to: Sequence[int] = (),
) -> None:
    """Sum this rank's rows, each chunk into one of `outs`, on the main stream, and signal each chunk to some ranks.

    In step s a rank multiplies the rows of the rank that is s + 1 before it, adds what the previous rank has put here,
    and puts the sum into the next rank's memory; in the last step the rows are its own.
    """
    size, own, n, main, stream = peers.size, x.shape[0] // peers.size, w.shape[1], side.main, side.stream
    before, behind, each = (peers.rank - 1) % size, (peers.rank + 1) % size, _nbytes((own, n), x)
    sent = side.device.empty((size - 1, own, n), x.dtype)
    peers.begin(stream, side)
    for step in range(size):
        first, is_last = own * ((peers.rank - 1 - step) % size), step == size - 1
        for number, rows in enumerate(chunks):
            operand = x[first + rows.start : first + rows.stop]
            begin, slot = _nbytes((rows.start, n), x), step * len(chunks) + number
            out = outs[number] if is_last else sent[step, rows]
            if step == 0:
                matmul(operand, w, compute=compute, out=out)
            else:
                part = peers.tensor((step - 1) * each + begin, (rows.stop - rows.start, n), x.dtype)
                peers.wait(before, slot - len(chunks), main)
                matmul(operand, w, c=part, compute=compute, out=out)
            if not is_last:
                stream.wait_for(main)
                peers.put(behind, step * each + begin, out.ptr, out.nbytes, stream)
                peers.signal((behind,), slot, stream)
            elif signal_to:
                peers.signal(signal_to, slot, main)


def matmul_reduce_scatter(side: SideStream, peers: Peers, x: Tensor, w: Tensor, compute: Any, count: int) -> Tensor:
    """This rank's rows of the sum of all ranks' products; its data is (ranks - 1) / ranks of a product."""
    own = x.shape[0] // peers.size
    out = side.device.empty((own, w.shape[1]), x.dtype)
    chunks = _chunks(peers, own, count)
    with _CopyBlock(side, peers, "matmul_reduce_scatter"):
        _reduce_around_ring(side, peers, x, w, chunks, compute, [out[rows] for rows in chunks])
    return out


def matmul_all_reduce(side: SideStream, peers: Peers, x: Tensor, w: Tensor, compute: Any, count: int) -> Tensor:
    """The sum of all ranks' products: each sums up its own rows, and all copy them; its data is a whole product."""
    size, own, n, main, stream = peers.size, x.shape[0] // peers.size, w.shape[1], side.main, side.stream
    out, chunks = side.device.empty((x.shape[0], n), x.dtype), _chunks(peers, own, count)
    starts = [_nbytes(((size - 1) * own + rows.start, n), x) for rows in chunks]
    sums = [peers.tensor(at, (rows.stop - rows.start, n), x.dtype) for at, rows in zip(starts, chunks, strict=True)]
    with _CopyBlock(side, peers, "matmul_all_reduce"):
        _reduce_around_ring(side, peers, x, w, chunks, compute, sums, peers.others)
        for number, rows in enumerate(chunks):
            for rank in peers.others:
                target = out[rank * own + rows.start : rank * own + rows.stop]
                peers.wait(rank, (size - 1) * len(chunks) + number, stream)
                peers.pull(target.ptr, rank, starts[number], target.nbytes, stream)
        mine = out[peers.rank * own : (peers.rank + 1) * own]
        peers.pull(mine.ptr, peers.rank, starts[0], mine.nbytes, main)
    return out


def all_gather_matmul(
    side: SideStream, peers: Peers, x: Tensor, w: Tensor, compute: Any, choices: dict[str, Any], count: int
) -> Tensor:
    """All ranks' rows by this rank's columns, its own rows first; its data is what the others put there, their rows."""
    size, own, main, stream = peers.size, x.shape[0], side.main, side.stream
    out = side.device.empty((size * own, w.shape[1]), x.dtype)
    chunks = _chunks(peers, own, count)
    starts, each = [_nbytes((rows.start, x.shape[1]), x) for rows in chunks], _nbytes(x.shape, x)
    with _CopyBlock(side, peers, "all_gather_matmul"):
        peers.begin(stream, side)
        for number, rows in enumerate(chunks):
            part = x[rows]
            for place, rank in enumerate(reversed(peers.others)):  # this rank's place among that rank's others
                peers.put(rank, place * each + starts[number], part.ptr, part.nbytes, stream)
                peers.signal((rank,), number, stream)
        mine = out[peers.rank * own : (peers.rank + 1) * own]
        matmul(x, w, compute=compute, out=mine, **choices)
        for place, rank in enumerate(peers.others):
            for number, rows in enumerate(chunks):
                part = peers.tensor(place * each + starts[number], (rows.stop - rows.start, x.shape[1]), x.dtype)
                peers.wait(rank, number, main)
                target = out[rank * own + rows.start : rank * own + rows.stop]
                matmul(part, w, compute=compute, out=target, **choices)
    return out


def matmul_all_gather(side: SideStream, peers: Peers, x: Tensor, w: Tensor, compute: Any, count: int) -> Tensor:
    """The product by all ranks' columns; a rank's data is the product by its own."""
    size, (m, n), main, stream = peers.size, (x.shape[0], w.shape[1]), side.main, side.stream
    out, chunks = side.device.empty((m, size * n), x.dtype), _chunks(peers, m, count)
    starts, width = [_nbytes((rows.start, n), x) for rows in chunks], _nbytes((n,), x)
    with _CopyBlock(side, peers, "matmul_all_gather"):
        peers.begin(main, side)
        for number, rows in enumerate(chunks):
            part = peers.tensor(starts[number], (rows.stop - rows.start, n), x.dtype)
            matmul(x[rows], w, compute=compute, out=part)
            peers.signal(peers.others, number, main)
        for number, rows in enumerate(chunks):
            for rank in peers.others:
                peers.wait(rank, number, stream)
                peers.pull_rows(out[rows, rank * n : (rank + 1) * n], rank, starts[number], width, stream)
        peers.pull_rows(out[:, peers.rank * n : (peers.rank + 1) * n], peers.rank, starts[0], width, main)
    return out
