"""The requests of recurrent networks: the forward pass, and the two backward passes, by the data and by the weights.

A request is validated when it is made, so that no invalid one reaches a library. This file calls no library.
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
    """The values that each step of a layer saves for the backward passes on the host, and their sizes."""
    gates, hidden, state = member(network.mode).gates * network.hidden_size, network.hidden_size, network.state_size
    return {
        "x": network.inputs_of(layer),
        "mask": network.inputs_of(layer),  # dropout's mask, scaled
        "h": state,  # the state before the step
        "gates": gates,
        "product": hidden,  # GRU: the operand that r multiplies
        "c": hidden,  # LSTM: the cell before the step
        "tanh_c": hidden,
        "unprojected": hidden,
        "d_input": gates,  # backward: the gradients of the gates by their input's product and by their state's
        "d_state": gates,
        "d_projected": state,
    }


def host_reserve_bytes(request: RnnRequest) -> int:
    """The size of the host's reserve space of a forward pass in training: the values that the backward passes need."""
    network, (steps, batch) = request.network, request.x.shape[:2]
    per_step = sum(sum(saved_sizes(network, layer).values()) for layer in range(network.layers))
    return steps * batch * network.directions * per_step * (8 if request.x.dtype is F64 else 4)


class _NetworkFields(OperandRequest[R_co]):
    network: Network  # the field that follows each request's tensors


@dataclass(frozen=True, eq=False)
class RnnBase(_NetworkFields[R_co]):
    """The fields and checks that the three requests share."""

    _: KW_ONLY
    hx: Tensor | None = None
    lengths: Lengths | None = None
    compute: Compute | str | None = None
    dropout: float = 0.0
    out: Tensor | None = None

    def sequence(self) -> tuple[str, Tensor]:
        """The operand that determines steps, sequences, dtype and layout."""
        name = self.reads[0]
        return name, getattr(self, name)

    def all_lengths(self) -> Lengths:
        """The number of steps of each sequence."""
        _, tensor = self.sequence()
        return (tensor.shape[0],) * tensor.shape[1] if self.lengths is None else self.lengths

    def check_common(self, size: int) -> None:
        """Check the network, the sequences of vectors of this size, and their lengths."""
        if not isinstance(self.network, Network):
            raise BadRequest("network", repr(self.network), "a Network")
        check_probability("dropout", self.dropout)
        name, tensor = self.sequence()
        if tensor.ndim != 3 or tensor.size == 0 or tensor.shape[2] != size:
            raise BadRequest(name, str(tensor.layout), f"(steps, sequences, {size}), no extent of 0")
        if self.lengths is None:
            return
        steps, batch, _ = tensor.shape
        lengths: object = self.lengths
        if not isinstance(lengths, tuple) or len(lengths) != batch:
            hint = "x.tolist() converts a tensor to a list" if hasattr(lengths, "tolist") else ""
            raise BadRequest(
                "lengths", shown(lengths), f"None, or a list of {batch} whole numbers, one per sequence", hint
            )
        for length in self.lengths:
            check_int("lengths", length, 1, steps)

    def check_operand(self, name: str, shape: Shape) -> None:
        """Check that an operand, if given, is dense, of this shape, and of the sequences' dtype."""
        first, sequence = self.sequence()
        check_tensor(name, getattr(self, name), sequence.dtype, shape, f", by network and {first}")

    def check_cells(self, *names: str) -> None:
        """Check that cell states are given only for LSTMs."""
        for name in names:
            if getattr(self, name) is not None and self.network.mode is not RnnMode.LSTM:
                raise BadRequest(name, "a tensor", f"None, because {member(self.network.mode).name} has no cell state")

    def check_reserve(self, reserve: Tensor) -> None:
        """Check the dtype of the reserve space; its size is compared when the plan is made."""
        if reserve.dtype is not U8 or reserve.ndim != 1 or not reserve.layout.is_contiguous:
            raise BadRequest(
                "reserve", str(reserve.layout), "a dense u8 tensor", "pass the reserve that training=True returned"
            )

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
        x: (steps, sequences, input_size), dense, with either the steps or the sequences first in memory, according
            to its strides (`x.T.mT.T` is the view of a (sequences, steps, input_size) tensor).
        weights: the weight space, from `pack_weights`, of x's dtype.
        network: the description of the network.
        hx, cx: the first states, (layers · directions, sequences, state_size) and, for an LSTM, (…, hidden_size);
            None for zeros.
        lengths: the number of steps of each sequence, 1 or more, as numbers on the host (a tuple, a list or a NumPy
            array; the request stores a tuple); None for all steps. y is 0 after the end of a sequence, and the last
            states are those at its end. A plan is made for each set of lengths.
        training: whether the backward passes will follow; then the reserve space is returned, too.
        compute: COMPUTE_32F_FAST_TF32 allows TF32 for f32 products.
        dropout: in training, the probability that an element is dropped between one layer and the next.
        states: the random state that the masks are drawn from, made by `dropout_states`; the pass advances it. Only
            with dropout.
        out: y, (steps, sequences, output_size), with the layout of x.
        hy, cy: the last states, with the shapes of hx and cx.
        reserve: u8, for the backward passes; its content depends on the library.

    Returns (y, hy), for an LSTM (y, hy, cy), and with `training` the reserve space for the backward passes after
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
        """Check that a state is given if and only if masks are drawn."""
        draws = self.training and self.dropout > 0
        if draws and self.states is None:
            raise BadRequest("states", "nothing", "the random states for dropout", "pass dropout_states(device, seed)")
        if self.states is None:
            return
        if not draws:
            raise BadRequest(
                "states",
                "a tensor",
                "None, because there is no dropout",
                "dropout needs training=True and a dropout probability",
            )
        check_states("states", self.states)

    def outputs(self) -> dict[str, Output]:
        dtype = self.x.dtype
        outputs = {"out": like(self.x.layout, (*self.x.shape[:2], self.network.output_size))}
        outputs["hy"] = dense(self.hidden_shape(), dtype)
        if self.network.mode is RnnMode.LSTM:
            outputs["cy"] = dense(self.cell_shape(), dtype)
        if self.training:
            outputs["reserve"] = dense((host_reserve_bytes(self),), U8) if self.device.is_host else unsized()
        return outputs

    def bytes_of(self, _: str) -> int:
        from dispatch.ops.rnn.descriptors import reserve_bytes  # at first use: requests bind no library

        lengths, dropout = self.all_lengths(), float(self.dropout)
        return reserve_bytes(self.network, self.x.layout, lengths, member(self.compute), dropout)


