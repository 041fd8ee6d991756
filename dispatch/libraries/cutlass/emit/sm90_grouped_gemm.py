"""The source of a grouped GEMM for Hopper: one kernel for products of different sizes, which are in device memory.

It differs from sm90_gemm.py's kernels in that addresses, strides and extents of the groups are arrays in device memory.
The kernel `arrange` computes them from the groups' ends, `place` copies them from its arguments. This file calls no
library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dispatch.errors import Refused
from dispatch.libraries.cutlass.emit.sm90_gemm import INCLUDES, PROLOGUE, SUPPORT, Source
from dispatch.libraries.cutlass.visitors import ELEMENT, STRIDE, Operand, Word, lower
from dispatch.refusal import Kind

if TYPE_CHECKING:
    from dispatch.keys import Arch, Dtype
    from dispatch.libraries.cutlass.evt import Node

__all__ = ["PLACED", "GroupedSpec", "emit"]

PLACED = 32  # groups per launch of `place`: their words fit in a launch's 4 KB of arguments


@dataclass(frozen=True)
class GroupedSpec:
    """The key of a grouped kernel's compilation, without extents, strides and the number of groups.

    Attributes:
        arch, a, b, d: the architecture and the dtypes.
        orders: "row" or "column" for each of a and b; D has dense rows.
        tile, cluster, schedule: as in GemmSpec, "cooperative" or "pingpong".
        epilogue, operands: a tree whose operands are scalars.
        fast_accumulation: fp8 only.
    """

    arch: Arch
    a: Dtype
    b: Dtype
    d: Dtype
    orders: tuple[str, str]
    tile: tuple[int, int, int]
    cluster: tuple[int, int]
    schedule: str
    epilogue: Node
    operands: tuple[tuple[str, Operand], ...]
    fast_accumulation: bool = False

    @property
    def target(self) -> str:
        """The architecture that NVRTC compiles for."""
        return f"sm_{int(self.arch)}a"


# The arrays that `arrange` and `place` write: for each group the extents, then the addresses of A, B and D, strides.
WORDS = (
    Word("groups"),
    Word("multiprocessors"),
    Word("workspace", "pointer"),
    Word("shapes", "pointer"),
    Word("addresses_a", "pointer"),
    Word("addresses_b", "pointer"),
    Word("addresses_d", "pointer"),
    Word("steps_a", "pointer"),
    Word("steps_b", "pointer"),
    Word("steps_d", "pointer"),
)

KERNEL = """\
extern "C" __global__ void __launch_bounds__(Gemm::MaxThreadsPerBlock, 1)
gemm(__grid_constant__ Gemm::Params const params) {
  extern __shared__ char shared[];
  Gemm{}(params, shared);
}

// One thread: the kernel's parameters for these words, and how it is launched.
extern "C" __global__ void fill(cudabind::Words<COUNT> in, Gemm::Params* params, int64_t* launch) {
  Gemm::Arguments arguments{};
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
  arguments.problem_shape = {int(in.integer(groups_)), (Extents*)in.pointer(shapes_), nullptr};
  arguments.mainloop.ptr_A = (ElementA const**)in.pointer(addresses_a_);
  arguments.mainloop.dA = (decltype(arguments.mainloop.dA))in.pointer(steps_a_);
  arguments.mainloop.ptr_B = (ElementB const**)in.pointer(addresses_b_);
  arguments.mainloop.dB = (decltype(arguments.mainloop.dB))in.pointer(steps_b_);
  arguments.epilogue.ptr_D = (ElementD**)in.pointer(addresses_d_);
  arguments.epilogue.dD = (decltype(arguments.epilogue.dD))in.pointer(steps_d_);
  arguments.epilogue.thread = ARGUMENTS;
  arguments.hw_info.sm_count = int(in.integer(multiprocessors_));
  *params = Gemm::to_underlying_arguments(arguments, in.pointer(workspace_));
  dim3 const grid = Gemm::get_grid_shape(*params);
  int64_t const size = Gemm::get_workspace_size(arguments);
  int64_t const facts[] = {
      int64_t(sizeof(Gemm::Params)), Gemm::SharedStorageSize, Gemm::MaxThreadsPerBlock, grid.x, grid.y, grid.z,
      1, size, size};
  for (int i = 0; i < 9; ++i) { launch[i] = facts[i]; }
}

