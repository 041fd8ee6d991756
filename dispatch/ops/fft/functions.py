"""Fourier transforms with NumPy's signatures: `dispatch.fft`, with the arguments and the results of `numpy.fft`.

Each call is one request, `dispatch.dft`, `dct`, `dst` or `roll`. With `load=` or `store=`, a Callback for each element
that is read or written, or with a `precision`, "f32" or "f64", it is `dispatch.callback_dft`. Operands
may be of torch, CuPy or JAX, as everywhere. For f32, f16 and bf16 the result is in single precision, for all else in
double precision; `irfft` and `hfft` take no 16-bit dtypes. A size below 1, an axis that does not exist or is repeated,
and a norm other than "backward", "ortho" and "forward" raise BadRequest. `out` takes the result; for `fft`, `ifft`,
`fftn` and the like it may be the operand. Follows https://numpy.org/doc/stable/reference/routines.fft.html; `dct`,
`idct`, `dst` and `idst` follow SciPy.
"""

from __future__ import annotations

import math
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from dispatch.checks import MAX_AXES, as_python_ints, check_int, check_number, shown
from dispatch.core.operand_checks import check_array
from dispatch.device.device import Device
from dispatch.device.registry import device as device_of
from dispatch.errors import BadRequest
from dispatch.ops.fft import DftKind, callback_dft, dft, roll
from dispatch.ops.fft.callback import Callback
from dispatch.ops.fft.cosine_functions import dct, dst, idct, idst
from dispatch.ops.fft.multi_gpu import MultiGpuPlan
from dispatch.ops.fft.request import MAX_POINTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype
    from dispatch.ops.fft import DftNorm

    Through = tuple[Callback | None, Callback | None, Dtype | str | None]

__all__ = [
    "Callback",
    "MultiGpuPlan",
    "dct",
    "dst",
    "fft",
    "fft2",
    "fftfreq",
    "fftn",
    "fftshift",
    "hfft",
    "idct",
    "idst",
    "ifft",
    "ifft2",
    "ifftn",
    "ifftshift",
    "ihfft",
    "irfft",
    "irfft2",
    "irfftn",
    "rfft",
    "rfft2",
    "rfftfreq",
    "rfftn",
]

F = TypeVar("F", bound="Callable[..., Any]")
LAST_TWO = (-2, -1)
NAMED = {"s": "n", "axes": "axis"}  # the request's names for the arguments of functions along one axis


def _repeated(kind: DftKind, *, inverse: bool) -> Callable[[F], F]:
    """A function along one axis whose usual calls go directly to the request: other code took a third of their time."""

    def through(function: F) -> F:
        def checked(
            a: Any,
            n: int | None = None,
            axis: int = -1,
            norm: DftNorm | str | None = None,
            out: Any = None,
            *,
            load: Callback | None = None,
            store: Callback | None = None,
            precision: Dtype | str | None = None,
        ) -> Any:
            usual = load is None and store is None and precision is None and type(axis) is int
            if usual and (n is None or (type(n) is int and n > 0)):
                try:
                    return dft(a, kind, n, axis, inverse=inverse, norm="backward" if norm is None else norm, out=out)
                except BadRequest as error:
                    if error.operand in NAMED:
                        raise error.about(NAMED[error.operand]) from None
                    raise
            return function(a, n, axis, norm, out, load=load, store=store, precision=precision)

        return cast("F", wraps(function)(checked))

    return through


# -- one axis ---------------------------------------------------------------------------------------------------------
@_repeated(DftKind.C2C, inverse=False)
def fft(
    a: Any,
    n: int | None = None,
    axis: int = -1,
    norm: DftNorm | str | None = None,
    out: Any = None,
    *,
    load: Callback | None = None,
    store: Callback | None = None,
    precision: Dtype | str | None = None,
) -> Any:
    """Σ a[t]·exp(-2πi kt/n) along an axis, cut off or padded with zeros to n points."""
    return _along(DftKind.C2C, a, n, axis, norm, out, (load, store, precision), inverse=False)


@_repeated(DftKind.C2C, inverse=True)
def ifft(
    a: Any,
    n: int | None = None,
    axis: int = -1,
    norm: DftNorm | str | None = None,
    out: Any = None,
    *,
    load: Callback | None = None,
    store: Callback | None = None,
    precision: Dtype | str | None = None,
) -> Any:
    """The inverse of `fft`: Σ a[k]·exp(2πi kt/n) / n."""
    return _along(DftKind.C2C, a, n, axis, norm, out, (load, store, precision), inverse=True)


