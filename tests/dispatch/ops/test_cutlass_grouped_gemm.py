"""cutlass_grouped_gemm on the host: every row through its cases; what is refused, by whom and why."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.cutlass import evt
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import HOST
from dispatch.ops.cutlass_grouped_gemm import CutlassGroupedGemmRequest, cutlass_grouped_gemm, reference
from dispatch.ops.cutlass_grouped_gemm.trials import cases

ROWS = [row for row in dp.TABLE.of("cutlass_grouped_gemm") if row.arch == HOST]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_its_cases(row, case, dev, rng):
    trial = case.trial(dev, rng)
    assert dp.prepare(trial.request).row is row
    trial.check(dp.run(trial.request))


def test_the_reference_is_a_product_for_each_group(dev, rng):
    a, b = rng.standard_normal((10, 16)), rng.standard_normal((3, 16, 8))
    request = CutlassGroupedGemmRequest(
        dev.array(a, "f16"), dev.array(b, "f16"), dev.array([4, 4, 9], "i32"), alpha=2.0, epilogue=None
    )
    a, b = (np.asarray(x).astype(np.float64) for x in (request.a, request.b))
    got = reference(request)["out"]
    np.testing.assert_allclose(got[:4], 2 * a[:4] @ b[0])
    np.testing.assert_allclose(got[4:9], 2 * a[4:9] @ b[2])
    assert np.isnan(got[9:]).all()


def test_the_output_is_made_where_none_is_given(dev):
    a, b = dev.array(np.ones((6, 16)), "bf16"), dev.array(np.ones((2, 16, 8)), "bf16")
    out = cutlass_grouped_gemm(a, b, dev.array([2, 6], "i32"), epilogue=evt.accumulator() * 0.5, out_dtype="f32")
    assert (out.shape, out.dtype) == ((6, 8), "f32")
    assert (out.numpy() == 8).all()


def small(dev, **options):
    fields = {"a": dev.zeros((6, 16), "bf16"), "b": dev.zeros((2, 16, 8), "bf16"), "ends": dev.array([2, 6], "i32")}
    return CutlassGroupedGemmRequest(**(fields | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda d: {"b": d.zeros((2, 15, 8), "bf16")}, r"b \(groups, k, n\)"),
        (lambda d: {"b": d.zeros((16, 8), "bf16")}, r"b \(groups, k, n\)"),
        (lambda d: {"ends": d.array([2, 6], "i64")}, "where each group ends"),
        (lambda d: {"ends": d.array([2, 4, 6], "i32")}, "where each group ends"),
        (lambda _: {"ends": [2, 6]}, "a dispatch Tensor"),
        (lambda d: {"out": d.zeros((6, 7), "bf16")}, r"shape \(6, 8\)"),
        (lambda d: {"alpha": d.zeros(2)}, "one element"),
        (lambda _: {"epilogue": evt.accumulator() + evt.row("bias")}, "over the accumulator and alpha"),
        (lambda _: {"epilogue": "silu"}, "a tree of"),
    ],
)
def test_a_bad_request_says_what_is_wrong(options, message, dev):
    with pytest.raises(BadRequest, match=message):
        small(dev, **options(dev))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (lambda d: {"a": d.zeros((6, 17), "bf16")[:, :16]}, "a with lines at multiples of 16 bytes"),
        (lambda d: {"a": d.zeros((16, 8), "bf16").T[:, :16][:8], "b": d.zeros((2, 16, 8), "bf16")}, "dense columns"),
        (lambda _: {"fast_accum": True}, "needs fast_accum=False"),
        (lambda d: {"a": d.zeros((6, 16), "f8e4m3"), "b": d.zeros((2, 16, 16), "f8e4m3")}, "b column-major"),
        (lambda d: {"a": d.zeros((0, 16), "bf16"), "ends": d.array([0, 0], "i32")}, "extents of 1 or more"),
    ],
)
def test_no_row_takes_what_tensor_maps_cannot_step_through(options, reason, dev):
    with pytest.raises(NoRow, match=reason):
        dp.run(small(dev, **options(dev)))
