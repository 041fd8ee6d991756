"""Call a library by NVIDIA's own names: cuRAND, which generates on the host as well as on a GPU.

Three calls and their checks: normal numbers by their moments, Sobol's sequence against its definition, and an invalid
call, which raises. On a GPU, the numbers are written to memory of the CUDA runtime and copied to the host.

    python examples/05_raw_curand.py --device host
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind import runtime
from cudabind.errors import CurandError
from cudabind.sys import curand

if TYPE_CHECKING:
    from collections.abc import Callable

COUNT = 1 << 20
SEED = 1234


def generator(kind: curand.curandRngType_t, host: bool) -> curand.curandGenerator_t:
    """A new generator. A handle is an object: the library writes into it, and later calls take it as an argument."""
    handle = curand.curandGenerator_t()
    create = curand.curandCreateGeneratorHost if host else curand.curandCreateGenerator
    create(handle, kind)  # raises CurandError on any other status than CURAND_STATUS_SUCCESS
    return handle


def fill(out: np.ndarray[Any, Any], host: bool, generate: Callable[[int], None]) -> None:
    """Call `generate` with the address of memory as large as `out`, on the host that of the array itself."""
    if host:
        generate(out.ctypes.data)
        return
    address = runtime.cudaMalloc(out.nbytes)
    try:
        generate(address)
        runtime.cudaMemcpy(out.ctypes.data, address, out.nbytes, runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost)
    finally:
        runtime.cudaFree(address)


def normal_numbers(host: bool) -> float:
    """Normal numbers of Philox 4x32-10; the errors of the first four moments, in standard errors."""
    handle = generator(curand.curandRngType_t.CURAND_RNG_PSEUDO_PHILOX4_32_10, host)
    curand.curandSetPseudoRandomGeneratorSeed(handle, SEED)
    out = np.empty(COUNT, np.float32)
    fill(out, host, lambda address: curand.curandGenerateNormal(handle, address, out.size, 0.0, 1.0))
    curand.curandDestroyGenerator(handle)
    x = out.astype(np.float64)
    moments = [float((x**power).mean()) for power in (1, 2, 3, 4)]
    print(f"  {COUNT} normal numbers: moments {', '.join(f'{moment:.4f}' for moment in moments)}, should be 0, 1, 0, 3")
    # For n numbers, the mean of x^k has the variance (E[x^2k] - E[x^k]^2) / n.
    expected, variances = (0.0, 1.0, 0.0, 3.0), (1.0, 3.0 - 1, 15.0, 105.0 - 9)
    return max(
        abs(moment - want) / math.sqrt(variance / COUNT)
        for moment, want, variance in zip(moments, expected, variances, strict=True)
    )


def sobol_numbers(host: bool) -> int:
    """Compare the first 4096 points of Sobol's sequence in three dimensions with its definition; count differences."""
    handle = generator(curand.curandRngType_t.CURAND_RNG_QUASI_SOBOL32, host)
    curand.curandSetQuasiRandomGeneratorDimensions(handle, 3)
    out = np.empty((3, 4096), np.uint32)  # one dimension after the other
    fill(out, host, lambda address: curand.curandGenerate(handle, address, out.size))
    curand.curandDestroyGenerator(handle)
    print(f"  Sobol's sequence in three dimensions, third point: {[float(x) for x in out[:, 2] / 2**32]}")
    return int((out != sobol(out.shape[1])).sum())


def sobol(points: int) -> np.ndarray[Any, Any]:
    """Sobol's sequence by definition, from the direction numbers of Joe and Kuo: 1, 1; x + 1; x^2 + x + 1 with 1, 3."""
    first = [1] * 32
    second, third = [1], [1, 3]
    for _ in range(31):
        second.append(2 * second[-1] ^ second[-1])
    for _ in range(30):
        third.append(2 * third[-1] ^ 4 * third[-2] ^ third[-2])
    directions = np.array([[m << (31 - i) for i, m in enumerate(each)] for each in (first, second, third)], np.uint32)
    sequence = np.zeros((3, points), np.uint32)
    for number in range(1, points):
        lowest = (number & -number).bit_length() - 1  # the bit in which two neighbours in Gray code differ
        sequence[:, number] = sequence[:, number - 1] ^ directions[:, lowest]
    return sequence


def mistake(host: bool) -> CurandError | None:
    """The error of a checked call with an unsupported number of dimensions, for which `unchecked` returns a status."""
    handle = generator(curand.curandRngType_t.CURAND_RNG_QUASI_SOBOL32, host)
    dimensions = curand.curandSetQuasiRandomGeneratorDimensions
    status = dimensions.unchecked(handle, 0)
    print(f"  unchecked returns {status}, {curand.curandStatus_t(status).name}")
    try:
        dimensions(handle, 0)
    except CurandError as error:
        print(f"  {type(error).__name__}: {error}")
        return error
    finally:
        curand.curandDestroyGenerator(handle)
    return None


def main() -> int:
    """Generate on the device; 1 if the numbers are wrong or the invalid call raises no error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="host", help="host (default), or cuda:0: generate on the first GPU")
    host = parser.parse_args().device == "host"
    print(f"cuRAND on {'the host' if host else 'the GPU'}")
    off, different, error = normal_numbers(host), sobol_numbers(host), mistake(host)
    print(f"largest error of a moment: {off:.1f} standard errors; Sobol: {different} of 12288 numbers differ")
    return 0 if off < 5 and different == 0 and error is not None else 1


if __name__ == "__main__":
    sys.exit(main())
