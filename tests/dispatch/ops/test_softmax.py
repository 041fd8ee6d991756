"""Softmax on the host: against SciPy, its gradient against finite differences, what its requests refuse, its rows."""

import numpy as np
import pytest
import scipy.special

import dispatch
from dispatch import TABLE
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import BF16, F32, HOST, Arch
from dispatch.ops.softmax import (
    SoftmaxAlgorithm,
    SoftmaxBwdRequest,
    SoftmaxRequest,
    axes_of,
    four_axes,
    reference,
    softmax,
    softmax_bwd,
)
from dispatch.ops.softmax.cases import cases
from dispatch.row_check import check_row
from dispatch.table.select import select
from dispatch.testing.check import Mismatch

ROWS = [row for row in TABLE if row.op.startswith("softmax") and row.on(HOST)]
LOG = SoftmaxAlgorithm.LOG


@pytest.fixture
def dev():
    return dispatch.device("host")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_host_row_passes_its_cases(row, dev, rng):
    assert not [why for case in cases(row) if (why := check_row(row, case, dev, rng))]


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_as_scipy_computes_it(axis, dev, rng):
    x = rng.standard_normal((3, 5, 7)) * 10
    for algorithm in SoftmaxAlgorithm:
        expected = scipy.special.log_softmax(x, axis) if algorithm is LOG else scipy.special.softmax(x, axis)
        got = softmax(dev.array(x), axis=axis, algorithm=algorithm)
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-13, atol=1e-14)
        held = reference(SoftmaxRequest(dev.array(x), axis=axis, algorithm=algorithm))["out"]
        np.testing.assert_allclose(held, expected, rtol=1e-13, atol=1e-14)


def test_large_logits_overflow_in_fast_alone(dev):
    x = dev.array(np.array([[1000.0, 0.0]], np.float32))
    assert softmax(x).numpy().tolist() == [[1.0, 0.0]]
    assert np.isnan(softmax(x, algorithm=SoftmaxAlgorithm.FAST).numpy()).any()


@pytest.mark.parametrize("algorithm", list(SoftmaxAlgorithm))
def test_the_gradient_is_that_of_finite_differences(algorithm, dev, rng, slope_of):
    x, dy = rng.standard_normal((4, 3)), rng.standard_normal((4, 3))

    def forward(values):
        return softmax(dev.array(values), axis=0, algorithm=algorithm).numpy()

    dx = softmax_bwd(dev.array(forward(x)), dev.array(dy), axis=0, algorithm=algorithm)
    np.testing.assert_allclose(dx.numpy(), slope_of(forward, x, dy), rtol=1e-7, atol=1e-8)


def test_the_output_lies_as_the_input_does(dev, rng):
    x = dev.array(rng.standard_normal((4, 6))).T
    y = softmax(x, axis=0)
    assert y.layout.strides == x.layout.strides == (1, 6)
    np.testing.assert_allclose(y.numpy().sum(axis=0), 1)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_an_x_without_elements_gives_a_y_without_elements(axis, dev):
    x = dispatch.from_dlpack(np.zeros((17, 5, 3, 3), np.float32)[:, :0])
    assert x.layout.strides == (45, 9, 3, 1)  # those of the whole, which an output of its shape has not
    for y in (softmax(x, axis=axis), softmax_bwd(x, x, axis=axis), softmax(x, axis=axis, out=dev.zeros(x.shape))):
        assert y.shape == x.shape


def test_a_repeated_request_in_place_works_on_what_is_there(dev):
    x = dev.array(np.array([1.0, 2.0, 3.0]))
    request = SoftmaxRequest(x, out=x)
    assert not request.repeatable
    dispatch.run(request)
    once = x.numpy()
    dispatch.run(request)
    np.testing.assert_allclose(x.numpy(), scipy.special.softmax(once))


# fmt: off
REFUSED = [  # what is asked with a maker of zeros, the operand that is named, what was given, what was expected
    (lambda _: SoftmaxRequest([0.0] * 3),                "x",         "list",       "Tensor"),
    (lambda z: SoftmaxRequest(z(3), axis=1),             "axis",      "1",          "-1 to 0"),
    (lambda z: SoftmaxRequest(z(3), axis=True),          "axis",      "True",       "whole number"),
    (lambda z: SoftmaxRequest(z()),                      "x",         "f32[]",      "one axis"),
    (lambda z: SoftmaxRequest(z(3), algorithm=1),        "algorithm", "1",          "SoftmaxAlgorithm"),
    (lambda z: SoftmaxRequest(z(3), out=z(4)),           "out",       "f32[4]",     "f32[3]"),
    (lambda z: SoftmaxRequest(z(3), out=z(3, dtype="f16")), "out",    "f16[3]",     "f32[3]"),
    (lambda z: SoftmaxBwdRequest(z(3), z(4)),       "dy",        "f32[4]",     "f32[3], as y"),
    (lambda z: SoftmaxBwdRequest(z(3), None),       "dy",        "None",       "Tensor"),
]
# fmt: on


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_a_refusal_names_operand_given_and_expected(number, dev):
    make, operand, given, expected = REFUSED[number]
    with pytest.raises(BadRequest) as caught:
        make(lambda *shape, dtype="f32": dev.zeros(shape, dtype))
    assert caught.value.operand == operand
    assert given in caught.value.given
    assert expected in caught.value.expected


