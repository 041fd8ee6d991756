"""Reductions on the host: against loops in plain Python, places of extremes, refusals and rows."""

import math

import numpy as np
import pytest

import dispatch
from cudabind.errors import LibraryNotFound
from dispatch import TABLE
from dispatch.errors import BadRequest, Refused
from dispatch.keys import BF16, HOST, U32, Arch
from dispatch.libraries.cudnn.reference import evaluate
from dispatch.ops.reduction import ReduceOp, ReduceRequest, axes_of, lower_to_graph, of_one, reduce, reference, shrinks
from dispatch.ops.reduction.cases import cases
from dispatch.row_check import check_row
from dispatch.table.select import select

ROWS = [row for row in TABLE if row.op == "reduce" and row.on(HOST)]
R = ReduceOp
# fmt: off
PLAIN = {  # a list of numbers in plain Python
    R.ADD:   math.fsum,
    R.MUL:   math.prod,
    R.MIN:   min,
    R.MAX:   max,
    R.AMAX:  lambda v: max(map(abs, v)),
    R.AVG:   lambda v: math.fsum(v) / len(v),
    R.NORM1: lambda v: math.fsum(map(abs, v)),
    R.NORM2: lambda v: math.hypot(*v),
    R.MUL_NO_ZEROS: lambda v: math.prod(x for x in v if x),
}
# fmt: on


@pytest.fixture
def dev():
    return dispatch.device("host")


def looped(x, axes, of):
    """What becomes of every line of the axes that are reduced, in row-major order."""
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    lines = np.moveaxis(x, axes, range(len(kept), x.ndim))
    made = np.zeros(lines.shape[: len(kept)])
    for place in np.ndindex(made.shape):
        made[place] = of(lines[place].ravel().tolist())
    return made


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_host_row_passes_its_cases_or_refuses_those_that_reduce_nothing(row, dev, rng):
    refused = {case.name for case in cases(row) if check_row(row, case, dev, rng)}
    nothing = {"axis of two"} if row.variant == "of one" else {"one element", "axis of one"}
    if row.variant == "sums":  # rows and columns of a dense matrix
        nothing |= {"middle", "two of four", "six axes", "gaps"}
        nothing |= set() if row.dtypes[0] is BF16 else {"vector", "no row"}  # there is no other row for bf16
    assert refused == nothing


