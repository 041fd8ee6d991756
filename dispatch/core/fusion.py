"""What a row's function does beside its product: the columns that only rows of products and convolutions have."""

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
    """What a library function does beside its product, and with which operands.

    Attributes:
        epilogue_dtypes: those allowed for the operands that an epilogue adds, in the op's order (matmul: bias, aux of
            GELU). An empty tuple is an operand that the function does not take.
        epilogues: the epilogues that it fuses.
        scales: the pairs of scale modes (of a, of b) it takes; None in a pair is no scale.
        trees: whether an epilogue may also be a tree of `dispatch.evt`.
    """

    epilogue_dtypes: tuple[tuple[Dtype, ...], ...] = ()
    epilogues: tuple[Epilogue, ...] = NO_EPILOGUE
    scales: tuple[Modes, ...] = UNSCALED
    trees: bool = False

    def takes(self, epilogue: Any) -> bool:
        """Whether it fuses an epilogue: one by its name, None for none, or a tree."""
        if epilogue is None or epilogue.__class__ is Epilogue:
            return epilogue is None or epilogue in self.epilogues
        return self.trees


NOTHING = Fusion()  # for rows that have none
