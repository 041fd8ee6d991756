"""Recurrent networks on the GPU: every row through its cases, and all gradients against torch's."""

import numpy as np
import pytest

import dispatch
from dispatch.keys import HOST
from dispatch.ops.dropout import dropout_states
from dispatch.ops.rnn import (
    Network,
    RnnBiasMode,
    RnnBwdDataRequest,
    RnnBwdWeightsRequest,
    RnnMode,
    RnnRequest,
    pack_weights,
    rnn,
    rnn_bwd_data,
    rnn_bwd_weights,
    unpack_weights,
)
from dispatch.ops.rnn.cases import cases
from dispatch.ops.rnn.weights import weight_shapes

OPS = ("rnn", "rnn_bwd_data", "rnn_bwd_weights")
ROWS = [row for row in dispatch.TABLE if row.op in OPS and row.min_arch != HOST]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]
M = RnnMode
NETWORKS = {
    "lstm": Network(M.LSTM, 7, 11, 2, True),
    "projection": Network(M.LSTM, 7, 11, 2, True, projection=4),
    "gru": Network(M.GRU, 7, 11, 2, True),
    "tanh": Network(M.RNN_TANH, 7, 11, 3),
    "relu": Network(M.RNN_RELU, 7, 11, 1, bias=False),
}


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_a_case_or_refuses_it_with_its_reason(row, case, try_row):
    try_row(row, case)


def torch_of(torch, network):
    """The same network in torch, in f64 on the CPU, where no cuDNN is."""
    kinds = {M.LSTM: torch.nn.LSTM, M.GRU: torch.nn.GRU}
    fields = {
        "num_layers": network.layers,
        "bidirectional": network.bidirectional,
        "bias": network.bias is RnnBiasMode.DOUBLE_BIAS,
        "dtype": torch.float64,
    }
    if network.mode is M.LSTM:
        fields["proj_size"] = network.projection
    if network.mode not in kinds:
        fields["nonlinearity"] = network.mode.name.removeprefix("RNN_").lower()
    return kinds.get(network.mode, torch.nn.RNN)(network.input_size, network.hidden_size, **fields)


@pytest.mark.parametrize("lengths", [None, (6, 1, 4)], ids=["all", "lengths"])
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_values_and_all_gradients_are_those_of_torch(network, lengths, gpu, rng):
    torch = pytest.importorskip("torch")
    theirs = torch_of(torch, network)
    named = {name: tensor.detach().numpy() for name, tensor in theirs.named_parameters()}
    assert {name: array.shape for name, array in named.items()} == weight_shapes(network)
    x = torch.tensor(rng.standard_normal((6, 3, 7)), requires_grad=True)
    hx = torch.tensor(rng.standard_normal((network.pseudo_layers, 3, network.state_size)), requires_grad=True)
    cx = torch.tensor(rng.standard_normal((network.pseudo_layers, 3, network.hidden_size)), requires_grad=True)
    lstm = network.mode is M.LSTM
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths or (6,) * 3), enforce_sorted=False)
    y, last = theirs(packed, (hx, cx) if lstm else hx)
    y, _ = torch.nn.utils.rnn.pad_packed_sequence(y, total_length=6)
    last = last if lstm else (last,)
    dy = rng.standard_normal(y.shape)
    d_last = [rng.standard_normal(state.shape) for state in last]
    torch.autograd.backward([y, *last], [torch.tensor(array) for array in (dy, *d_last)])

    weights = pack_weights(network, named, gpu)
    ours = gpu.array(x.detach().numpy())
    first = {"hx": gpu.array(hx.detach().numpy())}
    behind = {"dhy": gpu.array(d_last[0])}
    if lstm:
        first["cx"], behind["dcy"] = gpu.array(cx.detach().numpy()), gpu.array(d_last[1])
    our_y, *our_last, reserve = rnn(ours, weights, network, **first, lengths=lengths, training=True)
    gradients = rnn_bwd_data(our_y, gpu.array(dy), weights, reserve, network, **first, **behind, lengths=lengths)
    dweights = rnn_bwd_weights(ours, our_y, reserve, network, hx=first["hx"], lengths=lengths)

    close = {"rtol": 1e-9, "atol": 1e-11}
    np.testing.assert_allclose(our_y.numpy(), y.detach().numpy(), **close)
    for state, expected in zip(our_last, last, strict=True):
        np.testing.assert_allclose(state.numpy(), expected.detach().numpy(), **close)
    for gradient, source in zip(gradients, (x, hx, cx), strict=False):
        np.testing.assert_allclose(gradient.numpy(), source.grad.numpy(), **close)
    for name, gradient in unpack_weights(network, dweights).items():
        np.testing.assert_allclose(gradient, dict(theirs.named_parameters())[name].grad.numpy(), **close, err_msg=name)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_weights_come_out_of_their_space_as_they_went_in(dtype, gpu, rng):
    network = Network(M.LSTM, 5, 9, 2, True, projection=3)
    named = {
        name: rng.standard_normal(shape).astype(dispatch.Dtype.of(dtype).numpy)
        for name, shape in weight_shapes(network).items()
    }
    again = unpack_weights(network, pack_weights(network, named, gpu))
    assert set(again) == set(named)
    for name, array in named.items():
        np.testing.assert_array_equal(again[name], array)


