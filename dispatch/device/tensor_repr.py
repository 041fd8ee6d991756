"""The repr of a Tensor: its elements as NumPy prints them, its layout and its device.

For a large tensor only the displayed elements are copied. Nothing here raises or waits for a stream under capture: then
the text says why there are no elements. Tensors are typed Any here, because tensor.py imports this module.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["brief", "html_of", "text_of"]

MAX_SHOWN = 1 << 16  # elements, regardless of NumPy's print options
Array = np.ndarray[Any, np.dtype[Any]]
GAP = 4096  # bytes; elements with smaller gaps between them are copied together
DIGITS = 4  # for bf16 and narrower floats, which have three significant digits
LONGEST = 200  # characters of an error


def brief(tensor: Any) -> str:
    """Dtype, shape and device: "f16[64, 32] on cuda:0"."""
    return f"{tensor.layout} on {tensor.layout.device}"


def text_of(tensor: Any) -> str:
    """`Tensor([[1., 2.]], f32[1, 2] on host)`; if the elements cannot be read, with the reason instead."""
    values, why = _shown(tensor)
    if values is None:
        return f"Tensor({brief(tensor)}; {why})"
    line_width = np.get_printoptions()["linewidth"]
    last = len(values) - values.rfind("\n") - 1
    joint = " " if last + len(brief(tensor)) + 3 <= line_width else "\n       "
    return f"Tensor({values},{joint}{brief(tensor)})"


def html_of(tensor: Any) -> str:
    """The same as HTML, for notebooks."""
    import html  # rarely used

    values, why = _shown(tensor)
    shown = f"<em>{html.escape(why)}</em>" if values is None else f"<pre>{html.escape(values)}</pre>"
    return f"<div><code>Tensor {html.escape(brief(tensor))}</code>{shown}</div>"


def _shown(tensor: Any) -> tuple[str | None, str]:
    """The elements as text, or None and the reason."""
    try:
        why = tensor.device.unreadable(tensor)
        return (None, why) if why else (_values(tensor), "")
    except Exception as error:  # noqa: BLE001  # never raise: debuggers and tracebacks print tensors, too
        return None, f"its elements cannot be read: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    try:
        text = " ".join(f"{type(error).__name__}: {error}".split())
    except Exception:  # noqa: BLE001  # raised by a user's class
        text = type(error).__name__
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _values(tensor: Any) -> str:
    tensor.device.check(tensor)
    tensor.device.look(tensor)
    options = np.get_printoptions()
    edge = options["edgeitems"]
    is_large = tensor.size > min(options["threshold"], MAX_SHOWN)
    places = [_places(extent, edge if is_large else extent) for extent in tensor.shape]
    count = int(np.prod([len(place) for place in places], dtype=object))
    if count > MAX_SHOWN:
        return f"… {tensor.size} elements …"
    elements = _elements(tensor, places) if tensor.size else np.empty(tensor.shape, tensor.dtype.numpy)
    precision = None
    if elements.dtype.isbuiltin != 1:  # an ml_dtypes type, which NumPy prints unaligned
        elements, precision = elements.astype(np.float32), min(DIGITS, options["precision"])
    if is_large:
        elements = _with_gaps(elements, tensor.shape, edge)
    threshold = 0 if is_large else tensor.size + 1
    text = np.array2string(elements, separator=", ", prefix="Tensor(", threshold=threshold, precision=precision)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _places(extent: int, edge: int) -> list[int]:
    """The indices along an axis that are shown."""
    if extent <= 2 * edge:
        return list(range(extent))
    return [*range(edge), *range(extent - edge, extent)]


def _with_gaps(elements: Array, shape: tuple[int, ...], edge: int) -> Array:
    """Insert one element in the middle of each shortened axis, so that NumPy prints an ellipsis there."""
    for axis, extent in enumerate(shape):
        if extent > 2 * edge:
            elements = np.insert(elements, edge, 0, axis=axis)
    return elements


def _elements(tensor: Any, places: list[list[int]]) -> Array:
    """The elements at all combinations of these indices, one list of indices for each axis."""
    bits, kind = tensor.dtype.bits, tensor.dtype.numpy
    offsets = np.zeros((), np.int64)
    for place, stride in zip(places, tensor.layout.strides, strict=True):
        offsets = np.add.outer(offsets, np.array(place, np.int64) * stride)
    at = offsets * bits // 8  # bytes from the pointer
    width = max(bits // 8, 1)
    starts = np.unique(at)
    ends = np.flatnonzero(np.diff(starts) > GAP) + 1
    memory = np.zeros((*at.shape, width), np.uint8)
    for run in np.split(starts, ends):
        low, high = int(run[0]), int(run[-1]) + width
        piece = tensor.device.peek(tensor, low, high)
        here = (at >= low) & (at < high)
        memory[here] = piece[(at[here] - low)[:, None] + np.arange(width)]
    if bits < 8:
        nibbles = (memory[..., 0] >> (4 * (offsets % 2)).astype(np.uint8)) & 0xF
        return np.asarray(nibbles, np.uint8).view(kind)
    return np.asarray(memory.view(kind)[..., 0])
