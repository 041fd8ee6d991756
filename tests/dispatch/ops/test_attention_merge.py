"""Attention over parts of the keys merged, against that over all of them; its kernel on the CPU, and for sm_90."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import F16, F32, HOST
from dispatch.ops.attention_merge import AttentionMergeRequest, evaluate, kernel_of, vector_of
from dispatch.ops.attention_merge.cases import cases
from dispatch.row_check import check_row
from dispatch.testing.roundoff import as_on_a_gpu

spec = importlib.util.spec_from_file_location("kernels_on_cpu", Path(__file__).with_name("kernels_on_cpu.py"))
kernels_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels_on_cpu)

ROWS = [row for row in dp.TABLE.of("attention_merge") if row.on(HOST)]
OWN = [row for row in dp.TABLE.of("attention_merge") if row.library == "own"]


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return kernels_on_cpu.OnCpu(tmp_path_factory.mktemp("attention_merge"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_host_row_passes_its_cases(row, dev, rng):
    assert not [why for case in cases(row) if (why := check_row(row, case, dev, rng))]


def attention(q, k, v):
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    powers = np.exp(scores)
    return powers / powers.sum(-1, keepdims=True) @ v, np.log(powers.sum(-1, keepdims=True))


def test_parts_of_the_keys_merge_into_all_of_them(dev, rng):
    q, k, v = (rng.standard_normal((2, 3, n, 8)) for n in (5, 12, 12))
    found = stats = None
    for keys in (slice(0, 3), slice(3, 4), slice(4, 12)):
        o, s = (dev.array(x.astype(np.float32)) for x in attention(q, k[:, :, keys], v[:, :, keys]))
        found, stats = (o, s) if found is None else dp.attention_merge(found, stats, o, s)
    for one, other in zip((found, stats), attention(q, k, v), strict=True):
        np.testing.assert_allclose(one.numpy(), other, rtol=2e-5, atol=2e-6)


def test_a_side_without_keys_is_not_read(dev):
    nan, one = dev.array(np.full((1, 1, 2, 4), np.nan, np.float32)), dev.array(np.ones((1, 1, 2, 4), np.float32))
    none = dev.array(np.full((1, 1, 2, 1), -np.inf, np.float32))
    some = dev.array(np.zeros((1, 1, 2, 1), np.float32))
    for given in ((nan, none, one, some), (one, some, nan, none)):
        out, stats = dp.attention_merge(*given)
        assert (out.numpy() == 1).all()
        assert (stats.numpy() == 0).all()
    out, stats = dp.attention_merge(nan, none, nan, none, out_dtype="f32")
    assert (out.numpy() == 0).all()
    assert (stats.numpy() == -np.inf).all()


def test_refusals(dev):
    a, s = dev.zeros((1, 2, 3, 4)), dev.zeros((1, 2, 3, 1))
    with pytest.raises(BadRequest, match="four axes"):
        dp.attention_merge(a[0], s, a, s)
    with pytest.raises(BadRequest, match="the shape of a"):
        dp.attention_merge(a, s, dev.zeros((1, 2, 3, 5)), s)
    with pytest.raises(BadRequest, match="b_stats"):
        dp.attention_merge(a, s, a, dev.zeros((1, 2, 3)))
    with pytest.raises(BadRequest, match="overlaps a_stats"):
        dp.attention_merge(a, s, a.copy(), s.copy(), stats_out=s)
    with pytest.raises(NoRow):
        dp.attention_merge(a.astype("f64"), s, a.astype("f64"), s)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.name, marks=[] if number in (1, 2) else [pytest.mark.compiles])
     for number, row in enumerate(OWN)],
)  # fmt: skip
def test_the_kernel_run_on_the_cpu_passes_the_cases(row, dev, rng, on_cpu):
    at_once = set()
    for case in cases(row):
        if case.name == "large":
            continue
        with as_on_a_gpu():
            check = case.check(dev, rng)
        at_once.add(vector_of(check.request))
        if check.request.a.size:
            on_cpu.run(kernel_of(check.request), check.request)
            check.verify(check.request.result({}))
    assert at_once == {1, 4}


def test_it_compiles_for_sm_90(dev):
    a, s = dev.zeros((1, 2, 3, 8), F16), dev.zeros((1, 2, 3, 1))
    for out in (F16, F32):
        assert kernels_on_cpu.size_for_sm_90(kernel_of(AttentionMergeRequest(a, s, a.copy(), s, out_dtype=out)))
    assert set(evaluate(AttentionMergeRequest(a, s, a, s), np.dtype(np.float64))) == {"out", "stats_out"}
