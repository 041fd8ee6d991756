"""The default kernels of cuSPARSELt's products: the ones that were the fastest, by extents.

The library's own default is its kernel 0, whatever the extents. On an H200 (0.8.0) 212 products took 1.69 times as long
with it as with the best of the first 30 in the geometric mean, and those of f16 with column-major D 3.4 times, 10 at
worst. With the choices here they took 1.01, and 1.20 at worst. Another version numbers other kernels, so the table is
for the version that was timed; others use the library's default, or `autotune=True`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dispatch.ops.structured.layout import is_row_major

if TYPE_CHECKING:
    from typing import Any

__all__ = ["TIMED", "Kernels", "kernel_of"]

VERSIONS, ARCH = ("cusparseLt 0.8.",), " sm_90"
ENOUGH_TILES = 80  # tiles of a result that keep 132 multiprocessors busy
NARROW = 128  # columns of B, up to which tiles are tall
LARGE = 2048  # rows of A, from which on sharing k among the blocks of a cluster is faster


class Kernels(NamedTuple):
    """Kernel numbers by use: the tile of D that a block computes, as rows x columns."""

    wide: int  # 128 x 256, two blocks per cluster, which share B
    tall: int  # 128 x 64, for few columns
    medium: int  # 64 x 128
    small: int  # 64 x 64
    few: int  # 64 x 64, eight blocks per cluster: few tiles of long sums
    tiny: int  # like small: few tiles of short sums


# By the dtypes of A and D, and whether D is row-major. bf16 and f32 have no tile of fewer than 256 and 128 columns.
TIMED = {
    ("f16", "f16", True): Kernels(wide=25, tall=10, medium=24, small=17, few=12, tiny=17),
    ("f16", "f16", False): Kernels(wide=6, tall=25, medium=21, small=22, few=18, tiny=22),
    ("bf16", "bf16", True): Kernels(wide=20, tall=1, medium=16, small=1, few=17, tiny=16),
    ("bf16", "bf16", False): Kernels(wide=17, tall=20, medium=13, small=20, few=15, tiny=13),
    ("f32", "f32", True): Kernels(wide=19, tall=12, medium=3, small=12, few=20, tiny=18),
    ("f32", "f32", False): Kernels(wide=14, tall=11, medium=2, small=11, few=11, tiny=15),
    ("i8", "i8", True): Kernels(wide=23, tall=14, medium=21, small=2, few=15, tiny=2),
    ("i8", "i8", False): Kernels(wide=2, tall=17, medium=15, small=14, few=20, tiny=14),
    ("i8", "i32", True): Kernels(wide=25, tall=26, medium=1, small=2, few=24, tiny=2),
    ("i8", "i32", False): Kernels(wide=17, tall=14, medium=12, small=19, few=5, tiny=24),
    ("f8e4m3", "f16", True): Kernels(wide=20, tall=2, medium=10, small=8, few=6, tiny=8),
    ("f8e4m3", "f16", False): Kernels(wide=9, tall=8, medium=11, small=17, few=3, tiny=17),
    ("f8e4m3", "f8e4m3", True): Kernels(wide=16, tall=10, medium=0, small=20, few=9, tiny=20),
    ("f8e4m3", "f8e4m3", False): Kernels(wide=25, tall=3, medium=7, small=28, few=4, tiny=4),
    # Not timed: these kernels have the same tiles as those above.
    ("i8", "f16", True): Kernels(wide=1, tall=21, medium=19, small=3, few=6, tiny=3),
    ("i8", "f16", False): Kernels(wide=13, tall=15, medium=24, small=19, few=22, tiny=19),
    ("i8", "bf16", True): Kernels(wide=8, tall=2, medium=1, small=3, few=21, tiny=3),
    ("i8", "bf16", False): Kernels(wide=19, tall=21, medium=2, small=5, few=26, tiny=5),
    ("f8e4m3", "bf16", True): Kernels(wide=21, tall=0, medium=17, small=10, few=3, tiny=10),
    ("f8e4m3", "bf16", False): Kernels(wide=8, tall=10, medium=15, small=11, few=2, tiny=11),
    ("f8e4m3", "f32", True): Kernels(wide=21, tall=9, medium=7, small=11, few=2, tiny=11),
    ("f8e4m3", "f32", False): Kernels(wide=21, tall=8, medium=1, small=24, few=14, tiny=24),
    ("f8e5m2", "f16", True): Kernels(wide=22, tall=24, medium=10, small=11, few=8, tiny=11),
    ("f8e5m2", "f16", False): Kernels(wide=22, tall=1, medium=19, small=17, few=14, tiny=17),
    ("f8e5m2", "bf16", True): Kernels(wide=14, tall=3, medium=6, small=7, few=19, tiny=7),
    ("f8e5m2", "bf16", False): Kernels(wide=25, tall=19, medium=0, small=12, few=16, tiny=12),
}


def kernel_of(request: Any) -> int | None:
    """The kernel of a request that names none; None if the library is to choose."""
    stamp, out = request.form.made_by, request.layout_of("out")
    if not stamp.startswith(VERSIONS) or not stamp.endswith(ARCH):
        return None
    kernels = TIMED.get((request.a_dtype.name, request.d_dtype.name, is_row_major(out)))
    if kernels is None:
        return None
    m, n = out.shape[-2:]
    together = out.shape[0] if len(out.shape) > 2 and len(request.form.shape) == 2 else 1
    return kernels[Kernels._fields.index(tiles_for(m, n, together))]


def tiles_for(m: int, n: int, count: int = 1) -> str:
    """The field of `Kernels` for results of m rows and n columns, so many per call."""

    def has_enough_tiles(rows: int, columns: int) -> bool:
        return -(-m // rows) * -(-n // columns) * count >= ENOUGH_TILES

    if n > NARROW and has_enough_tiles(128, 256):
        return "wide"
    if n > NARROW and has_enough_tiles(64, 128):
        return "medium"
    if n <= NARROW and has_enough_tiles(128, 64):
        return "tall"
    if has_enough_tiles(64, 64):
        return "small"
    return "few" if m >= LARGE else "tiny"
