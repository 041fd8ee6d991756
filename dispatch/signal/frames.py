"""Frames of a signal, for the spectra of `dispatch.signal`: their window, and the padding at the signal's ends."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.checks import check_enum, check_int, shown
from dispatch.errors import BadRequest
from dispatch.keys import BF16, C64, C128, F16, F32, F64, Choice
from dispatch.ops.blas import dgmm, geam, gemv, ger, geru
from dispatch.ops.fft.request import COMPUTED, WHOLE, DftKind, result_dtype
from dispatch.signal.framework_operands import FrameworkOperands, copy_view

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor

__all__ = [
    "Boundary",
    "Frames",
    "Scaling",
    "checked_axis",
    "frames_of",
    "in_computed_precision",
    "pad_signal",
    "remove_means",
    "scale_columns",
    "window_of",
]

REAL_DTYPES = {**dict.fromkeys(WHOLE, F64), F16: F32, BF16: F32}
DEFAULT_SIZE = 256  # elements of a frame by default


class Boundary(Choice):
    """The padding of half a frame before and after a signal: zeros, its mirror image (EVEN, ODD), or its end values."""

    ZEROS = 0
    EVEN = 1
    ODD = 2
    CONSTANT = 3


class Scaling(Choice):
    """The scaling of a spectrum: SPECTRUM: squared amplitudes; DENSITY: squared amplitudes per unit of frequency.

    PSD is SciPy's name of DENSITY in `stft`.
    """

    SPECTRUM = 0
    DENSITY = 1
    PSD = 2


class Frames(NamedTuple):
    """The length of a frame, the step to the next one, the number of points of its transform, and its window in f64."""

    size: int
    step: int
    points: int
    window: Array


def frames_of(window: Any, nperseg: int | None, noverlap: int | None, nfft: int | None, most: int | None) -> Frames:
    """The frames of the caller's arguments, at most `most` elements long; BadRequest for arguments that do not fit."""
    samples = None if isinstance(window, (str, tuple)) else window_array(window)
    size = DEFAULT_SIZE if nperseg is None else check_int("nperseg", nperseg, 1)
    if samples is not None:
        if nperseg is not None and size != samples.size:
            raise BadRequest("nperseg", str(nperseg), f"{samples.size}, the length of the window")
        size = samples.size
        if most is not None and size > most:
            raise BadRequest("window", f"{size} elements", f"at most {most}, the length of the signal")
    elif most is not None and size > most:
        if nperseg is not None:
            warnings.warn(f"nperseg {size} is reduced to {most}, the length of the signal", stacklevel=4)
        size = most
    overlap = size // 2 if noverlap is None else check_int("noverlap", noverlap, 0)
    if overlap >= size:
        raise BadRequest("noverlap", str(overlap), f"less than nperseg, {size}")
    points = size if nfft is None else check_int("nfft", nfft, 1)
    if points < size:
        raise BadRequest("nfft", str(points), f"nperseg, {size}, or more")
    return Frames(size, size - overlap, points, named_window(window, size) if samples is None else samples)


def window_array(window: Any) -> Array:
    """A window from a list of numbers or an array of any library, copied to the host."""
    is_plain = isinstance(window, (list, np.ndarray))
    array = np.asarray(window) if is_plain else FrameworkOperands(window=window).tensors[0].numpy()
    if array.ndim != 1 or not array.size or array.dtype.kind not in "fiu":
        raise BadRequest("window", f"{array.dtype}{list(array.shape)}", "a name, or real numbers along one axis")
    return array.astype(np.float64)


def named_window(window: Any, size: int) -> Array:
    """SciPy's window for a name, or for a tuple of a name and parameters."""
    try:
        from scipy.signal import get_window
    except ImportError as error:
        hint = "pip install 'cudabind[host]'"
        raise BadRequest(
            "window", shown(window), "an array, because names need SciPy, which is not installed", hint
        ) from error
    try:
        samples: Array = get_window(window, size)
    except (ValueError, TypeError, IndexError) as error:  # IndexError for an empty tuple
        raise BadRequest(
            "window", shown(window), "a window name that scipy.signal.get_window accepts", str(error)
        ) from error
    return samples


