"""Calls of every request function in long random sequences, each held bit by bit against a fresh request.

    python tests/differential.py --calls 200000 --seed 0 --seconds 330 --device cuda:0

What is called comes from tests/differential_specs.py and differential_drawn.py. A spec is first run fresh: as a request
on an executor that has just forgotten everything. Then it is called again and again among others, at several addresses,
with new and old requests, prepared calls and refits, on several streams and threads, into given and into allocated
outputs. All operands lie in one piece of memory with guards between them, which is put back before a call and compared
as a whole after it: inputs, outputs, gaps and guards. Memory that the library allocates meanwhile has guards as well,
and poison in it.
"""

from __future__ import annotations

import argparse
import collections
import sys
import threading
import time
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any
from unittest import mock

import differential_drawn as drawn
import differential_specs as specs
import numpy as np
from differential_runner import Difference, Runner
from differential_specs import OPS, Spec
from differential_suspects import find, replay

import dispatch as dp
from dispatch.execute import executor as executor_module
from dispatch.execute import relocations
from dispatch.libraries.cutlass import compile as compiler
from dispatch.libraries.cutlass.headers import HeadersMissing
from dispatch.ops.matmul import shortcut as shortcut_module

if TYPE_CHECKING:
    from collections.abc import Iterable

    from differential_compare import Live
    from typing_extensions import Self

    from dispatch.device.storage import Storage

device_module = sys.modules["dispatch.device.device"]  # the package's name `device` is the function

LIMITS = (  # what is remembered at most, and how little of it in every other wave
    (executor_module, "MAX_PLANS", 64),
    (relocations, "MAX_GRAPHS", 32),
    (shortcut_module, "MAX_SHORTCUTS", 24),
    (shortcut_module, "MAX_PATTERNS", 8),
    (device_module, "MAX_LAYOUTS", 512),
)


# -- sequences ----------------------------------------------------------------------------------------------------
@dataclass
class Report:
    """What was called, and what a program says of it."""

    calls: collections.Counter[str] = field(default_factory=collections.Counter)
    ways: collections.Counter[str] = field(default_factory=collections.Counter)
    known: collections.Counter[str] = field(default_factory=collections.Counter)
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    loose: collections.Counter[str] = field(default_factory=collections.Counter)
    varied: collections.Counter[str] = field(default_factory=collections.Counter)
    varying: dict[str, str] = field(default_factory=dict)  # a spec of each function that is not repeatable

    def know(self, live: Live) -> None:
        function = live.spec.function
        self.known[function] += 1
        self.refused[function] += live.fresh.error is not None
        self.loose[function] += bool(live.loose)
        if live.loose:
            self.varying.setdefault(function, f"{live.spec}: {live.loose}")

    def add(self, runner: Runner) -> None:
        for name in ("calls", "ways", "varied"):
            getattr(self, name).update(getattr(runner, name))
            getattr(runner, name).clear()

    def __str__(self) -> str:
        lines = [f"{'function':24}{'calls':>9}{'specs':>8}{'refused':>9}{'not repeatable':>16}"]
        for name in sorted(self.calls):
            row = (self.calls[name], self.known[name], self.refused[name], self.loose[name])
            lines.append(f"{name:24}{row[0]:>9,}{row[1]:>8,}{row[2]:>9,}{row[3]:>16,}")
        lines.append(f"{'in all':24}{sum(self.calls.values()):>9,}{sum(self.known.values()):>8,}")
        lines += [f"not repeatable: {text}" for text in self.varying.values()]
        if self.varied:
            lines.append(f"calls with other bits than the first, within their bound: {dict(self.varied)}")
        return "\n".join([*lines, "by way: " + ", ".join(f"{n} {c:,}" for n, c in self.ways.most_common())])


def not_compiled(_kernel: str, _text: str, _target: str, label: str) -> bytes:
    raise HeadersMissing(f"{label} is not compiled in a sequence")


