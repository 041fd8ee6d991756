"""The op families: where each op is defined, and where its rows are.

A new family needs a line here, and one for type checkers in dispatch/__init__.py. A small family is one file and its
cases. A large one is a folder, whose files have the same names in all families: request, reference, rules, the
libraries, cases, mutations. `dispatch` exports the names in `__all__` of every family, and imports a family when one of
its names is first used.
"""

from __future__ import annotations

# fmt: off
# Family: the files of its rows in dispatch/table, and its ops.
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "matmul":         ("cublaslt cutlass cublas_gemm", ("matmul",)),
    "grouped_matmul": ("cutlass cublaslt_grouped cublas_grouped", ("grouped_matmul",)),
    "conv":           ("cudnn_graph cutlass", ("conv_fwd", "conv_bwd_data", "conv_bwd_filter")),
    "sdpa":           ("cudnn_graph",         ("sdpa_fwd", "sdpa_bwd")),
    "norm":           ("cudnn_graph",         ("norm_fwd", "norm_bwd")),
    "graph":          ("cudnn_graph",         ("cudnn_graph",)),
    "softmax":        ("cudnn_call",          ("softmax", "softmax_bwd")),
    "activation":     ("cudnn_call",          ("activation", "activation_bwd")),
    "pooling":        ("cudnn_call",          ("pooling", "pooling_bwd")),
    "reduction":      ("cudnn_call own",      ("reduce",)),
    "dropout":        ("cudnn_call",          ("dropout_states", "dropout", "dropout_bwd")),
    "rnn":            ("cudnn_call",          ("rnn", "rnn_bwd_data", "rnn_bwd_weights")),
    "local_norm":     ("cudnn_call",          ("lrn", "lrn_bwd", "divisive_norm", "divisive_norm_bwd")),
    "ctc":            ("cudnn_call",          ("ctc_loss",)),
    "rope":           ("own",                 ("rope",)),
    "attention_merge": ("own",                ("attention_merge",)),
    "gated":          ("own",                 ("gated_activation", "gated_activation_bwd")),
    "fft":            ("cufft own_fft",       ("dft", "callback_dft", "half_dft", "dct", "dst", "roll")),
    "contraction":    ("contract_cublaslt cutensor contract_permuted cutensor_block_sparse einsum", (
                                               "contract", "contract_trinary", "contract_block_sparse",
                                               "reduce_modes", "permute",
                                               "elementwise_binary", "elementwise_trinary", "einsum")),
    "blas":           ("own_blas cublas",     ("symm", "hemm", "syrk", "herk", "syr2k", "her2k", "syrkx", "herkx",
                                               "trmm", "trsm", "geam", "dgmm", "gemv", "gbmv", "symv", "hemv",
                                               "sbmv", "hbmv", "spmv", "hpmv", "trmv", "trsv", "tbmv", "tbsv",
                                               "tpmv", "tpsv", "ger", "geru", "gerc", "syr", "her", "syr2", "her2",
                                               "spr", "hpr", "spr2", "hpr2", "axpy", "scal", "asum", "nrm2",
                                               "iamax", "iamin", "dot", "dotu", "dotc", "copy", "swap", "rot",
                                               "rotg", "rotm", "rotmg")),
    "linalg":         ("own_linalg cublas_batched cusolver", (
        "cholesky", "cho_solve", "lu_factor", "lu_solve", "solve", "qr", "eigh", "generalized_eigh", "svd",
        "eig", "randomized_svd", "ldl", "ldl_solve", "qr_multiply", "orgqr", "ormqr",
        "inv", "det", "slogdet", "matrix_norm", "matrix_rank", "pinv", "polar", "lstsq", "expm",
        "refined_solve", "refined_lstsq",
    )),
    "sparse":         ("own_sparse cusparse own_krylov cudss cusolver_sp", (
        "sparse_mv", "spmm", "sddmm", "spsv", "spsm", "spgemm", "spgemm_nnz", "sparse_to_dense", "csr2csc",
        "spmm_batched", "dense_nnz", "dense_to_sparse", "coo2csr", "csr2coo", "sparse_gather", "sparse_scatter",
        "sparse_axpby", "spvv", "gtsv", "sell_mv", "blocked_ell_mm", "sparse_sort", "prune_nnz", "prune_to_csr", "gpsv",
        "sparse_check", "cg", "bicgstab", "gmres", "minres", "spsolve", "ilu0", "ic0",
        "spsolve_batched", "sparse_rot", "spmm_op", "spmv_op", "block_jacobi", "sddmm_batched",
        "csr2bsr_nnz", "csr2bsr", "bsr2csr",
    )),
    "structured":     ("cusparselt",          ("prune_2_4", "check_2_4", "compress_2_4", "matmul_2_4")),
    "collective":     ("nccl",                ("all_reduce", "broadcast", "reduce_to", "all_gather", "reduce_scatter",
                                               "all_to_all", "gather", "scatter", "send", "recv", "sendrecv",
                                               "barrier")),
    "random":         ("own_random curand",   ("random_bits", "random_uniform", "random_normal", "random_lognormal",
                                               "random_exponential", "random_poisson", "random_integers",
                                               "random_gamma", "random_beta", "random_binomial",
                                               "random_truncated_normal", "random_permutation", "random_choice",
                                               "random_multinomial")),
}
# Files with rows for only some of the ops of a family, and these ops.
ONLY = {
    "own_blas":       ("axpy", "nrm2", "symv", "hemv"),
    "cufft":          ("dft", "callback_dft", "half_dft", "dct", "dst"),
    "contract_cublaslt": ("contract",),
    "contract_permuted": ("contract",),
    "cutensor":       ("contract", "contract_trinary", "reduce_modes", "permute", "elementwise_binary",
                       "elementwise_trinary"),
    "cutensor_block_sparse": ("contract_block_sparse",),
    "einsum":         ("einsum",),
    "own_fft":        ("roll",),
    "own_sparse":     ("sparse_check", "dense_nnz", "dense_to_sparse", "sddmm", "sparse_mv", "block_jacobi",
                       "sddmm_batched", "csr2bsr_nnz", "csr2bsr", "bsr2csr", "sparse_to_dense", "spmm_op", "spmv_op",
                       "spmm", "spmm_batched"),
    "cudss":          ("spsolve", "spsolve_batched"),
    "cusolver_sp":    ("spsolve",),
    "own_krylov":     ("cg", "bicgstab", "gmres", "minres"),
    "cusparse":       ("sparse_mv", "spmm", "sddmm", "spsv", "spsm", "spgemm", "spgemm_nnz", "sparse_to_dense",
                       "csr2csc", "coo2csr", "csr2coo",
                       "sparse_gather", "sparse_scatter", "sparse_axpby", "spvv", "gtsv", "sell_mv",
                       "blocked_ell_mm", "sparse_sort", "prune_nnz", "prune_to_csr", "gpsv", "ilu0", "ic0",
                       "spmm_batched", "sparse_rot", "spmm_op", "spmv_op"),
    "own_linalg":     ("cholesky", "cho_solve", "lu_factor", "lu_solve", "solve", "inv"),
    "curand":         ("random_bits", "random_uniform", "random_normal", "random_lognormal", "random_poisson"),
    "cublas_batched": ("cho_solve", "lu_factor", "lu_solve", "solve", "qr", "inv", "lstsq", "expm"),
}
# fmt: on
