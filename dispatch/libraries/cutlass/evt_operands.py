"""EpilogueTreeMixin: the part that requests with an epilogue tree share: the tree, and the operands that it names.

The base class of convolution requests and the tree forms of products derive from it. This file calls no library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind._cached import cached_property
from dispatch.checks import MAX_FLOAT, NO_NUMBERS, check_number, shown
from dispatch.core.factors import F32_MAX, F32_NUMBER
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.keys import F64, I8
from dispatch.libraries.cutlass.config import Config
from dispatch.libraries.cutlass.evt import Leaf, Node, linear_combination, walk
from dispatch.libraries.cutlass.visitors import operands_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from dispatch.core.request import Number
    from dispatch.keys import Dtype

__all__ = [
    "EpilogueTreeMixin",
    "OperandValue",
    "check_factor_is_read",
    "check_tree",
    "numbers_of",
    "pairs_of",
    "reads_the_source",
]

OperandValue = Tensor | float | int


class EpilogueTreeMixin:
    """A mixin for requests that have the fields below."""

    c: Tensor | None
    epilogue: Node | None
    operands: Any  # pairs of a name and its tensor or number
    alpha: Any
    beta: Any

    @cached_property
    def tree(self) -> Node:
        """The epilogue; a linear combination if none was given."""
        return self.epilogue if self.epilogue is not None else linear_combination(with_source=self.c is not None)

    @cached_property
    def kinds(self) -> dict[str, str]:
        """The kind of each operand that the tree names."""
        return operands_of(self.tree)

    @cached_property
    def operand_values(self) -> dict[str, OperandValue]:
        """The tensors and numbers that the tree names, alpha and beta among them."""
        named: dict[str, OperandValue] = {
            "alpha": self.alpha,
            "beta": 0.0 if self.beta is None else self.beta,
            **dict(self.operands),
        }
        return {name: named[name] for name in self.kinds if name in named}

    def check_names(self, reserved: str | None = None) -> None:
        """BadRequest for an operand that the tree does not name, and for one of another kind than the tree expects.

        No name of the tree may begin with `reserved` or be the name of two operands.
        """
        kinds = self.kinds
        for name, _ in self.operands:
            if name in ("alpha", "beta"):
                raise BadRequest(f"operands[{name!r}]", "an operand", f"{name}=…, a field of the request")
            if name not in kinds:
                names = ", ".join(kinds) or "none"
                raise BadRequest(f"operands[{name!r}]", "an operand", f"one of {names}, the names in the tree")
        for name, kind in kinds.items():
            operand = self.operand_values.get(name)
            label = f"operands[{name!r}]"
            if reserved is not None and name.startswith(reserved):
                raise BadRequest("epilogue", f"the name {name!r}", f"a name that does not begin with {reserved}")
            if operand is None and kind not in ("store", "reduce"):
                raise BadRequest(label, "nothing", f"the {kind} that the epilogue reads")
            number = isinstance(operand, (int, float, np.number)) and not isinstance(operand, NO_NUMBERS)
            if operand is not None and not isinstance(operand, Tensor) and not (kind == "scalar" and number):
                raise BadRequest(label, shown(operand), "a number or a Tensor" if kind == "scalar" else "a Tensor")

    def check_reads(self, source: str, given: Tensor | None) -> None:
        """BadRequest for a source, alpha or beta that the tree does not read, and for a source that is missing.

        `source` names the request's field of the source, and `given` is that field.
        """
        reads_source = reads_the_source(self.tree)
        if given is not None and not reads_source:
            hint = "read it as evt.source() in the epilogue"
            raise BadRequest(source, str(given.layout), "None, because the epilogue does not read the source", hint)
        if reads_source and self.c is None:
            raise BadRequest(source, "nothing", "a tensor, because the epilogue reads evt.source()", f"pass {source}=…")
        check_factor_is_read("alpha", self.alpha, 1, self.kinds)
        check_factor_is_read("beta", self.beta, int(reads_source), self.kinds)

    def check_scalars(self, operands: Dtype) -> None:
        """BadRequest for a number beyond the scalars' range: f64 for f64 operands, i32 (by a rule) for i8, else f32."""
        top = MAX_FLOAT if operands in (F64, I8) else F32_MAX
        for name, value in self.operand_values.items():
            if self.kinds[name] != "scalar" or isinstance(value, Tensor):
                continue
            label = name if name in ("alpha", "beta") else f"operands[{name!r}]"
            check_number(label, value)
            if top < abs(float(value)) < math.inf:
                raise BadRequest(label, shown(value), f"a number in the range of f32, up to {top:.4g}")


def reads_the_source(tree: Node) -> bool:
    """Whether a tree reads C."""
    return any(isinstance(node, Leaf) and node.kind == "source" for node in walk(tree))


def check_factor_is_read(name: str, value: Any, usual: int, kinds: Collection[str]) -> None:
    """BadRequest for a factor that a tree with operands of these names does not read, unless it is the usual one."""
    if name not in kinds and (isinstance(value, Tensor) or value != usual):
        given = str(value.layout) if isinstance(value, Tensor) else shown(value)
        hint = f"multiply by evt.scalar({name!r}) in the epilogue"
        raise BadRequest(name, given, f"{usual}, because the epilogue does not read {name}", hint)


def numbers_of(kinds: dict[str, str], fixed: Collection[str] = ()) -> dict[str, Number]:
    """The range of numbers for each scalar of a tree that a repeated call accepts; `fixed` ones may not change."""
    return {name: F32_NUMBER for name, kind in kinds.items() if kind == "scalar" and name not in fixed}


def pairs_of(operands: object) -> tuple[tuple[str, Any], ...]:
    """The operands of a tree as pairs, from a mapping, pairs or None; BadRequest for anything else."""
    if operands is None:
        return ()
    pairs = tuple(operands.items()) if isinstance(operands, Mapping) else operands
    if not isinstance(pairs, (tuple, list)):
        raise BadRequest("operands", shown(operands), "a mapping of names to tensors or numbers")
    for pair in pairs:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)):
            raise BadRequest("operands", shown(operands), "a mapping of names to tensors or numbers")
    return tuple((name, value) for name, value in pairs)


def check_tree(epilogue: object, config: object) -> None:
    """BadRequest for an epilogue that is not a tree, and for a config that is not a Config."""
    if epilogue is not None and not isinstance(epilogue, Node):
        raise BadRequest("epilogue", shown(epilogue), "a tree of dispatch.evt, or None")
    if config is not None and not isinstance(config, Config):
        raise BadRequest("config", shown(config), "a Config of dispatch.libraries.cutlass, or None")
    try:
        hash(config)
    except Exception:  # noqa: BLE001  # a tuple may contain anything
        raise BadRequest("config", shown(config), "a Config of pairs of numbers and names") from None
