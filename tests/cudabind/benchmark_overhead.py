"""What the binding itself costs: `python tests/cudabind/benchmark_overhead.py` prints nanoseconds and milliseconds.

A benchmark and not a test, because a busy machine would make it fail: the aims are a checked call within 120 ns of the
bare ctypes function, `unchecked` at its price, and imports of at most 40 ms (cublasLt) and 60 ms (cudabind).
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import sys
import time
import timeit

from cudabind import _load
from cudabind.sys import cublasLt as lt

CALLS = 200_000


def nanoseconds(statement: str, names: dict[str, object]) -> float:
    return min(timeit.repeat(statement, globals=names, number=CALLS, repeat=7)) / CALLS * 1e9


def milliseconds(statement: str, before: str = "pass") -> float:
    """The time of an import in a fresh interpreter, after what it is not to be charged for."""
    code = f"import time\n{before}\nt = time.perf_counter()\n{statement}\nprint(1e3 * (time.perf_counter() - t))"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(9)]
    return statistics.median(float(run.stdout) for run in runs)


def first_call() -> float:
    started = time.perf_counter()
    _ = lt.cublasLtMatmul.unchecked
    return 1e6 * (time.perf_counter() - started)


def main() -> None:
    _load.open("cublasLt")
    bare = _load.open("cublasLt")["cublasLtHeuristicsCacheGetCapacity"]
    bare.argtypes, bare.restype = (ctypes.c_void_p,), ctypes.c_int
    size = ctypes.c_size_t()
    function = lt.cublasLtHeuristicsCacheGetCapacity
    names = {"bare": bare, "checked": function, "unchecked": function.unchecked, "x": ctypes.byref(size)}
    plain = nanoseconds("bare(x)", names)
    print(f"bare ctypes                {plain:7.0f} ns")
    print(f"unchecked                  {nanoseconds('unchecked(x)', names) - plain:+7.0f} ns")
    print(f"checked                    {nanoseconds('checked(x)', names) - plain:+7.0f} ns")
    print(f"bind cublasLtMatmul, once  {first_call():7.0f} us")
    print(f"import cudabind            {milliseconds('import cudabind'):7.1f} ms")
    print(f"import cudabind.sys.cublasLt {milliseconds('import cudabind.sys.cublasLt'):5.1f} ms")
    print(f"the same after numpy       {milliseconds('import cudabind.sys.cublasLt', 'import numpy'):7.1f} ms")


if __name__ == "__main__":
    main()
