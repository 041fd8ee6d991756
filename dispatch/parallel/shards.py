"""Products of matrices whose rows or columns are on several ranks, with the collective overlapping the product.

The product is cut into chunks of rows: while one is sent, the next is computed. Between the ranks of one machine copy
engines can move the chunks (`by="copies"`, by_copies.py); otherwise NCCL moves them. The two ways to shard a layer's
matrix are those of Megatron-LM, https://arxiv.org/abs/1909.08053 and, with sharded activations, /abs/2205.05198: a
matrix sharded by columns needs only the operand's rows from the other ranks; one sharded by rows needs a sum of the
results.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from dispatch.checks import check_enum, shown
from dispatch.errors import BadRequest, Refused
from dispatch.keys import BF16, F16, F32, F64, Epilogue
from dispatch.ops.collective import all_gather, all_reduce, reduce_scatter
from dispatch.ops.fft.roll import roll
from dispatch.ops.matmul import matmul
from dispatch.parallel import by_copies
from dispatch.parallel.chunks import cut, run_in_chunks
from dispatch.parallel.peers import peers_of
from dispatch.parallel.side_stream import SideStream, check_matrices

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.communicator import Ranks
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Compute

__all__ = ["all_gather_matmul", "matmul_all_gather", "matmul_all_reduce", "matmul_reduce_scatter"]

# Whether copies are measured against NCCL if `by` is not given. On two H200 in bf16, in two processes, products of
# 8192x8192x8192 took 0.73 to 0.91 ms with copies, 0.73 without the transfer, and 1.04 to 1.50 with NCCL.
MEASURE_COPIES = True
COPY_DTYPES = (F16, BF16, F32, F64)  # dtypes whose products can add a C of the same dtype, as sums over ranks need


def matmul_all_reduce(
    a: Tensor,
    b: Tensor,
    *,
    comm: Ranks,
    chunks: int | None = None,
    compute: Compute | str | None = None,
    by: str | None = None,
) -> Tensor:
    """A · B, sharded along the inner axis: each rank has some columns of A and the same rows of B. All get the result.

    Args:
        a: (m, k of this rank). The result has its dtype; sums over ranks are rounded to it.
        b: (k of this rank, n).
        comm: the ranks, a World or a communicator. All have the same m and n.
        chunks: the number of chunks into which the rows of A are cut, the same on all ranks; None: measured the first
            time.
        compute: as in `matmul`.
        by: what moves the data: "nccl", or "copies": the GPUs' copy engines within one machine. None: copies if
            they are possible; if `chunks` is None, too, the first call also measures NCCL.

    Returns (m, n) on every rank. BadRequest for shapes that do not fit; Refused if copies are requested but impossible.
    """
    side = SideStream(comm)
    x, w = check_matrices(a, b, side)

    def run(count: int) -> Tensor:
        with side.stream:
            out = side.device.empty((x.shape[0], w.shape[1]), x.dtype)
        parts = []
        for rows in cut(x.shape[0], count):
            part = matmul(x[rows], w, compute=compute, out_dtype=x.dtype)
            parts.append(part)  # otherwise the next chunk would reuse its memory, and wait for it
            with side.stream:
                all_reduce(part, comm=side.comm, out=out[rows])
        side.join()
        return out

    m, n = x.shape[0], w.shape[1]
    key = _key("all_reduce", x, w, (m, n), compute, by)
    copied = _by_copies(by_copies.matmul_all_reduce, side, by, 0 if m % side.comm.size else m * n, x, w, compute)
    return run_in_chunks(_variants(by, copied, run), chunks, m, key, side)


def matmul_reduce_scatter(
    a: Tensor,
    b: Tensor,
    *,
    comm: Ranks,
    chunks: int | None = None,
    compute: Compute | str | None = None,
    by: str | None = None,
) -> Tensor:
    """A · B as in `matmul_all_reduce`, but each rank gets only its share of the rows of the result: (m / ranks, n).

    Args as in `matmul_all_reduce`; m is a multiple of the number of ranks.
    """
    side = SideStream(comm)
    x, w = check_matrices(a, b, side)
    size, n = side.comm.size, w.shape[1]
    if x.shape[0] % size:
        raise BadRequest("a", str(x.layout), f"a multiple of {size}, the number of ranks that share the rows")
    rows_per_rank = x.shape[0] // size
    of_ranks = x.strided((size, rows_per_rank, x.shape[1]), (rows_per_rank * x.element_strides[0], *x.element_strides))

    def run(count: int) -> Tensor:
        with side.stream:
            out = side.device.empty((rows_per_rank, n), x.dtype)
        parts = []
        for rows in cut(rows_per_rank, count):
            part = matmul(of_ranks[:, rows], w, compute=compute, out_dtype=x.dtype)  # these rows of every rank
            parts.append(part)
            with side.stream:
                reduce_scatter(part, comm=side.comm, out=out[rows])
        side.join()
        return out

    key = _key("reduce_scatter", x, w, (x.shape[0], n), compute, by)
    copied = _by_copies(by_copies.matmul_reduce_scatter, side, by, (x.shape[0] - rows_per_rank) * n, x, w, compute)
    return run_in_chunks(_variants(by, copied, run), chunks, rows_per_rank, key, side)


def all_gather_matmul(
    a: Tensor,
    b: Tensor,
    *,
    comm: Ranks,
    bias: Tensor | None = None,
    epilogue: Epilogue | str = Epilogue.NONE,
    chunks: int | None = None,
    compute: Compute | str | None = None,
    by: str | None = None,
) -> Tensor:
    """A · B, where each rank has some rows of A and some columns of B, and gets all rows of its columns.

    Args:
        a: (m / ranks, k), the same shape on all ranks; dense, because it is sent.
        b: (k, n of this rank).
        comm: the ranks, a World or a communicator.
        bias: (n of this rank,), for an epilogue with a bias.
        epilogue: the epilogue of `matmul`: RELU, GELU, BIAS, or BIAS with one of the others.
        chunks, compute, by: as in `matmul_all_reduce`.

    Returns (m, n of this rank), rows of rank 0 first. BadRequest for shapes that do not fit.
    """
    side = SideStream(comm)
    x, w = check_matrices(a, b, side)
    rows_per_rank, n, size = x.shape[0], w.shape[1], side.comm.size
    _check_epilogue(epilogue)
    choices: dict[str, Any] = {"epilogue": epilogue, **({} if bias is None else {"bias": bias})}
    if not x.layout.is_contiguous:
        raise BadRequest(
            "a", str(x.layout), "elements dense in C order, because they are sent to other ranks", "a.copy()"
        )

    def run(count: int) -> Tensor:
        out = side.device.empty((size * rows_per_rank, n), x.dtype)
        of_ranks = out.reshape(size, rows_per_rank, n)
        parts = []
        with side.stream:
            side.stream.wait_for(side.main)  # for the kernel that wrote A
        for rows in cut(rows_per_rank, count):
            with side.stream:
                part = all_gather(x[rows], comm=side.comm)  # these rows of every rank
            parts.append(part)
            side.wait_for_reads(part)  # after this chunk's transfer, before the next one is enqueued
            matmul(part, w, compute=compute, out=of_ranks[:, rows], **choices)
        side.join()
        return out

    key = (*_key("all_gather", x, w, x.shape, compute, by), str(epilogue))
    copied = _by_copies(by_copies.all_gather_matmul, side, by, x.size * (side.comm.size - 1), x, w, compute, choices)
    return run_in_chunks(_variants(by, copied, run), chunks, rows_per_rank, key, side)


def matmul_all_gather(
    a: Tensor,
    b: Tensor,
    *,
    comm: Ranks,
    chunks: int | None = None,
    compute: Compute | str | None = None,
    by: str | None = None,
) -> Tensor:
    """A · B, where each rank has some columns of B, and gets all columns of the result: (m, n of this rank · ranks).

    Args:
        a: (m, k), the same on all ranks.
        b: (k, n of this rank), the same number of columns on all ranks.
        comm, chunks, compute, by: as in `matmul_all_reduce`.

    Each rank sends a block of its columns, which a kernel copies into the rows of the result.
    """
    side = SideStream(comm)
    x, w = check_matrices(a, b, side)
    m, n, size = x.shape[0], w.shape[1], side.comm.size

    def run(count: int) -> Tensor:
        out = side.device.empty((m, size * n), x.dtype)
        by_rank = out.reshape(m, size, n).transpose(1, 0, 2)
        tensors: list[Tensor] = []
        previous: tuple[Tensor, slice] | None = None
        for rows in cut(m, count):
            part = matmul(x[rows], w, compute=compute, out_dtype=x.dtype)
            if previous is not None:  # after this product, which does not wait, and before the next transfer
                side.wait_for_reads(previous[0])
            with side.stream:
                gathered = all_gather(part, comm=side.comm)
            if previous is not None:
                _place_columns(side, *previous, by_rank)
            tensors += [part, gathered]
            previous = (gathered, rows)
        if previous is not None:
            _place_columns(side, *previous, by_rank)
        side.join()
        return out

    key = _key("columns", x, w, (*x.shape, n), compute, by)
    copied = _by_copies(by_copies.matmul_all_gather, side, by, m * n, x, w, compute)
    return run_in_chunks(_variants(by, copied, run), chunks, m, key, side)


def _check_epilogue(epilogue: object) -> None:
    """BadRequest for an epilogue with a second output, or one that reads it: there is one result."""
    if not isinstance(epilogue, (str, Epilogue)):
        return  # a tree, which `matmul` checks
    kind = check_enum("epilogue", epilogue, Epilogue)
    if kind.writes_aux or kind.writes_bgrad or kind.is_gradient:
        raise BadRequest(
            "epilogue",
            kind.name,
            "one with a single output: NONE, RELU, GELU, BIAS, RELU_BIAS or GELU_BIAS",
            "dispatch.all_gather(a), then dispatch.matmul, gives both outputs",
        )


def _place_columns(side: SideStream, whole: Tensor, rows: slice, by_rank: Tensor) -> None:
    """Copy a chunk's columns, rank by rank, into the rows of the result."""
    side.wait_for_reads(whole)
    if whole.size:
        roll(whole, 0, 0, out=by_rank[:, rows])


