"""Copies that go on beside the host: order, pinned memory that users hold, and memory that is dropped too early."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import dispatch as dp

ROOT = Path(__file__).parents[2]
PATIENCE = 60
LONG = 4096


def test_copies_come_and_go_behind_the_work_they_belong_to(dev, rng):
    source = dev.pinned((LONG, LONG), "f32")
    source[...] = rng.standard_normal((LONG, LONG))
    x = dev.empty((LONG, LONG))
    coming = x.copy_from_async(source)
    eye = dev.array(np.eye(LONG), "f32")
    y = dp.matmul(x, eye)
    back = dev.pinned((LONG, LONG), "f32")
    going = y.numpy_async(back)
    x.copy_from_async(np.zeros((LONG, LONG), np.float32))  # behind all of it, from memory that is dropped
    assert going.result(PATIENCE) is back
    assert coming.done()
    assert np.array_equal(back, source)
    assert not x.numpy().any()


def test_every_kind_of_array_comes_and_goes(dev, rng):
    for dtype in ("f32", "bf16", "f8e4m3", "i64", "c128", "bool", "f4e2m1"):
        kind = dp.Dtype.of(dtype).numpy
        source = rng.integers(0, 3, (6, 8)).astype(kind)
        for view in (lambda x: x, lambda x: x[1:4], lambda x: x[::2], lambda x: x.T, lambda x: x[:0]):
            if dtype == "f4e2m1" and view(source).shape != source.shape:
                continue  # packed elements are copied whole
            x = dev.array(np.zeros((6, 8), kind))
            part = x if dtype == "f4e2m1" else view(x)
            wanted = source if dtype == "f4e2m1" else view(source)
            assert part.copy_from_async(wanted).result() is part
            assert np.array_equal(part.numpy_async().result(PATIENCE), wanted)
            out = np.empty(wanted.shape, kind)
            assert part.numpy_async(out).result() is out
            assert np.array_equal(out, wanted)


def test_a_pageable_array_may_change_at_once_and_a_pinned_one_after_the_waiting_copy(dev):
    size = 1 << 24
    source, pinned = np.ones(size, np.float32), dev.pinned(size)
    x, y = dev.empty(size), dev.empty(size)
    copy = x.copy_from_async(source)
    source[...] = 2
    pinned[...] = 1
    y.copy_from(pinned)
    pinned[...] = 2
    copy.result()
    assert (x.numpy() == 1).all()
    assert (y.numpy() == 1).all()


def test_what_is_dropped_under_way_is_not_used_for_anything_else(dev):
    size = 1 << 22
    cells = [dev.empty(size) for _ in range(16)]
    for turn in range(4):
        for number, cell in enumerate(cells):
            source = dev.pinned(size)
            source[...] = turn * 100 + number
            cell.copy_from_async(source)
            del source
        gc.collect()
        assert all((cell.numpy() == turn * 100 + number).all() for number, cell in enumerate(cells))
        lost = [cell.numpy_async() for cell in cells]
        del lost


def test_asyncio_awaits_copies(dev):
    async def main():
        x = dev.array(np.arange(1 << 20, dtype=np.float32))
        return await asyncio.gather(*(x.numpy_async() for _ in range(8)))

    assert all(np.array_equal(array, np.arange(1 << 20)) for array in asyncio.run(main()))


CLOSED = """
import numpy as np
import dispatch as dp
dev = dp.device("cuda:0")
x = dev.array(np.arange(1000.0))
a = x.numpy_async().result()
dev.close()
print(a.sum())
new = dp.device("cuda:0")
y = new.array(a)
del a
print(y.numpy().sum())
new.close()
"""


def test_a_pinned_array_outlives_its_device():
    done = subprocess.run(
        [sys.executable, "-c", CLOSED],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.stdout, done.stderr) == ("499500.0\n499500.0\n", "")


def test_copies_through_a_parent_reach_its_child(rng):
    with dp.Supervisor("cuda:0", streams=2, isolation="process") as sup:
        dev = sup.device
        source = dev.pinned((1024, 1024))
        source[...] = rng.standard_normal((1024, 1024))
        a, b = dev.empty((1024, 1024)), dev.array(np.eye(1024), "f32")
        for _ in range(3):
            a.copy_from_async(source).result()
            out = sup.submit(dp.MatmulRequest(a, b)).result(PATIENCE)
            assert np.allclose(out.numpy_async().result(), source, atol=1e-2)
            source *= 2
        del out, a, b
    sup.device.close()
