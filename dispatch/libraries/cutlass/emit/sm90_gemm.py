"""The CUDA C++ source of a kernel, from its spec: element types, orders, tile, cluster, epilogue tree.

The plans of `dispatch.ops` request it, compile.py compiles it. A source has three entry points: `gemm`; `fill`, which
one thread runs to write the kernel's parameters; `scale`, which turns sums into means. It contains no extents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dispatch.keys import F32, I32, Arch, Dtype
from dispatch.libraries.cutlass.visitors import ELEMENT, STRIDE, Operand, Visitors, Word, lower

if TYPE_CHECKING:
    from dispatch.libraries.cutlass.evt import Node

__all__ = ["GemmSpec", "Source", "emit"]


@dataclass(frozen=True)
class GemmSpec:
    """The key of a GEMM kernel's compilation, without M, N and K.

    Attributes:
        arch: the architecture; sm_90 is compiled for sm_90a, whose instructions these kernels use.
        a, b, c, d: the dtypes; c is None if the epilogue reads no source.
        orders: "row" or "column" for each of a, b, c, d: which of their lines are dense.
        tile: the part of the product that one thread block computes, (m, n, k).
        cluster: thread blocks that share loads, along m and n.
        schedule: "cooperative", "pingpong" or "basic", CUTLASS's warp-specialized kernels.
        scheduler: "persistent" or "stream_k".
        tf32: whether f32 operands are rounded to TF32 for the tensor cores.
        fast_accumulation: fp8 only: sums stay in the tensor cores' own precision.
        epilogue: the tree, and the kinds and dtypes of its operands.
    """

    arch: Arch
    a: Dtype
    b: Dtype
    c: Dtype | None
    d: Dtype
    orders: tuple[str, str, str, str]
    tile: tuple[int, int, int]
    cluster: tuple[int, int]
    schedule: str
    scheduler: str
    epilogue: Node
    operands: tuple[tuple[str, Operand], ...] = ()
    tf32: bool = False
    fast_accumulation: bool = False

    @property
    def accumulator(self) -> Dtype:
        """The dtype of sums."""
        return I32 if self.a.numpy.kind == "i" else F32

    @property
    def target(self) -> str:
        """The architecture that NVRTC compiles for."""
        return f"sm_{int(self.arch)}a"


@dataclass(frozen=True)
class Source:
    """A kernel's text, and the words that `fill` reads, in their order."""

    text: str
    words: tuple[Word, ...]


# fmt: off
GEMM_WORDS = (
    Word("m"), Word("n"), Word("k"), Word("batches"), Word("multiprocessors"), Word("clusters"),
    Word("swizzle"), Word("raster"), Word("workspace", "pointer"),
    Word("a", "pointer"), Word("a.pitch"), Word("a.batch"),
    Word("b", "pointer"), Word("b.pitch"), Word("b.batch"), Word("c", "pointer"), Word("c.pitch"), Word("c.batch"),
    Word("out", "pointer"), Word("out.pitch"), Word("out.batch"),
)
# fmt: on

PROLOGUE = """\
#include <cuda/std/limits>
#include <cuda/std/type_traits>
// What CUTLASS takes from namespace std, and NVRTC does not have.
namespace std {
template <class...> using void_t = void;
template <class T> inline constexpr bool is_pointer_v = ::cuda::std::is_pointer_v<T>;
template <class T> inline constexpr bool is_const_v = ::cuda::std::is_const_v<T>;
}
"""

INCLUDES = """\
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"
"""