def _by_copies(
    block: Callable[..., Tensor], side: SideStream, by: str | None, elements: int, a: Tensor, *rest: Any
) -> Callable[[int], Tensor] | None:
    """The variant of a block that uses copies, as a function of the number of chunks; None if NCCL must be used.

    `elements` is how many elements of each rank are copied.
    """
    if by not in (None, "nccl", "copies"):
        raise BadRequest("by", shown(by), '"nccl", "copies", or None')
    peers = None
    if by == "copies" or (by is None and MEASURE_COPIES):
        peers = peers_of(side, elements * a.dtype.itemsize) if a.dtype in COPY_DTYPES else None
    if by == "copies" and peers is None:
        conditions = "for GPUs of one machine, one process each, and a multiple of the number of ranks as rows"
        actual = f"given are {a.layout} and {side.comm!r}"
        raise Refused(f'by="copies" is {conditions}, in {" ".join(map(str, COPY_DTYPES))}; {actual}')
    return None if peers is None else partial(block, side, peers, a, *rest)


def _variants(
    by: str | None, copied: Callable[[int], Tensor] | None, run: Callable[[int], Tensor]
) -> list[Callable[[int], Tensor]]:
    """The variants that a block may use, the preferred one first."""
    if copied is None:
        return [run]
    return [copied] if by == "copies" else [copied, run]


def _key(kind: str, a: Tensor, b: Tensor, extents: tuple[int, ...], compute: Any, by: str | None) -> tuple[Any, ...]:
    """The key of a measured number of chunks: extents that are the same on all ranks, because all measure together."""
    return kind, extents, a.dtype.name, b.dtype.name, str(compute), by
