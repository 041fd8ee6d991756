"""Log lines of what goes wrong, for the logger "dispatch": one line of JSON each, and nothing where nobody listens."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from dispatch.errors import error_text

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EVENTS", "log"]

EVENTS = {  # what is logged, with the level: a failed request is its future's to tell, a lost child is nobody's
    "child started": 20,
    "child lost": 30,
    "child replaced": 30,
    "worker replaced": 30,
    "request failed": 20,
    "queue full": 20,
    "no status": 30,
    "not cached": 30,
    "not read": 30,
    "not relocated": 30,
    "not fused": 20,
    "not in 16 bits": 20,
    "circuit opened": 40,
    "device lost": 40,
}


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
    record = {"event": event, **{name: _json_value(fact) for name, fact in facts.items()}}
    with contextlib.suppress(Exception):  # what a program's own handler raises must not break who tells it
        logger.log(EVENTS[event], json.dumps(record), extra={"facts": record})


def _json_value(fact: object) -> object:
    if fact is None or isinstance(fact, (int, float, str, list, dict)):
        return fact
    return error_text(fact) if isinstance(fact, BaseException) else str(fact)
