"""The requests of recurrent networks: the forward pass, and the two backward passes, of the data and of the weights.

Making a request validates it, so that a bad one never comes near a library. This file calls nothing.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.checks import check_int, shown
from dispatch.core.operand_checks import check_probability, check_tensor
from dispatch.core.operands import OperandRequest, Output, dense, like, same_as, unsized
from dispatch.core.request import R_co
from dispatch.errors import BadRequest
from dispatch.keys import F64, U8, Compute, member
from dispatch.libraries.cudnn.dropout_states import check_states
from dispatch.ops.rnn.network import Network, RnnMode

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = [
    "RnnBase",
    "RnnBwdDataRequest",
    "RnnBwdWeightsRequest",
    "RnnRequest",
    "host_reserve_bytes",
    "saved_sizes",
]

Lengths = tuple[int, ...]
Shape = tuple[int, ...]


def saved_sizes(network: Network, layer: int) -> dict[str, int]:
    """What the host's forward pass keeps of every step of a layer for the backward passes, and its size."""
    gates, hidden, state = member(network.mode).gates * network.hidden_size, network.hidden_size, network.state_size
    return {
        "x": network.inputs_of(layer),
        "mask": network.inputs_of(layer),  # what of it dropout kept, scaled
        "h": state,  # the state before the step
        "gates": gates,
        "product": hidden,  # GRU: what r multiplies
        "c": hidden,  # LSTM: the cell before the step
        "tanh_c": hidden,
        "unprojected": hidden,
        "d_input": gates,  # the gradients of the gates by their input's product and by their state's; backward
        "d_state": gates,
        "d_projected": state,
    }


def host_reserve_bytes(request: RnnRequest) -> int:
    """The size of the host's reserve space of a forward pass in training: what the backward passes want."""
    network, (steps, batch) = request.network, request.x.shape[:2]
    per_step = sum(sum(saved_sizes(network, layer).values()) for layer in range(network.layers))
    return steps * batch * network.directions * per_step * (8 if request.x.dtype is F64 else 4)


class _NetworkFields(OperandRequest[R_co]):
    network: Network  # which stands behind the tensors of each


@dataclass(frozen=True, eq=False)
class RnnBase(_NetworkFields[R_co]):
    """What the three requests check alike."""

    _: KW_ONLY
    hx: Tensor | None = None
    lengths: Lengths | None = None
    compute: Compute | str | None = None
    dropout: float = 0.0
    out: Tensor | None = None

    def sequence(self) -> tuple[str, Tensor]:
        """The operand that says steps, sequences, dtype and layout."""
        name = self.reads[0]
        return name, getattr(self, name)

    def all_lengths(self) -> Lengths:
        """How many steps each sequence has."""
        _, tensor = self.sequence()
        return (tensor.shape[0],) * tensor.shape[1] if self.lengths is None else self.lengths

    def check_common(self, size: int) -> None:
        """The network, the sequences of vectors of a size, and their lengths."""
        if not isinstance(self.network, Network):
            raise BadRequest("network", repr(self.network), "a Network")
        check_probability("dropout", self.dropout)
        name, tensor = self.sequence()
        if tensor.ndim != 3 or tensor.size == 0 or tensor.shape[2] != size:
            raise BadRequest(name, str(tensor.layout), f"(steps, sequences, {size}), none of them 0")
        if self.lengths is None:
            return
        steps, batch, _ = tensor.shape
        given: object = self.lengths
        if not isinstance(given, tuple) or len(given) != batch:
            hint = "x.tolist() makes a list of a tensor's numbers" if hasattr(given, "tolist") else ""
            raise BadRequest("lengths", shown(given), f"None, or a list of {batch} whole numbers, one a sequence", hint)
        for length in self.lengths:
            check_int("lengths", length, 1, steps)

    def check_operand(self, name: str, shape: Shape) -> None:
        """An operand, where it is there, is dense, of a shape and of the sequences' dtype."""
        first, sequence = self.sequence()
        check_tensor(name, getattr(self, name), sequence.dtype, shape, f", by network and {first}")

    def check_cells(self, *names: str) -> None:
        """States of cells are for LSTMs alone."""
        for name in names:
            if getattr(self, name) is not None and self.network.mode is not RnnMode.LSTM:
                raise BadRequest(name, "a tensor", f"none: {member(self.network.mode).name} has no cells")

    def check_reserve(self, reserve: Tensor) -> None:
        """The reserve space is the forward pass's own; its size is compared where the plan is made."""
        if reserve.dtype is not U8 or reserve.ndim != 1 or not reserve.layout.is_contiguous:
            raise BadRequest("reserve", str(reserve.layout), "a dense u8 tensor", "pass on what training=True gave")

    def hidden_shape(self) -> Shape:
        """The shape of the hidden states."""
        return self.network.hidden_shape(self.sequence()[1].shape[1])

    def cell_shape(self) -> Shape:
        """The shape of the cells of an LSTM."""
        return self.network.cell_shape(self.sequence()[1].shape[1])


