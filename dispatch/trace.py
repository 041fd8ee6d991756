"""Trace: hooks around the enqueueing of requests and at their end, NVTX ranges, and log lines of what goes wrong.

Workers run requests through `hooked` while there are hooks, supervisors call `watch`, crews call `log`. Without hooks
all of it costs a look at an empty tuple. Hooks belong to the process that adds them; nothing here runs a request.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

from dispatch.checks import shown
from dispatch.errors import BadRequest, DeviceUnavailable, HookFailed, words
from dispatch.future import CANCELLED, DONE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dispatch.future import Future
    from dispatch.request import Request

__all__ = ["EVENTS", "Hook", "add", "hooked", "log", "nvtx_ranges", "watch"]

NVTX = "DISPATCH_NVTX"  # an environment variable: 1 adds the NVTX ranges in this process and its children
EVENTS = {  # what is logged, with the level: a failed request is its future's to tell, a lost child is nobody's
    "child started": 20,
    "child lost": 30,
    "child replaced": 30,
    "worker replaced": 30,
    "request failed": 20,
    "queue full": 20,
    "no status": 30,
    "not cached": 30,
    "circuit opened": 40,
    "device lost": 40,
}

hooks: tuple[Hook, ...] = ()  # those that are added; replaced as a whole, never changed


@final
@dataclass(frozen=True, eq=False)
class Hook:
    """Functions to be called at points of a request's way through a supervisor; see `add`."""

    before: Callable[[Request], object] | None = None
    after: Callable[[Request], object] | None = None
    ended: Callable[[Request, BaseException | None], object] | None = None

    def remove(self) -> None:
        """Call it no more; requests that have been submitted still tell `ended`."""
        global hooks
        hooks = tuple(hook for hook in hooks if hook is not self)

    def __enter__(self) -> Hook:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def add(
    before: Callable[[Request], object] | None = None,
    after: Callable[[Request], object] | None = None,
    ended: Callable[[Request, BaseException | None], object] | None = None,
) -> Hook:
    """Have functions called for every request that a supervisor runs; `with add(...)` or `.remove()` ends that.

    `before(request)` and `after(request)` run on the worker's thread, around the enqueueing; `after` also where that
    failed, in the reverse order of the hooks. `ended(request, error)` runs where the future ends, with None for a
    success and CancelledError for what was taken back; it is called for requests submitted from now on.
    What `before` or `after` raise fails that request with HookFailed; what `ended` raises is delivered by close().
    With isolation="process" requests are enqueued in the child: `before` and `after` are called there only if a module
    of the supervisor's `setup` adds them. `ended` is called in the parent.
    """
    global hooks
    given: dict[str, Any] = {"before": before, "after": after, "ended": ended}  # a user's may be anything
    for name, function in given.items():
        if function is not None and not callable(function):
            raise BadRequest(name, shown(function), "a function, or None")
    hook = Hook(before, after, ended)
    hooks = (*hooks, hook)
    return hook


def hooked(lane: Any, run: Callable[..., Any], request: Request, *outputs: Any) -> Any:
    """Run a request on a lane between the hooks."""
    entered: list[Hook] = []
    try:
        for hook in hooks:
            if hook.before is not None:
                _call("before", hook.before, request)
            entered.append(hook)
        result = run(request, *outputs)
    except BaseException as error:
        failed = _leave(entered, request)
        if failed is not None and error.__context__ is None:
            error.__context__ = failed
        raise
    failed = _leave(entered, request)
    if failed is not None:
        lane.stream.synchronize()  # the request fails, and its memory may be used anew: the GPU must be done with it
        raise failed
    return result


def _leave(entered: list[Hook], request: Request) -> HookFailed | None:
    """Call every `after`, whatever the others raise; returns the first failure."""
    first: HookFailed | None = None
    for hook in reversed(entered):
        try:
            if hook.after is not None:
                _call("after", hook.after, request)
        except HookFailed as error:  # noqa: PERF203
            first = first or error
    return first


def _call(point: str, function: Callable[[Request], object], request: Request) -> None:
    try:
        function(request)
    except BaseException as error:
        raise HookFailed(f"the hook {function!r} {point} enqueueing {request.op} raised {words(error)}") from error


def watch(future: Future, request: Request) -> None:
    """Have the hooks hear of a future's end."""
    for hook in hooks:
        if hook.ended is not None:
            future.add_done_callback(partial(_tell, hook.ended, request))


def _tell(ended: Callable[[Request, BaseException | None], object], request: Request, future: Future) -> None:
    error: BaseException | None = None
    if future._status == CANCELLED:
        error = future._error()
    elif future._status != DONE:
        error = future._value  # not by exception(): a hook that sees a failure has not dealt with it
    ended(request, error)


# -- NVTX ---------------------------------------------------------------------------------------------------------
def nvtx_ranges() -> Hook:
    """Have every enqueueing be an NVTX range of the domain "dispatch", named by the request's describe().

    Needs the package nvtx. DISPATCH_NVTX=1 in the environment does the same at the first import, in children too.
    """
    try:
        import nvtx
    except ImportError as error:
        raise DeviceUnavailable("NVTX ranges need the package nvtx: pip install nvtx") from error
    domain = nvtx.get_domain("dispatch")

    def push(request: Request) -> None:
        domain.push_range(domain.get_event_attributes(message=request.describe(), category=request.op))

    def pop(_: Request) -> None:
        domain.pop_range()

    return add(before=push, after=pop)


# -- log lines ----------------------------------------------------------------------------------------------------
def log(event: str, facts: Mapping[str, object]) -> None:
    """Log an event of EVENTS to the logger "dispatch", as one line of JSON; the record's `facts` holds the same.

    Whoever wants to see it has imported `logging`: where nobody has, nothing is done, and nothing is imported.
    """
    logging = sys.modules.get("logging")
    if logging is None:
        return
    logger = logging.getLogger("dispatch")
    if not logger.isEnabledFor(EVENTS[event]):
        return
    import json

    if not logger.handlers:
        logger.addHandler(logging.NullHandler())  # else a program that sets up no logging gets warnings on its stderr
    told = {"event": event, **{name: _plain(fact) for name, fact in facts.items()}}
    with contextlib.suppress(Exception):  # what a program's own handler raises must not break who tells it
        logger.log(EVENTS[event], json.dumps(told), extra={"facts": told})


def _plain(fact: object) -> object:
    if fact is None or isinstance(fact, (int, float, str, list, dict)):
        return fact
    return words(fact) if isinstance(fact, BaseException) else str(fact)


if os.environ.get(NVTX, "0") not in ("", "0"):
    nvtx_ranges()
