"""Operations that a row's function fuses with its product: the columns for products and convolutions only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dispatch.checks import names_arguments
from dispatch.keys import Epilogue

if TYPE_CHECKING:
    from dispatch.keys import Dtype, ScaleMode

    Modes = tuple[ScaleMode | None, ScaleMode | None]

__all__ = ["NOTHING", "Fusion"]

NO_EPILOGUE = (Epilogue.NONE,)
UNSCALED: tuple[Modes, ...] = ((None, None),)


@names_arguments
@dataclass(frozen=True)
class Fusion:
    """The operations that a library function fuses with its product, and their operands.

    Attributes:
        epilogue_dtypes: the allowed dtypes of the operands that an epilogue adds, in the op's order (matmul: bias, aux
            of GELU). An empty tuple means that the function does not take the operand.
        epilogues: the epilogues that it fuses.
        scales: the pairs of scale modes (of a, of b) that it takes; None in a pair means no scale.
        trees: whether an epilogue may also be a tree of `dispatch.evt`.
    """

    epilogue_dtypes: tuple[tuple[Dtype, ...], ...] = ()
    epilogues: tuple[Epilogue, ...] = NO_EPILOGUE
    scales: tuple[Modes, ...] = UNSCALED
    trees: bool = False

    def takes(self, epilogue: Any) -> bool:
        """Whether it fuses an epilogue: a named one, None for no epilogue, or a tree."""
        if epilogue is None or epilogue.__class__ is Epilogue:
            return epilogue is None or epilogue in self.epilogues
        return self.trees


NOTHING = Fusion()  # for rows without fusion
