"""grouped_matmul on the host: every row through its cases; what is refused, by whom and why."""

from functools import partial

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import HOST, Arch
from dispatch.libraries.cutlass import evt
from dispatch.libraries.cutlass.config import Config
from dispatch.libraries.cutlass.emit.sm90_grouped_gemm import emit
from dispatch.ops.grouped_matmul import GroupedMatmulListRequest, GroupedMatmulRequest, grouped_matmul
from dispatch.ops.grouped_matmul.cases import cases
from dispatch.ops.grouped_matmul.config import CONFIGS, LARGE, MEDIUM, SMALL, choose
from dispatch.ops.grouped_matmul.cutlass import spec_of
from dispatch.ops.grouped_matmul.plans import chunks
from dispatch.ops.grouped_matmul.reference import reference
from dispatch.table.select import select

ROWS = [row for row in dp.TABLE.of("grouped_matmul") if row.min_arch == HOST]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_its_cases(row, case, dev, rng):
    check = case.check(dev, rng)
    assert dp.prepare(check.request).row is row
    check.verify(dp.run(check.request))


def test_the_reference_is_a_product_for_each_group(dev, rng):
    a, b = rng.standard_normal((10, 16)), rng.standard_normal((3, 16, 8))
    request = GroupedMatmulRequest(
        dev.array(a, "f16"), dev.array(b, "f16"), dev.array([4, 4, 9], "i32"), alpha=2.0, epilogue=None
    )
    a, b = (np.asarray(x).astype(np.float64) for x in (request.a, request.b))
    got = reference(request)["out"]
    np.testing.assert_allclose(got[:4], 2 * a[:4] @ b[0])
    np.testing.assert_allclose(got[4:9], 2 * a[4:9] @ b[2])
    assert np.isnan(got[9:]).all()


def test_the_output_is_made_where_none_is_given(dev):
    a, b = dev.array(np.ones((6, 16)), "bf16"), dev.array(np.ones((2, 16, 8)), "bf16")
    out = grouped_matmul(a, b, dev.array([2, 6], "i32"), epilogue=evt.accumulator() * 0.5, out_dtype="f32")
    assert (out.shape, out.dtype) == ((6, 8), "f32")
    assert (out.numpy() == 8).all()


def apart(dev, shape, strides, dtype="bf16"):
    """A view of little memory, of extents and steps that only a large one could have."""
    whole = dev.zeros(256, dtype)
    return dp.Tensor(whole.storage, whole.ptr, dev.layout(whole.dtype, shape, strides, whole.ptr))


def small(dev, **options):
    fields = {"a": dev.zeros((6, 16), "bf16"), "b": dev.zeros((2, 16, 8), "bf16"), "ends": dev.array([2, 6], "i32")}
    return GroupedMatmulRequest(**(fields | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda d: {"b": d.zeros((2, 15, 8), "bf16")}, r"b \(groups, k, n\)"),
        (lambda d: {"b": d.zeros((16, 8), "bf16")}, r"b \(groups, k, n\)"),
        (
            lambda d: {"a": apart(d, (6, 2**32 + 16), (0, 1)), "b": apart(d, (2, 2**32 + 16, 8), (0, 0, 1))},
            "a: .*; expected extents up to 2147483647",
        ),
        (lambda d: {"b": apart(d, (2, 16, 2**31), (0, 1, 16))}, "b: .*; expected extents up to 2147483647"),
        (lambda d: {"ends": d.array([2, 6], "i64")}, "the end of each group"),
        (lambda d: {"ends": d.array([2, 4, 6], "i32")}, "the end of each group"),
        (lambda _: {"ends": [2, 4, 6]}, "the end of each group"),
        (lambda _: {"ends": "26"}, "ends: .*; expected"),
        (lambda _: {"b": [[2, 6]]}, "a dispatch Tensor"),
        (lambda _: {"library": 7}, "library: got 7; expected the name of a library"),
        (lambda d: {"out": d.zeros((6, 7), "bf16")}, r"shape \(6, 8\)"),
        (lambda d: {"alpha": d.zeros(2)}, "one element"),
        (lambda d: {"alpha": d.zeros(1, "f64")}, "an f32 tensor of one element"),
        (lambda _: {"alpha": None}, "alpha: got None; expected a number"),
        (lambda _: {"alpha": "2"}, "alpha: got '2'; expected a number"),
        (lambda _: {"alpha": True}, "alpha: got True; expected a number"),
        (lambda _: {"alpha": 1 + 2j}, "a number"),
        (lambda _: {"alpha": (1.0, 2.0)}, "a number"),
        (lambda _: {"alpha": np.ones(1)}, "a number"),
        (lambda _: {"alpha": 1e308}, "a number in the range of f32"),
        (lambda _: {"alpha": 10**400}, "a number in the range of f32"),
        (lambda _: {"alpha": 2.0, "epilogue": evt.accumulator()}, "the epilogue does not read alpha"),
        (lambda d: {"alpha": d.zeros(1), "epilogue": evt.accumulator()}, "the epilogue does not read alpha"),
        (lambda _: {"fast_accum": 1}, "fast_accum: got 1; expected a bool"),
        (lambda _: {"config": 7}, "config: got 7; expected a Config"),
        (lambda _: {"out_dtype": 7}, "out_dtype: got 7; expected a dtype"),
        (lambda d: {"out_dtype": "f32", "out": d.zeros((6, 8), "bf16")}, "bf16, the dtype of out"),
        (lambda _: {"epilogue": evt.accumulator() + evt.row("bias")}, "reads only the accumulator and alpha"),
        (lambda _: {"epilogue": "silu"}, "a tree of"),
    ],
)
def test_a_bad_request_says_what_is_wrong(options, message, dev):
    with pytest.raises(BadRequest, match=message):
        small(dev, **options(dev))


