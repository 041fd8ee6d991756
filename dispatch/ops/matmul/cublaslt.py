"""A matmul request carried out by `cublasLtMatmul`: descriptors, algorithm, one call for each outer batch index.

The table's GPU rows end here, by `plan`. `lower.py` has already said everything in cuBLASLt's
terms; here the terms become descriptors. Follows https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from cudabind import driver
from cudabind.sys import cublasLt as lt
from dispatch.errors import Refused
from dispatch.keys import F32, Compute
from dispatch.ops.matmul.descriptors import Desc, Descriptors, heuristic
from dispatch.ops.matmul.lower import NO_OFFSETS, Lowered, Problem, lower
from dispatch.ops.matmul.scales import AMAX, FACTORS_AND_AMAX, scale_dtype
from dispatch.request import Argument, Plan
from dispatch.tensor import Tensor
from dispatch.tuning import Algorithm, fastest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dispatch.keys import Dtype
    from dispatch.lane import CudaLane
    from dispatch.ops.matmul.request import MatmulRequest
    from dispatch.row import Row

__all__ = ["CublasLtPlan", "EmptyPlan", "plan"]

CANDIDATES = 32  # that autotune asks the heuristic for
ALIGNED = 16  # bytes, which every kernel that loads vectors needs; some are offered only where there is no more

# Where the addresses and numbers stand in MatmulRequest.arguments().
A, B, C, BIAS, AUX, BGRAD, OUT, ALPHA, BETA, FIRST_FACTOR = range(10)
POINTERS = {
    "a": Desc.CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
    "b": Desc.CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
    "c": Desc.CUBLASLT_MATMUL_DESC_C_SCALE_POINTER,
    "d": Desc.CUBLASLT_MATMUL_DESC_D_SCALE_POINTER,
    "aux": Desc.CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_SCALE_POINTER,
    "amax_d": Desc.CUBLASLT_MATMUL_DESC_AMAX_D_POINTER,
    "amax_aux": Desc.CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_AMAX_POINTER,
}
# A pointer of the operation descriptor: its attribute, where its argument stands, and whether that is a number.
Vector = tuple[lt.cublasLtMatmulDescAttributes_t, int, bool]
CTYPES: dict[str, Any] = {
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
    "i32": ctypes.c_int32,
    "c64": ctypes.c_float * 2,
    "c128": ctypes.c_double * 2,
}


def plan(request: MatmulRequest, lane: CudaLane, row: Row) -> Plan:
    """Bind a request to a lane: lower it, describe it, choose the algorithm. Raises Refused with cuBLASLt's reason."""
    if 0 in request.shape:
        return EmptyPlan(request, lane, row)
    compute = row.compute or Compute.COMPUTE_32F
    lowered = lower(request, compute)
    limit = lane.workspace.nbytes if request.workspace is None else min(request.workspace, lane.workspace.nbytes)
    made = CublasLtPlan(lane, row, lowered, _vectors(request, lowered), scale_dtype(request.a.dtype, compute), limit)
    if request.autotune:
        made.tune(request)
    return made


@cache
def _bare_matmul() -> Any:
    """`cublasLtMatmul` without argument types: prebuilt ctypes objects pass as they are, which saves a microsecond."""
    typed: Any = lt.cublasLtMatmul.unchecked
    function: Any = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.cast(typed, ctypes.c_void_p).value or 0)
    function.argtypes = None  # the prototype's empty list would refuse all arguments
    return function


class EmptyPlan(Plan):
    """A product without elements: nothing is launched; a bias gradient over no rows and a largest of none are zero."""

    __slots__ = ("_target", "_zeroed")

    def __init__(self, request: MatmulRequest, lane: CudaLane, row: Row) -> None:
        super().__init__(row, capture_safe=False)
        self._target = lane.target
        self._zeroed = [
            (FIRST_FACTOR + index, 4)
            for index, name in enumerate(FACTORS_AND_AMAX)
            if name in AMAX and getattr(request.scales, name) is not None
        ]
        made = request.missing().get("bgrad")
        if request.bgrad is not None:
            self._zeroed.append((BGRAD, request.bgrad.nbytes))
        elif made is not None:
            self._zeroed.append((BGRAD, _extent(made[0]) * made[2].itemsize))

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        for index, nbytes in self._zeroed:
            if nbytes:
                driver.cuMemsetD8Async(int(arguments[index].real), 0, nbytes, self._target.value)


