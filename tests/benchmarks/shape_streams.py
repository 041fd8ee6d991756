"""Streams of products whose shapes change from call to call, and the clock around each call; bench_streams asks.

Every part of a run has shapes of its own, so that no cache of the other side, or of the library below both, has seen
them. Operands are views into large tensors, at several addresses for each shape.
"""

from __future__ import annotations

import gc
import random
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import unseen_shapes

if TYPE_CHECKING:
    from collections.abc import Callable

    import dispatch as dp

Shape = tuple[int, int, int]
ZIPF, UNIFORM, GROWING = "Zipf", "uniform", "growing by one"
PATTERNS = (ZIPF, UNIFORM, GROWING)
PLACES = 4  # addresses of each operand of a shape
APART = 256  # bytes: every view begins at a multiple of it
PAUSE = 200  # calls between waits for the device, which the clock does not see
TOLERANCE = 1e-2  # of |result - reference| / |reference|: bf16 rounding is about 3e-3
CHECKED = 20  # results of a stream that are held against NumPy


class Timed(NamedTuple):
    """Seconds of each call of a stream, with the shapes."""

    shapes: list[Shape]
    seconds: list[float]

    def by_turn(self) -> tuple[list[float], list[float], list[float]]:
        """Of each shape its first call, its second, and the slowest of those after the first."""
        of: dict[Shape, list[float]] = {}
        for shape, seconds in zip(self.shapes, self.seconds, strict=True):
            of.setdefault(shape, []).append(seconds)
        again = [seconds for seconds in of.values() if len(seconds) > 1]
        return [s[0] for s in of.values()], [s[1] for s in again], [max(s[1:]) for s in again]


def parts(count: int, pool: int, largest: int, number: int, seed: int) -> dict[str, list[list[Shape]]]:
    """For each pattern so many streams of `count` calls over `pool` shapes, of which no two have one in common."""
    drawn = unseen_shapes.shapes(2 * number * pool, largest, seed)
    pools = [drawn[i * pool : (i + 1) * pool] for i in range(2 * number)]
    choice = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(pool)]
    # Tokens that come one by one: of layers whose other extents differ from part to part, and from those drawn above.
    width = largest + unseen_shapes.STEP
    return {
        ZIPF: [choice.choices(shapes, weights, k=count) for shapes in pools[:number]],
        UNIFORM: [choice.choices(shapes, k=count) for shapes in pools[number:]],
        GROWING: [[(1 + i, width + unseen_shapes.STEP * part, width) for i in range(count)] for part in range(number)],
    }


def layout(shapes: list[Shape], itemsize: int) -> tuple[dict[Shape, list[list[int]]], int]:
    """Where the operands of each shape begin, in elements, PLACES of a, b and out each, and how many there are in all.

    Shapes share the memory: a program that has as many activations reuses it, too.
    """
    step = APART // itemsize
    sizes = [-(-max(m * k for m, _, k in shapes) // step), -(-max(k * n for _, n, k in shapes) // step)]
    sizes.append(-(-max(m * n for m, n, _ in shapes) // step))
    starts, end = [], 0
    for size in sizes:
        starts.append([end + place * size for place in range(2 * PLACES)])
        end += 2 * PLACES * size
    found: dict[Shape, list[list[int]]] = {}
    for number, shape in enumerate(dict.fromkeys(shapes)):
        found[shape] = [[step * of[(number + place) % len(of)] for place in range(PLACES)] for of in starts]
    return found, step * end


def run(
    stream: list[Shape],
    views: Callable[[Shape], tuple[list[Any], list[Any], list[Any]]],
    call: Callable[[Any, Any, Any], Any],
    synchronize: Callable[[], None],
    check: Callable[[Any, Any, Any], None],
) -> Timed:
    """Make the calls of a stream, with operands at other addresses from call to call, and time each."""
    made = {shape: views(shape) for shape in dict.fromkeys(stream)}
    calls, turn = [], dict.fromkeys(made, 0)
    for shape in stream:
        number, turn[shape] = turn[shape], turn[shape] + 1
        a, b, out = made[shape]
        calls.append((a[number % PLACES], b[number // PLACES % PLACES], out[number % PLACES]))
    seconds = []
    synchronize()
    gc.collect()
    gc.disable()
    try:
        for number, (a, b, out) in enumerate(calls):
            if number % PAUSE == 0:
                synchronize()
            started = time.perf_counter()
            call(a, b, out)
            seconds.append(time.perf_counter() - started)
    finally:
        gc.enable()
    synchronize()
    for a, b, out in calls[:: -(-len(calls) // CHECKED)]:  # alone, for the outputs of several shapes share memory
        call(a, b, out)
        synchronize()
        check(a, b, out)
    return Timed(stream, seconds)


def ours(device: dp.Device, dtype: str, stream: list[Shape]) -> Timed:
    """This project's `matmul(a, b, out=out)`."""
    import dispatch as dp

    kind = dp.Dtype.of(dtype)
    places, size = layout(stream, kind.itemsize)
    memory = device.array(_numbers(size), dtype)

    def views(shape: Shape) -> tuple[list[Any], list[Any], list[Any]]:
        m, n, k = shape
        sides = ((m, k), (k, n), (m, n))
        return tuple(  # type: ignore[return-value]
            [memory[start : start + rows * columns].reshape(rows, columns) for start in starts]
            for starts, (rows, columns) in zip(places[shape], sides, strict=True)
        )

    def call(a: Any, b: Any, out: Any, matmul: Any = dp.matmul) -> None:
        matmul(a, b, out=out)

    def check(a: Any, b: Any, out: Any) -> None:
        _check(*(x.numpy().astype(np.float64) for x in (a, b, out)))

    return run(stream, views, call, device.synchronize, check)


def torchs(stream: list[Shape], place: str = "cuda") -> Timed:
    """torch.mm(out=)."""
    import torch

    places, size = layout(stream, 2)
    memory = torch.from_numpy(_numbers(size)).to(place, torch.bfloat16)

    def views(shape: Shape) -> tuple[list[Any], list[Any], list[Any]]:
        m, n, k = shape
        sides = ((m, k), (k, n), (m, n))
        return tuple(  # type: ignore[return-value]
            [memory[start : start + rows * columns].view(rows, columns) for start in starts]
            for starts, (rows, columns) in zip(places[shape], sides, strict=True)
        )

    def call(a: Any, b: Any, out: Any, mm: Any = torch.mm) -> None:
        mm(a, b, out=out)

    def check(a: Any, b: Any, out: Any) -> None:
        _check(*(x.double().cpu().numpy() for x in (a, b, out)))

    return run(stream, views, call, torch.cuda.synchronize if place == "cuda" else lambda: None, check)


def _numbers(size: int) -> Any:
    """Multiples of 1/16 below 2, which are exact in bf16."""
    return (np.random.default_rng(size).integers(-31, 32, size) / 16).astype(np.float32)


def _check(a: Any, b: Any, out: Any) -> None:
    want = a @ b
    error = np.linalg.norm(out - want) / np.linalg.norm(want)
    if not error < TOLERANCE:  # true for NaN
        raise RuntimeError(f"wrong product of {a.shape} and {b.shape}: relative error {error:.1e}")