// The groups' extents, addresses and steps, from where each ends along A's and D's rows.
extern "C" __global__ void arrange(
    int const* ends, int64_t groups, int64_t n, int64_t k, char* a, int64_t a_step, char* b, int64_t b_step,
    int64_t b_group, char* d, int64_t d_step, Extents* shapes, int64_t* arrays) {
  int64_t const step = groups + groups % 2;  // arrays begin at multiples of 16 bytes
  for (int64_t g = threadIdx.x; g < groups; g += blockDim.x) {
    int64_t const begin = g > 0 ? ends[g - 1] : 0;
    shapes[g] = cute::make_shape(int(ends[g] - begin), int(n), int(k));
    arrays[g] = int64_t(a + begin * a_step * int64_t(sizeof(ElementA)));
    arrays[step + g] = int64_t(b + g * b_group * int64_t(sizeof(ElementB)));
    arrays[2 * step + g] = int64_t(d + begin * d_step * int64_t(sizeof(ElementD)));
    arrays[3 * step + g] = a_step;
    arrays[4 * step + g] = b_step;
    arrays[5 * step + g] = d_step;
  }
}

// The same, a few groups at a time, from what the host knows: each group's extents, addresses and steps.
struct Placed { int64_t words[PLACED][9]; };
extern "C" __global__ void place(
    __grid_constant__ Placed const placed, int64_t first, int64_t count, int64_t groups, Extents* shapes,
    int64_t* arrays) {
  int64_t const step = groups + groups % 2;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    int64_t const* words = placed.words[i];
    int64_t const g = first + i;
    shapes[g] = cute::make_shape(int(words[0]), int(words[1]), int(words[2]));
    for (int64_t array = 0; array < 6; ++array) { arrays[array * step + g] = words[3 + array]; }
  }
}

extern "C" __global__ void scale(float*, int64_t, float) {}
"""


def emit(spec: GroupedSpec) -> Source:
    """The source of a grouped kernel; Refused for a tree with operands other than scalars."""
    operands = dict(spec.operands)
    others = [name for name, operand in operands.items() if operand.kind != "scalar"]
    if others:
        raise Refused(f"needs an epilogue of scalars for groups, has {', '.join(others)}", Kind.RULE)
    tree = lower(spec.epilogue, operands, spec.d, None)
    words = (*WORDS, *tree.words)
    kernel = (
        KERNEL.replace("COUNT", str(len(words))).replace("ARGUMENTS", tree.arguments).replace("PLACED", str(PLACED))
    )
    places = ", ".join(f"{word.name.replace('.', '_')}_ = {place}" for place, word in enumerate(words))
    tile = ", ".join(f"cute::_{extent}" for extent in spec.tile)
    cluster = ", ".join(f"cute::_{extent}" for extent in (*spec.cluster, 1))
    align = {name: 128 // dtype.bits for name, dtype in (("a", spec.a), ("b", spec.b), ("d", spec.d))}
    schedule = f"PtrArrayTmaWarpSpecialized{spec.schedule.capitalize()}"
    types = f"""\
using ElementA = {ELEMENT[spec.a]};
using ElementB = {ELEMENT[spec.b]};
using ElementC = void;
using ElementD = {ELEMENT[spec.d]};
using Extents = cute::Shape<int, int, int>;
using Tile = cute::Shape<{tile}>;
using Cluster = cute::Shape<{cluster}>;
{chr(10).join(tree.declarations)}
using Visitor = {tree.type};
using Epilogue = cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float,
    ElementC, cutlass::layout::RowMajor*, {align["d"]}, ElementD, cutlass::layout::RowMajor*, {align["d"]},
    cutlass::epilogue::{schedule}, Visitor>::CollectiveOp;
using Mainloop = cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, ElementA, {STRIDE[spec.orders[0]]}*, {align["a"]},
    ElementB, {STRIDE[spec.orders[1]]}*, {align["b"]}, float, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(Epilogue::SharedStorage))>,
    cutlass::gemm::Kernel{schedule}{"FP8FastAccum" if spec.fast_accumulation else ""}>::CollectiveOp;
struct Gemm : cutlass::gemm::kernel::GemmUniversal<
    cutlass::gemm::GroupProblemShape<Extents>, Mainloop, Epilogue> {{}};"""
    parts = [PROLOGUE, INCLUDES, SUPPORT, "namespace {", types, f"enum Place {{ {places} }};", "}", kernel]
    return Source("\n".join(parts), words)
