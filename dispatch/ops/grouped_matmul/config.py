"""Which grouped kernel for which groups: by their mean number of rows, as the host does not know each group's.

`CONFIGS` is the stated set, `choose` picks from it, and a request may name another. No order of tiles is part of one:
CUTLASS walks over groups along m.
"""

from __future__ import annotations

from dispatch.errors import BadRequest
from dispatch.libraries.cutlass.config import Config

__all__ = ["CONFIGS", "LARGE", "MEDIUM", "SMALL", "choose"]

LARGE = Config((128, 256), (2, 1))
MEDIUM = Config((128, 128), (2, 1))
SMALL = Config((64, 128), (1, 1), "pingpong")
CONFIGS = (LARGE, MEDIUM, SMALL)


def choose(rows: int, groups: int, n: int, multiprocessors: int, given: Config | None = None) -> Config:
    """A configuration for so many rows in so many groups: the largest tile that groups fill, if there are enough."""
    if given is not None:
        if given not in CONFIGS:
            raise BadRequest("config", str(given), f"one of {', '.join(map(str, CONFIGS))}")
        return given
    mean = rows / groups
    if mean <= SMALL.tile[0]:
        return SMALL
    tiles = groups * -(-rows // (groups * LARGE.tile[0])) * -(-n // LARGE.tile[1])
    return LARGE if mean >= LARGE.tile[0] and tiles >= 2 * multiprocessors else MEDIUM
