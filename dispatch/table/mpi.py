"""The rows of collectives between processes of the host, which end in MPI's calls that do not wait. Rows alone."""

from __future__ import annotations

from dataclasses import replace

from dispatch.core.nonfinite import stated
from dispatch.ops.collective import mpi_collective
from dispatch.ops.collective.rules import dense, numbers_of_mpi, of_mpi
from dispatch.table.nccl import GPU_ROWS
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

# fmt: off
FUNCTIONS = {
    "all_reduce": "MPI_Iallreduce", "broadcast": "MPI_Ibcast",  "reduce_to": "MPI_Ireduce",
    "all_gather": "MPI_Iallgatherv", "gather": "MPI_Igatherv",  "scatter": "MPI_Iscatterv",
    "send": "MPI_Isend",            "recv": "MPI_Irecv",        "sendrecv": "MPI_Irecv",
    "all_to_all": "MPI_Ialltoallv", "barrier": "MPI_Ibarrier",  "reduce_scatter": "MPI_Ireduce_scatter",
}
# fmt: on
ROWS = stated(
    replace(
        on_host(row, mpi_collective, library="mpi", function=FUNCTIONS[row.op]),
        rules=(of_mpi, dense, numbers_of_mpi),
    )
    for row in GPU_ROWS
    if not row.variant
)
