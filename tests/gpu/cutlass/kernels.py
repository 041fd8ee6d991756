"""The kernels that the GPU tests and the benchmark need, compiled ahead where there are headers and written to a pack.

    python tests/gpu/cutlass/kernels.py rows|blackwell|trees|grouped|tuned|conv|swiglu|bench ... [--pack FILE] [--list]

A machine without headers then takes them: `python -m dispatch cache import FILE`. Compiling takes half a minute to a
minute of one core for each; what is in the cache is not compiled again, so that it can be stopped and goes on later.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from conv_kernels import EXAMPLES, convolutions

import dispatch as dp
from dispatch.keys import BF16, Arch
from dispatch.libraries.cutlass import compile as compiler
from dispatch.libraries.cutlass import evt
from dispatch.libraries.cutlass.config import candidates, choose
from dispatch.libraries.cutlass.emit import sm80_gemm as emit80
from dispatch.libraries.cutlass.emit import sm90_gemm as emit
from dispatch.libraries.cutlass.emit import sm90_grouped_gemm as emit_grouped
from dispatch.libraries.cutlass.emit import sm100_gemm as emit100
from dispatch.libraries.cutlass.emit.sm100_gemm import ARCHES
from dispatch.libraries.nvrtc.kernel_cache import store
from dispatch.ops.grouped_matmul import config as grouped_config
from dispatch.ops.grouped_matmul import cutlass as grouped
from dispatch.ops.grouped_matmul.cases import grouped_cases
from dispatch.ops.matmul import MatmulRequest, cutlass
from dispatch.ops.matmul import sm80 as multistage
from dispatch.ops.matmul import sm100 as blackwell
from dispatch.ops.matmul import tree_cases as checks
from dispatch.progress import finish

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.libraries.cutlass.emit.sm90_gemm import Source

SM90 = Arch(90)
PROCESSORS = 132  # of an H100 or H200
DEV = dp.device("host")


class Kernel(NamedTuple):
    """A source, what it is compiled for, and what it is."""

    source: Source
    target: str
    label: str

    @property
    def id(self) -> str:
        return compiler.kernel_id(self.source, self.target)


def rows(arches: tuple[int, ...] = (SM90,)) -> Iterator[Kernel]:
    """Those of each row's cases on GPUs of these architectures."""
    for row in dp.TABLE.of("matmul"):
        # Hopper runs the rows of sm_80, too; of the newer ones, those of Blackwell's own kernels are meant.
        if row.library != "cutlass":
            continue
        on = [Arch(arch) for arch in arches if row.on(Arch(arch)) and (row.min_arch > SM90) == (arch > SM90)]
        for case in checks.row_cases(row) if on else ():
            request = case.request(DEV, np.random.default_rng(0))
            for arch in on:
                yield kernel_of(request, row, arch, case.id)


def newer() -> Iterator[Kernel]:
    """Those of Blackwell's rows."""
    return rows(ARCHES)


def trees() -> Iterator[Kernel]:
    """Those of the random trees and of quantization."""
    for case in (*checks.quantized_cases(), *checks.tree_cases()):
        request = case.request(DEV, np.random.default_rng(0))
        spec = cutlass.spec_of(request.form, SM90, request.config)
        yield Kernel(emit.emit(spec), spec.target, case.id)


def groups() -> Iterator[Kernel]:
    """Those of the grouped products."""
    for row in dp.TABLE.of("grouped_matmul"):
        if row.library != "cutlass":
            continue
        for case in grouped_cases(row):
            request = case.request(DEV, np.random.default_rng(0))
            config = grouped_config.choose(request.rows, request.groups, request.n, PROCESSORS, request.config)
            spec = grouped.spec_of(request, SM90, config)
            yield Kernel(emit_grouped.emit(spec), spec.target, f"{row.name} {case.id}")


def plain(dtype: str, tree: evt.Node | dp.Epilogue = dp.Epilogue.NONE, **options: object) -> MatmulRequest:
    """A product of small matrices: a kernel does not know their extents."""
    a, b = DEV.zeros((16, 32), dtype), DEV.zeros((32, 32), dtype).T
    return MatmulRequest(a, b, epilogue=tree, **options, library="cutlass")  # type: ignore[arg-type]


def raced(request: MatmulRequest, extents: tuple[int, int, int]) -> Iterator[Kernel]:
    """Those that autotune times for some extents."""
    for config in dict.fromkeys(c.kernel for c in candidates(*extents, 1, PROCESSORS)):
        spec = cutlass.spec_of(request.form, SM90, config)
        yield Kernel(emit.emit(spec), spec.target, f"{request.describe()} {config}")


