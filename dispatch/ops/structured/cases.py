"""The cases of structured matrices: every dtype in every order, epilogue and batch, surrounded by guarded memory.

Magnitudes that are compared are integers, arranged such that only one choice is correct. Memory that must not be read
is NaN: a C whose beta is 0, and all of a result before it is written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.core.request import run
from dispatch.keys import F32, HALF, I8, Compute, Dtype
from dispatch.ops.structured.bounds import bounds
from dispatch.ops.structured.compression import Check24Request, Compress24Request, Prune24Request
from dispatch.ops.structured.form import PruneAlgorithm, dense_step, group_of, structured_step
from dispatch.ops.structured.forms import Form, forms
from dispatch.ops.structured.functions import made_by
from dispatch.ops.structured.mutations import MUTATIONS
from dispatch.ops.structured.product import Matmul24Request
from dispatch.ops.structured.reference import clipped, evaluate, kept_mask, multiplied, tiles
from dispatch.ops.structured.tensor import StructuredTensor
from dispatch.testing.check import Check, GuardedBuffer, MadeCase, Mismatch, place, poison

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor

__all__ = ["MUTATIONS", "cases"]

KINDS: dict[str, Any] = {one.op: one for one in (Prune24Request, Check24Request, Compress24Request, Matmul24Request)}
SIZES = np.array([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16.0])  # exact in all dtypes
TRIES = 200
GAP = 32  # elements, so that one layout suits all dtypes: lines of structured matrices are of 32 bytes


# -- operands ---------------------------------------------------------------------------------------------------------
def place_operand(device: Device, values: Array, *, by_rows: bool = True) -> GuardedBuffer:
    """An operand surrounded by poison, with lines at multiples of 16 bytes."""
    axes = list(range(values.ndim))
    if not by_rows:
        axes[-2:] = axes[:-3:-1]
    return place(device, values, axes, GAP, aligned=True)


def unambiguous(rng: np.random.Generator, dtype: Dtype, shape: tuple[int, ...], algorithm: PruneAlgorithm) -> Array:
    """Integers for which the algorithm has only one correct choice."""
    group, kept = group_of(dtype)
    unit = (group, group) if algorithm is PruneAlgorithm.TILE else (1, group)
    count = int(np.prod(shape)) // (unit[0] * unit[1])
    numbers = rng.choice(SIZES, (count, unit[0] * unit[1]))
    patterns = tiles(group, kept) if algorithm is PruneAlgorithm.TILE else strip_patterns(group, kept)
    for _ in range(TRIES):
        best = np.sort(numbers @ patterns.T, axis=1)
        undecided = best[:, -1] == best[:, -2]
        if not undecided.any():
            break
        numbers[undecided] = rng.choice(SIZES, (int(undecided.sum()), numbers.shape[1]))
    numbers *= rng.choice([-1.0, 1.0], numbers.shape)
    *batch, m, k = shape
    groups = numbers.reshape(*batch, m // unit[0], k // unit[1], *unit)
    return np.moveaxis(groups, -2, -3).reshape(shape).astype(dtype.numpy)


def strip_patterns(group: int, kept: int) -> Array:
    """The patterns of a strip."""
    every = np.indices((2,) * group).reshape(group, -1).T
    return np.asarray(every[every.sum(1) == kept].astype(np.float64))


def structured_matrix(rng: np.random.Generator, dense: Array) -> Array:
    """A structured matrix of a dense one, in which some groups have fewer elements."""
    dtype, shape = Dtype.of(dense.dtype), dense.shape
    stay = kept_mask(dense, PruneAlgorithm.STRIP, *group_of(dtype)) & (rng.random(shape) < 0.9)
    return np.where(stay, dense, np.zeros((), dense.dtype))


# -- pruning and compression -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class CompressedCheck(Check):
    """A check of compressed bytes: the host's are known; others must represent the matrix that was compressed."""

    def verify(self, result: Tensor | tuple[Tensor, ...]) -> None:
        """Raise Mismatch unless the bytes are right, and nothing outside them was written."""
        if self.request.device.is_host:
            super().verify(result)
            return
        request: Any = self.request
        compressed = StructuredTensor(result, request.form._replace(made_by=made_by(request.device)))
        actual, expected = compressed.todense().numpy(), np.asarray(request.a.numpy())
        if not np.array_equal(actual.astype(np.float64), expected.astype(np.float64)):
            raise Mismatch(f"{self.name}: the bytes mean another matrix ({request.describe()})")
        self._check_memory()


