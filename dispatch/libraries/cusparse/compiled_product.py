"""cuSPARSE's products with the caller's operators: NVRTC compiles them to LTO-IR, which cuSPARSE links to its kernels.

A plan of SpMMOp is created from descriptors, but a call has none: it uses the addresses of these descriptors. So it is
created for memory of the plan; operands are copied to it, and results from it (`bind`). SpMVOp takes its vectors in
each call, but analyses the matrix when its descriptor is created: that is repeated in each run, unless the pattern is
fixed. Follows https://docs.nvidia.com/cuda/cusparse/#cusparse-generic-functions.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

from cudabind import nvjitlink, nvrtc
from cudabind.errors import CusparseError, LibraryNotFound
from cudabind.sys import cusparse
from dispatch.errors import Refused
from dispatch.keys import I32, I64
from dispatch.libraries.cusparse.calls import Call
from dispatch.libraries.cusparse.handle import handle_of
from dispatch.libraries.cusparse.operator_source import EMPTY_ROWS, KERNEL_OPTIONS, LTO_OPTIONS
from dispatch.libraries.finalizer import Held
from dispatch.libraries.nvrtc.compiled import compiled
from dispatch.libraries.nvrtc.launching import KernelStep

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dispatch.device.storage import Storage
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cusolver.matrix import Matrix
    from dispatch.libraries.cusparse.descriptors import Descriptor

__all__ = ["CompiledProduct", "EmptyRows", "RowProduct", "compile_to_lto", "why_not"]

THREADS = 256

NON_TRANSPOSE = cusparse.cusparseOperation_t(0)
INDICES = {I32: "int", I64: "long long"}


@cache
def why_not() -> str:
    """Why cuSPARSE cannot link operators here, or "" if it can: it needs an nvJitLink no older than NVRTC."""
    try:
        linker, compiler = tuple(nvjitlink.nvJitLinkVersion())[:2], tuple(nvrtc.nvrtcVersion())[:2]
    except LibraryNotFound as error:
        return f"cuSPARSE links operators that NVRTC compiles with nvJitLink: {error}"
    if linker[0] != compiler[0] or linker < compiler:
        versions = f"nvJitLink {'.'.join(map(str, linker))} and NVRTC {'.'.join(map(str, compiler))}"
        return f"cuSPARSE links operators with an nvJitLink that is at least as new as NVRTC; found {versions}"
    return ""


def compile_to_lto(sources: Mapping[str, str], arch: str) -> dict[str, bytes]:
    """The LTO-IR of programs by the names of their functions; Refused if it cannot be compiled or linked.

    Raises NvrtcError, with the compiler's messages, if the caller's lines do not compile: "add(1): error: …".
    """
    if reason := why_not():
        raise Refused(reason)
    try:
        return {name: compiled(source, name, (f"-arch={arch}", *LTO_OPTIONS)) for name, source in sources.items()}
    except LibraryNotFound as error:
        raise Refused(f"NVRTC, which compiles {', '.join(sources)}, is not available: {error}") from error


def pointer_to(code: bytes) -> ctypes.c_void_p:
    """The address of some bytes, which the caller keeps alive."""
    return ctypes.cast(ctypes.c_char_p(code), ctypes.c_void_p)


def refused_or_error(error: CusparseError) -> Exception:
    """Refused if the library does not support the call, else the library's own error."""
    if error.name == "CUSPARSE_STATUS_NOT_SUPPORTED":
        return Refused(f"{error.function} rejects the request: {error}")
    return error


