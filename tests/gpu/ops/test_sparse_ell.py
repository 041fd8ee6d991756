"""Sliced and blocked ELL on the GPU at sizes of use; their rows' cases run among those of all sparse matrices."""

import numpy as np
import pytest

import dispatch as dp

S = dp.sparse
RELATIVE = {"f2": 2e-3, "f4": 1e-5, "f8": 1e-13, "c8": 1e-5, "c16": 1e-13}


def close(found, expected, dtype):
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= RELATIVE[dtype] * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16", "f2"])
@pytest.mark.parametrize("size", [1, 2, 32, 100])
def test_slices_of_rows_of_all_lengths(size, dtype, gpu, rng):
    dense = rng.standard_normal((3001, 500)) * (rng.random((3001, 500)) < 0.3 * rng.random((3001, 1)) ** 3)
    a, x = S.tosell(dense.astype(dtype), slice_size=size, device=gpu), rng.standard_normal(500).astype(dtype)
    exact = dense.astype(dtype).astype("c16" if dtype[0] == "c" else "f8") @ x
    for turn in range(60):  # recorded and relocated calls, too
        y = a @ gpu.array(x * (1 + turn % 3))
        if turn % 10 == 0:
            close(y.numpy(), exact * (1 + turn % 3), dtype)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("block", [2, 8, 16, 32])
def test_blocks_of_every_size(block, dtype, gpu, rng):
    there = np.kron(rng.random((512 // block, 256 // block)) < 0.2, np.ones((block, block)))
    dense = (rng.standard_normal((512, 256)) * there).astype(dtype)
    a = S.toblocked_ell(dense, block=block, device=gpu)
    for k, order in ((8, "C"), (64, "F"), (128, "C")):
        b = rng.standard_normal((256, k)).astype(dtype)
        given = gpu.array(b) if order == "C" else gpu.array(np.ascontiguousarray(b.T)).T
        close((a @ given).numpy().astype("f8"), dense.astype("f8") @ b.astype("f8"), dtype if dtype != "f4" else "f2")