def compression_check(op: str, dtype: Dtype, turn: int, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A request that prunes, checks or compresses; in turn in each order, in batches, in place and for each choice."""
    step = structured_step(dtype)
    shape: tuple[int, ...] = ((step, step), (step, 3 * step), (3 * step, 2 * step))[turn % 3]
    shape = (2 + turn % 2, *shape) if turn % 4 == 3 else shape
    by_rows = dtype.itemsize == 1 or turn % 2 == 0
    algorithm = tuple(PruneAlgorithm)[turn // 2 % 2]
    fields: dict[str, Any] = {}
    values = unambiguous(rng, dtype, shape, algorithm if op == "prune_2_4" else PruneAlgorithm.STRIP)
    if op != "prune_2_4" and (op == "compress_2_4" or turn % 2):
        stay = kept_mask(values, PruneAlgorithm.STRIP, *group_of(dtype)) & (rng.random(shape) < 0.9)
        values = np.where(stay, values, np.zeros((), values.dtype))
        if op == "check_2_4" and turn % 4 == 1:  # only the last group has too many
            values[..., -1, -group_of(dtype)[0] :] = 1
    memory = place_operand(device, values, by_rows=by_rows)
    a = memory.view
    is_open = turn % 5 == 0  # whether the result is allocated; then the matrix must be contiguous
    if op == "compress_2_4" or is_open or (op == "check_2_4" and values.ndim > len(("m", "k"))):
        a = device.array(values if by_rows else np.ascontiguousarray(values.swapaxes(-1, -2)))
        a = a if by_rows else a.mT
    fields["a"] = a
    written: tuple[GuardedBuffer, ...] = ()
    if op == "prune_2_4":
        fields["algorithm"] = algorithm
    if op == "prune_2_4" and not is_open:
        out = memory if turn % 3 == 1 else place_operand(device, poison(dtype, shape), by_rows=by_rows)
        fields["out"], written = out.view, (out,)
    request = KINDS[op](**fields)
    if op != "prune_2_4" and turn % 3 and not is_open:
        layout = request.layout_of("out")
        out = place(device, poison(layout.dtype, layout.shape), None, 16, aligned=True)
        request, written = replace(request, out=out.view), (out,)
    expected = evaluate(request, EXACT)
    check = CompressedCheck if op == "compress_2_4" else Check
    return check(name, request, expected, {"out": np.zeros(())}, written)


# -- products ---------------------------------------------------------------------------------------------------------
class Draw:
    """The operands of a form on a device."""

    def __init__(self, row: Row, form: Form, device: Device, rng: np.random.Generator) -> None:
        self.form, self.device, self.rng = form, device, rng
        self.dtype, _, self.c, self.d = row.dtypes
        wide, long = structured_step(self.dtype), dense_step(self.dtype)
        self.m, self.k, self.n = form.sizes[0] * wide, form.sizes[1] * wide, form.sizes[2] * long
        self.is_narrow = self.dtype.itemsize == 1
        self.batch_a, self.batch_b = (((2,) if is_batch else ()) for is_batch in form.batch)
        self.batch = self.batch_a or self.batch_b
        self.fields: dict[str, Any] = {"compute": row.compute, "alpha": form.alpha, "activation": form.activation}
        self.fields |= dict(form.more)
        self.written: tuple[GuardedBuffer, ...] = ()

    def factor(self, *shape: int) -> Array:
        """Factors: normally distributed numbers, or small integers, whose sums are exact in f16."""
        if self.dtype is I8 or self.fields["compute"] is Compute.COMPUTE_16F:
            most = 9 if self.dtype is I8 else 2
            return self.rng.integers(-most, most + 1, shape).astype(self.dtype.numpy)
        return self.normal(self.dtype, *shape)

    def normal(self, dtype: Dtype, *shape: int) -> Array:
        """Numbers of the magnitude of results."""
        if dtype.numpy.kind == "i":
            return self.rng.integers(-40, 41, shape).astype(dtype.numpy)
        return self.rng.standard_normal(shape).astype(dtype.numpy)

    def draw_compressed(self) -> Array:
        """A, compressed in its own layout, and the matrix before compression."""
        dense = structured_matrix(self.rng, self.factor(*self.batch_a, self.m, self.k))
        by_rows = self.form.by_rows[0] or self.is_narrow
        operand = self.device.array(dense if by_rows else np.ascontiguousarray(dense.swapaxes(-1, -2)))
        request = Compress24Request(operand if by_rows else operand.mT)
        self.fields["a"] = run(request)
        self.fields["form"] = request.form._replace(made_by=made_by(self.device))
        return dense

    def draw_operands(self) -> None:
        """B, and the operands that are added."""
        form, shape = self.form, (*self.batch, self.m, self.n)
        values = self.factor(*self.batch_b, self.k, self.n)
        self.fields["b"] = place_operand(self.device, values, by_rows=form.by_rows[1] and not self.is_narrow).view
        bias = form.bias or int(self.d.is_fp8 and not form.added)  # the bias determines the dtype of C
        if bias and not (self.dtype is I8 and self.d in HALF):  # a rule refuses this
            kind = F32 if self.dtype is I8 else self.c
            lead = self.batch if bias > 1 else ()
            self.fields["bias"] = place_operand(self.device, self.normal(kind, *lead, self.m)).view
        if form.vectors and self.dtype is I8:
            self.fields |= {"alpha": 1.0, "alpha_vector": self.vector()}
        by_rows = form.by_rows[2]
        if form.added:
            c = self.normal(self.c, *shape) if form.beta or form.vectors > 1 else poison(self.c, shape)
            memory = place_operand(self.device, c, by_rows=by_rows)
            self.fields |= {"c": memory.view, "beta": form.beta}
            if form.vectors and self.dtype is I8 and (form.vectors > 1 or form.beta):  # a vector in addition to alpha's
                self.fields |= {"beta": None, "beta_vector": self.vector()}
            if form.added > 1 and self.c is self.d:
                self.fields["out"], self.written = memory.view, (memory,)
                return
        if form.has_out or form.added:
            out = place_operand(self.device, poison(self.d, shape), by_rows=by_rows)
            self.fields["out"], self.written = out.view, (out,)
        else:
            self.fields["out_dtype"] = self.d

    def vector(self) -> Tensor:
        return place_operand(self.device, (self.rng.random(self.m) * 0.1).astype(np.float32)).view


def product_check(row: Row, form: Form, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A request of a form with fresh operands; expected results are computed from the matrix before compression."""
    draw = Draw(row, form, device, rng)
    dense = draw.draw_compressed()
    draw.draw_operands()
    request = Matmul24Request(**draw.fields)
    with np.errstate(all="ignore"):
        expected = {"out": clipped(multiplied(request, EXACT, dense)["out"], request.d_dtype)}
        return Check(name, request, expected, bounds(request, expected, dense), draw.written)


def cases(row: Row) -> list[MadeCase]:
    """Every form of a row's op and dtypes."""
    op, dtype = row.op, row.dtypes[0]
    if op == "matmul_2_4":
        return [
            MadeCase(f"{dtype}-{row.dtypes[-1]}-{n}", partial(product_check, row, form))
            for n, form in enumerate(forms(row))
        ]
    return [MadeCase(f"{dtype}-{turn}", partial(compression_check, op, dtype, turn)) for turn in range(12)]
