"""A product with its bias and GELU fused: called, bound, batched, and keeping what the backward pass needs.

Each is checked against NumPy in float64.

    python examples/02_fused_matmul.py --device cuda:0
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

import dispatch as dp
from dispatch import Epilogue


def gelu(x: np.ndarray) -> np.ndarray:
    """GELU by the tanh approximation, in the precision of x."""
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def right(name: str, result: np.ndarray, expected: np.ndarray) -> bool:
    """Print the error of a result; False if it is too large for f32."""
    error = float(np.abs(result - expected).max() / np.abs(expected).max())
    print(f"{name:<28} {result.shape!s:<16} largest error {error:.1e}")
    return error < 1e-5


def main() -> int:
    """Run the products; 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    name = parser.parse_args().device
    dev = dp.device(None if name == "auto" else name)

    rng = np.random.default_rng(0)
    a, b, bias = (rng.standard_normal(shape, dtype=np.float32) for shape in [(64, 128), (128, 256), (256,)])
    affine = a.astype(np.float64) @ b + bias
    request = dp.MatmulRequest(dev.array(a), dev.array(b), bias=dev.array(bias), epilogue=Epilogue.GELU_BIAS)
    print(dp.explain(request))

    # Called: the first call of each kind chooses a row, and the product is enqueued. numpy() waits for it.
    d = dp.matmul(request.a, request.b, bias=request.bias, epilogue=Epilogue.GELU_BIAS)
    good = [right("called", d.numpy(), gelu(affine))]

    # Bound: all choices are made once; on a GPU a call launches a captured graph. Other operands may be passed.
    call = dp.prepare(request)
    call()
    good.append(right("bound", call().numpy(), gelu(affine)))
    good.append(right("bound, with a doubled", call(a=dev.array(2 * a)).numpy(), gelu(2 * (affine - bias) + bias)))

    # Batched: b is one matrix for all products of the batch, and aᵀ is a view, without a copy.
    stack = rng.standard_normal((3, 128, 64), dtype=np.float32)
    d = dp.matmul(dev.array(stack).mT, request.b, bias=request.bias, epilogue=Epilogue.GELU_BIAS)
    good.append(right("batch of transposed views", d.numpy(), gelu(stack.swapaxes(1, 2).astype(np.float64) @ b + bias)))

    # For training: the input of the GELU is also stored, and the backward product reads it.
    d, aux = dp.matmul(request.a, request.b, bias=request.bias, epilogue=Epilogue.GELU_AUX_BIAS)
    good.append(right("with the input of GELU", np.asarray(aux), affine))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
