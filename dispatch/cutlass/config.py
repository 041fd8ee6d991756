"""Which kernel for which extents: tile, cluster, schedule and scheduler.

`CONFIGS` is the stated set; `choose` picks from it without having timed anything, and a request may name another. No
extent enters a kernel's key: a handful of kernels serve all extents.
"""

from __future__ import annotations

from typing import NamedTuple

from dispatch.errors import BadRequest

__all__ = ["CHOSEN", "CONFIGS", "Config", "choose"]


class Config(NamedTuple):
    """What a thread block computes and how the blocks are ordered.

    Attributes:
        tile, cluster: (m, n) of a block's part of D, and of the blocks that share loads.
        schedule, scheduler: CUTLASS's, by name.
        swizzle: how many tiles wide the stripes are in which the persistent scheduler walks over D.
    """

    tile: tuple[int, int]
    cluster: tuple[int, int] = (1, 1)
    schedule: str = "cooperative"
    scheduler: str = "persistent"
    swizzle: int = 1

    def __str__(self) -> str:
        tile, cluster = ("x".join(map(str, pair)) for pair in (self.tile, self.cluster))
        stripes = "" if self.swizzle == 1 else f" swizzle {self.swizzle}"
        return f"{tile} cluster {cluster} {self.schedule} {self.scheduler}{stripes}"


# A cooperative tile is split between two warp groups along m, so it has 128 rows or more.
CONFIGS = tuple(
    Config(tile, cluster, schedule, scheduler, swizzle)
    for tile, schedule in (
        ((128, 256), "cooperative"),
        ((256, 128), "cooperative"),
        ((128, 128), "cooperative"),
        ((128, 64), "cooperative"),
        ((64, 256), "pingpong"),
        ((64, 128), "pingpong"),
        ((128, 128), "pingpong"),
        ((64, 64), "pingpong"),
        ((64, 16), "basic"),
    )
    for cluster in ((1, 1), (2, 1), (1, 2))
    for scheduler in ("persistent", "stream_k")
    for swizzle in (1, 2, 4, 8)
    if scheduler == "persistent" or (schedule == "cooperative" and swizzle == 1)
)


# What `choose` picks, the largest tile first.
LARGE = Config((128, 256), (2, 1))
MEDIUM = Config((128, 128), (2, 1))
DEEP = Config((128, 128), (1, 1), "cooperative", "stream_k")
SMALL = Config((64, 128), (1, 1), "pingpong")
CHOSEN = (LARGE, MEDIUM, DEEP, SMALL)


def choose(m: int, n: int, k: int, batches: int, multiprocessors: int, given: Config | None = None) -> Config:
    """A configuration for these extents: the largest tile of which there are enough for every multiprocessor."""
    if given is not None:
        if given not in CONFIGS:
            raise BadRequest("config", str(given), f"one of the {len(CONFIGS)} in dispatch.cutlass.config.CONFIGS")
        return given

    def tiles(tile: tuple[int, int]) -> int:
        return -(-m // tile[0]) * -(-n // tile[1]) * batches

    if tiles((128, 256)) >= 2 * multiprocessors:
        return LARGE
    if tiles((128, 128)) >= multiprocessors:
        return MEDIUM
    if m > 64 and k >= 4096 and 2 * tiles((128, 128)) <= multiprocessors:
        return DEEP
    return SMALL
