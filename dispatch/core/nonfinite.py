"""What rows do with NaN and infinities: one statement for each op, and separate ones for dtypes that differ.

The table's files add it to their rows with `stated`; `table` and `explain` show it. The tests of non-finite input check
every row against its statement, on the host and on a GPU. If all GPUs behave the same, so does the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.errors import BadRow
from dispatch.keys import F64, FP8, HALF, Epilogue

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dispatch.core.row import Row

__all__ = ["ENGINE", "IEEE", "NONE", "SPREAD", "TO_NAN", "stated"]

IEEE = "follow IEEE 754"
ENGINE = "affect only the results that read them; which value results depends on the engine"
NONE = "integers have none"

SATURATED = f"{IEEE}; an infinite result is the largest number"
MASK = f"{IEEE}; the bit of NaN in a mask of ReLU depends on the kernel, as does NaN times an alpha of 0"
UNREAD = (
    "elements after a sequence's end are not read, nor are the state's weights in a direction's first step without hx"
)
TO_NAN = "an infinity may become NaN"
UNSCALED = f"{IEEE}; an operand whose factor is 0 is not read"
FACTOR_0 = "the added operand is not read where beta is 0; NaN times an alpha of 0 depends on the library"
SPREAD = "affect at least the results that read them; an infinity may become NaN, as in infinity minus infinity"
BESIDE = "zeros outside of a triangle or band, and a factor of 0, may be multiplied or skipped"
OF_BAND = f"{SPREAD}; {BESIDE}"
OTHER_TRIANGLE = f"{SPREAD}; not read in the other triangle; {BESIDE}"
TOO_LARGE = "none is read, because parameters are finite; a result too large for the dtype is infinite"
OPERATORS = "follow the operators, of which comparisons may ignore NaN"
LOWEST = f"{IEEE}; MAX of only -inf is the lowest finite number"

RELU_GRADIENT = "the gradient of an element that ReLU sets to 0 is 0, whatever it was"
FAILED_IS_NAN = f"{SPREAD}; with a status above 0 the whole matrix is NaN"

# fmt: off
STATEMENTS = {
    "matmul":          MASK,
    "grouped_matmul":  IEEE,
    "conv_fwd":        f"{ENGINE}: 0 for -inf (f16); 0 times infinity at the padding may give NaN",
    "conv_bwd_data":   f"{ENGINE}: 0 times infinity at the padding may give NaN",
    "conv_bwd_filter": f"{ENGINE}: NaN for infinity (f32), or for 0 times infinity at the padding",
    "sdpa_fwd":        f"{IEEE}; 0 where a query attends to no key; masked elements of V may be read",
    "sdpa_bwd":        f"{ENGINE}: an infinite O or dO gives infinity or NaN",
    "norm_fwd":        f"{IEEE}; the inverse variance of infinity is NaN or 0",
    "norm_bwd":        f"{IEEE}; {TO_NAN}",
    "cudnn_graph":     f"{ENGINE}: MAX, MIN and reductions with them ignore NaN",
    "softmax":         f"{IEEE}; a row of only -inf gives NaN or 0 (LOG: -inf)",
    "softmax_bwd":     IEEE,
    "activation":      IEEE,
    "activation_bwd":  f"{IEEE}; {RELU_GRADIENT}",
    "pooling":         LOWEST,
    "pooling_bwd":     f"{IEEE}; the gradient of MAX of only -inf goes to the first element or to none",
    "reduce":          f"{LOWEST}, MIN of inf the largest, and their index is undefined",
    "dropout_states":  NONE,
    "dropout":         f"{IEEE}; a dropped element is 0, whatever it was",
    "dropout_bwd":     f"{IEEE}; a dropped element is 0, whatever it was",
    "rnn":             f"{IEEE}; {UNREAD}",
    "rnn_bwd_data":    f"{IEEE}; {RELU_GRADIENT}; {TO_NAN}; {UNREAD}",
    "rnn_bwd_weights": f"{IEEE}; {TO_NAN}; {UNREAD}",
    **dict.fromkeys(("symm", "hemm", "syrk", "herk", "syr2k", "her2k", "syrkx", "herkx"), OTHER_TRIANGLE),
    **dict.fromkeys(("trmm", "trsm", "symv", "hemv", "sbmv", "hbmv", "spmv", "hpmv"), OTHER_TRIANGLE),
    **dict.fromkeys(("trmv", "trsv", "tbmv", "tbsv", "tpmv", "tpsv"), OTHER_TRIANGLE),
    **dict.fromkeys(("syr", "her", "syr2", "her2", "spr", "hpr", "spr2", "hpr2"), OTHER_TRIANGLE),
    **dict.fromkeys(("axpy", "scal"), f"{UNSCALED}, or NaN"),
    **dict.fromkeys(("asum", "nrm2", "dot", "dotu", "dotc"), f"{IEEE}; {TO_NAN}"),
    **dict.fromkeys(("iamax", "iamin"), NONE),
    **dict.fromkeys(("copy", "swap"), IEEE),
    **dict.fromkeys(("rot", "rotm"), f"{IEEE}; {TO_NAN}"),
    "rotg":            SPREAD,
    "rotmg":           f"{ENGINE}; the flag, and what depends on it, may ignore NaN",
    **dict.fromkeys(("gemv", "ger", "geru", "gerc"), f"{UNSCALED}; {TO_NAN}"),
    "gbmv":            OF_BAND,
    **dict.fromkeys(("contract", "contract_trinary", "reduce_modes"), f"{UNSCALED}; {TO_NAN}"),
    "contract_block_sparse": f"{UNSCALED}; {TO_NAN}; elements between blocks are not read",
    "permute":         UNSCALED,
    "einsum":          f"{IEEE}; {TO_NAN}",
    **dict.fromkeys(("elementwise_binary", "elementwise_trinary"), f"{UNSCALED}; MAX and MIN may ignore NaN"),
    "geam":            UNSCALED,
    "dgmm":            IEEE,
    "cholesky":        FAILED_IS_NAN,
    "cho_solve":       SPREAD,
    "lu_factor":       f"{SPREAD}; pivoting may ignore NaN",
    "lu_solve":        SPREAD,
    "solve":           FAILED_IS_NAN,
    "qr":              SPREAD,
    **dict.fromkeys(("qr_multiply", "orgqr", "ormqr"), SPREAD),
    "ldl":             "remain at least in the factors; pivoting may ignore NaN, and the status may report it",
    "ldl_solve":       SPREAD,
    "eigh":            FAILED_IS_NAN,
    **dict.fromkeys(("refined_solve", "refined_lstsq"), FAILED_IS_NAN),
    **dict.fromkeys(("eig", "randomized_svd"), FAILED_IS_NAN),
    "generalized_eigh": FAILED_IS_NAN,
    "svd":             FAILED_IS_NAN,
    **dict.fromkeys(("inv", "pinv", "polar", "lstsq", "expm"), FAILED_IS_NAN),
    **dict.fromkeys(("det", "slogdet", "matrix_norm"), SPREAD),
    "matrix_rank":     NONE,  # a status says which matrices did not converge
    **dict.fromkeys(("dft", "half_dft", "dct", "dst"), SPREAD),
    "callback_dft":    f"{SPREAD}, unless a callback hides them",
    **dict.fromkeys(("sparse_mv", "spmm", "spmm_batched"), f"{IEEE}; {FACTOR_0}; {TO_NAN}"),
    **dict.fromkeys(("sddmm", "sddmm_batched", "sparse_axpby"), f"{UNSCALED}; {TO_NAN}"),
    "spmm_op":         OPERATORS,
    "spmv_op":         f"{UNSCALED}; {TO_NAN}, and results of the epilogue",
    **dict.fromkeys(("sell_mv", "blocked_ell_mm"), f"{UNSCALED}; {TO_NAN}"),
    **dict.fromkeys(("gtsv", "gpsv"), SPREAD),
    **dict.fromkeys(("ilu0", "ic0"), f"{SPREAD}; with a status above 0 all of them are NaN"),
    "block_jacobi":    f"{SPREAD}; the status names a block that contains one, and its whole inverse is NaN",
    **dict.fromkeys(("spsolve", "spsolve_batched"), f"{SPREAD}; with a status other than 0, x is undefined"),
    **dict.fromkeys(("cg", "bicgstab", "gmres", "minres"), f"{SPREAD}; with a status of -2 all of x is NaN"),
    **dict.fromkeys(("spsv", "spsm"), f"{SPREAD}; the other triangle is not read"),
    "spgemm":          f"{IEEE}; {TO_NAN}",
    **dict.fromkeys(("sparse_to_dense", "csr2csc", "sparse_sort", "sparse_gather", "sparse_scatter"), IEEE),
    **dict.fromkeys(("csr2bsr", "bsr2csr"), IEEE),
    **dict.fromkeys(("spvv", "sparse_rot"), f"{IEEE}; {TO_NAN}"),
    "dense_to_sparse": "are treated like other elements",
    "prune_to_csr":    "infinities are kept, because they exceed any threshold; NaN is dropped",
    **dict.fromkeys(("spgemm_nnz", "sparse_check", "dense_nnz", "prune_nnz", "coo2csr", "csr2coo"), NONE),
    "csr2bsr_nnz":     NONE,
    "prune_2_4":       f"{ENGINE}: the choice of the elements that are kept may ignore NaN",
    "check_2_4":       NONE,
    "compress_2_4":    NONE,
    "matmul_2_4":      f"{ENGINE}: those of B are not multiplied by pruned elements",
    **dict.fromkeys(("all_reduce", "reduce_to", "reduce_scatter"), f"{IEEE}; MAX and MIN may ignore NaN"),
    **dict.fromkeys(("broadcast", "all_gather", "all_to_all", "gather", "scatter", "send", "recv", "sendrecv"), IEEE),
    "barrier":         NONE,
    "ctc_loss":        f"{IEEE}; a logit of -inf has no gradient; the gradient of an infinite loss is undefined",
    "rope":            IEEE,
    "attention_merge": f"{IEEE}; a part whose statistic is -inf is not read",
    "gated_activation":     IEEE,
    "gated_activation_bwd": f"{IEEE}; {RELU_GRADIENT}",
    **dict.fromkeys(("random_bits", "random_poisson", "random_integers", "random_binomial"), NONE),
    **dict.fromkeys(("random_permutation", "random_choice", "random_multinomial"), NONE),
    **dict.fromkeys(("random_gamma", "random_beta", "random_truncated_normal"), TOO_LARGE),
    **dict.fromkeys(("random_uniform", "random_normal", "random_lognormal", "random_exponential"), TOO_LARGE),
}
# fmt: on
# CUTLASS's rows of ops that other libraries also have.
OF_CUTLASS = {"matmul": IEEE, "conv_fwd": ENGINE, "conv_bwd_data": ENGINE, "conv_bwd_filter": ENGINE}


def stated(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Rows with their statements about NaN and infinities; BadRow for an op that has no statement."""
    listed = tuple(rows)
    for row in listed:
        # The rows are new and not shared yet; copying all of them would cost more than making them.
        object.__setattr__(row, "nonfinite", _statement(row))
    return listed


def _statement(row: Row) -> str:
    """What a row does, by its op and its result's dtype."""
    if row.nonfinite:
        return row.nonfinite
    if row.op not in STATEMENTS:
        raise BadRow(f"{row.name} does not say what it does with NaN and infinities: dispatch/core/nonfinite.py")
    result = row.dtypes[-1]
    if result.numpy.kind in "iu":
        return NONE
    if result in FP8 and row.op != "matmul_2_4":
        return SATURATED
    if row.op == "matmul" and Epilogue.RELU_AUX not in row.epilogues:
        return IEEE
    if row.op == "softmax" and result is F64:
        return IEEE
    if row.op == "rnn" and result in HALF:  # products are rounded one by one, so a state may be 0
        return f"{IEEE}; {TO_NAN}; {UNREAD}"
    return OF_CUTLASS[row.op] if row.op in OF_CUTLASS and row.of("cutlass") else STATEMENTS[row.op]
