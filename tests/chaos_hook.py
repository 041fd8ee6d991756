"""A hook that fails for the requests that ask for it; children of the chaos test's supervisor import it."""

from __future__ import annotations

from typing import Any

from dispatch.supervise import trace


def fail_if_asked(request: Any) -> None:
    if getattr(request, "kind", "") == "hook":
        raise RuntimeError("a hook that fails")


trace.add(before=fail_if_asked)
