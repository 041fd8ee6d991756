"""Network: the description of a recurrent network, and the matrices and biases in its weight space.

Each request has a Network; the plans describe it to cuDNN; `weights.py` packs named weights by it. This file calls no
library.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dispatch.checks import check_enum, check_int, convert_int_fields, names_arguments, read_choices, shown
from dispatch.errors import BadRequest
from dispatch.keys import Choice, member

if TYPE_CHECKING:
    from dispatch.device.layout import Layout

__all__ = ["Network", "Places", "RnnBiasMode", "RnnMode", "WeightPart", "steps_first"]

Places = list[tuple[int, int]]  # for each part, the offsets of its matrix and of its bias, in elements


class RnnMode(Choice):
    """`cudnnRNNMode_t`: one gate with ReLU or tanh, the four of an LSTM (i, f, g, o), the three of a GRU (r, z, n).

    The GRU's n gate multiplies r into the recurrent product with its bias: n = tanh(W x + b + r · (R h + c)).
    """

    RNN_RELU = 0
    RNN_TANH = 1
    LSTM = 2
    GRU = 3

    @property
    def gates(self) -> int:
        return {RnnMode.LSTM: 4, RnnMode.GRU: 3}.get(self, 1)


class RnnBiasMode(Choice):
    """`cudnnRNNBiasMode_t`: which products have a bias: none, the input's, both (as in torch), or the state's."""

    NO_BIAS = 0
    SINGLE_INP_BIAS = 1
    DOUBLE_BIAS = 2
    SINGLE_REC_BIAS = 3


class WeightPart(NamedTuple):
    """A matrix of the weight space, and its bias.

    Attributes:
        name, bias: torch's names of the tensors that contain it as a block of rows; `bias` is "" if there is none.
        gate: the number of the block.
        rows, columns: of the matrix; the bias has `rows` elements.
        pseudo_layer, linear: cuDNN's numbers for it: layer · directions + direction, and its number in the layer.
    """

    name: str
    bias: str
    gate: int
    rows: int
    columns: int
    pseudo_layer: int
    linear: int


@names_arguments
@dataclass(frozen=True)
class Network:
    """A recurrent network.

    Attributes:
        mode: RNN_RELU, RNN_TANH, LSTM or GRU.
        input_size, hidden_size: the sizes of an input vector, and of the state of a layer.
        layers: the number of layers; each reads the output of the one before.
        bidirectional: whether each layer consists of two, the second of which reads the sequence from its end.
        projection: LSTM only: the size that the hidden state is projected to, smaller than hidden_size; 0 for none.
        bias: which products have a bias; True for both, False for none.
    """

    mode: RnnMode | str
    input_size: int
    hidden_size: int
    layers: int = 1
    bidirectional: bool = False
    projection: int = 0
    bias: RnnBiasMode | str | bool = RnnBiasMode.DOUBLE_BIAS

    def __post_init__(self) -> None:
        read_choices(self)
        check_enum("mode", self.mode, RnnMode)
        if isinstance(self.bias, bool):
            object.__setattr__(self, "bias", RnnBiasMode.DOUBLE_BIAS if self.bias else RnnBiasMode.NO_BIAS)
        check_enum("bias", self.bias, RnnBiasMode)
        convert_int_fields(self, ("input_size", "hidden_size", "layers", "projection"))
        for name in ("input_size", "hidden_size", "layers"):
            check_int(name, getattr(self, name), 1)
        if not isinstance(self.bidirectional, bool):
            raise BadRequest("bidirectional", repr(self.bidirectional), "a bool")
        projection: object = self.projection
        if not isinstance(projection, int) or isinstance(projection, bool) or not 0 <= projection < self.hidden_size:
            wanted = f"0 for no projection, or a size below hidden_size, {self.hidden_size}"
            raise BadRequest("projection", shown(projection), wanted)
        if self.projection and self.mode is not RnnMode.LSTM:
            raise BadRequest(
                "projection",
                str(self.projection),
                f"0, because {member(self.mode).name} has no projection",
                "only LSTM has a projection",
            )

    @property
    def bias_mode(self) -> RnnBiasMode:
        """`bias` as cuDNN's enum."""
        return check_enum("bias", self.bias, RnnBiasMode)

    @property
    def biased(self) -> tuple[str, ...]:
        """The kinds of matrices whose product has a bias: "ih" of the input, "hh" of the state."""
        first = self.bias in (RnnBiasMode.SINGLE_INP_BIAS, RnnBiasMode.DOUBLE_BIAS)
        second = self.bias in (RnnBiasMode.SINGLE_REC_BIAS, RnnBiasMode.DOUBLE_BIAS)
        return tuple(kind for kind, has in (("ih", first), ("hh", second)) if has)

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def pseudo_layers(self) -> int:
        """Layers times directions: the first axis of the states."""
        return self.layers * self.directions

    @property
    def state_size(self) -> int:
        """The size of the hidden state of a layer: that of the projection, if there is one."""
        return self.projection or self.hidden_size

    @property
    def output_size(self) -> int:
        """The size of an output vector."""
        return self.state_size * self.directions

    def hidden_shape(self, batch: int) -> tuple[int, int, int]:
        """The shape of the hidden states of `batch` sequences."""
        return self.pseudo_layers, batch, self.state_size

    def cell_shape(self, batch: int) -> tuple[int, int, int]:
        """The shape of the cells of an LSTM."""
        return self.pseudo_layers, batch, self.hidden_size

    def inputs_of(self, layer: int) -> int:
        """The size of a layer's input vectors."""
        return self.input_size if layer == 0 else self.output_size

    def parts(self) -> tuple[WeightPart, ...]:
        """The matrices, in the order of cuDNN's numbers."""
        return _weight_parts(self)

    @property
    def weight_count(self) -> int:
        """The number of elements of all matrices and biases."""
        return sum(part.rows * part.columns + (part.rows if part.bias else 0) for part in self.parts())


@functools.lru_cache(maxsize=64)
def _weight_parts(network: Network) -> tuple[WeightPart, ...]:
    """The cached parts: packing, unpacking and counting use them several times for each request."""
    gates, hidden, parts = member(network.mode).gates, network.hidden_size, []
    for number in range(network.pseudo_layers):
        layer, direction = divmod(number, network.directions)
        end = f"l{layer}{'_reverse' if direction else ''}"
        for kind, columns, first in (("ih", network.inputs_of(layer), 0), ("hh", network.state_size, gates)):
            bias = f"bias_{kind}_{end}" if kind in network.biased else ""
            name = f"weight_{kind}_{end}"
            parts += [WeightPart(name, bias, gate, hidden, columns, number, first + gate) for gate in range(gates)]
        if network.projection:
            parts.append(WeightPart(f"weight_hr_{end}", "", 0, network.projection, hidden, number, 2 * gates))
    return tuple(parts)


def steps_first(layout: Layout) -> bool | None:
    """Whether sequences are stored with the steps first (True) or the sequences first (False); None for neither."""
    (steps, batch, size), (step, sequence, element) = layout.shape, layout.strides
    if element != 1 and size > 1:
        return None
    if (sequence == size or batch == 1) and (step == batch * size or steps == 1):
        return True
    if (step == size or steps == 1) and (sequence == steps * size or batch == 1):
        return False
    return None
