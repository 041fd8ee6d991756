"""Compiling before the first call: the kernels of the table's Hopper rows for plain products and convolutions.

`python -m dispatch cache precompile` calls it, for a program that must not wait later, or to make a pack. It needs no
GPU, and compiles several kernels at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.keys import F32, I32, Arch, Compute
from dispatch.libraries.cutlass import compile as compiler
from dispatch.libraries.cutlass.emit.sm90_gemm import GemmSpec, emit
from dispatch.libraries.cutlass.evt import linear_combination
from dispatch.libraries.cutlass.visitors import Operand
from dispatch.progress import finish
from dispatch.table.table import TABLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from concurrent.futures import Future

    from dispatch.libraries.cutlass.config import Config

__all__ = ["precompile", "specs"]

SM90 = Arch(90)


def specs(op: str | None = None) -> Iterator[tuple[str, GemmSpec]]:
    """A label and the kernel of each row and each configuration that `choose` picks, for alpha · A · B."""
    from dispatch.libraries.cutlass.config import CHOSEN

    for row in TABLE:
        if row.op != "matmul" or row.function != "GemmUniversal" or row.min_arch != SM90 or op not in (None, row.op):
            continue
        a, b, _, d = row.dtypes
        for config in CHOSEN:
            yield f"{row.name} {config}", _spec(a, b, d, row.compute, config)


def _spec(a: Any, b: Any, d: Any, compute: Compute | None, config: Config) -> GemmSpec:
    tree = linear_combination(with_source=False)
    return GemmSpec(
        arch=SM90,
        a=a,
        b=b,
        c=None,
        d=d,
        orders=("row", "column", "row", "row"),
        tile=(*config.tile, 1024 // a.bits),
        cluster=config.cluster,
        schedule=config.schedule,
        scheduler=config.scheduler,
        epilogue=tree,
        operands=(("alpha", Operand("scalar", I32 if d is I32 else F32)),),
        tf32=compute is Compute.COMPUTE_32F_FAST_TF32,
    )


def precompile(op: str | None = None, chosen: Iterable[tuple[str, GemmSpec]] | None = None) -> int:
    """Compile kernels that are not cached, by default those of the rows; returns how many are ready."""
    kernels = [(label, emit(spec), spec.target) for label, spec in (specs(op) if chosen is None else chosen)]
    if chosen is None:
        from dispatch.ops.conv.precompile import sources

        kernels += sources(TABLE, op)
    futures: dict[Future[bytes], str] = {}
    for label, source, target in kernels:
        futures[compiler.request(source, target, label)] = label
    try:
        finish(futures)
    except KeyboardInterrupt:
        for future in futures:  # those that have not started
            future.cancel()
        raise
    for future in futures:
        future.result()
    return len(futures)
