"""Texts that use CUTLASS's convolution collective as the mainloop of its GEMM kernels, with im2col maps under NVRTC.

sm90_conv.py puts them into a kernel's source. CUTLASS 4.2 has its own convolution kernels for sm_90, but those process
one tile at a time with one warp group. Its collective also fits the persistent GEMM kernels if it declares the names
that they use. This file calls no library.
"""

from __future__ import annotations

__all__ = ["IM2COL", "MAINLOOP"]

# The header of im2col copies asks the driver for a tensor map even under NVRTC. Here the driver's names store a record
# of the arguments in the place of the map: params.py finds it by the magic number, and asks the driver on the host.
IM2COL = r"""
namespace std {
template <class T> inline constexpr bool is_integral_v = ::cuda::std::is_integral_v<T>;
}
#include "cute/atom/copy_traits_sm90_tma.hpp"
#include "cutlass/cuda_host_adapter.hpp"
using CUresult = int;
using CUtensorMapDataType = int;
using CUtensorMapInterleave = int;
using CUtensorMapL2promotion = int;
using CUtensorMapFloatOOBfill = int;
using CUtensorMapSwizzle = int;
constexpr int CU_TENSOR_MAP_INTERLEAVE_NONE = 0;
namespace cute {
namespace TMA {
template <class T> CUTE_HOST_DEVICE constexpr int to_CUtensorMapDataType() { return recorded_format<T>(); }
CUTE_HOST_DEVICE constexpr int to_CUtensorMapSwizzle(SmemSwizzleBits bits, SmemSwizzleBase base) {
  return int(bits) | int(base) << 8;
}
}
template <class T> CUTE_HOST_DEVICE constexpr int to_CUtensorMapL2promotion(T) { return 0; }
template <class T> CUTE_HOST_DEVICE constexpr int to_CUtensorMapFloatOOBfill(T) { return 0; }

template <class Descriptor>
CUTE_HOST_DEVICE int record_im2col_map(
    Descriptor* recorded, int format, uint32_t rank, void* address, uint64_t const* sizes, uint64_t const* strides,
    int32_t const* lower, int32_t const* upper, uint32_t channels, uint32_t pixels, uint32_t const* steps, int,
    int swizzle, int, int) {
  *recorded = {};
  auto* words = reinterpret_cast<uint64_t*>(recorded->bytes);
  auto* extents = reinterpret_cast<uint32_t*>(recorded->bytes + 16);
  auto* pitches = reinterpret_cast<uint64_t*>(recorded->bytes + 40);
  auto* corners = reinterpret_cast<int32_t*>(recorded->bytes + 72);
  auto* box = reinterpret_cast<uint16_t*>(recorded->bytes + 96);
  auto* small = reinterpret_cast<uint8_t*>(recorded->bytes + 100);
  words[0] = 0x6d5f6c6f63326d69ull;
  words[1] = reinterpret_cast<uint64_t>(address);
  for (uint32_t i = 0; i < rank; ++i) {
    extents[i] = static_cast<uint32_t>(sizes[i]);
    small[i] = static_cast<uint8_t>(steps[i]);
    if (i + 1 < rank) { pitches[i] = strides[i]; }
    if (i + 2 < rank) { corners[i] = lower[i]; corners[3 + i] = upper[i]; }
  }
  box[0] = static_cast<uint16_t>(channels);
  box[1] = static_cast<uint16_t>(pixels);
  small[5] = static_cast<uint8_t>(rank);
  small[6] = static_cast<uint8_t>(swizzle & 0xff);
  small[7] = static_cast<uint8_t>(swizzle >> 8);
  small[8] = static_cast<uint8_t>(format);
  return 0;
}
}
#define CUDA_SUCCESS 0
#undef CUTE_HOST
#undef CUTLASS_CUDA_DRIVER_WRAPPER_CALL
#define CUTE_HOST CUTE_HOST_DEVICE
#define CUTLASS_CUDA_DRIVER_WRAPPER_CALL(function) record_im2col_map
#include "cute/atom/copy_traits_sm90_im2col.hpp"
#include "cutlass/conv/convnd_problem_shape.hpp"
#include "cutlass/conv/collective/collective_builder.hpp"
"""

