"""on_host: makes the host's row from a GPU's."""

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
    """The row by which the host carries out the same requests and refuses the same: what runs there runs on the GPU.

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
