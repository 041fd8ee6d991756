"""An op of one's own in one file: its request, what is right in NumPy, its kernel in CUDA C++, and its rows.

`squared_relu(x)` is max(x, 0)² + slope · min(x, 0)². NVRTC compiles the kernel for the current GPU, or without a GPU
for sm_90, if it is installed; on the host NumPy computes.

    python examples/14_own_op.py --device cuda:0
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import dispatch as dp
from cudabind.errors import LibraryNotFound
from dispatch.errors import BadRequest
from dispatch.keys import F32, F64, HOST, Arch

THREADS = 256


# -- the request: its fields with their documentation, checked before anything else happens ---------------------------
@dataclass(frozen=True, eq=False)
class SquaredReluRequest(dp.OperandRequest["dp.Tensor"]):
    """max(x, 0)² + slope · min(x, 0)², element by element.

    Attributes:
        x: any shape, f32 or f64.
        slope: what the squares of negative elements count, a finite number.
        out: of x's shape and dtype; may be x itself.
    """

    op: ClassVar[str] = "squared_relu"
    reads: ClassVar[tuple[str, ...]] = ("x",)
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "x")})
    x: dp.Tensor
    slope: float = 0.0
    out: dp.Tensor | None = None

    def check_fields(self) -> None:
        """Refuse invalid values; the annotation already ensures that slope is a number."""
        if not np.isfinite(self.slope):
            raise BadRequest("slope", str(self.slope), "a finite number")


# -- the reference: the host's row, and in float64 the expected results of all rows -----------------------------------
def evaluate(request: SquaredReluRequest, work: np.dtype[Any]) -> dict[str, np.ndarray]:
    """The outputs by name, in a working dtype."""
    x = np.asarray(request.x).astype(work)
    return {"out": np.maximum(x, 0) ** 2 + work.type(request.slope) * np.minimum(x, 0) ** 2}


# -- the kernel: the addresses of `reads` and then of `writes`, followed by the values of its launch ------------------
SOURCE = r"""
extern "C" __global__ void squared_relu(const Number* x, Number* out, long long size, Number slope)
{
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < size) out[i] = (x[i] > 0 ? Number(1) : slope) * x[i] * x[i];
}
"""


def launch(request: SquaredReluRequest) -> dp.Launch:
    """A thread for each element."""
    size = request.x.size
    slope = (ctypes.c_double if request.x.dtype is F64 else ctypes.c_float)(request.slope)
    return dp.Launch((-(-size // THREADS),), (THREADS,), (ctypes.c_int64(size), slope))


def contiguous(request: SquaredReluRequest) -> str:
    """Rule: the kernel does not support strides."""
    wrong = [name for name in ("x", "out") if not request.layout_of(name).is_contiguous]
    return f"needs {' and '.join(wrong)} in C order: make a copy" if wrong else ""


# -- the rows: one for each dtype and way to compute it, in order of priority -----------------------------------------
KERNELS = {
    dtype: dp.Kernel(SOURCE, "squared_relu", launch, options=("-std=c++17", f"-DNumber={name}"))
    for dtype, name in ((F32, "float"), (F64, "double"))
}
ROWS = [
    dp.Row("squared_relu", (dtype, dtype), None, (contiguous,), Arch(75), None, (), "own", "squared_relu", kernel)
    for dtype, kernel in KERNELS.items()
]
ROWS += [
    dp.Row("squared_relu", dtypes, None, (), HOST, HOST, (), "numpy", "squared_relu", dp.numpy_call(evaluate))
    for dtypes in ((F32, F32), (F64, F64))
]
dp.register(*ROWS)
squared_relu = dp.request_function(SquaredReluRequest, "squared_relu")


def error_of(dev: dp.Device, dtype: str) -> float:
    """Run the op on random numbers; the largest error against float64, relative to the largest result."""
    request = SquaredReluRequest(dev.array(np.random.default_rng(0).standard_normal((300, 70)), dtype), slope=0.25)
    on_host = SquaredReluRequest(dp.device("host").array(request.x.numpy()), slope=0.25)
    expected = evaluate(on_host, np.dtype(np.float64))["out"]
    worst = 0.0
    for result in (squared_relu(request.x, 0.25), dp.run(request), squared_relu(request.x, slope=0.25, out=request.x)):
        worst = max(worst, float(np.abs(result.numpy() - expected).max() / expected.max()))
    print(f"{dp.explain(request).row.name:<40} largest error {worst:.1e}")
    return worst


def main() -> int:
    """Run both dtypes; 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    name = parser.parse_args().device
    dev = dp.device(None if name == "auto" else name)
    good = error_of(dev, "f32") < 1e-6
    good &= error_of(dev, "f64") < 1e-15
    if dev.is_host:
        try:
            sizes = [len(kernel.cubin("sm_90")) for kernel in KERNELS.values()]
            print(f"for sm_90 NVRTC makes {sizes[0]:,} and {sizes[1]:,} bytes of code")
        except (LibraryNotFound, dp.errors.Refused) as error:
            print(f"not compiled: {error}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
