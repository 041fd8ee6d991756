"""CUTLASS's kernels inside a graph that the caller captures, in the strictest mode: compiled and loaded in it."""

from __future__ import annotations

import ctypes

import pytest

import dispatch as dp
from cudabind import driver
from dispatch.errors import NoRow
from dispatch.keys import HOST
from dispatch.row_check import cases_of

OPS = sorted({row.op for row in dp.TABLE if row.min_arch != HOST and row.library == "cutlass"})


@pytest.mark.parametrize("op", OPS)
def test_a_first_call_is_captured(rng, op):
    dev = dp.device("cuda:0")
    for row in dp.TABLE.of(op):
        if row.min_arch == HOST or not row.on(dev.arch):
            continue
        check = cases_of(row)[0].check(dev, rng)
        dev.synchronize()
        stream, graph = dev.stream(), ctypes.c_void_p()
        handle = ctypes.c_void_p(stream.handle)
        assert driver.cuStreamBeginCapture.unchecked(handle, 0) == 0
        try:
            with stream:
                result = dp.run(check.request)
        except NoRow:
            continue  # the next row
        finally:
            assert driver.cuStreamEndCapture.unchecked(handle, ctypes.byref(graph)) == 0, "the capture was ended"
        executable = driver.cuGraphInstantiate(graph.value, 0)
        driver.cuGraphDestroy(graph.value)
        driver.cuGraphLaunch(executable, stream.handle)
        stream.synchronize()
        check.verify(result)
        driver.cuGraphExecDestroy(executable)
        return
    pytest.skip(f"no row of {op} runs on {dev.arch}")
