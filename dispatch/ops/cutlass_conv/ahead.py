"""The convolutions that are worth compiling ahead: each row of Hopper with each configuration that `choose` picks.

`dispatch.cutlass.warm` asks, for `python -m dispatch cache warm`. Nothing is compiled here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.cutlass.emit_conv import ConvSpec, emit
from dispatch.cutlass.evt import linear_combination
from dispatch.cutlass.visitors import Operand
from dispatch.keys import F32, Arch
from dispatch.ops.cutlass_conv.config import DEEP, LARGE, MEDIUM, NARROW, SMALL
from dispatch.ops.cutlass_conv.cutlass import BYTES_K

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.cutlass.config import Config
    from dispatch.cutlass.emit import Source
    from dispatch.row import Row

__all__ = ["sources"]

CHOSEN = {
    "fwd": (LARGE, MEDIUM, NARROW, SMALL),
    "bwd_data": (LARGE, MEDIUM, NARROW, SMALL),
    "bwd_filter": (MEDIUM, NARROW, DEEP),
}


def sources(op: str | None = None) -> Iterator[tuple[str, Source, str]]:
    """A label, the source and the target of each kernel, for alpha · conv over two spatial axes, of an op or of all."""
    from dispatch.table import TABLE

    for row in TABLE:
        if row.function == "CollectiveConv" and op in (None, row.op):
            for config in CHOSEN[row.op.removeprefix("cutlass_conv_")]:
                spec = _spec(row, config)
                yield f"{row.name} {config}", emit(spec), spec.target


def _spec(row: Row, config: Config) -> ConvSpec:
    dtype, _, d = row.dtypes
    return ConvSpec(
        arch=Arch(90),
        mode=row.op.removeprefix("cutlass_conv_"),
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
