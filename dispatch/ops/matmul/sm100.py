"""The plan of a product with a CUTLASS kernel for sm_100a or sm_120a: alpha · A · B + beta · C.

`plan` makes the plans of the table's Blackwell rows. Tests compile the kernels, but they have not run on any GPU yet,
as `run_on` of their rows shows. Their parameters are prepared like those of Hopper's kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.errors import Refused
from dispatch.libraries.cutlass import compile as compiler
from dispatch.libraries.cutlass.emit.sm100_gemm import ARCHES, CLUSTER, BlackwellSpec, emit
from dispatch.libraries.cutlass.launch import Launch, module
from dispatch.libraries.cutlass.layout import order_of
from dispatch.libraries.cutlass.plan import TreePlan, float_bits, multiprocessors
from dispatch.ops.matmul.cutlass import fixed_words, staged

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Arch
    from dispatch.ops.matmul.request import MatmulRequest
    from dispatch.ops.matmul.trees import TreeForm

__all__ = ["BlackwellPlan", "plan", "spec_of"]


def plan(request: MatmulRequest, executor: CudaExecutor, row: Row) -> Plan:
    """Bind a request to an executor: compile or load the kernel, prepare its parameters."""
    arch = executor.device.arch
    if arch not in ARCHES or arch < row.min_arch:
        raise Refused(f"needs sm_100 or sm_120, for instructions that only these GPUs have, has {arch}")
    return BlackwellPlan(request, executor, row)


def spec_of(form: TreeForm, arch: Arch) -> BlackwellSpec:
    """The spec of the kernel for a form."""
    orders = [order_of(t) if t is not None else "row" for t in (form.a, form.b, form.c, form.out)]
    return BlackwellSpec(
        arch=arch,
        a=form.a.dtype,
        b=form.b.dtype,
        c=None if form.c is None else form.c.dtype,
        d=form.d_dtype,
        orders=(orders[0], orders[1], orders[2], orders[3]),
    )


class BlackwellPlan(TreePlan):
    """The launch of one kernel for one set of layouts."""

    __slots__ = ("spec",)

    def __init__(self, request: MatmulRequest, executor: CudaExecutor, row: Row) -> None:
        super().__init__(row, capture_safe=True)
        self._executor = executor
        form = request.form
        self.spec = spec_of(form, executor.device.arch)
        source = emit(self.spec)
        future = compiler.request(source, self.spec.target, f"{row.name}: {form.tree}")
        kernel = compiler.kernel_id(source, self.spec.target)
        loaded = module(executor.device, kernel, future.result(), source.words)
        self._number, self._names = float_bits, form.names
        self._staged = staged(form, executor)
        self._values = {**fixed_words(form, multiprocessors(executor)), **self._staged.words, "swizzle": 1}
        self._launch = Launch(loaded, executor, self._values, CLUSTER)
        self._reduce(form.tree, {}, {})  # the tree is linear: there are no reductions
