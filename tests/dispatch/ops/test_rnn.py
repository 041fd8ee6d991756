"""Recurrent networks on the host: against single sequences in plain loops, gradients against finite differences."""

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
    RnnMode,
    RnnRequest,
    pack_weights,
    rnn,
    rnn_bwd_data,
    rnn_bwd_weights,
    unpack_weights,
)
from dispatch.ops.rnn.cases import PASSES, cases
from dispatch.ops.rnn.mutations import named
from dispatch.ops.rnn.weights import weight_shapes
from dispatch.row_check import check_row
from dispatch.testing.roundoff import as_on_a_gpu

ROWS = [row for row in TABLE if row.op.startswith("rnn") and row.on(HOST)]
M = RnnMode
NETWORKS = {
    "lstm": Network(M.LSTM, 3, 4, 2, True),
    "projection": Network(M.LSTM, 3, 4, 2, True, projection=2),
    "gru": Network(M.GRU, 3, 4, 2, True),
    "tanh": Network(M.RNN_TANH, 3, 4, 3),
    "relu": Network(M.RNN_RELU, 3, 4, 1, True, bias=False),
    "lstm, input's": Network(M.LSTM, 3, 4, bias=RnnBiasMode.SINGLE_INP_BIAS),
    "gru, input's": Network(M.GRU, 3, 4, bias=RnnBiasMode.SINGLE_INP_BIAS),
    "gru, state's": Network(M.GRU, 3, 4, 1, True, bias=RnnBiasMode.SINGLE_REC_BIAS),
}
STEPS, LENGTHS = 5, (5, 2, 4)


@pytest.fixture
def dev():
    return dispatch.device("host")


def sigmoid(v):
    return 1 / (1 + np.exp(-v))


def cell(network, w, x, h, c):
    """The next state and cell of one sequence, by the equations of cuDNN's documentation."""
    size = network.hidden_size
    a = w["weight_ih"] @ x + w.get("bias_ih", 0)
    b = w["weight_hh"] @ h + w.get("bias_hh", 0)
    part = [slice(g * size, (g + 1) * size) for g in range(4)]
    if network.mode is M.LSTM:
        total = a + b
        c = sigmoid(total[part[1]]) * c + sigmoid(total[part[0]]) * np.tanh(total[part[2]])
        h = sigmoid(total[part[3]]) * np.tanh(c)
        return (w["weight_hr"] @ h if network.projection else h), c
    if network.mode is M.GRU:
        r, z = sigmoid(a[part[0]] + b[part[0]]), sigmoid(a[part[1]] + b[part[1]])
        return (1 - z) * np.tanh(a[part[2]] + r * b[part[2]]) + z * h, c
    return np.tanh(a + b) if network.mode is M.RNN_TANH else np.maximum(a + b, 0), c


def one_by_one(network, named, x, hx, cx, lengths):
    """y and the last states, sequence by sequence, without batches and without padding."""
    y = np.zeros((*x.shape[:2], network.output_size))
    hy, cy = hx.copy(), cx.copy()
    for n, length in enumerate(lengths):
        reads = list(x[:length, n])
        for layer in range(network.layers):
            made = []
            for direction in range(network.directions):
                end = f"_l{layer}" + ("_reverse" if direction else "")
                w = {name.removesuffix(end): array for name, array in named.items() if name.endswith(end)}
                number = layer * network.directions + direction
                h, c, states = hx[number, n], cx[number, n], []
                for vector in reversed(reads) if direction else reads:
                    h, c = cell(network, w, vector, h, c)
                    states.append(h)
                hy[number, n], cy[number, n] = h, c
                made.append(states[::-1] if direction else states)
            reads = [np.concatenate(parts) for parts in zip(*made, strict=True)]
        y[:length, n] = reads
    return y, hy, cy


class Drawn:
    """The operands of a network, in f64, and the network as a function of them."""

    def __init__(self, network, dev, rng):
        self.network, self.dev = network, dev
        self.named = {name: rng.standard_normal(shape) * 0.5 for name, shape in weight_shapes(network).items()}
        count = network.pseudo_layers
        self.x = rng.standard_normal((STEPS, 3, 3))
        self.hx = rng.standard_normal((count, 3, network.state_size))
        self.cx = rng.standard_normal((count, 3, network.hidden_size))
        self.lstm = network.mode is M.LSTM

    def states(self):
        return {"hx": self.dev.array(self.hx), **({"cx": self.dev.array(self.cx)} if self.lstm else {})}

    def run(self, training=False):
        weights = pack_weights(self.network, self.named, self.dev)
        x = self.dev.array(self.x)
        return x, weights, rnn(x, weights, self.network, **self.states(), lengths=LENGTHS, training=training)

    def plain(self, **changes):
        fields = {name: changes.get(name, getattr(self, name)) for name in ("named", "x", "hx", "cx")}
        return one_by_one(self.network, **fields, lengths=LENGTHS)


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
        named = {name: rng.standard_normal(shape) for name, shape in weight_shapes(network).items()}
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
    rnn(x, weights, network, dropout=0.5)  # nothing is dropped in inference
    with pytest.raises(BadRequest, match="states: got nothing; expected what dropout is drawn from"):
        RnnRequest(x, weights, network, training=True, dropout=0.5)
    with pytest.raises(BadRequest, match="nothing is dropped"):
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


