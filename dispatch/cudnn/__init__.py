"""cuDNN's engine room: what every op that ends in cuDNN shares. `cudnn.Graph()` is for users, the other rooms for ops.

`handle` is a lane's cuDNN handle; graph, modes, convolve and reference are pure; descriptors, lower, engines and plan
carry a graph out. Importing this package loads no library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispatch.ops.graph import Graph

__all__ = ["Graph"]


def __getattr__(name: str) -> Any:
    """`Graph`, imported now: the ops' rooms import this package, and Graph is an op itself."""
    if name != "Graph":
        raise AttributeError(f"module 'dispatch.cudnn' has no attribute {name!r}")
    from dispatch.ops.graph import Graph

    return Graph
