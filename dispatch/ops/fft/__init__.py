"""Fast Fourier transforms of complex and real numbers over any axes: `dft`, and `dispatch.fft` with NumPy's functions.
`callback_dft` has callbacks, `half_dft` transforms numbers of 16 bits, `dct` and `dst` are cosine and sine transforms.
`roll` moves elements along axes.

cuFFT computes them, or NumPy on the host. The files: request (the request classes), cufft (the plans), reference
(the expected results), rules, cases, callback (the function for each element), and functions (the functions of
`numpy.fft`, public as `dispatch.fft`).
"""

from __future__ import annotations

from dispatch.core.plan_call import plan_call
from dispatch.core.request_function import request_function
from dispatch.ops.fft.callback_calls import callback_dft
from dispatch.ops.fft.callback_dft import CallbackDftRequest
from dispatch.ops.fft.cosine import DctRequest, DstRequest, dct, dst
from dispatch.ops.fft.half import HalfDftRequest, half_dft
from dispatch.ops.fft.request import DftKind, DftNorm, DftRequest
from dispatch.ops.fft.roll import RollRequest, roll

__all__ = [
    "CallbackDftRequest",
    "DctRequest",
    "DftKind",
    "DftNorm",
    "DftRequest",
    "DstRequest",
    "HalfDftRequest",
    "RollRequest",
    "callback_dft",
    "dct",
    "dft",
    "dst",
    "half_dft",
    "roll",
]

cufft_dft = plan_call(
    "cufft_dft",
    "dispatch.ops.fft.cufft",
    "A plan of cuFFT's transforms and of passes around them; Refused where NVRTC is missing, which compiles these.",
)
cufft_callback_dft = plan_call(
    "cufft_callback_dft",
    "dispatch.ops.fft.cufft_callback",
    "A plan of a transform of cuFFT with callbacks, or of one between two passes; Refused where NVRTC is missing.",
)
cufft_half_dft = plan_call(
    "cufft_half_dft",
    "dispatch.ops.fft.cufft_half",
    "A plan of cuFFT's transforms in 16 bits, or in 32 between passes; Refused where NVRTC is missing for these.",
)
cufft_cosine = plan_call(
    "cufft_cosine",
    "dispatch.ops.fft.cufft_cosine",
    "A plan of one of cuFFT's transforms between two passes; Refused where NVRTC is missing, which compiles these.",
)
dft = request_function(DftRequest, "dft")