def test_workers_of_a_supervisor_have_descriptors_and_workspace_of_their_own(rng):
    """Four streams, networks of one and of two directions, which share no scratch memory, and lengths that change."""
    host = dispatch.device("host")
    with dispatch.Supervisor("cuda:0", streams=4) as sup:
        asked = []
        for number in range(48):
            network = Network(list(M)[number % 4], 9, 16, 1, bidirectional=number % 3 == 0)
            named = {name: rng.standard_normal(shape) / 4 for name, shape in weight_shapes(network).items()}
            x, lengths = rng.standard_normal((7, 3, 9)), (7, number % 7 + 1, 2)
            expected, *_ = rnn(host.array(x), pack_weights(network, named, host), network, lengths=lengths)
            request = RnnRequest(
                sup.device.array(x), pack_weights(network, named, sup.device), network, lengths=lengths
            )
            asked.append((sup.submit(request), expected.numpy()))
        for future, expected in asked:
            np.testing.assert_allclose(future.result(60)[0].numpy(), expected, rtol=1e-10, atol=1e-12)


def test_a_repeated_training_step_gives_the_same_gradients_each_time(gpu, rng):
    """Forward and both backward passes, called, recorded and replayed over one reserve space."""
    network = Network(M.GRU, 6, 10, 2, True)
    x = gpu.array(rng.standard_normal((5, 4, 6)))
    weights = gpu.array(rng.standard_normal(network.weight_count) / 4)
    forward = RnnRequest(x, weights, network, training=True)
    y, hy, reserve = dispatch.run(forward)
    forward = forward.replace(out=y, hy=hy, reserve=reserve)
    dy = gpu.array(rng.standard_normal(y.shape))
    data = RnnBwdDataRequest(y, dy, weights, reserve, network)
    dx, dhx = dispatch.run(data)
    data = data.replace(out=dx, dhx=dhx)
    slopes = RnnBwdWeightsRequest(x, y, reserve, network)
    slopes = slopes.replace(out=dispatch.run(slopes))
    first = [tensor.numpy() for tensor in (y, dx, dhx, slopes.out)]
    for _ in range(4):
        for request in (forward, data, slopes):
            dispatch.run(request)
        for tensor, expected in zip((y, dx, dhx, slopes.out), first, strict=True):
            np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("network", [Network(M.LSTM, 6, 8, 3, True), Network(M.GRU, 6, 8, 2)], ids=["lstm", "gru"])
def test_dropout_between_layers_can_be_drawn_again_and_has_its_gradient(network, gpu, rng):
    """In f64 a step along any direction changes y as the gradients say, where the masks are the same."""
    x, weights = rng.standard_normal((5, 4, 6)), rng.standard_normal(network.weight_count) / 3
    lengths = (5, 2, 4, 1)

    def forward(seed, x=x, weights=weights):
        fields = {"lengths": lengths, "training": True, "dropout": 0.4, "states": dropout_states(gpu, seed)}
        return rnn(gpu.array(x), gpu.array(weights), network, **fields)

    y, *_, reserve = forward(7)
    np.testing.assert_array_equal(y.numpy(), forward(7)[0].numpy())
    assert (y.numpy() != forward(8)[0].numpy()).any()
    plain, *_ = rnn(gpu.array(x), gpu.array(weights), network, lengths=lengths)
    assert (y.numpy() != plain.numpy()).any()
    dy = rng.standard_normal(y.shape)
    choices = {"lengths": lengths, "dropout": 0.4}
    dx = rnn_bwd_data(y, gpu.array(dy), gpu.array(weights), reserve, network, **choices)[0].numpy()
    dweights = rnn_bwd_weights(gpu.array(x), y, reserve, network, **choices).numpy()
    step = 1e-6
    for gradient, name, value in ((dx, "x", x), (dweights, "weights", weights)):
        direction = rng.standard_normal(value.shape)
        there, back = (forward(7, **{name: value + s * direction})[0].numpy() for s in (step, -step))
        expected = (dy * (there - back)).sum() / (2 * step)
        assert (gradient * direction).sum() == pytest.approx(expected, rel=1e-5)


def test_a_replay_with_dropout_draws_the_next_mask_from_its_own_state(gpu, rng):
    network = Network(M.RNN_TANH, 6, 32, 2)
    x, weights = gpu.array(rng.standard_normal((5, 4, 6))), gpu.array(rng.standard_normal(network.weight_count) / 3)

    def drawn(seeds):
        """y of four passes with each state, the states by turns."""
        requests = []
        for seed in seeds:
            request = RnnRequest(x, weights, network, training=True, dropout=0.5, states=dropout_states(gpu, seed))
            y, hy, reserve = dispatch.run(request)
            requests.append(request.replace(out=y, hy=hy, reserve=reserve))
        return [[dispatch.run(request)[0].numpy() for request in requests] for _ in range(4)]

    apart, mixed = [drawn([1]), drawn([2])], drawn([1, 2])
    for number in range(4):
        np.testing.assert_array_equal(mixed[number][0], apart[0][number][0])
        np.testing.assert_array_equal(mixed[number][1], apart[1][number][0])
    assert (mixed[0][0] != mixed[1][0]).any()