class Sequence:
    """A whole run: waves of specs drawn at random among those of the rows' cases, called by one thread or several."""

    def __init__(
        self,
        device: dp.Device,
        seed: int,
        *,
        threads: int = 1,
        ops: tuple[str, ...] = tuple(OPS),
        small: bool = True,
        largest: int = 128,
        fixed: dict[str, Any] | None = None,
    ) -> None:
        self.device, self.ops = device, ops
        self.small = small  # whether small ops are drawn beside matmul
        self.rng, self.drawing = (np.random.default_rng([seed, 1 << 20, part]) for part in range(2))
        self.report = Report()
        self.runners = [Runner(device, seed, number) for number in range(threads)]
        self.cases: dict[str, list[Live]] = {}
        self.first = self.runners[0]
        self._real = device.allocate
        # What other libraries refuse takes half a minute by CUTLASS: here there are the kernels of the cache alone.
        self._compiler = mock.patch.object(compiler, "_compile", not_compiled)
        self.failure: BaseException | None = None
        self.drawn: list[Live] = []
        self.few = False  # whether little is remembered at present
        self.largest, self.fixed = largest, fixed or {}

    def __enter__(self) -> Self:
        guards = self.first.guards

        def allocate(nbytes: int, stream: dp.Stream) -> Storage:
            return guards.around(self._real, nbytes, stream)

        self.device.allocate = allocate  # type: ignore[method-assign]
        self._compiler.start()
        for runner in self.runners:
            runner.guards = guards
        return self

    def __exit__(self, *_: object) -> None:
        self._compiler.stop()
        del self.device.allocate  # type: ignore[method-assign]

    def add_cases(self, each: int, nbytes: int, seconds: float) -> None:
        """Specs of the rows' cases, some of every op."""
        for op in self.ops:
            until = time.monotonic() + seconds / len(self.ops)
            found = specs.from_cases(self.device, op, self.rng, each, nbytes)
            for live in self._known(takewhile(lambda _: time.monotonic() < until, found)):  # noqa: B023  # at once
                self.cases.setdefault(live.spec.function, []).append(live)

    def _known(self, given: Iterable[Spec]) -> list[Live]:
        found = self.first.lives(given)
        for live in found:
            self.report.know(live)
        return found

    def wave(self, families: int, calls: int, until: float) -> None:
        """New specs, and so many calls of them and of those of the cases."""
        found: list[Spec] = []
        for _ in range(families):
            found += drawn.matmul_specs(self.drawing, self.largest, **self.fixed)
            found += [drawn.elementwise(self.drawing)] if self.small else []
        self.drawn = self._known(found)
        threads = [
            threading.Thread(target=self._calls, args=(runner, -(-calls // len(self.runners)), until), daemon=True)
            for runner in self.runners[1:]
        ]
        for thread in threads:
            thread.start()
        self._calls(self.first, -(-calls // len(self.runners)), until)
        for thread in threads:
            thread.join()
        for runner in self.runners:
            self.report.add(runner)
        if self.failure is not None:
            raise self.failure

    def _calls(self, runner: Runner, calls: int, until: float) -> None:
        rng, kept = runner.rng, [self._choose(runner.rng) for _ in range(8)]
        try:
            for _ in range(calls):
                place = int(rng.integers(len(kept)))
                if rng.random() < 0.12:
                    kept[place] = self._choose(rng)
                runner.call(kept[place])
                if self.few and rng.random() < 0.002:
                    self.device.forget_plans()
                if self.failure is not None or time.monotonic() > until:
                    break
            runner.compare()
        except BaseException as error:  # noqa: BLE001  # told by the main thread
            self.failure = self.failure or error

    def _choose(self, rng: np.random.Generator) -> Live:
        if self.cases and not self.few and rng.random() < 0.3:
            names = sorted(self.cases)
            lives = self.cases[names[int(rng.integers(len(names)))]]
            live = lives[int(rng.integers(len(lives)))]
            if rng.random() < 60_000 / (live.spec.image.nbytes + 1):  # large ones more seldom
                return live
        live = self.drawn[int(rng.integers(len(self.drawn)))]
        if live.fresh.error is not None and rng.random() < 0.6:  # to say what is wrong takes long
            return self._choose(rng)
        return live

    def run(self, calls: int, seconds: float, *, families: int = 40, each: int = 110) -> Report:
        """Waves of so many families, `each` with so many calls, until enough were made or the time is over."""
        until, number = time.monotonic() + seconds, 0
        usual = [getattr(room, name) for room, name, _ in LIMITS]
        try:
            while sum(self.report.calls.values()) < calls and time.monotonic() < until:
                self.few = number % 3 == 2  # then without the cases: to make their plans again and again takes long
                for (room, name, few), many in zip(LIMITS, usual, strict=True):
                    setattr(room, name, few if self.few else many)
                left = calls - sum(self.report.calls.values())
                self.wave(families, min(left, families * each), until)
                number += 1
            self.first.check_guards()
        finally:
            for (room, name, _), many in zip(LIMITS, usual, strict=True):
                setattr(room, name, many)
        return self.report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=330, help="of calls, after what is run fresh from the cases")
    parser.add_argument("--device", default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cases", type=int, default=24, help="specs of each op from the rows' cases")
    parser.add_argument("--nbytes", type=int, default=1 << 20, help="of the operands of such a spec, at most")
    parser.add_argument("--preparing", type=float, default=120, help="seconds that the cases may take to prepare")
    parser.add_argument("--ops", nargs="*", default=[op for op in OPS if not op.startswith("cutlass")])
    parser.add_argument("--only", metavar="FILE", help="call nothing but these, which lost a device (see LOST)")
    parser.add_argument("--start", type=int, default=0, help="the first of them")
    given = parser.parse_args()
    start = time.monotonic()
    with Sequence(dp.device(given.device), given.seed, threads=given.threads, ops=tuple(given.ops)) as sequence:
        if given.only:
            return replay(sequence.first, given.only, given.start)
        try:
            sequence.add_cases(given.cases, given.nbytes, given.preparing)
            print(
                f"{sum(sequence.report.known.values())} specs of cases in {time.monotonic() - start:.0f} s", flush=True
            )
            sequence.run(given.calls, given.seconds)
        except Difference as difference:
            print(sequence.report, f"\nDIFFERENT: {difference}\nrepeat with: {' '.join(sys.argv)}")
            return 1
        except dp.errors.DeviceFault as fault:
            under_way = [spec for runner in sequence.runners for spec in runner.recent]
            print(sequence.report, f"\nLOST: {fault}\n{find(given.device, under_way)}", flush=True)
            return 1
    print(sequence.report, f"\nnone different, {time.monotonic() - start:.0f} s, seed {given.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
