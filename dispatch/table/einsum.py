"""The rows of einsum, whose steps are requests that the table has rows for.

A network of small tensors is one launch of our own kernel, if that is estimated to be faster than a call for each step.
If every step is a matrix product without copies of its operands, cuBLASLt runs them all, and no other library is
needed. Otherwise each step uses the first row of cuBLASLt or cuTENSOR that takes it. The last column names the GPUs
on which a row's cases have passed; it is empty where none has run them yet.
"""

# fmt: off
from __future__ import annotations

from dispatch.core.layouts import aligned
from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import BF16, C64, C128, F16, F32, F64, Arch
from dispatch.ops.contraction import network_einsum, sequence_einsum
from dispatch.ops.contraction.einsum_reference import numpy_einsum
from dispatch.ops.contraction.einsum_rules import computes, gapless_diagonals, only_products, strides_along_modes
from dispatch.ops.contraction.network_rules import faster_than_calls, few_elements, usual_precision
from dispatch.ops.contraction.rules import nonnegative_strides
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

SM75, SM80 = Arch(75), Arch(80)
V2, V12 = (2, 2), (12, 9)
RULES = (nonnegative_strides, strides_along_modes, computes, gapless_diagonals)
PRODUCTS = (*RULES, only_products)
NETWORK = (aligned, usual_precision, few_elements, faster_than_calls)
H100 = ("H100",)
CUTENSOR = ("cutensor", "cutensorContract", sequence_einsum, H100)
CUBLASLT = ("cublasLt", "cublasLtMatmul", sequence_einsum, H100)
OWN = ("own", "contract_network", network_einsum, ("H200",))

OWN_ROWS = (
#       op        operands, result
    Row("einsum", (F16, F16),    None, NETWORK, SM75, None, (), *OWN, variant="network"),
    Row("einsum", (BF16, BF16),  None, NETWORK, SM80, None, (), *OWN, variant="network"),
    Row("einsum", (F32, F32),    None, NETWORK, SM75, None, (), *OWN, variant="network"),
    Row("einsum", (F64, F64),    None, NETWORK, SM75, None, (), *OWN, variant="network"),
    Row("einsum", (C64, C64),    None, NETWORK, SM75, None, (), *OWN, variant="network"),
    Row("einsum", (C128, C128),  None, NETWORK, SM75, None, (), *OWN, variant="network"),
)
GPU_ROWS = (
#       op        operands, result
    Row("einsum", (F16, F16),    None, PRODUCTS, SM80, None, V12, *CUBLASLT, variant="products"),
    Row("einsum", (BF16, BF16),  None, PRODUCTS, SM80, None, V12, *CUBLASLT, variant="products"),
    Row("einsum", (F32, F32),    None, PRODUCTS, SM80, None, V12, *CUBLASLT, variant="products"),
    Row("einsum", (F64, F64),    None, PRODUCTS, SM80, None, V12, *CUBLASLT, variant="products"),
    Row("einsum", (C64, C64),    None, PRODUCTS, SM80, None, V12, *CUBLASLT, variant="products"),
    Row("einsum", (C128, C128),  None, PRODUCTS, SM80, None, V12, *CUBLASLT, variant="products"),
    Row("einsum", (F16, F16),    None, RULES, SM75, None, V2,  *CUTENSOR),
    Row("einsum", (BF16, BF16),  None, RULES, SM80, None, V2,  *CUTENSOR),
    Row("einsum", (F32, F32),    None, RULES, SM75, None, V2,  *CUTENSOR),
    Row("einsum", (F64, F64),    None, RULES, SM75, None, V2,  *CUTENSOR),
    Row("einsum", (C64, C64),    None, RULES, SM75, None, V2,  *CUTENSOR),
    Row("einsum", (C128, C128),  None, RULES, SM75, None, V2,  *CUTENSOR),
)
# fmt: on
ON_HOST = tuple(on_host(row, numpy_einsum, function="einsum", stands_for=row.library) for row in (*OWN_ROWS, *GPU_ROWS))
ROWS = stated((*OWN_ROWS, *GPU_ROWS, *ON_HOST))
