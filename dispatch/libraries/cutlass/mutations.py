"""Wrong trees and products, for the mutations of families with CUTLASS kernels."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np

from dispatch.libraries.cutlass.evt import Leaf, Node
from dispatch.testing.mutations import typical

if TYPE_CHECKING:
    from dispatch.device.layout import Array

__all__ = ["node_out", "typical_k"]


def node_out(tree: Node, left_out: Node) -> Node:
    """A tree without one of its nodes, which is replaced by its first input that is no leaf."""
    if tree is left_out or tree == left_out:
        return next(child for child in tree.inputs if not isinstance(child, Leaf) or child.kind == "accumulator")
    values = {f.name: getattr(tree, f.name) for f in fields(tree)}
    return type(tree)(**{n: node_out(v, left_out) if isinstance(v, Node) else v for n, v in values.items()})


def typical_k(a: Array, b: Array) -> int:
    """The k whose contribution to the product is typical."""
    lines = (np.abs(x.astype(np.float64)).reshape(-1, a.shape[-1]) for x in (a, np.swapaxes(b, -1, -2)))
    return typical(np.prod([x.mean(axis=0) for x in lines], axis=0))
