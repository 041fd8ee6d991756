"""`dispatch.trace.profile()`: every kernel, copy and fill of a block with its time, as a table and for Chrome to draw.

CUPTI's recording is `libraries.cupti.activities`; this file waits for the GPU, and shows what was found. It sees this
process alone: what a supervisor with isolation="process" enqueues runs in its children.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudabind.errors import LibraryNotFound
from dispatch.device.registry import device, live_devices
from dispatch.errors import DeviceUnavailable
from dispatch.execute.launches import Launches

if TYPE_CHECKING:
    import os
    from types import TracebackType

    from typing_extensions import Self

    from dispatch.libraries.cupti.activities import Activity, Recording

__all__ = ["Profile", "profile"]

NAME = 72  # characters of a kernel's name in a table: CUTLASS's go on for thousands


class Profile:
    """What `profile()` found; `print(it)` sums up by name, `table()` has a line for each."""

    def __init__(self) -> None:
        self.activities: tuple[Activity, ...] = ()  # in the order in which they began; there once the block has ended
        self.dropped = 0  # how many more CUPTI had no room for
        self._recording: Recording | None = None

    def __enter__(self) -> Self:
        devices = [each for each in live_devices() if not each.is_host] or [device("cuda:0")]
        for each in devices:
            each.synchronize()  # what was enqueued before is not of this block
        try:
            from dispatch.libraries.cupti.activities import Recording

            self._recording = Recording()
        except LibraryNotFound as error:
            raise DeviceUnavailable(f"profile() needs CUPTI. {error}") from error
        Launches.observe(True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return
        try:
            for each in live_devices():
                if not each.is_host:
                    each.synchronize()
        except Exception:
            if error is None:  # else the block's own failure is the one to tell of
                raise
        finally:
            try:
                self.activities = recording.stop()
                self.dropped = recording.dropped
            finally:
                Launches.observe(False)

    @property
    def kernels(self) -> tuple[Activity, ...]:
        """The kernels among the activities."""
        return tuple(each for each in self.activities if each.kind == "kernel")

    def table(self) -> str:
        """A line for each activity: when it began, how long it took, its stream, grid, block, bytes and name."""
        first = self.activities[0].start if self.activities else 0
        lines = [f"{'begin us':>12} {'took us':>10} {'stream':>6}  {'grid':<16} {'block':<12} {'bytes':>12}  name"]
        for each in self.activities:
            begin = (each.start - first) / 1000
            shape = f"{_extent(each.grid):<16} {_extent(each.block):<12}"
            size = f"{each.bytes:,}" if each.kind != "kernel" else ""
            line = (
                f"{begin:>12,.1f} {each.microseconds:>10,.2f} {each.stream:>6}  {shape} {size:>12}  {_short(each.name)}"
            )
            lines.append(line)
        return "\n".join(lines)

    def __str__(self) -> str:
        by_name: dict[str, list[float]] = {}
        for each in self.activities:
            by_name.setdefault(each.name, []).append(each.microseconds)
        total = sum(map(sum, by_name.values()))
        lines = [f"{'calls':>6} {'total us':>12} {'mean us':>10} {'share':>6}  name"]
        for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1])):
            spent, share = sum(times), sum(times) / total if total else 0.0
            lines.append(f"{len(times):>6} {spent:>12,.1f} {spent / len(times):>10,.2f} {share:>6.1%}  {_short(name)}")
        lines.append(f"{len(self.activities):>6} {total:>12,.1f} in all{self._dropped()}")
        return "\n".join(lines)

    def _dropped(self) -> str:
        return f"; {self.dropped:,} more had no room" if self.dropped else ""

    def chrome_trace(self) -> dict[str, Any]:
        """What chrome://tracing and Perfetto (https://ui.perfetto.dev) show: a row for each stream of each GPU."""
        events: list[dict[str, Any]] = []
        for gpu, stream in sorted({(each.device, each.stream) for each in self.activities}):
            for name, label in (("process_name", f"GPU {gpu}"), ("thread_name", f"stream {stream}")):
                events.append({"name": name, "ph": "M", "pid": gpu, "tid": stream, "args": {"name": label}})
        for each in self.activities:
            facts = {key: value for key, value in asdict(each).items() if key not in ("name", "start", "end") and value}
            where = {"pid": each.device, "tid": each.stream, "ts": each.start / 1000, "dur": each.microseconds}
            events.append({"name": each.name, "cat": each.kind, "ph": "X", **where, "args": facts})
        return {"traceEvents": events, "displayTimeUnit": "ns"}

    def write_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write `chrome_trace()` to a file."""
        Path(path).write_text(json.dumps(self.chrome_trace()), encoding="utf-8")


def profile() -> Profile:
    """Record every kernel, copy and fill that the GPUs carry out for this process in a block, by CUPTI.

    `with profile() as found: …`, then `print(found)`, `found.table()`, `found.activities`,
    `found.write_chrome_trace(path)`. Entering and leaving wait for the GPU. Kernels take some percent longer meanwhile,
    and each launch a microsecond or two. Kernels of CUDA graphs are listed one by one.

    Raises, when it is entered:
        DeviceUnavailable: there is no GPU, CUPTI is not installed, or another profiler has it in this process.
    """
    return Profile()


def _extent(size: tuple[int, int, int] | None) -> str:
    return "" if size is None else "x".join(map(str, size))


def _short(name: str) -> str:
    return name if len(name) <= NAME else f"{name[: NAME - 1]}…"
