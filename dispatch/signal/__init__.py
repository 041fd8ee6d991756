"""Signals in SciPy's words, by requests of several op families: convolutions, and spectra of frames.

The files: convolutions; spectra, over frames (the window, what stands beyond a signal's ends); and home, which takes in
operands of other libraries and gives results back to these. Each function is some requests, one after another, on the
current stream; nothing waits.
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
