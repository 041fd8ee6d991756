"""The source of a convolution for Hopper, forward or either gradient: im2col tensor maps, tensor cores, epilogue trees.

It differs from sm90_gemm.py's kernels in the mainloop, whose problem consists of a convolution's extents, padding,
stride and dilation. Images and filters are dense with channels last; images with one spatial axis get a second one of
extent 1. This file calls no library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dispatch.errors import Refused
from dispatch.libraries.cutlass.emit.sm90_gemm import EPILOGUE, INCLUDES, MAINLOOP, PROLOGUE, SCHEDULER, SUPPORT, Source
from dispatch.libraries.cutlass.im2col import IM2COL
from dispatch.libraries.cutlass.im2col import MAINLOOP as CONV_MAINLOOP
from dispatch.libraries.cutlass.visitors import ELEMENT, Operand, Word, lower
from dispatch.refusal import Kind

if TYPE_CHECKING:
    from dispatch.keys import Arch, Dtype
    from dispatch.libraries.cutlass.evt import Node

__all__ = ["ConvSpec", "emit", "problem_words"]

MODES = {"fwd": "kFprop", "bwd_data": "kDgrad", "bwd_filter": "kWgrad"}
IMAGE = {2: "cutlass::layout::TensorNHWC", 3: "cutlass::layout::TensorNDHWC"}
FILTER = {2: "cutlass::layout::TensorKCSR", 3: "cutlass::layout::TensorKCSRT"}
WARP_GROUPS = {"cooperative": 2, "pingpong": 1, "basic": 1}  # warp groups that share a tile


@dataclass(frozen=True)
class ConvSpec:
    """The key of a convolution kernel's compilation, without extents, padding, stride and dilation.

    Attributes:
        arch: the architecture; sm_90 is compiled for sm_90a.
        mode: "fwd", "bwd_data" or "bwd_filter".
        dims: the number of spatial axes, 2 or 3.
        dtype: of the operands; f32 is rounded to TF32.
        c, d: the dtypes of the source, or None, and of the result.
        tile, cluster, schedule, scheduler: as in GemmSpec, over the implicit product: pixels x filters x taps forward,
            pixels x channels x taps for the gradient of the data, filters x taps x pixels for that of the filters.
        epilogue, operands: the tree, and the kinds and dtypes of its operands.
    """

    arch: Arch
    mode: str
    dims: int
    dtype: Dtype
    c: Dtype | None
    d: Dtype
    tile: tuple[int, int, int]
    cluster: tuple[int, int]
    schedule: str
    scheduler: str
    epilogue: Node
    operands: tuple[tuple[str, Operand], ...] = ()

    @property
    def target(self) -> str:
        """The architecture that NVRTC compiles for."""
        return f"sm_{int(self.arch)}a"


def problem_words(dims: int) -> tuple[Word, ...]:
    """The words of a convolution: x (n, spatial, c), w (k, spatial, c), y, padding, stride and dilation (spatial)."""
    counts = {"x": dims + 2, "w": dims + 2, "y": dims, "pre": dims, "post": dims, "stride": dims, "dilation": dims}
    names = [Word(f"problem.{name}{place}") for name, count in counts.items() for place in range(count)]
    return (*names, Word("problem.groups"))


# fmt: off
WORDS = (
    Word("multiprocessors"), Word("swizzle"), Word("workspace", "pointer"), Word("a", "pointer"),
    Word("b", "pointer"), Word("c", "pointer"), Word("out", "pointer"),
)
# fmt: on

KERNEL = """\
extern "C" __global__ void __launch_bounds__(Gemm::MaxThreadsPerBlock, 1)
gemm(__grid_constant__ Gemm::Params const params) {
  extern __shared__ char shared[];
  Gemm{}(params, shared);
}

