"""The cases of sliced and blocked ELL: every pattern, slices and blocks of several sizes, indices of both widths."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.keys import F32, HALF, HOST
from dispatch.ops.sparse.ell import BlockedEllMmRequest, SellMvRequest
from dispatch.ops.sparse.ell_functions import blocks_of, elements_of_dense, slices_of
from dispatch.ops.sparse.patterns import PATTERNS
from dispatch.ops.sparse.reference import evaluate
from dispatch.testing.check import ROUNDOFF, Check, GuardedBuffer, MadeCase, place, poison, rounded
from dispatch.testing.mutations import altered

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype

__all__ = ["ELL_OPS", "ell_cases"]

ELL_OPS = ("sell_mv", "blocked_ell_mm")
SHAPES = ((24, 16), (32, 48), (16, 64), (48, 48), (32, 16))
FACTORS = ((1.0, 0.0), (0.75, -1.5), (0.0, 0.5), (-2.0, 1.0), (1.0, 1.0))
SLICES, BLOCKS = (1, 4, 5, 32), (2, 4, 8, 16)
WIDE = 16  # of dense matrices
CUT = 2.0**-10  # the rounding of an f32 to TF32, which has ten bits of fraction
GAP = 16  # elements, so that lines begin at multiples of 16 bytes


class Form(NamedTuple):
    """A case: the pattern, the size of slices or blocks, index widths, factors, the added operand, and the layouts."""

    pattern: str
    shape: tuple[int, int]
    size: int
    wide: bool
    alpha: complex
    beta: complex
    added: int  # whether there is an added operand; 2 is in place
    by_rows: tuple[bool, bool]
    has_out: bool
    tf32: bool


def ell_cases(row: Row) -> list[MadeCase]:
    """Every pattern twice, all other properties in turn."""
    op, dtype = row.op, row.dtypes[0]
    listed = []
    for number, pattern in enumerate((*PATTERNS, *PATTERNS)):
        alpha, beta = FACTORS[(number + number // 5) % 5]
        turn = 1 - 0.5j if dtype.is_complex and number % 2 else 1
        size = (SLICES if op == "sell_mv" else BLOCKS)[(number + number // 4) % 4]
        shape = SHAPES[(number + number // 5) % 5]
        if op == "blocked_ell_mm":
            shape = (-(-shape[0] // 16) * 16, shape[1]) if number else (8, 8)
        added = 0 if pattern == "nothing" else (number + number // 3) % 3
        by_rows = (number % 2 == 0, number // 2 % 2 == 0)
        wide, has_out = op == "sell_mv" and number % 2 == 1, number % 5 != 3
        tf32 = op == "blocked_ell_mm" and dtype is F32 and row.min_arch != HOST
        form = Form(pattern, shape, size, wide, alpha * turn, beta * turn, added, by_rows, has_out, tf32)
        listed.append(MadeCase(f"{dtype}-{row.dtypes[1]}-{number}", partial(check, op, dtype, row.dtypes[1], form)))
    return listed


def check(op: str, dtype: Dtype, out: Dtype, form: Form, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A request of a form with fresh operands."""

    def normal(*shape: int, kind: Dtype = dtype) -> Array:
        drawn = rng.standard_normal(shape)
        return np.asarray((drawn + 1j * rng.standard_normal(shape) if kind.is_complex else drawn).astype(kind.numpy))

    def place_operand(values: Array, *, by_rows: bool = True) -> GuardedBuffer:
        return place(device, values, None if by_rows or values.ndim < 2 else (1, 0), GAP, aligned=True)

    m, n = form.shape
    mask = PATTERNS[form.pattern](rng, (m, n))[:m, :n]
    mask = np.pad(mask, ((0, m - mask.shape[0]), (0, n - mask.shape[1])))
    a = np.where(mask, normal(m, n), np.zeros((), dtype.numpy))
    fields: dict[str, Any] = {"alpha": form.alpha}
    index = np.int64 if form.wide else np.int32
    if op == "sell_mv":
        values, offsets, columns = slices_of(elements_of_dense(a), form.size, index)
        count = int((columns >= 0).sum())
        fields |= {"offsets": place_operand(offsets).view, "m": m, "slice_size": form.size, "nnz": count}
        fields |= {
            "columns": place_operand(columns).view,
            "values": place_operand(values).view,
            "x": place_operand(normal(n)).view,
        }
        shape: tuple[int, ...] = (m,)
    else:
        values, columns = blocks_of(elements_of_dense(a), form.size, index)
        fields |= {"values": device.array(values), "columns": device.array(columns)}
        fields["b"] = place_operand(normal(n, WIDE), by_rows=form.by_rows[0]).view
        shape = (m, WIDE)
    kind: Any = SellMvRequest if op == "sell_mv" else BlockedEllMmRequest
    written: tuple[GuardedBuffer, ...] = ()
    if form.added:
        memory = place_operand(normal(*shape, kind=out) if form.beta else poison(out, shape), by_rows=form.by_rows[1])
        fields |= {kind.added: memory.view, "beta": form.beta}
        if form.added > 1:
            fields["out"], written = memory.view, (memory,)
    if form.added < 2 and (form.has_out or out is not dtype):
        memory = place_operand(poison(out, shape), by_rows=form.by_rows[1])
        fields["out"], written = memory.view, (memory,)
    request = kind(**fields)
    with np.errstate(all="ignore"):
        expected = evaluate(request, EXACT)
        return Check(name, request, expected, bounds(request, expected, form.tf32), written)


def bounds(request: Any, expected: Results, tf32: bool) -> Results:
    """A sum of n products is off by n + 4 roundings of their magnitudes, four times that for complex ones.

    In TF32 both factors of each product are rounded first.
    """
    dtype = request.values.dtype
    unit = ROUNDOFF[F32 if dtype in HALF else dtype][0] * (4 if dtype.is_complex else 1)
    right = "x" if request.op == "sell_mv" else "b"
    sizes = {
        each: np.abs(np.asarray(tensor))
        for each, tensor, _ in request.tensors()
        if each in ("values", right, request.added)
    }
    factors = {each: abs(request.factor(each)) for each in request.numbers}
    size = np.abs(altered(evaluate, request, **sizes, **factors)["out"])
    terms = getattr(request, right).shape[0]
    error = ((terms + 4) * unit + (2 * CUT if tf32 else 0)) * size
    return {"out": np.asarray(rounded(error, expected["out"], request.out_dtype))}
