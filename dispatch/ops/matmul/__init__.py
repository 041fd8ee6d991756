"""Matrix products: D = epilogue(alpha · scale_a · scale_b · A · B + beta · C + bias).

`matmul` is the request function, `MatmulRequest` the request. `cublaslt_matmul`, `exact_gelu_matmul`, `cutlass_matmul`,
`blackwell_matmul`, `multistage_matmul`, `cublas_matmul` and, on the host, `numpy_matmul` and `numpy_tree_matmul` carry
it out. The files: request and validate (what may be asked), trees (as a tree), shortcut (calls seen before), scales,
rules and cutlass_rules (for the table); lower (in cuBLASLt's terms), cublaslt, exact and exact_kernels (what it would
do too roughly); cutlass, sm80, sm100 and tune; cublas, cublas_pointers and cublas_gemm; host; reference (what is
right), cases, tree_cases, bounds and mutations (what is tested).
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from dispatch.core.framework_calls import Ways, learn
from dispatch.core.remembered import UNFIT, fields_of
from dispatch.core.remembered_operands import OperandCalls
from dispatch.core.request import run
from dispatch.core.request_function import request_function
from dispatch.device.stream import current
from dispatch.device.tensor import Tensor
from dispatch.keys import Choice, Compute, Epilogue
from dispatch.ops.matmul.request import NO_SCALES, Scales, aux_shape
from dispatch.ops.matmul.shortcut import recognize, remember
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
NO_OPERANDS: tuple[()] = ()  # the default, by identity; another empty tuple goes the longer way
FIELDS = fields_of(MatmulRequest)
WAYS = Ways(MatmulRequest, "a")
KEYWORDS = tuple(field.name for field in fields(MatmulRequest) if field.kw_only)


def cublaslt_matmul(request: MatmulRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that ends in `cublasLtMatmul`; Refused with the library's reason where it finds no algorithm."""
    from dispatch.ops.matmul import cublaslt  # at first use: importing `dispatch` binds no library

    try:
        return cublaslt.plan(request, executor, row)
    except cublaslt.NotFused as refusal:
        from dispatch.ops.matmul import exact  # few products need its kernels

        return exact.behind(request, executor, row, refusal)


