"""Transforms with callbacks beside separate steps, for bench_fft.py: ours, torch's, CuPy's, and nvmath with its own.

`convolution`: a picture's spectrum, a product with a filter's, and back: two transforms, of which the second reads
through a callback, against three steps. `window`: a product with a window before a transform. `bytes`: numbers of u8
transformed in single precision. `magnitude`: the magnitudes of a spectrum instead of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from timing import attempt

import dispatch as dp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Calls = dict[str, Callable[[int], Any]]

SEPARATE = "separate"  # our transforms, torch between them
STEPS = ("separate", "torch", "cupy")  # what has no callbacks


@dataclass(frozen=True)
class CallbackCase:
    """What is done to operands of one shape, along the last `axes` axes."""

    name: str
    shape: tuple[int, ...]
    axes: int

    def __str__(self) -> str:
        return f"{self.name} {'x'.join(map(str, self.shape))}"

    @property
    def along(self) -> tuple[int, ...]:
        return tuple(range(-self.axes, 0))

    @property
    def points(self) -> int:
        return int(np.prod(self.shape))

    @property
    def spectrum(self) -> tuple[int, ...]:
        return (*self.shape[:-1], self.shape[-1] // 2 + 1)

    @property
    def nbytes(self) -> int:
        """What is read and written at least."""
        half = int(np.prod(self.spectrum))
        real = 4 * self.points
        return {
            "convolution": 2 * real + 2 * 8 * half,  # the spectrum between is written and read
            "window": real + 8 * half,
            "bytes": self.points + 8 * half,
            "magnitude": real + 4 * half,
        }[self.name]


def callback_cases(*, tiny: bool) -> Iterator[CallbackCase]:
    """The cases, of 2^24 elements and around."""
    if tiny:
        yield from (CallbackCase(name, (2, 8, 12), 2) for name in ("convolution", "window", "bytes", "magnitude"))
        return
    for shape in ((64, 512, 512), (16, 1024, 1024), (1, 4096, 4096), (4, 2000, 3000)):
        yield CallbackCase("convolution", shape, 2)
    for shape in ((1 << 14, 1024), (1 << 10, 1 << 14), (1 << 18, 64)):
        yield CallbackCase("window", shape, 1)
        yield CallbackCase("magnitude", shape, 1)
    yield CallbackCase("bytes", (16, 1024, 1024), 2)
    yield CallbackCase("bytes", (1 << 14, 1024), 1)


def values_of(case: CallbackCase, rng: np.random.Generator) -> tuple[Any, Any]:
    """The operand, and what it meets: a filter's spectrum, a window, or nothing."""
    if case.name == "bytes":
        return rng.integers(0, 256, case.shape).astype("u1"), None
    x = rng.standard_normal(case.shape, np.float32)
    if case.name == "convolution":
        shape = case.spectrum[1:]
        return x, (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype("c8")
    return x, np.hanning(case.shape[-1]).astype("f4") + np.float32(0.01)


def right(case: CallbackCase, x: Any, other: Any) -> Any:
    """The result in double precision."""
    if case.name == "convolution":
        return np.fft.irfftn(np.fft.rfftn(x.astype("f8"), axes=case.along) * other, case.shape[-2:], case.along)
    if case.name == "magnitude":
        return np.abs(np.fft.rfftn(x.astype("f8"), axes=case.along))
    return np.fft.rfftn(x / 255 if case.name == "bytes" else x * other.astype("f8"), axes=case.along)


def fused(case: CallbackCase, x: Callable[[int], Any], other: Any) -> Callable[[int], Any]:
    """Ours with callbacks; `x(i)` is operand i."""
    callback, along = dp.fft.Callback, case.along
    if case.name == "convolution":
        multiply = callback.multiply(other)
        last = case.shape[-2:]
        return lambda i: dp.fft.irfftn(dp.fft.rfftn(x(i), axes=along), last, along, load=multiply)
    load = {"window": lambda: callback.window(other), "bytes": callback.from_u8}.get(case.name, lambda: None)()
    store = callback.magnitude() if case.name == "magnitude" else None
    return lambda i: dp.fft.rfftn(x(i), axes=along, load=load, store=store, precision="f32")


def by_steps(case: CallbackCase, x: Callable[[int], Any], other: Any, fft: Any, axes: str, xp: Any) -> Any:
    """The same one step after another, by a module like numpy.fft whose axes are called so."""
    along = {axes: case.along}
    if case.name == "convolution":
        return lambda i: fft.irfftn(fft.rfftn(x(i), **along) * other, s=case.shape[-2:], **along)
    if case.name == "magnitude":
        return lambda i: xp.abs(fft.rfftn(x(i), **along))
    if case.name == "bytes":
        return lambda i: fft.rfftn(x(i) * xp.float32(1 / 255) if xp is np else x(i) / 255, **along)
    return lambda i: fft.rfftn(x(i) * other, **along)


def callback_calls(case: CallbackCase, sets: list[Any], other: Any, missing: dict[str, str]) -> Calls:
    """How each library is called over operand set i, which is torch's."""
    import torch

    met = None if other is None else torch.from_numpy(other).cuda()
    found: Calls = {
        "dispatch": fused(case, sets.__getitem__, met),
        SEPARATE: by_steps(case, sets.__getitem__, met, dp.fft, "axes", torch),
        "torch": by_steps(case, sets.__getitem__, met, torch.fft, "dim", torch),
    }

    def cupy_side() -> Any:
        import cupy

        arrays = [cupy.from_dlpack(one) for one in sets]
        theirs = None if other is None else cupy.asarray(other)

        def item(i: int) -> Any:
            return arrays[i].astype(cupy.float32) if case.name == "bytes" else arrays[i]

        call = by_steps(case, item, theirs, cupy.fft, "axes", cupy)

        def on_torchs(i: int) -> Any:
            with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
                return call(i)

        return on_torchs

    for name, side in (("cupy", cupy_side), ("nvmath", lambda: by_nvmath(case, sets, met))):
        if (call := attempt(f"{case}: {name}", side, missing)) is not None:
            found[name] = call
    return found


def by_nvmath(case: CallbackCase, sets: list[Any], other: Any) -> Callable[[int], Any]:
    """nvmath's own callbacks: numba compiles them to LTO-IR. A convolution, and a window in a prolog.

    Follows https://docs.nvidia.com/cuda/nvmath-python/latest/host-apis/fft/index.html.
    """
    import nvmath
    import torch

    if case.name not in ("convolution", "window"):
        raise NotImplementedError("of bytes and magnitudes it has no callbacks: dtypes are those of the transform")
    n, count = other.numel(), int(np.prod(case.shape[-case.axes :]))
    width = case.shape[-1]

    def convolved(data_out, offset, data, factors, _):  # type: ignore[no-untyped-def]
        data_out[offset] = data * factors[offset % n] / count

    def windowed(data_in, offset, factors, _):  # type: ignore[no-untyped-def]
        return data_in[offset] * factors[offset % width]

    stream = torch.cuda.current_stream()
    forward = nvmath.fft.FFT(sets[0], axes=case.along, options={"fft_type": "R2C"}, stream=stream)
    backward = None
    if case.name == "window":
        ltoir = nvmath.fft.compile_prolog(windowed, "float32", "float32")
        forward.plan(prolog={"ltoir": ltoir, "data": other.data_ptr()}, stream=stream)
    else:
        ltoir = nvmath.fft.compile_epilog(convolved, "complex64", "complex64")
        forward.plan(epilog={"ltoir": ltoir, "data": other.data_ptr()}, stream=stream)
        options = {"fft_type": "C2R", "last_axis_parity": "odd" if width % 2 else "even"}
        backward = nvmath.fft.FFT(forward.execute(stream=stream), axes=case.along, options=options, stream=stream)
        backward.plan(stream=stream)

    def call(i: int) -> Any:
        now = torch.cuda.current_stream()
        forward.reset_operand(sets[i], stream=now)
        found = forward.execute(stream=now)
        if backward is None:
            return found
        backward.reset_operand(found, stream=now)
        return backward.execute(stream=now)

    return call
