"""Signal processing with SciPy's names and conventions: convolutions, and spectra of frames.

The files: convolutions; spectra; frames (the window, and the padding at a signal's ends); and framework_operands, which
converts operands of other libraries to tensors and results to arrays of that library. Each function runs requests of
several op families, one after another, on the current stream; nothing waits.
"""

from __future__ import annotations

from dispatch.signal.convolutions import ConvolutionMode, fftconvolve, next_fast_len, oaconvolve
from dispatch.signal.frames import Boundary, Scaling
from dispatch.signal.spectra import istft, stft, welch

__all__ = [
    "Boundary",
    "ConvolutionMode",
    "Scaling",
    "fftconvolve",
    "istft",
    "next_fast_len",
    "oaconvolve",
    "stft",
    "welch",
]
