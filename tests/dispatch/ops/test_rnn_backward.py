"""The backward passes of recurrent networks on the host: what they read, and how far off results may be."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from dispatch import TABLE
from dispatch.errors import BadRequest
from dispatch.keys import HALF, HOST
from dispatch.ops.rnn import (
    Network,
    pack_weights,
    rnn,
    rnn_bwd_data,
    rnn_bwd_weights,
    unpack_weights,
)
from dispatch.ops.rnn.cases import PASSES, cases
from dispatch.ops.rnn.mutations import named
from dispatch.ops.rnn.weights import weight_shapes
from dispatch.testing.roundoff import as_on_a_gpu

spec = importlib.util.spec_from_file_location("networks", Path(__file__).with_name("networks.py"))
networks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(networks)
M, NETWORKS, STEPS, LENGTHS, dev = networks.M, networks.NETWORKS, networks.STEPS, networks.LENGTHS, networks.dev


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


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_gradients_in_another_librarys_array_are_unpacked(library, dev, rng):
    network = Network("gru", 3, 4)
    weights = {name: rng.standard_normal(shape) for name, shape in weight_shapes(network).items()}
    space = pack_weights(network, weights, dev).numpy()
    given = pytest.importorskip("torch").from_numpy(space) if library == "torch" else space
    again = unpack_weights(network, given)
    assert again.keys() == weights.keys()
    assert all(np.array_equal(again[name], array) for name, array in weights.items())
    with pytest.raises(BadRequest, match=r"space: got f64\[3\]; expected \[108\]"):
        unpack_weights(network, given[:3])
    with pytest.raises(BadRequest, match="space: got a list; expected a tensor, or an array of another library"):
        unpack_weights(network, [0.123])
