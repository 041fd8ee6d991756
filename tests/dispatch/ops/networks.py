"""Recurrent networks, one sequence at a time in plain loops, and operands that are drawn for them."""

import numpy as np
import pytest

import dispatch
from dispatch.ops.rnn import (
    Network,
    RnnBiasMode,
    RnnMode,
    pack_weights,
    rnn,
)
from dispatch.ops.rnn.weights import weight_shapes

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
