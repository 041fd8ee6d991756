"""CUTLASS's rows of matmul on the host: their cases and random trees; what is refused, by whom and why."""

from dataclasses import replace

import numpy as np
import pytest

import dispatch as dp
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import BF16, HOST
from dispatch.libraries.cutlass import evt
from dispatch.ops.conv import conv_fwd
from dispatch.ops.matmul import MatmulRequest, matmul
from dispatch.ops.matmul.reference import reference
from dispatch.ops.matmul.tree_cases import quantized_cases, row_cases, tree_cases

ROWS = [row for row in dp.TABLE.of("matmul") if row.min_arch == HOST and row.of("cutlass")]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in row_cases(row)]


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_its_cases(row, case, dev, rng):
    check = case.check(dev, rng)
    assert dp.prepare(check.request).row is row
    check.verify(dp.run(check.request))


@pytest.mark.parametrize("case", [*tree_cases(), *quantized_cases()], ids=lambda case: case.id)
def test_a_random_tree_passes(case, dev, rng):
    check = case.check(dev, rng)
    check.verify(dp.run(check.request))


def test_the_reference_is_numpys_product(dev, rng):
    a, b = rng.standard_normal((5, 16)), rng.standard_normal((16, 8))
    request = MatmulRequest(dev.array(a, "bf16"), dev.array(b, "bf16"), alpha=0.5, library="cutlass")
    expected = 0.5 * (np.asarray(request.a).astype(np.float64) @ np.asarray(request.b).astype(np.float64))
    np.testing.assert_allclose(reference(request)["out"], expected)


def test_what_the_tree_stores_and_reduces_is_returned_in_its_order(dev, rng):
    a, b = (dev.array(rng.standard_normal(shape), "f16") for shape in ((4, 8), (8, 16)))
    tree = evt.reduce(evt.relu(evt.store(evt.accumulator(), "before", "f32")), "total", "sum", over="n")
    out, before, total = matmul(a, b, epilogue=tree, library="cutlass")
    assert (out.dtype, before.dtype, total.dtype) == ("f16", "f32", "f32")
    assert (out.shape, before.shape, total.shape) == ((4, 16), (4, 16), (4,))
    np.testing.assert_allclose(total.numpy(), np.maximum(before.numpy(), 0).sum(1), rtol=1e-5)


def test_memory_given_for_an_output_is_written(dev):
    a, b = dev.array(np.ones((4, 8)), "f16"), dev.array(np.ones((8, 16)), "f16")
    largest = dev.zeros((), "f32")
    out, returned = matmul(
        a, b, epilogue=evt.amax(evt.accumulator(), "top"), operands={"top": largest}, library="cutlass"
    )
    assert returned is largest
    assert largest.item() == 8
    assert out.numpy().min() == 8


def test_a_prepared_call_takes_other_operands_by_the_trees_names(dev):
    a, b = dev.array(np.ones((4, 8)), "f16"), dev.array(np.ones((8, 16)), "f16")
    tree = evt.accumulator() + evt.row("bias")
    call = dp.prepare(MatmulRequest(a, b, epilogue=tree, operands={"bias": dev.zeros(16, "f32")}, library="cutlass"))
    assert call().numpy().max() == 8
    assert call(bias=dev.array(np.full(16, 2.0), "f32")).numpy().min() == 10
    with pytest.raises(BadRequest, match="a name that is not an operand of this request"):
        call(other=a)


def test_the_rest_is_clipped_and_rounded_on_the_way_to_few_bits(dev):
    a, b = dev.array([[100.0]] * 4, "f16"), dev.array([[1.0, 3.5, -9.0, 0.025]], "f16")
    assert matmul(a, b, out_dtype="i8", library="cutlass").numpy()[0].tolist() == [100, 127, -128, 2]
    assert matmul(a, b, out_dtype="f8e4m3", library="cutlass").numpy()[0].astype(float).tolist() == [96, 352, -448, 2.5]