def exact_gelu_matmul(request: MatmulRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that ends in `cublasLtMatmul` and a kernel for GELU; Refused with NVRTC's reason where there is none."""
    from dispatch.ops.matmul import exact

    return exact.plan(request, executor, row)


def cutlass_matmul(request: MatmulRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that ends in a CUTLASS kernel, which is compiled where it is in no cache."""
    from dispatch.libraries.cutlass.compile import plan_of  # at first use: importing `dispatch` looks for no headers
    from dispatch.ops.matmul import cutlass, tune

    tuned = request.autotune and request.config is None
    return plan_of(tune.plan if tuned else cutlass.plan, request, executor, row)


def blackwell_matmul(request: MatmulRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that ends in a CUTLASS kernel for sm_100a or sm_120a."""
    from dispatch.libraries.cutlass.compile import plan_of
    from dispatch.ops.matmul import sm100

    return plan_of(sm100.plan, request, executor, row)


def multistage_matmul(request: MatmulRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that ends in a multistage kernel of CUTLASS, which every GPU since sm_80 runs."""
    from dispatch.libraries.cutlass.compile import plan_of
    from dispatch.ops.matmul import sm80

    return plan_of(sm80.plan, request, executor, row)


def cublas_matmul(request: MatmulRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that ends in `cublasGemmEx` or a batched form of it; Refused where cuBLAS has no kernel."""
    from dispatch.ops.matmul import cublas_gemm

    return cublas_gemm.plan(request, executor, row)


def numpy_tree_matmul(_request: MatmulRequest, _executor: Executor, row: Row) -> Plan:
    """A plan that computes with NumPy what CUTLASS's kernels do."""
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
    """The way around a request for calls whose pattern was seen; its parameters are the request's, as a test holds."""
    if unknown or more:
        refuse_arguments("matmul", MatmulRequest, more, unknown)
    if type(a) is not Tensor:
        way = WAYS.get(type(a))
        if way is not None:
            result = way(
                a, b, c, bias, aux, bgrad, out, epilogue, alpha, beta, compute, out_dtype, scales, fast_accum,
                workspace, autotune, reduced_precision, operands, config, library,
            )  # fmt: skip
            if result is not UNFIT:
                return result
        by = _by_name if _is_plain(epilogue, operands, config, library) else _unpacked
        return by(
            a, b, c, bias, aux, bgrad, out, epilogue, alpha, beta, compute, out_dtype, scales, fast_accum,
            workspace, autotune, reduced_precision, operands, config, library,
        )  # fmt: skip
    if epilogue.__class__ is not Epilogue or operands is not NO_OPERANDS or config is not None or library is not None:
        by = _unpacked if epilogue.__class__ is not str else _by_name
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
    except (AttributeError, TypeError, ValueError):  # an operand is no tensor: the request says which
        shortcut = key = None
    if (
        shortcut is None
        or not shortcut.takes(alpha, beta)
        # In a key, 1 is True: a request tells them apart.
        or (fast_accum is not False and fast_accum is not True)  # type: ignore[redundant-expr]
        or (autotune is not False and autotune is not True)  # type: ignore[redundant-expr]
        or (reduced_precision is not False and reduced_precision is not True)  # type: ignore[redundant-expr]
        or (compute is not None and compute.__class__ is not Compute)
        or (workspace is not None and workspace.__class__ is not int)
    ):
        return _by_request(
            key, a, b, c, bias, aux, bgrad, out, epilogue, alpha, beta, compute, out_dtype, scales, fast_accum,
            workspace, autotune, reduced_precision, operands, config, library,
        )  # fmt: skip
    result = shortcut.run(executor, a, b, c, bias, aux, bgrad, out, alpha, beta)
    if result is UNFIT:
        return _by_request(
            None, a, b, c, bias, aux, bgrad, out, epilogue, alpha, beta, compute, out_dtype, scales, fast_accum,
            workspace, autotune, reduced_precision, operands, config, library,
        )  # fmt: skip
    return result


def _is_plain(epilogue: Any, operands: Any, config: Any, library: Any) -> bool:
    """Whether a call has nothing that the way of operands that are fields does not know."""
    is_named = epilogue.__class__ is Epilogue or epilogue.__class__ is str
    return is_named and operands is NO_OPERANDS and config is None and library is None


def _by_name(*given: Any) -> Any:
    """Run what is not remembered of this class alone, or with an Epilogue that was given by its name."""
    return _by_request(None, *given)


_unpacked = OperandCalls(MatmulRequest)  # calls with trees, for a library by its name, and with alpha on the device


def _by_request(key: Any, a: Tensor, b: Tensor, *given: Any) -> Any:
    """Run by way of a request, which validates it; remember its plan for the next call of the same key."""
    named = dict(zip(KEYWORDS, given, strict=True))
    if type(a) in (type(named["alpha"]), type(named["beta"])):  # tensors of the device
        return _unpacked(a, b, *given)
    if members := _members(named):
        return _matmul(a, b, **named | members)
    request = MatmulRequest(a, b, **named)
    result = run(request)
    if request.framework is not None:
        values = {"a": a, "b": b, **named}
        learn(WAYS, request, *(tuple(values[name] for name in names) for names in FIELDS))
    # A key has neither trees nor operands, and says nothing of libraries.
    keyed = request.epilogue is named["epilogue"] and not request.treed and request.library is None
    if key is not None and keyed and request.framework is None and not request.device.is_host:
        remember(request.device.executor(), key, request)
    return result


def _members(named: dict[str, Any]) -> dict[str, Any]:
    """The members of those fields for which a member's name was given: of them there may be a call that was seen."""
    kinds: tuple[tuple[str, type[Choice]], ...] = (("epilogue", Epilogue), ("compute", Compute))
    given = {name: kind.named(named[name]) for name, kind in kinds if named[name].__class__ is str}
    return {name: found for name, found in given.items() if found is not None}


if not TYPE_CHECKING:  # they have it from results.py
    matmul = request_function(MatmulRequest, "matmul", _matmul)
