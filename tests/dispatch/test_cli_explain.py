"""`explain` of every op: its flags come from the request class, and what they leave open is filled in."""

import json
import shlex
from typing import Any

import pytest

import dispatch as dp
from dispatch.__main__ import main

LSTM = "--network mode=LSTM,input_size=64,hidden_size=128"
IMAGES = "--shape 8x64x32x32 --shape 64x64x3x3 --pad 1"
GRADIENTS = "--shape 8x64x32x32 --shape 8x64x32x32 --pad 1 --w-extents 3,3"
# fmt: off
# ruff: noqa: E501, RUF001
MATMUL = {  # what the name of the row says behind the dtypes of a and b
    "f32 --arch sm_80":                                                       "→f32 32F sm_80",
    "f32 --arch sm_90 --compute 32F_FAST_TF32":                               "→f32 32F_FAST_TF32 sm_80",
    "f32 --arch host --epilogue bgrada":                                      "→f32 32F host",
    "bf16 --out-dtype f32 --arch sm_90 --epilogue DGELU_BGRAD":               "→f32 32F sm_80",
    "f8e4m3 --b f8e5m2 --out-dtype f8e5m2 --arch sm_90":                      "+bf16→f8e5m2 32F sm_90",
    "f8e4m3 --out-dtype f8e4m3 --c f16 --arch sm_90":                         "+f16→f8e4m3 32F sm_90",
    "f8e4m3 --out-dtype f8e4m3 --arch sm_90 --epilogue GELU_AUX_BIAS":        "+bf16→f8e4m3 32F sm_90",
    "f8e4m3 --arch sm_90 --scales a_mode=OUTER_VEC_32F,b_mode=OUTER_VEC_32F": "→bf16 32F OUTER_VEC_32F sm_90",
    "f8e4m3 --arch sm_90 --scales a_mode=VEC128_32F,b_mode=blk128x128_32f":   "→bf16 32F VEC128_32F·BLK128x128_32F sm_90",
    "f4e2m1 --arch sm_100 --scales a_mode=VEC16_UE4M3,b_mode=VEC16_UE4M3":    "→bf16 32F VEC16_UE4M3 sm_100",
    "i8 --arch sm_80 --shape 8x16 --shape 16x12":                             "→i32 32I sm_80",
}
PATTERN = "--rows 5:i32 --columns 9:i32 --form format=csr,shape=4x6"
SQUARE = "--rows 5:i32 --columns 9:i32 --form format=csr,shape=4x4"
SECOND = "--b-values 7:f64 --b-rows 5:i32 --b-columns 7:i32 --b-form format=csr,shape=4x3"
EXPLAINED = {  # what the name of the row says, and what the request does; all for sm_90
    "contract --spec ik,kj->ij --dtype f32 --shape 8x64 --shape 64x16": ("f32×f32→f32 32F product sm_80 cublasLt", "b f32[64, 16]"),
    "contract --spec ikl,ljk->ij --dtype f32 --shape 8x4x6 --shape 6x3x4 --compute 3xtf32": ("f32×f32→f32 32F_FAST_3XTF32 sm_80 cutensor", "compute=COMPUTE_32F_FAST_3XTF32"),
    "contract_trinary --spec ab,bc,cd->ad --dtype c128 --shape 4x4": ("c128×c128→c128 64F sm_75 cutensor", "c c128[4, 4]"),
    "reduce_modes --spec ab->b --dtype f16 --shape 8x64 --reduce MAX": ("f16→f16 32F sm_75 cutensor", "reduce=MAX"),
    "permute --spec abc->cab --dtype f32 --shape 8x64x3 --out-dtype f16": ("f32→f16 32F sm_75 cutensor", "'abc->cab'"),
    "elementwise_binary --spec ab->ab --dtype f64 --shape 8x64": ("f64→f64 64F sm_75 cutensor", "c f64[8, 64]"),
    "elementwise_trinary --spec ab,ab->ab --dtype c64 --shape 8x64": ("c64×c64→c64 32F sm_75 cutensor", "c c64[8, 64]"),
    "contract_block_sparse --spec ik,kj->ij --a 66:f32 --a-form sections=4x2;3x1,blocks=0x0;1x1 --b 67:f32 --b-form sections=3x1;3x1,blocks=0x0;0x1": ("f32×f32→f32 32F sm_75 cutensor", "a <BlockSparseForm 6x4, 2 of 4 blocks>"),
    "einsum --spec ij,jk,kl->il --dtype f32 --shape 8x64 --shape 64x16 --shape 16x2": ("f32→f32 network sm_75 own", "path (1,2) (0,1)"),
    "einsum --spec ij,jk,kl->li --dtype f32 --shape 8x64 --shape 64x16 --shape 16x2 --compute 3xtf32": ("f32→f32 sm_75 cutensor", "path (1,2) (0,1)"),
    "all_reduce --dtype bf16 --shape 8x64 --comm 4 --reduce avg": ("bf16→bf16 sm_80 nccl", "reduce=AVG"),
    "broadcast --dtype f32 --shape 8x64 --comm 4 --root 2": ("f32→f32 sm_75 nccl", "root=2"),
    "reduce_to --dtype f8e4m3 --shape 8 --comm 2": ("f8e4m3→f8e4m3 sm_90 nccl", "x f8e4m3[8]"),
    "all_gather --dtype f16 --shape 3x4 --comm 2 --counts 3,5": ("f16→f16 sm_75 nccl", "counts=(3, 5)"),
    "reduce_scatter --dtype f32 --shape 4x8 --comm 4": ("f32→f32 sm_75 nccl", "x f32[4, 8]"),
    "all_to_all --dtype f32 --shape 4x8 --comm 4": ("f32→f32 even sm_75 nccl", "x f32[4, 8]"),
    "all_to_all --dtype f32 --shape 3x8 --comm 2 --send-counts 1,2 --recv-counts 1,4": ("f32→f32 sm_75 nccl", "send_counts=(1, 2)"),
    "gather --dtype i32 --shape 4x8 --comm 4": ("i32→i32 sm_75 nccl", "x i32[4, 8]"),
    "scatter --dtype i32 --x 4x8 --comm 4": ("i32→i32 sm_75 nccl", "x i32[4, 8]"),
    "send --dtype f32 --shape 4x8 --comm 4 --peer 1": ("f32→f32 sm_75 nccl", "peer=1"),
    "recv --dtype f32 --out 4x8 --comm 4 --peer 1": ("f32→f32 sm_75 nccl", "out f32[4, 8]"),
    "sendrecv --dtype f32 --shape 4x8 --comm 4 --dest 1 --source 3": ("f32→f32 sm_75 nccl", "dest=1"),
    "barrier --comm 4": ("u8→u8 sm_75 nccl", "barrier("),
    f"conv_fwd --dtype f16 {IMAGES}": ("f16×f16→f16 32F sm_75 cudnn", "w f16[64, 64, 3, 3]"),
    f"conv_fwd --dtype f16 {IMAGES} --bias 64 --activation GELU_FWD": ("f16×f16→f16 32F sm_75 cudnn", "strides (65536, 1, 2048, 64)"),
    f"conv_fwd --dtype i8 --out-dtype f32 {IMAGES} --bias 64": ("i8×i8→f32 32I fused sm_80 cudnn", "bias f32[64]"),
    f"conv_bwd_data --dtype bf16 {IMAGES} --pad 0,1;1,0": ("bf16×bf16→bf16 32F sm_80 cudnn", "pad=((0, 1), (1, 0))"),
    f"conv_bwd_filter --dtype f32 {GRADIENTS}": ("f32×f32→f32 32F sm_75 cudnn", "w_extents=(3, 3)"),
    "sdpa_fwd --dtype bf16 --shape 2x8x128x64 --bias 1x1x128x128": ("bf16×bf16→bf16 32F sm_80 cudnn", "bias bf16[1, 1, 128, 128]"),
    "sdpa_fwd --dtype f16 --shape 2x8x128x64 --dropout 0.1 --seed 1:i64 --offset 1:i64": ("f16×f16→f16 32F sm_80 cudnn", "seed i64[1]"),
    "sdpa_bwd --dtype f16 --shape 2x8x128x64 --deterministic": ("f16×f16→f16 32F sm_80 cudnn", "stats f32[2, 8, 128, 1]"),
    "norm_fwd --dtype bf16 --shape 8x64x128": ("bf16→bf16 32F sm_80 cudnn", "scale f32[128]"),
    "norm_fwd --dtype bf16 --shape 8x64x16x16 --mode BATCH_NORM --bias 64": ("bf16→bf16 32F sm_80 cudnn", "running_var f32[64]"),
    "norm_fwd --dtype f16 --shape 8x64x16x16 --mode GROUP_NORM --groups 8 --training": ("f16→f16 32F groups sm_80 cudnn", "groups=8"),
    "norm_bwd --dtype f16 --shape 8x64x128": ("f16→f16 32F sm_80 cudnn", "inv_variance f32[8, 64, 1], mean f32[8, 64, 1]"),
    "norm_bwd --dtype f16 --shape 8x64x128 --mode RMS_NORM --no-bias": ("f16→f16 32F sm_80 cudnn", "bias=False"),
    "cudnn_graph --dtype f32 --shape 8x64x64 --shape 8x64x64 --draw 'RELU_FWD(matmul(x, y) * 2)'": ("→f32 32F sm_75 cudnn", "MATMUL > MUL > RELU_FWD"),
    "cudnn_graph --shape 8x64:f64 --compute-dtype f64": ("→f64 64F sm_75 cudnn", "IDENTITY"),
    "softmax --dtype bf16 --shape 64x128 --axis 0 --algorithm LOG": ("bf16→bf16 32F sm_80 cudnn", "axis=0, algorithm=LOG"),
    "softmax_bwd --dtype f16 --shape 64x128": ("f16→f16 32F sm_75 cudnn", "dy f16[64, 128]"),
    "activation --shape 64x128:f64:columns --mode TANH": ("f64→f64 64F sm_75 cudnn", "strides (1, 64), mode=TANH"),
    "activation_bwd --dtype f16 --shape 64x128 --mode ELU --coef 0.5": ("f16→f16 32F sm_75 cudnn", "coef=0.5"),
    "pooling --dtype i8 --shape 8x64x32x32 --window 2,2 --stride 2": ("i8→i8 sm_75 cudnn", "window=(2, 2)"),
    "pooling_bwd --dtype f16 --shape 8x64x32x32 --window 2": ("f16→f16 32F sm_75 cudnn", "dy f16[8, 64, 16, 16]"),
    "reduce --dtype f32 --shape 64x128 --axes 1": ("f32→f32 32F sums sm_80 cudnn", "axes=1"),
    "reduce --dtype f32 --shape 64x128 --reduce max --axes none": ("f32→f32 32F sm_75 cudnn", "reduce=MAX"),
    "random_bits --size 64,128 --out-dtype u64": ("u64→u64 sm_75 own", "seed=0"),
    "random_uniform --size 1000 --seed 7 --low=-1": ("f32→f32 sm_75 own", "low=-1"),
    "random_normal --size 1000 --out-dtype bf16": ("bf16→bf16 sm_80 own", "std=1"),
    "random_lognormal --size 1000 --bit-generator sobol32 --out-dtype f64": ("f64→f64 sm_75 curand", "bit_generator=SOBOL32"),
    "random_exponential --size 1000 --out-dtype f16": ("f16→f16 sm_75 own", "scale=1"),
    "random_poisson --size 1000 --lam 4": ("u32→u32 sm_75 own", "lam=4"),
    "random_integers --size 1000 --low=-5 --high 5 --out-dtype i8": ("i8→i8 sm_75 own", "high=5"),
    "random_gamma --size 1000 --shape-parameter 0.5": ("f32→f32 sm_75 own", "shape_parameter=0.5"),
    "random_beta --size 1000 --a 0.5 --out-dtype f64": ("f64→f64 sm_75 own", "a=0.5"),
    "random_binomial --size 1000 --n 10": ("i64→i64 sm_75 own", "n=10"),
    "random_truncated_normal --size 1000 --low 0": ("f32→f32 sm_75 own", "low=0"),
    "random_permutation --size 10 --n 1000": ("i64→i64 sm_75 own", "n=1000"),
    "random_choice --size 1000 --sums 5:f64": ("i64→i64 sm_75 own", "sums f64[5]"),
    "random_multinomial --size 1000 --pvals 5:f64 --n 7": ("i64→i64 sm_75 own", "pvals f64[5]"),
    f"sparse_mv --values 9:f32 {PATTERN} --x 6:f32": ("f32→f32 adjacent rows sm_75 own", "x f32[6]"),
    f"sparse_mv --values 9:bf16 {PATTERN} --x 6:bf16 --out 4:f32": ("bf16→f32 adjacent rows sm_80 own", "out f32[4]"),
    f"spmm --values 9:f64 {PATTERN} --b 6x3:f64:columns --alpha 2": ("f64→f64 adjacent rows sm_75 own", "b f64[6, 3]"),
    f"sddmm --values 9:c64 {PATTERN} --a 4x2:c64 --b 2x6:c64": ("c64→c64 any format sm_75 own", "b c64[2, 6]"),
    f"spsv --values 9:f32 {SQUARE} --x 4:f32 --uplo upper": ("f32→f32 sm_75 cusparse", "uplo=UPPER"),
    f"spsm --values 9:f32 {SQUARE} --b 4x2:f32 --diag unit": ("f32→f32 sm_75 cusparse", "diag=UNIT"),
    f"spgemm_nnz --values 9:f64 {SQUARE} {SECOND}": ("f64→i64 sm_75 cusparse", "b_values f64[7]"),
    f"spgemm --values 9:f64 {SQUARE} {SECOND} --nnz 11": ("f64→f64 sm_75 cusparse", "nnz=11"),
    f"sparse_to_dense --values 9:f16 {PATTERN}": ("f16→f16 sm_75 cusparse", "values f16[9]"),
    f"spsolve --values 9:f64 {SQUARE} --b 4:f64 --assume-a pos": ("f64→f64 sm_75 cudss", "assume_a=POS"),
    f"spsolve_batched --values 2x9:f64 {SQUARE} --b 2x4:f64 --refinements 2": ("f64→f64 sm_75 cudss", "refinements=2"),
    f"cg --values 9:f64 {SQUARE} --b 4:f64 --preconditioner jacobi": ("f64→f64 sm_75 own", "preconditioner=JACOBI"),
    f"bicgstab --values 9:f64 {SQUARE} --b 4:f64 --rtol 0.5": ("f64→f64 sm_75 own", "rtol=0.5"),
    f"gmres --values 9:f64 {SQUARE} --b 4:f64 --restart 3": ("f64→f64 sm_75 own", "restart=3"),
    f"minres --values 9:f64 {SQUARE} --b 4:f64 --maxiter 7": ("f64→f64 sm_75 own", "maxiter=7"),
    f"csr2csc --values 9:f32 {PATTERN}": ("f32→f32 sm_75 cusparse", "rows i32[5]"),
    "gtsv --dl 9:f64 --d 9:f64 --du 9:f64 --b 9x2:f64:columns": ("f64→f64 sm_75 cusparse", "pivoting=True"),
    "gpsv" + "".join(f" --{name} 9x4:f64" for name in ("ds", "dl", "d", "du", "dw", "b")): ("f64→f64 sm_75 cusparse", "dw f64[9, 4]"),
    "sparse_gather --y 9:f16 --indices 4:i64": ("f16→f16 sm_75 cusparse", "indices i64[4]"),
    "sparse_scatter --values 4:f32 --indices 4:i32 --y 9:f32": ("f32→f32 sm_75 cusparse", "y f32[9]"),
    "sparse_axpby --values 4:f32 --indices 4:i32 --y 9:f32 --beta 2": ("f32→f32 sm_75 cusparse", "beta=2"),
    "sparse_rot --values 4:f16 --indices 4:i32 --y 9:f16 --c 0.6 --s 0.8": ("f16→f16 sm_75 cusparse", "c=0.6, s=0.8"),
    f"spmm_op --values 9:f32 {PATTERN} --b 6x3:f32 --semiring min_plus": ("f32→f32 one launch sm_75 own", "b f32[6, 3]"),
    f"spmv_op --values 9:f64 {PATTERN} --x 6:f64 --alpha 2": ("f64→f64 one launch sm_75 own", "epilogue=None"),
    "spvv --values 4:c64 --indices 4:i32 --y 9:c64 --conj": ("c64→c64 sm_75 cusparse", "conj=True"),
    "dense_nnz --a 4x6:f32": ("f32→i64 sm_75 own", "a f32[4, 6]"),
    "dense_to_sparse --a 4x6:bf16 --nnz 5 --format coo": ("bf16→bf16 sm_75 own", "format=COO"),
    "coo2csr --rows 9:i32 --m 4": ("i32→i32 sm_75 cusparse", "rows i32[9]"),
    "csr2coo --rows 5:i32 --nnz 9": ("i32→i32 sm_75 cusparse", "nnz=9"),
    f"sparse_check --values 9:f32 {PATTERN}": ("f32→i64 sm_75 own", "columns i32[9]"),
    "spmm_batched --values 2x9:f64 --rows 5:i32 --columns 2x9:i32 --form format=csr,shape=4x6 --b 2x6x3:f64": ("f64→f64 adjacent rows sm_75 own", "b f64[2, 6, 3]"),
    "spmm_batched --values 2x9:f64 --rows 2x9:i32 --columns 2x9:i32 --form format=coo,shape=4x6 --b 2x6x3:f64": ("f64→f64 COO sm_75 cusparse", "rows i32[2, 9]"),
    f"sddmm_batched --values 2x9:bf16 {PATTERN} --a 2x4x3:bf16 --b 3x6:bf16": ("bf16→bf16 sm_75 own", "a bf16[2, 4, 3]"),
    f"csr2bsr_nnz --values 9:f16 {PATTERN} --block 2,3": ("f16→i64 sm_75 own", "block=(2, 3)"),
    f"csr2bsr --values 9:f64 {PATTERN} --block 4,2 --nnzb 3": ("f64→f64 sm_75 own", "nnzb=3"),
    "bsr2csr --values 3x2x2:f32 --rows 3:i32 --columns 3:i32 --form format=bsr,shape=4x6,block=2x2": ("f32→f32 sm_75 own", "values f32[3, 2, 2]"),
    "sparse_to_dense --values 3x2x3:c64 --rows 3:i64 --columns 3:i32 --form format=bsr,shape=4x6,block=2x3": ("c64→c64 blocks sm_75 own", "values c64[3, 2, 3]"),
    f"block_jacobi --values 9:c64 {SQUARE} --block-size 3": ("c64→c64 sm_75 own", "block_size=3"),
    f"cg --values 9:f32 {SQUARE} --b 4:f32 --M 2x2x2:f32 --preconditioner block_jacobi": ("f32→f32 blocks sm_75 own", "M f32[2, 2, 2]"),
    f"ilu0 --values 9:f64 {SQUARE}": ("f64→f64 sm_75 cusparse", "columns i32[9]"),
    f"ic0 --values 9:c64 {SQUARE}": ("c64→c64 sm_75 cusparse", "columns i32[9]"),
    "prune_nnz --a 4x6:f32 --threshold 0.5": ("f32→i64 sm_75 cusparse", "threshold=0.5"),
    "prune_to_csr --a 4x6:f64 --percentage 50 --nnz 12": ("f64→f64 sm_75 cusparse", "percentage=50"),
    "sparse_sort --values 9:f32 --rows 9:i32 --columns 9:i32 --form format=coo,shape=4x6": ("f32→f32 sm_75 cusparse", "rows i32[9]"),
    "sell_mv --values 8:f32 --offsets 3:i32 --columns 8:i32 --x 6:f32 --m 6 --slice-size 4 --nnz 6": ("f32→f32 sm_75 cusparse", "slice_size=4"),
    "blocked_ell_mm --values 8x4:f16 --columns 4x2:i32 --b 8x16:f16": ("f16→f16 sm_75 cusparse", "columns i32[4, 2]"),
    "prune_2_4 --dtype f16 --shape 32x64 --algorithm tile": ("f16→f16 sm_80 cusparseLt", "algorithm=TILE"),
    "check_2_4 --dtype i8 --shape 32x64": ("i8→i32 sm_80 cusparseLt", "a i8[32, 64]"),
    "compress_2_4 --dtype f8e4m3 --shape 32x64": ("f8e4m3→u8 sm_89 cusparseLt", "a f8e4m3[32, 64]"),
    "matmul_2_4 --a 2304:u8 --form shape=32x64,dtype=f16 --b 64x16:f16 --bias 32:f16 --activation relu": ("f16×f16→f16 32F sm_80 cusparseLt", "bias f16[32]"),
    "dropout_states --seed 7": ("u8→u8 sm_75 cudnn", "seed=7"),
    "dropout --dtype f16 --shape 64x128": ("f16→f16 32F sm_75 cudnn", "states u8["),
    "dropout_bwd --dtype f16 --shape 64x128 --p 0.25": ("f16→f16 32F sm_75 cudnn", "reserve u8[1024], p=0.25"),
    f"rnn --dtype f16 {LSTM},layers=2 --shape 16x8x64": ("f16→f16 32F sm_75 cudnn", "weights f16[231424]"),
    f"rnn --dtype f16 {LSTM} --training --dropout 0.5 --hx f16": ("f16→f16 32F sm_75 cudnn", "hx f16[1, 8, 128], states u8["),
    f"rnn_bwd_data --dtype f64 {LSTM},bidirectional=true --cx 2x8x128": ("f64→f64 64F sm_75 cudnn", "y f64[16, 8, 256]"),
    f"rnn_bwd_weights --dtype f32 {LSTM},bias=SINGLE_INP_BIAS --compute 32F_FAST_TF32": ("f32→f32 32F_FAST_TF32 one bias sm_80 cudnn", "reserve u8["),
    "rope --dtype bf16 --shape 4x16x512x64 --k 4x8x512x64": ("bf16→bf16 32F sm_80 own", "cos bf16[1, 512, 64], sin bf16[1, 512, 64]"),
    "rope --dtype f16 --shape 4x16x512x64 --cos 4x512x32:f32 --interleaved": ("f16→f16 32F sm_75 own", "sin f32[4, 512, 32], interleaved=True"),
    "attention_merge --dtype bf16 --shape 4x16x512x64 --out-dtype bf16": ("bf16×bf16→bf16 32F sm_80 own", "b_stats f32[4, 16, 512, 1]"),
    "gated_activation --dtype bf16 --shape 512x2816 --mode gelu": ("bf16→bf16 32F sm_80 own", "up bf16[512, 2816], mode=GELU"),
    "gated_activation_bwd --dtype f64 --shape 64x128 --mode geglu": ("f64→f64 64F sm_75 own", "dy f64[64, 128], mode=GELU"),
    "dft --dtype f32 --shape 8x64 --kind r2c --axes 1": ("f32→c64 sm_75 cufft", "kind=R2C, s=None, axes=1"),
    "half_dft --dtype f16 --shape 8x64 --kind r2c --axes 1": ("f16→f16 sm_75 cufft", "kind=R2C, s=None, axes=1"),
    "callback_dft --dtype u8 --shape 8x64 --kind r2c --axes 1 --precision f32": ("f32→c64 sm_75 cufft", "load=None, store=None"),
    "roll --dtype bf16 --shape 8x64 --shift 3": ("bf16→bf16 sm_75 own", "shift=3, axis=None"),
    "ctc_loss --dtype f32 --shape 50x8x30 --max-label-length 10": ("f32→f32 32F sm_75 cudnn", "labels i32[80]"),
    "symm --dtype f64 --shape 64x64 --shape 64x32 --uplo upper": ("f64→f64 64F sm_75 cublas", "uplo=UPPER"),
    "hemm --dtype c64 --shape 32x32 --side right": ("c64→c64 32F sm_75 cublas", "side=RIGHT"),
    "syrk --dtype f32 --shape 64x128 --alpha 2": ("f32→f32 32F sm_75 cublas", "alpha=2"),
    "herk --dtype c128 --shape 64x128 --trans c": ("c128→c128 64F sm_75 cublas", "trans=C"),
    "syr2k --dtype f32 --shape 64x128": ("f32→f32 32F sm_75 cublas", "b f32[64, 128]"),
    "her2k --dtype c64 --shape 64x128:columns": ("c64→c64 32F sm_75 cublas", "strides (1, 64)"),
    "syrkx --dtype c64 --shape 64x128 --trans t": ("c64→c64 32F sm_75 cublas", "trans=T"),
    "herkx --dtype c128 --shape 64x128 --c 64x64 --beta 0.5": ("c128→c128 64F sm_75 cublas", "beta=0.5"),
    "trmm --dtype f32 --shape 64x64 --shape 64x16 --diag unit": ("f32→f32 32F sm_75 cublas", "diag=UNIT"),
    "trsm --dtype f64 --shape 8x64x64 --shape 8x64x16": ("f64→f64 64F sm_75 cublas", "b f64[8, 64, 16]"),
    "geam --dtype f32 --shape 64x32 --shape 32x64 --trans-b t": ("f32→f32 32F sm_75 cublas", "trans_b=T"),
    "dgmm --dtype f32 --shape 64x32 --shape 64": ("f32→f32 32F sm_75 cublas", "x f32[64]"),
    "axpy --dtype f32 --shape 64 --alpha 2": ("f32→f32 32F sm_75 cublas", "y f32[64]"),
    "scal --dtype c64 --shape 64 --alpha 0.5": ("c64→c64 32F sm_75 cublas", "alpha=0.5"),
    "asum --dtype c128 --shape 64": ("c128→f64 64F sm_75 cublas", "x c128[64]"),
    "nrm2 --dtype f32 --shape 64": ("f32→f32 32F sm_75 cublas", "x f32[64]"),
    "iamax --dtype f64 --shape 64": ("f64→i32 64F sm_75 cublas", "x f64[64]"),
    "iamin --dtype c64 --shape 64": ("c64→i32 32F sm_75 cublas", "x c64[64]"),
    "dot --dtype f32 --shape 64": ("f32→f32 32F sm_75 cublas", "y f32[64]"),
    "dotu --dtype c64 --shape 64": ("c64→c64 32F sm_75 cublas", "y c64[64]"),
    "dotc --dtype c128 --shape 64": ("c128→c128 64F sm_75 cublas", "y c128[64]"),
    "copy --dtype f64 --shape 64": ("f64→f64 64F sm_75 cublas", "x f64[64]"),
    "swap --dtype c64 --shape 64": ("c64→c64 32F sm_75 cublas", "y c64[64]"),
    "rot --dtype c64 --shape 64": ("c64→c64 32F sm_75 cublas", "c f32[]"),
    "rotg --dtype c128": ("c128→f64 64F sm_75 cublas", "b c128[]"),
    "rotm --dtype f32 --shape 64": ("f32→f32 32F sm_75 cublas", "param f32[5]"),
    "rotmg --dtype f32": ("f32→f32 32F sm_75 cublas", "d1 f32[]"),
    "gemv --dtype f32 --shape 64x32 --shape 32": ("f32→f32 32F sm_75 cublas", "x f32[32]"),
    "gbmv --dtype f64 --shape 4x32:columns --shape 32 --kl 1 --ku 2": ("f64→f64 64F sm_75 cublas", "kl=1, ku=2"),
    "symv --dtype f32 --shape 64x64 --shape 64 --uplo upper": ("f32→f32 32F sm_75 cublas", "uplo=UPPER"),
    "hemv --dtype c64 --shape 64x64 --shape 64": ("c64→c64 32F sm_75 cublas", "x c64[64]"),
    "sbmv --dtype f32 --shape 3x64:columns --shape 64": ("f32→f32 32F sm_75 cublas", "strides (1, 3)"),
    "hbmv --dtype c128 --shape 3x64:columns --shape 64": ("c128→c128 64F sm_75 cublas", "strides (1, 3)"),
    "spmv --dtype f64 --shape 36 --shape 8": ("f64→f64 64F sm_75 cublas", "ap f64[36]"),
    "hpmv --dtype c64 --shape 36 --shape 8": ("c64→c64 32F sm_75 cublas", "ap c64[36]"),
    "trmv --dtype f32 --shape 8x8 --shape 8 --trans t": ("f32→f32 32F sm_75 cublas", "trans=T"),
    "trsv --dtype f64 --shape 8x8 --shape 8 --diag unit": ("f64→f64 64F sm_75 cublas", "diag=UNIT"),
    "tbmv --dtype f32 --shape 3x8:columns --shape 8": ("f32→f32 32F sm_75 cublas", "ab f32[3, 8]"),
    "tbsv --dtype c64 --shape 3x8:columns --shape 8": ("c64→c64 32F sm_75 cublas", "ab c64[3, 8]"),
    "tpmv --dtype f32 --shape 10 --shape 4": ("f32→f32 32F sm_75 cublas", "ap f32[10]"),
    "tpsv --dtype f64 --shape 10 --shape 4": ("f64→f64 64F sm_75 cublas", "ap f64[10]"),
    "ger --dtype f32 --shape 8 --shape 4 --alpha 0.5": ("f32→f32 32F sm_75 cublas", "alpha=0.5"),
    "geru --dtype c64 --shape 8 --shape 4": ("c64→c64 32F sm_75 cublas", "y c64[4]"),
    "gerc --dtype c128 --shape 8 --shape 4": ("c128→c128 64F sm_75 cublas", "y c128[4]"),
    "syr --dtype f32 --shape 8 --a 8x8": ("f32→f32 32F sm_75 cublas", "a f32[8, 8]"),
    "her --dtype c64 --shape 8": ("c64→c64 32F sm_75 cublas", "x c64[8]"),
    "syr2 --dtype f64 --shape 8": ("f64→f64 64F sm_75 cublas", "y f64[8]"),
    "her2 --dtype c64 --shape 8": ("c64→c64 32F sm_75 cublas", "y c64[8]"),
    "spr --dtype f32 --shape 8": ("f32→f32 32F sm_75 cublas", "x f32[8]"),
    "hpr --dtype c128 --shape 8 --ap 36": ("c128→c128 64F sm_75 cublas", "ap c128[36]"),
    "spr2 --dtype f32 --shape 8": ("f32→f32 32F sm_75 cublas", "y f32[8]"),
    "hpr2 --dtype c64 --shape 8": ("c64→c64 32F sm_75 cublas", "y c64[8]"),
    "cholesky --dtype f32 --shape 64x64": ("f32→f32 small sm_75 own", "lower=True"),
    "cho_solve --dtype c64 --shape 64x64 --b 64x3": ("c64→c64 small sm_75 own", "b c64[64, 3]"),
    "lu_factor --dtype f64 --shape 5x64x32": ("f64→f64 sm_75 cusolverDn", "a f64[5, 64, 32]"),
    "lu_solve --dtype f64 --shape 64x64 --pivots 64:i64 --trans 1": ("f64→f64 small sm_75 own", "pivots i64[64]"),
    "solve --dtype c128 --shape 64x64 --assume-a pos": ("c128→c128 small sm_75 own", "assume_a=POS"),
    "qr --dtype f32 --shape 64x32 --mode raw": ("f32→f32 sm_75 cusolverDn", "mode=RAW"),
    "eigh --dtype f64 --shape 64x64 --driver syevj": ("f64→f64 syevj sm_75 cusolverDn", "driver=SYEVJ"),
    "eigh --dtype f32 --shape 64x64 --subset-by-index 0,7": ("f32→f32 sm_75 cusolverDn", "subset_by_index=(0, 7)"),
    "generalized_eigh --dtype c64 --shape 64x64 --b 64x64 --itype 2": ("c64→c64 sm_75 cusolverDn", "itype=2"),
    "eig --dtype f32 --shape 64x64": ("f32→c64 sm_75 cusolverDn", "eigvals_only=False"),
    "randomized_svd --dtype f32 --shape 64x32 --rank 4": ("f32→f32 sm_75 cusolverDn", "rank=4"),
    "qr_multiply --dtype f32 --shape 64x32 --c 32x3 --mode left": ("f32→f32 sm_75 cusolverDn", "mode=LEFT"),
    "orgqr --dtype f32 --shape 64x32 --tau 32 --columns 64": ("f32→f32 sm_75 cusolverDn", "columns=64"),
    "ormqr --dtype c64 --shape 64x32 --tau 32 --c 3x64 --side right": ("c64→c64 sm_75 cusolverDn", "side=RIGHT"),
    "polar --dtype f32 --shape 64x32 --side left": ("f32→f32 sm_75 cusolverDn", "side=LEFT"),
    "ldl --dtype f64 --shape 64x64 --expand": ("f64→f64 sm_75 cusolverDn", "expand=True"),
    "ldl_solve --dtype c64 --shape 64x64 --pivots 64:i64 --b 64x3 --no-hermitian": ("c64→c64 sm_75 cusolverDn", "hermitian=False"),
    "refined_solve --dtype f64 --shape 64x64 --precision bf16": ("f64→f64 sm_80 cusolverDn", "precision=BF16"),
    "refined_lstsq --dtype c64 --shape 64x32 --b 64x1": ("c64→c64 sm_80 cusolverDn", "max_iterations=50"),
    "svd --dtype f32 --shape 64x32 --driver gesvdp": ("f32→f32 gesvdp sm_75 cusolverDn", "driver=GESVDP"),
    "inv --dtype f32 --shape 64x64 --assume-a pos": ("f32→f32 sm_75 cusolverDn", "assume_a=POS"),
    "det --dtype f64 --shape 5x64x64": ("f64→f64 sm_75 cusolverDn", "a f64[5, 64, 64]"),
    "slogdet --dtype c64 --shape 64x64": ("c64→c64 sm_75 cusolverDn", "a c64[64, 64]"),
    "matrix_norm --dtype f32 --shape 64x32 --order nuc": ("f32→f32 sm_75 cusolverDn", "order=NUC"),
    "matrix_rank --dtype f64 --shape 64x32 --rtol 1e-3": ("f64→i64 sm_75 cusolverDn", "rtol=0.001"),
    "pinv --dtype c128 --shape 64x32": ("c128→c128 sm_75 cusolverDn", "a c128[64, 32]"),
    "lstsq --dtype f32 --shape 64x32 --b 64x3 --driver gels": ("f32→f32 sm_75 cusolverDn", "driver=GELS"),
    "expm --dtype c64 --shape 64x64 --squarings 8": ("c64→c64 sm_75 cusolverDn", "squarings=8"),
    "matmul --dtype bf16 --epilogue 'silu(accumulator() + row(\"bias\"))'": ("bf16×bf16→bf16 sm_90 cutlass", "silu(add(acc, row(bias)))"),
    "matmul --dtype f16 --config tile=128x256,cluster=2x1": ("f16×f16→f16 sm_90 cutlass", "config=128x256 cluster 2x1"),
    "grouped_matmul --dtype bf16 --shape 512x256 --shape 4x256x128": ("bf16×bf16→bf16 sm_90 cutlass", "4 groups"),
    "grouped_matmul --dtype f16 --library cublasLt --shape 512x256 --shape 4x256x128": ("f16×f16→f16 32F sm_90 cublasLt", "4 groups"),
    f"conv_fwd --dtype f16 --library cutlass {IMAGES}": ("f16×f16→f16 sm_90 cutlass", "strides (576, 1, 192, 64)"),
    f"conv_fwd --dtype f16 --epilogue 'relu(accumulator() + row(\"bias\")) + load(\"more\")' {IMAGES}": ("f16×f16→f16 sm_90 cutlass", "row(bias)"),
    f"conv_bwd_data --dtype f16 --library cutlass {IMAGES}": ("f16×f16→f16 sm_90 cutlass", "pad=1"),
    f"conv_bwd_filter --dtype f16 --library cutlass {GRADIENTS}": ("f16×f16→f16 sm_90 cutlass", "w_extents=(3, 3)"),
}
WRONG = {  # the flag, what was given, what is expected
    "gather --dtype f32 --shape 8 --comm 99999999999999999999": ("--comm", "99999999999999999999", "number of ranks"),
    "matmul --dtype f7": ("--dtype", "got 'f7'", "expected a dtype: "),
    "matmul --dtype f32 --epilogue SWISH": ("--epilogue", "got 'SWISH'", "expected one of NONE, RELU"),
    "matmul --dtype f32 --shape 4xa": ("--shape", "got '4xa'", "expected an operand like 8x64:f16:rows"),
    "matmul --dtype f32 --shape 4:f32:f16": ("--shape", "got '4:f32:f16'", "expected an operand"),
    "matmul --dtype f32 --shape 4x4 --shape 5x4": ("--b", "f32[5, 4]", "4"),
    "matmul --shape 4x4": ("--dtype", "got none", "the dtype of the operands: one of "),
    "matmul --dtype f32 --alpha many": ("--alpha", "got 'many'", "a whole number or a number or "),
    "matmul --dtype f32 --scales mode=NONE": ("--scales", "got 'mode=NONE'", "values by name, like a=…, of a, b, c, d, aux, a_mode"),
    "matmul --dtype f32 --autotune maybe": ("unrecognized arguments", "maybe", ""),
    "matmul --dtype f64 --shape 100000000x100000000": ("llocate", "", ""),
    "matmul --dtype f32" + " --shape 4x4" * 8: ("--shape", "got 8 operands", "at most 7: a, b, c, bias"),
    "conv_fwd --dtype f16 --shape 8x64x32x32": ("--shape", "got none of w", "expected extents of w, like 8x64"),
    "conv_fwd --dtype f16 --pad": ("--pad", "expected one argument", ""),
    f"conv_fwd --dtype f16 {IMAGES} --pad a": ("--pad", "got 'a'", "a whole number or numbers like 3,3 or pairs like 1,1;0,2"),
    f"conv_fwd --dtype f16 {IMAGES} --stride 1,1,1": ("--stride", "got (1, 1, 1)", "2 spatial axes"),
    "softmax --dtype f32": ("--shape", "got none", "extents of x, the first operand"),
    "pooling --dtype f32 --shape 1x1x4x4": ("--window", "got nothing", "a whole number or numbers like 3,3"),
    "rnn --dtype f32": ("--network", "got nothing", "values by name, like mode=…,input_size=…,hidden_size=… and layers, "),
    "rnn --dtype f32 --network mode=LSTM": ("--network", "got 'mode=LSTM'", "values by name, like mode=…,input_size=…"),
    "cudnn_graph --shape 4x4:f32 --draw 'open(x)'": ("--draw", "got open(x)", "an expression like RELU_FWD"),
    "matmul --dtype f16 --epilogue 'relu('": ("--epilogue", "got 'relu('", "an epilogue tree like relu("),
    "softmin --dtype f32": ("OP", "invalid choice: 'softmin'", ""),
}
# fmt: on


