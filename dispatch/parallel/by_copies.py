"""Products whose rows or columns are on several ranks of one machine, overlapped with copies between the ranks.

In shards.py NCCL's kernels move the data; here copy engines move it (peers.py), in chunks of rows. Sums need no
separate kernels: as in a ring reduce-scatter, a rank's product adds the previous rank's sum of the same rows and passes
the result on. The addition is part of the product's epilogue (beta · C), and is rounded to the dtype of A, like the
steps of NCCL.

Data that another rank reads in place is copied into that rank's memory, which saves a copy. The other ranks cannot
access results, so each rank pulls the parts of its result itself.
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
        side.stream.wait_for(side.main)  # the kernels that wrote the operands or used the results' memory
        side.device.context.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        comm: Any = self.side.comm
        try:
            if error is None:
                self.peers.finish(self.side)
        finally:
            comm.device.context.__exit__(None, None, None)
        if error is not None:  # otherwise the other ranks would wait for data that never comes
            comm.fail(CollectiveError(f"{comm!r}: {self.name} ended with {type(error).__name__}: {error}"))
        elif not self.side.is_captured:
            comm.record_work(self.side.stream.c_handle, self.name)


def _chunks(peers: Peers, rows: int, count: int) -> list[slice]:
    """Rows in `count` chunks, limited by the number of flags."""
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

    In step s a rank multiplies the rows of the rank that is s + 1 before it, adds the sum that the previous rank has
    put into this rank's memory, and puts the result into the next rank's memory. In the last step the rows are its own.
    """
    size, rows_per_rank, n, main, stream = peers.size, x.shape[0] // peers.size, w.shape[1], side.main, side.stream
    previous, following, part_bytes = (peers.rank - 1) % size, (peers.rank + 1) % size, _nbytes((rows_per_rank, n), x)
    partial_sums = side.device.empty((size - 1, rows_per_rank, n), x.dtype)
    peers.begin(stream, side)
    for step in range(size):
        first, is_last = rows_per_rank * ((peers.rank - 1 - step) % size), step == size - 1
        for number, rows in enumerate(chunks):
            operand = x[first + rows.start : first + rows.stop]
            offset, slot = _nbytes((rows.start, n), x), step * len(chunks) + number
            out = outs[number] if is_last else partial_sums[step, rows]
            if step == 0:
                matmul(operand, w, compute=compute, out=out)
            else:
                part = peers.tensor((step - 1) * part_bytes + offset, (rows.stop - rows.start, n), x.dtype)
                peers.wait(previous, slot - len(chunks), main)
                matmul(operand, w, c=part, compute=compute, out=out)
            if not is_last:
                stream.wait_for(main)
                peers.put(following, step * part_bytes + offset, out.ptr, out.nbytes, stream)
                peers.signal((following,), slot, stream)
            elif signal_to:
                peers.signal(signal_to, slot, main)


def matmul_reduce_scatter(side: SideStream, peers: Peers, x: Tensor, w: Tensor, compute: Any, count: int) -> Tensor:
    """This rank's rows of the sum of all ranks' products; it needs (ranks - 1) / ranks of a product in `peers`."""
    rows_per_rank = x.shape[0] // peers.size
    out = side.device.empty((rows_per_rank, w.shape[1]), x.dtype)
    chunks = _chunks(peers, rows_per_rank, count)
    with _CopyBlock(side, peers, "matmul_reduce_scatter"):
        _reduce_around_ring(side, peers, x, w, chunks, compute, [out[rows] for rows in chunks])
    return out


def matmul_all_reduce(side: SideStream, peers: Peers, x: Tensor, w: Tensor, compute: Any, count: int) -> Tensor:
    """The sum of all ranks' products: each rank sums its own rows, and all copy them; it needs a product in `peers`."""
    size, rows_per_rank, n, main, stream = peers.size, x.shape[0] // peers.size, w.shape[1], side.main, side.stream
    out, chunks = side.device.empty((x.shape[0], n), x.dtype), _chunks(peers, rows_per_rank, count)
    starts = [_nbytes(((size - 1) * rows_per_rank + rows.start, n), x) for rows in chunks]
    sums = [peers.tensor(at, (rows.stop - rows.start, n), x.dtype) for at, rows in zip(starts, chunks, strict=True)]
    with _CopyBlock(side, peers, "matmul_all_reduce"):
        _reduce_around_ring(side, peers, x, w, chunks, compute, sums, peers.others)
        for number, rows in enumerate(chunks):
            for rank in peers.others:
                target = out[rank * rows_per_rank + rows.start : rank * rows_per_rank + rows.stop]
                peers.wait(rank, (size - 1) * len(chunks) + number, stream)
                peers.pull(target.ptr, rank, starts[number], target.nbytes, stream)
        own_rows = out[peers.rank * rows_per_rank : (peers.rank + 1) * rows_per_rank]
        peers.pull(own_rows.ptr, peers.rank, starts[0], own_rows.nbytes, main)
    return out


def all_gather_matmul(
    side: SideStream, peers: Peers, x: Tensor, w: Tensor, compute: Any, choices: dict[str, Any], count: int
) -> Tensor:
    """The product of all ranks' rows and this rank's columns, its own rows first; `peers` holds the others' rows."""
    size, rows_per_rank, main, stream = peers.size, x.shape[0], side.main, side.stream
    out = side.device.empty((size * rows_per_rank, w.shape[1]), x.dtype)
    chunks = _chunks(peers, rows_per_rank, count)
    starts, part_bytes = [_nbytes((rows.start, x.shape[1]), x) for rows in chunks], _nbytes(x.shape, x)
    with _CopyBlock(side, peers, "all_gather_matmul"):
        peers.begin(stream, side)
        for number, rows in enumerate(chunks):
            part = x[rows]
            for index, rank in enumerate(reversed(peers.others)):  # this rank's index in that rank's `others`
                peers.put(rank, index * part_bytes + starts[number], part.ptr, part.nbytes, stream)
                peers.signal((rank,), number, stream)
        own_rows = out[peers.rank * rows_per_rank : (peers.rank + 1) * rows_per_rank]
        matmul(x, w, compute=compute, out=own_rows, **choices)
        for index, rank in enumerate(peers.others):
            for number, rows in enumerate(chunks):
                part = peers.tensor(index * part_bytes + starts[number], (rows.stop - rows.start, x.shape[1]), x.dtype)
                peers.wait(rank, number, main)
                target = out[rank * rows_per_rank + rows.start : rank * rows_per_rank + rows.stop]
                matmul(part, w, compute=compute, out=target, **choices)
    return out


def matmul_all_gather(side: SideStream, peers: Peers, x: Tensor, w: Tensor, compute: Any, count: int) -> Tensor:
    """The product with all ranks' columns; `peers` holds each rank's product with its own columns."""
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