REFUSED = [  # fields that are changed, the operand that is named, what was given, what was expected
    ({"x": (5, 3)},                      "x",        "f32[5, 3]",     "(steps, sequences, 3)"),
    ({"x": (5, 3, 4)},                   "x",        "f32[5, 3, 4]",  "(steps, sequences, 3)"),
    ({"x": (5, 0, 3)},                   "x",        "f32[5, 0, 3]",  "none of them 0"),
    ({"weights": (7,)},                  "weights",  "f32[7]",        "f32[84]"),
    ({"hx": (1, 3, 5)},                  "hx",       "f32[1, 3, 5]",  "f32[1, 3, 4]"),
    ({"cx": (1, 3, 4)},                  "cx",       "a tensor",      "GRU has no cells"),
    ({"lengths": (5, 5)},                "lengths",  "(5, 5)",        "tuple of 3"),
    ({"lengths": (5, 0, 5)},             "lengths",  "0",             "from 1 to 5"),
    ({"lengths": (5, 6, 5)},             "lengths",  "6",             "from 1 to 5"),
    ({"lengths": [5, 5, 5]},             "lengths",  "[5, 5, 5]",     "tuple"),
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
    with pytest.raises(BadRequest, match="pass on what training=True gave"):
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


# -- how far off results may be -------------------------------------------------------------------------------------
LOOSE = [row for row in TABLE if row.op.startswith("rnn") and not row.on(HOST) and row.dtypes[0] in HALF]


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", LOOSE, ids=lambda row: row.name)
def test_passes_that_round_as_cudnn_does_are_within_the_bounds_of_16_bits(dev, rng, row):
    """All that a step keeps, multiplies or makes by a product is stored in 16 bits.

    Such passes give the very bits of an H200 where results came near to bounds without the products' roundings.
    """

    def stored(array):
        return np.asarray(array).astype(np.float32).astype(row.dtypes[0].numpy).astype(np.float64)

    for case in cases(row):
        with as_on_a_gpu():
            check = case.check(dev, rng)
        drawn = check.subject
        found = drawn._passes(drawn.operands, stored)[0]
        result = check.request.result(dev.executor().outputs(check.request))
        for name, tensor in named(check.request, result).items():
            tensor.copy_from(found[PASSES[row.op][name]].astype(np.float32).astype(tensor.dtype.numpy))
        check.verify(result)


# -- what a backward pass is given, it reads there --------------------------------------------------------------------
@pytest.mark.parametrize("name", NETWORKS)
def test_the_weights_gradient_is_of_the_x_y_and_hx_given(dev, rng, name):
    """Zeros for each in turn: the sums over what the reserve space keeps besides, by the layer that reads it."""
    network = NETWORKS[name]
    named = {n: rng.standard_normal(shape) for n, shape in weight_shapes(network).items()}
    weights = pack_weights(network, named, dev)
    x, hx = (dev.array(rng.standard_normal(s)) for s in ((STEPS, 3, 3), (network.pseudo_layers, 3, network.state_size)))
    y, *_, reserve = rnn(x, weights, network, hx=hx, lengths=LENGTHS, training=True)
    dy = dev.array(rng.standard_normal(y.shape))
    rnn_bwd_data(y, dy, weights, reserve, network, hx=hx, lengths=LENGTHS)

    def gradient(**given):
        operands = {"x": x, "y": y, "hx": hx, **given}
        x_given, y_given = operands.pop("x"), operands.pop("y")
        found = rnn_bwd_weights(x_given, y_given, reserve, network, **operands, lengths=LENGTHS)
        return unpack_weights(network, found)

    whole = gradient()
    last = f"l{network.layers - 1}"
    for given, reach in (("x", ("weight_ih_l0",)), ("y", (f"weight_hh_{last}",)), ("hx", ("weight_hh",))):
        tensor = {"x": x, "y": y, "hx": hx}[given]
        changed = gradient(**{given: dev.zeros(tensor.shape, "f64")})
        others = {n for n in whole if not np.array_equal(changed[n], whole[n])}
        assert others == {n for n in whole if n.startswith(reach)}, given
        if given == "x":
            assert (changed["weight_ih_l0"] == 0).all()


def test_the_first_step_of_an_lstms_gradient_is_of_the_cells_given(dev, rng):
    network = Network(M.LSTM, 3, 4, 1, True)
    weights = pack_weights(network, {n: rng.standard_normal(s) for n, s in weight_shapes(network).items()}, dev)
    x, cx = dev.array(rng.standard_normal((STEPS, 3, 3))), dev.array(rng.standard_normal((2, 3, 4)))
    y, *_, reserve = rnn(x, weights, network, cx=cx, lengths=LENGTHS, training=True)
    dy = dev.array(rng.standard_normal(y.shape))
    nan = cx.numpy()
    nan[:, 1] = np.nan
    kept = reserve.numpy()
    whole, *_ = rnn_bwd_data(y, dy, weights, reserve, network, cx=cx, lengths=LENGTHS)
    reserve.copy_from(kept)
    found, *_ = rnn_bwd_data(y, dy, weights, reserve, network, cx=dev.array(nan), lengths=LENGTHS)
    lost = np.isnan(found.numpy()).any(axis=-1)
    assert sorted(map(tuple, np.argwhere(lost).tolist())) == [
        (0, 1),
        (LENGTHS[1] - 1, 1),
    ]  # the first of each direction
    assert np.array_equal(found.numpy()[~lost], whole.numpy()[~lost])


@pytest.mark.parametrize("name", NETWORKS)
def test_without_a_first_state_no_product_with_it_is_made(dev, rng, name):
    """NaN in the state's weights does not reach a first step; with a state of zeros it does."""
    network = NETWORKS[name]
    weights = nan_in(network, "weight_hh", dev, rng)
    x, zeros = (
        dev.array(rng.standard_normal((1, 3, 3))),
        dev.zeros((network.pseudo_layers, 3, network.state_size), "f64"),
    )
    assert np.isfinite(rnn(x, weights, network)[0].numpy()).all()
    assert np.isnan(rnn(x, weights, network, hx=zeros)[0].numpy()).all()
    x = dev.array(rng.standard_normal((2, 3, 3)))
    assert np.isnan(rnn(x, weights, network)[0].numpy()[1]).any()


def nan_in(network, kind, dev, rng):
    """A weight space with NaN in all weights of a kind."""
    named = {n: rng.standard_normal(s) for n, s in weight_shapes(network).items()}
    named = {n: np.full(a.shape, np.nan) if n.startswith(kind) else a for n, a in named.items()}
    return pack_weights(network, named, dev)


def test_what_a_backward_direction_comes_to_later_has_a_product_with_zeros(dev, rng):
    """As on an H200: only the longest sequences begin without one."""
    network = Network(M.GRU, 3, 4, 1, True)
    weights = nan_in(network, "weight_hh", dev, rng)
    x = dev.array(rng.standard_normal((3, 3, 3)))
    y = rnn(x, weights, network, lengths=(3, 1, 2))[0].numpy()
    assert np.isfinite(y[0, :, :4]).all()  # forward
    assert np.isfinite(y[2, 0, 4:]).all()  # backward: the last step of the longest
    assert np.isnan(y[0, 1, 4:]).all()
    assert np.isnan(y[1, 2, 4:]).all()


def test_what_relu_drops_in_a_network_is_0_whatever_it_was_and_the_end_is_too(dev, rng):
    """NaN of a gradient goes no further than a unit that is off; NaN of the weights not behind a sequence's end."""
    network = Network(M.RNN_RELU, 3, 4)
    named = {n: rng.standard_normal(shape) for n, shape in weight_shapes(network).items()}
    named["bias_ih_l0"] = np.array([9.0, -99.0, 9.0, -99.0])
    named["weight_hh_l0"] *= 0.1
    x, dy = dev.array(rng.standard_normal((STEPS, 3, 3))), rng.standard_normal((STEPS, 3, 4))
    lengths = (5, 2, 4)

    def gradient(dy, weights):
        y, _, reserve = rnn(x, pack_weights(network, named, dev), network, lengths=lengths, training=True)
        return rnn_bwd_data(y, dev.array(dy), weights, reserve, network, lengths=lengths)[0].numpy()

    weights, nan = pack_weights(network, named, dev), dy.copy()
    nan[1, 0, 1] = np.nan
    assert np.isfinite(gradient(nan, weights)).all()
    nan[1, 0, 0] = np.nan
    found = gradient(nan, weights)
    assert np.isnan(found[:2, 0]).all()
    assert np.isfinite(found[2:, 0]).all()
    found = gradient(dy, nan_in(network, "weight_ih", dev, rng))
    assert (found[2:, 1] == 0).all()
    assert np.isnan(found[:2, 1]).all()