def _extent(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


class CublasLtPlan(Plan):
    """One `cublasLtMatmul` with everything but the addresses and the numbers filled in."""

    __slots__ = (
        "_alpha",
        "_beta",
        "_calls",
        "_descriptors",
        "_lane",
        "_limit",
        "_numbers",
        "_pointed",
        "_scale",
        "_vectors",
        "lowered",
    )

    def __init__(
        self, lane: CudaLane, row: Row, lowered: Lowered, vectors: Sequence[Vector], scale: Dtype, limit: int
    ) -> None:
        super().__init__(row, capture_safe=True)
        self._lane, self._limit = lane, limit
        self.lowered = lowered
        problem = lowered.problem
        self._descriptors = descriptors = Descriptors(problem)
        self._vectors = vectors
        self._pointed: tuple[Argument, ...] = ()
        for attribute, _, _ in vectors:  # the heuristic asks which pointers are set, not where they point to
            descriptors.point(attribute, 256)
        self._scale = scale
        number = ctypes.c_void_p if problem.device_scalars else CTYPES[scale.name]
        self._alpha, self._beta = number(), number()
        self._numbers: tuple[Argument, ...] = ()
        (result,) = heuristic(lane.cublaslt, descriptors, problem, limit)
        self._calls = self._bind(result.algo, result.workspaceSize)

    def resized(self, problem: Problem) -> CublasLtPlan:
        """The plan of a problem that differs from this one's in nothing but extents, steps and alignments."""
        lowered = Lowered(problem, *self.lowered[1:])
        return CublasLtPlan(self._lane, self.row, lowered, self._vectors, self._scale, self._limit)

    def _bind(
        self, algo: lt.cublasLtMatmulAlgo_t, workspace_bytes: int
    ) -> tuple[Callable[[], int], tuple[ctypes.c_void_p, ...]]:
        """The call with prebuilt arguments, and those of them that change: A, B, C, D in cuBLASLt's sense."""
        lane, layouts = self._lane, self._descriptors.layouts
        a, b, c, d = (ctypes.c_void_p() for _ in range(4))
        alpha, beta = self._alpha, self._beta
        if not self.lowered.problem.device_scalars:
            alpha, beta = (ctypes.c_void_p(ctypes.addressof(x)) for x in (alpha, beta))
        call = partial(
            _bare_matmul(),
            *(lane.cublaslt, self._descriptors.matmul, alpha),
            *(a, layouts["a"], b, layouts["b"], beta, c, layouts["c"], d, layouts["d"]),
            *(ctypes.byref(algo), lane.workspace.c_ptr, ctypes.c_size_t(workspace_bytes), lane.target),
        )
        return call, (a, b, c, d)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        numbers = arguments[ALPHA:FIRST_FACTOR]
        if numbers != self._numbers:
            for scalar, number in zip((self._alpha, self._beta), numbers, strict=True):
                self._number(scalar, number)
            self._numbers = numbers
        operands: Any = arguments[:ALPHA]  # addresses are ints
        if self.lowered.empty_k:
            zeros = self._lane.zeros(self._zero_bytes())
            operands = (zeros, zeros, *operands[C:])
        for offsets in self.lowered.offsets:
            if self._vectors:
                self._point(arguments, offsets)
            if offsets is not NO_OFFSETS:
                operands = [address and address + step for address, step in zip(arguments, offsets, strict=False)]
            self._call(operands)

    def _call(self, operands: Sequence[int]) -> None:
        """Call the library for the operands at these addresses."""
        call, (a, b, c, d) = self._calls
        if self.lowered.exchanged:
            a.value, b.value = operands[B], operands[A]
        else:
            a.value, b.value = operands[A], operands[B]
        # No C is a null pointer: where C and D differ in dtype, the library refuses one address for both.
        c.value, d.value = operands[C] or None, operands[OUT]
        status = call()
        if status:
            self._lane.stream.done()  # raises DeviceFault where it is the device that is lost
            raise lt.cublasLtMatmul.error(status)

    def _number(self, scalar: Any, value: Argument) -> None:
        """Set alpha or beta: an address on the device, a real number, or a complex one."""
        if type(scalar) is ctypes.c_void_p:
            scalar.value = value if type(value) is int else self._lane.scalar(value, self._scale)
        elif isinstance(scalar, ctypes.Array):
            scalar[0], scalar[1] = value.real, value.imag
        elif type(scalar) is ctypes.c_int32:
            scalar.value = int(value.real)
        else:
            scalar.value = value

    def _point(self, arguments: tuple[Argument, ...], offsets: tuple[int, ...]) -> None:
        """Set the pointers that live in the operation descriptor, unless they are there already."""
        wanted = tuple(
            self._address(arguments[index], offsets[index] if index < OUT else 0, is_number)
            for _, index, is_number in self._vectors
        )
        if wanted != self._pointed:
            for (attribute, _, _), address in zip(self._vectors, wanted, strict=True):
                self._descriptors.point(attribute, address)
            self._pointed = wanted

    def _address(self, argument: Argument, offset: int, is_number: bool) -> int:
        if is_number:
            return self._lane.scalar(float(argument.real), F32)
        return int(argument.real) + offset

    def _zero_bytes(self) -> int:
        problem = self.lowered.problem
        return max(m.rows * m.cols for m in (problem.a, problem.b)) * 16  # the widest element

    def tune(self, request: MatmulRequest) -> None:
        """Take the fastest of the heuristic's candidates, from the cache on disk or by timing them now."""
        problem, lane, limit = self.lowered.problem, self._lane, self._limit
        known = lane.algorithms.get("matmul", problem.as_key())
        if known is not None and self._take(known):
            return
        lane.refuse_capture("a request that is to be tuned")
        results = heuristic(lane.cublaslt, self._descriptors, problem, limit, CANDIDATES)
        found = {bytes(result.algo): result for result in results}
        for terms, workspace in _modest(problem, limit):
            with suppress(Refused):  # nothing that makes do with less: there are the others
                for result in heuristic(lane.cublaslt, self._descriptors, terms, workspace, CANDIDATES // 4):
                    found.setdefault(bytes(result.algo), result)
        results = list(found.values())
        calls = [self._bind(result.algo, result.workspaceSize) for result in results]

        def run(number: int, arguments: tuple[Argument, ...]) -> None:
            self._calls = calls[number]
            self.enqueue(arguments)

        best = fastest(lane, request, run, len(calls))
        self._calls = calls[best]
        lane.algorithms.put(
            "matmul", problem.as_key(), Algorithm(bytes(results[best].algo), results[best].workspaceSize)
        )

    def _take(self, known: Algorithm) -> bool:
        """Take an algorithm from the cache on disk, if the library agrees that it fits this problem."""
        if len(known.blob) != ctypes.sizeof(lt.cublasLtMatmulAlgo_t) or known.workspace > self._lane.workspace.nbytes:
            return False
        algo = lt.cublasLtMatmulAlgo_t.from_buffer_copy(known.blob)
        result = lt.cublasLtMatmulHeuristicResult_t()
        a, b, c, d = (self._descriptors.layouts[name] for name in "abcd")
        check = lt.cublasLtMatmulAlgoCheck.unchecked
        if check(self._lane.cublaslt, self._descriptors.matmul, a, b, c, d, algo, result) or result.state:
            return False
        if result.workspaceSize > known.workspace:
            return False
        self._calls = self._bind(algo, known.workspace)
        return True


def _modest(problem: Problem, limit: int) -> Iterator[tuple[Problem, int]]:
    """A problem and a workspace that ask for less: the heuristic then has other ideas, and some of them are better."""
    for workspace in (8 << 20, 1 << 20, 0):
        if workspace < limit:
            yield problem, workspace
    matrices = {name: getattr(problem, name) for name in "abcd"}
    if all(matrix.alignment > ALIGNED for matrix in matrices.values()):
        yield problem._replace(**{name: m._replace(alignment=ALIGNED) for name, m in matrices.items()}), limit


def _vectors(request: MatmulRequest, lowered: Lowered) -> list[Vector]:
    found = []
    problem = lowered.problem
    if problem.bias_dtype >= 0:
        index = BIAS if request.epilogue.adds_bias else BGRAD
        found.append((Desc.CUBLASLT_MATMUL_DESC_BIAS_POINTER, index, False))
    if problem.aux_ld:
        found.append((Desc.CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, AUX, False))
    exchanged = {"a": "b", "b": "a"} if lowered.exchanged else {}
    for index, name in enumerate(FACTORS_AND_AMAX, FIRST_FACTOR):
        factor = getattr(request.scales, name)
        if factor is not None and not (lowered.empty_k and name in "ab"):
            found.append((POINTERS[exchanged.get(name, name)], index, not isinstance(factor, Tensor)))
    return found
