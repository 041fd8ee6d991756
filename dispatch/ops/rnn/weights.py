"""The weight space: packs named weights into the one tensor that a network's requests take, and unpacks them.

The order of the matrices and biases depends on the library: on a GPU, `cudnnGetRNNWeightParams` returns their offsets;
on the host, all matrices come first, one after the other, then the biases. Copies go through the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.checks import as_array, check_dtype, check_type, convert_array
from dispatch.core.operand_checks import taken_in
from dispatch.device.device import Device
from dispatch.errors import BadRequest
from dispatch.keys import BF16, F16, F32, F64, member
from dispatch.ops.rnn.network import Network, Places

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["named_views", "pack", "pack_weights", "places", "unpack_weights", "weight_shapes"]


def weight_shapes(network: Network) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a network's weights as in torch: a tensor consists of one block of rows for each gate."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in check_type("network", network, Network).parts():
        gates = 1 if part.name.startswith("weight_hr") else member(network.mode).gates
        shapes[part.name] = (gates * part.rows, part.columns)
        if part.bias:
            shapes[part.bias] = (gates * part.rows,)
    return shapes


def places(network: Network, dtype: Dtype, device: Device) -> Places:
    """The offsets of the parts of a weight space on a device."""
    if not device.is_host:
        from dispatch.ops.rnn import descriptors  # at first use: requests bind no library

        return descriptors.places(network, dtype, device)
    parts = network.parts()
    ends = np.cumsum([0, *(part.rows * part.columns for part in parts)])
    biases = np.cumsum([ends[-1], *(part.rows if part.bias else 0 for part in parts)])
    return [(int(start), int(bias)) for start, bias in zip(ends[:-1], biases[:-1], strict=True)]


def pack_weights(network: Network, named: Mapping[str, Any], device: Device, dtype: Any = None) -> Tensor:
    """The weight space of a network on a device, from arrays by name; see `weight_shapes`.

    The dtype is that of the arrays unless one is given. Raises BadRequest for a name that is missing or unknown, and
    for a shape that does not fit.
    """
    check_type("named", named, Mapping)
    check_type("device", device, Device)
    shapes = weight_shapes(network)
    if set(named) != set(shapes):
        difference = f"missing {sorted(set(shapes) - set(named))}, unknown {sorted(set(named) - set(shapes))}"
        raise BadRequest("named", difference, f"the weights {sorted(shapes)}")
    arrays = {name: as_array(name, array) for name, array in named.items()}
    for name, array in arrays.items():
        if array.shape != shapes[name]:
            raise BadRequest(name, f"shape {array.shape}", f"shape {shapes[name]}")
    kind = check_dtype("dtype", next(iter(arrays.values())).dtype if dtype is None else dtype)
    if kind not in (F64, F32, F16, BF16):
        raise BadRequest("dtype", str(kind), "f64, f32, f16 or bf16")
    arrays = {name: convert_array(name, array, kind) for name, array in arrays.items()}
    return device.array(pack(network, arrays, places(network, kind, device), kind.numpy))


def pack(network: Network, named: Mapping[str, Array], where: Places, work: np.dtype[Any]) -> Array:
    """Pack named weights, or their gradients, at their offsets in a weight space."""
    space = np.zeros(network.weight_count, work)
    for part, (start, bias) in zip(network.parts(), where, strict=True):
        rows = slice(part.gate * part.rows, (part.gate + 1) * part.rows)
        space[start : start + part.rows * part.columns] = named[part.name][rows].ravel()
        if part.bias:
            space[bias : bias + part.rows] = named[part.bias][rows]
    return space


def unpack_weights(network: Network, space: Any) -> dict[str, Array]:
    """The weights, or their gradients, of a weight space by name, as NumPy arrays; waits for pending writes to it.

    The space is a tensor, or an array of another library, as `pack_weights` and `rnn_bwd_weights` return it.
    """
    check_type("network", network, Network)
    tensor = taken_in("space", space)
    if tensor.shape != (network.weight_count,):
        raise BadRequest("space", str(tensor.layout), f"[{network.weight_count}], the weights of {network}")
    return named_views(network, tensor.numpy(), places(network, tensor.dtype, tensor.device))


def named_views(network: Network, values: Array, where: Places) -> dict[str, Array]:
    """Views of the weights by name in the elements of a weight space."""
    named = {name: np.empty(shape, values.dtype) for name, shape in weight_shapes(network).items()}
    for part, (start, bias) in zip(network.parts(), where, strict=True):
        rows = slice(part.gate * part.rows, (part.gate + 1) * part.rows)
        block = values[start : start + part.rows * part.columns]
        named[part.name][rows] = block.reshape(part.rows, part.columns)
        if part.bias:
            named[part.bias][rows] = values[bias : bias + part.rows]
    return named
