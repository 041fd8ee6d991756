"""Spectra of a signal's frames, with SciPy's names and conventions: a part of `dispatch.signal`.

The frames are overlapping views of the signal, and their transform multiplies them by the window while it reads them.
So all frames are one batch, without a copy of the frames.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.checks import check_bool, check_enum, check_int, check_number, shown
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.keys import C64, C128, F32, F64
from dispatch.ops.blas import dgmm, geam
from dispatch.ops.fft import DftKind, dft
from dispatch.ops.reduction import reduce
from dispatch.signal.frames import (
    Boundary,
    Scaling,
    checked_axis,
    frames_of,
    in_computed_precision,
    pad_signal,
    remove_means,
    scale_columns,
    window_of,
)
from dispatch.signal.framework_operands import copy_view, framework_operands

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.signal.frames import Frames

__all__ = ["istft", "stft", "welch"]

MIN_AXES = 2  # of spectra: frequencies and times
MIN_WEIGHT = 1e-10  # smaller sums of squared windows count as 0, as in SciPy


def stft(
    x: Any,
    fs: float = 1.0,
    window: Any = "hann",
    nperseg: int | None = None,
    noverlap: int | None = None,
    nfft: int | None = None,
    detrend: str | bool = False,
    return_onesided: bool = True,
    boundary: Boundary | str | None = "zeros",
    padded: bool = True,
    axis: int = -1,
    scaling: Scaling | str = "spectrum",
) -> tuple[Any, Any, Any]:
    """(f, t, Z): the spectrum of each frame of a signal. In Z the frequencies replace `axis`, and the times are last.

    Complex signals always have two-sided spectra. f and t are in double precision. If there is a `detrend` or
    boundary="odd", the host converts integers and 16-bit numbers first, and waits for the GPU. Raises BadRequest for
    frames that do not fit. Follows https://docs.scipy.org/doc/scipy/reference/generated/scipy.signal.stft.html.
    """
    with framework_operands(x=x) as operands:
        signal = operands.tensors[0]
        time_axis = checked_axis("x", signal, axis)
        for name, choice in (("return_onesided", return_onesided), ("padded", padded)):
            check_bool(name, choice)
        is_odd = isinstance(boundary, (str, Boundary)) and boundary in ("odd", Boundary.ODD)
        signal = in_computed_precision(signal, is_needed=detrend is not False or is_odd)
        frames = frames_of(window, nperseg, noverlap, nfft, signal.shape[time_axis])
        factor = math.sqrt(_scale(frames, fs, scaling))
        axis_last = _last(signal, time_axis)
        lines = copy_view(axis_last).reshape(-1, axis_last.shape[-1])
        side = frames.size // 2 if boundary is not None else 0
        n = lines.shape[1] + 2 * side
        end_zeros = -(n - frames.size) % frames.step % frames.size if padded else 0
        lines = pad_signal(lines, frames.size // 2, end_zeros, boundary)
        spectra, frequencies = _spectra(lines, frames, fs, detrend, return_onesided, factor)
        middle = frames.size / 2 if boundary is None else 0.0
        times = (np.arange(spectra.shape[1]) * frames.step + middle) / fs
        result = spectra.reshape(*axis_last.shape[:-1], *spectra.shape[1:])
        order = [*range(result.ndim - 2), result.ndim - 2]
        order.insert(time_axis, result.ndim - 1)
        f, t = (signal.device.array(one) for one in (frequencies, times))
        return operands.to_framework(f), operands.to_framework(t), operands.to_framework(result.transpose(*order))


def welch(
    x: Any,
    fs: float = 1.0,
    window: Any = "hann",
    nperseg: int | None = None,
    noverlap: int | None = None,
    nfft: int | None = None,
    detrend: str | bool = "constant",
    return_onesided: bool = True,
    scaling: Scaling | str = "density",
    axis: int = -1,
) -> tuple[Any, Any]:
    """(f, Pxx): the mean of the frames' power spectra. In Pxx the frequencies replace `axis`.

    If there is a `detrend`, the host converts integers and 16-bit numbers first, and waits for the GPU. Raises
    BadRequest for frames that do not fit. Follows
    https://docs.scipy.org/doc/scipy/reference/generated/scipy.signal.welch.html, with average="mean".
    """
    with framework_operands(x=x) as operands:
        signal = operands.tensors[0]
        time_axis = checked_axis("x", signal, axis)
        check_bool("return_onesided", return_onesided)
        signal = in_computed_precision(signal, is_needed=detrend is not False)
        frames = frames_of(window, nperseg, noverlap, nfft, signal.shape[time_axis])
        axis_last = _last(signal, time_axis)
        lines = copy_view(axis_last).reshape(-1, axis_last.shape[-1])
        count = (lines.shape[1] - frames.size) // frames.step + 1
        factor = math.sqrt(_scale(frames, fs, scaling) / count)
        spectra, frequencies = _spectra(lines, frames, fs, detrend, return_onesided, factor)
        norms = reduce(_parts(spectra), axes=(1, 3), reduce="norm2")
        flat = norms.reshape(-1)
        powers = dgmm(flat.reshape(-1, 1), flat, side="left", out=signal.device.empty((flat.size, 1), flat.dtype))
        result = powers.reshape(norms.shape)
        if return_onesided and not signal.dtype.is_complex:
            doubled = np.full(norms.shape[1], 2.0)
            doubled[0] = 1
            if frames.points % 2 == 0:
                doubled[-1] = 1
            result = scale_columns(result, signal.device.array(doubled.astype(norms.dtype.numpy)))
        result = result.reshape(*axis_last.shape[:-1], norms.shape[1])
        order = [*range(result.ndim - 1)]
        order.insert(time_axis, result.ndim - 1)
        return operands.to_framework(signal.device.array(frequencies)), operands.to_framework(result.transpose(*order))


def istft(
    Zxx: Any,
    fs: float = 1.0,
    window: Any = "hann",
    nperseg: int | None = None,
    noverlap: int | None = None,
    nfft: int | None = None,
    input_onesided: bool = True,
    boundary: bool = True,
    time_axis: int = -1,
    freq_axis: int = -2,
    scaling: Scaling | str = "spectrum",
) -> tuple[Any, Any]:
    """(t, x): the signal whose `stft` is Zxx; x has the axes of Zxx without the frequencies.

    The padding that `stft` added at the end is not removed.

    t has a time for each sample along the time axis; SciPy 1.17 has one for each element along x's first axis.

    Raises BadRequest for frames that do not fit, and if the overlapping windows give an element of the signal no weight
    (SciPy warns). Follows https://docs.scipy.org/doc/scipy/reference/generated/scipy.signal.istft.html.
    """
    with framework_operands(Zxx=Zxx) as operands:
        spectrum = operands.tensors[0]
        for name, choice in (("input_onesided", input_onesided), ("boundary", boundary)):
            check_bool(name, choice)
        if len(spectrum.shape) < MIN_AXES:
            raise BadRequest("Zxx", str(spectrum.layout), "two axes or more: of frequencies and of times")
        times = checked_axis("Zxx", spectrum, time_axis, "time_axis")
        freqs = checked_axis("Zxx", spectrum, freq_axis, "freq_axis")
        if spectrum.dtype not in (C64, C128) or times == freqs:
            raise BadRequest(
                "Zxx",
                f"{spectrum.layout}, with times along axis {times}",
                "c64 or c128, with frequencies along another axis",
            )
        usual = 2 * (spectrum.shape[freqs] - 1) if input_onesided else spectrum.shape[freqs]
        if nperseg is not None:
            nperseg = check_int("nperseg", nperseg, 1)
        elif isinstance(window, (str, tuple)):
            nperseg = usual
        if nfft is None:
            nfft = usual + 1 if input_onesided and nperseg == usual + 1 else usual
        frames = frames_of(window, nperseg, noverlap, nfft, None)
        if (frames.points // 2 + 1 if input_onesided else frames.points) != spectrum.shape[freqs]:
            raise BadRequest(
                "nfft", str(nfft), f"a number for which there are {spectrum.shape[freqs]} frequencies, as in Zxx"
            )
        count = spectrum.shape[times]
        weights = _weights(frames, count, boundary)
        other_axes = [one for one in range(spectrum.ndim) if one not in (times, freqs)]
        spectra = copy_view(spectrum.transpose(times, *other_axes, freqs))
        kind = DftKind.C2R if input_onesided else DftKind.C2C
        pieces = dft(spectra, kind, frames.points, -1, inverse=True)
        lines = _added(pieces.reshape(count, -1, frames.points), frames)
        scale = 1 / math.sqrt(_scale(frames, fs, scaling))
        lines = scale_columns(lines, spectrum.device.array((scale / weights).astype(lines.dtype.numpy)))
        side = frames.size // 2 if boundary else 0
        result = copy_view(lines[:, side : lines.shape[1] - side])
        t = spectrum.device.array(np.arange(result.shape[1]) / fs)
        result = result.reshape(*(spectrum.shape[one] for one in other_axes), result.shape[1])
        order = [*range(result.ndim - 1)]
        order.insert(times - (freqs < times), result.ndim - 1)
        return operands.to_framework(t), operands.to_framework(result.transpose(*order))


def _last(x: Tensor, axis: int) -> Tensor:
    """The view in which `axis` is the last axis."""
    return x.transpose(*(one for one in range(x.ndim) if one != axis), axis)


def _scale(frames: Frames, fs: float, scaling: Scaling | str) -> float:
    """The factor by which squared magnitudes are multiplied."""
    check_number("fs", fs)
    if not (math.isfinite(fs) and fs > 0):
        raise BadRequest("fs", shown(fs), "a finite positive number: samples per unit of time")
    window = frames.window
    by = window.sum() ** 2 if check_enum("scaling", scaling, Scaling) is Scaling.SPECTRUM else fs * (window**2).sum()
    if not by > 0:
        raise BadRequest(
            "window", f"a window whose sum is {by:g}", "a window whose sum (for a density, sum of squares) is positive"
        )
    return float(1 / by)


def _spectra(
    lines: Tensor, frames: Frames, fs: float, detrend: str | bool, one_sided: bool, factor: float
) -> tuple[Tensor, Array]:
    """The spectra of the frames of (batch, n), times `factor`: (batch, frames, frequencies); and the frequencies."""
    if detrend is not False and not (isinstance(detrend, str) and detrend == "constant"):
        raise BadRequest("detrend", shown(detrend), '"constant" or False')
    batch, n = lines.shape
    count = (n - frames.size) // frames.step + 1
    overlapping = lines.strided((batch, count, frames.size), (n, frames.step, 1))
    one_sided = one_sided and not lines.dtype.is_complex
    window = window_of(lines, frames, factor)
    kind = DftKind.R2C if one_sided else DftKind.C2C
    spectra = dft(remove_means(overlapping) if detrend else overlapping, kind, frames.points, -1, factors=window)
    frequencies = (np.fft.rfftfreq if one_sided else np.fft.fftfreq)(frames.points, 1 / fs)
    return spectra, frequencies


def _parts(z: Tensor) -> Tensor:
    """A view of dense complex numbers as pairs of real numbers, with one axis more."""
    real = F32 if z.dtype is C64 else F64
    strides = (*(2 * step for step in z.element_strides), 1)
    return Tensor(z.storage, z.ptr, z.device.layout(real, (*z.shape, 2), strides, z.ptr))


def _weights(frames: Frames, count: int, boundary: bool) -> Array:
    """The sum of squared windows at each element of `count` frames; BadRequest if it is 0 somewhere."""
    sums = np.zeros(frames.size + (count - 1) * frames.step)
    for number in range(count):
        sums[number * frames.step :][: frames.size] += frames.window**2
    side = frames.size // 2 if boundary else 0
    if (sums[side : sums.size - side] <= MIN_WEIGHT).any():
        expected = "a window and noverlap that give every element a nonzero weight (scipy.signal.check_NOLA)"
        hint = "" if boundary else "with boundary=True the ends of the first and last frame are not part of the result"
        raise BadRequest("window", f"frames of {frames.size} elements, one every {frames.step}", expected, hint)
    return np.where(sums > MIN_WEIGHT, sums, 1.0)


def _added(pieces: Tensor, frames: Frames) -> Tensor:
    """Overlap-add: the sum of the frames (count, batch, points) times the window, each at its offset: (batch, n).

    It takes as many additions as there are steps in a frame; each adds a part of all frames at once.
    """
    count, batch, points = pieces.shape
    step, size, device = frames.step, frames.size, pieces.device
    rows = pieces.reshape(count * batch, points)[:, :size]
    rows = scale_columns(rows, device.array(frames.window.astype(pieces.dtype.numpy)))
    parts = -(-size // step)
    sums = device.zeros((count + parts - 1, batch, step), pieces.dtype)
    flat = sums.reshape(-1, step)
    for part in range(parts):
        width = min(step, size - part * step)
        target = flat[part * batch : (part + count) * batch, :width]
        geam(rows[:, part * step : part * step + width], target, alpha=1.0, beta=1.0, out=target)
    dense = copy_view(sums.transpose(1, 0, 2)).reshape(batch, -1)
    return copy_view(dense[:, : size + (count - 1) * step])
