"""The rows of direct sparse solves by cuSOLVER, for machines without cuDSS.

Factors can be kept in f64 only, by the refactorization (cusolverRf). Positive definite matrices use `csrlsvchol`.
"""

from __future__ import annotations

from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import C64, C128, F32, F64, Arch
from dispatch.ops.sparse import cusolver_plan, refactor_plan, rules
from dispatch.ops.sparse.direct_reference import scipy_direct
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

SM75, V11 = Arch(75), (11, 0)
RULES = (
    *(rules.aligned, rules.only_csr, rules.i32_indices, rules.dense_results, rules.direct_operands),
    *(rules.both_triangles, rules.factors_on_device, rules.same_precision, rules.no_refinement),
)
LETTERS = {F32: "S", F64: "D", C64: "C", C128: "Z"}

REFACTOR = Row(
    op="spsolve",
    dtypes=(F64, F64),
    compute=None,
    rules=(*RULES, rules.refactorization),
    min_arch=SM75,
    max_arch=None,
    min_version=V11,
    library="cusolverRf",
    function="cusolverRfRefactor",
    call=refactor_plan,
    run_on=("H200",),
    variant="refactor",
)
GPU_ROWS = tuple(
    Row(
        op="spsolve",
        dtypes=(dtype, dtype),
        compute=None,
        rules=RULES,
        min_arch=SM75,
        max_arch=None,
        min_version=V11,
        library="cusolverSp",
        function=f"cusolverSp{letter}csrlsvqr",
        call=cusolver_plan,
        run_on=("H100",),
        variant="qr",
    )
    for dtype, letter in LETTERS.items()
)
ROWS = stated(
    (
        *(REFACTOR, *GPU_ROWS),
        on_host(REFACTOR, scipy_direct, library="scipy", stands_for="cusolverRf"),
        *(on_host(row, scipy_direct, library="scipy", stands_for="cusolverSp") for row in GPU_ROWS),
    )
)
