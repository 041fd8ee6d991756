"""The plan of a matmul request with `cublasLtMatmul`: descriptors, algorithm, one call for each outer batch index.

`plan` serves the table's rows of cuBLASLt. `lower.py` translates a request to a problem of cuBLASLt; here the problem
becomes descriptors. Follows https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from cudabind.sys import cublasLt as lt
from dispatch.core.request import Argument, Plan
from dispatch.errors import Refused
from dispatch.execute.algorithm_cache import Algorithm
from dispatch.execute.autotune import fastest
from dispatch.keys import F16, F32, Compute
from dispatch.libraries.cublaslt.descriptors import Desc, Descriptors, heuristic, reduced_demands
from dispatch.libraries.cublaslt.handle import handle_of
from dispatch.libraries.cublaslt.kernel_recording import fuses, kernels, must_fuse, must_not_accumulate
from dispatch.libraries.cublaslt.rounded_problem import suggested_algo
from dispatch.ops.matmul.arguments import ALPHA, AUX, BGRAD, BIAS, FIRST_FACTOR, OUT, A, B, C
from dispatch.ops.matmul.empty import EmptyPlan
from dispatch.ops.matmul.lower import NO_OFFSETS, Lowered, lower
from dispatch.ops.matmul.scales import scale_dtype
from dispatch.ops.matmul.vectors import vectors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype
    from dispatch.libraries.cublaslt.problem import Problem
    from dispatch.ops.matmul.request import MatmulRequest
    from dispatch.ops.matmul.vectors import Vector

__all__ = ["CublasLtPlan", "NotFused", "plan", "workspace_limit"]

CANDIDATES = 32  # algorithms that autotune asks the heuristic for
ALGO = 12  # index of the algorithm among the arguments of cublasLtMatmul
FUSED_CANDIDATES = 8  # algorithms searched for one that applies the epilogue before it rounds
PLACEHOLDER_ADDRESS = 1 << 32  # a placeholder address, for calls that are captured and never run
HINT = "reduced_precision=True allows an algorithm that rounds twice"

CTYPES: dict[str, Any] = {
    "f16": ctypes.c_uint16,  # its bits
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
    "i32": ctypes.c_int32,
    "c64": ctypes.c_float * 2,
    "c128": ctypes.c_double * 2,
}


def plan(request: MatmulRequest, executor: CudaExecutor, row: Row) -> Plan:
    """Bind a request to an executor: lower it, make descriptors, choose the algorithm; Refused with cuBLASLt's reason.

    Raises NotFused if exact.py may have a plan; `cublaslt_matmul` then tries it.
    """
    if 0 in request.shape:
        return EmptyPlan(request, executor, row)
    compute = row.compute or Compute.COMPUTE_32F
    lowered = lower(request, compute)
    if len(lowered.offsets) > 1 and {"amax_d", "amax_aux"}.intersection(lowered.problem.factors):
        calls = f"{len(lowered.offsets)} calls, each of which overwrites amax"
        raise Refused(f"batch axes that cannot be merged need {calls}: pass one batch axis, or omit amax")
    scale = scale_dtype(request.a.dtype, compute)
    limit = workspace_limit(request, executor)
    bound_plan = CublasLtPlan(executor, row, lowered, vectors_of(request, lowered), scale, limit)
    if request.autotune:
        bound_plan.tune(request)
    return bound_plan


def workspace_limit(request: MatmulRequest, executor: CudaExecutor) -> int:
    """The bytes of workspace that an algorithm may use."""
    return executor.workspace.nbytes if request.workspace is None else min(request.workspace, executor.workspace.nbytes)


@cache
def _untyped_matmul() -> Any:
    """`cublasLtMatmul` without argument types: prebuilt ctypes objects pass as they are, which saves a microsecond."""
    typed: Any = lt.cublasLtMatmul.unchecked
    function: Any = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.cast(typed, ctypes.c_void_p).value or 0)
    function.argtypes = None  # the prototype's empty list would refuse all arguments
    return function


class NotFused(Refused):
    """No algorithm applies the epilogue in the compute type, before it rounds to D's dtype."""


