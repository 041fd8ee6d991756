"""Autotune without a GPU: what is remembered, and how cuBLASLt is asked for the same product."""

import json
from dataclasses import replace

import numpy as np
import pytest

import dispatch as dp
from dispatch.execute.algorithm_cache import Algorithm, AlgorithmCache
from dispatch.keys import Epilogue
from dispatch.libraries.cutlass import evt
from dispatch.libraries.cutlass.config import Config
from dispatch.ops.cutlass_gemm import CutlassGemmRequest, cublaslt_candidate, tune
from dispatch.ops.cutlass_gemm.reference import reference
from dispatch.ops.matmul.lower import lower

ALPHA = evt.linear_combination(with_source=False)


def request(tree=None, c=None, **options):
    rng, dev = np.random.default_rng(3), dp.device("host")
    a, b = dev.array(rng.standard_normal((16, 24)), "f32"), dev.array(rng.standard_normal((32, 24)), "f32").T
    given = {"bias": dev.array(rng.standard_normal(32), "f32")} if "bias" in str(tree) else {}
    c = None if c is None else dev.array(rng.standard_normal((16, 32)), "f32")
    options |= {"compute": dp.Compute.COMPUTE_32F_FAST_TF32, "autotune": True}
    return CutlassGemmRequest(a, b, c=c, epilogue=tree, operands=given, **options)


FUSED = {
    "plain": (None, None, Epilogue.NONE),
    "with c": (None, True, Epilogue.NONE),
    "accumulator": (evt.accumulator(), None, Epilogue.NONE),
    "relu": (evt.relu(ALPHA), None, Epilogue.RELU),
    "bias": (ALPHA + evt.row("bias"), None, Epilogue.BIAS),
    "gelu of bias": (evt.gelu_tanh(evt.accumulator() + evt.row("bias")), None, Epilogue.GELU_BIAS),
    "relu of c and bias": (evt.relu(evt.linear_combination(with_source=True) + evt.row("bias")), 1, Epilogue.RELU_BIAS),
}


@pytest.mark.parametrize("name", FUSED)
def test_matmul_is_asked_for_what_means_the_same(name):
    tree, c, epilogue = FUSED[name]
    options = {"alpha": 0.5, "beta": -2.0 if c else None}
    asked = request(tree, c, **options)
    twin = cublaslt_candidate.matmul_of(asked, dp.device("host").zeros((16, 32), "f32"))
    assert (twin.epilogue, twin.autotune, twin.reduced_precision) == (epilogue, True, False)
    expected = reference(asked)["out"]
    np.testing.assert_allclose(dp.run(twin).numpy(), expected, rtol=2**-9, atol=2**-7)  # of TF32 operands


def test_a_rival_is_for_all_numbers_as_the_plan_is():
    """Numbers are no part of a plan's key, so that a later beta may be any."""
    asked, later = (request(c=True, beta=beta) for beta in (0.0, 2.0))
    assert asked.key()[4:] == later.key()[4:]
    assert cublaslt_candidate.matmul_of(asked, dp.device("host").zeros((16, 32), "f32")).has_beta
    on_device = dp.device("host").zeros((), "f32")
    assert cublaslt_candidate.matmul_of(request(c=True, alpha=on_device, beta=on_device), None).beta is on_device


class OfCublasLt:
    """An executor whose plans of matmul are lowered as those of a GPU are."""

    def plan(self, twin):
        lower(twin, twin.compute)
        raise AssertionError("matmul takes it")


def test_what_matmul_cannot_lower_has_no_rival():
    dev = dp.device("host")
    by_columns = request(ALPHA + evt.row("bias"), out=dev.zeros((32, 16), "f32").T)
    assert cublaslt_candidate.plan(by_columns, OfCublasLt()) is None
    other_order = replace(request(out=dev.zeros((16, 32), "f32"), c=True), c=dev.zeros((32, 16), "f32").T)
    assert cublaslt_candidate.plan(other_order, OfCublasLt()) is None


@pytest.mark.parametrize("name", FUSED)
def test_the_arguments_of_matmul_are_those_of_the_request(name):
    tree, c, _ = FUSED[name]
    asked = request(tree, c, alpha=0.5, beta=-2.0 if c else None)
    out = dp.device("host").zeros((16, 32), "f32")
    names = ("a", "b", "c", "out", *asked.kinds)
    named = dict(zip(names, asked.arguments({"out": out}), strict=True))
    bias = "bias" if "bias" in asked.kinds else ""
    twin = cublaslt_candidate.matmul_of(asked, out)
    assert cublaslt_candidate.arguments_of(named, bias, source="beta" in asked.kinds) == twin.arguments({})


@pytest.mark.parametrize(
    "tree",
    [
        evt.gelu(evt.accumulator()),
        evt.silu(evt.accumulator()),
        evt.relu(evt.accumulator()) * 2,
        evt.amax(evt.accumulator(), "top"),
        evt.accumulator() + evt.source(),
    ],
    ids=str,
)
def test_what_cublaslt_does_not_fuse_has_no_rival(tree):
    assert cublaslt_candidate.matmul_of(request(tree, c=True if "c)" in str(tree) else None), None) is None


def test_autotune_is_part_of_the_key_and_named():
    assert request().key() != CutlassGemmRequest(request().a, request().b, compute=request().compute).key()
    assert "autotune" in request().describe()


def test_a_request_is_remembered_by_layouts_and_tree():
    assert tune.store_key(request()) == tune.store_key(request())
    keys = {tune.store_key(request(tree)) for tree in (None, evt.relu(ALPHA), evt.relu(evt.accumulator()))}
    assert len(keys) == 3


def test_outputs_that_are_given_change_nothing_where_they_lie_as_they_would():
    asked = request(evt.amax(evt.relu(evt.accumulator()), "top"))
    host = dp.device("host")
    out, top = asked.unallocated()["out"], asked.unallocated()["top"]
    given = asked.replace(out=host.empty(out[0], out[2]), top=host.empty(top[0], top[2]))
    assert not given.unallocated()
    assert tune.store_key(given) == tune.store_key(asked)
    column_major = asked.replace(out=host.empty(out[0][::-1], out[2]).T)
    assert tune.store_key(column_major) != tune.store_key(asked)


class Won:
    """A plan that has won."""

    def __init__(self, row):
        self.row = row


def test_the_outcome_names_row_and_kernel_and_survives_the_disk(tmp_path):
    row = dp.TABLE.of("matmul")[0]
    outcome = tune.outcome(Won(row))
    assert json.loads(outcome.blob) == {"row": row.name, "kernel": "cublasLtMatmul"}
    AlgorithmCache("GPU", "cublasLt-1", tmp_path).put("cutlass_gemm", "key", outcome)
    assert tune.recall(AlgorithmCache("GPU", "cublasLt-1", tmp_path).get("cutlass_gemm", "key")) == (None, "")


def test_a_remembered_configuration_is_one_of_the_stated_set_or_none():
    def kept(config):
        return Algorithm(json.dumps({"row": "r", "kernel": "k", "config": config, "id": "1f"}).encode(), 0)

    config = Config((128, 256), (2, 1), swizzle=4, raster="along_m")
    assert tune.recall(kept(config)) == (config, "1f")
    assert tune.recall(kept([[128, 255], [2, 1]])) is None
    assert tune.recall(kept("nonsense")) is None
    assert tune.recall(Algorithm(b"\xff", 0)) is None
