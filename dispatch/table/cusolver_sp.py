"""The rows of direct solves that end in cuSOLVER, for where cuDSS is not installed. Rows, and nothing else.

None has run on a GPU yet: `run_on` is empty.
"""

# fmt: off
from __future__ import annotations

from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import C64, C128, F32, F64, Arch
from dispatch.ops.sparse import cusolver_plan, rules
from dispatch.ops.sparse.direct_reference import scipy_direct
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

SM75, V11 = Arch(75), (11, 0)
RULES = (rules.aligned, rules.only_csr, rules.narrow, rules.results, rules.factorized, rules.both_triangles)

GPU_ROWS = (
#   op, (values, out), compute, rules, min_arch, max_arch, min_version, calls
    Row("spsolve", (F32, F32),   None, RULES, SM75, None, V11, "cusolverSp", "cusolverSpScsrlsvqr", cusolver_plan),
    Row("spsolve", (F64, F64),   None, RULES, SM75, None, V11, "cusolverSp", "cusolverSpDcsrlsvqr", cusolver_plan),
    Row("spsolve", (C64, C64),   None, RULES, SM75, None, V11, "cusolverSp", "cusolverSpCcsrlsvqr", cusolver_plan),
    Row("spsolve", (C128, C128), None, RULES, SM75, None, V11, "cusolverSp", "cusolverSpZcsrlsvqr", cusolver_plan),
)
# fmt: on
ROWS = stated((*GPU_ROWS, *(on_host(row, scipy_direct, library="scipy", stands_for="cusolverSp") for row in GPU_ROWS)))
