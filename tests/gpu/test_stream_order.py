"""Every GPU row behind work that is not done: what it reads is written in the order of the stream, and only just.

A library that looks at an operand beside the stream, as cuSOLVER 12.0's `sytrs` does at its pivots, is right wherever
the GPU has nothing else to do, and wrong where it is shared. So an operand is empty until a kernel has ended that waits
for some milliseconds, and is filled behind it. CUTLASS's rows are left out: their kernels, which compile for half a
minute each, are this library's own launches.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest

import dispatch as dp
from cudabind import driver
from dispatch.core.row import refusals
from dispatch.errors import NoRow
from dispatch.keys import HOST
from dispatch.libraries.nvrtc.kernel import loaded
from dispatch.row_check import cases_of

CASES = 2  # of a row
MAX_TRIED = 8  # cases that are looked at for those
MILLISECONDS = 4
ROWS = [row for row in dp.TABLE if row.min_arch != HOST and row.library != "cutlass"]
SPIN = r"""
extern "C" __global__ void spin(long long nanoseconds)
{
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
}
"""


def spin(executor):
    """A kernel that ends after a while, on the executor's stream."""
    given = ctypes.c_longlong(MILLISECONDS * 1_000_000)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(given))
    function = loaded(SPIN, "spin", ("-std=c++17",), executor.device)
    driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, executor.stream.handle, ctypes.addressof(pointers), 0)


def fill_late(executor, request):
    """Empty what the request reads, and fill it again behind a kernel that is not done for some milliseconds."""
    storages = {tensor.storage.base: tensor.storage for _, tensor, _ in request.tensors() if tensor.storage.nbytes}
    stream, kept = executor.stream.handle, []
    for base, storage in storages.items():
        copy = executor.device.empty((storage.nbytes,), "u8")
        driver.cuMemcpyDtoDAsync(copy.ptr, base, storage.nbytes, stream)
        driver.cuMemsetD8Async(base, 0, storage.nbytes, stream)
        kept.append((base, copy))
    spin(executor)
    for base, copy in kept:
        driver.cuMemcpyDtoDAsync(base, copy.ptr, copy.nbytes, stream)
    return kept


def accepted(row, device, rng):
    """Checks of a row's cases that it takes."""
    cases = cases_of(row)
    for number in rng.permutation(len(cases))[:MAX_TRIED]:
        check = cases[number].check(device, rng)
        request = check.request
        why = refusals(row, request, request.signature())
        if why and getattr(request, "library", "") is None:  # another library may take what this row refuses
            request = replace(request, library=row.library)
            why = refusals(row, request, request.signature())
        if not why and not getattr(request, "autotune", False):
            yield check, request


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_reads_what_the_stream_has_written_last(row, gpu, rng, skip_without):
    if not row.on(gpu.arch):
        pytest.skip(f"needs {row.min_arch} to {row.max_arch or 'newer'}, this GPU is {gpu.arch}")
    skip_without(row)
    executor, count = gpu.executor(), 0
    for check, request in accepted(row, gpu, rng):
        try:
            executor.plan(request)
        except NoRow:  # the library refuses it
            continue
        kept = fill_late(executor, request)
        check.verify(dp.run(request))
        assert executor.stream.done()
        del kept  # the copies were read from until now
        count += 1
        if count == CASES:
            break
    if not count:
        pytest.skip("it refuses all cases that were drawn")


@pytest.fixture
def gpu():
    return dp.device("cuda:0")
