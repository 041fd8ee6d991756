"""What stands on the host for a row of a GPU."""

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
    """The row by which the host carries out the same requests, with the same refusals: what runs there runs on the GPU.

    `function` left open is called as the op is; `stands_for` names the library that a request may ask for.
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
