"""The choice of a grouped kernel by the groups' mean number of rows, because the host does not have each group's.

`CONFIGS` is the list of configurations, `choose` picks one of them, and a request may name another of them. They
contain no order of tiles: CUTLASS processes groups along m.
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
    """A configuration for `rows` rows in `groups` groups: the largest tile that groups fill, if there are enough."""
    if given is not None:
        if given not in CONFIGS:
            raise BadRequest("config", str(given), f"one of {', '.join(map(str, CONFIGS))}")
        return given
    mean = rows / groups
    if mean <= SMALL.tile[0]:
        return SMALL
    tiles = groups * -(-rows // (groups * LARGE.tile[0])) * -(-n // LARGE.tile[1])
    return LARGE if mean >= LARGE.tile[0] and tiles >= 2 * multiprocessors else MEDIUM