@_repeated(DftKind.R2C, inverse=False)
def rfft(
    a: Any,
    n: int | None = None,
    axis: int = -1,
    norm: DftNorm | str | None = None,
    out: Any = None,
    *,
    load: Callback | None = None,
    store: Callback | None = None,
    precision: Dtype | str | None = None,
) -> Any:
    """The first n // 2 + 1 points of `fft` of real numbers; the others are their conjugates."""
    return _along(DftKind.R2C, a, n, axis, norm, out, (load, store, precision), inverse=False)


@_repeated(DftKind.C2R, inverse=True)
def irfft(
    a: Any,
    n: int | None = None,
    axis: int = -1,
    norm: DftNorm | str | None = None,
    out: Any = None,
    *,
    load: Callback | None = None,
    store: Callback | None = None,
    precision: Dtype | str | None = None,
) -> Any:
    """The inverse of `rfft`: n real numbers; the default for n is 2·(m - 1), for m points."""
    return _along(DftKind.C2R, a, n, axis, norm, out, (load, store, precision), inverse=True)


@_repeated(DftKind.C2R, inverse=False)
def hfft(
    a: Any,
    n: int | None = None,
    axis: int = -1,
    norm: DftNorm | str | None = None,
    out: Any = None,
    *,
    load: Callback | None = None,
    store: Callback | None = None,
    precision: Dtype | str | None = None,
) -> Any:
    """`fft` of a Hermitian signal, given by its first half: real numbers."""
    return _along(DftKind.C2R, a, n, axis, norm, out, (load, store, precision), inverse=False)


@_repeated(DftKind.R2C, inverse=True)
def ihfft(
    a: Any,
    n: int | None = None,
    axis: int = -1,
    norm: DftNorm | str | None = None,
    out: Any = None,
    *,
    load: Callback | None = None,
    store: Callback | None = None,
    precision: Dtype | str | None = None,
) -> Any:
    """The inverse of `hfft`: the first half of `ifft` of real numbers."""
    return _along(DftKind.R2C, a, n, axis, norm, out, (load, store, precision), inverse=True)


# -- several ----------------------------------------------------------------------------------------------------------
def fftn(
    a: Any,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: DftNorm | str | None = None,
    out: Any = None,
    *,
    load: Callback | None = None,
    store: Callback | None = None,
    precision: Dtype | str | None = None,
) -> Any:
    """`fft` along several axes, s[i] points along axes[i]; all axes, or as many of the last as `s` has."""
    return _several(DftKind.C2C, a, s, axes, norm, out, (load, store, precision), inverse=False)


def ifftn(
    a: Any,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: DftNorm | str | None = None,
    out: Any = None,
    *,
    load: Callback | None = None,
    store: Callback | None = None,
    precision: Dtype | str | None = None,
) -> Any:
    """The inverse of `fftn`."""
    return _several(DftKind.C2C, a, s, axes, norm, out, (load, store, precision), inverse=True)


def rfftn(
    a: Any,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: DftNorm | str | None = None,
    out: Any = None,
    *,
    load: Callback | None = None,
    store: Callback | None = None,
    precision: Dtype | str | None = None,
) -> Any:
    """`rfft` along the last of the axes, and `fft` along the others."""
    return _several(DftKind.R2C, a, s, axes, norm, out, (load, store, precision), inverse=False)


def irfftn(
    a: Any,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: DftNorm | str | None = None,
    out: Any = None,
    *,
    load: Callback | None = None,
    store: Callback | None = None,
    precision: Dtype | str | None = None,
) -> Any:
    """The inverse of `rfftn`."""
    return _several(DftKind.C2R, a, s, axes, norm, out, (load, store, precision), inverse=True)


def fft2(
    a: Any,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = LAST_TWO,
    norm: DftNorm | str | None = None,
    out: Any = None,
    *,
    load: Callback | None = None,
    store: Callback | None = None,
    precision: Dtype | str | None = None,
) -> Any:
    """`fftn` along two axes, by default the last ones."""
    return fftn(a, s, axes, norm, out, load=load, store=store, precision=precision)


def ifft2(
    a: Any,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = LAST_TWO,
    norm: DftNorm | str | None = None,
    out: Any = None,
    *,
    load: Callback | None = None,
    store: Callback | None = None,
    precision: Dtype | str | None = None,
) -> Any:
    """The inverse of `fft2`."""
    return ifftn(a, s, axes, norm, out, load=load, store=store, precision=precision)


