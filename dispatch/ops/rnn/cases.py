"""The test cases of the rows of recurrent networks, and the allowed error of each result.

A test of a backward pass first runs the forward pass on the same device, and uses its reserve space. The expected
results are computed in float64 from the operands alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.core.request import run
from dispatch.keys import Compute
from dispatch.ops.rnn.cells import NO_ROUNDING, Rounding, amplification, unrounded
from dispatch.ops.rnn.network import Network, RnnBiasMode, RnnMode
from dispatch.ops.rnn.reference import backward_data, backward_weights, empty_saved, forward
from dispatch.ops.rnn.request import RnnBwdDataRequest, RnnBwdWeightsRequest, RnnRequest
from dispatch.ops.rnn.rules import one_bias, two_or_none
from dispatch.ops.rnn.weights import pack, pack_weights, places, weight_shapes
from dispatch.testing.check import ROUNDOFF, Check, GuardedBuffer, Mismatch, normal, place, poison, rounded

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.host_plan import Results
    from dispatch.core.operands import OperandRequest
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype
    from dispatch.ops.rnn.request import RnnBase

__all__ = ["PASSES", "RnnCase", "cases"]

TF32 = 2.0**-10
F32_UNIT = 2.0**-24
LOOSE = 2.0**-16  # unit roundoffs above which a worst-case bound over all steps would be too loose
SAMPLES, TOGETHER, POOL = 48, 12, 1 << 20
# In units of the root mean square of `SAMPLES` runs. By Student's distribution, one element in 10^11 and one share in
# 10^8 exceed them.
SIGMAS, SHARE_SIGMAS = 9, 7
FEW = 16  # elements: too few for statistics of rounding errors
PASSES = {  # the results of a pass, and the name of the expected array of each
    "rnn": {"out": "y", "hy": "hy", "cy": "cy"},
    "rnn_bwd_data": {"out": "dx", "dhx": "dhx", "dcx": "dcx"},
    "rnn_bwd_weights": {"out": "dweights"},
}
M, B = RnnMode, RnnBiasMode
# Name, network, steps, sequences, lengths, whether the sequences come first in memory, and whether states are given.
# fmt: off
Form = tuple[str, Network, int, int, tuple[int, ...] | None, bool, bool]
FORMS: tuple[Form, ...] = (
    ("one",           Network(M.LSTM, 1, 1),                                  1,  1,  None,             False, False),
    ("lstm",          Network(M.LSTM, 7, 11),                                 5,  48, None,             False, True),
    ("gru",           Network(M.GRU, 7, 11),                                  5,  48, None,             False, True),
    ("tanh",          Network(M.RNN_TANH, 7, 16),                             5,  96, None,             False, True),
    ("relu",          Network(M.RNN_RELU, 12, 16),                            5,  48, None,             False, True),
    ("lstm, lengths", Network(M.LSTM, 5, 13, 2, True),                        9,  64, (9, 2, 5, 1) * 16, False, True),
    ("gru, lengths",  Network(M.GRU, 5, 13, 2, True),                         9,  64, (3, 9, 1, 4) * 16, True,  True),
    ("tanh, layers",  Network(M.RNN_TANH, 3, 17, 3, True, bias=False),        7,  96, None,             True,  False),
    ("relu, lengths", Network(M.RNN_RELU, 6, 12, 2),                          6,  48, (6, 6, 2) * 16,    False, True),
    ("projection",    Network(M.LSTM, 6, 12, 2, True, projection=5),          8,  48, (8, 3, 5) * 16,    False, True),
    ("no bias",       Network(M.LSTM, 6, 10, 1, bias=False),                  4,  80, None,             True,  False),
    ("gru, no bias",  Network(M.GRU, 4, 12, bias=False),                      6,  32, None,             False, True),
    ("lstm, input's", Network(M.LSTM, 7, 10, bias=B.SINGLE_INP_BIAS),         5,  48, None,             False, True),
    ("gru, input's",  Network(M.GRU, 7, 10, 2, True, bias=B.SINGLE_INP_BIAS), 6,  48, (2, 6, 5) * 16,    False, True),
    ("gru, state's",  Network(M.GRU, 7, 10, 2, True, bias=B.SINGLE_REC_BIAS), 6,  48, (6, 1, 5) * 16,    True,  True),
    ("tanh, state's", Network(M.RNN_TANH, 7, 10, 2, bias=B.SINGLE_REC_BIAS),  5,  128, None,             False, True),
    ("lstm, state's", Network(M.LSTM, 6, 12, projection=5, bias=B.SINGLE_REC_BIAS), 8, 96, (8, 3, 5) * 32, False, True),
    ("larger",        Network(M.LSTM, 32, 64, 2),                             16, 8,  None,             False, False),
)
# fmt: on


@dataclass(frozen=True)
class RnnCase:
    """One request, described by everything except the numbers in its operands."""

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

    def request(self, device: Device, rng: np.random.Generator) -> RnnBase:
        """The request alone, after the passes before it have run; it allocates its own results."""
        return _DrawnCase(self, device, rng).request()

    def check(self, device: Device, rng: np.random.Generator) -> Check:
        """The case with fresh operands."""
        drawn = _DrawnCase(self, device, rng)
        drawn.expect()
        return drawn.trial()


@dataclass(frozen=True)
class RnnTrial(Check):
    """A check that also bounds the relative error of each output as a whole: its projection onto the exact result.

    Random errors hardly change this projection, so an error of 1% in every element shows in it.
    """

    subject: Any = None
    shares: dict[str, float] = field(default_factory=dict)

    def verify(self, result: Tensor | tuple[Tensor, ...]) -> None:
        """Do what every check does, and check the share by which each output is too large or too small as a whole."""
        super().verify(result)
        results = list(result) if isinstance(result, tuple) else [result]
        for name, tensor in zip(self.request.outputs(), results, strict=True):
            exact = self.expected.get(name)
            if exact is None or name not in self.shares or exact.size < FEW or not exact.any():
                continue
            share = float(((tensor.numpy().astype(np.float64) - exact) * exact).sum() / (exact**2).sum())
            if not abs(share) <= self.shares[name]:
                raise Mismatch(
                    f"{self.name}: {name} is {share:+.4%} of itself off as a whole, within {self.shares[name]:.4%}"
                    f" ({self.request.describe()})"
                )


def _unit(case: RnnCase) -> float:
    """The unit roundoff of values that are stored between steps, and of the operands of products."""
    return TF32 if case.compute is Compute.COMPUTE_32F_FAST_TF32 else ROUNDOFF[case.dtype][0]


class _DrawnCase:
    """The operands of one case, and the expected results of all three passes."""

    def __init__(self, case: RnnCase, device: Device, rng: np.random.Generator) -> None:
        self.case, self.device, self.network = case, device, case.network
        network, dtype = case.network, case.dtype
        spread = case.network.hidden_size**-0.5
        self.named = {n: self._numbers(rng, shape, spread) for n, shape in weight_shapes(network).items()}
        if network.mode is RnnMode.RNN_RELU:  # units far from 0: near 0, rounding flips gradients
            for name, array in self.named.items():
                near = array * (0.4 if name == "weight_ih_l0" else 0.2)
                far = np.where(np.arange(array.size) % 3 == 0, -4, 4)
                array[...] = (far if name.startswith("bias_ih") else near).astype(array.dtype)
        self.weights = pack_weights(network, self.named, device, dtype)
        self.x = self._place(self._numbers(rng, (case.steps, case.batch, network.input_size)))
        hidden = (network.pseudo_layers, case.batch, network.state_size)
        cells = (network.pseudo_layers, case.batch, network.hidden_size)
        self.states: dict[str, Array | None] = {"hx": None, "cx": None, "dhy": None, "dcy": None}
        if case.with_states:
            self.states["hx"], self.states["dhy"] = (self._numbers(rng, hidden) for _ in "12")
            if network.mode is RnnMode.LSTM:
                self.states["cx"], self.states["dcy"] = (self._numbers(rng, cells) for _ in "12")
        dy = self._numbers(rng, (case.steps, case.batch, network.output_size))
        self.lengths = np.array(case.lengths or (case.steps,) * case.batch)
        after_end = np.arange(case.steps)[:, None] >= self.lengths
        dy[after_end] = np.nan  # these elements must not be read
        self.dy = self._place(dy)
        self._shapes = {"hx": hidden, "cx": cells, "dhy": hidden, "dcy": cells}
        self.operands: dict[str, Array]
        self.expected: dict[str, Array]

    def _numbers(self, rng: np.random.Generator, shape: tuple[int, ...], spread: float = 1.0) -> Array:
        """Normal numbers of a standard deviation; for a single unit, numbers around 1, whose sums are not near 0."""
        drawn = normal(rng, self.case.dtype, shape, spread)
        if self.network.hidden_size > 1:
            return drawn
        return np.asarray((0.75 + np.abs(drawn.astype(np.float64)) / 4).astype(drawn.dtype))

    def expect(self) -> None:
        """Compute the expected results of the three passes."""
        dy = self.dy.view.numpy().astype(np.float64)
        after_end = np.arange(self.case.steps)[:, None] >= self.lengths
        self.expected = self._expected(np.where(after_end[..., None], 0, dy))

    def _place(self, values: Array) -> GuardedBuffer:
        return place(self.device, values, (1, 0, 2) if self.case.sequences_first else None)

    def _expected(self, dy: Array) -> dict[str, Array]:
        """The results of the passes in f64, by name; `dweights` has the order of the device's weight space."""
        network = self.network
        states = {n: np.zeros(self._shapes[n]) if a is None else a.astype(np.float64) for n, a in self.states.items()}
        operands = {"x": self.x.view.numpy().astype(np.float64), "dy": dy, **states}
        self.where = places(network, self.case.dtype, self.device)
        results, saved, exact = self._passes(operands, unrounded)
        magnitudes = []
        for number in range(0 if self.case.op == "rnn" else network.pseudo_layers):
            end = "_reverse" if number % network.directions else ""
            factor = amplification(network, saved[number])
            for kind, way in (("d_input", "ih"), ("d_state", "hh")):
                gradient = np.abs(saved[number][kind]) * factor
                weights = np.abs(exact[f"weight_{way}_l{number // network.directions}{end}"])
                magnitudes += [gradient.max(), (gradient @ weights).max()]
        self.reach = float(max(magnitudes, default=0.0))
        self.operands, self.estimated_errors = operands, self._estimate_errors(operands, results)
        return results

    def _passes(
        self,
        operands: dict[str, Array],
        kept_as: Callable[[Array], Array],
        named: dict[str, Array] | None = None,
        work: np.dtype[Any] = EXACT,
        samples: int = 0,
    ) -> tuple[dict[str, Array], Any, dict[str, Array]]:
        """The results up to the case's pass, the saved values, and the weights; `kept_as` rounds what each step stores.

        It also rounds 16-bit products: cuDNN rounds the product of a step's input and that of its state to this dtype
        before it adds them (for three steps on an H200, only this gave the exact bits). With TF32, operands are rounded
        and products are f32. With `samples`, all results have a second axis for the samples, which are rounded
        separately.
        """
        network, case = self.network, self.case
        tf32 = case.compute is Compute.COMPUTE_32F_FAST_TF32
        cut = kept_as if tf32 else unrounded  # a 16-bit operand needs no rounding
        rounding = NO_ROUNDING if kept_as is unrounded else Rounding(kept_as, unrounded if tf32 else kept_as)
        lengths, exact = self.lengths, {name: array.astype(work) for name, array in (named or self.named).items()}
        inputs = {name: operands[name].astype(work) for name in ("x", "dy", "hx", "cx", "dhy", "dcy")}
        _, saved = empty_saved(network, case.steps, case.batch * max(samples, 1), work)
        if samples:
            lengths, inputs = lengths[None], {name: _repeat_along(array, samples, 1) for name, array in inputs.items()}
            saved = [{n: a.reshape(case.steps, samples, case.batch, -1) for n, a in layer.items()} for layer in saved]
            if tf32:  # biases broadcast over the sequences
                exact = {n: _repeat_along(a if a.ndim == 2 else a[None], samples, 0) for n, a in exact.items()}
        exact = {name: cut(array) for name, array in exact.items()}
        x, dy, hx, cx, dhy, dcy = inputs.values()
        forward_results = forward(network, exact, cut(x), hx, cx, lengths, saved, rounding)
        results = {"y": forward_results["out"], "hy": forward_results["hy"], "cy": forward_results["cy"]}
        if case.op == "rnn":
            return results, saved, exact
        back = backward_data(network, exact, saved, lengths, dy, dhy, dcy, rounding)
        results.update({"dx" if name == "out" else name: array for name, array in back.items()})
        gradient = backward_weights(network, saved, lengths, rounding)
        gradients = (
            [{n: a[sample] for n, a in gradient.items()} for sample in range(samples)] if samples else [gradient]
        )
        packed = [pack(network, named_gradient, self.where, work) for named_gradient in gradients]
        results["dweights"] = np.stack(packed, axis=1) if samples else packed[0]
        return results, saved, exact

    def _estimate_errors(self, operands: dict[str, Array], found: dict[str, Array]) -> dict[str, tuple[Array, float]]:
        """By result: the error of each element under random rounding errors, and the error of the result as a whole.

        The passes run `SAMPLES` times. In each run every saved number, product, weight and input has a random error of
        up to a unit roundoff of the dtype, or of TF32. The results are root mean squares: of the error of each element,
        and of the share by which the result as a whole is too large or too small.
        """
        if _unit(self.case) < LOOSE:
            return {}
        spread = 0.75 * _unit(self.case)  # a standard deviation of 0.43 roundoffs, like that of rounding
        drawn = np.random.default_rng(0)
        pool = (1 + spread * drawn.uniform(-1, 1, POOL)).astype(np.float32)  # f32 is precise enough, and fast

        def perturbed(array: Array) -> Array:
            start = int(drawn.integers(POOL - array.size))  # drawing each number anew would dominate the time
            return np.asarray(array * pool[start : start + array.size].reshape(array.shape))

        squares = {name: np.zeros(exact.shape) for name, exact in found.items()}
        shares = dict.fromkeys(found, 0.0)
        for _ in range(0, SAMPLES, TOGETHER):  # in groups, so that the working set stays in the cache
            results = self._passes(operands, perturbed, work=pool.dtype, samples=TOGETHER)[0]
            for name, exact in found.items():
                errors, total = np.moveaxis(results[name], 1, 0) - exact, (exact**2).sum()
                squares[name] += (errors**2).sum(axis=0)
                share = (errors * exact).reshape(TOGETHER, -1).sum(axis=1) / total if total else np.zeros(TOGETHER)
                shares[name] += float((share**2).sum())
        return {
            name: (np.sqrt(square / SAMPLES), float(np.sqrt(shares[name] / SAMPLES)))
            for name, square in squares.items()
        }

    def _tensors(self, *names: str) -> dict[str, Any]:
        arrays = {name: self.states[name] for name in names}
        return {name: None if array is None else self.device.array(array) for name, array in arrays.items()}

    def request(self) -> RnnBase:
        """The request of the case's pass; the passes before it have run."""
        if self.case.op == "rnn":
            return self.source(self.case.training)
        return self.gradient() if self.case.op == "rnn_bwd_data" else self.weights_gradient()

    def trial(self) -> Check:
        """The check of the case's pass into poisoned memory; sequences have the case's memory layout."""
        request: OperandRequest = self.request()
        sources = {name: source for name, source in PASSES[self.case.op].items() if name in request.outputs()}
        written: dict[str, GuardedBuffer] = {}
        for name, source in sources.items():
            values = poison(self.case.dtype, self.expected[source].shape)
            written[name] = self._place(values) if source in ("y", "dx") else place(self.device, values)
        request = request.replace(**{name: memory.view for name, memory in written.items()})
        expected: Results = {name: self.expected[source] for name, source in sources.items()}
        allowed = {name: self._bound(array, sources[name]) for name, array in expected.items()}
        shares = {
            name: SHARE_SIGMAS * self.estimated_errors[s][1] + _unit(self.case) / 8
            for name, s in sources.items()
            if self.estimated_errors
        }
        return RnnTrial(self.case.id, request, expected, allowed, tuple(written.values()), subject=self, shares=shares)

    def _bound(self, expected: Array, source: str) -> Array:
        """The allowed error of a result.

        In f32 and f64: every step of every layer rounds the state and multiplies it by weights of norm about 1. The
        gates damp errors from step to step, so the error grows like √(steps · layers) relative to the largest value,
        or to `reach`, the largest sum of magnitudes that a gradient consists of, times the gates' `amplification`. For
        16 bits and TF32 this bound would be larger than the gradients. There the bound is `SIGMAS` times the error that
        random rounding causes in the same passes.
        """
        walk = 8 + 4 * np.sqrt(self.case.steps * self.network.layers)
        size = np.abs(expected) + max(np.abs(expected).max(initial=0), self.reach)
        unit = ROUNDOFF[self.case.dtype][0]
        if not self.estimated_errors:
            return rounded(walk * unit * size, expected, self.case.dtype)
        return rounded(SIGMAS * self.estimated_errors[source][0] + walk * F32_UNIT * size, expected, self.case.dtype)

    def source(self, training: bool) -> RnnRequest:
        """The forward pass."""
        return RnnRequest(
            self.x.view,
            self.weights,
            self.network,
            **self._tensors("hx", "cx"),
            lengths=self.case.lengths,
            training=training,
            compute=self.case.compute,
        )

    def gradient(self) -> RnnBwdDataRequest:
        """The backward pass by the data; the forward pass has run."""
        y, *_, reserve = run(self.source(True))
        return RnnBwdDataRequest(
            *(y, self.dy.view, self.weights, reserve, self.network),
            **self._tensors("hx", "cx", "dhy", "dcy"),
            lengths=self.case.lengths,
            compute=self.case.compute,
        )

    def weights_gradient(self) -> RnnBwdWeightsRequest:
        """The backward pass by the weights; both other passes have run."""
        before = self.gradient()
        run(before)
        return RnnBwdWeightsRequest(
            *(self.x.view, before.y, before.reserve, self.network),
            hx=before.hx,
            lengths=self.case.lengths,
            compute=self.case.compute,
        )


def _repeat_along(array: Array, samples: int, axis: int) -> Array:
    """An array repeated for each sample."""
    shape = (*array.shape[:axis], samples, *array.shape[axis:])
    return np.broadcast_to(np.expand_dims(array, axis), shape)


def cases(row: Row) -> list[RnnCase]:
    """Every form that the row supports; forward passes alternate between training and inference."""
    fast = row.compute if row.compute is Compute.COMPUTE_32F_FAST_TF32 else None
    forms = [form for form in FORMS if (two_or_none if len(form[1].biased) == 1 else one_bias) not in row.rules]
    return [
        RnnCase(*form, row.dtypes[0], fast, row.op, row.op != "rnn" or number % 2 == 0)
        for number, form in enumerate(forms)
    ]
