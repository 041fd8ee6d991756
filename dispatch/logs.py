"""Log lines about failures, for the logger "dispatch": one line of JSON each; nothing is done if nobody listens."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from dispatch.errors import error_text

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EVENTS", "log"]

EVENTS = {  # event: level; a failed request is also reported by its future, a lost child by nothing else
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

    A program that handles log records has imported `logging`; if it is not imported, this does nothing.
    """
    logging = sys.modules.get("logging")
    if logging is None:
        return
    logger = logging.getLogger("dispatch")
    if not logger.isEnabledFor(EVENTS[event]):
        return
    import json

    if not logger.handlers:
        logger.addHandler(logging.NullHandler())  # otherwise a program without logging setup gets warnings on stderr
    record = {"event": event, **{name: _json_value(fact) for name, fact in facts.items()}}
    with contextlib.suppress(Exception):  # an error of a program's own handler must not break the caller
        logger.log(EVENTS[event], json.dumps(record), extra={"facts": record})


def _json_value(fact: object) -> object:
    if fact is None or isinstance(fact, (int, float, str, list, dict)):
        return fact
    return error_text(fact) if isinstance(fact, BaseException) else str(fact)