@dataclass(frozen=True, eq=False)
class RnnRequest(RnnBase["tuple[Tensor, ...]"]):
    """The forward pass: a sequence of vectors through a recurrent network.

    Attributes:
        x: (steps, sequences, input_size), dense, with the steps first in memory or the sequences; the strides say which
            (`x.T.mT.T` is the view of a (sequences, steps, input_size) tensor).
        weights: the weight space, from `pack_weights`, of x's dtype.
        network: what it is.
        hx, cx: the first states, (layers · directions, sequences, state_size) and, for an LSTM, (…, hidden_size); None
            for zeros.
        lengths: how many steps each sequence has, 1 or more, as numbers of the host (a tuple, a list or an array of
            NumPy, by which the request keeps a tuple); None for all. y is 0 behind the end of a
            sequence, and the last states are those at its end. A plan is made for each set of lengths.
        training: whether the backward passes will follow; then the reserve space is given, too.
        compute: COMPUTE_32F_FAST_TF32 lets f32 products be TF32.
        dropout: in training, the probability that an element is dropped on its way from one layer to the next.
        states: what the masks are drawn from, as `dropout_states` makes it; the pass moves it on. Only with dropout.
        out: y, (steps, sequences, output_size), laid out like x.
        hy, cy: the last states, as hx and cx.
        reserve: u8, for the backward passes; what it holds is the library's affair.

    Gives back (y, hy), for an LSTM (y, hy, cy), and with `training` the reserve space for the backward passes behind
    them.
    """

    op: ClassVar[str] = "rnn"
    reads: ClassVar[tuple[str, ...]] = ("x", "weights", "hx", "cx", "states")
    mixed: ClassVar[tuple[str, ...]] = ("states",)
    writes: ClassVar[tuple[str, ...]] = ("out", "hy", "cy", "reserve")
    updates: ClassVar[tuple[str, ...]] = ("states",)

    x: Tensor
    weights: Tensor
    network: Network
    _: KW_ONLY
    cx: Tensor | None = None
    training: bool = False
    states: Tensor | None = None
    hy: Tensor | None = None
    cy: Tensor | None = None
    reserve: Tensor | None = None

    def check_fields(self) -> None:
        self.check_common(getattr(self.network, "input_size", 0))
        self.check_cells("cx", "cy")
        self.check_operand("weights", (self.network.weight_count,))
        self.check_operand("hx", self.hidden_shape())
        self.check_operand("cx", self.cell_shape())
        self._check_states()

    def _check_states(self) -> None:
        """A state is there where masks are drawn from it, and only there."""
        draws = self.training and self.dropout > 0
        if draws and self.states is None:
            raise BadRequest("states", "nothing", "what dropout is drawn from", "pass dropout_states(device, seed)")
        if self.states is None:
            return
        if not draws:
            raise BadRequest("states", "a tensor", "none: nothing is dropped", "with training=True and a dropout it is")
        check_states("states", self.states)

    def outputs(self) -> dict[str, Output]:
        dtype = self.x.dtype
        made = {"out": like(self.x.layout, (*self.x.shape[:2], self.network.output_size))}
        made["hy"] = dense(self.hidden_shape(), dtype)
        if self.network.mode is RnnMode.LSTM:
            made["cy"] = dense(self.cell_shape(), dtype)
        if self.training:
            made["reserve"] = dense((host_reserve_bytes(self),), U8) if self.device.is_host else unsized()
        return made

    def bytes_of(self, _: str) -> int:
        from dispatch.ops.rnn.descriptors import reserve_bytes  # at first use: requests bind no library

        lengths, dropout = self.all_lengths(), float(self.dropout)
        return reserve_bytes(self.network, self.x.layout, lengths, member(self.compute), dropout)


