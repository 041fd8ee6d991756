"""What a process holds that a supervisor might leave behind, and where in it a signal came."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any


def in_destructor(frame: Any) -> bool:
    """Whether a signal came in a destructor or a callback of a weak reference: what is raised there reaches nobody.

    The interpreter prints it and goes on, and what was to be given back is not.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or os.path.basename(code.co_filename) in ("weakref.py", "_weakrefset.py"):
            return True
        frame = frame.f_back
    return False


def first_free_descriptor() -> int:
    """The smallest number from 16 on that no open file has."""
    taken = set(map(int, os.listdir("/proc/self/fd")))
    return next(number for number in itertools.count(16) if number not in taken)


def addresses() -> int:
    """Bytes of addresses that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def children_of(thread: str) -> list[str]:
    """The processes that a thread of this process has started."""
    try:
        return Path(f"/proc/self/task/{thread}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):  # it ended since it was listed
        return []


def targets() -> list[str]:
    """What the descriptors of this process lead to."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself, or another thread's, is closed by now
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


def named_shared_memory() -> set[str]:
    """What this process holds or maps of /dev/shm, where all processes of the machine make and remove files."""
    mapped = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return {path for path in (*mapped, *targets()) if path.startswith("/dev/shm/")}


def left_over() -> dict[str, Any]:
    """What a process holds that a supervisor might leave behind."""
    gc.collect()
    children = [children_of(thread) for thread in os.listdir("/proc/self/task")]
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": sorted(itertools.chain(*children)),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "memory files": sum("/memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines()),
        "shared memory": sorted(named_shared_memory()),
    }


def left_behind(before: dict[str, Any]) -> dict[str, Any]:
    """What `left_over` says now and did not say before; what others, done by now, had left is no matter of ours."""
    now = left_over()
    more = {what: Counter(now[what]) - Counter(before[what]) for what in ("threads", "children", "shared memory")}
    found = {what: sorted(each.elements()) for what, each in more.items()}
    return {what: each for what, each in found.items() if each} | {
        what: (before[what], now[what]) for what in ("descriptors", "memory files") if now[what] > before[what]
    }


def resident() -> float:
    """MiB that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
