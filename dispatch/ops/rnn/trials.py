"""The cases that the rows of recurrent networks are tried with, and how far a result may be from the float64 reference.

A backward pass is tried behind a forward pass of the same device, whose reserve space is its own; what must come out is
computed from the operands alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.cudnn.formulas import EXACT
from dispatch.cudnn.trial import ROUNDOFF, Memory, Trial, normal, place, poison, rounded
from dispatch.keys import Compute
from dispatch.ops.rnn.formulas import backward_data, backward_weights, empty_saved, forward
from dispatch.ops.rnn.network import Network, RnnBiasMode, RnnMode
from dispatch.ops.rnn.request import RnnBwdDataRequest, RnnBwdWeightsRequest, RnnRequest
from dispatch.ops.rnn.rules import one_bias, two_or_none
from dispatch.ops.rnn.weights import pack, pack_weights, places, weight_shapes
from dispatch.request import run

if TYPE_CHECKING:
    from dispatch.cudnn.formulas import Results
    from dispatch.cudnn.operands import OperandRequest
    from dispatch.device import Device
    from dispatch.keys import Dtype
    from dispatch.row import Row
    from dispatch.tensor import Array

__all__ = ["RnnCase", "cases"]

TF32 = 2.0**-10
M, B = RnnMode, RnnBiasMode
# Name, network, steps, sequences, lengths, whether the sequences come first in memory, and whether states are given.
# fmt: off
Form = tuple[str, Network, int, int, tuple[int, ...] | None, bool, bool]
FORMS: tuple[Form, ...] = (
    ("one",            Network(M.LSTM, 1, 1),                                     1,  1, None,            False, False),
    ("lstm",           Network(M.LSTM, 7, 11),                                    5,  3, None,            False, True),
    ("gru",            Network(M.GRU, 7, 11),                                     5,  3, None,            False, True),
    ("tanh",           Network(M.RNN_TANH, 7, 11),                                5,  3, None,            False, True),
    ("relu",           Network(M.RNN_RELU, 7, 11),                                5,  3, None,            False, True),
    ("lstm, lengths",  Network(M.LSTM, 5, 13, 2, True),                           9,  4, (9, 2, 5, 1),    False, True),
    ("gru, lengths",   Network(M.GRU, 5, 13, 2, True),                            9,  4, (3, 9, 1, 4),    True,  True),
    ("tanh, layers",   Network(M.RNN_TANH, 3, 17, 3, True, bias=False),           7,  2, None,            True,  False),
    ("relu, lengths",  Network(M.RNN_RELU, 6, 8, 2),                              6,  3, (6, 6, 2),       False, True),
    ("projection",     Network(M.LSTM, 6, 12, 2, True, projection=5),             8,  3, (8, 3, 5),       False, True),
    ("no bias",        Network(M.LSTM, 6, 10, 1, bias=False),                     4,  5, None,            True,  False),
    ("gru, no bias",   Network(M.GRU, 4, 6, bias=False),                          6,  2, None,            False, True),
    ("lstm, input's",  Network(M.LSTM, 7, 10, bias=B.SINGLE_INP_BIAS),            5,  3, None,            False, True),
    ("gru, input's",   Network(M.GRU, 7, 10, 2, True, bias=B.SINGLE_INP_BIAS),    6,  3, (2, 6, 5),       False, True),
    ("gru, state's",   Network(M.GRU, 7, 10, 2, True, bias=B.SINGLE_REC_BIAS),    6,  3, (6, 1, 5),       True,  True),
    ("tanh, state's",  Network(M.RNN_TANH, 7, 10, 2, bias=B.SINGLE_REC_BIAS),     5,  3, None,            False, True),
    ("lstm, state's",  Network(M.LSTM, 6, 12, 1, projection=5, bias=B.SINGLE_REC_BIAS), 8, 3, (8, 3, 5),  False, True),
    ("larger",         Network(M.LSTM, 32, 64, 2),                                16, 8, None,            False, False),
)
# fmt: on


@dataclass(frozen=True)
class RnnCase:
    """One request, by all that is chosen about it but the numbers in it."""

    name: str
    network: Network
    steps: int
    batch: int
    lengths: tuple[int, ...] | None
    sequences_first: bool
    with_states: bool
    dtype: Dtype
    compute: Compute | None
    op: str
    training: bool

    @property
    def id(self) -> str:
        fast = "-TF32" if self.compute is Compute.COMPUTE_32F_FAST_TF32 else ""
        return f"{self.dtype}{fast}-{'training' if self.training else 'inference'}-{self.name}"

    def trial(self, device: Device, rng: np.random.Generator) -> Trial:
        """The case with fresh operands."""
        drawn = _Drawn(self, device, rng)
        if self.op == "rnn_fwd":
            return drawn.forward()
        return drawn.backward_data() if self.op == "rnn_bwd_data" else drawn.backward_weights()


class _Drawn:
    """The operands of one case, and what all three passes must give for them."""

    def __init__(self, case: RnnCase, device: Device, rng: np.random.Generator) -> None:
        self.case, self.device, self.network = case, device, case.network
        network, dtype = case.network, case.dtype
        spread = case.network.hidden_size**-0.5
        self.named = {n: normal(rng, dtype, shape, spread) for n, shape in weight_shapes(network).items()}
        if network.mode is RnnMode.RNN_RELU:  # every unit far on or far off: at the corner a rounding turns a gradient
            for name, array in self.named.items():
                near = np.where(np.arange(array.size) % 3 == 0, -4, 4) if name.startswith("bias_ih") else array * 0.2
                array[...] = near.astype(array.dtype)
        self.weights = pack_weights(network, self.named, device, dtype)
        self.x = self._lay(normal(rng, dtype, (case.steps, case.batch, network.input_size)))
        hidden = (network.pseudo_layers, case.batch, network.state_size)
        cells = (network.pseudo_layers, case.batch, network.hidden_size)
        self.states: dict[str, Array | None] = {"hx": None, "cx": None, "dhy": None, "dcy": None}
        if case.with_states:
            self.states["hx"], self.states["dhy"] = (normal(rng, dtype, hidden) for _ in "12")
            if network.mode is RnnMode.LSTM:
                self.states["cx"], self.states["dcy"] = (normal(rng, dtype, cells) for _ in "12")
        dy = normal(rng, dtype, (case.steps, case.batch, network.output_size))
        self.lengths = np.array(case.lengths or (case.steps,) * case.batch)
        behind = np.arange(case.steps)[:, None] >= self.lengths
        dy[behind] = np.nan  # nobody may read it there
        self.dy = self._lay(dy)
        self.expected = self._expected(np.where(behind[..., None], 0, dy.astype(np.float64)), hidden, cells)

    def _lay(self, values: Array) -> Memory:
        return place(self.device, values, (1, 0, 2) if self.case.sequences_first else None)

    def _expected(self, dy: Array, hidden: tuple[int, ...], cells: tuple[int, ...]) -> dict[str, Array]:
        """What the three passes give in f64, by name; `dweights` is in the places of the device's weight space."""
        network, exact = self.network, {name: array.astype(np.float64) for name, array in self.named.items()}
        shapes = {"hx": hidden, "cx": cells, "dhy": hidden, "dcy": cells}
        states = {
            name: np.zeros(shapes[name]) if array is None else array.astype(np.float64)
            for name, array in self.states.items()
        }
        _, saved = empty_saved(network, self.case.steps, self.case.batch, EXACT)
        x = self.x.view.numpy().astype(np.float64)
        made = forward(network, exact, x, states["hx"], states["cx"], self.lengths, saved)
        found = {"y": made["out"], "hy": made["hy"], "cy": made["cy"]}
        back = backward_data(network, exact, saved, self.lengths, dy, states["dhy"], states["dcy"])
        found.update({"dx" if name == "out" else name: array for name, array in back.items()})
        products = [
            np.abs(saved[number][kind]) @ np.abs(exact[f"weight_{way}_l{number // network.directions}{end}"])
            for number in range(network.pseudo_layers)
            for end in ("_reverse" if number % network.directions else "",)
            for kind, way in (("d_input", "ih"), ("d_state", "hh"))
        ]
        self.reach = max(float(product.max()) for product in products)
        where = places(network, self.case.dtype, self.device)
        found["dweights"] = pack(network, backward_weights(network, saved), where, EXACT)
        return found

    def _tensors(self, *names: str) -> dict[str, Any]:
        arrays = {name: self.states[name] for name in names}
        return {name: None if array is None else self.device.array(array) for name, array in arrays.items()}

    def _poisoned(self, given: dict[str, str]) -> dict[str, Memory]:
        """Memory for outputs, laid out like the sequences where it is one; `given` names what is expected of each."""
        made = {}
        for name, source in given.items():
            values = poison(self.case.dtype, self.expected[source].shape)
            made[name] = self._lay(values) if source in ("y", "dx") else place(self.device, values)
        return made

    def _trial(self, request: OperandRequest, given: dict[str, str], written: dict[str, Memory]) -> Trial:
        expected: Results = {name: self.expected[source] for name, source in given.items()}
        reach = 0.0 if self.case.op == "rnn_fwd" else self.reach
        allowed = {name: self._bound(array, reach) for name, array in expected.items()}
        return Trial(self.case.id, request, expected, allowed, tuple(written.values()))

    def _bound(self, expected: Array, reach: float) -> Array:
        """How far a result may be off.

        Every step of every layer rounds the state to the dtype and multiplies it by weights of norm 1 or so; the gates
        damp an error rather than let it grow, so it walks like √(steps · layers) of the largest value, or of `reach`,
        the largest sum of magnitudes that a gradient is made of.
        """
        unit = ROUNDOFF[self.case.dtype][0]
        if self.case.compute is Compute.COMPUTE_32F_FAST_TF32:
            unit = TF32
        walk = 8 + 4 * np.sqrt(self.case.steps * self.network.layers)
        size = np.abs(expected) + max(np.abs(expected).max(initial=0), reach)
        return rounded(walk * unit * size, expected, self.case.dtype)

    def forward(self) -> Trial:
        """The forward pass, into poisoned memory."""
        lstm = self.network.mode is RnnMode.LSTM
        given = {"out": "y", "hy": "hy", **({"cy": "cy"} if lstm else {})}
        outputs = self._poisoned(given)
        views = {name: memory.view for name, memory in outputs.items()}
        return self._trial(self._source(self.case.training).replace(**views), given, outputs)

    def _source(self, training: bool) -> RnnRequest:
        return RnnRequest(
            self.x.view,
            self.weights,
            self.network,
            **self._tensors("hx", "cx"),
            lengths=self.case.lengths,
            training=training,
            compute=self.case.compute,
        )

    def _gradient(self) -> RnnBwdDataRequest:
        """The backward pass by the data behind a forward pass that has run."""
        y, *_, reserve = run(self._source(True))
        return RnnBwdDataRequest(
            *(y, self.dy.view, self.weights, reserve, self.network),
            **self._tensors("hx", "cx", "dhy", "dcy"),
            lengths=self.case.lengths,
            compute=self.case.compute,
        )

    def backward_data(self) -> Trial:
        """The backward pass by the data behind a forward pass."""
        lstm = self.network.mode is RnnMode.LSTM
        given = {"out": "dx", "dhx": "dhx", **({"dcx": "dcx"} if lstm else {})}
        outputs = self._poisoned(given)
        views = {name: memory.view for name, memory in outputs.items()}
        return self._trial(self._gradient().replace(**views), given, outputs)

    def backward_weights(self) -> Trial:
        """The backward pass by the weights behind both others."""
        before = self._gradient()
        run(before)
        outputs = self._poisoned({"out": "dweights"})
        request = RnnBwdWeightsRequest(
            *(self.x.view, before.y, before.reserve, self.network, before.hx, self.case.lengths, self.case.compute),
            out=outputs["out"].view,
        )
        return self._trial(request, {"out": "dweights"}, outputs)


def cases(row: Row) -> list[RnnCase]:
    """Every form of the row's kind; forward passes in training and in inference by turns."""
    fast = row.compute if row.compute is Compute.COMPUTE_32F_FAST_TF32 else None
    forms = [form for form in FORMS if (two_or_none if len(form[1].biased) == 1 else one_bias) not in row.rules]
    return [
        RnnCase(*form, row.dtypes[0], fast, row.op, row.op != "rnn_fwd" or number % 2 == 0)
        for number, form in enumerate(forms)
    ]
