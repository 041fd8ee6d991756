"""Autotune on the GPU: kernels of CUTLASS and cuBLASLt race once, and the winner is remembered."""

import json

import numpy as np
import pytest

import dispatch as dp
from dispatch.bind import race
from dispatch.execute import cuda_executor
from dispatch.execute.algorithm_cache import AlgorithmCache
from dispatch.libraries.cutlass import evt
from dispatch.ops.conv import channels_last
from dispatch.ops.matmul import MatmulRequest, cublaslt, tune
from dispatch.ops.matmul.tree_cases import Check

ALPHA = evt.linear_combination(with_source=False)
TREES = {"plain": dp.Epilogue.NONE, "relu": evt.relu(ALPHA), "silu, which cuBLASLt has not": evt.silu(ALPHA)}


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A GPU whose autotune remembers nothing yet; compiled kernels are found where they always are."""
    device = dp.device("cuda:0")
    if device.arch != 90:
        pytest.skip(f"needs sm_90, this GPU is {device.arch}")
    memory = AlgorithmCache(device.model, "of this test", tmp_path)
    monkeypatch.setattr(cuda_executor, "algorithms", lambda *_: memory)
    device.forget_plans()
    return device


def request(gpu, rng, extents, tree, **options):
    m, n, k = extents
    a, b = gpu.array(rng.standard_normal((m, k)), "bf16"), gpu.array(rng.standard_normal((n, k)), "bf16").T
    return MatmulRequest(a, b, epilogue=tree, autotune=True, **options)


@pytest.mark.parametrize("extents", [(2048, 2048, 1024), (64, 1024, 2048)], ids=str)
@pytest.mark.parametrize("name", TREES)
def test_the_winner_is_right_and_is_remembered(name, extents, gpu, rng, monkeypatch):
    asked = request(gpu, rng, extents, TREES[name])
    check = Check(name, asked)
    check.verify(dp.run(asked))
    memory = gpu.executor().algorithms("cublasLt")
    kernel = json.loads(memory.get(tune.OP, tune.stored_key(asked)).blob)
    known = memory.get("matmul rows", race.stored_key(asked))
    winner = kernel["row"] if known is None else json.loads(known.blob)["row"]
    print(f"{extents} {name}: {winner}; of CUTLASS's kernels {kernel['kernel']}")
    assert (known is None) == ("silu" in name), "one row alone takes that tree"

    def again(*_):
        raise AssertionError("what was remembered was timed again")

    for module in (race, tune, cublaslt):
        monkeypatch.setattr(module, "fastest", again)
    gpu.forget_plans()
    check.verify(dp.run(asked))
    call = dp.prepare(asked)
    assert call.row.name == winner
    check.verify(call())


def test_every_candidate_is_right(gpu, rng):
    """Each order of tiles is another walk over D: none may leave a tile out."""
    asked = request(gpu, rng, (2312, 4616, 136), dp.Epilogue.NONE, library="cutlass")
    check = Check("candidate", asked)
    row = dp.prepare(MatmulRequest(asked.a, asked.b, library="cutlass")).row
    executor = gpu.executor()
    for plan in tune.candidate_plans(asked, executor, row):
        outputs = executor.outputs(asked)
        plan.enqueue(asked.arguments(outputs))
        check.verify(asked.result(outputs))


def test_a_convolution_is_raced_for_by_both_libraries(gpu, rng, monkeypatch, torch):
    x, w = (
        channels_last(gpu.array(rng.standard_normal(shape) / 8, "f16")) for shape in ((8, 64, 28, 28), (64, 64, 3, 3))
    )
    asked = dp.ConvFwdRequest(x, w, pad=1, autotune=True)
    raced = []
    real = race.fastest

    def watched(executor, request, run, count):
        raced.append(count)
        return real(executor, request, run, count)

    monkeypatch.setattr(race, "fastest", watched)
    got = dp.run(asked).numpy()
    given = [torch.from_numpy(tensor.numpy().astype(np.float64)) for tensor in (x, w)]
    np.testing.assert_allclose(got, torch.nn.functional.conv2d(*given, padding=1).numpy(), rtol=2e-3, atol=2e-2)
    call = dp.prepare(asked)
    print(f"{raced[0]} rows raced for {asked.describe()}: {call.row.name}")
    assert len(raced) == 1
    assert raced[0] >= 2, "cuDNN's rows, and CUTLASS's where its headers are"
    known = gpu.executor().algorithms("cudnn").get("conv_fwd rows", race.stored_key(asked))
    assert json.loads(known.blob) == {"row": call.row.name}
    np.testing.assert_array_equal(call().numpy(), got)
