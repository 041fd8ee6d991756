"""Autotune on the GPU: right results, in place too, an outcome that is kept and believed only where it fits."""

from __future__ import annotations

import json

import numpy as np
import pytest

import dispatch as dp
from dispatch.execute import autotune as tuning
from dispatch.execute import installed
from dispatch.ops.matmul import cublaslt

EPILOGUE = dp.Epilogue.RELU_AUX_BIAS


@pytest.fixture
def dev(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDABIND_CACHE", str(tmp_path))
    installed.algorithms.cache_clear()
    yield dp.device("cuda:0")
    installed.algorithms.cache_clear()


@pytest.fixture
def races(monkeypatch):
    """How often candidates were timed."""
    counted = []
    real = tuning.fastest

    def counting(*arguments):
        counted.append(arguments[-1])
        return real(*arguments)

    monkeypatch.setattr(cublaslt, "fastest", counting)
    return counted


def tuned(dev, rng):
    a, b, bias = (dev.array(rng.standard_normal(shape), "bf16") for shape in ((300, 512), (512, 264), (264,)))
    return dp.MatmulRequest(a, b, bias=bias, epilogue=EPILOGUE, autotune=True, library="cublasLt")


def check(request, out):
    a, b, bias = (t.numpy().astype(np.float64) for t in (request.a, request.b, request.bias))
    expected = np.maximum(a @ b + bias, 0)
    assert np.linalg.norm(out.numpy().astype(np.float64) - expected) / np.linalg.norm(expected) < 5e-3  # bf16


def file_of(dev):
    return dev.executor().algorithms("cublasLt").path


def test_a_tuned_request_is_right_and_timed_once(dev, rng, races):
    request = tuned(dev, rng)
    with dev.stream():  # an executor of its own, with no plans yet
        for _ in range(4):
            check(request, dp.run(request)[0])
    assert len(races) == 1
    assert races[0] > 1, "there was nothing to choose from"
    stored = json.loads(file_of(dev).read_text())
    assert len(stored["algorithms"]) == 1


def test_another_process_takes_the_outcome_without_timing(dev, rng, races):
    with dev.stream():
        dp.run(tuned(dev, rng))
    installed.algorithms.cache_clear()  # what a new process would start with
    with dev.stream():
        again = tuned(dev, rng)
        check(again, dp.run(again)[0])
    assert len(races) == 1


@pytest.mark.parametrize("blob", ["AAAA", "/" * 85 + "8="], ids=["short", "no algorithm"])
def test_an_outcome_that_is_no_algorithm_is_timed_anew(dev, rng, races, blob):
    with dev.stream():
        dp.run(tuned(dev, rng))
    stored = json.loads(file_of(dev).read_text())
    stored["algorithms"] = {key: [blob, 0] for key in stored["algorithms"]}
    file_of(dev).write_text(json.dumps(stored))
    installed.algorithms.cache_clear()
    with dev.stream():
        again = tuned(dev, rng)
        check(again, dp.run(again)[0])
    assert len(races) == 2


def test_tuning_leaves_the_callers_tensors_alone(dev, rng):
    a, b = (dev.array(rng.standard_normal((256, 256)), "f32") for _ in range(2))
    total = dev.array(rng.standard_normal((256, 256)), "f32")
    before = [t.numpy() for t in (a, b, total)]
    with dev.stream():
        call = dp.prepare(dp.MatmulRequest(a, b, beta=1.0, out=total, autotune=True, library="cublasLt"))
    assert all(np.array_equal(t.numpy(), was) for t, was in zip((a, b, total), before, strict=True))
    call()
    expected = before[2].astype(np.float64) + before[0].astype(np.float64) @ before[1].astype(np.float64)
    assert np.allclose(total.numpy(), expected, rtol=1e-4, atol=1e-4)


def test_a_product_without_the_wish_is_not_timed(dev, rng, races):
    request = tuned(dev, rng)
    with dev.stream():
        check(request, dp.matmul(request.a, request.b, bias=request.bias, epilogue=EPILOGUE)[0])
    assert not races
    assert not file_of(dev).exists()
