"""Device memory: copies of any strides, memory that runs out, and memory of other libraries that is given back late."""

from __future__ import annotations

import numpy as np
import pytest

import dispatch as dp

VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.T,
    "rows": lambda x: x[3:17],
    "columns": lambda x: x[:, 2:9],
    "steps": lambda x: x[::3, ::2],
    "backward": lambda x: x[::-1],
    "backward both": lambda x: x[::-1, ::-2],
    "a row": lambda x: x[5],
    "a column": lambda x: x[:, 5],
    "an element": lambda x: x[5, 7, ...],
    "new axis": lambda x: x[:, None, 4:6],
    "nothing": lambda x: x[4:4],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f8e4m3", "i64", "c128", "bool"])
def test_a_view_copies_out_and_in_what_numpy_has(dev, rng, view, dtype):
    kind = dp.Dtype.of(dtype).numpy
    source = rng.integers(0, 100, (23, 19)).astype(kind)
    tensor = dev.array(source)
    assert np.array_equal(view(tensor).numpy(), view(source))
    changed = source.copy()
    fresh = rng.integers(0, 100, view(source).shape).astype(kind)
    view(changed)[...] = fresh
    view(tensor).copy_from(fresh)
    assert np.array_equal(tensor.numpy(), changed), "a write through a view touches nothing else"


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_a_copy_of_a_view_steps_forward(dev, rng, view):
    source = rng.standard_normal((23, 19))
    copy = view(dev.array(source)).copy()
    assert np.array_equal(copy.numpy(), view(source))
    assert copy.layout.fills_bytes
    assert copy.layout.low == 0


def test_four_axes_of_odd_steps(dev, rng):
    source = rng.standard_normal((4, 5, 6, 7))
    tensor = dev.array(source)
    assert np.array_equal(tensor[1:, ::2, 1:5, ::3].numpy(), source[1:, ::2, 1:5, ::3])
    assert np.array_equal(tensor.T.numpy(), source.T)


def test_packed_elements_of_four_bits(dev, rng):
    source = rng.integers(-3, 4, (8, 33)).astype(dp.Dtype.of("f4e2m1").numpy)
    tensor = dev.array(source)
    assert tensor.nbytes == 8 * 33 // 2
    assert np.array_equal(tensor.numpy().astype(np.float32), source.astype(np.float32))


def test_memory_that_runs_out_says_so_and_the_device_goes_on(dev, rng):
    with pytest.raises(dp.errors.OutOfMemory, match="MiB are free"):
        dev.empty((1 << 50,), "u8")
    a = dev.array(rng.standard_normal((8, 8)))
    assert np.allclose(dp.matmul(a, a).numpy(), a.numpy() @ a.numpy())


@pytest.mark.alone
def test_what_was_freed_serves_a_request_for_nearly_all_memory(dev):
    from cudabind import driver

    dev.trim()
    free, _ = driver.cuMemGetInfo()
    size = free * 2 // 5
    first, second = dev.empty((size,), "u8"), dev.empty((size,), "u8")
    del first, second
    # The pool holds both pieces; only when it gives them back is there room for one that is larger than either.
    assert dev.empty((size * 2,), "u8").nbytes == size * 2
    dev.trim()


def test_torch_does_not_get_its_memory_back_before_we_have_read_it(dev):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    size = 4096
    weight = dev.array(np.eye(size), "f32")
    for turn in range(5):
        lent = torch.full((size, size), float(turn), device="cuda")
        a = dp.from_dlpack(lent)
        stream = dev.stream()
        with stream:
            for _ in range(3):
                busy = dp.matmul(weight, weight)
            out = dp.matmul(a, weight)
        del a, lent  # the stream has yet to read it
        junk = torch.full((size, size), float("nan"), device="cuda")
        assert np.array_equal(out.numpy(), np.full((size, size), float(turn), np.float32))
        del busy, junk