MAINLOOP = r"""
namespace cudabind {
using namespace cute;

// The extents of the implicit product; the pixels that a filter steps over are one mode.
template <cutlass::conv::Operator Op, int Dims>
CUTLASS_HOST_DEVICE constexpr auto implicit_extents(cutlass::conv::ConvProblemShape<Op, Dims> const& problem) {
  auto [m, n, k, l] = cutlass::conv::detail::get_linearized_problem_shape_MNKL(problem);
  return make_shape(int(m), n, k, 1);
}

template <class Extents, class In> CUTLASS_HOST_DEVICE Extents several(In const& in, int place) {
  Extents made{};
  for (int i = 0; i < int(made.size()); ++i) { made[i] = int(in.integer(place + i)); }
  return made;
}

// What a mainloop of GEMM says, said for a convolution: a batch of one, and its own problem among the arguments.
template <class Built, class Schedule_, int WarpGroups>
struct ConvMainloop {
  using Plain = typename Built::CollectiveOp;
  using TileShape = typename Plain::TileShape;
  using TiledMma = decltype(make_tiled_mma(
      GMMA::ss_op_selector<typename Built::ElementAMma, typename Built::ElementBMma, float, TileShape,
          Built::GmmaMajorA, Built::GmmaMajorB>(), Layout<Shape<Int<WarpGroups>, _1, _1>>{}));
  using Base = cutlass::conv::collective::CollectiveConv<
      typename Built::DispatchPolicy, TileShape, typename Plain::ElementA, typename Plain::ElementB, TiledMma,
      cutlass::conv::collective::detail::Sm90ImplicitGemmTileTraits<
          typename Built::GmemTiledCopyA, typename Built::SmemLayoutA>,
      cutlass::conv::collective::detail::Sm90ImplicitGemmTileTraits<
          typename Built::GmemTiledCopyB, typename Built::SmemLayoutB>>;
  struct DispatchPolicy : Built::DispatchPolicy { using Schedule = Schedule_; };
  using Problem = typename Base::ProblemShape;
  using ElementA = typename Base::ElementA;
  using ElementB = typename Base::ElementB;
  using ElementAccumulator = typename Base::ElementAccumulator;
  using ArchTag = typename Base::ArchTag;
  using Params = typename Base::Params;
  using MainloopPipeline = typename Base::MainloopPipeline;
  using PipelineState = typename Base::PipelineState;
  using TensorStorage = typename Base::TensorStorage;
  using PipelineStorage = typename Base::PipelineStorage;
  using StrideA = Stride<int64_t, _1, int64_t>;  // kernels ask for their rank alone
  using StrideB = Stride<int64_t, _1, int64_t>;
  static constexpr uint32_t NumProducerThreadEvents = 1;
  struct Arguments { Problem problem; typename Base::Arguments operands; };

  template <class Extents>
  CUTLASS_HOST_DEVICE static Params to_underlying_arguments(
      Extents const&, Arguments const& arguments, void* workspace) {
    return Base::to_underlying_arguments(arguments.problem, arguments.operands, workspace);
  }
  // Without the driver's header the two kinds of tensor maps are types of their own, and a prefetch takes the other.
  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    cute::prefetch_tma_descriptor((TmaDescriptor const*)params.tma_load_a.get_tma_descriptor());
    cute::prefetch_tma_descriptor((TmaDescriptor const*)params.tma_load_b.get_tma_descriptor());
  }

  template <class T> CUTLASS_DEVICE static auto batched(T const& tensor) {
    return make_tensor(tensor.data(), append<5>(tensor.layout(), Layout<_1, _0>{}));
  }
  template <class Extents> CUTLASS_DEVICE auto load_init(Extents const& extents, Params const& params) const {
    auto tensors = Base{}.load_init(extents, params);
    return make_tuple(batched(get<0>(tensors)), batched(get<1>(tensors)));
  }
  template <class TensorA, class TensorB, class KTiles, class Coordinate>
  CUTLASS_DEVICE void load(
      Params const& params, MainloopPipeline pipeline, PipelineState state, tuple<TensorA, TensorB> const& tensors,
      Coordinate const& coordinate, KTiles tiles, int count, int thread, uint32_t rank, TensorStorage& shared) {
    auto one = make_tuple(get<0>(tensors)(_, _, _, _, _0{}), get<1>(tensors)(_, _, _, _, _0{}));
    Base{}.load(params, pipeline, state, one, coordinate, tiles, count, thread, rank, shared);
  }
  CUTLASS_DEVICE void load_tail(MainloopPipeline pipeline, PipelineState state) { Base{}.load_tail(pipeline, state); }
  template <class Accumulator>
  CUTLASS_DEVICE void mma(
      MainloopPipeline pipeline, PipelineState state, Accumulator& sum, int count, int thread, TensorStorage& shared,
      Params const& params) {
    // The same number for a whole warp group, and known to be: descriptors are then kept in uniform registers.
    int const group = __shfl_sync(0xffffffff, thread / 128, 0) * 128;
    Base{}.mma(pipeline, state, sum, count, group, shared, params);
  }
  CUTLASS_DEVICE void mma_tail(MainloopPipeline pipeline, PipelineState state, int count) {
    Base{}.mma_tail(pipeline, state, count);
  }
};
}
"""
