"""The rows of iterative solvers of sparse systems: this library's kernels around cuSPARSE's product."""

# fmt: off
from __future__ import annotations

from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import C64, C128, F32, F64, Arch
from dispatch.ops.sparse import krylov_plan, rules
from dispatch.ops.sparse.krylov_reference import scipy_krylov
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

SM75  = Arch(75)
H100, H200 = ("H100",), ("H200",)
ANY   = (
    rules.aligned, rules.index_dtypes, rules.square_blocks, rules.dense_results, rules.krylov_operands,
    rules.preconditioner_formats,
)
RULES = (*ANY, rules.diagonal_preconditioner)
SOLVES = (*ANY, rules.factor_preconditioner)
BLOCKS = (*ANY, rules.block_preconditioner)
REAL, ALL = (F32, F64), (F32, F64, C64, C128)

GPU_ROWS = (
#   op, (values, out), compute, rules, min_arch, max_arch, min_version, calls
    *(Row("cg",       (one, one), None, RULES, SM75, None, (), "own", "cg", krylov_plan, H100) for one in ALL),
    *(Row("bicgstab", (one, one), None, RULES, SM75, None, (), "own", "bicgstab", krylov_plan, H100) for one in ALL),
    *(Row("gmres",    (one, one), None, RULES, SM75, None, (), "own", "gmres", krylov_plan, H100) for one in ALL),
    *(Row("minres",   (one, one), None, RULES, SM75, None, (), "own", "minres", krylov_plan, H100) for one in REAL),
    *(Row(op, (one, one), None, SOLVES, SM75, None, (), "own", op, krylov_plan, H200, variant="factors")
      for op in ("cg", "bicgstab", "gmres") for one in ALL),
    *(Row(op, (one, one), None, BLOCKS, SM75, None, (), "own", op, krylov_plan, H200, variant="blocks")
      for op in ("cg", "bicgstab", "gmres") for one in ALL),
    *(Row("minres",   (one, one), None, BLOCKS, SM75, None, (), "own", "minres", krylov_plan, H200, variant="blocks")
      for one in REAL),
)
# fmt: on
ROWS = stated((*GPU_ROWS, *(on_host(row, scipy_krylov, library="scipy", stands_for="own") for row in GPU_ROWS)))