@pytest.mark.parametrize("alpha", [None, "2", True, 1j, (1.0,), {}, 1e308], ids=str)
def test_alpha_of_a_list_of_products_is_looked_at(alpha, dev):
    a, b = dev.zeros((6, 16), "bf16"), dev.zeros((16, 8), "bf16")
    with pytest.raises(BadRequest, match="alpha"):
        grouped_matmul([a], [b], alpha=alpha)
    with pytest.raises(BadRequest, match="alpha"):
        grouped_matmul(a, dev.zeros((1, 16, 8), "bf16"), [6], alpha=alpha)


@pytest.mark.parametrize("alpha", [2, 2.0, np.float32(2), np.int64(2)], ids=repr)
def test_alpha_is_any_number(alpha, dev):
    a, b = dev.array(np.ones((6, 16)), "bf16"), dev.array(np.ones((16, 8)), "bf16")
    assert (grouped_matmul([a], [b], alpha=alpha)[0].numpy().astype(float) == 32).all()
    one = dev.array(np.ones((1, 16, 8)), "bf16")
    for given in (alpha, dev.array(np.full(1, alpha, np.float32))):
        assert (grouped_matmul(a, one, [6], alpha=given).numpy().astype(float) == 32).all()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (lambda d: {"a": d.zeros((6, 17), "bf16")[:, :16]}, "a with lines at multiples of 16 bytes"),
        (lambda d: {"a": d.zeros((16, 8), "bf16").T[:, :16][:8], "b": d.zeros((2, 16, 8), "bf16")}, "dense columns"),
        # Groups one element apart: only the first begins at a multiple of 16 bytes.
        (lambda d: {"b": d.zeros((16, 2), "bf16").T[..., None]}, "b with lines at multiples of 16 bytes"),
        (
            lambda d: {"b": d.zeros((16, 8), "bf16").T[..., None], "ends": d.array(range(8), "i32")},
            "b with lines at multiples of 16 bytes",
        ),
        (lambda _: {"fast_accum": True}, "needs fast_accum=False"),
        (lambda d: {"a": d.zeros((6, 16), "f8e4m3"), "b": d.zeros((2, 16, 16), "f8e4m3")}, "b column-major"),
        (lambda d: {"a": d.zeros((0, 16), "bf16"), "ends": d.array([0, 0], "i32")}, "extents of 1 or more"),
    ],
)
def test_no_row_takes_what_tensor_maps_cannot_step_through(options, reason, dev):
    with pytest.raises(NoRow, match=reason):
        dp.run(small(dev, **options(dev)))


@pytest.mark.parametrize("ends", [[4, 2], [4, 7], [-1, 6]])
@pytest.mark.parametrize("dtype", ["i32", "u32"])
def test_ends_that_are_none_are_refused_whoever_has_them_on_the_host(dev, ends, dtype):
    """Also as a tensor of it, which nobody has looked at before; unsigned numbers that fall are no larger ones."""
    a, b = dev.zeros((6, 16), "bf16"), dev.zeros((2, 16, 8), "bf16")
    if dtype == "i32":
        with pytest.raises(BadRequest, match="non-decreasing whole numbers, at most 6"):
            grouped_matmul(a, b, dev.array(ends, dtype))
    with pytest.raises(BadRequest, match="non-decreasing whole numbers, at most 6"):
        grouped_matmul(a, b, np.array(ends).astype(dev.array([0], dtype).dtype.numpy))


