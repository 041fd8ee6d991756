"""on_host: makes a host row from a GPU row."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dispatch.keys import HOST

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from dispatch.core.request import Plan
    from dispatch.core.row import Row

__all__ = ["on_host"]


def on_host(
    row: Row, call: Callable[[Any, Any, Row], Plan], *, library: str = "numpy", function: str = "", stands_for: str = ""
) -> Row:
    """The host row that takes and refuses the same requests: a request that runs on the host runs on the GPU.

    `function` defaults to the op's name; `stands_for` is the library that a request may name to reach this row.
    """
    return replace(
        row,
        min_arch=HOST,
        max_arch=HOST,
        min_version=(),
        library=library,
        function=function or row.op,
        call=call,
        run_on=("host",),
        note="",
        stands_for=stands_for,
    )
