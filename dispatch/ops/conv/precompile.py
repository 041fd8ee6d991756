"""The convolutions to precompile: each row for Hopper with each configuration that `choose` picks.

`dispatch.cli.precompile` calls `sources` for `python -m dispatch cache precompile`. This file compiles nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.keys import F32, Arch
from dispatch.libraries.cutlass.emit.sm90_conv import ConvSpec, emit
from dispatch.libraries.cutlass.evt import linear_combination
from dispatch.libraries.cutlass.visitors import Operand
from dispatch.ops.conv.config import DEEP, LARGE, MEDIUM, NARROW, SMALL
from dispatch.ops.conv.cutlass import BYTES_K

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dispatch.core.row import Row
    from dispatch.libraries.cutlass.config import Config
    from dispatch.libraries.cutlass.emit.sm90_gemm import Source

__all__ = ["sources"]

CHOSEN = {
    "fwd": (LARGE, MEDIUM, NARROW, SMALL),
    "bwd_data": (LARGE, MEDIUM, NARROW, SMALL),
    "bwd_filter": (MEDIUM, NARROW, DEEP),
}


def sources(rows: Iterable[Row], op: str | None = None) -> Iterator[tuple[str, Source, str]]:
    """A label, the source and the target of each kernel of these rows, for alpha · conv over two spatial axes.

    Only the rows of `op`, if given.
    """
    for row in rows:
        if row.function == "CollectiveConv" and op in (None, row.op):
            for config in CHOSEN[row.op.removeprefix("conv_")]:
                spec = _spec(row, config)
                yield f"{row.name} {config}", emit(spec), spec.target


def _spec(row: Row, config: Config) -> ConvSpec:
    dtype, _, d = row.dtypes
    return ConvSpec(
        arch=Arch(90),
        mode=row.op.removeprefix("conv_"),
        dims=2,
        dtype=dtype,
        c=None,
        d=d,
        tile=(*config.tile, BYTES_K * 8 // dtype.bits),
        cluster=config.cluster,
        schedule=config.schedule,
        scheduler=config.scheduler,
        epilogue=linear_combination(with_source=False),
        operands=(("alpha", Operand("scalar", F32)),),
    )