def test_ends_may_be_numbers_of_the_host(dev):
    a, b = dev.array(np.ones((6, 16)), "bf16"), dev.array(np.ones((2, 16, 8)), "bf16")
    for ends in ([2, 6], np.array([2, 6]), (2, 6)):
        assert (grouped_matmul(a, b, ends).numpy().astype(float) == 16).all()
        request = GroupedMatmulRequest(a, b, ends)
        assert request.key() == GroupedMatmulRequest(a, b, dev.array([2, 6], "i32")).key()
        assert (dp.run(request).numpy().astype(float) == 16).all()


def test_a_library_may_be_named(dev, rng):
    a, b = pairs(dev, rng, (8, 16, 8), (16, 8, 24))
    for of in (partial(small, dev), partial(GroupedMatmulListRequest, a, b)):
        assert select(of(library="numpy"), HOST).library == "numpy"
        assert select(of(library="cutlass"), Arch(90)).library == select(of(), Arch(90)).library == "cutlass"
        assert of().key() != of(library="numpy").key()
        assert select(of(library="cublasLt"), Arch(90)).library == "cublasLt"
        with pytest.raises(
            BadRequest, match=r"library: got 'cudnn'; expected a library .*: cutlass, cublasLt, cublas; or None"
        ):
            dp.run(of(library="cudnn"))
    with pytest.raises(BadRequest, match="library: got 7"):
        grouped_matmul(a, b, library=7)


@pytest.mark.parametrize("ends", [[4, 2], [2, 7], [-1, 6], [2.0, 6.0], [[2, 6]], None], ids=str)
def test_ends_that_the_host_knows_are_looked_at(ends, dev):
    a, b = dev.zeros((6, 16), "bf16"), dev.zeros((2, 16, 8), "bf16")
    with pytest.raises(BadRequest, match="non-decreasing whole numbers, at most 6"):
        grouped_matmul(a, b, ends)


def pairs(dev, rng, *extents):
    a = [dev.array(rng.standard_normal((m, k)), "bf16") for m, _, k in extents]
    return a, [dev.array(rng.standard_normal((n, k)), "bf16").T for _, n, k in extents]


def test_products_of_any_extents_are_numpys(dev, rng):
    a, b = pairs(dev, rng, (3, 8, 16), (5, 24, 32))
    first, second = grouped_matmul(a, b, alpha=2.0, out_dtype="f32")
    assert (first.shape, second.shape) == ((3, 8), (5, 24))
    for got, x, y in ((first, a[0], b[0]), (second, a[1], b[1])):
        np.testing.assert_allclose(got.numpy(), 2 * x.numpy().astype(float) @ y.numpy().astype(float), rtol=1e-4)


def test_both_requests_have_one_kernel(dev, rng):
    a, b = pairs(dev, rng, (8, 16, 8), (16, 8, 24))
    rows = GroupedMatmulRequest(dev.zeros((6, 16), "bf16"), dev.zeros((2, 8, 16), "bf16").mT, dev.array([2, 6], "i32"))
    several = GroupedMatmulListRequest(tuple(a), tuple(b))
    for config in CONFIGS:
        assert spec_of(rows, Arch(90), config) == spec_of(several, Arch(90), config)


@pytest.mark.parametrize(
    ("rows", "groups", "n", "expected"),
    [
        (8192, 8, 4096, LARGE),
        (16384, 64, 2048, LARGE),
        (4096, 128, 1536, SMALL),
        (1024, 8, 512, MEDIUM),  # tiles of 128 x 256 would leave most multiprocessors idle
        (600, 8, 4096, MEDIUM),
        (1, 4, 8, SMALL),
    ],
)
def test_the_kernel_is_chosen_by_the_mean_of_the_groups(rows, groups, n, expected):
    assert choose(rows, groups, n, 132) == expected


def test_a_configuration_that_there_is_not_is_refused():
    assert all(choose(64, 2, 8, 132, config) == config for config in CONFIGS)
    with pytest.raises(BadRequest, match="one of 128x256"):
        choose(64, 2, 8, 132, Config((256, 128)))


def test_the_schedule_is_part_of_the_kernel(dev):
    request = small(dev)
    texts = [emit(spec_of(request, Arch(90), config)).text for config in CONFIGS]
    assert len(set(texts)) == 3
    assert "cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong>" in texts[2]
    assert "cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative, Visitor>" in texts[0]