def apart(dev, shape, strides, dtype="bf16"):
    """A view of little memory, of extents and steps that only a large one could have."""
    whole = dev.zeros(256, dtype)
    return Tensor(whole.storage, whole.ptr, dev.layout(whole.dtype, shape, strides, whole.ptr))


def small(dev, **options):
    fields = {"a": dev.zeros((16, 32), "bf16"), "b": dev.zeros((32, 16), "bf16")} | options
    return MatmulRequest(**fields, library="cutlass")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda d: {"b": d.zeros((16, 32), "bf16")}, "32 rows"),
        (lambda d: {"a": d.zeros(32, "bf16")}, "two axes"),
        (lambda d: {"a": apart(d, (2**31, 32), (32, 1))}, "a: .*; expected extents up to 2147483647"),
        (lambda d: {"b": apart(d, (32, 2**31), (1, 32))}, "b: .*; expected extents up to 2147483647"),
        (lambda d: {"a": apart(d, (2**32 + 2, 16, 32), (0, 32, 1))}, "a: .*; expected extents up to 2147483647"),
        (lambda _: {"a": [[0.0] * 32] * 16}, "a dispatch Tensor"),
        (lambda _: {"epilogue": object()}, "a tree of"),
        (lambda d: {"operands": {"bias": d.zeros(16)}}, "the names in the tree"),
        (lambda _: {"epilogue": evt.accumulator() + evt.row("bias")}, "the row that the epilogue reads"),
        (lambda _: {"epilogue": evt.accumulator() + evt.row("v"), "operands": {"v": 2.0}}, "a Tensor"),
        (lambda d: {"epilogue": evt.accumulator() + evt.row("v"), "operands": {"v": d.zeros(15)}}, r"shape \(16,\)"),
        (lambda d: {"epilogue": evt.accumulator() * evt.scalar("s"), "operands": {"s": d.zeros(2)}}, "one element"),
        (lambda d: {"out": d.zeros((16, 15), "bf16")}, r"shape \(16, 16\)"),
        (lambda d: {"out": d.zeros((16, 16), "bf16"), "out_dtype": "f32"}, "the dtype of out"),
        (lambda d: {"epilogue": evt.amax(evt.accumulator(), "t"), "operands": {"t": d.zeros((), "f16")}}, "dtype f32"),
        (
            lambda d: {"epilogue": evt.accumulator() + evt.row("v"), "operands": {"v": d.zeros(15)}},
            r"expected shape \(16,\)$",  # once, although a row of each product has the same shape here
        ),
    ],
)
def test_a_bad_request_says_what_is_wrong(options, message, dev):
    with pytest.raises(BadRequest, match=message):
        small(dev, **options(dev))