class CompiledProduct:
    """SpMMOp as a step of a plan, over memory that it is bound to once."""

    __slots__ = ("_code", "_descriptors", "_executor", "_kind", "_made", "_work", "_workspace")

    def __init__(
        self, executor: CudaExecutor, descriptors: Sequence[Descriptor], kind: Any, code: Mapping[str, bytes]
    ) -> None:
        """`descriptors` are those of A, B and C, `kind` a cudaDataType, `code` the result of `compile_to_lto`."""
        self._executor, self._descriptors, self._kind, self._code = executor, tuple(descriptors), kind, dict(code)
        self._made: Held | None = None
        self._work: Storage | None = None
        self._workspace = ctypes.c_void_p()

    def bind(self, addresses: Sequence[Any]) -> None:
        """Link the operators into a kernel over these addresses; Refused if cuSPARSE does not support it."""
        for descriptor in self._descriptors:
            descriptor.set_addresses(addresses)
        handle, size, plan = handle_of(self._executor).follow(), ctypes.c_size_t(), cusparse.cusparseSpMMOpPlan_t()
        lengths = [(pointer_to(self._code[name]), len(self._code[name])) for name in ("add_op", "mul_op", "epilogue")]
        codes = [part for pair in lengths for part in pair]
        default = cusparse.cusparseSpMMOpAlg_t.CUSPARSE_SPMM_OP_ALG_DEFAULT
        matrices = (descriptor.c for descriptor in self._descriptors)
        make: Any = cusparse.cusparseSpMMOp_createPlan
        try:
            make(handle, plan, NON_TRANSPOSE, NON_TRANSPOSE, *matrices, self._kind, default, *codes, ctypes.byref(size))
        except CusparseError as error:
            raise refused_or_error(error) from error
        self._made = Held(plan, cusparse.cusparseSpMMOp_destroyPlan)
        if size.value:
            self._work = self._executor.device.allocate(size.value, self._executor.stream)
            self._workspace = ctypes.c_void_p(self._work.base)

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Multiply, over the bound memory."""
        del addresses
        if self._made is None:
            raise RuntimeError("it is bound to no memory")
        handle_of(self._executor).follow()  # the plan's call uses the handle
        function: Any = cusparse.cusparseSpMMOp
        if status := function.unchecked(self._made.c, self._workspace):
            self._executor.stream.done()  # raises DeviceFault if the device is lost
            raise function.error(status)


class EmptyRows(KernelStep):
    """A step after SpMMOp that writes the rows of the result that SpMMOp does not: those for which A has no element."""

    __slots__ = ()

    def __init__(self, executor: CudaExecutor, source: str, rows: Matrix, out: Matrix) -> None:
        """`source` is `Operators.empty_rows_source`, `rows` are the row offsets of A, `out` is the row-major result."""
        kernel = (source, EMPTY_ROWS, (*KERNEL_OPTIONS, f"-DINDEX={INDICES[rows.dtype]}"))
        grid = (-(-out.rows * out.cols // THREADS),)
        super().__init__(executor, kernel, grid, (THREADS,), (rows.pointer, out.pointer, out.rows, out.cols))


class RowProduct(Call):
    """SpMVOp as a step of a plan, with an analysis that is kept if the pattern is fixed.

    Each call reads the values, x and y that its descriptors refer to; an analysis depends on the pattern alone (seen
    with 12.9.4 on an H200). If the indices are at other addresses, the analysis is repeated.
    """

    __slots__ = ("_buffer", "_code", "_front", "_indices_at", "_keeps", "_made", "_matrix", "_size")

    def __init__(
        self,
        executor: CudaExecutor,
        front: Sequence[Any],
        factors: Sequence[Any],
        kind: Any,
        code: bytes | None,
        *,
        keeps: bool = False,
    ) -> None:
        """`front` are the descriptors of A, x, y and the result, `factors` alpha and beta; `code` is optional."""
        super().__init__(executor, "cusparseSpMVOp", (*factors, *front))
        self._matrix, self._keeps = front[0], keeps
        self._indices_at: Any = None  # the addresses of the indices that were analysed
        self._front, self._code = (kind, cusparse.cusparseSpMVOpAlg_t.CUSPARSE_SPMVOP_ALG_DEFAULT), code
        self._buffer: Storage | None = None
        self._size = 0
        self._made: tuple[Held, Held] | None = None

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Analyse and link, unless both are kept, and multiply."""
        self.set_arguments(addresses)
        alpha, beta, _, *vectors = self.c_arguments
        handle = self._handle.follow()
        if self._made is None or not self._keeps or self._indices_at != self._matrix.indices_at:
            self._analyse(handle)
        if self._made is None:
            raise RuntimeError("no analysis exists yet")
        function: Any = cusparse.cusparseSpMVOp
        if status := function.unchecked(handle, self._made[0].c, alpha, beta, *vectors):
            self._executor.stream.done()  # raises DeviceFault if the device is lost
            raise function.error(status)

    def _analyse(self, handle: Any) -> None:
        """Analyse and link; the previous results are destroyed after this has succeeded."""
        matrices, size = self.c_arguments[2:], ctypes.c_size_t()
        front: Any = (NON_TRANSPOSE, *matrices, *self._front)
        ask: Any = cusparse.cusparseSpMVOp_bufferSize
        analyse: Any = cusparse.cusparseSpMVOp_createDescr
        link: Any = cusparse.cusparseSpMVOp_createPlan
        ask(handle, *front, ctypes.byref(size))
        if self._buffer is None or self._size < size.value:
            self._size = max(1, size.value)
            self._buffer = self._executor.device.allocate(self._size, self._executor.stream)
        descriptor, plan = cusparse.cusparseSpMVOpDescr_t(), cusparse.cusparseSpMVOpPlan_t()
        analyse(handle, descriptor, *front, ctypes.c_void_p(self._buffer.base))
        held = Held(descriptor, cusparse.cusparseSpMVOp_destroyDescr)
        code = (None, 0) if self._code is None else (pointer_to(self._code), len(self._code))
        link(handle, descriptor, plan, *code)
        self._made, self._indices_at = (Held(plan, cusparse.cusparseSpMVOp_destroyPlan), held), self._matrix.indices_at
