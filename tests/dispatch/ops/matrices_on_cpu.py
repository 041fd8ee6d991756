"""Products with dense matrices whose launches the CPU carries out: operands of their tests, and what is right."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.keys import C128, F32, F64, HALF, Arch
from dispatch.ops.sparse import own_matrix
from dispatch.ops.sparse.semiring_tiles import Tile
from dispatch.table.select import select
from dispatch.testing.check import ROUNDOFF

sp = pytest.importorskip("scipy.sparse")
spec = importlib.util.spec_from_file_location("compiled_on_cpu", Path(__file__).with_name("compiled_on_cpu.py"))
compiled_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compiled_on_cpu)

SMALL = Tile(steps=32, element_lanes=1)
GPU = Arch(90)


def plan_of(request, executor):
    row = select(request.replace(library="own"), GPU)
    assert row.library == "own"
    return own_matrix.plan(request, executor, row)


def result_of(request, executor, turns=1):
    """What the kernel gives in a plan's runs, all of which have the same bits, whichever blocks come first."""
    plan = plan_of(request, executor)
    assert plan.capture_safe
    found = []
    for executor.order in range(3):
        for _ in range(turns):
            outputs = dp.device("host").executor().outputs(request)
            for tensor in outputs.values():
                tensor.copy_from(np.full(tensor.shape, np.nan, tensor.dtype.numpy))
            plan.enqueue(request.arguments(outputs))
            found.append(request.result(outputs).numpy())
            check_memory(executor)
    assert all(one.tobytes() == found[0].tobytes() for one in found)
    return found[0]


def check_memory(executor):
    """Counters are 0 again, and nothing has written behind the memory."""
    for memory in executor.made[-1:]:
        assert not memory[: 4 * executor.launched[-1]].any()
        assert (memory[-compiled_on_cpu.products_on_cpu.GUARD :] == 0xFF).all()


def drawn(rng, dtype, *shape):
    values = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype.is_complex else 0)
    return values.astype(dtype.numpy)


def of_lengths(rng, lengths, n, dtype=F64):
    """A matrix in CSR whose rows have so many elements at random, some of them twice."""
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    columns = rng.integers(0, max(n, 1), int(ends[-1]))
    return drawn(rng, dtype, int(ends[-1])), ends, columns, (len(lengths), n)


def tensors(matrix, base=0, widths=("i4", "i4")):
    values, rows, columns, shape = matrix
    device = dp.device("host")
    parts = values, (rows + base).astype(widths[0]), (columns + base).astype(widths[1])
    return [*(device.array(part) for part in parts), dp.SparseForm("csr", shape, base)]


def exactly(matrix, b, c=None, alpha=1.0, beta=0.0):
    """What is right, and how far results may be, in units of roundoff."""
    values, ends, columns, shape = matrix
    wide = np.complex128 if np.iscomplexobj(values) else np.float64
    values, b = values.astype(wide), b.astype(wide)
    a, sizes = (sp.csr_array((some, columns, ends), shape) for some in (values, np.abs(values)))
    found, size = alpha * (a @ b), abs(alpha) * (sizes @ np.abs(b))
    if beta:
        found, size = found + beta * c.astype(wide), size + np.abs(beta * c.astype(wide))
    return found, size


def close(found, expected, size, dtype, terms):
    """One rounding for each of the terms at most, and one of the result."""
    work = dtype if dtype in (F64, C128) else F32
    unit = ROUNDOFF[F64 if work is not F32 else F32][0] * (min(terms, 100) + 8) * (4 if dtype.is_complex else 1)
    own = ROUNDOFF[dtype][0] if dtype in HALF else 0
    assert np.isfinite(found).all()
    off = np.abs(found.astype(expected.dtype) - expected)
    assert (off <= unit * size + own * np.abs(expected) + 1e-7 * own).all(), float(off.max())


def patterns(rng):
    """The lengths of rows, and the columns; blocks have 32 steps, and rows of more than 8 elements are long."""
    dense = np.full(90, 2)
    dense[41] = 900
    ends = np.zeros(120, int)
    ends[40:80] = 3
    return {
        "random": (rng.poisson(5, 150), 80),
        "a power law": (np.minimum((rng.pareto(0.8, 150) * 2).astype(int), 700), 60),
        "one dense row": (dense, 300),
        "dense rows beside each other": (np.array([0, 9, 32, 31, 64, 0, 0, 33, 8, 100, 0]), 40),
        "long rows that end where blocks do": (np.array([31, 31, 63, 30, 1, 32, 95, 0]), 40),
        "no element": (np.zeros(70, int), 10),
        "empty rows first and last": (ends, 40),
        "one row": (np.array([300]), 300),
        "no column": (np.zeros(40, int), 0),
    }


def laid(array, how):
    """A matrix by rows, by columns, with every other column, or with lines an element longer than they are."""
    if how == "columns":
        return dp.device("host").array(np.ascontiguousarray(array.swapaxes(-1, -2))).mT
    step, more = (2, 0) if how == "apart" else (1, 1) if how == "odd lines" else (1, 0)
    wide = np.full((*array.shape[:-1], array.shape[-1] * step + more), np.nan, array.dtype)
    wide[..., : array.shape[-1] * step : step] = array
    return dp.device("host").array(wide)[..., : array.shape[-1] * step : step]
