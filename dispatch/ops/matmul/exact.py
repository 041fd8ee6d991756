"""Epilogues that cuBLASLt computes imprecisely: its product in the compute type, then kernels of our own.

Two kinds of requests take this path, unless they ask for reduced precision. First, GELU in f64, which has rows of its
own, because cuBLASLt's GELU is far less precise than f64; the kernels work in D's own memory. Second, products with a
16-bit D that every offered algorithm would round before bias, GELU or its gradient (see kernel_recording.py); the
kernels read f32 from scratch memory. Everything runs on the executor's stream and can be captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.errors import Refused
from dispatch.execute.shared_memory import shared
from dispatch.keys import F32, F64, HALF, Compute, Dtype, Epilogue
from dispatch.libraries.cublaslt.problem import Matrix as Place
from dispatch.libraries.cublaslt.problem import Problem
from dispatch.libraries.nvrtc.launching import check
from dispatch.ops.matmul.arguments import ALPHA, AUX, BETA, BGRAD, BIAS, FIRST_FACTOR, OUT, C
from dispatch.ops.matmul.cublaslt import HINT, CublasLtPlan, workspace_limit
from dispatch.ops.matmul.empty import EmptyPlan
from dispatch.ops.matmul.exact_kernels import Functions, Launch, Matrix, Work, functions
from dispatch.ops.matmul.lower import Lowered, lower
from dispatch.ops.matmul.scales import scale_dtype
from dispatch.ops.matmul.vectors import vectors_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.core.request import Argument, Plan
    from dispatch.core.row import Row
    from dispatch.device.storage import Storage
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.matmul.request import MatmulRequest

__all__ = ["ExactPlan", "launches", "plan", "plan_unfused", "product_of", "work_of"]

ACTIVATIONS = {"": 0, "relu": 1, "gelu": 2}


def plan(request: MatmulRequest, executor: CudaExecutor, row: Row) -> Plan:
    """Bind an f64 request with GELU; Refused if NVRTC is missing, or does not support the GPU."""
    if 0 in request.shape:
        return EmptyPlan(request, executor, row)
    lowered = lower(request, row.compute or Compute.COMPUTE_64F)
    return _tuned(request, _plan(request, executor, row, lowered))


def _tuned(request: MatmulRequest, made: ExactPlan) -> ExactPlan:
    if request.autotune:
        made.tune(request)
    return made


def plan_unfused(request: MatmulRequest, executor: CudaExecutor, row: Row, refusal: Refused) -> ExactPlan:
    """Bind a request with a 16-bit D whose epilogue no algorithm fuses; raises `refusal` where we have no kernel."""
    lowered = lower(request, row.compute or Compute.COMPUTE_32F)
    problem = lowered.problem
    stored = {
        dtype for dtype in (problem.d.dtype, problem.c.dtype, problem.bias_dtype, problem.aux_dtype) if dtype >= 0
    }
    if stored - {request.d_dtype.cuda} or request.d_dtype not in HALF or problem.factors:
        raise refusal
    return _tuned(request, _plan(request, executor, row, lowered))


def _plan(request: MatmulRequest, executor: CudaExecutor, row: Row, lowered: Lowered) -> ExactPlan:
    try:
        kernels = functions(executor, request.d_dtype)
    except Refused as refusal:
        raise Refused(f"{refusal}; {HINT}") from refusal
    product = Lowered(product_of(lowered.problem, request.plain_epilogue), *lowered[1:])
    scale = scale_dtype(request.a.dtype, row.compute)
    bound_plan = ExactPlan(
        executor, row, product, vectors_of(request, product), scale, workspace_limit(request, executor)
    )
    bound_plan.follow(request.plain_epilogue, lowered.problem, request.d_dtype, kernels)
    return bound_plan


def product_of(problem: Problem, epilogue: Epilogue) -> Problem:
    """The part of a problem that cuBLASLt does: in f64 all but the activation, else the product only, dense, in f32."""
    fields: dict[str, Any] = {"epilogue": int(Epilogue.NONE), "aux_dtype": -1, "aux_ld": 0, "aux_stride": 0}
    if problem.d.dtype == F64.cuda and epilogue.adds_bias:
        return problem._replace(**fields | {"epilogue": int(Epilogue.BIAS)})
    fields |= {"bias_dtype": -1, "bias_stride": 0}
    if problem.d.dtype != F64.cuda:
        d = problem.d
        dense = Place(F32.cuda, d.rows, d.cols, d.rows, d.rows * d.cols if problem.batch > 1 else 0)
        fields |= {"c": dense, "d": dense, "adds_c": False}
    return problem._replace(**fields)


class ExactPlan(CublasLtPlan):
    """One `cublasLtMatmul`, followed by the kernels that compute D from its product."""

    __slots__ = ("_dtype", "_epilogue", "_functions", "_launches", "_scratch", "_work")
    _is_single_call = False

    def follow(self, epilogue: Epilogue, whole: Problem, dtype: Dtype, found: Functions) -> None:
        """Run the kernels of this epilogue after each product; `whole` is the full problem: D, C, aux and bgrad."""
        self._epilogue, self._dtype, self._functions = epilogue, dtype, found
        self._scratch: Storage | None = None
        self._work = work_of(epilogue, whole, self.lowered.problem)
        self._launches = launches(epilogue, self._work, found, self._executor)
        if dtype is not F64:
            self._scratch = shared(self._executor, whole.batch * whole.d.rows * whole.d.cols * F32.itemsize, "product")

    def resized(self, problem: Problem) -> ExactPlan:
        if self._scratch is not None:
            raise Refused("for other extents the library may have such an algorithm")
        bound_plan = ExactPlan(*self.resized_arguments(problem))
        bound_plan.follow(self._epilogue, problem, self._dtype, self._functions)
        return bound_plan

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        if self._scratch is None:
            super().enqueue(arguments)
            return
        beta = arguments[BETA]
        if type(beta) is int:
            self._work.beta_at = beta
        else:
            self._work.set_beta(float(beta.real), F32)
        super().enqueue((*arguments[: ALPHA + 1], 0.0, *arguments[FIRST_FACTOR:]))

    def _call(self, operands: Sequence[int]) -> None:
        work, addresses = self._work, list(operands)
        work.d.at = operands[OUT]
        if self._scratch is not None:
            if self._scratch.owner is not self._executor.stream:
                # The scratch memory was allocated on another stream, while the caller captured the executor's; the
                # executor's stream has waited for it since.
                self._scratch.owner = self._scratch.writer = self._executor.stream
            work.c.at, work.bias.at = operands[C] or None, operands[BIAS] or None
            addresses[OUT] = self._scratch.base
        work.product.at = addresses[OUT]
        work.aux.at, work.sums.at = operands[AUX] or None, operands[BGRAD] or None
        super()._call(addresses)
        for launch in self._launches:
            check(self._executor, launch())


def work_of(epilogue: Epilogue, whole: Problem, product: Problem) -> Work:
    """The kernels' parameter for the full problem and cuBLASLt's part of it; the addresses are set in each run."""
    return Work(
        product=Matrix(0, product.d.ld, product.d.batch_stride),
        d=Matrix(0, whole.d.ld, whole.d.batch_stride),
        c=Matrix(0, whole.c.ld, whole.c.batch_stride),
        aux=Matrix(0, whole.aux_ld, whole.aux_stride),
        bias=Matrix(0, 0, whole.bias_stride),
        sums=Matrix(0, 0, whole.bias_stride),
        rows=whole.d.rows,
        columns=whole.d.cols,
        batch=whole.batch,
        activation=ACTIVATIONS[epilogue.activation],
    )


def launches(epilogue: Epilogue, work: Work, found: Functions, executor: CudaExecutor) -> list[Launch]:
    """The kernels of an epilogue, in the order in which they run."""
    names = ["backward" if epilogue.is_gradient else "forward"]
    if epilogue.writes_aux and epilogue.activation == "relu":
        names.insert(0, "mask")
    if epilogue.writes_bgrad:
        names.append("sum_columns")
    return [Launch(found[name], name, work, executor) for name in names]
