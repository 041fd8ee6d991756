"""Transforms over an axis without elements that is filled up with zeros: zeros, whatever the memory held before."""

import numpy as np
import pytest

import dispatch as dp

SIGNAL, SPECTRA = ("fft", "ifft", "rfft", "ihfft", "dct", "dst"), ("irfft", "hfft", "irfftn")


@pytest.mark.parametrize("name", [*SIGNAL, *SPECTRA])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_zeros_are_transformed_to_zeros(name, dtype):
    a = dp.device("host").array(np.zeros((2, 0), dtype if name in SIGNAL else f"c{2 * int(dtype[1])}"))
    for n in range(1, 9):
        freed = [np.full((2, n), np.nan, dtype) for _ in range(8)]
        del freed
        y = getattr(dp.fft, name)(a, **({"s": (2, n)} if name.endswith("n") else {"n": n}))
        assert not y.numpy().any()
        assert y.shape[0] == 2


def test_a_store_callback_gets_zeros():
    a = dp.device("host").array(np.zeros((2, 0), "c16"))
    add_one = dp.fft.Callback("return x + 1;", lambda x: x + 1)
    freed = [np.full((2, 6), np.nan) for _ in range(8)]
    del freed
    assert (dp.fft.irfft(a, n=6, store=add_one).numpy() == 1).all()