def test_an_output_over_an_operand_is_refused(dev):
    whole = dev.zeros((32, 32), "bf16")
    with pytest.raises(BadRequest, match="overlaps a"):
        small(dev, a=whole[:16], out=whole[8:24, :16])
    assert dp.run(small(dev, c=whole[:16, :16], out=whole[:16, :16])).shape == (16, 16)  # C may be D
    floats = dev.zeros((16, 16), "f32")
    halves = Tensor(floats.storage, floats.ptr, dev.layout(BF16, (16, 16), (16, 1), floats.ptr))
    with pytest.raises(BadRequest, match="overlaps c"):  # at the same address, but not the same elements
        small(dev, c=floats, out=halves)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (lambda d: {"a": d.zeros((17, 40), "bf16")[1:, 1:33]}, "a at a multiple of 16 bytes, has 2"),
        (lambda d: {"a": d.zeros((16, 33), "bf16")[:, :32]}, "a with lines at multiples of 16 bytes"),
        (lambda d: {"a": d.zeros((16, 33), "bf16")[:, :32]}, "a with lines of and at multiples of 4 bytes"),
        (lambda d: {"a": d.zeros((16, 64), "bf16")[:, ::2]}, "a with dense rows or columns"),
        (lambda d: {"out": d.zeros((16, 32), "bf16")[:, ::2]}, "out with dense rows"),
        (lambda d: {"b": d.zeros((32, 8), "bf16").T[..., None]}, "b with lines at multiples of 16 bytes"),
        (lambda d: {"a": d.zeros((0, 32), "bf16")}, "extents of 1 or more"),
        (lambda _: {"fast_accum": True}, "needs fast_accum=False"),
        (lambda d: {"a": d.zeros((2, 2, 16, 32), "bf16"), "b": d.zeros((2, 2, 32, 16), "bf16")}, "one batch axis"),
        (
            lambda d: {"a": d.zeros((16, 32), "f32"), "b": d.zeros((32, 16), "f32")},
            "needs compute=COMPUTE_32F_FAST_TF32",
        ),
        (lambda d: {"a": d.zeros((16, 32), "i8"), "b": d.zeros((32, 16), "i8")}, "b column-major"),
        (lambda d: {"a": d.zeros((16, 32), "i8"), "b": d.zeros((16, 32), "i8").T, "alpha": 0.5}, "whole numbers"),
    ],
)
def test_no_row_takes_what_tensor_maps_cannot_step_through(options, reason, dev):
    with pytest.raises(NoRow, match=reason):
        dp.run(small(dev, **options(dev)))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (lambda d: {"epilogue": evt.row("v") * 2, "operands": {"v": d.zeros(16)}}, "reads the accumulator"),
        (lambda d: {"epilogue": evt.accumulator() + evt.row("v"), "operands": {"v": d.zeros(16, "f64")}}, "v of f32"),
        (lambda d: {"epilogue": evt.accumulator() + evt.row("v"), "operands": {"v": d.zeros(32)[::2]}}, "a dense v"),
        (
            lambda d: {
                "epilogue": evt.reduce(evt.accumulator(), "v", over="n"),
                "operands": {"v": d.zeros((16, 2))[:, 0]},
            },
            "a dense v",
        ),
    ],
)
def test_a_tree_that_cutlass_cannot_build_is_refused_on_the_host_too(options, reason, dev):
    with pytest.raises(NoRow, match=reason):
        dp.run(small(dev, **options(dev)))


@pytest.mark.parametrize("alpha", [0.5, np.float32(0.5), 2**31, -(2.0**40), float("nan")], ids=repr)
def test_a_number_that_no_i32_is_does_not_run_by_the_plan_of_one_that_is(alpha, dev):
    a, b = dev.array(np.ones((16, 32)), "i8"), dev.array(np.ones((16, 32)), "i8").T
    assert (matmul(a, b, alpha=np.float32(-2), library="cutlass").numpy() == -64).all()
    with pytest.raises(NoRow, match=r"whole numbers of 32 bits for an i32 D, has alpha"):
        matmul(a, b, alpha=alpha, library="cutlass")


@pytest.mark.parametrize("value", [10**400, 1e39, np.float64(-1e300)], ids=lambda v: f"{type(v).__name__} {v}"[:20])
def test_a_number_that_f32_does_not_hold_is_named(value, dev):
    with pytest.raises(BadRequest, match=r"alpha: got .* a number"):
        small(dev, alpha=value)
    tree = evt.accumulator() * evt.scalar("s")
    with pytest.raises(BadRequest, match=r"operands\['s'\]: got .* a number"):
        small(dev, epilogue=tree, operands={"s": value})
    x, w = (dev.zeros(shape, "f16").transpose(0, 3, 1, 2) for shape in ((1, 4, 4, 8), (8, 3, 3, 8)))
    with pytest.raises(BadRequest, match=r"operands\['s'\]: got .* a number"):
        conv_fwd(x, w, epilogue=tree, operands={"s": value})
    double = dev.array(np.ones((8, 8)), "f64")
    assert matmul(double, double, alpha=1e300, library="cutlass").numpy().max() == 8e300


def test_equal_choices_have_equal_keys_and_other_trees_have_others(dev):
    one, same = small(dev), small(dev)
    assert one.key() == same.key()
    assert one.key() != small(dev, epilogue=evt.relu(evt.accumulator())).key()
    assert one.key() != replace(one, fast_accum=True).key()
