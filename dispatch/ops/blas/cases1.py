"""The test cases of BLAS level 1: vectors of any step, with poison between their elements and in the results."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.keys import F32, HALF
from dispatch.ops.blas import level1
from dispatch.ops.blas.cases3 import complex_normal
from dispatch.ops.blas.reference1 import evaluate, sizes
from dispatch.testing.check import ROUNDOFF, Check, GuardedBuffer, MadeCase, poison, rounded

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype

__all__ = ["Form", "forms", "level1_cases", "place_vector"]

KINDS: dict[str, Any] = {vars(level1)[name].op: vars(level1)[name] for name in level1.__all__}
SIZES = (7, 1, 33, 0, 1000, 256, 2)
STEPS = ((1, 1), (2, -1), (-1, 3), (-2, -2), (3, 1))  # of x and of y or the result
LARGE, THIN = 1 << 16, 1 << 12
FACTORS = (1.0, 0.0, -0.75, 2.5)
ADDED = ("given", "in place", "left out")


class Form(NamedTuple):
    """A case: the length, the steps, alpha, and the place of the result.

    `first` elements are before x; with `thin` nearly all elements are 0.
    """

    n: int
    steps: tuple[int, int]
    alpha: complex
    result: str
    first: int = 0
    thin: bool = False


def forms(op: str, dtype: Dtype) -> list[Form]:
    """Every length with every step; the other parameters in rotation."""
    result = []
    for number in range(len(SIZES) * len(STEPS)):
        alpha: complex = FACTORS[number % 4]
        steps = STEPS[number % 5]
        steps = (abs(steps[0]), steps[1]) if op.startswith("ia") else steps
        alpha = alpha * (1 - 0.5j) if dtype.is_complex and number % 2 else alpha
        result.append(Form(SIZES[number % 7], steps, alpha, ADDED[number % 3]))
    return result


def large_forms(op: str) -> list[Form]:
    """Long dense vectors, some of which do not begin at an address for vector loads.

    For a norm the first vector is nearly all zeros: otherwise a single element may be below the precision of a 16-bit
    result.
    """
    return [
        Form(LARGE + more, (1, 1), alpha, result, first, op == "nrm2" and first == more == 0)
        for first in (0, 1)
        for more, alpha, result in (
            (0, 2.5, "left out"),
            (1, -0.75, "given"),
            (7, 0.0, "in place"),
            (517, 1.0, "given"),
        )
    ]


def place_vector(device: Device, drawn: Array, step: int, dtype: Dtype, first: int = 0) -> GuardedBuffer:
    """A vector on a device, possibly with a negative step, with poison between and before its elements."""
    if first:
        values = poison(dtype, (first + len(drawn),))
        values[first:] = drawn
        memory = device.array(values)
        return GuardedBuffer(memory[first:], memory, values, (slice(first, None),))
    values = poison(dtype, (len(drawn), abs(step)))
    values[:, 0] = drawn[:: 1 if step > 0 else -1]
    memory = device.array(values)
    return GuardedBuffer(memory[:, 0] if step > 0 else memory[::-1, 0], memory, values, (slice(None), slice(0, 1)))


def check(op: str, dtype: Dtype, form: Form, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A request of a form with fresh operands."""
    kind, step = KINDS[op], form.steps[1]
    x = complex_normal(rng, dtype, (form.n,))
    if form.thin:
        x[np.arange(form.n) % THIN != 0] = 0
    memory = {"x": place_vector(device, x, form.steps[0], dtype, form.first)}
    if "y" in kind.reads:  # so that the terms of the sums do not cancel
        y = (np.conj(x) if op == "dotu" else x) + complex_normal(rng, dtype, (form.n,))
        memory["y"] = place_vector(device, y.astype(dtype.numpy), step, dtype)
    fields: dict[str, Any] = {each: buffer.view for each, buffer in memory.items()}
    request = kind(**fields)
    written: tuple[GuardedBuffer, ...] = ()
    if "alpha" in kind.numbers:
        fields["alpha"] = form.alpha
        if form.result == "in place":
            written = (memory["y" if op == "axpy" else "x"],)
        elif form.result == "given":
            written = (place_vector(device, np.full(form.n, np.nan, dtype.numpy), step, dtype),)
    elif form.result != "left out":
        values = poison(request.result_dtype, (3,))
        storage = device.array(values)
        written = (GuardedBuffer(storage[1:2].reshape(()), storage, values, (slice(1, 2),)),)
    if written:
        fields["out"] = written[0].view
    request = kind(**fields)
    expected = evaluate(request, EXACT)
    return Check(name, request, expected, bounds(request, expected), written)


def bounds(request: Any, expected: Results) -> Results:
    """The error bounds of a result: for a sum of n terms n + 4 roundings of their magnitudes; for an index 0."""
    dtype, out = request.x.dtype, expected["out"]
    unit = ROUNDOFF[F32 if dtype in HALF else dtype][0] * (4 if dtype.is_complex else 1)
    x = sizes(np.asarray(request.x))
    y = sizes(np.asarray(request.y)) if "y" in request.reads else np.zeros(())
    if "alpha" in request.numbers:
        return {"out": rounded(4 * unit * (abs(request.factor("alpha")) * x + y), out, dtype)}
    if request.op in ("iamax", "iamin"):
        return {"out": np.zeros(())}
    size = (x * y).sum() if "y" in request.reads else np.abs(out)
    return {"out": np.asarray(rounded((len(x) + 4) * unit * size, out, dtype))}


def level1_cases(row: Row) -> list[MadeCase]:
    """Every form of a row's routine and dtype; only large ones if the row is for large vectors."""
    op, dtype = row.op, row.dtypes[0]
    chosen = large_forms(op) if row.variant == "large" else forms(op, dtype)
    return [MadeCase(f"{dtype}-{number}", partial(check, op, dtype, form)) for number, form in enumerate(chosen)]
