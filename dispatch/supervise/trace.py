"""Trace: hooks around the enqueueing of requests and at their end, NVTX ranges, and GPU profiles (profile.py).

While there are hooks, workers run requests through `hooked`, and supervisors call `watch`. Without hooks this costs one
check of an empty tuple. Hooks belong to the process that adds them; nothing here runs a request.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

from dispatch.checks import names_arguments, shown
from dispatch.errors import BadRequest, DeviceUnavailable, HookFailed, error_text
from dispatch.supervise.future import CANCELLED, DONE
from dispatch.supervise.profile import profile

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Request
    from dispatch.supervise.future import Future

__all__ = ["Hook", "add", "hooked", "nvtx_ranges", "profile", "watch"]

NVTX = "DISPATCH_NVTX"  # an environment variable: 1 adds the NVTX ranges in this process and its children

hooks: tuple[Hook, ...] = ()  # replaced as a whole, never changed in place


@final
@dataclass(frozen=True, eq=False)
class Hook:
    """Functions that a supervisor calls for every request; see `add`."""

    before: Callable[[Request], object] | None = None
    after: Callable[[Request], object] | None = None
    ended: Callable[[Request, BaseException | None], object] | None = None

    def remove(self) -> None:
        """Remove the hook; `ended` is still called for requests that were submitted before."""
        global hooks
        hooks = tuple(hook for hook in hooks if hook is not self)

    def __enter__(self) -> Hook:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


@names_arguments
def add(
    before: Callable[[Request], object] | None = None,
    after: Callable[[Request], object] | None = None,
    ended: Callable[[Request, BaseException | None], object] | None = None,
) -> Hook:
    """Call functions for every request that a supervisor runs, until the `with add(...)` block ends, or `.remove()`.

    `before(request)` and `after(request)` run on the worker's thread, around the enqueueing; `after` also if that
    failed, in the reverse order of the hooks. `ended(request, error)` runs where the future ends, with None for a
    success and CancelledError for a request that was cancelled; it is called for requests submitted from now on. If
    `before` or `after` raises, that request fails with HookFailed; if `ended` raises, close() raises that error. With
    isolation="process" requests are enqueued in the child: `before` and `after` are called there only if a module of
    the supervisor's `setup` adds them. `ended` is called in the parent.
    """
    global hooks
    functions: dict[str, Any] = {"before": before, "after": after, "ended": ended}  # a user may pass anything
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise BadRequest(name, shown(function), "a function, or None")
    hook = Hook(before, after, ended)
    hooks = (*hooks, hook)
    return hook


def hooked(executor: Any, run: Callable[..., Any], request: Request, *outputs: Any) -> Any:
    """Run a request on an executor between the hooks."""
    entered: list[Hook] = []
    try:
        for hook in hooks:
            if hook.before is not None:
                _call("before", hook.before, request)
            entered.append(hook)
        result = run(request, *outputs)
    except BaseException as error:
        failed = _call_after_hooks(entered, request)
        if failed is not None and error.__context__ is None:
            error.__context__ = failed
        raise
    failed = _call_after_hooks(entered, request)
    if failed is not None:
        executor.stream.synchronize()  # the request fails and its memory may be reused: the GPU must be done with it
        raise failed
    return result


def _call_after_hooks(entered: list[Hook], request: Request) -> HookFailed | None:
    """Call every `after`, even if others raise; returns the first failure."""
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
        raise HookFailed(f"the hook {function!r} {point} enqueueing {request.op} raised {error_text(error)}") from error


def watch(future: Future, request: Request) -> None:
    """Register the hooks' `ended` with a future."""
    for hook in hooks:
        if hook.ended is not None:
            future.add_done_callback(partial(_call_ended, hook.ended, request))


def _call_ended(ended: Callable[[Request, BaseException | None], object], request: Request, future: Future) -> None:
    error: BaseException | None = None
    if future._status == CANCELLED:
        error = future._error()
    elif future._status != DONE:
        error = future._value  # not by exception(): a hook that sees an error does not count as its reader
    ended(request, error)


# -- NVTX ---------------------------------------------------------------------------------------------------------
def nvtx_ranges() -> Hook:
    """Mark every enqueueing as an NVTX range of the domain "dispatch", named by the request's describe().

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


if os.environ.get(NVTX, "0") not in ("", "0"):
    nvtx_ranges()