def window_of(x: Tensor, frames: Frames, factor: float) -> Tensor:
    """The window times `factor`, on the signal's device and in the precision in which the signal is transformed."""
    spectrum: Any = result_dtype(x.dtype, DftKind.C2C)
    return x.device.array((frames.window * factor).astype(COMPUTED[spectrum][0].numpy))


def in_computed_precision(x: Tensor, *, is_needed: bool) -> Tensor:
    """A signal in the precision in which it is transformed; converted only if needed, because the host converts it."""
    kind = REAL_DTYPES.get(x.dtype, x.dtype)
    return x.astype(kind) if is_needed and kind is not x.dtype else x


def checked_axis(name: str, x: Tensor, axis: int, axis_name: str = "axis") -> int:
    """The axis as a number from 0 on; BadRequest if the signal has no such axis, or no elements."""
    if x.ndim == 0:
        raise BadRequest(name, str(x.layout), "one axis or more", "x[None] adds an axis")
    axis = check_int(axis_name, axis, -x.ndim, x.ndim - 1)
    if result_dtype(x.dtype, DftKind.C2C) is None:
        raise BadRequest(name, str(x.layout), "c64, c128, f32, f64, f16, bf16 or whole numbers")
    if not x.size:
        raise BadRequest(name, str(x.layout), "one element or more along each axis")
    return axis % x.ndim


def pad_signal(x: Tensor, before: int, behind: int, boundary: Boundary | str | None) -> Tensor:
    """Signals (batch, n), dense, padded along the last axis by `boundary`, and then by `behind` zeros at the end.

    `boundary` determines the values of the `before` elements on either side; with None there are none.
    """
    batch, n = x.shape
    side = before if boundary is not None else 0
    padded = x.device.zeros((batch, n + 2 * side + behind), x.dtype)
    copy_view(x, padded[:, side : side + n])
    kind = None if boundary is None else check_enum("boundary", boundary, Boundary)
    if kind in (None, Boundary.ZEROS) or not side:
        return padded
    if side > n - 1 and kind is not Boundary.CONSTANT:
        raise BadRequest(
            "boundary",
            shown(boundary),
            f"more than {side} elements along the axis of x, which has {n}",
            'boundary="zeros"',
        )
    last = n - 2 - side
    mirrors = x[:, side:0:-1], x[:, n - 2 : last if last >= 0 else None : -1]
    ends = (
        (padded[:, :side], x[:, :1], mirrors[0]),
        (padded[:, side + n : n + 2 * side], x[:, n - 1 :], mirrors[1]),
    )
    for target, end, mirror in ends:
        copy_view(mirror if kind is Boundary.EVEN else end.strided((batch, side), (end.element_strides[0], 0)), target)
        if kind is Boundary.ODD:
            geam(target, copy_view(mirror), alpha=2.0, beta=-1.0, out=target)
    return padded


def scale_columns(rows: Tensor, factors: Tensor) -> Tensor:
    """Each column of (m, n) times its factor, in new memory."""
    return dgmm(rows, factors, side="right", out=rows.device.empty(rows.shape, rows.dtype))


def remove_means(frames: Tensor) -> Tensor:
    """The frames, each minus its mean, in new memory."""
    size = frames.shape[-1]
    centered = copy_view(frames)
    rows = centered.reshape(-1, size)
    ones = frames.device.array(np.ones(size, frames.dtype.numpy))
    means = gemv(rows, ones, alpha=1 / size)
    outer = geru if frames.dtype in (C64, C128) else ger
    outer(means, ones, alpha=-1.0, a=rows, out=rows)
    return centered
