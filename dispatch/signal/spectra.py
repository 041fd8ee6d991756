"""Spectra of a signal's frames in SciPy's words: a part of `dispatch.signal`.

Frames are views that overlap, and the window is what their transform multiplies by: one batch, without a copy of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.checks import check_bool, check_enum, check_number, shown
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

LEAST = 1e-10  # sums of squared windows below count as 0, as in SciPy


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
    """(f, t, Z): the spectrum of each frame of a signal, Z with the frequencies where `axis` was, and the times last.

    Complex signals have two sides always. f and t are in double precision. Whole numbers and 16 bits are converted by
    the host, which waits for a GPU, where `detrend` or boundary="odd" computes with them. Raises BadRequest for frames
    that do not fit. Follows https://docs.scipy.org/doc/scipy/reference/generated/scipy.signal.stft.html.
    """
    with framework_operands(x=x) as operands:
        given = operands.tensors[0]
        place = checked_axis("x", given, axis)
        for name, choice in (("return_onesided", return_onesided), ("padded", padded)):
            check_bool(name, choice)
        given = in_computed_precision(given, is_needed=detrend is not False or boundary in ("odd", Boundary.ODD))
        frames = frames_of(window, nperseg, noverlap, nfft, given.shape[place])
        factor = math.sqrt(_scale(frames, fs, scaling))
        rest = _last(given, place)
        lines = copy_view(rest).reshape(-1, rest.shape[-1])
        side = frames.size // 2 if boundary is not None else 0
        n = lines.shape[1] + 2 * side
        behind = -(n - frames.size) % frames.step % frames.size if padded else 0
        lines = pad_signal(lines, frames.size // 2, behind, boundary)
        spectra, frequencies = _spectra(lines, frames, fs, detrend, return_onesided, factor)
        middle = frames.size / 2 if boundary is None else 0.0
        times = (np.arange(spectra.shape[1]) * frames.step + middle) / fs
        made = spectra.reshape(*rest.shape[:-1], *spectra.shape[1:])
        order = [*range(made.ndim - 2), made.ndim - 2]
        order.insert(place, made.ndim - 1)
        f, t = (given.device.array(one) for one in (frequencies, times))
        return operands.to_framework(f), operands.to_framework(t), operands.to_framework(made.transpose(*order))


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
    """(f, Pxx): the mean of the frames' power spectra, which has the frequencies where `axis` was.

    Whole numbers and 16 bits are converted by the host, which waits for a GPU, if there is a `detrend`. Raises
    BadRequest for frames that do not fit. Follows
    https://docs.scipy.org/doc/scipy/reference/generated/scipy.signal.welch.html, with average="mean".
    """
    with framework_operands(x=x) as operands:
        given = operands.tensors[0]
        place = checked_axis("x", given, axis)
        check_bool("return_onesided", return_onesided)
        given = in_computed_precision(given, is_needed=detrend is not False)
        frames = frames_of(window, nperseg, noverlap, nfft, given.shape[place])
        rest = _last(given, place)
        lines = copy_view(rest).reshape(-1, rest.shape[-1])
        count = (lines.shape[1] - frames.size) // frames.step + 1
        factor = math.sqrt(_scale(frames, fs, scaling) / count)
        spectra, frequencies = _spectra(lines, frames, fs, detrend, return_onesided, factor)
        norms = reduce(_parts(spectra), axes=(1, 3), reduce="norm2")
        flat = norms.reshape(-1)
        powers = dgmm(flat.reshape(-1, 1), flat, side="left", out=given.device.empty((flat.size, 1), flat.dtype))
        made = powers.reshape(norms.shape)
        if return_onesided and not given.dtype.is_complex:
            doubled = np.full(norms.shape[1], 2.0)
            doubled[0] = 1
            if frames.points % 2 == 0:
                doubled[-1] = 1
            made = scale_columns(made, given.device.array(doubled.astype(norms.dtype.numpy)))
        made = made.reshape(*rest.shape[:-1], norms.shape[1])
        order = [*range(made.ndim - 1)]
        order.insert(place, made.ndim - 1)
        return operands.to_framework(given.device.array(frequencies)), operands.to_framework(made.transpose(*order))


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
    """(t, x): the signal whose `stft` this is, its axes those of Zxx without the frequencies.

    What is left of padding stays.

    t has a number for each element of a line, where SciPy 1.17 has one for each along x's first axis.

    Raises BadRequest for frames that do not fit, and where windows that overlap leave an element without any weight
    (SciPy warns). Follows https://docs.scipy.org/doc/scipy/reference/generated/scipy.signal.istft.html.
    """
    with framework_operands(Zxx=Zxx) as operands:
        given = operands.tensors[0]
        for name, choice in (("input_onesided", input_onesided), ("boundary", boundary)):
            check_bool(name, choice)
        times = checked_axis("Zxx", given, time_axis, "time_axis")
        freqs = checked_axis("Zxx", given, freq_axis, "freq_axis")
        if given.dtype not in (C64, C128) or times == freqs:
            raise BadRequest(
                "Zxx", f"{given.layout}, times along axis {times}", "c64 or c128, frequencies along another"
            )
        usual = 2 * (given.shape[freqs] - 1) if input_onesided else given.shape[freqs]
        if nperseg is None and isinstance(window, (str, tuple)):
            nperseg = usual
        if nfft is None:
            nfft = usual + 1 if input_onesided and nperseg == usual + 1 else usual
        frames = frames_of(window, nperseg, noverlap, nfft, None)
        if (frames.points // 2 + 1 if input_onesided else frames.points) != given.shape[freqs]:
            raise BadRequest("nfft", str(nfft), f"what gives the {given.shape[freqs]} frequencies of Zxx")
        count = given.shape[times]
        weights = _weights(frames, count, boundary)
        others = [one for one in range(given.ndim) if one not in (times, freqs)]
        spectra = copy_view(given.transpose(times, *others, freqs))
        kind = DftKind.C2R if input_onesided else DftKind.C2C
        pieces = dft(spectra, kind, frames.points, -1, inverse=True)
        lines = _added(pieces.reshape(count, -1, frames.points), frames)
        scale = 1 / math.sqrt(_scale(frames, fs, scaling))
        lines = scale_columns(lines, given.device.array((scale / weights).astype(lines.dtype.numpy)))
        side = frames.size // 2 if boundary else 0
        made = copy_view(lines[:, side : lines.shape[1] - side])
        t = given.device.array(np.arange(made.shape[1]) / fs)
        made = made.reshape(*(given.shape[one] for one in others), made.shape[1])
        order = [*range(made.ndim - 1)]
        order.insert(times - (freqs < times), made.ndim - 1)
        return operands.to_framework(t), operands.to_framework(made.transpose(*order))


def _last(x: Tensor, axis: int) -> Tensor:
    """The view with an axis at the end."""
    return x.transpose(*(one for one in range(x.ndim) if one != axis), axis)


def _scale(frames: Frames, fs: float, scaling: Scaling | str) -> float:
    """What powers are multiplied by."""
    check_number("fs", fs)
    if not (math.isfinite(fs) and fs > 0):
        raise BadRequest("fs", shown(fs), "a finite number above 0: samples for each unit of time")
    window = frames.window
    by = window.sum() ** 2 if check_enum("scaling", scaling, Scaling) is Scaling.SPECTRUM else fs * (window**2).sum()
    if not by > 0:
        raise BadRequest(
            "window", f"one of which the sum gives {by:g}", "one whose sum, of squares for a density, is above 0"
        )
    return float(1 / by)


def _spectra(
    lines: Tensor, frames: Frames, fs: float, detrend: str | bool, one_sided: bool, factor: float
) -> tuple[Tensor, Array]:
    """The spectra of the frames of (batch, n), times a number: (batch, frames, frequencies); and the frequencies."""
    if detrend is not False and detrend != "constant":
        raise BadRequest("detrend", shown(detrend), '"constant" or False')
    batch, n = lines.shape
    count = (n - frames.size) // frames.step + 1
    cut = lines.strided((batch, count, frames.size), (n, frames.step, 1))
    one_sided = one_sided and not lines.dtype.is_complex
    window = window_of(lines, frames, factor)
    kind = DftKind.R2C if one_sided else DftKind.C2C
    made = dft(remove_means(cut) if detrend else cut, kind, frames.points, -1, factors=window)
    frequencies = (np.fft.rfftfreq if one_sided else np.fft.fftfreq)(frames.points, 1 / fs)
    return made, frequencies


def _parts(z: Tensor) -> Tensor:
    """Complex numbers that are dense as pairs of real ones: a view with one axis more."""
    real = F32 if z.dtype is C64 else F64
    strides = (*(2 * step for step in z.element_strides), 1)
    return Tensor(z.storage, z.ptr, z.device.layout(real, (*z.shape, 2), strides, z.ptr))


def _weights(frames: Frames, count: int, boundary: bool) -> Array:
    """The sum of squared windows over each element of so many frames; BadRequest where one has none."""
    sums = np.zeros(frames.size + (count - 1) * frames.step)
    for number in range(count):
        sums[number * frames.step :][: frames.size] += frames.window**2
    side = frames.size // 2 if boundary else 0
    if (sums[side : sums.size - side] <= LEAST).any():
        wanted = "a window and noverlap that leave no element without weight (scipy.signal.check_NOLA)"
        hint = "" if boundary else "boundary=True: the first and the last frame's ends are no part of the result then"
        raise BadRequest("window", f"frames of {frames.size}, one each {frames.step}", wanted, hint)
    return np.where(sums > LEAST, sums, 1.0)


def _added(pieces: Tensor, frames: Frames) -> Tensor:
    """Frames (count, batch, points) times the window, added up where they lie: (batch, n).

    As many additions as there are steps in a frame, each of all frames at once.
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
        place = flat[part * batch : (part + count) * batch, :width]
        geam(rows[:, part * step : part * step + width], place, alpha=1.0, beta=1.0, out=place)
    dense = copy_view(sums.transpose(1, 0, 2)).reshape(batch, -1)
    return copy_view(dense[:, : size + (count - 1) * step])