def c_argument_index(problem: Problem) -> int | None:
    """Index of the argument whose address the library gets as C: C where it is added; None where nothing reads it.

    A beta in device memory may be 0, but the library cannot know and refuses a null pointer for C. It gets D's address
    then, as D has the layout that C is described with; where their dtypes differ, it refuses one address for both.
    """
    if problem.adds_c:
        return C
    if not problem.device_scalars:
        return None
    return OUT if problem.c.dtype == problem.d.dtype else C


class CublasLtPlan(Plan):
    """One `cublasLtMatmul` with all arguments prepared but the addresses and the numbers."""

    __slots__ = (
        *("_alpha", "_beta", "_c_index", "_calls", "_descriptors", "_executor", "_fast_call", "_limit", "lowered"),
        *("_may_accumulate", "_numbers", "_numbers_hidden", "_pages", "_pointers", "_scalars", "_scale", "_vectors"),
    )
    _is_single_call: ClassVar[bool] = True  # False in a subclass that enqueues more than the library's call

    def __init__(
        self,
        executor: CudaExecutor,
        row: Row,
        lowered: Lowered,
        vectors: Sequence[Vector],
        scale: Dtype,
        limit: int,
        like: Descriptors | None = None,
    ) -> None:
        super().__init__(row, capture_safe=True)
        self._executor, self._limit, self._vectors = executor, limit, vectors
        self.lowered, problem = lowered, lowered.problem
        self._descriptors = self._make_descriptors(problem, like)
        self._pointers: tuple[Argument, ...] = ()
        self._scale = scale
        number = ctypes.c_void_p if problem.device_scalars else CTYPES[scale.name]
        self._alpha, self._beta = number(), number()
        self._numbers: tuple[Argument, ...] = ()
        self._pages: Any = None  # the executor's pages that the numbers are on; None where they are given by value
        self._scalars: tuple[Any, ...] = (self._alpha, self._beta)  # as the library gets them
        if not problem.device_scalars:
            self._scalars = tuple(ctypes.c_void_p(ctypes.addressof(x)) for x in self._scalars)
        self._may_accumulate = problem.adds_c and not problem.device_scalars and must_not_accumulate(problem)
        self._numbers_hidden: bool | None = False  # whether alpha and beta are on the device; None after an interrupt
        self._c_index = c_argument_index(problem)
        result = self._choose_algo()
        self._use_call(self._bind(result.algo, result.workspaceSize))

    def _use_call(self, calls: tuple[Callable[[], int], tuple[ctypes.c_void_p, ...]]) -> None:
        """Make this call the plan's, and set `_fast_call` if only the addresses of A, B and D change from call to call.

        In a call that is not launched as a graph yet each 0.1 us shows: with the library's own time it should cost what
        torch's call does.
        """
        self._calls, self._fast_call = calls, None
        lowered = self.lowered
        more = self._vectors or self._may_accumulate or lowered.empty_k or lowered.problem.device_scalars
        more = more or not self._is_single_call or self._c_index is not None
        if more or [*map(id, lowered.offsets)] != [id(NO_OFFSETS)]:
            return
        call, (a, b, c, d) = calls
        c.value = None
        self._fast_call = call, ((b, a, d) if lowered.exchanged else (a, b, d))

    def _make_descriptors(self, problem: Problem, like: Descriptors | None = None) -> Descriptors:
        """The descriptors of a problem, as the heuristic needs them; see Descriptors for `like`."""
        descriptors = Descriptors(problem, like)
        if self._vectors:
            # The heuristic looks at which pointers are set and at the alignment of bias and aux, not at addresses.
            alignments = {BIAS: problem.bias_alignment, BGRAD: problem.bias_alignment, AUX: problem.aux_alignment}
            for attribute, index, _ in self._vectors:
                descriptors.point(attribute, alignments.get(index, 256))
        return descriptors

    def _choose_algo(self) -> lt.cublasLtMatmulHeuristicResult_t:
        """The heuristic's first algorithm; where D must not be rounded early, the first that does not do so.

        The algorithm that the heuristic has for rounded extents is tried first, if the library accepts it for these.
        """
        handle, problem = handle_of(self._executor), self.lowered.problem
        suggestion = suggested_algo(self._executor, problem, self._limit, self._suggest_algo)
        first = None if suggestion is None else self._check_algo(suggestion)
        is_heuristic_first = first is None  # whether `first` is the heuristic's own first for this problem
        if first is None:
            (first,) = heuristic(handle, self._descriptors, problem, self._limit)
        if not must_fuse(problem) or self._fuses(first):
            return first
        for result in heuristic(handle, self._descriptors, problem, self._limit, FUSED_CANDIDATES)[is_heuristic_first:]:
            if self._fuses(result):
                return result
        raise NotFused(
            f"every algorithm of cublasLtMatmulAlgoGetHeuristic rounds to D's dtype before this epilogue; {HINT}"
        )

    def _suggest_algo(self, problem: Problem) -> lt.cublasLtMatmulAlgo_t | None:
        """The heuristic's first algorithm for a problem like this one; None where it has none."""
        try:
            (first,) = heuristic(handle_of(self._executor), self._make_descriptors(problem), problem, self._limit)
        except Refused:
            return None
        return first.algo

    def _fuses(self, result: lt.cublasLtMatmulHeuristicResult_t) -> bool:
        """Whether an algorithm applies the epilogue before it rounds to D's dtype, by the kernels that it launches."""
        call, (a, b, c, d) = self._bind(result.algo, result.workspaceSize)
        a.value = b.value = d.value = PLACEHOLDER_ADDRESS
        on_device, adds_c = self.lowered.problem.device_scalars, self.lowered.problem.adds_c
        c.value = 2 * PLACEHOLDER_ADDRESS if adds_c else None
        self._alpha.value, self._beta.value = (PLACEHOLDER_ADDRESS,) * 2 if on_device else (1, int(adds_c))
        self._numbers = ()
        return fuses(kernels(self._executor, call))

    def resized(self, problem: Problem) -> CublasLtPlan:
        """The plan of a problem that differs from this one's only in extents, strides and alignments."""
        # Plans share the operation's descriptor only if no later call sets anything in it.
        is_fixed = not self._vectors and not problem.adds_c
        return CublasLtPlan(*self.resized_arguments(problem), self._descriptors if is_fixed else None)

    def resized_arguments(self, problem: Problem) -> tuple[CudaExecutor, Row, Lowered, Sequence[Vector], Dtype, int]:
        """The arguments of the constructor for such a problem."""
        lowered = Lowered(problem, *self.lowered[1:])
        return self._executor, self.row, lowered, self._vectors, self._scale, self._limit

    def _bind(
        self, algo: lt.cublasLtMatmulAlgo_t, workspace_bytes: int
    ) -> tuple[Callable[[], int], tuple[ctypes.c_void_p, ...]]:
        """The call with prebuilt arguments, and the arguments that change: cuBLASLt's A, B, C and D."""
        executor, layouts = self._executor, self._descriptors.layouts
        a, b, c, d = (ctypes.c_void_p() for _ in range(4))
        alpha, beta = self._scalars
        call = partial(
            _untyped_matmul(),
            *(handle_of(executor), self._descriptors.matmul, alpha),
            *(a, layouts["a"], b, layouts["b"], beta, c, layouts["c"], d, layouts["d"]),
            *(ctypes.byref(algo), executor.workspace.c_ptr, ctypes.c_size_t(workspace_bytes), executor.target),
        )
        return call, (a, b, c, d)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        numbers = arguments[ALPHA:FIRST_FACTOR]
        if self._fast_call is not None and numbers == self._numbers:
            call, (a, b, d) = self._fast_call
            a.value, b.value, d.value = arguments[A], arguments[B], arguments[OUT]  # type: ignore[assignment]  # ints
            if status := call():
                self._raise_error(status)
            return
        if numbers != self._numbers or (self._pages is not None and self._pages is not self._executor._pages):
            self._numbers = ()  # invalid until both are set: setting the second may raise
            if type(self._alpha) is ctypes.c_void_p:
                self._pages = self._executor._pages
            for scalar, number in zip((self._alpha, self._beta), numbers, strict=True):
                self._set_number(scalar, number)
            self._numbers = numbers
        operands: Any = arguments[:ALPHA]  # addresses are ints
        if self.lowered.empty_k:
            zeros = self._executor.zeros(self._zero_bytes())
            operands = (zeros, zeros, *operands[C:])
        for offsets in self.lowered.offsets:
            if self._vectors:
                self._set_pointers(arguments, offsets)
            if offsets is NO_OFFSETS:
                self._call(operands)
            else:
                self._call([address and address + step for address, step in zip(operands, offsets, strict=True)])

    def _call(self, operands: Sequence[int]) -> None:
        """Call the library for the operands at these addresses."""
        if self._may_accumulate:
            self._hide_numbers(operands[C] == operands[OUT])
        call, (a, b, c, d) = self._calls
        if self.lowered.exchanged:
            a.value, b.value = operands[B], operands[A]
        else:
            a.value, b.value = operands[A], operands[B]
        d.value = operands[OUT]
        c.value = None
        if self._c_index is not None:  # zeros where there is no C and its dtype differs from D's
            c.value = operands[self._c_index] or self._executor.zeros(self._zero_bytes())
        if status := call():
            self._raise_error(status)

    def _raise_error(self, status: int) -> NoReturn:
        self._executor.stream.done()  # raises DeviceFault if the device is lost
        raise lt.cublasLtMatmul.error(status)

    def _hide_numbers(self, in_place: bool) -> None:
        """Pass alpha and beta in device memory where C is D and beta is 1, so that cuBLASLt cannot see the 1.

        Where it sees a beta of 1, cuBLASLt may round the product to D's dtype and then add it to D in memory (its
        kernels `badd`): 8 times the error where the sum cancels much of D.
        """
        hidden = in_place and self._numbers[1] == 1 and self._takes_device_scalars()
        was, self._numbers_hidden = self._numbers_hidden, None  # unknown until all is set: interrupts may come
        if hidden:
            for place, number in zip(self._scalars, self._numbers, strict=True):
                place.value = self._executor.scalar(float(number.real), self._scale)
        if hidden == was:
            self._numbers_hidden = hidden
            return
        mode = lt.cublasLtPointerMode_t
        kind = mode.CUBLASLT_POINTER_MODE_DEVICE if hidden else mode.CUBLASLT_POINTER_MODE_HOST
        self._descriptors.set(Desc.CUBLASLT_MATMUL_DESC_POINTER_MODE, ctypes.c_int32(kind))
        if not hidden:
            for place, scalar in zip(self._scalars, (self._alpha, self._beta), strict=True):
                place.value = ctypes.addressof(scalar)
        self._numbers_hidden = hidden

    def _takes_device_scalars(self) -> bool:
        """Whether the algorithm can read alpha and beta on the device; those that cannot are old, and add in f32."""
        mask, size = ctypes.c_uint32(), ctypes.c_size_t()
        algo: Any = self._calls[0].args[ALGO]._obj  # type: ignore[attr-defined]  # of the partial that `_bind` made
        cap = lt.cublasLtMatmulAlgoCapAttributes_t.CUBLASLT_ALGO_CAP_POINTER_MODE_MASK
        status = lt.cublasLtMatmulAlgoCapGetAttribute.unchecked(algo, cap, ctypes.byref(mask), 4, ctypes.byref(size))
        device = lt.cublasLtPointerModeMask_t.CUBLASLT_POINTER_MODE_MASK_DEVICE
        return status == 0 and bool(mask.value & device)

    def _set_number(self, scalar: Any, value: Argument) -> None:
        """Set alpha or beta: an address on the device, a real number, or a complex one."""
        if type(scalar) is ctypes.c_void_p:
            scalar.value = value if type(value) is int else self._executor.scalar(value, self._scale)
        elif isinstance(scalar, ctypes.Array):
            scalar[0], scalar[1] = value.real, value.imag
        elif type(scalar) is ctypes.c_int32:
            scalar.value = int(value.real)
        elif type(scalar) is ctypes.c_uint16:
            scalar.value = int(F16.numpy.type(value.real).view("u2"))
        else:
            scalar.value = value

    def _set_pointers(self, arguments: tuple[Argument, ...], offsets: tuple[int, ...]) -> None:
        """Set the pointers that the operation's descriptor holds, unless they are set already."""
        wanted = tuple(
            self._address(arguments[index], offsets[index] if index < OUT else 0, is_number)
            for _, index, is_number in self._vectors
        )
        if wanted != self._pointers:
            self._pointers = ()  # unknown until all are set: an interrupt may come in between
            for (attribute, _, _), address in zip(self._vectors, wanted, strict=True):
                self._descriptors.point(attribute, address)
            self._pointers = wanted

    def _address(self, argument: Argument, offset: int, is_number: bool) -> int:
        if is_number:
            return self._executor.scalar(float(argument.real), F32)
        return int(argument.real) + offset

    def _zero_bytes(self) -> int:
        """The size of the zeros that replace A and B where k is 0, or C, whose lines are dense then."""
        problem = self.lowered.problem
        elements = max(m.rows * m.cols * problem.batch for m in (problem.a, problem.b, problem.c))
        return elements * 16  # the widest element

    def tune(self, request: MatmulRequest) -> None:
        """Use the fastest of the heuristic's candidates, from the cache on disk or by timing them now."""
        problem, executor, limit = self.lowered.problem, self._executor, self._limit
        # A smaller workspace is part of the name: which algorithm is fastest depends on it.
        name = problem.as_key() + ("" if limit == executor.workspace.nbytes else f" in {limit} bytes")
        cached = executor.algorithms("cublasLt").get("matmul", name)
        if cached is not None and self._use_cached(cached):
            return
        executor.refuse_capture("a request with autotune=True")
        results = heuristic(handle_of(executor), self._descriptors, problem, limit, CANDIDATES)
        by_algo = {bytes(result.algo): result for result in results}
        for terms, workspace in reduced_demands(problem, limit):
            with suppress(Refused):  # no algorithm needs so little; the other candidates remain
                for result in heuristic(handle_of(executor), self._descriptors, terms, workspace, CANDIDATES // 4):
                    by_algo.setdefault(bytes(result.algo), result)
        results = list(by_algo.values())
        if must_fuse(problem):
            results = [self._choose_algo(), *(result for result in results[1:] if self._fuses(result))]
        calls = [self._bind(result.algo, result.workspaceSize) for result in results]

        def run(number: int, arguments: tuple[Argument, ...]) -> None:
            self._use_call(calls[number])
            self.enqueue(arguments)

        best = fastest(executor, request, run, len(calls))
        self._use_call(calls[best])
        winner = Algorithm(bytes(results[best].algo), results[best].workspaceSize)
        executor.algorithms("cublasLt").put("matmul", name, winner)

    def _use_cached(self, known: Algorithm) -> bool:
        """Use an algorithm from the cache on disk, if the library accepts it for this problem."""
        if len(known.blob) != ctypes.sizeof(lt.cublasLtMatmulAlgo_t) or known.workspace > self._limit:
            return False
        result = self._check_algo(lt.cublasLtMatmulAlgo_t.from_buffer_copy(known.blob))
        if result is None or result.workspaceSize > known.workspace:
            return False
        if must_fuse(self.lowered.problem) and not self._fuses(result):
            return False
        self._use_call(self._bind(result.algo, known.workspace))
        return True

    def _check_algo(self, algo: lt.cublasLtMatmulAlgo_t) -> lt.cublasLtMatmulHeuristicResult_t | None:
        """An algorithm with the workspace that it needs for this problem; None where the library does not accept it."""
        result = lt.cublasLtMatmulHeuristicResult_t()
        a, b, c, d = (self._descriptors.layouts[name] for name in "abcd")
        check = lt.cublasLtMatmulAlgoCheck.unchecked
        if check(handle_of(self._executor), self._descriptors.matmul, a, b, c, d, algo, result) or result.state:
            return None
        result.algo = algo
        return result if result.workspaceSize <= self._limit else None
