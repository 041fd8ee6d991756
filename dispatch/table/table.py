"""TABLE: all rows, in order of priority. `dispatch/ops/__init__.py` says which file has the rows of an op.

`select.py` tries the rows from top to bottom; the first that takes a request runs it. `core/row.py` documents the
columns.
"""

from __future__ import annotations

import copyreg
from typing import Any

from cudabind._fork import guard
from dispatch.core.nonfinite import stated
from dispatch.core.row import Table
from dispatch.ops import FAMILIES, ONLY
from dispatch.table.cublaslt import ROWS

__all__ = ["LATER", "TABLE"]

# Where several files have rows of one op, those of the earlier file come first.
ORDER = (
    "cudnn_graph",
    "cudnn_call",
    "cutlass",
    "cublas_gemm",
    "cublaslt_grouped",
    "cublas_grouped",
    "own",
    "own_blas",
    "own_linalg",
    "cublas",
    "cublas_batched",
    "cusolver",
    "cufft",
    "own_fft",
    "own_sparse",
    "cusparse",
    "own_krylov",
    "cudss",
    "cusparselt",
    "cusolver_sp",
    "own_random",
    "curand",
    "contract_cublaslt",
    "cutensor",
    "contract_permuted",
    "cutensor_block_sparse",
    "einsum",
    "nccl",
)
# The rows of matmul are imported with this module; every other file when one of its ops is first looked up.
LATER: dict[str, tuple[str, ...]] = {}
for files, ops in FAMILIES.values():
    for file in files.split():
        if file != "cublaslt":
            LATER[f"dispatch.table.{file}"] = LATER.get(f"dispatch.table.{file}", ()) + ONLY.get(file, ops)
LATER = dict(sorted(LATER.items(), key=lambda entry: ORDER.index(entry[0].rpartition(".")[2])))

TABLE: Table = Table(stated(ROWS), LATER)


def _the_table() -> Table:
    return TABLE


def _reduced(table: Table) -> tuple[Any, ...]:
    """TABLE is pickled by its name, and so is `dispatch.register`, its method; other tables cannot be pickled."""
    if table is not TABLE:
        raise TypeError("only dispatch.TABLE can be pickled, because the rows of another Table may have been changed")
    return _the_table, ()


copyreg.pickle(Table, _reduced)
# No process is forked while rows are imported, because the import would never finish in the child.
guard(TABLE.lock)
