"""The rows of random numbers by kernels of this library, compiled by NVRTC, which draw from Philox.

On the host NumPy generates the same numbers, or cuRAND's host generator if it is installed and supports them.
"""

from __future__ import annotations

from typing import Any

from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import BF16, F16, F32, F64, I8, I32, I64, U8, U32, U64, Arch
from dispatch.ops.random import numpy_draws, nvrtc_draws, nvrtc_random, philox_on_host, uses_philox
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

SM75, SM80 = Arch(75), Arch(80)  # the oldest target of NVRTC 13; bf16 instructions exist from sm_80 on
FLOATS = (F32, F64, F16, BF16)
DTYPES = {
    "random_bits": (U32, U64),
    **dict.fromkeys(("random_uniform", "random_normal", "random_lognormal", "random_exponential"), FLOATS),
}
DRAWN = {
    **dict.fromkeys(("random_gamma", "random_beta", "random_truncated_normal"), FLOATS),
    **dict.fromkeys(("random_permutation", "random_choice", "random_multinomial"), (I64,)),
    "random_integers": (I64, I32, U32, U64, U8, I8),
    "random_binomial": (I64, I32, U32),
    "random_poisson": (U32,),
}
GPU_ROWS = tuple(
    Row(
        op=op,
        dtypes=(dtype, dtype),
        compute=None,
        rules=(uses_philox,),
        min_arch=SM80 if dtype is BF16 else SM75,
        max_arch=None,
        min_version=(),
        library="own",
        function=op,
        call=nvrtc_draws if op in DRAWN else nvrtc_random,
        run_on=("H100",),
    )
    for op, dtypes in (DTYPES | DRAWN).items()
    for dtype in dtypes
)
ON_HOST: dict[Any, Any] = {nvrtc_random: philox_on_host, nvrtc_draws: numpy_draws}
ROWS = stated((*GPU_ROWS, *(on_host(row, ON_HOST[row.call], stands_for="own") for row in GPU_ROWS)))