@dataclass(frozen=True, eq=False)
class RnnBwdDataRequest(RnnBase["tuple[Tensor, ...]"]):
    """The backward pass by the data: the gradients of x and of the first states.

    Attributes:
        y: what the forward pass gave.
        dy: the gradient of y, of y's shape, dtype and layout; it is not read behind the end of a sequence.
        weights, network, hx, cx, lengths, compute, dropout: those of the forward pass; cx is read again, and by a GRU
            y and hx are.
        reserve: what the forward pass in training left. This pass changes it, and `RnnBwdWeightsRequest` wants it
            as this pass leaves it: run this one first, and once.
        dhy, dcy: the gradients of the last states; None for zeros.
        out: dx, (steps, sequences, input_size), laid out like y; 0 behind the end of a sequence.
        dhx, dcx: the gradients of the first states.

    Gives back (dx, dhx), for an LSTM (dx, dhx, dcx), and changes the reserve space.
    """

    op: ClassVar[str] = "rnn_bwd_data"
    reads: ClassVar[tuple[str, ...]] = ("y", "dy", "weights", "reserve", "hx", "cx", "dhy", "dcy")
    mixed: ClassVar[tuple[str, ...]] = ("reserve",)
    writes: ClassVar[tuple[str, ...]] = ("out", "dhx", "dcx")
    updates: ClassVar[tuple[str, ...]] = ("reserve",)

    y: Tensor
    dy: Tensor
    weights: Tensor
    reserve: Tensor
    network: Network
    _: KW_ONLY
    cx: Tensor | None = None
    dhy: Tensor | None = None
    dcy: Tensor | None = None
    dhx: Tensor | None = None
    dcx: Tensor | None = None

    def check_fields(self) -> None:
        self.check_common(getattr(self.network, "output_size", 0))
        same_as("dy", self.dy, "y", self.y)
        self.check_cells("cx", "dcy", "dcx")
        self.check_reserve(self.reserve)
        self.check_operand("weights", (self.network.weight_count,))
        for name in ("hx", "dhy"):
            self.check_operand(name, self.hidden_shape())
        for name in ("cx", "dcy"):
            self.check_operand(name, self.cell_shape())

    def outputs(self) -> dict[str, Output]:
        dtype = self.y.dtype
        made = {"out": like(self.y.layout, (*self.y.shape[:2], self.network.input_size))}
        made["dhx"] = dense(self.hidden_shape(), dtype)
        if self.network.mode is RnnMode.LSTM:
            made["dcx"] = dense(self.cell_shape(), dtype)
        return made


@dataclass(frozen=True, eq=False)
class RnnBwdWeightsRequest(RnnBase["Tensor"]):
    """The backward pass by the weights, after that by the data.

    Attributes:
        x, y: what the forward pass read and gave; they are read again, and so is hx.
        reserve: as `RnnBwdDataRequest` left it.
        network, hx, lengths, compute, dropout: those of the forward pass.
        out: the gradient of the weight space, of its size and x's dtype; `unpack_weights` gives it by name.
    """

    op: ClassVar[str] = "rnn_bwd_weights"
    reads: ClassVar[tuple[str, ...]] = ("x", "y", "reserve", "hx")
    mixed: ClassVar[tuple[str, ...]] = ("reserve",)
    updates: ClassVar[tuple[str, ...]] = ("reserve",)

    x: Tensor
    y: Tensor
    reserve: Tensor
    network: Network

    def check_fields(self) -> None:
        self.check_common(getattr(self.network, "input_size", 0))
        self.check_reserve(self.reserve)
        self.check_operand("y", (*self.x.shape[:2], self.network.output_size))
        self.check_operand("hx", self.hidden_shape())

    def outputs(self) -> dict[str, Output]:
        return {"out": dense((self.network.weight_count,), self.x.dtype)}
