"""The pointers that cuBLASLt's operation descriptor holds: bias, aux, scale factors and amax."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudabind.sys import cublasLt as lt
from dispatch.device.tensor import Tensor
from dispatch.libraries.cublaslt.descriptors import Desc
from dispatch.ops.matmul.arguments import AUX, BGRAD, BIAS, FIRST_FACTOR
from dispatch.ops.matmul.scales import FACTORS_AND_AMAX

if TYPE_CHECKING:
    from dispatch.ops.matmul.lower import Lowered
    from dispatch.ops.matmul.request import MatmulRequest

__all__ = ["Vector", "vectors_of"]

POINTERS = {
    "a": Desc.CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
    "b": Desc.CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
    "c": Desc.CUBLASLT_MATMUL_DESC_C_SCALE_POINTER,
    "d": Desc.CUBLASLT_MATMUL_DESC_D_SCALE_POINTER,
    "aux": Desc.CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_SCALE_POINTER,
    "amax_d": Desc.CUBLASLT_MATMUL_DESC_AMAX_D_POINTER,
    "amax_aux": Desc.CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_AMAX_POINTER,
}
# A pointer of the operation descriptor: its attribute, the index of its argument, and whether that is a number.
Vector = tuple[lt.cublasLtMatmulDescAttributes_t, int, bool]


def vectors_of(request: MatmulRequest, lowered: Lowered) -> list[Vector]:
    """The pointers that the operation descriptor of a request holds."""
    vectors = []
    problem = lowered.problem
    if problem.bias_dtype >= 0:
        index = BIAS if request.plain_epilogue.adds_bias else BGRAD
        vectors.append((Desc.CUBLASLT_MATMUL_DESC_BIAS_POINTER, index, False))
    if problem.aux_ld:
        vectors.append((Desc.CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, AUX, False))
    exchanged = {"a": "b", "b": "a"} if lowered.exchanged else {}
    for index, name in enumerate(FACTORS_AND_AMAX, FIRST_FACTOR):
        factor = getattr(request.scales, name)
        if factor is not None and not (lowered.empty_k and name in "ab"):
            vectors.append((POINTERS[exchanged.get(name, name)], index, not isinstance(factor, Tensor)))
    return vectors
