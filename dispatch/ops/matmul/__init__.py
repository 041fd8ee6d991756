"""Matrix products: D = epilogue(alpha · scale_a · scale_b · A · B + beta · C + bias).

`matmul` is the request function, `MatmulRequest` the request. The functions below that end in `_matmul` make its plans;
the table's rows name them. The files:

    request, validate, scales     the request, its checks, scale factors
    trees                         a request as an epilogue tree for CUTLASS
    shortcut                      the fast path of repeated calls
    rules, cutlass_rules          what the table's rows ask of a request
    lower, cublaslt, vectors      the request as a problem of cuBLASLt, and its plan
        exact, exact_kernels          our own epilogues after cuBLASLt, where its own would be too imprecise
    cutlass, sm80, sm100, tune    plans with CUTLASS kernels, and autotune among them
    cublas, cublas_pointers, cublas_gemm    plans with cuBLAS
    empty, host, reference        products without elements; the plan on the host; the formulas in NumPy
    cases, tree_cases, bounds, mutations    what the tests of all rows use
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from dispatch.core.call_cache import CACHE_MISS, fields_of
from dispatch.core.framework_call_cache import FrameworkCallCache, learn
from dispatch.core.list_call_cache import ListCallCache
from dispatch.core.request import run
from dispatch.core.request_function import request_function
from dispatch.device.stream import current
from dispatch.device.tensor import Tensor
from dispatch.keys import Choice, Compute, Epilogue
from dispatch.ops.matmul.request import NO_SCALES, Scales, aux_shape
from dispatch.ops.matmul.shortcut import cache_shortcut, recognize
from dispatch.unknown_arguments import refuse_arguments

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.execute.executor import Executor
    from dispatch.libraries.cutlass.config import Config
    from dispatch.libraries.cutlass.evt import Node
    from dispatch.ops.matmul.results import MatmulRequest, matmul
else:
    from dispatch.ops.matmul.request import MatmulRequest

__all__ = [
    "MatmulRequest",
    "Scales",
    "aux_shape",
    "matmul",
]

Number = int | float | complex
NO_OPERANDS: tuple[()] = ()  # the default, compared by identity; another empty tuple takes the slower path
FIELDS = fields_of(MatmulRequest)
FRAMEWORK_CALLS = FrameworkCallCache(MatmulRequest, "a")
KEYWORDS = tuple(field.name for field in fields(MatmulRequest) if field.kw_only)


def cublaslt_matmul(request: MatmulRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that calls `cublasLtMatmul`; raises Refused with the library's reason where it has no algorithm."""
    from dispatch.ops.matmul import cublaslt  # at first use: importing `dispatch` binds no library

    try:
        return cublaslt.plan(request, executor, row)
    except cublaslt.NotFused as refusal:
        from dispatch.ops.matmul import exact  # imported here: few products need its kernels

        return exact.plan_unfused(request, executor, row, refusal)


