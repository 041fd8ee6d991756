"""The source of a kernel for Blackwell: sm_100a's tensor memory kernels, and sm_120a's for fp8.

They differ from sm90_gemm.py's kernels in their collectives; the entry points and the parameters are the same. Their
epilogue is alpha · A · B + beta · C. Tests compile them to cubins, but they have not run on any machine yet. This file
calls no library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dispatch.libraries.cutlass.emit.sm90_gemm import C_ARGUMENTS, GEMM_WORDS, KERNEL, PROLOGUE, SUPPORT, Source
from dispatch.libraries.cutlass.visitors import ELEMENT, STRIDE, Word

if TYPE_CHECKING:
    from dispatch.keys import Arch, Dtype

__all__ = ["ARCHES", "CLUSTER", "BlackwellSpec", "emit"]


@dataclass(frozen=True)
class BlackwellSpec:
    """The key of a Blackwell kernel's compilation, without M, N and K.

    Attributes:
        arch: sm_100 or sm_120, compiled for its own instructions ("a").
        a, b, c, d: the dtypes; c is None without a C.
        orders: "row" or "column" for each of a, b, c, d: which of their lines are dense.
    """

    arch: Arch
    a: Dtype
    b: Dtype
    c: Dtype | None
    d: Dtype
    orders: tuple[str, str, str, str]

    @property
    def target(self) -> str:
        """What NVRTC compiles for."""
        return f"sm_{int(self.arch)}a"


ARCHES = (100, 120)
CLUSTER = (1, 1)  # an instruction of one multiprocessor; pairs of them need clusters of two
# NVRTC is not shown these collectives by the umbrella headers.
INCLUDES = {
    100: """\
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_mma_decl.hpp"
#include "cutlass/gemm/collective/collective_builder_decl.hpp"
#include "cutlass/gemm/collective/sm100_mma_warpspecialized.hpp"
#include "cutlass/gemm/collective/builders/sm100_umma_builder.inl"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"
""",
    120: """\
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_mma_decl.hpp"
#include "cutlass/gemm/collective/collective_builder_decl.hpp"
#include "cutlass/gemm/collective/sm120_mma_tma.hpp"
#include "cutlass/gemm/collective/builders/sm100_umma_builder.inl"
#include "cutlass/gemm/collective/builders/sm120_mma_builder.inl"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"
""",
}
# Architecture, schedules of epilogue and mainloop.
KINDS = {
    100: ("Sm100", "cutlass::epilogue::TmaWarpSpecialized1Sm", "cutlass::gemm::KernelTmaWarpSpecialized1SmSm100"),
    120: (
        "Sm120",
        "cutlass::epilogue::collective::EpilogueScheduleAuto",
        "cutlass::gemm::KernelTmaWarpSpecializedCooperative",
    ),
}
THREAD = """{};
  arguments.epilogue.thread.alpha = in.number(alpha_value_);
  arguments.epilogue.thread.alpha_ptr = (float const*)in.pointer(alpha_);"""
BETA = """
  arguments.epilogue.thread.beta = in.number(beta_value_);
  arguments.epilogue.thread.beta_ptr = (float const*)in.pointer(beta_);"""


def emit(spec: BlackwellSpec) -> Source:
    """The source of a Blackwell kernel."""
    number = int(spec.arch)
    names = ("alpha",) if spec.c is None else ("alpha", "beta")
    scalars = (Word(f"{name}{part}", kind) for name in names for part, kind in (("", "pointer"), (".value", "number")))
    words = (*GEMM_WORDS, *scalars)
    kernel = KERNEL.replace("WORDS", str(len(words))).replace("WORKSPACE", "0, 0")
    kernel = kernel.replace("ARGUMENTS;", THREAD + (BETA if spec.c is not None else ""))
    kernel = kernel.replace("SOURCE", C_ARGUMENTS if spec.c is not None else "")
    places = ", ".join(f"{word.name.replace('.', '_')}_ = {place}" for place, word in enumerate(words))
    parts = [
        PROLOGUE,
        INCLUDES[number],
        SUPPORT,
        "namespace {",
        _types(spec),
        f"enum Place {{ {places} }};",
        "}",
        kernel,
    ]
    return Source("\n".join(parts), words)


def _types(spec: BlackwellSpec) -> str:
    arch, epilogue, mainloop = KINDS[int(spec.arch)]
    orders = [STRIDE[order] for order in spec.orders]
    align = [128 // dtype.bits for dtype in (spec.a, spec.b, spec.c or spec.d, spec.d)]
    return f"""\
using ElementA = {ELEMENT[spec.a]};
using ElementB = {ELEMENT[spec.b]};
using ElementC = {"void" if spec.c is None else ELEMENT[spec.c]};
using ElementD = {ELEMENT[spec.d]};
using Tile = cute::Shape<cute::_128, cute::_128, cute::_{1024 // spec.a.bits}>;
using Cluster = cute::Shape<cute::_{CLUSTER[0]}, cute::_{CLUSTER[1]}, cute::_1>;
using Epilogue = cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::{arch}, cutlass::arch::OpClassTensorOp, Tile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float,
    ElementC, {orders[2]}, {align[2]}, ElementD, {orders[3]}, {align[3]}, {epilogue}>::CollectiveOp;
using Mainloop = cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::{arch}, cutlass::arch::OpClassTensorOp, ElementA, {orders[0]}, {align[0]},
    ElementB, {orders[1]}, {align[1]}, float, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(Epilogue::SharedStorage))>,
    {mainloop}>::CollectiveOp;
struct Gemm : cutlass::gemm::kernel::GemmUniversal<
    cute::Shape<int, int, int, int>, Mainloop, Epilogue, void> {{}};"""
