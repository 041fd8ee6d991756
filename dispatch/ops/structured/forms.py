"""The forms of the cases of products over compressed matrices: sizes, orders, factors, epilogues, batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.keys import I8
from dispatch.ops.structured.product import Activation24
from dispatch.ops.structured.rules import GELU_DTYPES

if TYPE_CHECKING:
    from dispatch.core.row import Row

__all__ = ["Form", "forms"]

SIZES = ((1, 1, 1), (2, 3, 5), (3, 4, 2), (4, 2, 7), (2, 8, 3))  # in steps of the dtype
FACTORS = ((1.0, 0.0), (0.75, -1.5), (0.0, 0.5), (-2.0, 1.0), (1.0, 1.0))
BATCHES = ((False, False), (False, True), (False, False), (True, True), (False, False), (True, False))
SMALL = 1 / 64  # of products of whole numbers that are stored in 8 bits
PLAIN: tuple[tuple[str, Any], ...] = ()
EPILOGUES = (
    (Activation24.NONE, PLAIN),
    (Activation24.RELU, PLAIN),
    (Activation24.RELU, (("upper_bound", 1.5),)),
    (Activation24.RELU, (("upper_bound", 4.0), ("threshold", 0.5))),
    (Activation24.GELU, PLAIN),
    (Activation24.GELU, (("gelu_scaling", 0.5),)),
)


class Form(NamedTuple):
    """A case."""

    sizes: tuple[int, int, int]  # of m, k and n
    by_rows: tuple[bool, bool, bool]  # A, B, and C and D
    batch: tuple[bool, bool]  # A and B
    alpha: float
    beta: float
    added: int  # whether there is a C; 2 is in place
    bias: int  # whether there is one; 2 is one for each product of a batch
    vectors: int  # whether alpha is a vector; 2 is beta, too
    activation: Activation24
    more: tuple[tuple[str, Any], ...]
    has_out: bool


def forms(row: Row) -> list[Form]:
    """All epilogues of a row's dtypes, three times, with all other properties in turn."""
    has_gelu = (row.dtypes[0], row.dtypes[-1]) in GELU_DTYPES
    epilogues = EPILOGUES if has_gelu else EPILOGUES[:4]
    all_forms = []
    for number in range(3 * len(epilogues)):
        activation, more = epilogues[number % len(epilogues)]
        alpha, beta = FACTORS[(number + number // 5) % 5]
        small = SMALL if row.dtypes[0] is I8 and row.dtypes[-1] is I8 else 1
        if row.dtypes[0] is I8 and activation is Activation24.RELU:  # the results are larger integers
            more = tuple((name, value * (4 if small < 1 else 30)) for name, value in more)
        all_forms.append(
            Form(
                SIZES[(number + number // 5) % 5],
                (number % 2 == 0, number // 2 % 2 == 0, number // 3 % 2 == 0),
                BATCHES[(number + number // 6) % 6],
                alpha * small,
                beta,
                added=(number + number // 3) % 3,
                bias=(number // 2 + number // 6) % 3,
                vectors=(number + number // 4) % 3,
                activation=activation,
                more=more,
                has_out=number % 4 != 0,
            )
        )
    return all_forms
