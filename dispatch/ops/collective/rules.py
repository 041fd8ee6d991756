"""Rules of the rows of collectives: whose communicator it is, and memory as libraries count it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.ops.collective.request import ReducingRequest

if TYPE_CHECKING:
    from dispatch.ops.collective.request import CollectiveRequest

__all__ = ["dense", "even", "numbers_of_mpi", "of_mpi", "of_nccl", "of_threads"]

MOST_BYTES = 2**31 - 1  # which MPI counts in an int


def of_nccl(request: CollectiveRequest) -> str:
    """Rule: on a GPU."""
    return _of(request, "nccl", "a communicator of NCCL")


def of_mpi(request: CollectiveRequest) -> str:
    """Rule: between processes of the host."""
    return _of(request, "mpi", "a communicator of MPI")


def of_threads(request: CollectiveRequest) -> str:
    """Rule: between threads of one process of the host."""
    return _of(request, "threads", "a communicator of threads")


def _of(request: CollectiveRequest, library: str, needed: str) -> str:
    found = request.ranks
    return "" if found.library == library else f"needs {needed}, has {found!r}"


def dense(request: CollectiveRequest) -> str:
    """Rule: libraries count elements, and know no strides."""
    for name, tensor, _ in request.tensors():
        if not tensor.layout.is_contiguous:
            return f"needs {name} dense in C order, has {tensor.layout}"
    return ""


def even(request: CollectiveRequest) -> str:
    """Rule: parts of one size."""
    counts = getattr(request, "send_counts", None)
    return "" if counts is None else f"needs parts of one size, has send_counts={counts}"


def numbers_of_mpi(request: CollectiveRequest) -> str:
    """Rule: fewer bytes than MPI's int counts, in the dtype that is reduced in."""
    sizes = [tensor.size * max(tensor.dtype.itemsize, 4) for _, tensor, _ in request.tensors()]
    if isinstance(request, ReducingRequest) or max(sizes, default=0) > MOST_BYTES:
        largest = max(sizes, default=0)
        return "" if largest <= MOST_BYTES else f"needs up to {MOST_BYTES} bytes, has {largest}"
    return ""
