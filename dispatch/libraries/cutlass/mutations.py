"""Wrong trees and products, for the mutations of families that CUTLASS carries out."""

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
    """A tree without one of its nodes: its first input that is no leaf stands in its place."""
    if tree is left_out or tree == left_out:
        return next(child for child in tree.inputs if not isinstance(child, Leaf) or child.kind == "accumulator")
    given = {f.name: getattr(tree, f.name) for f in fields(tree)}
    return type(tree)(**{n: node_out(v, left_out) if isinstance(v, Node) else v for n, v in given.items()})


def typical_k(a: Array, b: Array) -> int:
    """The k whose share in the product is a typical one."""
    lines = (np.abs(x.astype(np.float64)).reshape(-1, a.shape[-1]) for x in (a, np.swapaxes(b, -1, -2)))
    return typical(np.prod([x.mean(axis=0) for x in lines], axis=0))