def exact_gelu_matmul(request: MatmulRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that calls `cublasLtMatmul` and a GELU kernel of our own; raises Refused where NVRTC cannot compile it."""
    from dispatch.ops.matmul import exact

    return exact.plan(request, executor, row)


def cutlass_matmul(request: MatmulRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that launches a CUTLASS kernel, which is compiled unless it is cached."""
    from dispatch.libraries.cutlass.compile import plan_of  # at first use: importing `dispatch` looks for no headers
    from dispatch.ops.matmul import cutlass, tune

    tuned = request.autotune and request.config is None
    return plan_of(tune.plan if tuned else cutlass.plan, request, executor, row)


def blackwell_matmul(request: MatmulRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that launches a CUTLASS kernel for sm_100a or sm_120a."""
    from dispatch.libraries.cutlass.compile import plan_of
    from dispatch.ops.matmul import sm100

    return plan_of(sm100.plan, request, executor, row)


def multistage_matmul(request: MatmulRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that launches a multistage CUTLASS kernel, which every GPU from sm_80 on runs."""
    from dispatch.libraries.cutlass.compile import plan_of
    from dispatch.ops.matmul import sm80

    return plan_of(sm80.plan, request, executor, row)


def cublas_matmul(request: MatmulRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that calls `cublasGemmEx` or a batched form of it; raises Refused where cuBLAS has no kernel."""
    from dispatch.ops.matmul import cublas_gemm

    return cublas_gemm.plan(request, executor, row)


def numpy_tree_matmul(_request: MatmulRequest, _executor: Executor, row: Row) -> Plan:
    """A plan that computes an epilogue tree with NumPy."""
    from dispatch.ops.matmul.host import NumpyTreePlan

    return NumpyTreePlan(row, capture_safe=False)


def numpy_matmul(request: MatmulRequest, executor: Executor, row: Row) -> Plan:
    """A plan that computes with NumPy in the row's compute type."""
    from dispatch.ops.matmul import host

    return host.plan(request, executor, row)


# fmt: off
def _matmul(
    a: Tensor, b: Tensor, *more: Any, c: Tensor | None = None, bias: Tensor | None = None, aux: Tensor | None = None,
    bgrad: Tensor | None = None, out: Tensor | None = None, epilogue: Epilogue | str | Node = Epilogue.NONE,
    alpha: Number | Tensor = 1.0, beta: Number | Tensor | None = None, compute: Compute | str | None = None,
    out_dtype: Any = None, scales: Scales = NO_SCALES, fast_accum: bool = False, workspace: int | None = None,
    autotune: bool = False, reduced_precision: bool = False, operands: Any = NO_OPERANDS, config: Config | None = None,
    library: str | None = None, **unknown: Any,
) -> Any:
    # fmt: on
    """`matmul`: runs a call that was seen before without making a request, and all other calls by a request.

    A test keeps its parameters equal to the fields of MatmulRequest.
    """
    if unknown or more:
        refuse_arguments("matmul", MatmulRequest, more, unknown)
    if type(a) is not Tensor:
        lookup = FRAMEWORK_CALLS.get(type(a))
        if lookup is not None:
            result = lookup(
                a, b, c, bias, aux, bgrad, out, epilogue, alpha, beta, compute, out_dtype, scales, fast_accum,
                workspace, autotune, reduced_precision, operands, config, library,
            )  # fmt: skip
            if result is not CACHE_MISS:
                return result
        by = _run_by_name if _is_plain_call(epilogue, operands, config, library) else _list_call_cache
        return by(
            a, b, c, bias, aux, bgrad, out, epilogue, alpha, beta, compute, out_dtype, scales, fast_accum,
            workspace, autotune, reduced_precision, operands, config, library,
        )  # fmt: skip
    if epilogue.__class__ is not Epilogue or operands is not NO_OPERANDS or config is not None or library is not None:
        by = _list_call_cache if epilogue.__class__ is not str else _run_by_name
        return by(
            a, b, c, bias, aux, bgrad, out, epilogue, alpha, beta, compute, out_dtype, scales, fast_accum, workspace,
            autotune, reduced_precision, operands, config, library,
        )  # fmt: skip
    executor: Any = current.executor
    try:
        if executor is None or executor.device is not a.layout.device:
            executor = a.layout.device.executor()
        key = (
            a.layout,
            b.layout,
            None if c is None else c.layout,
            None if bias is None else bias.layout,
            None if aux is None else aux.layout,
            None if bgrad is None else bgrad.layout,
            None if out is None else out.layout,
            epilogue,
            beta if beta is None else beta != 0,
            compute, out_dtype, scales, fast_accum, workspace, autotune, reduced_precision,
        )  # fmt: skip
        shortcut = executor.shortcuts.get(key)
        if shortcut is None and executor.patterns:
            shortcut = recognize(executor, key)
    except (AttributeError, TypeError, ValueError):  # an operand is no tensor: the request's check says which
        shortcut = key = None
    if (
        shortcut is None
        or not shortcut.takes(alpha, beta)
        # As a part of a key 1 equals True, but a request refuses 1.
        or (fast_accum is not False and fast_accum is not True)  # type: ignore[redundant-expr]
        or (autotune is not False and autotune is not True)  # type: ignore[redundant-expr]
        or (reduced_precision is not False and reduced_precision is not True)  # type: ignore[redundant-expr]
        or (compute is not None and compute.__class__ is not Compute)
        or (workspace is not None and workspace.__class__ is not int)
    ):
        return _run_request(
            key, a, b, c, bias, aux, bgrad, out, epilogue, alpha, beta, compute, out_dtype, scales, fast_accum,
            workspace, autotune, reduced_precision, operands, config, library,
        )  # fmt: skip
    result = shortcut.run(executor, a, b, c, bias, aux, bgrad, out, alpha, beta)
    if result is CACHE_MISS:
        return _run_request(
            None, a, b, c, bias, aux, bgrad, out, epilogue, alpha, beta, compute, out_dtype, scales, fast_accum,
            workspace, autotune, reduced_precision, operands, config, library,
        )  # fmt: skip
    return result


def _is_plain_call(epilogue: Any, operands: Any, config: Any, library: Any) -> bool:
    """Whether a call has no epilogue tree, no `operands`, no `config` and no `library`."""
    is_named = epilogue.__class__ is Epilogue or epilogue.__class__ is str
    return is_named and operands is NO_OPERANDS and config is None and library is None


def _run_by_name(*given: Any) -> Any:
    """Run a call over other libraries' arrays that is not remembered, or one whose Epilogue was given by its name."""
    return _run_request(None, *given)


# Calls with a tree, with `library`, or with alpha or beta in device memory.
_list_call_cache = ListCallCache(MatmulRequest)


def _run_request(key: Any, a: Tensor, b: Tensor, *given: Any) -> Any:
    """Make a request, which validates the call, and run it; remember its plan for the next call with the same key."""
    named = dict(zip(KEYWORDS, given, strict=True))
    if type(a) in (type(named["alpha"]), type(named["beta"])):  # alpha or beta is a tensor
        return _list_call_cache(a, b, *given)
    if members := _members(named):
        return _matmul(a, b, **named | members)
    request = MatmulRequest(a, b, **named)
    result = run(request)
    if request.framework is not None:
        values = {"a": a, "b": b, **named}
        learn(FRAMEWORK_CALLS, request, *(tuple(values[name] for name in names) for names in FIELDS))
    # A key holds no tree, no operands of one, and no library.
    keyed = request.epilogue is named["epilogue"] and not request.has_tree and request.library is None
    if key is not None and keyed and request.framework is None and not request.device.is_host:
        cache_shortcut(request.device.executor(), key, request)
    return result


def _members(named: dict[str, Any]) -> dict[str, Any]:
    """The enum members of the fields that were given by name, so that the call can be looked up again with them."""
    kinds: tuple[tuple[str, type[Choice]], ...] = (("epilogue", Epilogue), ("compute", Compute))
    members = {name: kind.named(named[name]) for name, kind in kinds if named[name].__class__ is str}
    return {name: member for name, member in members.items() if member is not None}


if not TYPE_CHECKING:  # type checkers read it from results.py
    matmul = request_function(MatmulRequest, "matmul", _matmul)
