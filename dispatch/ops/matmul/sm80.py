"""The plan of a product with a multistage CUTLASS kernel, for GPUs from sm_80 on.

`plan` serves the table's sm_80 rows: float64, and layouts that tensor maps cannot describe. The kernel reads alpha and
beta in device memory; the executor puts given numbers there once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.keys import F64
from dispatch.libraries.cutlass.emit.sm80_gemm import MultistageSpec, emit
from dispatch.libraries.cutlass.layout import alignment, order_of
from dispatch.libraries.cutlass.plan import MultistageKernelPlan
from dispatch.ops.matmul.cutlass import fixed_words

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Arch, Dtype
    from dispatch.libraries.cutlass.emit.sm90_gemm import Source
    from dispatch.ops.matmul.request import MatmulRequest
    from dispatch.ops.matmul.trees import TreeForm

__all__ = ["MultistagePlan", "plan", "spec_of"]


def plan(request: MatmulRequest, executor: CudaExecutor, row: Row) -> Plan:
    """Bind a request to an executor: compile or load the kernel, prepare its parameters."""
    return MultistagePlan(request, executor, row)


def spec_of(form: TreeForm, arch: Arch, processors: int) -> MultistageSpec:
    """The spec of a request's kernel, with the small tile where large ones would leave multiprocessors idle."""
    output = form.unallocated().get("out")
    d = (output[0], output[1]) if output is not None else (form.shape, form.out.layout.strides)  # type: ignore[union-attr]
    size = form.d_dtype.bits // 8
    outputs = [alignment(*d, size, 256 if output is not None else form.out.layout.alignment)]  # type: ignore[union-attr]
    if form.c is not None:
        outputs.append(alignment(form.c.shape, form.c.layout.strides, size, form.c.layout.alignment))
    inputs = [alignment(t.shape, t.layout.strides, t.dtype.itemsize, t.layout.alignment) for t in (form.a, form.b)]
    if form.a.dtype is F64:  # its tiles are laid out for one element at a time
        inputs = [F64.itemsize, F64.itemsize]
    tiles = -(-form.m // 128) * -(-form.n // 128) * form.batches
    return MultistageSpec(
        arch=arch,
        a=form.a.dtype,
        b=form.b.dtype,
        d=form.d_dtype,
        orders=(order_of(form.a), order_of(form.b)),
        alignment=(inputs[0], inputs[1], min(outputs)),
        source=form.c is not None,
        small=tiles < processors,
    )


class MultistagePlan(MultistageKernelPlan):
    """The launch of one kernel for one set of layouts."""

    __slots__ = ()

    def __init__(self, request: MatmulRequest, executor: CudaExecutor, row: Row) -> None:
        super().__init__(request.form, executor, row)
        self._names = request.form.names

    @staticmethod
    def _kernel(request: TreeForm, arch: Arch, processors: int) -> tuple[Any, Source, dict[str, int], Dtype]:
        spec = spec_of(request, arch, processors)
        return spec, emit(spec), fixed_words(request, processors), spec.accumulator
