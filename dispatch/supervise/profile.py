"""`dispatch.trace.profile()`: every kernel, copy and fill of a block with its time, as a table or a trace for Chrome.

`libraries/cupti/activities.py` records by CUPTI; this module waits for the GPU and presents the result. Only this
process is recorded, not the children of a supervisor with isolation="process".
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

NAME = 72  # characters of a kernel's name in a table: names of CUTLASS kernels have thousands


class Profile:
    """The result of `profile()`: `print` shows totals by name, `table()` a line for each activity."""

    def __init__(self) -> None:
        self.activities: tuple[Activity, ...] = ()  # ordered by their start; set when the block ends
        self.dropped = 0  # how many activities CUPTI had no room for
        self._recording: Recording | None = None

    def __enter__(self) -> Self:
        devices = [each for each in live_devices() if not each.is_host] or [device("cuda:0")]
        for each in devices:
            each.synchronize()  # so that work enqueued before is not recorded
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
            if error is None:  # else the block's own error is raised
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
        return f"; {self.dropped:,} more did not fit into the buffers" if self.dropped else ""

    def chrome_trace(self) -> dict[str, Any]:
        """A trace for chrome://tracing and Perfetto (https://ui.perfetto.dev): a row for each stream of each GPU."""
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
    """Record every kernel, copy and fill of this process in a block, by CUPTI.

    Use it as `with profile() as found: …`, then `print(found)`, `found.table()`, `found.activities` or
    `found.write_chrome_trace(path)`. Entering and leaving the block wait for the GPU. Inside it, kernels take a few
    percent longer, and each launch a microsecond or two. Kernels of CUDA graphs are listed one by one.

    Raises, when the block is entered:
        DeviceUnavailable: there is no GPU, CUPTI is not installed, or another profiler uses it in this process.
    """
    return Profile()


def _extent(size: tuple[int, int, int] | None) -> str:
    return "" if size is None else "x".join(map(str, size))


def _short(name: str) -> str:
    return name if len(name) <= NAME else f"{name[: NAME - 1]}…"
