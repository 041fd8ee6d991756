"""What is set before a plan runs: the lines of an operand and no byte beside it."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.libraries.cudnn.prefill import zero_fills


def base(dev, shape):
    return dev.array(np.full(shape, 7), "f16")


VIEWS = {
    "dense": lambda dev: base(dev, (2, 3, 4, 8)),
    "heads last": lambda dev: base(dev, (2, 4, 3, 8)).transpose(0, 2, 1, 3),
    "sequence first": lambda dev: base(dev, (4, 2, 3, 8)).transpose(1, 2, 0, 3),
    "of three": lambda dev: base(dev, (2, 4, 3, 3, 8))[:, :, 1].transpose(0, 2, 1, 3),
    "part of a head": lambda dev: base(dev, (2, 3, 4, 16))[..., 8:],
    "every other token": lambda dev: base(dev, (2, 3, 8, 8))[:, :, ::2],
    "part of every axis": lambda dev: base(dev, (4, 5, 6, 16))[1:3, ::2, 1:5, :8],
    "one token": lambda dev: base(dev, (1, 1, 1, 8)),
    "packed": lambda dev: base(dev, (5, 3, 2, 8))[:, 1],
}


@pytest.mark.parametrize("name", VIEWS)
def test_zeros_are_put_into_a_view_and_nowhere_else(name):
    dev = dp.device("host")
    view = VIEWS[name](dev)
    start = view.storage.base
    whole = np.ndarray(view.storage.nbytes, np.uint8, view.storage.keep, start - view.storage.keep.ctypes.data)
    expected = whole.copy()
    for clear in zero_fills(3, view.layout):
        assert clear.place == 3
        for line in range(clear.height):
            at = view.ptr - start + clear.start + line * clear.pitch
            assert expected[at : at + clear.width].any(), "no byte is set twice"
            expected[at : at + clear.width] = 0
    view.copy_from(np.zeros(view.shape))
    np.testing.assert_array_equal(whole, expected)


def test_what_lies_without_gaps_is_one_line():
    (clear,) = zero_fills(0, VIEWS["sequence first"](dp.device("host")).layout)
    assert (clear.start, clear.width * clear.height) == (0, 2 * 2 * 3 * 4 * 8)
