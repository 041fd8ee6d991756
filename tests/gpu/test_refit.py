"""Refit on the GPU: work in flight reads the old weights, what follows the new ones, and the graph is the same."""

import numpy as np
import pytest

import dispatch as dp


@pytest.fixture
def gpu():
    return dp.device("cuda:0")


@pytest.mark.parametrize("kind", ["a tensor", "an array", "other lines", "another order"])
def test_each_call_reads_the_weights_of_its_place_in_the_stream(kind, gpu, rng):
    n, k = 512, 2048
    first, second = (rng.standard_normal((k, n)).astype(np.float32) for _ in range(2))
    a, b = gpu.array(rng.standard_normal((1024, k)), "f32"), gpu.array(first)
    outputs = [gpu.empty((1024, n), "f32") for _ in range(2)]
    calls = [dp.prepare(dp.MatmulRequest(a, b, out=out)) for out in outputs]
    wide = gpu.zeros((k, n + 64), "f32")[:, :n]
    wide.copy_from(second)
    given = {"a tensor": gpu.array(second), "an array": second, "other lines": wide, "another order": wide.T.T}[kind]
    for _ in range(3):
        calls[0].refit(gpu.array(first))
        for _ in range(10):
            calls[0]()
        calls[0].refit(given)
        for _ in range(10):
            calls[1]()
        for out, weights in zip(outputs, (first, second), strict=True):
            expected = a.numpy().astype(np.float64) @ weights
            np.testing.assert_allclose(out.numpy(), expected, rtol=1e-3, atol=5e-3)
