"""The calls that bench_bindings races: one C function each, called with prebuilt arguments in every way there is.

Functions of counted.c have exactly 0, 5, 10 and 16 arguments and do nothing. Those of the libraries only read a
descriptor on the host, or find that there is nothing to do; one of them needs a GPU for its handle. The one who calls
turns whatever is raised (no such wheel, no compiler, no GPU) into a line of the table.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from timing import Candidate, statement

from cudabind import LIBRARIES, Library, _load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

UNTYPED, BY_HAND, BARE = "ctypes, untyped", "ctypes, c_void_p", "ctypes, same types"
UNCHECKED, CHECKED, NVMATH, CUDA_PYTHON = "unchecked", "checked", "nvmath", "cuda-python"
WAYS = (UNTYPED, BY_HAND, BARE, UNCHECKED, CHECKED, NVMATH, CUDA_PYTHON)
COUNTS = (0, 5, 10, 16)
SOURCE = Path(__file__).with_name("counted.c")
NUMBERS = (ctypes.c_int, ctypes.c_uint, ctypes.c_int64, ctypes.c_uint64)  # by value, also if one writes it by hand


@dataclass(frozen=True)
class Row:
    """One function and the ways to call it: each a callable and its arguments.

    `seen` takes what a call returned and says what came of it, which must be `want` whichever way it was called.
    """

    name: str
    count: int
    ways: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]
    seen: Callable[[Any], Any]
    want: Any

    def candidates(self) -> list[Candidate]:
        """A candidate for each way; its result is what came of the call."""
        found = []
        for way, (function, arguments) in self.ways.items():
            names = {f"a{number}": value for number, value in enumerate(arguments)}
            timed = statement(way, f"f({', '.join(names)})", f=function, **names)
            found.append(Candidate(way, timed.burst, lambda run=timed.result: self.seen(run())))
        return found


def row(function: Any, arguments: tuple[Any, ...], seen: Callable[[Any], Any], want: Any) -> Row:
    """A function of a generated module, beside the same symbol of the same library by ctypes alone."""
    bound = function.unchecked
    dll = _load.open(function._library.name)
    untyped, by_hand, bare = (dll[function.__name__] for _ in range(3))
    by_hand.argtypes = [kind if kind in NUMBERS else ctypes.c_void_p for kind in bound.argtypes]
    bare.argtypes = bound.argtypes
    ways: dict[str, Any] = {UNTYPED: untyped, BY_HAND: by_hand, BARE: bare, UNCHECKED: bound, CHECKED: function}
    for each in (untyped, by_hand, bare):
        each.restype = bound.restype
    return Row(function.__name__, len(arguments), {way: (f, arguments) for way, f in ways.items()}, seen, want)


@contextlib.contextmanager
def counted_rows(folder: Path) -> Iterator[list[Row]]:
    """The functions of counted.c, built into `folder`; their arguments are those of cublasLtMatmul."""
    file = folder / "libcounted.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(file), str(SOURCE)], check=True)
    name, variable = "counted", "CUDABIND_COUNTED_PATH"
    LIBRARIES[name] = Library(name, "cudabind.sys.counted", file.name, "countedVersion", "thousands", "gcc")
    os.environ[variable] = str(file)
    try:
        import counted

        handle, desc, alpha = counted.countedHandle_t(1 << 40), counted.countedDesc_t(1 << 41), ctypes.c_float(1)
        at, size, algo = ctypes.c_void_p(1 << 42), ctypes.c_size_t(1 << 33), counted.countedAlgo_t()
        one = ctypes.byref(alpha)
        matrix = (at, desc)
        products = (handle, desc, one, *matrix, *matrix)
        arguments: dict[int, tuple[Any, ...]] = {0: (), 5: products[:5], 10: (*products, ctypes.c_int(1), size, handle)}
        arguments[16] = (*products, one, *matrix, *matrix, ctypes.byref(algo), at, size, handle)
        yield [row(getattr(counted, f"counted{n}"), arguments[n], lambda _: counted.countedLast(), n) for n in COUNTS]
    finally:
        del LIBRARIES[name], os.environ[variable]


def lt_version() -> Row:
    """cublasLtGetVersion: no argument."""
    from cudabind.sys import cublasLt

    return row(cublasLt.cublasLtGetVersion, (), lambda version: version, cublasLt.cublasLtGetVersion())


def lt_layout() -> Row:
    """cublasLtMatrixLayoutGetAttribute: the rows of a layout."""
    from cudabind.sys import cublasLt as lt

    layout, rows, written = lt.cublasLtMatrixLayout_t(), ctypes.c_uint64(), ctypes.c_size_t()
    lt.cublasLtMatrixLayoutCreate(layout, lt.cudaDataType_t.CUDA_R_32F, 48, 64, 48)
    attribute = int(lt.cublasLtMatrixLayoutAttribute_t.CUBLASLT_MATRIX_LAYOUT_ROWS)
    arguments = (layout, attribute, ctypes.byref(rows), ctypes.c_size_t(8), ctypes.byref(written))
    return row(lt.cublasLtMatrixLayoutGetAttribute, arguments, *_reads(rows, written, want=[48, 8]))


def sparse_coo() -> Row:
    """cusparseCooGet: everything about a sparse matrix of 3 by 4."""
    from cudabind.sys import cusparse as sp

    index, base = sp.cusparseIndexType_t.CUSPARSE_INDEX_32I, sp.cusparseIndexBase_t.CUSPARSE_INDEX_BASE_ZERO
    matrix, dtype = sp.cusparseSpMatDescr_t(), sp.cudaDataType.CUDA_R_32F
    sp.cusparseCreateCoo(matrix, 3, 4, 5, 256, 512, 1024, index, base, dtype)
    out = [*(ctypes.c_int64() for _ in range(3)), *(ctypes.c_void_p() for _ in range(3))]
    out += [ctypes.c_int32() for _ in range(3)]
    want = [3, 4, 5, 256, 512, 1024, int(index), int(base), int(dtype)]
    return row(sp.cusparseCooGet, (matrix, *map(ctypes.byref, out)), *_reads(*out, want=want))


def dnn_rnn() -> Row:
    """cudnnGetRNNDescriptor_v8: everything about a recurrent network of 2 layers of 16 by 8."""
    from cudabind.sys import cudnn

    rnn, dropout = cudnn.cudnnRNNDescriptor_t(), cudnn.cudnnDropoutDescriptor_t()
    cudnn.cudnnCreateRNNDescriptor(rnn)
    cudnn.cudnnCreateDropoutDescriptor(dropout)
    kinds = (cudnn.cudnnRNNMode_t.CUDNN_LSTM, cudnn.cudnnRNNBiasMode_t.CUDNN_RNN_DOUBLE_BIAS)
    given = (0, *map(int, kinds), 0, 0, 0, 0, 0, 16, 8, 8, 2)
    cudnn.cudnnSetRNNDescriptor_v8(rnn, *given, dropout, 0)
    out = [ctypes.c_int32() for _ in given]
    arguments = (rnn, *map(ctypes.byref, out), ctypes.byref(dropout), ctypes.byref(ctypes.c_uint32()))
    return row(cudnn.cudnnGetRNNDescriptor_v8, arguments, *_reads(*out, want=list(given)))


def blas_gemv() -> Row:
    """cublasSgemvStridedBatched of matrices without rows: the library looks at its arguments and is done."""
    from cudabind.sys import cublas

    handle, one, at = cublas.cublasHandle_t(), ctypes.byref(ctypes.c_float(1)), ctypes.c_void_p(256)
    cublas.cublasCreate(handle)
    vector = (at, 1, ctypes.c_int64(0))  # without types, ctypes would pass the stride as an int
    arguments = (handle, 0, 0, 0, one, *vector, *vector, one, *vector, 1)
    return row(cublas.cublasSgemvStridedBatched, arguments, lambda status: status or 0, 0)


def _reads(*out: Any, want: list[int]) -> tuple[Callable[[Any], list[int]], list[int]]:
    """What came of a call that fills `out`, which is emptied for the next one, or that returns the values."""

    def seen(result: Any) -> list[int]:
        if isinstance(result, tuple):
            return [int(value) for value in result]
        found = [each.value for each in out]
        for each in out:
            each.value = 0
        return found

    return seen, want


def runtime_version() -> Row:
    """cudaRuntimeGetVersion: no argument in Python, one in C; its libcudart need not be cuda-python's own."""
    from cuda.bindings import runtime as theirs

    from cudabind import runtime as ours

    version = ctypes.c_int()
    bare = _load.open("cudart")["cudaRuntimeGetVersion"]
    bare.argtypes = (ctypes.c_void_p,)
    ways: dict[str, Any] = {BY_HAND: (bare, (ctypes.byref(version),))}
    ways[CHECKED] = (ours.cudaRuntimeGetVersion, ())
    ways[CUDA_PYTHON] = (theirs.cudaRuntimeGetVersion, ())

    def seen(result: Any) -> int:
        return int(result[1] if isinstance(result, tuple) else result or version.value) // 1000

    return Row("cudaRuntimeGetVersion", 0, ways, seen, theirs.cudaRuntimeGetVersion()[1] // 1000)


def runtime_channel() -> Row:
    """cudaCreateChannelDesc, which returns a struct."""
    from cuda.bindings import runtime as theirs

    from cudabind import runtime as ours

    class Channel(ctypes.Structure):
        _fields_ = tuple((name, ctypes.c_int) for name in "xyzwf")

    bare = _load.open("cudart")["cudaCreateChannelDesc"]
    bare.argtypes, bare.restype = (ctypes.c_int,) * 5, Channel
    unsigned = theirs.cudaChannelFormatKind.cudaChannelFormatKindUnsigned
    given = (8, 16, 32, 64)
    ways: dict[str, Any] = {BY_HAND: (bare, (*given, int(unsigned)))}
    ways[CHECKED] = (ours.cudaCreateChannelDesc, (*given, unsigned))
    ways[CUDA_PYTHON] = (theirs.cudaCreateChannelDesc, (*given, unsigned))

    def seen(result: Any) -> tuple[int, ...]:
        made = result[1] if isinstance(result, tuple) else result
        return (made.x, made.y, made.z, made.w)

    return Row("cudaCreateChannelDesc", 5, ways, seen, given)


def with_nvmath(made: Row) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The same call by nvmath-python's bindings, which take addresses and handles as integers.

    `coo_get` is the exception: it takes the matrix alone and returns the rest.
    """
    module, name = NVMATH_NAMES[made.name]
    function = getattr(importlib.import_module(f"nvmath.bindings.{module}"), name)
    _, given = made.ways[UNCHECKED]
    arguments = given[:1] if name == "coo_get" else given
    return function, tuple(map(_integer, arguments))


NVMATH_NAMES = {
    "cublasLtGetVersion": ("cublasLt", "get_version"),
    "cublasLtMatrixLayoutGetAttribute": ("cublasLt", "matrix_layout_get_attribute"),
    "cusparseCooGet": ("cusparse", "coo_get"),
    "cublasSgemvStridedBatched": ("cublas", "sgemv_strided_batched"),
}


def _integer(argument: Any) -> int:
    if isinstance(argument, int):
        return argument
    if hasattr(argument, "_obj"):  # what byref() made
        return ctypes.addressof(argument._obj)
    return int(argument.value)
