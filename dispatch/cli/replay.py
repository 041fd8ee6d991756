"""`python -m dispatch replay FILE`: reruns the requests of a journal on random data, and reports the first difference.

Each request is rebuilt (request_json.py) over memory that is shared in the same way, runs alone through a supervisor of
the same isolation, and must end as the journal says. Requests whose outcome depended on timing (cancelled, never
started) are not run.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cudabind._progress import Progress
from dispatch.checks import shown
from dispatch.cli import complain, print_json, say
from dispatch.device.registry import device as find_device
from dispatch.errors import BadRequest, DeadlineExceeded, DeviceUnavailable, DispatchError
from dispatch.supervise.journal import read, row_of
from dispatch.supervise.request_json import Memory, Reader
from dispatch.supervise.supervisor import Supervisor

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from dispatch.core.request import Request

__all__ = ["Rerun", "add_arguments", "run"]

Json = dict[str, Any]
NOT_RUN = ("cancelled", "not run")  # outcomes of requests that no worker ran
TIMEOUT = 600.0  # seconds for one request that had no deadline
MAX_RESTARTS = 1 << 30  # restarts: each fault of the journal costs one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `replay`."""
    parser.add_argument("file", metavar="FILE", help="the file that Supervisor(journal=FILE) wrote")
    parser.add_argument(
        "--device", help="host or cuda:N (default: the journal's, or host if this machine does not have it)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random data (default: 0)")
    parser.add_argument(
        "--setup", action="append", default=[], metavar="MODULE", help="import this module for its requests and rows"
    )
    parser.add_argument("--json", action="store_true", help="print one object")


def run(options: argparse.Namespace) -> int:
    """Rerun the journal; returns 1 if a request ends differently, or cannot be rebuilt."""
    try:
        if options.seed < 0:
            raise BadRequest("--seed", str(options.seed), "0 or more")
        header, lines = read(options.file)
        for module in options.setup:
            if not all(module.split(".")):
                raise BadRequest("--setup", shown(module), "the name of a module, as in an import statement")
            try:
                importlib.import_module(module)
            except ImportError as error:
                complain(f"--setup {module} failed: {type(error).__name__}: {error}")
                return 1
    except OSError as error:
        complain(f"{options.file} cannot be read: {error.strerror or error}")
        return 1
    rerun = Rerun(header, lines, options.device or _device(header), options.seed, options.setup)
    rerun.run()
    report = rerun.report(options.file)
    if options.json:
        print_json(report)
    else:
        _print_report(report)
    return 1 if report["difference"] or report["unreadable"] else 0


def _device(header: Json) -> str:
    name: str = header["device"]
    try:
        find_device(name)
    except DeviceUnavailable:
        return "host"
    return name


def _print_report(report: Json) -> None:
    of, on = f"{report['requests']} requests of {report['from']}", f"{report['ran']} run again on {report['on']}"
    say(f"{report['file']}: {of}; {on}")
    if report["skipped"]:
        say(f"  {report['skipped']} were cancelled or never started: not run")
    if report["unknown"]:
        say(f"  {report['unknown']} had not completed at the end of the journal: not run")
    if report["unreadable"]:
        say(f"  {report['unreadable']} could not be rebuilt: not run; reason of the first: {report['why']}")
    difference = report["difference"]
    if difference is None:
        lack = f" of the {report['ran']} that ran; incomplete without the {report['unreadable']} that did not"
        say(f"no difference in outcome{lack if report['unreadable'] else ''}")
    else:
        say(f"first difference: request {difference['request']}, {difference['what']}")
        say(f"  journal: {difference['journal']}")
        say(f"  now:     {difference['now']}")


class Rerun:
    """One journal, run again."""

    def __init__(self, header: Json, lines: list[Json], device: str, seed: int, setup: list[str]) -> None:
        self.header, self.lines, self.device, self.seed, self.setup = header, lines, device, seed, setup
        self.outcomes: dict[int, Json] = {number: {} for line in lines for number in line.get("done", ())}
        self.outcomes |= {line["ended"]: line for line in lines if "ended" in line}
        self.ran = self.skipped = self.unknown = self.unreadable = 0
        self.why = ""
        self.difference: Json | None = None

    def run(self) -> None:
        """Run the requests in order, one at a time, up to the first that ends differently."""
        isolation = self.header["isolation"]
        setup = self.setup if isolation == "process" else ()
        last = {line["is"]: index for index, line in enumerate(self.lines) if "request" in line}
        bar = Progress("replay", sum("request" in line for line in self.lines), ticking=True)
        with Supervisor(self.device, 1, isolation, max_restarts=MAX_RESTARTS, setup=setup) as sup, bar:
            memory = Memory(sup.device, self.lines, last, self.seed)
            reader = Reader(memory.tensor, sup.device, self.setup)
            defined: dict[int, tuple[Request | None, str | None]] = {}
            for index, line in enumerate(self.lines):
                if "define" in line:
                    defined[line["define"]] = (self._rebuilt(reader, line), line.get("row"))
                elif "request" in line:
                    self._rerun_request(sup, line, *defined[line["is"]])
                    bar.update()
                    if last[line["is"]] == index:
                        del defined[line["is"]]
                        memory.forget(index)
                if self.difference is not None:
                    return

    def _rebuilt(self, reader: Reader, line: Json) -> Request | None:
        try:
            if "why" in line:
                raise DispatchError(line["why"])
            return reader.request(line)
        except Exception as error:  # noqa: BLE001  # a user's class may raise anything
            self.why = self.why or f"{type(error).__name__}: {error}"
            return None

    def _rerun_request(self, sup: Supervisor, line: Json, request: Request | None, row: str | None) -> None:
        """Rerun, skip or count one request of the journal."""
        outcome = self.outcomes.get(line["request"])
        if outcome is None:
            self.unknown += 1
        elif outcome.get("status") in NOT_RUN:
            self.skipped += 1
        elif request is None:
            self.unreadable += 1
        else:
            self.ran += 1
            self._compare(sup, line, outcome, request, row)

    def _compare(self, sup: Supervisor, line: Json, then: Json, request: Request, row: str | None) -> None:
        """Run one request, and record a difference if it ends differently, or another row runs it."""
        late = then.get("error") == DeadlineExceeded.__name__  # it may have hung, or it may have started too late
        error = sup.submit(request, timeout=line.get("timeout") if late else None).exception(TIMEOUT)
        if late and (error is None or isinstance(error, DeadlineExceeded)):
            return
        arch = sup.device.arch
        now: Json = {} if error is None else {"error": type(error).__name__, "words": str(error)}
        comparable = error is None and row is not None and self.header["arch"] == str(arch)  # else rows may differ
        if then.get("error") != now.get("error") or (comparable and row_of(request, arch) != row):
            before, after = _outcome_text(then, row), _outcome_text(now, row_of(request, arch))
            difference = {"request": line["request"], "what": request.describe(), "journal": before, "now": after}
            self.difference = difference

    def report(self, file: str | Path) -> Json:
        """The counts and the first difference."""
        counts = {"ran": self.ran, "skipped": self.skipped, "unknown": self.unknown, "unreadable": self.unreadable}
        total = sum("request" in line for line in self.lines)
        places = {"from": self.header["device"], "on": self.device}
        return {
            "file": str(file),
            **places,
            "requests": total,
            **counts,
            "why": self.why,
            "difference": self.difference,
        }


def _outcome_text(outcome: Json, row: str | None) -> str:
    if "error" in outcome:
        return f"{outcome['error']}: {outcome.get('words', '').partition(chr(10))[0]}"
    return "done" if row is None else f"done, by {row}"
