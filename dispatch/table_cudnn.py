"""The table's rows that end in a graph of cuDNN's backend: convolution, attention and norms. Rows, and nothing else.

`table.py` names this file and reads it when it is first asked. A GPU row stands here because its cases pass on hardware;
the last column names the machines, and is empty where none has run it yet.
"""

# fmt: off
# ruff: noqa: E501
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispatch.row import Row

__all__ = ["ROWS"]

ROWS: tuple[Row, ...] = ()
