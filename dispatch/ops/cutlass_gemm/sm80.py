"""A CutlassGemmRequest carried out by a multistage kernel, as sm_80 has them and every newer GPU runs.

The table's sm_80 rows end here, by `plan`: float64, and what tensor maps cannot step through. Alpha and beta are read
on the device, so a number among them is put there once by the executor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.core.request import Argument, Plan
from dispatch.keys import F64, Arch
from dispatch.libraries.cutlass import compile as compiler
from dispatch.libraries.cutlass.emit.sm80_gemm import MultistageSpec, emit
from dispatch.libraries.cutlass.launch import Launch, module
from dispatch.ops.cutlass_gemm.cutlass import fixed_words, multiprocessors
from dispatch.ops.cutlass_gemm.layout import alignment, order_of

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype
    from dispatch.libraries.cutlass.emit.sm90_gemm import Source
    from dispatch.ops.cutlass_gemm.request import CutlassGemmRequest

__all__ = ["MultistagePlan", "plan", "spec_of"]

LARGE_TILE = 128 * 128


def plan(request: CutlassGemmRequest, executor: CudaExecutor, row: Row) -> Plan:
    """Bind a request to an executor: compile or load the kernel, learn its parameters."""
    return MultistagePlan(request, executor, row)


def spec_of(request: CutlassGemmRequest, arch: Arch, processors: int) -> MultistageSpec:
    """The kernel of a request: the small tile where large ones would leave multiprocessors idle."""
    made = request.missing().get("out")
    d = (made[0], made[1]) if made is not None else (request.shape, request.out.layout.strides)  # type: ignore[union-attr]
    size = request.d_dtype.bits // 8
    outputs = [alignment(*d, size, 256 if made is not None else request.out.layout.alignment)]  # type: ignore[union-attr]
    if request.c is not None:
        outputs.append(alignment(request.c.shape, request.c.layout.strides, size, request.c.layout.alignment))
    inputs = [
        alignment(t.shape, t.layout.strides, t.dtype.itemsize, t.layout.alignment) for t in (request.a, request.b)
    ]
    if request.a.dtype is F64:  # whose tiles are laid out for one element at a time
        inputs = [F64.itemsize, F64.itemsize]
    tiles = -(-request.m // 128) * -(-request.n // 128) * request.batches
    return MultistageSpec(
        arch=arch,
        a=request.a.dtype,
        b=request.b.dtype,
        d=request.d_dtype,
        orders=(order_of(request.a), order_of(request.b)),
        alignment=(inputs[0], inputs[1], min(outputs)),
        source=request.c is not None,
        small=tiles < processors,
    )


class MultistagePlan(Plan):
    """One kernel for one set of layouts; convolution's differs in what `_kernel` says."""

    __slots__ = ("_accumulator", "_executor", "_launch", "_names", "_values", "spec")

    def __init__(self, request: Any, executor: CudaExecutor, row: Row) -> None:
        super().__init__(row, capture_safe=True)
        self._executor = executor
        arch = Arch(80) if executor.device.arch < 89 else executor.device.arch  # 86 runs what is compiled for 80
        self.spec, source, words, self._accumulator = self._kernel(request, arch, multiprocessors(executor))
        future = compiler.request(source, self.spec.target, f"{row.name}: {request.tree}")
        kernel = compiler.kernel_id(source, self.spec.target)
        loaded = module(executor.device, kernel, future.result(), source.words)
        self._names = ("a", "b", "c", "out", *request.kinds)
        self._values = {**words, "alpha": 1, "beta": 1}
        self._launch = Launch(loaded, executor, self._values, (1, 1))

    @staticmethod
    def _kernel(request: Any, arch: Arch, processors: int) -> tuple[Any, Source, dict[str, int], Dtype]:
        """The kernel, its source, the words of its launch, and what alpha and beta are read as."""
        spec = spec_of(request, arch, processors)
        return spec, emit(spec), fixed_words(request, processors), spec.accumulator

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        values = {**self._values, "beta": self._executor.scalar(0.0, self._accumulator)}
        for name, argument in zip(self._names, arguments, strict=True):
            number = type(argument) is not int
            values[name] = self._executor.scalar(argument, self._accumulator) if number else int(argument.real)
        self._launch.enqueue(values, self._executor.target.value or 0)
