"""Journal: an append-only file of a supervisor's requests and their outcomes, from which the sequence can be rerun.

The supervisor calls `record` for each request; a thread of the journal writes. The file has JSON lines: a header;
`define`, a request (see request_json.py) when it is first seen; `request`, its submission to a worker; `done`, the
numbers of requests that succeeded; `ended`, any other outcome. It has no data, no results, and only the first line of
an error.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import stat
import sys
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.checks import check_type, shown
from dispatch.core.request import Request
from dispatch.errors import BadRequest, DeadlineExceeded, DependencyFailed, DispatchError, QueueFull
from dispatch.supervise.future import CANCELLED, DONE
from dispatch.supervise.limits import LONGEST
from dispatch.supervise.request_json import Writer
from dispatch.supervise.waiters import Signal
from dispatch.table.select import candidates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dispatch.keys import Arch
    from dispatch.supervise.future import Future
    from dispatch.supervise.pool import WorkerPool

__all__ = ["VERSION", "Journal", "read", "row_of"]

VERSION = 1
WRITE_PERIOD = 0.1  # seconds between writes; that much is lost without close(), and requests live that much longer
WAKE_AT = 2048  # submissions at which the writer wakes early
NEVER_RUN = (DependencyFailed, QueueFull)
MAX_ROWS = 4096  # entries of `_rows`
MAX_ERROR_CHARS = 300  # characters of an error


class Submission(NamedTuple):
    """A submitted request."""

    number: int
    future: Future
    request: Request
    worker: int
    timeout: float | None


class Journal:
    """Writes the file of one supervisor.

    Guarantees: `record` only appends to a deque. Every line is written completely, in one call, after all earlier
    lines. While it is open no other supervisor, of any process, writes to the file: their numbers would mix. Requests
    and results are kept alive until the next write, so their memory is freed up to WRITE_PERIOD later.
    """

    def __init__(self, path: str | os.PathLike[str], pool: WorkerPool, isolation: str, setup: Sequence[str]) -> None:
        given: Any = path
        if not isinstance(given, (str, os.PathLike)) or not os.fspath(given):
            raise BadRequest("journal", shown(given), "the path of a file, or None")
        self.path = Path(path)
        self._pool = pool
        self._may_hang = isolation == "process"  # with threads, deadlines are checked only before the start
        # O_NONBLOCK: a pipe without a reader raises at once.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        self._file = os.open(self.path, flags, 0o600)
        self._process = os.getpid()
        self._numbers, self._names = itertools.count(1), itertools.count(1)
        self._submissions: deque[Submission] = deque()
        self._unfinished: dict[int, Future] = {}  # submitted, and not written as ended yet
        self._defined: dict[int, tuple[weakref.ref[Request], int]] = {}  # id(request) -> the request, its number
        self._writer = Writer()
        self._rows: dict[tuple[Any, ...], str | None] = {}  # names of rows, by the key of a plan
        self._closing = Signal()
        self._wake = Signal()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"dispatch {pool.device} journal", daemon=True)
        try:
            os.set_blocking(self._file, True)
            self._lock()
            self._write_header(isolation, setup)
            self._thread.start()
        except BaseException:  # a full disk, or no more threads
            os.close(self._file)
            raise

    def _lock(self) -> None:
        """BadRequest if the file is another supervisor's that is open; pipes and devices are not locked."""
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            given = f"{self.path}, to which another supervisor is writing"
            raise BadRequest("journal", given, "a file for each supervisor", "close the other one first") from None
        except OSError:  # a file system without locks
            return

    def _write_header(self, isolation: str, setup: Sequence[str]) -> None:
        try:
            self._write([self._header(isolation, setup)])
        except OSError as error:  # otherwise a full disk would look like a lack of threads
            hint = "free some space, or choose another file"
            text = f"journal: {self.path} cannot be written: {error.strerror or error}; {hint}"
            raise DispatchError(text) from error

    def _header(self, isolation: str, setup: Sequence[str]) -> dict[str, Any]:
        device = self._pool.device
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        header = {"journal": VERSION, "pid": os.getpid(), "begun": now, "device": device.name, "arch": str(device.arch)}
        header |= {"streams": len(self._pool.queues), "isolation": isolation, "setup": list(setup)}
        return header | {"python": sys.version.split()[0]}

    def record(self, future: Future, request: Request, worker: int, timeout: float | None = None) -> None:
        """Record a request that is about to be queued."""
        self._submissions.append(Submission(next(self._numbers), future, request, worker, timeout))
        if len(self._submissions) == WAKE_AT:
            self._wake.set()

    def close(self, wait: bool = True) -> None:
        """Write until all requests have ended, and close the file; raises the error that stopped the writing."""
        if os.getpid() != self._process:  # a forked child has the file, but not the thread
            return
        self._closing.set()
        self._wake.set()
        if wait and self._thread is not threading.current_thread():
            self._thread.join()
            error, self._error = self._error, None
            if error is not None:
                raise DispatchError(f"the journal {self.path} is not complete: {error}") from error

    # -- the thread -------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while True:
                self._wake.wait(WRITE_PERIOD)
                self._wake.clear()
                last = self._closing.is_set()
                self._write([*self._submitted(), *self._ended()])
                if last and not self._unfinished and not self._submissions:
                    return
                if last:
                    time.sleep(
                        WRITE_PERIOD
                    )  # the supervisor was closed without waiting: workers will end the rest soon
        except BaseException as error:  # noqa: BLE001  # a full disk must not fail requests; `close` raises it
            self._error = error
            self._submissions = deque(maxlen=0)
            self._unfinished.clear()
        finally:
            with suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)  # closing is not enough if a forked process has the file, too
            os.close(self._file)

    def _write(self, lines: list[dict[str, Any]]) -> None:
        data = "".join(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n" for line in lines).encode()
        while data:
            data = data[os.write(self._file, data) :]

    def _submitted(self) -> Iterator[dict[str, Any]]:
        for _ in range(len(self._submissions)):
            submission = self._submissions.popleft()
            definition = self._defined.get(id(submission.request))
            if definition is None or definition[0]() is not submission.request:
                name = next(self._names)
                yield {"define": name, **self._entry(submission.request)}
                self._remember_definition(submission.request, name)
            else:
                name = definition[1]
            line: dict[str, Any] = {"request": submission.number, "is": name, "worker": submission.worker}
            yield line if submission.timeout is None else {**line, "timeout": submission.timeout}
            self._unfinished[submission.number] = submission.future

    def _remember_definition(self, request: Any, name: int) -> None:
        key, defined = id(request), self._defined
        try:
            defined[key] = (weakref.ref(request, lambda _: defined.pop(key, None)), name)
        except TypeError:  # it does not support weak references: it is defined anew each time
            return

    def _entry(self, request: Any) -> dict[str, Any]:
        """A request's entry and row; for a request that cannot be written, the reason: it cannot be rerun."""
        if not isinstance(request, Request):
            return {"op": None, "why": f"a {type(request).__name__} is not a request"}
        try:
            return {**self._writer.request(request), "row": self._row(request)}
        except Exception as error:  # noqa: BLE001  # any error of a user's request class
            return {"op": str(request.op), "why": _error_text(error)}

    def _row(self, request: Request) -> str | None:
        """The row that ran a request, from the workers' plans; with workers in a child, the first that takes it."""
        key = (type(request), *request.key())
        plans = [getattr(executor, "plans", {}).get(key) for executor in self._pool.queue_of]
        row = next((plan.row for plan in plans if plan is not None), None)
        if row is not None:
            return str(row.name)
        if key not in self._rows:  # selecting a row takes a third of a millisecond
            if len(self._rows) >= MAX_ROWS:
                self._rows.clear()
            self._rows[key] = row_of(request, self._pool.device.arch)
        return self._rows[key]

    def _ended(self) -> Iterator[dict[str, Any]]:
        ended = [(number, future) for number, future in self._unfinished.items() if future._status]
        for number, _ in ended:
            del self._unfinished[number]
        done = [number for number, future in ended if future._status == DONE]
        if done:
            yield {"done": done}
        for number, future in ended:
            if future._status != DONE:
                yield {"ended": number, **self._outcome(future)}

    def _outcome(self, future: Future) -> dict[str, str]:
        if future._status == CANCELLED:
            return {"status": "cancelled"}
        error, refusal = future._value, self._pool.refusal
        # A request that failed because the supervisor ended, or because of others, did not run.
        was_refused = refusal is not None and type(error) is type(refusal) and error.args == refusal.args
        kinds = NEVER_RUN if self._may_hang else (*NEVER_RUN, DeadlineExceeded)
        status = "not run" if was_refused or isinstance(error, kinds) else "failed"
        return {"status": status, "error": type(error).__name__, "words": _error_text(error)}


def row_of(request: Request, arch: Arch) -> str | None:
    """The name of the row that ran a request, if known here, else of the first that takes it; None if none does."""
    row = getattr(getattr(request.bound, "plan", None), "row", None)
    row = row or next(candidates(request, arch), None)
    return None if row is None else str(row.name)


def _error_text(error: BaseException) -> str:
    return str(error).partition("\n")[0][:MAX_ERROR_CHARS]


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A journal's header and its other lines, without an incomplete last line, as a killed process leaves it.

    If several supervisors wrote to the file, one after the other, only the last one's part is returned. BadRequest for
    a file that is not a journal, or has another version.
    """
    data, _, _ = Path(path).read_bytes().rpartition(b"\n")
    lines: list[dict[str, Any]] = []
    try:
        for text in data.split(b"\n"):
            line: dict[str, Any] = check_type("line", json.loads(text.decode("utf-8")), dict)
            lines.append(line)
    except (ValueError, RecursionError) as error:  # including that of check_type
        raise BadRequest("journal", f"{path}, line {len(lines) + 1}", "lines of JSON objects", str(error)) from None
    begins = [index for index, line in enumerate(lines) if "journal" in line]
    version = lines[begins[-1]]["journal"] if begins else None
    if type(version) is not int or version != VERSION:
        actual = "a file without a version" if version is None else f"a journal of version {shown(version)}"
        raise BadRequest("journal", f"{path}, {actual}", f"a journal of version {VERSION}")
    defined: set[int] = set()
    for number, line in enumerate(lines[begins[-1] :], begins[-1] + 1):
        wrong = _line_error(line, defined)
        if wrong:
            raise BadRequest("journal", f"{path}, line {number}: {wrong}", "a journal that a supervisor has written")
    return lines[begins[-1]], lines[begins[-1] + 1 :]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _is_seconds(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= LONGEST)


def _is_text_or_none(value: object) -> bool:
    return value is None or isinstance(value, str)


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


# For each kind of line, by the field that names it: the required fields and the optional ones, with their checks.
LINES: dict[str, tuple[dict[str, Callable[[object], bool]], dict[str, Callable[[object], bool]]]] = {
    "journal": ({"device": _is_text, "arch": _is_text, "isolation": _is_text}, {}),
    "define": (
        {"define": _is_number},
        {"op": _is_text_or_none, "class": _is_text, "why": _is_text, "row": _is_text_or_none},
    ),
    "request": ({"request": _is_number, "is": _is_number}, {"timeout": _is_seconds}),
    "done": ({"done": _are_numbers}, {}),
    "ended": ({"ended": _is_number, "status": _is_text}, {"error": _is_text, "words": _is_text}),
}


def _line_error(line: Any, defined: set[int]) -> str:
    """What is wrong with a line; "" if nothing is. `defined` has the numbers that earlier lines have defined."""
    kind = next((kind for kind in LINES if isinstance(line, dict) and kind in line), None)
    if kind is None:
        return shown(line)
    if sum(name in line for name in LINES) > 1:
        return f"a {kind} with unknown keys: {shown(line)}"
    must, may = LINES[kind]
    for name, check in (*must.items(), *((name, check) for name, check in may.items() if name in line)):
        if name not in line or not check(line[name]):
            return f"{name} is {shown(line.get(name))}"
    if kind == "define":
        defined.add(line["define"])
        if "why" not in line and not (isinstance(line.get("fields"), dict) and "class" in line):
            return "a request without a class or without fields"
    if kind == "journal" and line["isolation"] not in ("thread", "process"):
        return f"isolation is {shown(line['isolation'])}"
    if kind == "request" and line["is"] not in defined:
        return f"request {line['request']} is {line['is']}, which no earlier line defines"
    return ""