// One thread: the kernel's parameters for these words, and how it is launched.
extern "C" __global__ void fill(cudabind::Words<COUNT> in, Gemm::Params* params, int64_t* launch) {
  using Extents = typename Problem::TensorExtent;
  using Steps = typename Problem::SpatialExtent;
  Problem const problem(
      cutlass::conv::Mode::kCrossCorrelation, cudabind::several<Extents>(in, problem_x0_),
      cudabind::several<Extents>(in, problem_w0_), cudabind::several<Steps>(in, problem_pre0_),
      cudabind::several<Steps>(in, problem_post0_), cudabind::several<Steps>(in, problem_stride0_),
      cudabind::several<Steps>(in, problem_dilation0_), 1);
  Gemm::Arguments arguments{};
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  arguments.problem_shape = cudabind::implicit_extents(problem);
  arguments.mainloop.problem = problem;
  arguments.mainloop.operands.ptr_A = (Element const*)in.pointer(a_);
  arguments.mainloop.operands.ptr_B = (Element const*)in.pointer(b_);
  SOURCE
  arguments.epilogue.ptr_D = (ElementD*)in.pointer(out_);
  arguments.epilogue.dD = strides(problem);
  arguments.epilogue.thread = ARGUMENTS;
  arguments.hw_info.sm_count = int(in.integer(multiprocessors_));
  arguments.scheduler.max_swizzle_size = int(in.integer(swizzle_));
  *params = Gemm::to_underlying_arguments(arguments, in.pointer(workspace_));
  dim3 const grid = Gemm::get_grid_shape(*params);
  int64_t const facts[] = {
      int64_t(sizeof(Gemm::Params)), Gemm::SharedStorageSize, Gemm::MaxThreadsPerBlock, grid.x, grid.y, grid.z,
      1, WORKSPACE};
  for (int i = 0; i < 9; ++i) { launch[i] = facts[i]; }
}

