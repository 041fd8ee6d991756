"""How cuTENSOR computes, in NumPy: what it takes, and what it rounds on the way. The stand-in of the library has it."""

import ctypes

import ml_dtypes
import numpy as np

DTYPES = {
    0: np.float32,
    1: np.float64,
    2: np.float16,
    4: np.complex64,
    5: np.complex128,
    14: ml_dtypes.bfloat16,
}
HALVES = (2, 14)
COMPLEX = (4, 5)
# What https://docs.nvidia.com/cuda/cutensor/latest/api/cutensor.html lists: dtypes of the operands, compute types.
R16, B16, R32, R64, C32, C64 = 2, 14, 0, 1, 4, 5
SUMS = {
    (R16,) * 3: ("32F",),
    (B16,) * 3: ("32F",),
    (R64,) * 3: ("64F", "32F", "8XINT8"),
    (R32,) * 3: ("32F", "TF32", "3XTF32", "16BF", "16F", "9X16BF", "4X16F"),
    (C32,) * 3: ("32F", "TF32", "3XTF32", "9X16BF", "4X16F"),
    (C64,) * 3: ("64F", "32F", "8XINT8"),
    (R64, C64, C64): ("64F",),
    (C64, R64, C64): ("64F",),
}
ALIKE = {R16: ("16F", "32F"), B16: ("16BF", "32F"), R32: ("32F",), R64: ("64F",), C32: ("32F",), C64: ("64F",)}
MIXED = {(R32, R16): ("32F",), (R64, R32): ("64F",), (C64, C32): ("64F",)}
TURNED = {(R16, R32): ("32F",), (R32, R64): ("64F",), (C32, C64): ("64F",)}
LISTED = {
    "Contraction": lambda kinds: SUMS.get((*kinds[:2], kinds[-1]), ()),
    "ContractionTrinary": lambda kinds: SUMS.get(kinds[:3], ()) if len(set(kinds)) == 1 else (),
    "Reduction": lambda kinds: ALIKE[kinds[0]] if len(set(kinds)) == 1 else (),
    "Permutation": lambda kinds: ALIKE[kinds[0]] if kinds[0] == kinds[1] else {**MIXED, **TURNED}.get(kinds, ()),
    "ElementwiseBinary": lambda kinds: ALIKE[kinds[0]] if kinds[0] == kinds[1] else MIXED.get(kinds[:2], ()),
    "ElementwiseTrinary": lambda kinds: (
        ALIKE[kinds[0]] if len(set(kinds)) == 1 else MIXED.get(kinds[1:3], ()) if kinds[0] == kinds[1] else ()
    ),
}
INPUTS = {
    "Contraction": 3,
    "ContractionTrinary": 4,
    "Reduction": 2,
    "Permutation": 1,
    "ElementwiseBinary": 2,
    "ElementwiseTrinary": 3,
}


def strided(address, dtype, shape, strides):
    """An array over memory; strides in elements, none below 0."""
    size = np.dtype(dtype).itemsize
    reach = (1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))) * size
    flat = np.frombuffer((ctypes.c_char * reach).from_address(address), np.uint8)
    return np.ndarray(shape, dtype, flat, 0, tuple(stride * size for stride in strides))


def einsum(terms, output):
    """A sum of products of arrays with their modes, which are any numbers."""
    known = {mode: number for number, mode in enumerate(dict.fromkeys(m for own, _ in terms for m in own))}
    given = [part for own, values in terms for part in (values, [known[mode] for mode in own])]
    return np.einsum(*given, [known[mode] for mode in output])


def sum_in_parts(tensor, values, own, output):
    """A sum of f16 or bf16 in f32 where it is along the smallest stride: of two parts that are rounded to the dtype."""
    fastest = min(zip(tensor.steps, own, strict=True), default=(0, None))[1]
    if fastest is None or fastest in output:
        return einsum([(own, values)], output)
    lost = tuple(mode for mode in own if mode not in output)
    lines = einsum([(own, values)], (*output, *lost))
    lines = lines.reshape(*(values.shape[own.index(mode)] for mode in output), -1)
    return sum(rounded(part.sum(-1), DTYPES[tensor.dtype]) for part in np.array_split(lines, 2, axis=-1))


def rounded(values, dtype):
    """Numbers as a dtype has them; None has them all."""
    values = np.asarray(values)
    return values if dtype is None else values.astype(dtype).astype(values.dtype)
