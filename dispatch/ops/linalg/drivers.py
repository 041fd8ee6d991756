"""Which routine carries out a request that may name one, its `driver`: each is a row of the table of its own.

A request that names none is the first row's. With `autotune` those rows take it, too, whose results are held to the
same bounds as the first one's: their plans race, and the winner is remembered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.ops.linalg.spectral import EighDriver, SvdDriver

if TYPE_CHECKING:
    from dispatch.core.row import Row, Rule
    from dispatch.keys import Choice

__all__ = ["DRIVERS", "driver_of", "first", "named", "raced"]

DRIVERS: dict[str, type[Choice]] = {"eigh": EighDriver, "generalized_eigh": EighDriver, "svd": SvdDriver}


def driver_of(row: Row) -> Choice:
    """The driver of a row: the one that its variant names, or the first of its op."""
    kind = DRIVERS[row.op]
    return next((one for one in kind if one.name.lower() == row.variant), next(iter(kind)))


def first(driver: Choice) -> Rule:
    """The rule of the row that takes requests without a driver, and those that name its own."""
    return _rule(driver, f"driver {_word(driver)}, or none", lambda _: True)


def raced(driver: Choice) -> Rule:
    """The rule of a row that is timed beside the first one, for it is held to the same bounds."""
    wanted = f"driver {_word(driver)}, or none and autotune"
    return _rule(driver, wanted, lambda request: bool(request.autotune))


def named(driver: Choice) -> Rule:
    """The rule of a row that must be asked for: its results are held to bounds of their own."""
    return _rule(driver, f"driver {_word(driver)}, which no autotune takes unasked", lambda _: False)


def _rule(driver: Choice, wanted: str, takes_open: Any) -> Rule:
    def rule(request: Any) -> str:
        if request.driver is driver or (request.driver is None and takes_open(request)):
            return ""
        return f"needs {wanted}, has {'none' if request.driver is None else _word(request.driver)}"

    rule.__doc__ = f"{wanted[0].upper()}{wanted[1:]}."
    rule.__name__ = rule.__qualname__ = f"driver_{driver.name.lower()}"
    return rule


def _word(driver: Choice) -> str:
    return driver.name.lower()
