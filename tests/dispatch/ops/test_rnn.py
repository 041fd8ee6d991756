"""Recurrent networks on the host: against single sequences in plain loops, gradients against finite differences."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch
from cudabind.sys.cudnn import cudnnRNNBiasMode_t
from dispatch import TABLE
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import HALF, HOST, Compute
from dispatch.ops.dropout import dropout_states
from dispatch.ops.rnn import (
    Network,
    RnnBiasMode,
    RnnBwdDataRequest,
    RnnRequest,
    pack_weights,
    rnn,
    rnn_bwd_data,
    rnn_bwd_weights,
    unpack_weights,
    weight_shapes,
)
from dispatch.ops.rnn.cases import cases
from dispatch.row_check import check_row

spec = importlib.util.spec_from_file_location("networks", Path(__file__).with_name("networks.py"))
networks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(networks)
M, NETWORKS, STEPS, LENGTHS, dev = networks.M, networks.NETWORKS, networks.STEPS, networks.LENGTHS, networks.dev
Drawn = networks.Drawn

ROWS = [row for row in TABLE if row.op.startswith("rnn") and row.on(HOST)]


def is_loose(row):
    """Whether a row keeps 16 bits or TF32 between steps: each bound is then found by running its case many times."""
    return row.dtypes[0] in HALF or row.compute is Compute.COMPUTE_32F_FAST_TF32


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.name, marks=[pytest.mark.exhaustive] if is_loose(row) else []) for row in ROWS],
)
def test_a_host_row_passes_its_cases(row, dev, rng):
    assert not [why for case in cases(row) if (why := check_row(row, case, dev, rng))]


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_as_one_sequence_at_a_time(network, dev, rng):
    drawn = Drawn(network, dev, rng)
    _, _, made = drawn.run()
    assert len(made) == (3 if drawn.lstm else 2)
    for tensor, expected in zip(made, drawn.plain(), strict=False):
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-12, atol=1e-14)
    assert not made[0].numpy()[2:, 1].any()


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_all_gradients_are_those_of_finite_differences(network, dev, rng, slope_of):
    drawn = Drawn(network, dev, rng)
    x, weights, (y, *last, reserve) = drawn.run(training=True)
    dy, *behind = (rng.standard_normal(tensor.shape) for tensor in (y, *last))
    given = dict(zip(("dhy", "dcy"), map(dev.array, behind), strict=False))
    made = rnn_bwd_data(y, dev.array(dy), weights, reserve, network, **drawn.states(), **given, lengths=LENGTHS)
    dweights = rnn_bwd_weights(x, y, reserve, network, hx=drawn.states()["hx"], lengths=LENGTHS)

    def total(**changes):
        results = drawn.plain(**changes)
        return sum((weight * array).sum() for weight, array in zip((dy, *behind), results, strict=False))

    close = {"rtol": 1e-5, "atol": 1e-7}
    for gradient, name in zip(made, ("x", "hx", "cx"), strict=False):
        slope = slope_of(lambda values, name=name: total(**{name: values}), getattr(drawn, name), 1.0)
        np.testing.assert_allclose(gradient.numpy(), slope, **close, err_msg=name)
    for name, gradient in unpack_weights(network, dweights).items():
        if name.startswith("bias_hh") and network.mode is not M.GRU and "ih" in network.biased:
            continue  # the same as bias_ih, and as long to compute
        slope = slope_of(lambda v, name=name: total(named={**drawn.named, name: v}), drawn.named[name], 1.0)
        np.testing.assert_allclose(gradient, slope, **close, err_msg=name)


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_what_x_holds_behind_the_end_of_a_sequence_reaches_nothing(network, dev, rng):
    """Neither results nor gradients, those of the weights among them."""
    drawn = Drawn(network, dev, rng)
    plain, filled = drawn.x.copy(), drawn.x.copy()
    for number, length in enumerate(LENGTHS):
        plain[length:, number], filled[length:, number] = 0, np.nan
    weights = pack_weights(network, drawn.named, dev)

    def passes(values):
        x = dev.array(values)
        y, *last, reserve = rnn(x, weights, network, training=True, **drawn.states(), lengths=LENGTHS)
        made = rnn_bwd_data(y, y, weights, reserve, network, **drawn.states(), lengths=LENGTHS)
        dweights = rnn_bwd_weights(x, y, reserve, network, hx=drawn.states()["hx"], lengths=LENGTHS)
        return [tensor.numpy() for tensor in (y, *last, *made, dweights)]

    for found, expected in zip(passes(filled), passes(plain), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_weights_are_floating_point_numbers(dev, rng):
    network = NETWORKS["gru"]
    with pytest.raises(BadRequest, match="dtype: got i64; expected f64, f32, f16 or bf16"):
        pack_weights(network, Drawn(network, dev, rng).named, dev, dtype=int)


def test_sequences_may_come_first_in_memory(dev, rng):
    network = NETWORKS["gru"]
    weights = pack_weights(network, Drawn(network, dev, rng).named, dev)
    values = rng.standard_normal((3, STEPS, 3))
    by_sequences = dev.array(values).T.mT.T
    assert by_sequences.shape == (STEPS, 3, 3)
    y, hy = rnn(by_sequences, weights, network)
    expected, last = rnn(dev.array(values.transpose(1, 0, 2).copy()), weights, network)
    assert y.layout.strides[1] > y.layout.strides[0]
    np.testing.assert_array_equal(y.numpy(), expected.numpy())
    np.testing.assert_array_equal(hy.numpy(), last.numpy())


def test_weights_come_out_of_their_space_as_they_went_in(dev, rng):
    for network in NETWORKS.values():
        named = {name: rng.standard_normal(shape) for name, shape in dispatch.weight_shapes(network).items()}
        space = pack_weights(network, named, dev)
        assert space.shape == (network.weight_count,) == (sum(array.size for array in named.values()),)
        again = unpack_weights(network, space)
        assert all((again[name] == array).all() for name, array in named.items())


def test_weights_that_do_not_fit_are_named(dev):
    network = Network(M.RNN_TANH, 3, 4, bias=False)
    with pytest.raises(BadRequest, match=r"missing \['weight_hh_l0'\], unknown \['w'\]"):
        pack_weights(network, {"weight_ih_l0": np.zeros((4, 3)), "w": np.zeros(1)}, dev)
    with pytest.raises(BadRequest, match=r"weight_hh_l0: got shape \(3, 4\)"):
        pack_weights(network, {"weight_ih_l0": np.zeros((4, 3)), "weight_hh_l0": np.zeros((3, 4))}, dev)


def dropped(network, dev, x, weights, seed, **fields):
    """A forward pass in training with dropout from a seed."""
    fields = {"training": True, "dropout": 0.4, "states": dropout_states(dev, seed), **fields}
    return rnn(dev.array(x), dev.array(weights), network, **fields)


def test_dropout_between_layers_can_be_drawn_again_and_has_its_gradient(dev, rng, slope_of):
    network = Network(M.GRU, 3, 4, 3, True)
    x, weights = rng.standard_normal((STEPS, 3, 3)), rng.standard_normal(network.weight_count) / 2
    y, _, reserve = dropped(network, dev, x, weights, 7)
    dy = rng.standard_normal(y.shape)
    np.testing.assert_array_equal(y.numpy(), dropped(network, dev, x, weights, 7)[0].numpy())
    assert (y.numpy() != dropped(network, dev, x, weights, 8)[0].numpy()).any()

    def forward(values):
        return dropped(network, dev, values, weights, 7)[0].numpy()

    dx, _ = rnn_bwd_data(y, dev.array(dy), dev.array(weights), reserve, network, dropout=0.4)
    np.testing.assert_allclose(dx.numpy(), slope_of(forward, x, dy), rtol=1e-5, atol=1e-7)
    dweights = rnn_bwd_weights(dev.array(x), y, reserve, network, dropout=0.4).numpy()
    direction, step = rng.standard_normal(weights.shape), 1e-6
    there, back = (dropped(network, dev, x, weights + s * direction, 7)[0].numpy() for s in (step, -step))
    assert (dweights * direction).sum() == pytest.approx((dy * (there - back)).sum() / (2 * step), rel=1e-5)


def test_a_state_is_there_where_masks_are_drawn_and_moves_on(dev):
    network = Network(M.RNN_TANH, 3, 4, 2)
    x, weights, states = dev.zeros((5, 3, 3)), dev.zeros((network.weight_count,)), dropout_states(dev, 1)
    before = states.numpy()
    request = RnnRequest(x, weights, network, training=True, dropout=0.5, states=states)
    assert not request.repeatable
    assert RnnRequest(x, weights, network).repeatable
    dispatch.run(request)
    assert (states.numpy() != before).any()
    rnn(x, weights, network, dropout=0.5)  # there is no dropout in inference
    with pytest.raises(BadRequest, match="states: got nothing; expected the random states for dropout"):
        RnnRequest(x, weights, network, training=True, dropout=0.5)
    with pytest.raises(BadRequest, match="there is no dropout"):
        RnnRequest(x, weights, network, dropout=0.5, states=states)
    with pytest.raises(BadRequest, match=r"dropout: got 1\.0"):
        RnnRequest(x, weights, network, dropout=1.0)


# fmt: off
@pytest.mark.parametrize(
    ("fields", "operand"),
    [
        ({"mode": 2},                                  "mode"),
        ({"hidden_size": 0},                           "hidden_size"),
        ({"layers": True},                             "layers"),
        ({"projection": 4},                            "projection"),
        ({"mode": M.GRU, "projection": 2},             "projection"),
        ({"bidirectional": 1},                         "bidirectional"),
    ],
)
def test_a_network_that_cannot_be_is_refused(fields, operand):
    with pytest.raises(BadRequest) as caught:
        Network(**{"mode": M.LSTM, "input_size": 3, "hidden_size": 4, **fields})
    assert caught.value.operand == operand


def test_weights_are_those_of_a_network():
    with pytest.raises(BadRequest, match=r"^network: got 'GRU'; expected a Network"):
        weight_shapes("GRU")


def test_a_projection_is_smaller_than_the_state():
    wanted = "projection: got 1; expected 0 for no projection, or a size below hidden_size, 1"
    with pytest.raises(BadRequest, match=wanted):
        Network("LSTM", 3, 1, projection=1)
    assert Network("LSTM", 3, 2, projection=1).output_size == 1


@pytest.mark.parametrize("lengths", [[5, 2], (np.int64(5), 2), np.array([5, 2]), np.array([5, 2], np.uint8)], ids=repr)
def test_lengths_are_any_sequence_of_whole_numbers(lengths, dev):
    network = Network(M.GRU, 3, 4)
    x, weights = dev.array(np.ones((5, 2, 3))), dev.array(np.ones(network.weight_count))
    request = RnnRequest(x, weights, network, lengths=lengths)
    assert type(request.lengths) is tuple
    assert request.key() == RnnRequest(x, weights, network, lengths=(5, 2)).key()
    assert {request.key()}
    for _ in range(2):
        y = rnn(x, weights, network, lengths=lengths)[0].numpy()
        assert (y != 0).any(axis=-1).sum(axis=0).tolist() == [5, 2]


def test_lengths_that_change_in_place_are_read_anew(dev):
    network, lengths = Network(M.GRU, 3, 4), [5, 2]
    x, weights = dev.array(np.ones((5, 2, 3))), dev.array(np.ones(network.weight_count))
    for lengths[1] in (2, 4):
        y = rnn(x, weights, network, lengths=lengths)[0].numpy()
        assert (y != 0).any(axis=-1).sum(axis=0).tolist() == [5, lengths[1]]
    with pytest.raises(BadRequest, match=r"list of 2 whole numbers, one per sequence\. Hint: x\.tolist\(\) converts"):
        rnn(x, weights, network, lengths=dev.array(np.array([5, 2])))


REFUSED = [  # fields that are changed, the operand that is named, what was given, what was expected
    ({"x": (5, 3)},                      "x",        "f32[5, 3]",     "(steps, sequences, 3)"),
    ({"x": (5, 3, 4)},                   "x",        "f32[5, 3, 4]",  "(steps, sequences, 3)"),
    ({"x": (5, 0, 3)},                   "x",        "f32[5, 0, 3]",  "no extent of 0"),
    ({"weights": (7,)},                  "weights",  "f32[7]",        "f32[84]"),
    ({"hx": (1, 3, 5)},                  "hx",       "f32[1, 3, 5]",  "f32[1, 3, 4]"),
    ({"cx": (1, 3, 4)},                  "cx",       "a tensor",      "GRU has no cell state"),
    ({"lengths": (5, 5)},                "lengths",  "(5, 5)",        "list of 3 whole numbers"),
    ({"lengths": (5, 0, 5)},             "lengths",  "0",             "from 1 to 5"),
    ({"lengths": (5, 6, 5)},             "lengths",  "6",             "from 1 to 5"),
    ({"lengths": [5, 2.5, 5]},           "lengths",  "2.5",           "whole number from 1 to 5"),
    ({"lengths": "555"},                 "lengths",  "'555'",         "list of 3 whole numbers"),
    ({"network": "gru"},                 "network",  "'gru'",         "Network"),
    ({"training": 1},                    "training", "1",             "bool"),
    ({"compute": 77},                    "compute",  "77",            "Compute"),
]
# fmt: on


@pytest.mark.parametrize(("changes", "operand", "given", "expected"), REFUSED)
def test_a_refusal_names_operand_given_and_expected(changes, operand, given, expected, dev):
    network = Network(M.GRU, 3, 4, bias=False)
    shapes = {"x": (5, 3, 3), "weights": (84,), "network": network}
    fields = {**shapes, **changes}
    for name in ("x", "weights", "hx", "cx"):
        if name in fields:
            fields[name] = dev.zeros(fields[name])
    with pytest.raises(BadRequest) as caught:
        RnnRequest(**fields)
    assert caught.value.operand == operand
    assert given in caught.value.given
    assert expected in caught.value.expected


def test_a_reserve_space_of_another_pass_is_refused(dev):
    network = Network(M.GRU, 3, 4, bias=False)
    x, weights = dev.zeros((5, 3, 3)), dev.zeros((84,))
    y, _, reserve = rnn(x, weights, network, training=True)
    with pytest.raises(BadRequest, match="pass the reserve that training=True returned"):
        rnn_bwd_data(y, y, weights, reserve[:-16], network)
    with pytest.raises(BadRequest, match="a dense u8 tensor"):
        RnnBwdDataRequest(y, y, weights, x, network)


def test_tf32_is_taken_where_it_is_asked_for_and_f32_alone_has_it(dev):
    network = Network(M.GRU, 3, 4, bias=False)
    x, weights = dev.zeros((5, 3, 3)), dev.zeros((84,))
    fast = Compute.COMPUTE_32F_FAST_TF32
    assert dispatch.prepare(RnnRequest(x, weights, network)).row.compute is Compute.COMPUTE_32F
    assert dispatch.prepare(RnnRequest(x, weights, network, compute=fast)).row.compute is fast
    with pytest.raises(NoRow, match="compute"):
        rnn(dev.zeros((5, 3, 3), "f16"), dev.zeros((84,), "f16"), network, compute=fast)


def test_sequences_with_gaps_have_no_row(dev):
    network = Network(M.GRU, 3, 4, bias=False)
    with pytest.raises(NoRow, match="needs dense sequences"):
        rnn(dev.zeros((5, 3, 6))[:, :, :3], dev.zeros((84,)), network)


def test_what_is_not_at_a_multiple_of_16_bytes_has_no_row(dev):
    network = Network(M.GRU, 3, 4, bias=False)
    with pytest.raises(NoRow, match="needs weights at a multiple of 16 bytes, has 4"):
        rnn(dev.zeros((5, 3, 3)), dev.zeros((85,))[1:], network)


def test_biases_are_numbered_as_in_the_header_and_named_by_their_product():
    for mode in RnnBiasMode:
        assert cudnnRNNBiasMode_t[f"CUDNN_RNN_{mode.name}"] == mode
    names = {
        mode: {name for name in weight_shapes(Network(M.GRU, 3, 4, bias=mode)) if name.startswith("bias")}
        for mode in RnnBiasMode
    }
    assert names == {
        RnnBiasMode.NO_BIAS: set(),
        RnnBiasMode.SINGLE_INP_BIAS: {"bias_ih_l0"},
        RnnBiasMode.DOUBLE_BIAS: {"bias_ih_l0", "bias_hh_l0"},
        RnnBiasMode.SINGLE_REC_BIAS: {"bias_hh_l0"},
    }
    assert Network(M.GRU, 3, 4) == Network(M.GRU, 3, 4, bias=True) != Network(M.GRU, 3, 4, bias=RnnBiasMode(1))
    assert Network(M.GRU, 3, 4, bias=False) == Network(M.GRU, 3, 4, bias=RnnBiasMode.NO_BIAS)
    with pytest.raises(BadRequest, match="bias"):
        Network(M.GRU, 3, 4, bias=2)
