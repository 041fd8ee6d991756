"""Exchange arrays with NumPy, torch, CuPy and JAX without copies, each where it is installed.

One operand of a product comes from the other library, the result goes back to it, and writing to shared memory on one
side is visible on the other. On a GPU the streams of both sides are synchronized with each other.

    python examples/04_interop.py --device cuda:0
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

import dispatch as dp

if TYPE_CHECKING:
    from collections.abc import Callable

RNG = np.random.default_rng(0)
A, B = (RNG.standard_normal((128, 128), dtype=np.float32) for _ in "ab")
EXPECTED = A.astype(np.float64) @ B


def right(what: str, result: Any, expected: np.ndarray = EXPECTED) -> bool:
    """Print what was done, and the error of its result."""
    error = float(np.abs(np.asarray(result) - expected).max() / np.abs(expected).max())
    print(f"  {what:<62} largest error {error:.1e}")
    return error < 1e-5


def with_numpy(dev: dp.Device) -> bool:
    """A NumPy array is memory of the host: a view there, a copy to a GPU."""
    if not dev.is_host:
        return right("dev.array(array) copies in, numpy() out", dp.matmul(dev.array(A), dev.array(B)).numpy())
    mine = A.copy()
    a = dp.from_dlpack(mine)
    d = dp.matmul(a, dev.array(B))
    good = right("from_dlpack(array) is a view; asarray(d) is one, too", np.asarray(d))
    mine *= 2
    return good & right("writing to the array shows in the tensor", a.numpy(), 2.0 * A)


def with_torch(dev: dp.Device) -> bool:
    """torch and this library accept each other's tensors; pending work on both sides is waited for."""
    import torch

    where = "cpu" if dev.is_host else dev.name
    theirs = torch.tensor(A, device=where)
    d = dp.matmul(dp.from_dlpack(theirs), dev.array(B))
    back = torch.from_dlpack(d)
    good = right("from_dlpack(torch tensor), torch.from_dlpack(d)", (back + 0).cpu().numpy())
    back.mul_(2)
    if not dev.is_host:
        torch.cuda.synchronize()  # torch does not report its writes to memory that it shares
    return good & right("writing to it in torch shows in the tensor", d.numpy(), 2 * EXPECTED)


def with_cupy(_dev: dp.Device) -> bool:
    """CuPy by DLPack, and by __cuda_array_interface__."""
    import cupy

    theirs = cupy.asarray(A)
    d = dp.matmul(dp.from_dlpack(theirs), dp.from_cuda_array_interface(cupy.asarray(B)))
    good = right("from_dlpack and from_cuda_array_interface(CuPy array)", cupy.from_dlpack(d).get())
    return good & right("cupy.asarray(d), by __cuda_array_interface__", cupy.asarray(d).get())


def with_jax(dev: dp.Device) -> bool:
    """JAX by DLPack; its arrays are read-only."""
    import jax

    platform = "cpu" if dev.is_host else "gpu"
    theirs = jax.device_put(A, jax.devices(platform)[0])
    d = dp.matmul(dp.from_dlpack(theirs), dev.array(B))
    return right("from_dlpack(JAX array), jax.dlpack.from_dlpack(d)", jax.dlpack.from_dlpack(d))


def main() -> int:
    """Exchange with each library that is installed; 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    name = parser.parse_args().device
    dev = dp.device(None if name == "auto" else name)

    exchanges: dict[str, Callable[[dp.Device], bool]] = {"numpy": with_numpy, "torch": with_torch, "jax": with_jax}
    if not dev.is_host:
        exchanges["cupy"] = with_cupy  # CuPy's arrays are on GPUs only
    good = True
    for library, exchange in exchanges.items():
        if importlib.util.find_spec(library) is None:
            print(f"{library}: not installed")
            continue
        print(f"{library} and {dev.name}")
        good &= exchange(dev)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