SUPPORT = """\
namespace cudabind {
constexpr float highest = ::cuda::std::numeric_limits<float>::infinity();
constexpr float lowest = -highest;

// An element type's own comparison would pass over NaN or not as the hardware likes: these keep it, as NumPy does.
template <class T> struct larger {
  CUTLASS_HOST_DEVICE T operator()(T const& x, T const& y) const { return x > y || x != x ? x : y; }
};
template <class T> struct smaller {
  CUTLASS_HOST_DEVICE T operator()(T const& x, T const& y) const { return x < y || x != x ? x : y; }
};
template <> struct larger<float> {
  CUTLASS_HOST_DEVICE float operator()(float x, float y) const {
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
  }
};
template <> struct smaller<float> {
  CUTLASS_HOST_DEVICE float operator()(float x, float y) const {
    float z;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
  }
};
template <class T, int N> struct larger<cutlass::Array<T, N>> {
  CUTLASS_HOST_DEVICE cutlass::Array<T, N> operator()(
      cutlass::Array<T, N> const& x, cutlass::Array<T, N> const& y) const {
    cutlass::Array<T, N> z;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N; ++i) { z[i] = larger<T>{}(x[i], y[i]); }
    return z;
  }
};
template <class T, int N> struct smaller<cutlass::Array<T, N>> {
  CUTLASS_HOST_DEVICE cutlass::Array<T, N> operator()(
      cutlass::Array<T, N> const& x, cutlass::Array<T, N> const& y) const {
    cutlass::Array<T, N> z;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N; ++i) { z[i] = smaller<T>{}(x[i], y[i]); }
    return z;
  }
};
// The first operand is the largest magnitude so far.
template <class T> struct magnitude {
  CUTLASS_HOST_DEVICE T operator()(T const& x, T const& y) const { return larger<T>{}(x, y < T(0) ? -y : y); }
};
template <> struct magnitude<float> {
  CUTLASS_HOST_DEVICE float operator()(float x, float y) const { return larger<float>{}(x, ::fabsf(y)); }
};
template <class T, int N> struct magnitude<cutlass::Array<T, N>> {
  CUTLASS_HOST_DEVICE cutlass::Array<T, N> operator()(
      cutlass::Array<T, N> const& x, cutlass::Array<T, N> const& y) const {
    cutlass::Array<T, N> z;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N; ++i) { z[i] = magnitude<T>{}(x[i], y[i]); }
    return z;
  }
};
// Floats compare as integers of the same sign, and in reverse among negative ones; of NaN one comes first that is
// neither: all bits set, which is -1 and the largest there is without a sign.
template <class T> struct atomic_minimum;
template <> struct atomic_minimum<float> {
  CUTLASS_DEVICE float operator()(float* address, float value) const {
    if (value != value) { return __uint_as_float(atomicMax((unsigned*)address, 0xffffffffu)); }
    return !::signbit(value) ? __int_as_float(atomicMin((int*)address, __float_as_int(value)))
                             : __uint_as_float(atomicMax((unsigned*)address, __float_as_uint(value)));
  }
};

template <class S> CUTLASS_HOST_DEVICE S stride(int64_t pitch, int64_t batch) {
  S made{};
  if constexpr (!cute::is_static_v<decltype(cute::get<0>(made))>) { cute::get<0>(made) = pitch; }
  if constexpr (!cute::is_static_v<decltype(cute::get<1>(made))>) { cute::get<1>(made) = pitch; }
  cute::get<2>(made) = batch;
  return made;
}

template <int N> struct Words {
  int64_t words[N];
  CUTLASS_HOST_DEVICE int64_t integer(int i) const { return words[i]; }
  CUTLASS_HOST_DEVICE void* pointer(int i) const { return (void*)words[i]; }
  CUTLASS_HOST_DEVICE float number(int i) const { return *(float const*)&words[i]; }
};
}
template <> struct cutlass::is_atomic<cudabind::atomic_minimum<float>> : cutlass::platform::true_type {};
"""

WHOLE = """\
namespace cudabind {
template <int N> CUTLASS_HOST_DEVICE int32_t whole(Words<N> const& in, int i) { return *(int32_t const*)&in.words[i]; }
}
"""

MAINLOOP = {
    "cooperative": "cutlass::gemm::KernelTmaWarpSpecializedCooperative",
    "pingpong": "cutlass::gemm::KernelTmaWarpSpecializedPingpong",
    "basic": "cutlass::gemm::KernelTmaWarpSpecialized",
}
EPILOGUE = {
    "cooperative": "cutlass::epilogue::TmaWarpSpecializedCooperative",
    "pingpong": "cutlass::epilogue::TmaWarpSpecialized",
    "basic": "cutlass::epilogue::TmaWarpSpecialized",
}
SCHEDULER = {
    "persistent": "cutlass::gemm::PersistentScheduler",
    "stream_k": "cutlass::gemm::StreamKScheduler",
}