def test_the_output_may_be_the_input_but_no_part_of_it(dev):
    memory = dev.zeros((4,))
    with pytest.raises(BadRequest, match="overlaps x") as caught:
        SoftmaxRequest(memory[:3], out=memory[1:])
    assert "x may be out itself" in caught.value.hint
    assert SoftmaxRequest(memory, out=memory).out is memory


def test_what_no_row_takes_says_why(dev):
    with pytest.raises(NoRow, match="needs dtypes"):
        softmax(dev.zeros((3,), "i32"))
    with pytest.raises(NoRow, match="needs positive strides"):
        softmax(dev.zeros((6,))[::-1])


def test_axes_are_merged_where_memory_allows_it(dev):
    """Rows of a dense tensor are one axis; with channels in the middle there are two others; gaps keep them apart."""
    assert [axis.extent for axis in axes_of([dev.zeros((2, 3, 5, 7)).layout], 3)[1]] == [30]
    assert [axis.extent for axis in axes_of([dev.zeros((2, 3, 5, 7)).layout], 1)[1]] == [2, 35]
    crowded = dev.zeros((4,) * 6)[1:, 1:, 1:, 1:, 1:, 1:]
    assert "has 5" in four_axes(SoftmaxRequest(crowded))
    assert four_axes(SoftmaxRequest(crowded[0])) == ""


def test_a_case_notices_a_wrong_element_and_a_byte_beside(dev, rng):
    row = next(row for row in ROWS if row.dtypes == (F32, F32))
    check = next(case for case in cases(row) if case.name == "guarded").check(dev, rng)
    result = dispatch.run(check.request)
    check.verify(result)
    np.asarray(result)[0, 0, 0, 0] += 1e-4
    with pytest.raises(Mismatch, match="out is wrong in 1 of"):
        check.verify(result)
    dispatch.run(check.request)
    np.asarray(check.written[0].whole)[-1] = 0
    with pytest.raises(Mismatch, match="bytes beside"):
        check.verify(result)


def test_half_precision_is_rounded_once(dev, rng):
    x = rng.standard_normal((9, 33)).astype(BF16.numpy)
    expected = scipy.special.softmax(x.astype(np.float64), -1)
    got = softmax(dev.array(x)).numpy().astype(np.float64)
    assert np.all(np.abs(got - expected) <= 2.0**-8 * expected * 1.001)


@pytest.mark.parametrize("arch", [HOST, Arch(90)], ids=str)
def test_operands_that_do_not_lie_alike_are_refused(arch, dev):
    """cuDNN takes them, and goes by the strides of one of them, or ends in an error of its own."""
    dense, turned = dev.zeros((6, 10), "f32"), dev.zeros((10, 6), "f32").T
    select(SoftmaxRequest(turned, axis=0), arch)  # the output is made as x lies
    select(SoftmaxRequest(turned, axis=0, out=dev.zeros((10, 6), "f32").T), arch)
    select(SoftmaxBwdRequest(turned, dev.zeros((10, 6), "f32").T), arch)
    for request in (SoftmaxRequest(turned, out=dense), SoftmaxRequest(dense, out=turned)):
        with pytest.raises(NoRow, match="needs out with the strides of x"):
            select(request, arch)
    with pytest.raises(NoRow, match="needs dy with the strides of y"):
        select(SoftmaxBwdRequest(dense, turned), arch)
    with pytest.raises(NoRow, match="needs out with the strides of y"):
        select(SoftmaxBwdRequest(dense, dev.zeros((6, 10), "f32"), out=turned), arch)
    gapped = dev.zeros((6, 13), "f32")[:, :10]
    for request, words in (
        (SoftmaxRequest(gapped), r"has f32\[6, 10\] element strides \(13, 1\): copy it with x\.copy\(\)"),
        (SoftmaxRequest(gapped, out=dev.zeros((6, 13), "f32")[:, :10]), r"x\.copy\(\)"),
        (SoftmaxBwdRequest(gapped, gapped), r"copy it with y\.copy\(\)"),
    ):
        with pytest.raises(NoRow, match=f"Nearest that works: .* needs {request.reads[0]} without gaps, .*{words}"):
            select(request, arch)
    select(SoftmaxRequest(gapped.copy()), arch)
