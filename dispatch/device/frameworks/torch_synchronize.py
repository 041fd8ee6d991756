"""`torch.cuda.synchronize` that works while other threads record calls of this library.

A call that waits for a whole context fails while any of its streams is under capture, in every capture mode and on any
thread, and ends that capture (driver 580). A plan is learnt from captures of its library's calls (plan_relocation.py).
So a thread that only waits would sometimes get "operation not permitted when stream is capturing", because another
thread multiplies two matrices. Hence torch's function is replaced by one that waits for an event of the context, which
is recorded while no capture is active. Capturing on a stream of a green context does not help: the wait ignores such
a capture, but the driver does not instantiate the captured graph in the context in which it must run.
"""

from __future__ import annotations

from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from dispatch.device.device import Device

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["excluding_recordings"]


def excluding_recordings(synchronize: Callable[..., None]) -> Callable[..., None]:
    """A function that waits for a device like `torch.cuda.synchronize`; torch's function reports all errors."""

    @wraps(synchronize)
    def synchronize_excluding_recordings(device: Any = None) -> None:
        with suppress(Exception):  # an invalid device, or a lost one
            gpu: Any = Device.live.get(f"cuda:{_ordinal(device)}")
            if gpu is not None and gpu.fault is None and not gpu.context.wait(gpu.recordings):
                return
        synchronize(device)

    return synchronize_excluding_recordings


def _ordinal(device: Any) -> int:
    number = device if device is None or isinstance(device, int) else torch.device(device).index
    return torch.cuda.current_device() if number is None else int(number)
