"""The choice of a kernel by extents: tile, cluster, schedule and scheduler, and the order in which it processes D.

`CONFIGS` is the list of configurations. `choose` picks one of them without timing, `candidates` returns those worth
timing, and a request may name another of them. A kernel's key contains no extents and no order: a few kernels serve
all.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from dispatch.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CHOSEN", "CONFIGS", "RASTERS", "Config", "candidates", "choose"]

RASTERS = ("heuristic", "along_m", "along_n")  # in the order of CUTLASS's RasterOrderOptions
SWIZZLES = (1, 2, 4, 8)
WIDTHS = ((8, 6), (4, 3), (2, 2))  # of a stripe, and the minimum of tiles along both axes for which CUTLASS makes it
MAX_FILL_RATIO = 1.05  # relative to the number of tiles without a swizzle


class Config(NamedTuple):
    """The tile of a thread block, and the order of the blocks.

    Attributes:
        tile, cluster: (m, n) of a block's part of D, and of the blocks that share loads.
        schedule, scheduler: CUTLASS's, by name.
        swizzle, raster: the width in tiles of the stripes in which the scheduler processes D, and their direction. They
            are arguments of a launch: configurations that differ in nothing else share a kernel.
    """

    tile: tuple[int, int]
    cluster: tuple[int, int] = (1, 1)
    schedule: str = "cooperative"
    scheduler: str = "persistent"
    swizzle: int = 1
    raster: str = "heuristic"

    def __str__(self) -> str:
        tile, cluster = ("x".join(map(str, pair)) for pair in (self.tile, self.cluster))
        stripes = "" if self.swizzle == 1 else f" swizzle {self.swizzle}"
        along = "" if self.raster == "heuristic" else f" {self.raster}"
        return f"{tile} cluster {cluster} {self.schedule} {self.scheduler}{stripes}{along}"

    @property
    def kernel(self) -> Config:
        """The configuration without its order: the part that is compiled."""
        return self._replace(swizzle=1, raster="heuristic")


# A cooperative tile is split between two warp groups along m, so it has 128 rows or more.
KERNELS = tuple(
    Config(tile, cluster, schedule, scheduler)
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
    for cluster in ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))
    for scheduler in ("persistent", "stream_k")
    if scheduler == "persistent" or schedule == "cooperative"
)
CONFIGS = tuple(
    config._replace(swizzle=swizzle, raster=raster) for config in KERNELS for swizzle in SWIZZLES for raster in RASTERS
)


# The configurations that `choose` picks, the largest tile first.
LARGE = Config((128, 256), (2, 1))
MEDIUM = Config((128, 128), (2, 1))
DEEP = Config((128, 128), (1, 1), "cooperative", "stream_k")
SMALL = Config((64, 128), (1, 1), "pingpong")
CHOSEN = (LARGE, MEDIUM, DEEP, SMALL)
# Other configurations that autotune tries, for large and for small products. In the large ones a cluster shares the
# longer side of its tiles, so that a block loads as little as a square one.
TRIED = (
    LARGE,
    Config((256, 128), (1, 2)),
    Config((128, 256), (2, 2)),
    Config((128, 128), (2, 1), "pingpong"),
    Config((64, 256), (2, 1), "pingpong"),
)
TRIED_SMALL = (
    MEDIUM,
    DEEP,
    SMALL,
    Config((128, 128), (2, 1), "pingpong"),
    Config((64, 64), (1, 1), "pingpong"),
    Config((64, 16), (1, 1), "basic"),
)


def choose(m: int, n: int, k: int, batches: int, multiprocessors: int, given: Config | None = None) -> Config:
    """A configuration for these extents: the largest tile with enough tiles for every multiprocessor."""
    if given is not None:
        if given not in CONFIGS:
            raise BadRequest(
                "config", str(given), f"one of the {len(CONFIGS)} in dispatch.libraries.cutlass.config.CONFIGS"
            )
        return given
    tiles = _Tiles(m, n, batches)
    if tiles.of((128, 256)) >= 2 * multiprocessors:
        return LARGE
    if tiles.of((128, 128)) >= multiprocessors:
        return MEDIUM
    if m > 64 and k >= 4096 and 2 * tiles.of((128, 128)) <= multiprocessors:
        return DEEP
    return SMALL


def candidates(m: int, n: int, k: int, batches: int, multiprocessors: int) -> tuple[Config, ...]:
    """The configurations to be timed for these extents: `choose`'s first, then other kernels, each in several orders.

    The order matters if the tiles that run at once are only a part of D: they then share the contents of the L2 cache.
    """
    first = choose(m, n, k, batches, multiprocessors)
    tiles = _Tiles(m, n, batches)
    kernels = TRIED if tiles.of((128, 256)) >= multiprocessors else TRIED_SMALL
    configs = {first: None}
    for kernel in dict.fromkeys((first.kernel, *kernels)):
        several = tiles.of(kernel.tile) > 2 * multiprocessors
        configs.update(dict.fromkeys(_orders(kernel, tiles) if several else (kernel,)))
    return tuple(configs)


def _orders(kernel: Config, tiles: _Tiles) -> Iterator[Config]:
    """The orders that are worth timing: CUTLASS pads D to whole stripes, and multiplies the padding, too."""
    least = tiles.filled(kernel)
    for raster in RASTERS[1:]:
        for swizzle in SWIZZLES:
            config = kernel._replace(swizzle=swizzle, raster=raster)
            if tiles.filled(config) <= MAX_FILL_RATIO * least:
                yield config


class _Tiles(NamedTuple):
    """The extents and batch of D, to count its tiles of any size."""

    m: int
    n: int
    batches: int

    def of(self, tile: tuple[int, int]) -> int:
        return math.ceil(self.m / tile[0]) * math.ceil(self.n / tile[1]) * self.batches

    def filled(self, config: Config) -> int:
        """The number of tiles that the persistent scheduler processes for one batch; small D have narrower stripes."""
        down, across = math.ceil(self.m / config.tile[0]), math.ceil(self.n / config.tile[1])
        width = next((w for w, least in WIDTHS if w <= config.swizzle and least <= min(down, across)), 1)
        along_m, along_n = (width * blocks for blocks in config.cluster)
        return math.ceil(down / along_m) * along_m * math.ceil(across / along_n) * along_n
