"""The test cases of `gemv` over leading axes, and of half precision: equal and unequal distances, shared operands.

Gaps between vectors and between their elements are poison, and so is y if beta is 0.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.ops.blas.cases2 import FACTORS, bounds
from dispatch.ops.blas.cases3 import complex_normal
from dispatch.ops.blas.choices import Operation
from dispatch.ops.blas.level2 import GemvRequest
from dispatch.ops.blas.reference2 import evaluate
from dispatch.testing.check import Check, GuardedBuffer, MadeCase, place, poison

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype

__all__ = ["gemv_cases"]

BATCHES = ((5,), (2, 3), (), (1,), (2, 2, 3), (300,))
SIZES = ((5, 7), (17, 4), (1, 1), (3, 33), (40, 48), (8, 8), (1, 6))
STEPS = ((1, 1), (2, -1), (1, 3), (-2, 1))  # of x and of y
SHARED = ("", "a", "x", "", "backwards")  # the operand shared by the batch; or the batch of x is reversed
ADDED = ("nothing", "apart", "in place")


class Form(NamedTuple):
    """A case."""

    batch: tuple[int, ...]
    sizes: tuple[int, int]
    trans: Operation
    row: bool
    steps: tuple[int, int]
    shared: str
    alpha: complex
    beta: complex
    added: str


def forms(dtype: Dtype) -> list[Form]:
    """Each operation in both orders, five times; the other parameters in rotation."""
    result = []
    for number, (_, trans, row) in enumerate(product(range(5), tuple(Operation), (True, False))):
        alpha, beta = FACTORS[(number + number // 5) % 5]
        factor = 1 - 0.5j if dtype.is_complex and number % 2 else 1
        steps = STEPS[(number // 2) % 4]
        if row and dtype.is_complex and trans is Operation.C:
            steps = (abs(steps[0]), abs(steps[1]))
        batch, sizes = BATCHES[number % 6], SIZES[number % 7]
        shared = SHARED[number % 5] if batch else ""
        added = ADDED[(number + number // 3) % 3]
        result.append(Form(batch, sizes, trans, row, steps, shared, alpha * factor, beta * factor, added))
    return result


def place_vector(device: Device, drawn: Array, step: int, dtype: Dtype) -> GuardedBuffer:
    """Vectors on a device, possibly with a negative step, with poison between their elements and after each vector."""
    shape = (*drawn.shape[:-1], drawn.shape[-1] + 1, abs(step))
    values = poison(dtype, shape)
    inside = (..., slice(0, drawn.shape[-1]), 0)
    values[inside] = drawn[..., :: 1 if step > 0 else -1]
    memory = device.array(values)
    view = memory[..., : drawn.shape[-1], 0]
    watched = (..., slice(0, drawn.shape[-1]), slice(0, 1))
    return GuardedBuffer(view if step > 0 else view[..., ::-1], memory, values, watched)


def check(dtype: Dtype, out: Dtype, form: Form, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A request of a form with fresh operands."""
    m, n = form.sizes
    long, short = (m, n) if form.trans is Operation.N else (n, m)
    batch = form.batch
    a_batch = batch[1:] if form.shared == "a" and len(batch) > 1 else (1,) * len(batch) if form.shared == "a" else batch
    x_batch = () if form.shared == "x" else batch
    axes = tuple(range(len(a_batch)))
    order = (len(a_batch), len(a_batch) + 1) if form.row else (len(a_batch) + 1, len(a_batch))
    a = place(device, complex_normal(rng, dtype, (*a_batch, m, n)), (*axes, *order), 2).view
    x = place_vector(device, complex_normal(rng, dtype, (*x_batch, short)), form.steps[0], dtype).view
    fields: dict[str, Any] = {"a": a, "x": x[::-1] if form.shared == "backwards" else x, "trans": form.trans}
    fields["alpha"] = form.alpha
    blank = np.full((*batch, long), np.nan, out.numpy)
    written = place_vector(device, blank, form.steps[1], out)
    if form.added != "nothing":
        fields["beta"] = form.beta
        drawn = complex_normal(rng, out, blank.shape) if form.beta else blank
        y = place_vector(device, drawn, form.steps[1 if form.added == "in place" else 0], out)
        fields["y"] = y.view
        written = y if form.added == "in place" else written
    request = GemvRequest(**fields, out=written.view)
    with np.errstate(all="ignore"):
        expected = evaluate(request, EXACT)
        return Check(name, request, expected, bounds(request, expected), (written,))


def gemv_cases(row: Row) -> list[MadeCase]:
    """Every form of a row's dtypes."""
    dtype, out = row.dtypes
    return [
        MadeCase(f"{dtype}-batch-{number}", partial(check, dtype, out, form))
        for number, form in enumerate(forms(dtype))
    ]
