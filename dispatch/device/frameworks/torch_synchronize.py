"""`torch.cuda.synchronize` beside calls that other threads record here.

A call that waits for a whole context fails while any of its streams is captured, in each capture mode and on whatever
thread, and ends that capture (driver 580). A plan is learnt from captures of its library's calls (plan_relocation.py),
so a thread that only waits would get "operation not permitted when stream is capturing" at some moment, because another
thread multiplies two matrices. Hence torch's function waits here by an event of the context, which is recorded while
nothing is. To capture on a stream of a green context is no way out: the wait passes over it, but the driver does not
instantiate what was captured there in the context where it is to run.
"""

from __future__ import annotations

from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from dispatch.device.device import Device

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["beside_recordings"]


def beside_recordings(synchronize: Callable[..., None]) -> Callable[..., None]:
    """The function that waits for a device's work as `torch.cuda.synchronize` does; that one tells of every error."""

    @wraps(synchronize)
    def synchronize_beside_recordings(device: Any = None) -> None:
        known: Any = None
        with suppress(Exception):  # torch refuses the device, in its own words
            known = Device.live.get(f"cuda:{_ordinal(device)}")
        if known is None or known.fault is not None or known.context.wait(known.recordings):
            synchronize(device)

    return synchronize_beside_recordings


def _ordinal(device: Any) -> int:
    number = device if device is None or isinstance(device, int) else torch.device(device).index
    return torch.cuda.current_device() if number is None else int(number)
