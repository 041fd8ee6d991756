"""Which of cuSPARSELt's kernels a product begins with, by its extents, and that only where they were timed."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.keys import Arch
from dispatch.ops.structured import kernels, rules
from dispatch.table.select import select

spec = importlib.util.spec_from_file_location(
    "cusparselt_stand_in", Path(__file__).parents[1] / "cusparselt_stand_in.py"
)
stand_in = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_in)

ROWS = [row for row in dp.TABLE.of("matmul_2_4") if row.library == "cusparseLt"]
S = dp.structured


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.fixture
def executor(monkeypatch):
    return stand_in.executor_of(monkeypatch)


@pytest.fixture
def operands(dev, rng):
    """A product in float64, and its operands."""
    dense = S.prune(dev.array(rng.standard_normal((32, 64)).astype("f2")))
    b = dev.array(rng.standard_normal((64, 16)).astype("f2"))
    return dense.numpy().astype("f8") @ b.numpy().astype("f8"), S.compress(dense), b


def test_the_kernel_of_a_product_follows_its_extents():
    assert kernels.tiles_for(4096, 1024) == "wide"
    assert kernels.tiles_for(10240, 129) == "wide"  # 80 tiles of 128 x 256
    assert kernels.tiles_for(10240 - 128, 129) == "medium"
    assert kernels.tiles_for(4096, 256) == "medium"
    assert kernels.tiles_for(1024, 640) == "medium"
    assert kernels.tiles_for(1024, 512) == "small"
    assert kernels.tiles_for(10240, 16) == "tall"
    assert kernels.tiles_for(10240, 128) == "tall"
    assert kernels.tiles_for(10240 - 128, 16) == "small"
    assert kernels.tiles_for(4096, 16) == "few"
    assert kernels.tiles_for(1024, 16) == "tiny"
    assert kernels.tiles_for(1024, 512, 2) == "medium", "products of one call fill the GPU together"
    assert kernels.tiles_for(1024, 16, 10) == "tall"


def test_kernels_that_were_timed_are_sound_and_of_rows():
    pairs = {(str(row.dtypes[0]), str(row.dtypes[3])) for row in ROWS}
    for (a, d, by_rows), known in kernels.TIMED.items():
        assert (a, d) in pairs
        assert (a, d, not by_rows) in kernels.TIMED
        assert all(0 <= number < rules.SAFE_KERNELS for number in known)


@pytest.mark.parametrize("is_timed", [True, False])
def test_a_plan_has_the_kernel_that_was_the_fastest(is_timed, executor, dev, operands, monkeypatch):
    timed = kernels.Kernels(wide=1, tall=2, medium=3, small=4, few=5, tiny=6)
    monkeypatch.setattr(kernels, "TIMED", {("f16", "f16", True): timed})
    if is_timed:  # as if the host were the library and GPU that were
        monkeypatch.setattr(kernels, "VERSIONS", ("host",))
        monkeypatch.setattr(kernels, "ARCH", "host")
    exact, a, b = operands

    def number_of(**chosen):
        request = dp.Matmul24Request(*a, b, **chosen)
        row = select(request, Arch(90))
        plan, outputs = row.call(request, executor, row), dev.executor().outputs(request)
        plan.enqueue(request.arguments(outputs))
        np.testing.assert_allclose(request.result(outputs).numpy().astype("f8"), exact, rtol=2e-3, atol=2e-3)
        return plan.algorithm.config_id

    own = 1  # the stand-in's choice
    assert number_of() == (6 if is_timed else own)
    assert number_of(config_id=2) == 2
    assert number_of(split_k=1) == own
    assert number_of(out=dev.zeros((16, 32), "f16").T) == own, "another order of D"
    monkeypatch.setattr(kernels, "TIMED", {("f16", "f16", True): timed._replace(tiny=stand_in.KERNELS)})
    assert number_of() == own, "a kernel that is not there"


@pytest.mark.parametrize("by_rows", [True, False])
def test_only_the_library_and_gpu_that_were_timed_have_such_kernels(by_rows, dev, operands):
    _, a, b = operands
    out = {} if by_rows else {"out": dev.zeros((16, 32), "f16").T}
    request = dp.Matmul24Request(*a, b, **out)
    stand = SimpleNamespace(a_dtype=request.a_dtype, d_dtype=request.d_dtype, layout_of=request.layout_of)
    for stamp, known in (
        ("cusparseLt 0.8.0 sm_90", kernels.TIMED["f16", "f16", by_rows].tiny),
        ("cusparseLt 0.8.0 sm_100", None),
        ("cusparseLt 0.9.0 sm_90", None),
        ("cusparseLt 0.80.0 sm_90", None),
        ("host", None),
    ):
        stand.form = request.form._replace(made_by=stamp)
        assert kernels.kernel_of(stand) == known
