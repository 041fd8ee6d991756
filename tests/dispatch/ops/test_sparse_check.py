"""The kernel that looks at indices, compiled for the CPU and run thread by thread, against counts by loops."""

import ctypes
import importlib.util
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.keys import HOST
from dispatch.libraries.nvrtc.number_types import NUMBERS
from dispatch.ops.sparse.cases import cases
from dispatch.ops.sparse.check import kernel_of

spec = importlib.util.spec_from_file_location("kernels_on_cpu", Path(__file__).with_name("kernels_on_cpu.py"))
kernels_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels_on_cpu)

DEV = None


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = dp.device("host")


ATOMIC = "static void atomicAdd(unsigned long long* at, unsigned long long x) { *at += x; }\n"
ROW = next(row for row in dp.TABLE.of("sparse_check") if row.min_arch != HOST)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return kernels_on_cpu.OnCpu(tmp_path_factory.mktemp("kernels"))


def run(on_cpu, request):
    """The counts, as the plan makes them: zeros, and the kernel."""
    kernel = kernel_of(request)
    source = ATOMIC + NUMBERS + kernel.source
    for_cpu = type(kernel)(source, kernel.function, kernel.launch, kernel.options)
    out = DEV.zeros((4,), "i64")
    on_cpu.run(for_cpu, request.replace(out=out))
    return out.numpy().tolist()


def test_offsets_that_are_wrong_lead_to_the_same_lines_as_on_the_host(on_cpu, rng):
    for _ in range(30):
        m, count = rng.integers(1, 9, 2).tolist()
        ends = rng.integers(-2, count + 3, m + 1)
        parts = (np.ones(count), ends.astype("i4"), rng.integers(0, 4, count).astype("i4"))
        request = dp.SparseCheckRequest(*dp.sparse.csr(*map(DEV.array, parts), (m, 4)))
        assert run(on_cpu, request) == dp.run(request).tolist()


def test_every_case_of_the_row_on_the_cpu(on_cpu, rng):
    found = []
    for case in cases(ROW):
        check = case.check(DEV, rng)
        counts = run(on_cpu, check.request)
        expected = check.expected["out"].tolist()
        assert counts == expected
        found.append(expected)
    assert all(any(counts[place] for counts in found) for place in range(4)), "each flaw is there"


@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
def test_nothing_is_read_beyond_the_tensors_whatever_they_hold(kind, on_cpu, rng):
    """The numbers of a mad matrix lead anywhere; a read there would end this process."""
    wild = rng.integers(-(2**62), 2**62, 9)
    sizes = {"csr": (5, 9), "csc": (9, 5), "coo": (9, 9)}[kind]
    rows, columns = (DEV.array(np.resize(wild, size)) for size in sizes)
    a = getattr(dp.sparse, kind)(DEV.array(np.ones(9)), rows, columns, (4, 4))
    counts = run(on_cpu, dp.SparseCheckRequest(*a))
    assert counts[1] == 9
    assert counts[0] or kind == "coo"


def test_counts_against_loops(on_cpu, rng):
    for _ in range(30):
        m, n = rng.integers(1, 6, 2).tolist()
        lengths = rng.integers(0, 5, m)
        ends = np.concatenate([[0], np.cumsum(lengths)])
        columns = rng.integers(-1, n + 1, ends[-1])
        lines = [columns[low:high].tolist() for low, high in pairwise(ends)]
        pairs = [pair for line in lines for pair in pairwise(line)]
        expected = [
            0,
            sum(not 0 <= j < n for j in columns),
            sum(i > j for i, j in pairs),
            sum(i == j for i, j in pairs),
        ]
        parts = (DEV.array(np.ones(len(columns))), DEV.array(ends.astype("i4")), DEV.array(columns.astype("i4")))
        request = dp.SparseCheckRequest(*dp.sparse.csr(*parts, (m, n)))
        assert run(on_cpu, request) == expected
        assert dp.run(request).tolist() == expected


@pytest.mark.compiles
def test_nvrtc_compiles_it_for_sm_90():
    parts = (DEV.array(np.ones(1)), DEV.array(np.array([0, 1], "i8")), DEV.array(np.array([0], "i4")))
    assert kernels_on_cpu.size_for_sm_90(kernel_of(dp.SparseCheckRequest(*dp.sparse.csr(*parts, (1, 1))))) > 500


def test_the_launch_has_a_thread_for_each_offset_and_element():
    for m, count in ((1000, 3), (3, 1000)):
        parts = (np.ones(count), np.zeros(m + 1, "i4"), np.zeros(count, "i4"))
        request = dp.SparseCheckRequest(*dp.sparse.csr(*map(DEV.array, parts), (m, 4)))
        launch = kernel_of(request).launch(request)
        assert launch.grid[0] * launch.block[0] >= max(m + 1, count)
        assert isinstance(launch.values[0], ctypes.c_int64)
