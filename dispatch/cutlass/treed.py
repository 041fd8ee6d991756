"""Treed: what requests share whose result goes through an epilogue tree: the tree, and what it names.

The requests of `cutlass_gemm` and of CUTLASS's convolutions are of this kind. It checks nothing and calls nothing.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from dispatch.cutlass.evt import linear_combination
from dispatch.cutlass.visitors import operands_of
from dispatch.tensor import Tensor

if TYPE_CHECKING:
    from dispatch.cutlass.evt import Node

__all__ = ["Given", "Treed"]

Given = Tensor | float | int


class Treed:
    """A request with the fields below."""

    c: Tensor | None
    epilogue: Node | None
    operands: Any  # pairs of a name and what is given for it
    alpha: Any
    beta: Any

    @cached_property
    def tree(self) -> Node:
        """The epilogue, which is a linear combination where none was given."""
        return self.epilogue if self.epilogue is not None else linear_combination(with_source=self.c is not None)

    @cached_property
    def kinds(self) -> dict[str, str]:
        """The kind of each operand that the tree names."""
        return operands_of(self.tree)

    @cached_property
    def given(self) -> dict[str, Given]:
        """The tensors and numbers that the tree names, alpha and beta among them."""
        named: dict[str, Given] = {"alpha": self.alpha, "beta": self.beta or 0.0, **dict(self.operands)}
        return {name: named[name] for name in self.kinds if name in named}
