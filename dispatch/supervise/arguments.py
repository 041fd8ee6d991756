"""Checks of a supervisor's arguments: choices, minimum counts, names of modules, workers, and futures to run after.

supervisor.py calls them; limits.py checks times. They raise BadRequest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.checks import as_python_ints, shown
from dispatch.errors import BadRequest
from dispatch.supervise.future import ConditionalFuture, Future, TimedFuture

if TYPE_CHECKING:
    from dispatch.core.request import R_co, Request

__all__ = [
    "check_at_least",
    "check_choice",
    "check_function",
    "check_futures",
    "check_names",
    "check_streams",
    "check_workers",
    "conditional_future",
]

MAX_STREAMS = 4096  # far more than can run at the same time; starting so many takes some seconds


def conditional_future(request: Request[R_co], deadline: float | None, after: Any) -> ConditionalFuture[R_co]:
    """A future with a deadline (monotonic seconds, or None), and with others that it depends on."""
    dependencies = check_futures(after)
    return (
        ConditionalFuture(request, dependencies) if deadline is None else TimedFuture(request, deadline, dependencies)
    )


def check_futures(after: Any) -> tuple[Future, ...]:
    """The futures to run after, as a tuple; BadRequest for anything else."""
    try:
        futures = (after,) if isinstance(after, Future) else tuple(after)
    except Exception as error:
        raise BadRequest("after", shown(after), "futures of requests that were submitted before") from error
    for future in futures:
        if not isinstance(future, Future):
            raise BadRequest("after", shown(future), "futures of requests that were submitted before")
    return futures


def check_choice(name: str, given: Any, accepted: tuple[str, ...]) -> None:
    if not isinstance(given, str) or given not in accepted:
        raise BadRequest(name, repr(given), " or ".join(map(repr, accepted)))


def check_streams(given: Any) -> int:
    """The number of workers, refused before thousands of threads are started in vain."""
    streams = check_at_least("streams", given, 1)
    if streams > MAX_STREAMS:
        hint = "each worker has a thread and a stream of its own; many more requests can wait in its queue (queue_size)"
        raise BadRequest("streams", shown(given), f"an integer from 1 to {MAX_STREAMS}", hint)
    return streams


def check_at_least(name: str, given: Any, least: int) -> int:
    """A whole number, also one of NumPy's, as a Python int."""
    number = given if isinstance(given, bool) else as_python_ints(name, given)
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise BadRequest(name, shown(given), f"an integer of {least} or more")
    return number


def check_workers(given: Any, count: int) -> tuple[int, ...]:
    """The numbers of workers, given as one number or several; BadRequest for any other than 0 to `count` - 1."""
    numbers = (given,) if type(given) is int else as_python_ints("worker", given)
    numbers = numbers if isinstance(numbers, tuple) else (numbers,)
    if not numbers or not all(type(number) is int and 0 <= number < count for number in numbers):
        raise BadRequest("worker", shown(given), f"a number from 0 to {count - 1}, or some of them in a list")
    return numbers


def check_function(name: str, given: Any) -> None:
    if not callable(given):
        raise BadRequest(name, shown(given), "a function")


def check_names(name: str, given: Any) -> None:
    if not isinstance(given, (list, tuple)) or not all(isinstance(module, str) and module for module in given):
        raise BadRequest(name, shown(given), "names of modules, in a list or tuple")