def told(capsys: pytest.CaptureFixture[str], words: str) -> tuple[int, Any, str]:
    """The status of a command, its JSON, and its complaints."""
    try:
        status = main(["explain", *shlex.split(words)])
    except SystemExit as stop:
        status = int(stop.code or 0)
    said = capsys.readouterr()
    return status, json.loads(said.out) if said.out else None, said.err


@pytest.mark.parametrize("words", MATMUL)
def test_explain_finds_the_row_whatever_is_left_open(words, capsys):
    status, facts, complaint = told(capsys, f"matmul --dtype {words} --json")
    assert (status, complaint) == (0, "")
    assert f"{MATMUL[words]} {facts['library']}" in facts["row"]


@pytest.mark.parametrize(
    "words",
    [pytest.param(words, marks=[pytest.mark.exhaustive] if n % 4 else []) for n, words in enumerate(EXPLAINED)],
)
def test_explain_builds_a_request_of_every_op(words, capsys):
    status, facts, complaint = told(capsys, f"{words.replace(';', chr(92) + ';')} --arch sm_90 --json")
    assert (status, complaint) == (0, "")
    row, request = EXPLAINED[words]
    assert facts["row"] == f"{words.split()[0]} {row}"
    assert request in facts["request"]
    assert facts["row"] in {row.name for row in dp.TABLE.of(facts["op"])}


