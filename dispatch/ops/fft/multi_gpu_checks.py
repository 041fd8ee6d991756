"""The limits of a transform over several GPUs, from cuFFT's documentation, checked before a GPU is used.

Follows https://docs.nvidia.com/cuda/cufft/#supported-functionality.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.checks import check_dtype, check_int, check_shape, shown
from dispatch.device.device import Device
from dispatch.device.frameworks.frameworks import framework_of
from dispatch.device.registry import device as device_of
from dispatch.device.stream import NULL_CONTEXT
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.keys import C64, C128, F32, F64, Dtype

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = [
    "SPECTRUM",
    "check_batch",
    "check_devices",
    "check_dtype_of",
    "check_names",
    "check_sizes",
    "operand_of",
    "shape_text",
]

Shape = tuple[int, ...]
SPECTRUM = {C64: C64, C128: C128, F32: C64, F64: C128}
MAX_GPUS, MAX_AXES = 16, 3
MIN_LINE = {2: 64, 4: 64, 8: 128, 16: 1024}  # points of one transform along one axis, by the number of GPUs
MIN_POINTS = 32  # points along each of the axes that are cut, of a transform along two or three axes
LARGEST_FACTOR = 127
ANY_FACTORS = {C64: 4096, C128: 2048}  # points along an axis; up to this number any prime factors are supported


def check_names(given: Any) -> list[Device | str]:
    """The devices or their names; BadRequest unless cuFFT supports the number of them."""
    if isinstance(given, (str, Device)) or not isinstance(given, Iterable):
        raise BadRequest("devices", shown(given), "a list with a GPU for each part", 'such as ["cuda:0", "cuda:1"]')
    names = list(given)
    for name in names:
        if not isinstance(name, (str, Device)):
            raise BadRequest("devices", shown(name), 'Devices or their names, such as "cuda:0"')
    if not 2 <= len(names) <= MAX_GPUS:
        hint = "use dispatch.fft.fftn on one GPU"
        raise BadRequest("devices", f"{len(names)} of them", f"2 to {MAX_GPUS}, which cuFFT supports", hint)
    return names


def check_devices(names: list[Device | str]) -> list[Device]:
    """The devices: GPUs of one architecture, or the host several times."""
    devices = [name if isinstance(name, Device) else device_of(name) for name in names]
    names_and_archs = ", ".join(f"{device} ({device.arch})" for device in devices)
    if len({device.is_host for device in devices}) > 1:
        raise BadRequest("devices", names_and_archs, "only GPUs, or only the host, repeated")
    if len({device.arch for device in devices}) > 1:
        raise BadRequest("devices", names_and_archs, "GPUs of one architecture, which cuFFT requires")
    return devices


def check_dtype_of(given: Any) -> Dtype:
    """The dtype of the input of a forward transform."""
    dtype = check_dtype("dtype", given)
    if dtype not in SPECTRUM:
        raise BadRequest("dtype", str(dtype), "c64 or c128, or f32 or f64 for real numbers")
    return dtype


def check_batch(batch: Any, count: int) -> int:
    """The number of transforms; one for None."""
    if batch is None:
        return 1
    try:
        return check_int("batch", batch, max(count, 2))
    except BadRequest as error:
        expected = f"a whole number from {max(count, 2)} on, at least one transform for each of {count} GPUs, or None"
        raise BadRequest("batch", error.given, expected, "with None, one transform is split over all GPUs") from None


def check_sizes(given: Any, dtype: Dtype, batch: int, count: int) -> Shape:
    """The points along each axis; a batch may have any, because each of its transforms is on one GPU."""
    sizes = check_shape("shape", given, dtype.bits)
    if not 1 <= len(sizes) <= MAX_AXES or 0 in sizes:
        hint = "batch=n adds an axis that is not transformed"
        raise BadRequest("shape", shown(given), f"1 to {MAX_AXES} axes of one point or more", hint)
    if batch == 1:
        (_check_line if len(sizes) == 1 else _check_cut)(sizes, dtype, count)
    return sizes


def _check_line(sizes: Shape, dtype: Dtype, count: int) -> None:
    """Check one transform along one axis."""
    shown_sizes, (n,) = str(list(sizes)), sizes
    if not dtype.is_complex:
        hint = "convert them to complex numbers, or use one GPU: dispatch.fft.rfft"
        raise BadRequest(
            "shape", f"{shown_sizes} of {dtype}", "two axes or a batch, because cuFFT has no R2C of one axis", hint
        )
    if count not in MIN_LINE:
        expected = f"{', '.join(map(str, MIN_LINE))} GPUs for one transform along one axis"
        raise BadRequest("devices", f"{count} of them", expected)
    least = MIN_LINE[count]
    if n & (n - 1) or n < least:
        hint = (
            "dispatch.fft.fft supports any number of points on one GPU, and batch=n splits several transforms"
            " over all GPUs"
        )
        raise BadRequest("shape", shown_sizes, f"a power of 2 from {least} on, for one axis over {count} GPUs", hint)


def _check_cut(sizes: Shape, dtype: Dtype, count: int) -> None:
    """Check one transform along two or three axes."""
    shown_sizes = str(list(sizes))
    if min(sizes[:2]) < MIN_POINTS:
        hint = "with batch=n each GPU computes whole transforms, of any size"
        raise BadRequest(
            "shape", shown_sizes, f"{MIN_POINTS} points or more along the first two axes, which are split", hint
        )
    if not dtype.is_complex and sizes[-1] % 2:
        raise BadRequest("shape", f"{shown_sizes} of {dtype}", "an even number along the last axis, for real numbers")
    if not dtype.is_complex and len(sizes) == 2 and sizes[1] // 2 + 1 < count:
        raise BadRequest(
            "shape",
            f"{shown_sizes} of {dtype}",
            f"at least one point of the spectrum's last axis for each of {count} GPUs",
        )
    most = ANY_FACTORS[SPECTRUM[dtype]]
    for n in sizes:
        if n > most and largest_factor(n) > LARGEST_FACTOR:
            expected = f"at most {most} along an axis, or prime factors up to {LARGEST_FACTOR}, over several GPUs"
            raise BadRequest("shape", f"{shown_sizes}, whose {n} has the factor {largest_factor(n)}", expected)


def largest_factor(n: int) -> int:
    """The largest prime factor of a number; beyond a few billion, what remains after dividing by small ones."""
    largest, factor = 1, 2
    while factor <= LARGEST_FACTOR and factor * factor <= n:
        while n % factor == 0:
            largest, n = factor, n // factor
        factor += 1
    return max(largest, n)


def operand_of(name: str, given: Any) -> tuple[Tensor | None, AbstractContextManager[Any]]:
    """The argument as a tensor, None if only NumPy supports it; and a context with its library's current stream."""
    if isinstance(given, Tensor):
        return given, NULL_CONTEXT
    framework = framework_of(type(given))
    if framework is None or isinstance(given, np.ndarray):
        return None, NULL_CONTEXT
    if name == "out" and framework.readonly:
        raise BadRequest("out", f"an array of {framework.name}", "a writable array")
    tensor = framework.tensor(name, framework.readable(given) if name == "x" else given)
    stream = framework.stream(tensor.device)
    return tensor, NULL_CONTEXT if stream is None else stream


def shape_text(shape: Shape, dtype: Any) -> str:
    """A shape and a NumPy dtype in this library's notation."""
    return f"{Dtype.by_numpy.get(dtype, dtype)}{list(shape)}"
