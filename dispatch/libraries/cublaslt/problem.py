"""A product in cuBLASLt's terms, without addresses: matrices, epilogue, scales and alignments."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Matrix", "Problem"]


class Matrix(NamedTuple):
    """One cuBLASLt matrix layout: column-major, in elements."""

    dtype: Any  # the number of a cudaDataType_t
    rows: int
    cols: int
    ld: int
    batch_stride: int = 0
    alignment: int = 256


class Problem(NamedTuple):
    """A product without addresses: exactly what the heuristic's answer depends on.

    `a` … `d` are cuBLASLt's operands, after the exchange; `op_a` and `op_b` say whether each is transposed.
    """

    a: Matrix
    b: Matrix
    c: Matrix
    d: Matrix
    op_a: bool
    op_b: bool
    batch: int
    compute: Any  # the number of a cublasComputeType_t
    scale: Any  # the number of a cudaDataType_t
    epilogue: int
    bias_dtype: int = -1
    bias_stride: int = 0
    aux_dtype: int = -1
    aux_ld: int = 0
    aux_stride: int = 0
    a_scale_mode: int = -1
    b_scale_mode: int = -1
    factors: tuple[str, ...] = ()  # of c, d, aux, amax_d, amax_aux: those that are given
    fast_accum: bool = False
    device_scalars: bool = False
    adds_c: bool = False  # whether beta is not 0: cuBLASLt learns it only at the call, but then launches other kernels
    reduced_precision: bool = False  # whether sums and epilogues may round to D's dtype on the way
    bias_alignment: int = 256  # of bias or bias gradient, at every product of a batch
    aux_alignment: int = 256

    def as_key(self) -> str:
        """A text that is equal for equal problems, for the cache on disk."""
        return repr(self)
