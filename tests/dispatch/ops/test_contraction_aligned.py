"""Reductions of operands that do not lie at 16 bytes: cuTENSOR, in whose place is a stand-in, gets a copy that does."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.ops.contraction import cutensor
from dispatch.ops.contraction.aligned import ALIGNMENT

spec = importlib.util.spec_from_file_location(
    "contraction_stand_ins", Path(__file__).with_name("contraction_stand_ins.py")
)
stand_ins = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_ins)
dev, executor, run, row_of = stand_ins.dev, stand_ins.executor, stand_ins.run, stand_ins.row_of

SPECS = {"ab->a": (8, 4), "ab->": (5, 3), "aab->b": (4, 4, 7), "abc->cb": (3, 1, 6), "a->": (9,)}


@pytest.fixture
def reduced_at(monkeypatch):
    """The alignments of the operands that cuTENSOR is asked to reduce."""
    found = []
    made = cutensor.calls_of

    def noted(request, *rest):
        if request.op == "reduce_modes":
            found.append(request.layout_of("a").alignment)
        return made(request, *rest)

    monkeypatch.setattr(cutensor, "calls_of", noted)
    return found


@pytest.mark.parametrize("dtype", ["f16", "f32", "f64", "c64"])
@pytest.mark.parametrize("modes", SPECS)
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_what_lies_anywhere_is_reduced_where_it_is_aligned(dtype, modes, place, dev, executor, reduced_at, rng):
    shape, kind = SPECS[modes], dp.Dtype.of(dtype)
    memory = dev.array(rng.standard_normal(int(np.prod(shape)) + 8), dtype)
    first = next(n for n in range(8) if (memory.ptr + n * kind.itemsize) % ALIGNMENT == 0)
    x = memory[first + place : first + place + int(np.prod(shape))].reshape(*shape)
    y = dev.array(rng.standard_normal([5] * len(modes.split("->")[1])), dtype)
    choices = {"alpha": 2.0}
    if "->c" not in modes and modes.endswith(">"):
        choices |= {"c": y, "beta": -1.0}
    row = row_of("reduce_modes", dtype, "64F" if dtype == "f64" else "32F")
    result = run(dp.ReduceModesRequest(modes, x, **choices), executor, row)[1]
    wide = np.complex128 if kind.is_complex else np.float64
    right = 2 * np.einsum(modes, x.numpy().astype(wide))
    if "c" in choices:
        right = right - y.numpy().astype(wide)
    np.testing.assert_allclose(result.numpy().astype(wide), right, rtol=4e-3 if dtype == "f16" else 1e-5, atol=1e-2)
    assert reduced_at
    assert min(reduced_at) >= ALIGNMENT