KERNEL = """\
extern "C" __global__ void __launch_bounds__(Gemm::MaxThreadsPerBlock, 1)
gemm(__grid_constant__ Gemm::Params const params) {
  extern __shared__ char shared[];
  Gemm{}(params, shared);
}

// One thread: the kernel's parameters for these words, and how it is launched.
extern "C" __global__ void fill(cudabind::Words<WORDS> in, Gemm::Params* params, int64_t* launch) {
  Gemm::Arguments arguments{};
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  arguments.problem_shape = cute::make_shape(
      int(in.integer(m_)), int(in.integer(n_)), int(in.integer(k_)), int(in.integer(batches_)));
  arguments.mainloop.ptr_A = (ElementA const*)in.pointer(a_);
  arguments.mainloop.dA = cudabind::stride<Gemm::StrideA>(in.integer(a_pitch_), in.integer(a_batch_));
  arguments.mainloop.ptr_B = (ElementB const*)in.pointer(b_);
  arguments.mainloop.dB = cudabind::stride<Gemm::StrideB>(in.integer(b_pitch_), in.integer(b_batch_));
  SOURCE
  arguments.epilogue.ptr_D = (ElementD*)in.pointer(out_);
  arguments.epilogue.dD = cudabind::stride<Gemm::StrideD>(in.integer(out_pitch_), in.integer(out_batch_));
  arguments.epilogue.thread = ARGUMENTS;
  arguments.hw_info.sm_count = int(in.integer(multiprocessors_));
  arguments.hw_info.max_active_clusters = int(in.integer(clusters_));
  arguments.scheduler.max_swizzle_size = int(in.integer(swizzle_));
  arguments.scheduler.raster_order = decltype(arguments.scheduler.raster_order)(int(in.integer(raster_)));
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

C_ARGUMENTS = """arguments.epilogue.ptr_C = (ElementC const*)in.pointer(c_);
  arguments.epilogue.dC = cudabind::stride<Gemm::StrideC>(in.integer(c_pitch_), in.integer(c_batch_));"""

# Stream-K's workspace: partial sums, followed by the barriers, which are zero when a kernel starts. Without warp groups
# there are no barriers, so the first number is their offset.
STREAM_K_WORKSPACE = """int64_t(Gemm::TileScheduler::get_workspace_size<Gemm::ProblemShape, Gemm::ElementAccumulator>(
          arguments.scheduler, arguments.problem_shape, arguments.hw_info, 0, Subtiles)),
      int64_t(Gemm::get_workspace_size(arguments))"""


def emit(spec: GemmSpec) -> Source:
    """The source of a kernel; Refused if CUTLASS has none for the epilogue."""
    tree = lower(spec.epilogue, dict(spec.operands), spec.d, spec.c)
    words = (*GEMM_WORDS, *tree.words)
    stream_k = spec.scheduler == "stream_k"
    kernel = KERNEL.replace("WORDS", str(len(words))).replace("ARGUMENTS", tree.arguments)
    kernel = kernel.replace("SOURCE", C_ARGUMENTS if spec.c is not None else "")
    kernel = kernel.replace("WORKSPACE", STREAM_K_WORKSPACE if stream_k else "0, 0")
    places = ", ".join(f"{word.name.replace('.', '_')}_ = {place}" for place, word in enumerate(words))
    support = SUPPORT + (WHOLE if spec.d is I32 else "")
    parts = [PROLOGUE, INCLUDES, support, "namespace {", _types(spec, tree), f"enum Place {{ {places} }};", "}", kernel]
    return Source("\n".join(parts), words)


def _types(spec: GemmSpec, tree: Visitors) -> str:
    """The collectives and the kernel's type."""
    tile = ", ".join(f"cute::_{extent}" for extent in spec.tile)
    cluster = ", ".join(f"cute::_{extent}" for extent in (*spec.cluster, 1))
    a, b = (_operand(dtype, spec) for dtype in (spec.a, spec.b))
    c = "void" if spec.c is None else ELEMENT[spec.c]
    orders = [STRIDE[order] for order in spec.orders]
    alignment = {name: 128 // dtype.bits for name, dtype in (("a", spec.a), ("b", spec.b), ("d", spec.d))}
    alignment["c"] = 128 // (spec.c or spec.d).bits
    mainloop = MAINLOOP[spec.schedule] + ("FP8FastAccum" if spec.fast_accumulation else "")
    accumulator = ELEMENT[spec.accumulator]
    return f"""\
using ElementA = {a};
using ElementB = {b};
using ElementC = {c};
using ElementD = {ELEMENT[spec.d]};
using Tile = cute::Shape<{tile}>;
using Cluster = cute::Shape<{cluster}>;
using Descriptor = cutlass::epilogue::collective::detail::EpilogueDescriptor<
    Tile, cutlass::epilogue::collective::EpilogueTileAuto, ElementC, ElementD, {EPILOGUE[spec.schedule]}>;
{chr(10).join(tree.declarations)}
using Visitor = {tree.type};
using Epilogue = cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, {accumulator}, {"int32_t" if spec.d is I32 else "float"},
    ElementC, {orders[2]}, {alignment["c"]}, ElementD, {orders[3]}, {alignment["d"]},
    {EPILOGUE[spec.schedule]}, Visitor>::CollectiveOp;
using Mainloop = cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, ElementA, {orders[0]}, {alignment["a"]},
    ElementB, {orders[1]}, {alignment["b"]}, {accumulator}, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(Epilogue::SharedStorage))>,
    {mainloop}>::CollectiveOp;
struct Gemm : cutlass::gemm::kernel::GemmUniversal<
    cute::Shape<int, int, int, int>, Mainloop, Epilogue, {SCHEDULER[spec.scheduler]}> {{}};
constexpr uint32_t Subtiles = Epilogue::get_store_pipe_increment(Tile{{}});"""


def _operand(dtype: Dtype, spec: GemmSpec) -> str:
    return "cutlass::tfloat32_t" if spec.tf32 and dtype is F32 else ELEMENT[dtype]
