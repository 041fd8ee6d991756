"""`python -m dispatch top` without a process: a live view of the GPUs by NVML.

It creates no CUDA context and does not use the GPU, so it does not disturb programs that run there.
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from cudabind.errors import CudaError, LibraryNotFound
from dispatch.cli import complain, print_aligned, print_json, say

if TYPE_CHECKING:
    from dispatch.libraries.nvml.readings import Gpu, Reading

__all__ = ["CLEAR", "watch"]

CLEAR = "\x1b[H\x1b[J"  # moves to the upper left corner and clears the screen below
HEAD = ("gpu", "name", "busy", "memory busy", "memory", "power", "temperature", "sm clock", "memory clock")
MIB = 2**20


def watch(interval: float, *, once: bool, as_json: bool) -> int:
    """Show the GPUs until Ctrl-C, or once; returns 1 if there is no driver."""
    from dispatch.libraries.nvml.readings import Gpus

    try:
        with contextlib.suppress(KeyboardInterrupt), Gpus() as gpus:
            while True:
                _show(gpus.read(), interval, once=once, as_json=as_json)
                if once:
                    break
                time.sleep(interval)
    except LibraryNotFound as error:
        complain(f"no GPUs to watch: NVML, which comes with NVIDIA's driver, was not found. {error}")
        return 1
    except CudaError as error:
        complain(f"the GPUs cannot be watched: {error}")
        return 1
    return 0


def _show(now: Reading, interval: float, *, once: bool, as_json: bool) -> None:
    if as_json:
        print_json(asdict(now))
    else:
        if sys.stdout.isatty() and not once:
            sys.stdout.write(CLEAR)
            say(f"driver {now.driver}, every {interval:g} s, Ctrl-C ends", "dim")
        print_aligned([HEAD, *map(_cells, now.gpus)], head=True, spare=("memory busy", "memory clock"))
        _show_processes(now)
    sys.stdout.flush()


def _show_processes(now: Reading) -> None:
    rows = [
        (str(gpu.index), str(process.pid), _format_value(process.memory_used, "MiB", MIB), process.name or "-")
        for gpu in now.gpus
        for process in gpu.processes
    ]
    if rows:
        say()
        print_aligned([("gpu", "pid", "memory", "process"), *rows], head=True)
    elif now.gpus:
        say("no process visible to this user computes on them", "dim")
    else:
        say("the driver finds no GPU", "yellow")


def _cells(gpu: Gpu) -> tuple[str, ...]:
    used, total = gpu.memory_used, gpu.memory_total
    memory = "-" if used is None or total is None else f"{used / MIB:,.0f} of {total / MIB:,.0f} MiB"
    limit = "" if gpu.power_limit is None else f" of {gpu.power_limit:.0f}"
    return (
        str(gpu.index),
        gpu.name,
        _format_value(gpu.utilization, "%"),
        _format_value(gpu.memory_utilization, "%"),
        memory,
        "-" if gpu.power is None else f"{gpu.power:.0f}{limit} W",
        _format_value(gpu.temperature, " C"),
        _format_value(gpu.sm_clock, " MHz"),
        _format_value(gpu.memory_clock, " MHz"),
    )


def _format_value(value: int | None, unit: str, size: int = 1) -> str:
    if value is None:
        return "-"
    return f"{value}{unit}" if size == 1 else f"{value / size:,.0f} {unit}"
