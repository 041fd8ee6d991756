"""Activations on the host: against SciPy and plain Python, their gradients against finite differences, their rows."""

import math

import numpy as np
import pytest
import scipy.special

import dispatch
from dispatch import TABLE
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import HOST
from dispatch.ops.activation import (
    ActivationBwdRequest,
    ActivationMode,
    ActivationRequest,
    activation,
    activation_bwd,
    reference,
)
from dispatch.ops.activation.cases import cases
from dispatch.row_check import check_row

ROWS = [row for row in TABLE if row.op.startswith("activation") and row.on(HOST)]
M = ActivationMode
# fmt: off
PLAIN = {  # in plain Python, one number at a time
    M.SIGMOID:      lambda x, _: 1 / (1 + math.exp(-x)),
    M.RELU:         lambda x, _: x if x > 0 else 0.0,
    M.TANH:         lambda x, _: math.tanh(x),
    M.CLIPPED_RELU: lambda x, c: min(max(x, 0.0), c),
    M.ELU:          lambda x, c: x if x > 0 else c * (math.exp(x) - 1),
    M.SWISH:        lambda x, c: x / (1 + math.exp(-c * x)),
}
# fmt: on
COEF = {M.CLIPPED_RELU: 1.3, M.ELU: 0.7, M.SWISH: 1.9}


@pytest.fixture
def dev():
    return dispatch.device("host")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_host_row_passes_its_cases(row, dev, rng):
    assert not [why for case in cases(row) if (why := check_row(row, case, dev, rng))]


@pytest.mark.parametrize("mode", list(M))
def test_as_plain_python_computes_it(mode, dev, rng):
    x, coef = rng.standard_normal((5, 7)) * 3, COEF.get(mode, 1.0)
    expected = [[PLAIN[mode](value, coef) for value in row] for row in x.tolist()]
    np.testing.assert_allclose(activation(dev.array(x), mode=mode, coef=coef).numpy(), expected, rtol=1e-13, atol=1e-15)
    held = reference(ActivationRequest(dev.array(x), mode=mode, coef=coef))["out"]
    np.testing.assert_allclose(held, expected, rtol=1e-13, atol=1e-15)


def test_the_sigmoid_is_scipys_far_out(dev):
    x = np.array([-800.0, -40.0, 0.0, 40.0, 800.0])
    np.testing.assert_allclose(activation(dev.array(x), mode=M.SIGMOID).numpy(), scipy.special.expit(x), rtol=1e-15)


@pytest.mark.parametrize("mode", list(M))
def test_the_gradient_is_that_of_finite_differences(mode, dev, rng, slope_of):
    x, dy, coef = rng.standard_normal((4, 5)) * 2, rng.standard_normal((4, 5)), COEF.get(mode, 1.0)

    def forward(values):
        return activation(dev.array(values), mode=mode, coef=coef).numpy()

    dx = activation_bwd(dev.array(x), dev.array(forward(x)), dev.array(dy), mode=mode, coef=coef)
    np.testing.assert_allclose(dx.numpy(), slope_of(forward, x, dy), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("fields", "operand", "given", "expected"),
    [
        ({"mode": 1}, "mode", "1", "ActivationMode"),
        ({"coef": 2.0}, "coef", "2.0", "1, because RELU"),
        ({"mode": M.ELU, "coef": -1.0}, "coef", "-1.0", "0 or more"),
        ({"mode": M.ELU, "coef": math.nan}, "coef", "nan", "finite"),
        ({"mode": M.ELU, "coef": True}, "coef", "True", "number"),
    ],
)
def test_a_refusal_names_operand_given_and_expected(fields, operand, given, expected, dev):
    with pytest.raises(BadRequest) as caught:
        ActivationRequest(dev.zeros((3,)), **fields)
    assert caught.value.operand == operand
    assert given in caught.value.given
    assert expected in caught.value.expected


def test_the_gradient_wants_one_shape_and_one_layout(dev):
    x = dev.zeros((3, 4))
    with pytest.raises(BadRequest, match="as x is"):
        ActivationBwdRequest(x, dev.zeros((4, 3)), x)
    with pytest.raises(NoRow, match="needs dy with the strides of x"):
        activation_bwd(x, x, dev.zeros((4, 3)).T)
    gapped = dev.array(np.linspace(-1, 1, 15).reshape(3, 5))[:, :4]
    words = r"Nearest that works: .* needs x without gaps unless out is passed, .*: copy it with x\.copy\(\)"
    with pytest.raises(NoRow, match=words):
        activation_bwd(gapped, gapped, gapped)
    dx = activation_bwd(gapped, gapped, gapped, out=dev.zeros((3, 5), "f64")[:, :4]).numpy()
    np.testing.assert_array_equal(dx, np.maximum(gapped.numpy(), 0))


def test_a_request_describes_itself_in_one_line(dev):
    text = ActivationRequest(dev.zeros((3, 4)), mode=M.SWISH, coef=1.5).describe()
    assert text == "activation(x f32[3, 4], mode=SWISH, coef=1.5)"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_relu_drops_is_0_whatever_it_is(value, dev):
    x, dy = dev.array(np.array([-1.0, 0.0, 2.0, 9.0, math.nan])), dev.array(np.full(5, value))
    for mode, coef, passed in ((M.RELU, 1.0, [2, 3]), (M.CLIPPED_RELU, 6.0, [2])):
        y = activation(x, mode=mode, coef=coef)
        got = activation_bwd(x, y, dy, mode=mode, coef=coef).numpy()
        np.testing.assert_array_equal(got, [value if place in passed else 0.0 for place in range(5)])


def test_the_gradient_of_elu_goes_by_y_and_wants_a_coef(dev):
    x = dev.array(np.array([-2.0, 0.0, 3.0]))
    got = activation_bwd(x, activation(x, mode=M.ELU, coef=6.0), dev.array(np.ones(3)), mode=M.ELU, coef=6.0).numpy()
    np.testing.assert_allclose(got, [6 * math.exp(-2), 1, 1])
    with pytest.raises(NoRow, match="needs a coef above 0 for the gradient of ELU"):
        activation_bwd(x, x, x, mode=M.ELU, coef=0.0)
    assert activation(x, mode=M.ELU, coef=0.0).numpy().tolist() == [0, 0, 3]
