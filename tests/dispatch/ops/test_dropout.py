"""Dropout on the host: shares and scales, masks that can be drawn again, the gradient, refusals and rows."""

import numpy as np
import pytest

import dispatch
from dispatch import TABLE
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import F32, HOST
from dispatch.ops.dropout import (
    DropoutBwdRequest,
    DropoutRequest,
    DropoutStatesRequest,
    dropout,
    dropout_bwd,
    dropout_states,
    reference,
)
from dispatch.ops.dropout.cases import cases
from dispatch.row_check import check_row
from dispatch.testing.check import Mismatch

ROWS = [row for row in TABLE if row.op.startswith("dropout") and row.on(HOST)]


@pytest.fixture
def dev():
    return dispatch.device("host")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_host_row_passes_its_cases_or_refuses_those_with_gaps(row, dev, rng):
    refused = {case.name for case in cases(row) if check_row(row, case, dev, rng)}
    assert refused <= {"gaps"}


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.99])
def test_a_share_of_p_is_dropped_and_the_rest_is_scaled(p, dev):
    y, _ = dropout(dev.array(np.full(100_000, 3.0)), dropout_states(dev, 1), p)
    values = y.numpy()
    np.testing.assert_allclose(values[values != 0], 3 / (1 - p), rtol=1e-15)
    assert abs((values == 0).mean() - p) < 0.01


def test_elements_are_dropped_independently_of_their_neighbours(dev):
    """Of pairs of neighbours a quarter are both dropped, and so it is at a distance of 2 and 64."""
    y, _ = dropout(dev.array(np.ones(200_000)), dropout_states(dev, 5), 0.5)
    gone = y.numpy() == 0
    for distance in (1, 2, 64):
        assert abs((gone[distance:] & gone[:-distance]).mean() - 0.25) < 0.005


def masks(dev, seed, count):
    states, x = dropout_states(dev, seed), dev.array(np.ones(1000))
    return [dropout(x, states)[0].numpy() != 0 for _ in range(count)]


def test_a_seed_gives_the_same_masks_in_the_same_order_and_another_seed_others(dev):
    first, again, other = masks(dev, 7, 3), masks(dev, 7, 3), masks(dev, 8, 1)
    np.testing.assert_array_equal(first, again)
    assert all(0.4 < (one == two).mean() < 0.6 for one, two in [first[:2], first[1:], (first[0], other[0])])


def test_a_state_can_be_put_back(dev):
    x, states = dev.array(np.ones(1000)), dropout_states(dev, 7)
    kept = states.numpy()
    first, _ = dropout(x, states)
    assert (states.numpy() != kept).any()
    states.copy_from(kept)
    again, _ = dropout(x, states)
    np.testing.assert_array_equal(first.numpy(), again.numpy())


def test_the_reference_draws_what_the_row_draws(dev, rng):
    x, states = dev.array(rng.standard_normal((7, 9))), dropout_states(dev, 2)
    expected = reference(DropoutRequest(x, states, 0.3))
    y, reserve = dropout(x, states, 0.3)
    np.testing.assert_array_equal(y.numpy(), expected["out"])
    np.testing.assert_array_equal(reserve.numpy(), expected["reserve"])


def test_the_gradient_goes_where_the_forward_pass_kept(dev, rng):
    x, dy = rng.standard_normal((5, 6)) + 10, rng.standard_normal((5, 6))
    y, reserve = dropout(dev.array(x), dropout_states(dev, 3), 0.4)
    dx = dropout_bwd(dev.array(dy), reserve, 0.4)
    np.testing.assert_allclose(dx.numpy(), np.where(y.numpy() != 0, dy / 0.6, 0), rtol=1e-15)


def test_a_pass_that_moves_a_state_on_is_not_repeatable(dev):
    x, states = dev.zeros((3,)), dropout_states(dev, 1)
    request = DropoutRequest(x, states)
    assert not request.repeatable
    assert {name: written for name, _, written in request.tensors()} == {"x": False, "states": True}
    assert DropoutStatesRequest(dev, 1).repeatable


# fmt: off
REFUSED = [  # what is asked with x and a state, the operand that is named, what was given, what was expected
    (lambda x, s: DropoutRequest(x, s, 1.0),                "p",       "1.0",      "0 <= p < 1"),
    (lambda x, s: DropoutRequest(x, s, -0.1),               "p",       "-0.1",     "0 <= p < 1"),
    (lambda x, s: DropoutRequest(x, s, float("nan")),       "p",       "nan",      "0 <= p < 1"),
    (lambda x, s: DropoutRequest(x, s, True),               "p",       "True",     "number"),
    (lambda x, s: DropoutRequest(x, s[:8]),                 "states",  "u8[8]",    "u8[16]"),
    (lambda x, _: DropoutRequest(x, x),                     "states",  "f32[40]",  "u8[16]"),
    (DropoutBwdRequest,             "reserve", "u8[16]",   "u8[8]"),
    (lambda x, _: DropoutStatesRequest(x.device, -1),       "seed",    "-1",       "from 0"),
    (lambda x, s: DropoutStatesRequest(x.device, 1, out=s[1:]), "out",     "u8[15]",   "u8[16]"),
]
# fmt: on


@pytest.mark.parametrize(("ask", "operand", "given", "expected"), REFUSED)
def test_a_refusal_names_operand_given_and_expected(ask, operand, given, expected, dev):
    x, states = dev.zeros((40,)), dropout_states(dev, 1)
    with pytest.raises(BadRequest) as caught:
        ask(x, states)
    assert caught.value.operand == operand
    assert given in caught.value.given
    assert expected in caught.value.expected


def test_states_and_masks_stand_at_addresses_that_their_words_have(dev):
    """A view that starts one byte in is refused before a library, which would fault on it, sees it."""
    x, states, memory = dev.zeros((40,)), dropout_states(dev, 1), dev.zeros((17,), "u8")
    for ask in (
        lambda: DropoutRequest(x, memory[1:]),
        lambda: DropoutRequest(x, states, reserve=memory[1:9]),
        lambda: DropoutBwdRequest(x, memory[1:9]),
        lambda: DropoutStatesRequest(dev, 1, out=memory[1:]),
    ):
        with pytest.raises(BadRequest, match="an address that is a multiple of 1 bytes; expected one of"):
            ask()


def test_tensors_with_gaps_have_no_row(dev):
    with pytest.raises(NoRow, match="needs x and out dense"):
        dropout(dev.zeros((4, 6))[:, :5], dropout_states(dev, 1))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 5), (2, 3, 0)], ids=str)
def test_tensors_without_elements_have_a_row(shape, dev):
    y, reserve = dropout(dev.zeros(shape), dropout_states(dev, 1))
    assert (y.shape, reserve.shape) == (shape, (0,))
    assert dropout_bwd(y, reserve).shape == shape


def test_a_case_notices_a_mask_of_another_share_and_a_wrong_scale(dev, rng):
    row = next(row for row in ROWS if row.op == "dropout" and row.dtypes == (F32, F32))
    check = next(case for case in cases(row) if case.name == "large").check(dev, rng)
    y, reserve = dispatch.run(check.request)
    check.verify((y, reserve))
    values = np.asarray(y)
    kept = values.copy()
    values[::7] = 0
    with pytest.raises(Mismatch, match="are dropped, expected"):
        check.verify((y, reserve))
    values[:] = kept
    values[np.flatnonzero(kept)[0]] *= 1.001
    with pytest.raises(Mismatch, match="neither dropped nor scaled"):
        check.verify((y, reserve))
