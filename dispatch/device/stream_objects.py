"""`Stream(x)` for other libraries' stream objects, and torch's current stream.

`Stream(x)` calls `stream_of(x)`. It gets the handle by the protocol `__cuda_stream__`, which torch, CuPy and cuda.core
implement, or by the attributes that torch and CuPy had before the protocol.
"""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

from dispatch.checks import names_arguments, shown
from dispatch.device.device import Device
from dispatch.device.external import ExternalStream
from dispatch.device.registry import device as device_of
from dispatch.device.stream import Stream, StreamClass, current
from dispatch.errors import BadRequest

if TYPE_CHECKING:
    from dispatch.device.frameworks.framework import Framework

__all__ = ["stream_of", "use_torch_stream"]

VERSION = 0  # of the protocol
EXPECTED = "a stream of torch, CuPy or cuda.core, or any object with __cuda_stream__"


def stream_of(stream: Any, device: Device | str | None = None) -> Stream:
    """The stream of another library's object; a Stream is returned unchanged."""
    if isinstance(stream, Stream):
        return stream
    handle = _handle_of(stream)
    gpu = _known(device) or _device_of(stream) or _current() or device_of("cuda:0")
    result = Stream.from_handle(gpu, handle)
    if isinstance(result, ExternalStream) and type(stream) is not int:
        result.source = stream  # kept alive: the object may destroy the stream when it dies
    return result


def _handle_of(stream: Any) -> Any:
    if type(stream) is int:
        return stream
    try:
        protocol = getattr(stream, "__cuda_stream__", None)
        if protocol is not None:
            version, handle = protocol() if callable(protocol) else protocol
            if version != VERSION:
                version_text = f"version {shown(version)} of __cuda_stream__"
                raise BadRequest(
                    "stream", version_text, f"version {VERSION}", "Stream.from_handle accepts a bare handle"
                )
            return int(handle)
        for name in ("cuda_stream", "ptr"):
            if (handle := getattr(stream, name, None)) is not None:
                return int(handle)
    except (TypeError, ValueError, AttributeError) as error:
        raise BadRequest("stream", shown(stream), EXPECTED, f"{type(error).__name__}: {error}") from error
    raise BadRequest("stream", shown(stream), EXPECTED)


def _device_of(stream: Any) -> Device | None:
    """The GPU of a stream object, by `device_index` (torch) or `device_id` (others); None if it has neither."""
    for holder in (stream, getattr(stream, "device", None)):
        for name in ("device_index", "device_id"):
            number = getattr(holder, name, None)
            if type(number) is int and number >= 0:
                return device_of(f"cuda:{number}")
    return None


def _known(device: Device | str | None) -> Device | None:
    return device if device is None or isinstance(device, Device) else device_of(device)


def _current() -> Device | None:
    """The GPU of the calling thread's current stream."""
    executor = current.executor
    return None if executor is None or executor.stream.device.is_host else executor.stream.device


@names_arguments
def use_torch_stream(device: Device | str | None = None) -> Stream:
    """torch's current stream, for `with use_torch_stream():`; work in the block is in order with torch's.

    The device is `device`, else that of the surrounding `with` block, else torch's current one. The stream is looked up
    once, now: if torch changes its current stream inside the block, this one stays. Without a GPU it is the host's.
    """
    from importlib import import_module

    framework: Framework = import_module("dispatch.device.frameworks.torch").FRAMEWORK
    target_device = _known(device)
    if target_device is None and current.entered and current.executor is not None:
        target_device = current.executor.stream.device
    if target_device is None:
        import torch

        target_device = device_of(f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "host")
    return framework.stream(target_device) or target_device.stream()


stream_of.__qualname__ = Stream.__qualname__  # what users call
StreamClass.find = staticmethod(names_arguments(stream_of))
Stream.__signature__ = signature(stream_of)  # type: ignore[attr-defined]