def test_the_host_tells_of_each_group_extents_addresses_and_steps():
    groups = [((g + 1, g + 2, g + 3), 16 * g, 24 * g, 8 * g) for g in range(70)]
    told = list(chunks(groups, range(100, 170), range(200, 270), range(300, 370)))
    assert [(first, count) for first, count, _ in told] == [(0, 32), (32, 32), (64, 6)]
    words = np.array([list(words) for _, _, words in told]).reshape(-1, 9)[:70]
    assert words[:, :3].tolist() == [[g + 1, g + 2, g + 3] for g in range(70)]
    assert words[:, 3:6].tolist() == [[100 + g, 200 + g, 300 + g] for g in range(70)]
    assert words[:, 6:].tolist() == [[16 * g, 24 * g, 8 * g] for g in range(70)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b, _: (a[:1], b, None), "as many of each"),
        (lambda _a, _b, _d: ([], [], None), "at least one"),
        (lambda a, b, _: (a, [b[1], b[0]], None), r"16 rows, the number of columns of a\[0\]"),
        (lambda a, b, d: ([a[0], d.zeros((5, 32), "f16")], b, None), r"a\[1\].*bf16, the dtype of the first one"),
        (lambda a, b, d: (a, b, [d.zeros((3, 8), "bf16")]), "1 of out"),
        (lambda a, b, d: (a, b, [d.zeros((3, 8), "bf16"), d.zeros((5, 8), "bf16")]), r"shape \(5, 24\)"),
        (lambda a, b, _: (a, [b[0], [1]], None), "a Tensor with two axes"),
        (lambda a, b, d: (a, b, [d.zeros((3, 8), "bf16")] * 2), r"shape \(5, 24\)"),
    ],
)
def test_bad_products_say_what_is_wrong(change, message, dev, rng):
    a, b, out = change(*pairs(dev, rng, (3, 8, 16), (5, 24, 32)), dev)
    with pytest.raises(BadRequest, match=message):
        GroupedMatmulListRequest(tuple(a), tuple(b), out=out)


def test_one_memory_for_two_outputs_is_refused(dev, rng):
    a, b = pairs(dev, rng, (4, 8, 16), (4, 8, 16))
    whole = dev.zeros((6, 8), "bf16")
    with pytest.raises(BadRequest, match=r"overlaps out\[1\]"):
        GroupedMatmulListRequest(tuple(a), tuple(b), out=(whole[:4], whole[2:]))


def test_a_tensor_is_no_output_twice_and_no_operand_besides(dev, rng):
    a, b = pairs(dev, rng, (4, 16, 16), (4, 16, 16))
    with pytest.raises(BadRequest, match=r"out\[0\].*overlaps out\[1\]"):
        GroupedMatmulListRequest(tuple(a), tuple(b), out=(dev.zeros((4, 16), "bf16"),) * 2)
    with pytest.raises(BadRequest, match=r"out\[1\].*overlaps a\[0\]"):
        GroupedMatmulListRequest(tuple(a), tuple(b), out=(dev.zeros((4, 16), "bf16"), a[0]))


@pytest.mark.parametrize("library", ["cutlass", "cublasLt"])
def test_products_with_b_in_two_orders_are_refused_but_by_cublas(library, dev, rng):
    a, b = pairs(dev, rng, (4, 8, 16), (4, 8, 16))
    b[1] = dev.array(np.ones((16, 8)), "bf16")
    with pytest.raises(NoRow, match="needs b of one order"):
        grouped_matmul(a, b, library=library)
    found = grouped_matmul(a, b)
    sums = np.asarray(a[1]).astype(np.float64).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found[1].numpy().astype(float), np.broadcast_to(sums, (4, 8)), rtol=2**-7, atol=1e-2)


def test_a_matrix_of_products_is_replaced_by_its_name(dev, rng):
    a, b = pairs(dev, rng, (4, 8, 16), (4, 8, 16))
    call = dp.prepare(GroupedMatmulListRequest(tuple(a), tuple(b)))
    other = dev.array(np.ones((4, 16)), "bf16")
    changed = call(**{"a[1]": other})
    np.testing.assert_allclose(
        changed[1].numpy().astype(float),
        other.numpy().astype(float) @ b[1].numpy().astype(float),
        rtol=2**-7,
        atol=0.05,
    )
    with pytest.raises(BadRequest, match="not an operand"):
        call(**{"a[2]": other})
