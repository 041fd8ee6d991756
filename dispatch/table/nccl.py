"""The rows of collectives: by NCCL; on the host by MPI or gloo, or by NumPy between threads.

On two H100s every op gave right results in every dtype. Since then, sums in fp8 with a single rank use another code
path, and have not been run again.
"""

from __future__ import annotations

from dataclasses import replace

from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import BF16, F8E4M3, F8E5M2, F16, F32, F64, I8, I32, I64, U8, U32, U64, Arch, Dtype
from dispatch.ops.collective import host_collective, nccl_collective
from dispatch.ops.collective.rules import dense, even_parts, several_ranks
from dispatch.table.on_host import on_host

__all__ = ["DTYPES", "FUNCTIONS", "ROWS"]

SM75, SM80, SM90 = Arch(75), Arch(80), Arch(90)
V2_18, V2_24, V2_28 = (2, 18), (2, 24), (2, 28)  # split and non-blocking communicators; fp8; ncclAlltoAll
DTYPES = (F64, F32, F16, BF16, F8E4M3, F8E5M2, I8, U8, I32, U32, I64, U64)
# fmt: off
# For each op: the function that it calls, and the first version with that function.
FUNCTIONS = {
    "all_reduce":     ("ncclAllReduce",     V2_18),
    "broadcast":      ("ncclBroadcast",     V2_18),
    "reduce_to":      ("ncclReduce",        V2_18),
    "all_gather":     ("ncclAllGather",     V2_18),
    "reduce_scatter": ("ncclReduceScatter", V2_18),
    "gather":         ("ncclSend",          V2_18),
    "scatter":        ("ncclRecv",          V2_18),
    "send":           ("ncclSend",          V2_18),
    "recv":           ("ncclRecv",          V2_18),
    "sendrecv":       ("ncclSend",          V2_18),
}
# fmt: on
REDUCING = ("all_reduce", "reduce_to", "reduce_scatter")


def _row(op: str, dtype: Dtype, function: str, version: tuple[int, ...]) -> Row:
    is_fp8 = dtype in (F8E4M3, F8E5M2)
    least = SM80 if dtype is BF16 and op in REDUCING else SM75
    return Row(
        op=op,
        dtypes=(dtype, dtype),
        compute=None,
        rules=(dense, several_ranks) if is_fp8 and op in REDUCING else (dense,),
        min_arch=SM90 if is_fp8 and op in REDUCING else least,
        max_arch=None,
        min_version=max(version, V2_24) if is_fp8 else version,
        library="nccl",
        function=function,
        call=nccl_collective,
        run_on=() if is_fp8 and op in REDUCING else ("H100",),
    )


def _all_to_all(dtype: Dtype) -> tuple[Row, Row]:
    """Two rows: NCCL's own call for parts of one size; sends and receives for other sizes, and for older NCCLs."""
    any_size = _row("all_to_all", dtype, "ncclSend", V2_18)
    even_size = replace(any_size, rules=(dense, even_parts), function="ncclAlltoAll", variant="even")
    return replace(even_size, min_version=max(even_size.min_version, V2_28)), any_size


PLAIN = tuple(_row(op, dtype, *made) for op, made in FUNCTIONS.items() for dtype in DTYPES)
PAIRS = tuple(row for dtype in DTYPES for row in _all_to_all(dtype))
BARRIER = replace(_row("barrier", U8, "ncclAllReduce", V2_18), rules=())
GPU_ROWS = (*PLAIN, *PAIRS, BARRIER)
BY_MPI = "between processes a call of MPI, or an exchange of bytes by gloo; between threads NumPy"
HOST_ROWS = tuple(replace(on_host(row, host_collective, stands_for="nccl"), note=BY_MPI) for row in GPU_ROWS)
ROWS = stated((*GPU_ROWS, *HOST_ROWS))
