"""Autotune of cutlass_gemm on the GPU: kernels of CUTLASS and cuBLASLt race once, and the winner is remembered."""

import json

import pytest

import dispatch as dp
from dispatch.execute import cuda_executor
from dispatch.execute.algorithm_cache import AlgorithmCache
from dispatch.libraries.cutlass import evt
from dispatch.ops.cutlass_gemm import CutlassGemmRequest, tune
from dispatch.ops.cutlass_gemm.cases import Check

ALPHA = evt.linear_combination(with_source=False)
TREES = {"plain": None, "relu": evt.relu(ALPHA), "silu, which cuBLASLt has not": evt.silu(ALPHA)}


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
    return CutlassGemmRequest(a, b, epilogue=tree, autotune=True, **options)


@pytest.mark.parametrize("extents", [(2048, 2048, 1024), (64, 1024, 2048)], ids=str)
@pytest.mark.parametrize("name", TREES)
def test_the_winner_is_right_and_is_remembered(name, extents, gpu, rng, monkeypatch):
    asked = request(gpu, rng, extents, TREES[name])
    check = Check(name, asked)
    check.verify(dp.run(asked))
    known = gpu.executor().algorithms("cublasLt").get("cutlass_gemm", tune.store_key(asked))
    facts = json.loads(known.blob)
    print(f"{extents} {name}: {facts['kernel']}, of row {facts['row']}")
    assert facts["kernel"] == "cublasLtMatmul" or facts["row"] in {row.name for row in dp.TABLE.of("cutlass_gemm")}
    assert "silu" not in name or facts["kernel"] != "cublasLtMatmul"

    def race(*_):
        raise AssertionError("what was remembered was timed again")

    monkeypatch.setattr(tune, "fastest", race)
    gpu.forget_plans()
    check.verify(dp.run(asked))
    call = dp.prepare(asked)
    assert call.row.name == facts["row"]
    check.verify(call())


def test_every_candidate_is_right(gpu, rng):
    """Each order of tiles is another walk over D: none may leave a tile out."""
    asked = request(gpu, rng, (2312, 4616, 136), None)
    check = Check("candidate", asked)
    row = dp.prepare(CutlassGemmRequest(asked.a, asked.b)).row
    executor = gpu.executor()
    for plan in tune.candidate_plans(asked, executor, row):
        outputs = executor.outputs(asked)
        plan.enqueue(asked.arguments(outputs))
        check.verify(asked.result(outputs))
