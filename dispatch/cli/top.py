"""`python -m dispatch top [PID]`: a live view of the GPUs, or of the supervisors of a running process.

The process need not be prepared for it: its status servers (status_server.py) are queried regularly, and their answers
are printed. Without a process it shows the GPUs, by NVML (gpu_view.py). `--once --json` is for scripts. Nothing here
uses a device.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

from dispatch.cli import complain, print_aligned, print_json, say
from dispatch.cli.gpu_view import CLEAR, watch
from dispatch.errors import BadRequest
from dispatch.supervise.status_server import ask

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run", "with_rates"]

Facts = dict[str, Any]
LONGEST = 1e6  # seconds between queries
COUNTS = ("queued", "running", "done", "failed", "cancelled")
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `top`."""
    parser.add_argument(
        "pid",
        type=int,
        nargs="?",
        metavar="PID",
        help="show the supervisors of this process, which must be this user's; without it, show the GPUs",
    )
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between updates (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one view and exit; for a process after two updates")
    parser.add_argument("--json", action="store_true", help="print one object for each update instead of the view")


def run(options: argparse.Namespace) -> int:
    """Show the GPUs, or the supervisors until they end; returns 1 if there are none, or if the process is not ours."""
    if not 0 <= options.interval <= LONGEST:
        raise BadRequest("--interval", str(options.interval), f"seconds from 0 to {LONGEST:g}")
    if options.pid is None:
        return watch(options.interval, once=options.once, as_json=options.json)
    before: list[Facts] = []
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            try:
                now = ask(options.pid)
            except PermissionError as error:
                complain(str(error))
                return 1
            now = [facts for facts in now if _is_sound(facts)]
            if not now:
                return _report_no_supervisor(options.pid, seen=bool(before))
            if before or not options.once:
                _show(with_rates(now, before), options)
            if before and options.once:
                return 0
            before = now
            time.sleep(options.interval)
    return 0


def _report_no_supervisor(pid: int, *, seen: bool) -> int:
    if seen:
        say(f"process {pid} no longer has a supervisor")
        return 0
    complain(
        f"process {pid} has no supervisor that answers: the process has ended, has none open, or belongs to"
        " another user"
    )
    return 1


def _is_sound(facts: Facts) -> bool:
    """Whether an answer has all values that are shown: another version of this library might send others."""
    try:
        _lines(with_rates([facts], [])[0])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return False
    return True


def with_rates(now: list[Facts], before: list[Facts]) -> list[Facts]:
    """Each supervisor's facts with `done_per_second` since the previous query; None if there was none."""
    last = {facts["supervisor"]: facts for facts in before}
    return [{**facts, "done_per_second": _rate(facts, last.get(facts["supervisor"]))} for facts in now]


def _rate(facts: Facts, last: Facts | None) -> float | None:
    if last is None or facts["time"] <= last["time"] or "done" not in facts or "done" not in last:
        return None
    try:
        rate: float = (facts["done"] - last["done"]) / (facts["time"] - last["time"])
    except OverflowError:  # the counts come from the other process, and may be invalid
        return None
    return rate


def _show(supervisors: list[Facts], options: argparse.Namespace) -> None:
    if options.json:
        print_json({"pid": options.pid, "supervisors": supervisors})
    else:
        if sys.stdout.isatty() and not options.once:
            sys.stdout.write(CLEAR)
            say(f"process {options.pid}, every {options.interval:g} s, Ctrl-C ends")
        for facts in supervisors:
            _view(facts)
    sys.stdout.flush()


def _view(facts: Facts) -> None:
    lines, table = _lines(facts)
    for line in lines:
        say(line)
    if table:
        print_aligned(table, "  ")


def _lines(facts: Facts) -> tuple[list[str], list[tuple[str, ...]]]:
    """The view of a supervisor: lines, and below them a table of its workers."""
    whose = f"supervisor {facts['supervisor']} of {facts['device']}, {facts['isolation']}"
    head = f"{whose}, {facts['state']}, {facts['time'] - facts['opened']:.0f} s old"
    if facts["state"] == "gone":
        return [head], []
    rate = facts["done_per_second"]
    latency = " ".join(f"{name} {_seconds(facts[name])}" for name in ("p50", "p90", "p99"))
    shown = "-" if rate is None else format(rate, ",.0f")
    lines = [head, f"  done/s {shown}   {latency}   memory {_bytes(facts['bytes_in_use'])}"]
    lines.append(f"  restarts {facts['restarts']}   generation {facts['generation']}")
    streams = [(str(index), *(f"{worker[name]:,}" for name in COUNTS)) for index, worker in enumerate(facts["workers"])]
    return lines, [("stream", *COUNTS), *streams, ("all", *(f"{facts[name]:,}" for name in COUNTS))]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e6:,.0f} us" if value < 0.01 else f"{value:.3f} s"


def _bytes(value: int | None) -> str:
    if value is None:
        return "not counted"
    unit, size = next(((unit, size) for unit, size in UNITS if value >= size), ("bytes", 1))
    return f"{value / size:,.1f} {unit}" if size > 1 else f"{value} bytes"
