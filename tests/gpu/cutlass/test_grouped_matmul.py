"""Every grouped_matmul row on the GPU through all its cases; the groups' ends may change from call to call."""

from dataclasses import replace

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import NoRow
from dispatch.execute import cuda_executor
from dispatch.execute.algorithm_cache import AlgorithmCache
from dispatch.execute.installed import installed
from dispatch.keys import HOST
from dispatch.ops.grouped_matmul import grouped_matmul
from dispatch.ops.grouped_matmul.cases import GroupedTrial, cases, list_cases

ROWS = [row for row in dp.TABLE.of("grouped_matmul") if row.min_arch != HOST]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]


@pytest.fixture
def gpu():
    device = dp.device("cuda:0")
    if device.arch != 90:
        pytest.skip(f"needs sm_90, this GPU is {device.arch}")
    return device


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_its_cases(row, case, gpu, rng, skip_without):
    skip_without(row)
    check = case.check(gpu, rng)
    call = dp.prepare(check.request)
    assert call.row is row
    for _ in range(3):  # the second run of the same addresses is recorded, the third a replay
        check.renew()
        check.verify(call())
    again = case.check(gpu, rng)
    again.verify(dp.run(again.request))


@pytest.mark.parametrize("library", ["cutlass", "cublasLt"])
def test_a_replay_reads_where_the_groups_end_then(library, gpu, rng, skip_without):
    row = next(row for row in ROWS if row.dtypes[0].name == "bf16" and row.library == library)
    skip_without(row)
    request = cases(row)[0].request(gpu, rng)
    call = dp.prepare(request)
    total = request.a.shape[0]
    for _ in range(4):
        request.out.copy_from(np.full(request.out.shape, 7.0))
        request.ends.copy_from(np.sort(rng.integers(0, total + 1, request.groups)))
        GroupedTrial("other ends", request).verify(call())


def test_ends_may_be_told_by_the_host(gpu, rng):
    row = next(row for row in ROWS if row.dtypes[0].name == "bf16")
    request = cases(row)[0].request(gpu, rng)
    ends = request.ends.numpy().tolist()
    got = grouped_matmul(request.a, request.b, ends, alpha=request.alpha, out=request.out)
    GroupedTrial("ends of the host", request).verify(got)


@pytest.mark.parametrize("library", ["cutlass", "cublasLt"])
def test_products_are_placed_anew_where_their_memory_is_another(library, gpu, rng, skip_without):
    """The addresses are arguments of the recorded call, in launches of 32 groups each."""
    row = next(row for row in ROWS if row.dtypes[0].name == "bf16" and row.library == library)
    skip_without(row)
    many = next(case for case in list_cases(row) if case.name == "many")
    for _ in range(3):
        check = many.check(gpu, rng)
        call = dp.prepare(check.request)
        for _ in range(2):
            check.verify(call())


def test_outputs_are_made_where_none_are_given(gpu, rng):
    a = [gpu.array(rng.standard_normal((m, 64)), "bf16") for m in (3, 150)]
    b = [gpu.array(rng.standard_normal((n, 64)), "bf16").T for n in (20, 72)]
    for got, x, y in zip(grouped_matmul(a, b), a, b, strict=True):
        exact = x.numpy().astype(float) @ y.numpy().astype(float)
        np.testing.assert_allclose(got.numpy().astype(float), exact, rtol=2**-7, atol=2**-7 * np.abs(exact).max())


BY_CUBLASLT = [row for row in ROWS if row.library == "cublasLt"]


@pytest.mark.parametrize("row", BY_CUBLASLT, ids=lambda row: row.name)
def test_an_older_cublaslt_is_refused_with_its_version(row, gpu, rng):
    if installed["cublasLt"] >= row.min_version:
        pytest.skip("the installed cublasLt is new enough")
    with pytest.raises(NoRow) as refusal:
        dp.run(cases(row)[0].request(gpu, rng))
    needed = ".".join(map(str, row.min_version))
    assert any(needed in str(reason) for reason in dict(refusal.value.tried)[row.name])


def test_both_libraries_race(gpu, rng, tmp_path, monkeypatch, skip_without):
    row = next(row for row in BY_CUBLASLT if row.dtypes[0].name == "bf16")
    skip_without(row)
    asked = []
    for each in ROWS:
        if each.dtypes == row.dtypes:
            monkeypatch.setitem(
                each.__dict__, "call", lambda *given, call=each.call: asked.append(given[2]) or call(*given)
            )
    known = AlgorithmCache(gpu.model, "both", tmp_path)
    monkeypatch.setattr(cuda_executor, "algorithms", lambda *_: known)  # kernels stay in the cache that they are in
    request = replace(cases(row)[0].request(gpu, rng), library=None, autotune=True)
    call = dp.prepare(request)
    GroupedTrial("raced", request).verify(call())
    assert {each.library for each in asked} == {"cutlass", "cublasLt"}