NAMED = {words.split()[0] for words in EXPLAINED} | {"matmul"}


@pytest.mark.parametrize("op", [op for op in dp.TABLE.ops if op not in NAMED])
def test_an_op_without_a_line_above_needs_no_more_than_a_shape_and_a_dtype(op, capsys):
    """So that a new op's files are its own alone; one that needs more has a line above."""
    row = next(row for row in dp.TABLE.of(op) if row.on(dp.Arch(90)))
    words = f"{op} --dtype {row.dtypes[0]} --shape 2x8x6x6 --arch sm_90"
    status, facts, complaint = told(capsys, f"{words} --json")
    assert (status, complaint) == (0, "")
    assert facts["row"] == row.name
    assert f"x {row.dtypes[0]}[2, 8, 6, 6]" in facts["request"]


@pytest.mark.parametrize("words", WRONG)
def test_a_mistake_is_told_with_its_flag(words, capsys):
    status, _, complaint = told(capsys, f"{words} --arch sm_90")
    assert status == 2
    assert all(part in " ".join(complaint.split()) for part in WRONG[words]), complaint
    assert "Traceback" not in complaint


def test_a_refusal_is_that_of_the_nearest_way_that_is_left_open(capsys):
    status, facts, _ = told(capsys, "matmul --dtype f8e4m3 --epilogue BGRADB --arch sm_90 --json")
    assert (status, facts["row"]) == (1, None)
    assert [reason["kind"] for reason in facts["refusals"][0]["reasons"]] == ["epilogue"]
    assert "b f8e4m3[256, 256] element strides (1, 256)" in facts["request"]  # as fp8 units read it
    status, facts, _ = told(capsys, "matmul --dtype f8e4m3 --b rows --arch sm_90 --json")
    assert (status, [reason["kind"] for reason in facts["refusals"][0]["reasons"]]) == (1, ["rule"])


def test_a_request_is_explained_without_its_library(capsys, monkeypatch):
    """Sizes that a library would say are those of the host, and its version is all that is asked of it."""
    monkeypatch.setenv("CUDABIND_CUDNN_PATH", "/nowhere/libcudnn.so.9")
    for words in EXPLAINED:
        if words.startswith(("rnn", "dropout", "sdpa")):
            status, facts, _ = told(capsys, f"{words} --arch sm_90 --json")
            assert (status, facts["library"]) == (0, "cudnn")
