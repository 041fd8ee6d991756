"""The kernel that rounds sums in f32 to 16 bits: on the CPU over matrices of any strides, and compiled for a GPU."""

import ctypes
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dispatch.keys import BF16, F16, F32
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
from dispatch.libraries.cusparse import rounding
from dispatch.libraries.nvrtc import launching
from dispatch.libraries.nvrtc.kernel import Kernel

spec = importlib.util.spec_from_file_location("kernels_on_cpu", Path(__file__).with_name("kernels_on_cpu.py"))
kernels_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels_on_cpu)

NUMBERS = 6
PAIRS = [(F32, F16), (F32, BF16), (F16, F32), (BF16, F32)]
LAYOUTS = {"rows": (20, 1), "columns": (1, 40), "every other": (40, 2), "one element": (1, 1)}


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return kernels_on_cpu.OnCpu(tmp_path_factory.mktemp("rounding"))


@pytest.fixture
def executor(on_cpu, monkeypatch):
    """What steps are made for; launches run on the CPU, thread by thread."""

    def loaded(source, name, chosen, _):
        assert name == rounding.NAME
        made.append(on_cpu.library(SimpleNamespace(source=source, options=chosen)))
        return len(made)

    def launch(function, blocks, *rest):
        *extents, _, _, pointers, _ = rest
        assert tuple(extents) == (1, 1, rounding.THREADS, 1, 1)
        library = made[function.value - 1]
        kinds = (*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * NUMBERS)
        assert len(pointers) == len(kinds)
        given = [kind.from_address(at) for kind, at in zip(kinds, pointers, strict=True)]
        for number in range(blocks * rounding.THREADS):
            library.go_to(*divmod(number, rounding.THREADS), rounding.THREADS)
            getattr(library, rounding.NAME)(*given)
        return 0

    made = []
    monkeypatch.setattr(launching, "loaded", loaded)
    monkeypatch.setattr(launching.driver, "cuLaunchKernel", SimpleNamespace(unchecked=launch))
    return SimpleNamespace(device=None, target=None)


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(map(str, pair)))
def test_each_element_is_rounded_once_and_nothing_beside_is_written(pair, source, target, executor, rng):
    m, n = (1, 1) if "one element" in (source, target) else (18, 19)
    memories, matrices, views = [], [], []
    for place, (dtype, layout) in enumerate(zip(pair, (source, target), strict=True)):
        memory = (rng.standard_normal(900) * 100).astype(dtype.numpy)
        memory[:2] = np.inf, np.nan
        row, col = LAYOUTS[layout]
        size = dtype.itemsize
        memories.append(memory)
        matrices.append(Matrix(OperandPointer(place, size), dtype, m, n, row, col))  # from the second element on
        views.append(np.lib.stride_tricks.as_strided(memory[1:], (m, n), (row * size, col * size)))
    expected = memories[1].copy()
    inside = np.lib.stride_tricks.as_strided(expected[1:], (m, n), views[1].strides)
    inside[...] = views[0].astype(pair[1].numpy)
    step = rounding.Rounding(executor, *matrices)
    step.enqueue([memory.ctypes.data for memory in memories])
    np.testing.assert_array_equal(memories[1].astype("f8"), expected.astype("f8"))


@pytest.mark.compiles
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(map(str, pair)))
def test_nvrtc_compiles_it(pair):
    kernel = Kernel(rounding.SOURCE, rounding.NAME, lambda _: None, rounding.options(*pair))
    assert kernels_on_cpu.size_for_sm_90(kernel) > 0