@pytest.mark.parametrize("op", list(R))
@pytest.mark.parametrize("axes", [(0,), (1, 3), (0, 2, 3), (0, 1, 2, 3)])
def test_as_plain_python_computes_it(axes, op, dev, rng):
    x = rng.standard_normal((2, 3, 4, 5))
    x[0, 0, 0, 0] = 0
    expected = looped(x, axes, PLAIN[op])
    got = reduce(dev.array(x), axes, reduce=op)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12, atol=1e-13)
    held = reference(ReduceRequest(dev.array(x), axes, reduce=op))["out"]
    np.testing.assert_allclose(held, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("op", [R.MIN, R.MAX, R.AMAX])
def test_places_count_the_reduced_axes_in_row_major_order(op, dev, rng):
    x = rng.standard_normal((2, 3, 4))
    chosen = {R.MIN: min, R.MAX: max, R.AMAX: lambda v: max(v, key=abs)}[op]
    values, places = reduce(dev.array(x), (0, 2), reduce=op, indices=True)
    assert places.dtype is U32
    np.testing.assert_array_equal(places.numpy(), looped(x, (0, 2), lambda v: v.index(chosen(v))))
    np.testing.assert_array_equal(values.numpy(), looped(x, (0, 2), PLAIN[op]))


def test_axes_stay_where_asked_and_count_from_the_end(dev):
    x = dev.zeros((2, 3, 4))
    assert reduce(x, -1).shape == (2, 3)
    assert reduce(x, (0, -1), keepdims=True).shape == (1, 3, 1)
    assert reduce(x).shape == ()


def test_sums_of_halves_may_be_kept_in_single_precision(dev):
    x = dev.array(np.full(4097, 0.1, np.float16))
    expected = 4097 * float(np.float16(0.1))
    assert abs(reduce(x, out_dtype="f32").item() - expected) < 1e-3
    assert abs(reduce(x).item() - expected) > 1e-2  # rounded to f16, whose steps are 1/4 there


# fmt: off
REFUSED = [  # shape of x, fields, the operand that is named, what was given, what was expected
    ((3, 4), {"axes": 2},                                "axes",      "2",        "-2 to 1"),
    ((3, 4), {"axes": (0, -2)},                          "axes",      "(0, -2)",  "each axis once"),
    ((),     {"axes": 0},                                "axes",      "0",        "none"),
    ((3, 0), {"axes": 1},                                "x",         "[3, 0]",   "at least one element"),
    ((3, 4), {"reduce": 0},                              "reduce",    "0",        "ReduceOp"),
    ((3, 4), {"indices": True},                          "indices",   "True",     "result of ADD is not an element"),
    ((3, 4), {"keepdims": 1},                            "keepdims",  "1",        "bool"),
    ((3, 4), {"out_dtype": "f31"},                       "out_dtype", "f31",      "dtype"),
]
# fmt: on


@pytest.mark.parametrize(("shape", "fields", "operand", "given", "expected"), REFUSED)
def test_a_refusal_names_operand_given_and_expected(shape, fields, operand, given, expected, dev):
    with pytest.raises(BadRequest) as caught:
        ReduceRequest(dev.zeros(shape), **fields)
    assert caught.value.operand == operand
    assert given in caught.value.given
    assert expected in caught.value.expected


def test_an_index_that_was_not_asked_for_is_refused(dev):
    with pytest.raises(BadRequest, match="has no index"):
        ReduceRequest(dev.zeros((3,)), reduce=R.MAX, index=dev.zeros((), "u32"))


def test_cudnn_takes_no_axes_of_one_element(dev):
    assert "two elements or more" in shrinks(ReduceRequest(dev.zeros((1, 5)), 0))
    assert not shrinks(ReduceRequest(dev.zeros((0, 5)), 1))


@pytest.mark.parametrize("reduce_to", R)
def test_axes_of_one_element_give_what_numpy_gives(dev, reduce_to):
    of_numpy = {
        R.ADD: np.sum,
        R.MUL: np.prod,
        R.MIN: np.min,
        R.MAX: np.max,
        R.AVG: np.mean,
        **dict.fromkeys((R.AMAX, R.NORM1, R.NORM2), lambda x, axis: np.abs(x).sum(axis)),
        R.MUL_NO_ZEROS: lambda x, axis: np.where(x == 0, 1, x).sum(axis),
    }[reduce_to]
    x = np.array([[[-3, 0, np.inf], [np.nan, -np.inf, 2e200]]])
    for axes in (0, (0,), ()):
        found = reduce(dev.array(x), axes, reduce=reduce_to)
        np.testing.assert_array_equal(found.numpy(), of_numpy(x, axis=axes))
    kept = reduce(dev.array(x[:, 1:, :]), (0, 1), reduce=reduce_to, keepdims=True)
    np.testing.assert_array_equal(kept.numpy(), of_numpy(x[:, 1:], axis=(0, 1))[None, None])


def test_places_along_one_element_are_0(dev):
    out, index = reduce(dev.array(np.arange(6.0).reshape(2, 1, 3)), 1, reduce=R.MAX, indices=True)
    np.testing.assert_array_equal(out.numpy(), np.arange(6.0).reshape(2, 3))
    assert not index.numpy().any()


@pytest.mark.parametrize("layout", ["rows", "columns", "gaps"])
def test_the_kernel_for_one_element_steps_as_the_operands_do(dev, layout):
    x = dev.zeros((4, 1, 6))
    x = {"rows": x, "columns": dev.zeros((6, 1, 4)).T, "gaps": dev.zeros((8, 1, 12))[::2, :, ::2]}[layout]
    request = ReduceRequest(x, 1)
    work = of_one.launch(request).values[0]
    given = [extent for extent in work.extents if extent != 1]
    assert work.size == math.prod(given) == 24
    places = {
        sum(at * step for at, step in zip(found, list(work.steps_to)[-len(given) :], strict=True))
        for found in np.ndindex(*given)
    }
    assert places == set(range(24)), "each element of the result, once"
    assert len(given) == (1 if layout == "rows" else 2)


@pytest.mark.parametrize("dtypes", [("f64", "f64"), ("f32", "f16"), ("bf16", "f32"), ("i8", "f32")])
def test_the_kernel_for_one_element_compiles(dev, dtypes):
    request = ReduceRequest(dev.zeros((1, 5), dtypes[0]), 0, out_dtype=dtypes[1], reduce=R.NORM1)
    try:
        assert of_one.kernel_of(request).cubin("sm_90")[:4] == b"\x7fELF"
    except (LibraryNotFound, Refused) as error:
        pytest.skip(f"NVRTC is not installed: {error}")


def test_axes_are_merged_but_never_across_what_is_kept(dev):
    request = ReduceRequest(dev.zeros((2, 3, 4, 5)), (2, 3))
    assert [(axis.extent, axis.group) for axis in axes_of(request)] == [(6, 0), (20, 1)]
    request = ReduceRequest(dev.zeros((2, 3, 4, 5)), (1, 2))
    assert [(axis.extent, axis.group) for axis in axes_of(request)] == [(2, 0), (12, 1), (5, 0)]


@pytest.mark.parametrize("op", [R.ADD, R.AVG, R.NORM1])
@pytest.mark.parametrize(
    ("shape", "axes"), [((7, 5), 1), ((7, 5), 0), ((2, 3, 4), (1, 2)), ((2, 3, 4), (0, 1)), ((6,), None)], ids=str
)
def test_the_graph_of_sums_computes_them(shape, axes, op, dev, rng):
    x = rng.standard_normal(shape).astype(np.float32)
    request = ReduceRequest(dev.array(x), axes, reduce=op)
    graph, places = lower_to_graph(request)
    (x_uid,) = (uid for uid, place in places.items() if place == 0)
    dims = graph.wire(x_uid).dims
    matrix = x.astype(float).reshape(dims[3], dims[1])  # (1, columns, 1, rows), columns innermost
    (found,) = evaluate(graph, {x_uid: matrix.T.reshape(dims)}).values()
    expected = looped(x.astype(float), tuple(range(x.ndim)) if axes is None else np.atleast_1d(axes), PLAIN[op])
    assert np.allclose(found.ravel(), expected.ravel())


def test_sums_of_rows_and_columns_go_by_a_graph_and_the_rest_by_the_older_call(dev):
    x, image = dev.zeros((8, 6)), dev.zeros((2, 3, 5, 4))
    for request in (
        ReduceRequest(x, 0),
        ReduceRequest(x, 1, reduce=R.AVG),
        ReduceRequest(image, (0, 1, 2), reduce=R.NORM1),
    ):
        assert select(request, Arch(90)).function == "cudnnBackendExecute"
    others = [
        ReduceRequest(x, 0, reduce=R.MAX),
        ReduceRequest(x),
        ReduceRequest(image, (1, 2)),
        ReduceRequest(x[:, :4], 1),
    ]
    for request in others:
        assert select(request, Arch(90)).function == "cudnnReduceTensor"
    assert select(ReduceRequest(x, 0), Arch(75)).function == "cudnnReduceTensor"


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16"])
def test_extremes_of_what_is_not_finite(dtype, dev):
    """NaN stays; of -∞ alone the largest is the lowest finite number that sums are kept in, as on a GPU."""
    top = float(np.finfo(np.float64 if dtype == "f64" else np.float32).max)
    rows = dev.array(np.array([[-np.inf] * 3, [np.inf] * 3, [1, np.nan, np.inf], [-np.inf, 2, 3]]), dtype)
    wide = dtype if dtype == "f64" else "f32"
    largest = reduce(rows, 1, reduce=R.MAX, out_dtype=wide).numpy()
    np.testing.assert_array_equal(largest, [-top, np.inf, np.nan, 3])
    np.testing.assert_array_equal(
        reduce(rows, 1, reduce=R.MIN, out_dtype=wide).numpy(), [-np.inf, top, np.nan, -np.inf]
    )
    np.testing.assert_array_equal(
        reduce(rows, 1, reduce=R.AMAX, out_dtype=wide).numpy(), [np.inf, np.inf, np.nan, np.inf]
    )