extern "C" __global__ void scale(float* values, int64_t count, float factor) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < count; i += gridDim.x * int64_t(blockDim.x)) {
    values[i] *= factor;
  }
}
"""

# The part of sm90_gemm.py's SUPPORT that a visitor without our own functions needs.
WORDS_ALONE = """\
namespace cudabind {
template <int N> struct Words {
  int64_t words[N];
  CUTLASS_HOST_DEVICE int64_t integer(int i) const { return words[i]; }
  CUTLASS_HOST_DEVICE void* pointer(int i) const { return (void*)words[i]; }
  CUTLASS_HOST_DEVICE float number(int i) const { return *(float const*)&words[i]; }
};
}
"""

C_ARGUMENTS = """arguments.epilogue.ptr_C = (ElementC const*)in.pointer(c_);
  arguments.epilogue.dC = strides(problem);"""

# Partial sums, followed by the barriers, as in sm90_gemm.py.
STREAM_K_WORKSPACE = """int64_t(Gemm::TileScheduler::get_workspace_size<Gemm::ProblemShape, Gemm::ElementAccumulator>(
          arguments.scheduler, arguments.problem_shape, arguments.hw_info, 0, Subtiles)),
      int64_t(Gemm::get_workspace_size(arguments))"""

# Images are matrices of pixels by channels; a filter's gradient has channels and taps in one mode.
ROWS = """\
CUTLASS_HOST_DEVICE Gemm::StrideD strides(Problem const& problem) {
  Gemm::StrideD made{};
  cute::get<0>(made) = problem.shape_C[Problem::RankT - 1];
  return made;
}"""
TAPS = """\
CUTLASS_HOST_DEVICE Gemm::StrideD strides(Problem const& problem) {
  Gemm::StrideD made{};
  cute::get<0>(made) = problem.stride_C[0];
  cute::get<1, 1>(made) = problem.stride_C[Problem::RankT - 2];
  cute::get<1, 2>(made) = problem.stride_C[Problem::RankT - 3];
  if constexpr (Problem::RankS == 3) { cute::get<1, Problem::RankS>(made) = problem.stride_C[1]; }
  return made;
}"""


def emit(spec: ConvSpec) -> Source:
    """The source of a kernel; Refused if CUTLASS has none for the epilogue."""
    operands = dict(spec.operands)
    filters = spec.mode == "bwd_filter"
    others = [name for name, operand in operands.items() if operand.kind != "scalar"]
    if filters and others:
        raise Refused(f"needs an epilogue of scalars for the gradient of filters, has {', '.join(others)}", Kind.RULE)
    tree = lower(spec.epilogue, operands, spec.d, spec.c)
    words = (*problem_words(spec.dims), *WORDS, *tree.words)
    kernel = KERNEL.replace("COUNT", str(len(words))).replace("ARGUMENTS", tree.arguments)
    kernel = kernel.replace("SOURCE", C_ARGUMENTS if spec.c is not None else "")
    kernel = kernel.replace("WORKSPACE", STREAM_K_WORKSPACE if spec.scheduler == "stream_k" else "0, 0")
    places = ", ".join(f"{word.name.replace('.', '_')}_ = {place}" for place, word in enumerate(words))
    types = _types(spec, tree.type, tree.declarations)
    needs_support = any("cudabind::" in text for text in (*tree.declarations, tree.arguments))
    texts = [PROLOGUE, INCLUDES, IM2COL, SUPPORT if needs_support else WORDS_ALONE, CONV_MAINLOOP]
    texts += ["namespace {", types, TAPS if filters else ROWS]
    return Source("\n".join([*texts, f"enum Place {{ {places} }};", "}", kernel]), words)


def _types(spec: ConvSpec, visitor: str, declarations: list[str]) -> str:
    """The collectives and the kernel's type. A mode of several axes is tiled along its channels, as its tile shows."""
    m, n, k = (f"cute::_{extent}" for extent in spec.tile)
    filters = spec.mode == "bwd_filter"
    tile = f"{m}, cute::Shape<{n}>, {k}" if filters else f"{m}, {n}, cute::Shape<{k}>"
    cluster = ", ".join(f"cute::_{extent}" for extent in (*spec.cluster, 1))
    layout = FILTER[spec.dims] if filters else "cutlass::layout::RowMajor"
    c = "void" if spec.c is None else ELEMENT[spec.c]
    align, align_d = 128 // spec.dtype.bits, 128 // spec.d.bits
    return f"""\
using Element = {ELEMENT[spec.dtype]};
using ElementC = {c};
using ElementD = {ELEMENT[spec.d]};
using Tile = cute::Shape<{tile}>;
using Cluster = cute::Shape<{cluster}>;
using Descriptor = cutlass::epilogue::collective::detail::EpilogueDescriptor<
    Tile, cutlass::epilogue::collective::EpilogueTileAuto, ElementC, ElementD, {EPILOGUE[spec.schedule]}>;
{chr(10).join(declarations)}
using Visitor = {visitor};
using Epilogue = cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float,
    ElementC, {layout}, {align_d}, ElementD, {layout}, {align_d}, {EPILOGUE[spec.schedule]}, Visitor>::CollectiveOp;
using Built = cutlass::conv::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, cutlass::conv::Operator::{MODES[spec.mode]},
    Element, {IMAGE[spec.dims]}, {align}, Element, {IMAGE[spec.dims]}, {align}, float, Tile, Cluster,
    cutlass::conv::collective::StageCountAutoCarveout<int(sizeof(Epilogue::SharedStorage))>,
    cutlass::conv::KernelImplicitTmaWarpSpecializedSm90>;
using Mainloop = cudabind::ConvMainloop<Built, {MAINLOOP[spec.schedule]}, {WARP_GROUPS[spec.schedule]}>;
using Problem = Mainloop::Problem;
struct Gemm : cutlass::gemm::kernel::GemmUniversal<
    decltype(cudabind::implicit_extents(Problem{{}})), Mainloop, Epilogue, {SCHEDULER[spec.scheduler]}> {{}};
constexpr uint32_t Subtiles = Epilogue::get_store_pipe_increment(Tile{{}});"""
