"""The rows of direct sparse solves by cuDSS, from version 1.0 on, because that version changed functions and enums.

`run_on` names the machines on which all cases of a row have passed.
"""

# fmt: off
from __future__ import annotations

from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import C64, C128, F32, F64, Arch
from dispatch.ops.sparse import cudss_plan, list_rules, rules
from dispatch.ops.sparse.direct_reference import LISTS as SEVERAL_PATTERNS
from dispatch.ops.sparse.direct_reference import scipy_direct
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

SM75, V1 = Arch(75), (1, 0)
RULES = (rules.aligned, rules.only_csr, rules.index_dtypes, rules.dense_results, rules.direct_operands)
STACKED, LISTS = (list_rules.one_pattern,), (list_rules.lists,)
SOLVE = ("cudss", "cudssExecute", cudss_plan, ("H200",))
BATCHED = ("cudss", "cudssExecute", cudss_plan, ("H200",))
SEVERAL = ("cudss", "cudssExecute", cudss_plan, ("H200",), None, SEVERAL_PATTERNS)

GPU_ROWS = (
#   op, (values, out), compute, rules, min_arch, max_arch, min_version, calls
    *(Row("spsolve",         (one, one), None, RULES,   SM75, None, V1, *SOLVE) for one in (F32, F64, C64, C128)),
    *(Row("spsolve_batched", (one, one), None, STACKED, SM75, None, V1, *BATCHED) for one in (F32, F64, C64, C128)),
    *(Row("spsolve_batched", (one, one), None, LISTS,   SM75, None, V1, *SEVERAL) for one in (F32, F64, C64, C128)),
)
# fmt: on
ROWS = stated((*GPU_ROWS, *(on_host(row, scipy_direct, library="scipy", stands_for="cudss") for row in GPU_ROWS)))
