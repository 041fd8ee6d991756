"""The live devices by name: `device("cuda:0")` returns the same object until it is closed."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from cudabind.errors import CudaError
from dispatch.checks import names_arguments, shown
from dispatch.device.cuda import CudaDevice
from dispatch.device.device import Device
from dispatch.device.gpus import is_available
from dispatch.device.host import HostDevice
from dispatch.errors import BadRequest, DeviceUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["device", "live_devices"]

_generations: dict[str, Iterator[int]] = {}


@names_arguments
def device(name: str | None = None) -> Device:
    """The live device with a name: "cuda:N", "cuda" (the first GPU) or "host"; by default `cuda:0` if there is a GPU.

    Raises DeviceUnavailable if the driver or a GPU of that number is missing (the message says which), and DeviceFault
    for a device that is lost.
    """
    if name is None:
        name = "cuda:0" if is_available() else "host"
    if not isinstance(name, str):
        raise BadRequest("device", shown(name), "its name: 'cuda:0' (any number) or 'host'")
    name = "cuda:0" if name == "cuda" else name
    live = Device.live.get(name)
    if live is not None:
        if live.fault is not None:
            raise live.fault
        return live
    with Device.opening:
        return Device.live.get(name) or _start(name)


def _start(name: str) -> Device:
    generation = next(_generations.setdefault(name, itertools.count(1)))
    kind, _, number = name.partition(":")
    new: Device
    if name == "host":
        new = HostDevice(generation)
    elif kind == "cuda" and number.isascii() and number.isdigit():
        try:
            new = CudaDevice(int(number), generation)
        except CudaError as error:
            raise DeviceUnavailable(f"{name} exists, but cannot be used now: {error}") from error
    else:
        raise DeviceUnavailable(f"{name!r} is not a device; use 'cuda:0' (with any number) or 'host'")
    Device.live[name] = new
    return new


def live_devices() -> list[Device]:
    """The devices that are open now."""
    return list(Device.live.values())
