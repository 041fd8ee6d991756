"""Rotary embedding on the host against complex numbers; its kernel compiled for the CPU, and for sm_90; refusals."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.core.layouts import aligned
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import BF16, F16, F32, F64, HOST
from dispatch.ops import rope as ops
from dispatch.ops.rope import RopeRequest, kernel_of, reference, vector_of
from dispatch.ops.rope.cases import cases
from dispatch.row_check import check_row
from dispatch.testing.roundoff import as_on_a_gpu

spec = importlib.util.spec_from_file_location("kernels_on_cpu", Path(__file__).with_name("kernels_on_cpu.py"))
kernels_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels_on_cpu)

ROWS = [row for row in dp.TABLE.of("rope") if row.on(HOST)]
OWN = [row for row in dp.TABLE.of("rope") if row.library == "own"]


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return kernels_on_cpu.OnCpu(tmp_path_factory.mktemp("rope"))


def operands(dev, rng, q=(2, 4, 5, 8), heads=2, turned=8, dtype=np.float64):
    shapes = (q, (q[0], heads, *q[2:]), (q[0], q[2], turned), (q[0], q[2], turned))
    return [dev.array(rng.standard_normal(shape).astype(dtype)) for shape in shapes]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_host_row_passes_its_cases(row, dev, rng):
    assert not [why for case in cases(row) if (why := check_row(row, case, dev, rng))]


@pytest.mark.parametrize("interleaved", [False, True])
def test_it_is_a_product_of_complex_numbers(interleaved, dev, rng):
    q, k, *_ = operands(dev, rng)
    angles = rng.uniform(-9, 9, (2, 5, 4))
    spread = np.repeat(angles, 2, -1) if interleaved else np.tile(angles, 2)
    cos, sin = dev.array(np.cos(spread)), dev.array(np.sin(spread))
    for x, y in zip((q, k), dp.rope(q, k, cos, sin, interleaved), strict=True):
        parts = [
            (t.numpy()[..., ::2], t.numpy()[..., 1::2]) if interleaved else np.split(t.numpy(), 2, -1) for t in (x, y)
        ]
        before, after = (one + 1j * other for one, other in parts)
        np.testing.assert_allclose(after, before * np.exp(1j * angles)[:, None], rtol=1e-13, atol=1e-13)
    back = dp.rope(*dp.rope(q, k, cos, sin, interleaved), cos, sin, interleaved, adjoint=True)
    np.testing.assert_allclose(back[0].numpy(), q.numpy(), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_adjoint_is_the_transpose(interleaved, dev, rng):
    """For cos and sin that are no rotation either: <y, R x> = <Rᵀ y, x>."""
    q, k, cos, sin = operands(dev, rng, turned=6)
    other, more, *_ = operands(dev, rng)
    there, back = dp.rope(q, k, cos, sin, interleaved), dp.rope(other, more, cos, sin, interleaved, adjoint=True)
    for x, y, forth, returned in zip((q, k), (other, more), there, back, strict=True):
        np.testing.assert_allclose((y.numpy() * forth.numpy()).sum(), (returned.numpy() * x.numpy()).sum(), rtol=1e-12)


def test_outputs_lie_as_the_inputs_do_and_may_be_they(dev, rng):
    whole = dev.array(rng.standard_normal((2, 5, 8, 8)))
    q, k = (part.transpose(0, 2, 1, 3) for part in (whole[:, :, :4], whole[:, :, 4:6]))
    _, _, cos, sin = operands(dev, rng)
    expected = reference(RopeRequest(q, k, cos, sin))
    y = dp.rope(q, k, cos, sin)
    assert [t.transpose(0, 2, 1, 3).layout.is_contiguous for t in y] == [True, True]
    v = whole.numpy()[:, :, 6:]
    assert dp.rope(q, k, cos, sin, q_out=q, k_out=k)[0] is q
    for one, other, wanted in zip(y, (q, k), expected.values(), strict=True):
        np.testing.assert_allclose(one.numpy(), wanted, rtol=1e-13, atol=1e-13)
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    np.testing.assert_array_equal(whole.numpy()[:, :, 6:], v)


@pytest.mark.parametrize(
    ("change", "operand", "given", "expected"),
    [
        ({"q": (5, 8)}, "q", "[5, 8]", "four axes"),
        ({"k": (2, 2, 4, 8)}, "k", "[2, 2, 4, 8]", "f64[2, heads, 5, 8], like q"),
        ({"cos": (5, 8)}, "cos", "[5, 8]", "[2 or 1, 5, 8 or fewer]"),
        ({"cos": (3, 5, 8)}, "cos", "[3, 5, 8]", "[2 or 1, 5, 8 or fewer]"),
        ({"cos": (2, 5, 7)}, "cos", "[2, 5, 7]", "an even number of elements"),
        ({"cos": (2, 5, 10)}, "cos", "[2, 5, 10]", "at most 8"),
        ({"sin": (2, 5, 6)}, "sin", "[2, 5, 6]", "f64[2, 5, 8], as cos is"),
        ({"q_out": (2, 4, 5, 6)}, "q_out", "[2, 4, 5, 6]", "f64[2, 4, 5, 8]"),
    ],
)
def test_a_refusal_names_operand_given_and_expected(change, operand, given, expected, dev, rng):
    fields = dict(zip(("q", "k", "cos", "sin"), operands(dev, rng), strict=True))
    fields |= {name: dev.zeros(shape, F64) for name, shape in change.items()}
    with pytest.raises(BadRequest) as caught:
        dp.rope(**fields)
    assert caught.value.operand == operand
    assert given in caught.value.given
    assert expected in caught.value.expected


def test_angles_of_another_dtype_and_outputs_that_overlap_are_refused(dev, rng):
    q, k, cos, sin = operands(dev, rng)
    with pytest.raises(BadRequest, match="cos: got f16"):
        dp.rope(q, k, cos.astype("f16"), sin.astype("f16"))
    with pytest.raises(BadRequest, match="k_out: got memory that overlaps q"):
        dp.rope(q, q, cos, sin, k_out=q)
    with pytest.raises(NoRow, match="rope"):
        dp.rope(q.astype("i8"), k.astype("i8"), cos.astype("f32"), sin.astype("f32"))


# -- the kernel -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.name, marks=[pytest.mark.compiles] if number else []) for number, row in enumerate(OWN)],
)
def test_the_kernel_run_on_the_cpu_passes_the_cases(row, dev, rng, on_cpu):
    at_once = set()
    for case in cases(row):
        if case.name != "large":  # as "vectors" is
            with as_on_a_gpu():
                check = case.check(dev, rng)
            on_cpu.run(kernel_of(check.request), check.request)
            check.verify(check.request.result({}))
            at_once |= {(case.name, vector_of(check.request))}
    count = 16 // row.dtypes[0].itemsize
    assert {name for name, each in at_once if each == count} >= {"vectors", "a rest", "gaps of vectors", "in place"}
    assert {name for name, each in at_once if each == 1} >= {"primes", "gaps", "across", "an odd rest"}


@pytest.mark.compiles
def test_more_than_32_bits_count_are_counted_by_64(dev, rng, on_cpu, monkeypatch):
    monkeypatch.setattr(ops, "SMALL", 1)
    for row in OWN[-1:]:
        for case in (case for case in cases(row) if case.name in ("vectors", "gaps")):
            with as_on_a_gpu():
                check = case.check(dev, rng)
            kernel = kernel_of(check.request)
            assert "-DINDEX=unsigned long long" in kernel.options
            assert kernels_on_cpu.size_for_sm_90(kernel) > 1000
            on_cpu.run(kernel, check.request)
            check.verify(check.request.result({}))


def test_every_choice_of_the_kernel_compiles_for_sm_90(dev, rng):
    for dtype in (F64, F32, F16, BF16):
        for factor in {dtype, F32}:
            for number, turned in enumerate((32, 6)):
                q, k, cos, sin = (t.astype(dtype) for t in operands(dev, rng, (1, 2, 3, 32), 2, turned))
                angles = (cos.astype(factor), sin.astype(factor))
                kernel = kernel_of(RopeRequest(q, k, *angles, bool(number), bool(number)))
                assert kernels_on_cpu.size_for_sm_90(kernel) > 1000


def test_one_launch_for_both_and_none_for_nothing(dev, rng):
    q, k, cos, sin = operands(dev, rng, (2, 4, 5, 32), 2, 32, np.float32)
    launch = kernel_of(RopeRequest(q, k, cos, sin)).launch(RopeRequest(q, k, cos, sin))
    assert launch.grid == (1,)  # 2 · 5 tokens of 6 heads of 4 vectors
    empty = RopeRequest(q[:, :, :0], k[:, :, :0], cos[:, :0], sin[:, :0])
    assert kernel_of(empty).launch(empty).grid == (0,)


def test_what_begins_between_two_elements_is_refused(dev, rng):
    q, k, cos, sin = operands(dev, rng)
    assert not aligned(RopeRequest(q, k, cos, sin))
    apart = dp.Tensor(q.storage, q.ptr, dev.layout(F64, q.shape, q.layout.strides, q.ptr + 4))
    assert aligned(RopeRequest(apart, k, cos, sin)) == "needs q at a multiple of 8 bytes, has 4: copy it"
