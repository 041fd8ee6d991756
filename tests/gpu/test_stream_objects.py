"""Streams of torch, CuPy and cuda.core by their objects, and torch's current one: what runs there is in their order."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import dispatch as dp

CYCLES = 300_000_000  # about a sixth of a second
SHAPE = (256, 256)


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def is_in_order(torch, dev, stream, block):
    """A product of what a slow kernel on a stream of torch's writes first."""
    with torch.cuda.stream(stream):
        x = torch.zeros(SHAPE, device="cuda")
        torch.cuda._sleep(CYCLES)
        x.fill_(1.0)
    with block():
        found = dp.matmul(dp.from_dlpack(x), dev.array(np.eye(*SHAPE, dtype=np.float32)))
    return bool((found.numpy() == 1).all())


def test_a_stream_of_torch_is_itself(dev, torch):
    for stream in (torch.cuda.Stream(), torch.cuda.default_stream(), torch.cuda.current_stream()):
        assert dp.Stream(stream) is dp.Stream.from_handle(dev, stream.cuda_stream)
        assert dp.Stream(stream).device is dev
        assert is_in_order(torch, dev, stream, lambda stream=stream: dp.Stream(stream))


def test_torch_s_current_stream_is_used(dev, torch):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert dp.use_torch_stream() is dp.Stream(stream)
        assert is_in_order(torch, dev, stream, dp.use_torch_stream)
    assert dp.use_torch_stream(dev) is dp.Stream(torch.cuda.current_stream())


def test_a_stream_of_cupy_lives_as_long_as_its_object_is_used(dev, cupy):
    with dp.Stream(cupy.cuda.Stream(non_blocking=True)):
        gc.collect()
        x = dev.zeros(SHAPE)
        assert not dp.matmul(x, x).numpy().any()
    del x
    gc.collect()
    dev.synchronize()
    assert dp.Stream(cupy.cuda.Stream.null) is dp.Stream.from_handle(dev, 0)


def test_a_stream_of_cuda_core_is_taken(dev):
    core = pytest.importorskip("cuda.core.experimental")
    theirs = core.Device(0)
    theirs.set_current()
    stream = theirs.create_stream()
    with dp.Stream(stream) as ours:
        assert ours.handle == int(stream.handle)
        assert not dev.zeros(SHAPE).numpy().any()


def test_a_device_is_chosen_for_a_block(dev):
    with dev as chosen:
        assert chosen is dev
        assert not dev.zeros(SHAPE).numpy().any()