def tuned() -> Iterator[Kernel]:
    """Those of the tests of autotune."""
    alpha = evt.linear_combination(with_source=False)
    for tree in (dp.Epilogue.NONE, evt.relu(alpha), evt.silu(alpha)):
        for extents in ((2048, 2048, 1024), (64, 1024, 2048)):
            yield from raced(plain("bf16", tree), extents)


def bench() -> Iterator[Kernel]:
    """Those of bench_cutlass.py's products, grouped products and tree."""
    yield from raced(plain("bf16"), (4096,) * 3)
    yield from raced(plain("f8e4m3", fast_accum=True), (4096,) * 3)
    residual = evt.silu(evt.accumulator() + evt.row("bias")) + evt.load("residual")
    operands = {"bias": DEV.zeros(32, "bf16"), "residual": DEV.zeros((16, 32), "bf16")}
    request = plain("bf16", evt.reduce(residual, "top", "amax", over="n"), operands=operands)
    yield from raced(request, (4096,) * 3)
    row = next(row for row in dp.TABLE.of("grouped_matmul") if row.min_arch == SM90 and row.dtypes == (BF16,) * 4)
    case = grouped_cases(row)[0]
    for config in grouped_config.CONFIGS:
        spec = grouped.spec_of(case.request(DEV, np.random.default_rng(0)), SM90, config)
        yield Kernel(emit_grouped.emit(spec), spec.target, f"{case.id} {config}")


def conv() -> Iterator[Kernel]:
    """Those of convolutions: rows, tests, benchmark and example."""
    return (Kernel(*made) for made in convolutions())


def swiglu() -> Iterator[Kernel]:
    """Those of the gated block of examples/13_swiglu.py, as it is and as large as its docstring says."""
    sys.path.insert(0, str(EXAMPLES))
    block = import_module("13_swiglu")
    sys.path.remove(str(EXAMPLES))
    made, c = DEV.zeros((16, 32), "bf16"), DEV.zeros((16, 32), "bf16")
    for tokens, width, hidden in ((256, 512, 1024), (4096, 4096, 11008)):
        up_and_gate, down = (tokens, hidden, width), (tokens, width, hidden)
        for request, extents in (
            (plain("bf16", block.GATE, operands={"up": made}), up_and_gate),
            (plain("bf16", block.DOWN, c=c), down),
        ):
            spec = cutlass.spec_of(request.form, SM90, choose(*extents, 1, PROCESSORS))
            yield Kernel(emit.emit(spec), spec.target, f"gated block {request.describe()}")


SETS = {
    "rows": rows,
    "blackwell": newer,
    "trees": trees,
    "grouped": groups,
    "tuned": tuned,
    "conv": conv,
    "swiglu": swiglu,
    "bench": bench,
}


def kernel_of(request: MatmulRequest, row: dp.Row, arch: Arch, label: str) -> Kernel:
    """The kernel that carries out a request by a row, on a GPU."""
    source: Source
    if row.function == "DefaultGemmUniversal":
        multistage_spec = multistage.spec_of(request.form, arch, PROCESSORS)
        source, target = emit80.emit(multistage_spec), multistage_spec.target
    elif row.min_arch > SM90:
        blackwell_spec = blackwell.spec_of(request.form, arch)
        source, target = emit100.emit(blackwell_spec), blackwell_spec.target
    else:
        spec = cutlass.spec_of(request.form, arch, request.config)
        source, target = emit.emit(spec), spec.target
    return Kernel(source, target, f"{row.name} {label}")


def of(names: list[str]) -> dict[str, Kernel]:
    """The kernels of some sets by their ids, each once."""
    found: dict[str, Kernel] = {}
    for name in names:
        for kernel in SETS[name]():
            found.setdefault(kernel.id, kernel)
    return found


def main() -> int:
    """Compile, and write a pack; 1 where a kernel does not compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=tuple(SETS))
    parser.add_argument("--pack", type=Path, help="the file to write, with those that are compiled so far")
    parser.add_argument("--list", action="store_true", help="say which there are, and compile none")
    options = parser.parse_args()
    kernels = of(options.sets)
    if options.list:
        for kernel in kernels.values():
            there = store().find(kernel.id, compiler.toolchain()) is not None
            sys.stdout.write(f"{'compiled' if there else 'missing '} {kernel.target} {kernel.label}\n")
        return 0
    futures = {compiler.request(k.source, k.target, k.label): k for k in kernels.values()}
    finish(futures)
    failed = [(k.label, error) for future, k in futures.items() if (error := future.exception()) is not None]
    for label, error in failed:
        sys.stdout.write(f"{label}: {error}\n")
    sys.stdout.write(f"{len(futures) - len(failed)} of {len(futures)} kernels are there\n")
    if options.pack is not None:
        sys.stdout.write(f"{store().export_pack(options.pack, kernels)} kernels in {options.pack}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
