"""The choice of Hopper's kernel for a convolution: tile, cluster, schedule and scheduler.

`CONFIGS` is the list of configurations. `choose` picks one of them without timing, and a request may name another of
them. A kernel's key contains no extents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.errors import BadRequest
from dispatch.libraries.cutlass.config import Config

if TYPE_CHECKING:
    from dispatch.ops.conv.request import ConvRequest

__all__ = ["CONFIGS", "DEEP", "LARGE", "MEDIUM", "NARROW", "PLAIN", "SMALL", "choose"]

# A cluster shares tiles of filters. CUTLASS's own convolution kernels for sm_90 are like PLAIN: one tile per block.
LARGE = Config((128, 256), (2, 1))
MEDIUM = Config((128, 128), (2, 1))
NARROW = Config((128, 64), (2, 1))
SMALL = Config((64, 64), (1, 1), "pingpong")
# The gradient of filters sums over all pixels. A few tiles would leave most multiprocessors idle: stream-K splits sums.
DEEP = Config((128, 128), (1, 1), "cooperative", "stream_k")
PLAIN = Config((128, 128), (2, 1), "basic")
CONFIGS = (LARGE, MEDIUM, NARROW, SMALL, DEEP, PLAIN)


def choose(request: ConvRequest, processors: int) -> Config:
    """A configuration for a request: tiles no wider than the channels, and enough of them for every multiprocessor."""
    if request.config is not None:
        # Stripes extend beyond the edge of the result, where taps would be out of the reach of an im2col copy.
        plain = request.config if request.mode == "bwd_filter" else request.config._replace(swizzle=1)
        if plain not in CONFIGS:
            names = ", ".join(map(str, CONFIGS))
            raise BadRequest("config", str(request.config), f"one of {names}")
        return request.config
    rows, columns = request.extents
    channels = request.result_shape[1]  # the axis that is divided into tiles

    def tiles(config: Config) -> int:
        across = -(-channels // config.tile[1]) * (columns // channels)
        return -(-rows // config.tile[0]) * across

    if request.mode == "bwd_filter":
        if channels <= NARROW.tile[1]:
            return NARROW
        return DEEP if 2 * tiles(DEEP) <= processors else MEDIUM
    fitting = [config for config in (LARGE, MEDIUM, NARROW) if channels > config.tile[1] // 2]
    return next((config for config in fitting if tiles(config) >= processors), SMALL)