def rfft2(
    a: Any,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = LAST_TWO,
    norm: DftNorm | str | None = None,
    out: Any = None,
    *,
    load: Callback | None = None,
    store: Callback | None = None,
    precision: Dtype | str | None = None,
) -> Any:
    """`rfftn` along two axes, by default the last ones."""
    return rfftn(a, s, axes, norm, out, load=load, store=store, precision=precision)


def irfft2(
    a: Any,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = LAST_TWO,
    norm: DftNorm | str | None = None,
    out: Any = None,
    *,
    load: Callback | None = None,
    store: Callback | None = None,
    precision: Dtype | str | None = None,
) -> Any:
    """The inverse of `rfft2`."""
    return irfftn(a, s, axes, norm, out, load=load, store=store, precision=precision)


def _along(kind: DftKind, a: Any, n: Any, axis: Any, norm: Any, out: Any, through: Through, *, inverse: bool) -> Any:
    """A transform along one axis; its errors use NumPy's argument names."""
    if n is not None and not (type(n) is int and n > 0):
        n = check_int("n", n, 1, MAX_POINTS)
    if type(axis) is not int:
        axis = check_int("axis", axis, -MAX_AXES, MAX_AXES - 1)
    try:
        return _one(kind, a, n, axis, norm, out, through, inverse=inverse)
    except BadRequest as error:
        if error.operand in NAMED:
            raise error.about(NAMED[error.operand]) from None
        raise


def _one(kind: DftKind, a: Any, n: Any, axis: Any, norm: Any, out: Any, through: Through, *, inverse: bool) -> Any:
    norm = "backward" if norm is None else norm
    load, store, precision = through
    if load is None and store is None and precision is None:
        return dft(a, kind, n, axis, inverse=inverse, norm=norm, out=out)
    more: dict[str, Any] = {"load": load, "store": store, "precision": precision}
    return callback_dft(a, kind, n, axis, inverse=inverse, norm=norm, out=out, **more)


def _several(kind: DftKind, a: Any, s: Any, axes: Any, norm: Any, out: Any, through: Through, *, inverse: bool) -> Any:
    s, axes = as_python_ints("s", s), as_python_ints("axes", axes)
    return _one(kind, a, s, axes, norm, out, through, inverse=inverse)


# -- frequencies ------------------------------------------------------------------------------------------------------
def fftfreq(n: int, d: float = 1.0, device: Any = None) -> Tensor:
    """The frequencies of `fft`'s n points, in cycles per unit of the sample spacing d: f64[n]."""
    return _frequencies(np.fft.fftfreq, n, d, device)


def rfftfreq(n: int, d: float = 1.0, device: Any = None) -> Tensor:
    """The frequencies of `rfft`'s points: f64[n // 2 + 1], none below 0."""
    return _frequencies(np.fft.rfftfreq, n, d, device)


def _frequencies(of: Callable[[int, float], Any], n: int, d: float, device: Any) -> Tensor:
    n = check_int("n", n, 1)
    check_number("d", d)
    if not math.isfinite(d) or d == 0:
        raise BadRequest("d", shown(d), "a finite number other than 0")
    if not (device is None or isinstance(device, (str, Device))):
        raise BadRequest("device", shown(device), 'a Device or its name, such as "cuda:0" or "host"')
    on = device if isinstance(device, Device) else device_of(device)
    frequencies: Tensor = on.array(of(n, d))
    return frequencies


def fftshift(x: Any, axes: int | Sequence[int] | None = None) -> Any:
    """The points with frequency 0 moved to the middle of each axis; `fftfreq`'s are then in ascending order."""
    return _shifted(x, axes, lambda n: n // 2)


def ifftshift(x: Any, axes: int | Sequence[int] | None = None) -> Any:
    """The inverse of `fftshift`; they differ if there is an odd number of points."""
    return _shifted(x, axes, lambda n: -(n // 2))


def _shifted(x: Any, axes: Any, places: Callable[[int], int]) -> Any:
    check_array("x", x)
    rank = len(x.shape)
    if not rank:
        raise BadRequest("x", "no axes", "one axis or more", "x[None] adds an axis")
    if axes is None:
        axes = range(rank)
    axes = as_python_ints("axes", axes)
    numbers = axes if isinstance(axes, tuple) else (axes,)
    axis = tuple(check_int("axes", one, -rank, rank - 1) % rank for one in numbers)
    if len(set(axis)) < len(axis):
        raise BadRequest("axes", shown(axes), "each axis once")
    return roll(x, tuple(places(x.shape[one]) for one in axis), axis)
