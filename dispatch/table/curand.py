"""The rows of random numbers by cuRAND: on a GPU, and by its host generators on the host."""

from __future__ import annotations

from dataclasses import replace

from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import F32, F64, HOST, U32, U64, Arch
from dispatch.ops.random import (
    curand_has_mean,
    curand_has_ordering,
    curand_has_word_size,
    curand_on_host,
    curand_random,
    restarts_sequence,
)

__all__ = ["ROWS"]

SM75 = Arch(75)
V10_3 = (10, 3)  # of CUDA 12.9
# fmt: off
FUNCTIONS = {
    ("random_bits", U32):      "curandGenerate",
    ("random_bits", U64):      "curandGenerateLongLong",
    ("random_uniform", F32):   "curandGenerateUniform",
    ("random_uniform", F64):   "curandGenerateUniformDouble",
    ("random_normal", F32):    "curandGenerateNormal",
    ("random_normal", F64):    "curandGenerateNormalDouble",
    ("random_lognormal", F32): "curandGenerateLogNormal",
    ("random_lognormal", F64): "curandGenerateLogNormalDouble",
    ("random_poisson", U32):   "curandGeneratePoisson",
}
# fmt: on
RULES = {
    "random_bits": (restarts_sequence, curand_has_ordering, curand_has_word_size),
    "random_uniform": (restarts_sequence, curand_has_ordering, curand_has_word_size),
    "random_poisson": (restarts_sequence, curand_has_ordering, curand_has_mean),
}
GPU_ROWS = tuple(
    Row(
        op=op,
        dtypes=(dtype, dtype),
        compute=None,
        rules=RULES.get(op, (restarts_sequence, curand_has_ordering)),
        min_arch=SM75,
        max_arch=None,
        min_version=V10_3,
        library="curand",
        function=function,
        call=curand_random,
        run_on=("H100",),
    )
    for (op, dtype), function in FUNCTIONS.items()
)
HOST_ROWS = tuple(
    replace(row, min_arch=HOST, max_arch=HOST, min_version=(), call=curand_on_host, run_on=("host",))
    for row in GPU_ROWS
)
ROWS = stated((*GPU_ROWS, *HOST_ROWS))