@dataclass(frozen=True, eq=False)
class RnnBwdDataRequest(RnnBase["tuple[Tensor, ...]"]):
    """The backward pass by the data: the gradients of x and of the first states.

    Attributes:
        y: the result of the forward pass.
        dy: the gradient of y, of y's shape, dtype and layout; it is not read after the end of a sequence.
        weights, network, hx, cx, lengths, compute, dropout: those of the forward pass; cx is read again, and for a
            GRU y and hx are, too.
        reserve: the reserve space of the forward pass in training. This pass changes it, and `RnnBwdWeightsRequest`
            needs the changed one: run this pass first, and only once.
        dhy, dcy: the gradients of the last states; None for zeros.
        out: dx, (steps, sequences, input_size), with the layout of y; 0 after the end of a sequence.
        dhx, dcx: the gradients of the first states.

    Returns (dx, dhx), for an LSTM (dx, dhx, dcx), and changes the reserve space.
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
        outputs = {"out": like(self.y.layout, (*self.y.shape[:2], self.network.input_size))}
        outputs["dhx"] = dense(self.hidden_shape(), dtype)
        if self.network.mode is RnnMode.LSTM:
            outputs["dcx"] = dense(self.cell_shape(), dtype)
        return outputs


@dataclass(frozen=True, eq=False)
class RnnBwdWeightsRequest(RnnBase["Tensor"]):
    """The backward pass by the weights, run after that by the data.

    Attributes:
        x, y: the operand and the result of the forward pass; they are read again, and so is hx.
        reserve: the reserve space as `RnnBwdDataRequest` left it.
        network, hx, lengths, compute, dropout: those of the forward pass.
        out: the gradient of the weight space, of its size and x's dtype; `unpack_weights` returns it by name.
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
