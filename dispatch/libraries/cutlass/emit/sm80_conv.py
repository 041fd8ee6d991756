"""The source of a multistage convolution for sm_80 and newer: any stride, groups, and channels of 4 bytes or more.

It serves requests that sm90_conv.py's kernels do not support: the gradient of the data with a stride, TF32 gradients,
groups, and channels that are no multiple of 16 bytes. Its epilogue is alpha and beta. This file calls no library.
"""

from __future__ import annotations

from dataclasses import dataclass

from dispatch.keys import F32, Arch, Dtype
from dispatch.libraries.cutlass.emit.sm80_gemm import TILES
from dispatch.libraries.cutlass.emit.sm90_conv import problem_words
from dispatch.libraries.cutlass.emit.sm90_gemm import PROLOGUE, Source
from dispatch.libraries.cutlass.visitors import ELEMENT, Word

__all__ = ["MultistageConvSpec", "emit"]


@dataclass(frozen=True)
class MultistageConvSpec:
    """The key of a multistage convolution's compilation.

    Attributes:
        arch: the architecture to compile for, sm_80 or newer.
        mode: "fwd", "bwd_data", or "bwd_filter".
        dims: the number of spatial axes, 2 or 3.
        dtype, d: of the operands, and of the result and the source.
        strided: "bwd_data" only: whether the forward has a stride.
        groups: forward and two axes only: "" for one group, "kSingleGroup" if the filters of a group fill tiles of N,
            "kMultipleGroup" if a tile contains several groups.
        alignment: bytes that the channels of the operands, and of the result, are multiples of; 16 for three axes.
        source: whether C is read.
        small: whether the tile is the smaller one of the dtype's two.
    """

    arch: Arch
    mode: str
    dims: int
    dtype: Dtype
    d: Dtype
    strided: bool
    groups: str
    alignment: tuple[int, int]
    source: bool
    small: bool

    @property
    def target(self) -> str:
        """The architecture that NVRTC compiles for."""
        return f"sm_{int(self.arch)}"


MODES = {"fwd": "Fprop", "bwd_data": "Dgrad", "bwd_filter": "Wgrad"}
OPERANDS = {"fwd": ("x", "w", "y"), "bwd_data": ("y", "w", "x"), "bwd_filter": ("y", "x", "w")}
WORDS = (
    Word("a", "pointer"),
    Word("b", "pointer"),
    Word("c", "pointer"),
    Word("out", "pointer"),
    Word("alpha", "pointer"),
    Word("beta", "pointer"),
)
SWIZZLE = "cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<4>"
STRIDED_SWIZZLE = "cutlass::conv::threadblock::StridedDgradIdentityThreadblockSwizzle<4>"

PROBLEM = {
    2: """\
  int const n = at(problem_x0_), h = at(problem_x0_ + 1), w = at(problem_x0_ + 2), c = at(problem_x0_ + 3);
  int const k = at(problem_w0_), r = at(problem_w0_ + 1), s = at(problem_w0_ + 2);
  int const p = at(problem_y0_), q = at(problem_y0_ + 1), groups = at(problem_groups_);
  cutlass::conv::Conv2dProblemSize const problem(
      n, h, w, c, k, r, s, p, q, at(problem_pre0_), at(problem_pre0_ + 1), at(problem_stride0_),
      at(problem_stride0_ + 1), at(problem_dilation0_), at(problem_dilation0_ + 1),
      cutlass::conv::Mode::kCrossCorrelation, 1, groups);
  Layout const x_layout = Layout::packed({n, h, w, c});
  Layout const w_layout = Layout::packed({k, r, s, c / groups});
  Layout const y_layout = Layout::packed({n, p, q, k});""",
    3: """\
  int const n = at(problem_x0_), d = at(problem_x0_ + 1), h = at(problem_x0_ + 2), w = at(problem_x0_ + 3);
  int const c = at(problem_x0_ + 4), k = at(problem_w0_), t = at(problem_w0_ + 1), r = at(problem_w0_ + 2);
  int const s = at(problem_w0_ + 3), z = at(problem_y0_), p = at(problem_y0_ + 1), q = at(problem_y0_ + 2);
  cutlass::conv::Conv3dProblemSize const problem(
      n, d, h, w, c, k, t, r, s, z, p, q, at(problem_pre0_), at(problem_pre0_ + 1), at(problem_pre0_ + 2),
      at(problem_stride0_), at(problem_stride0_ + 1), at(problem_stride0_ + 2), at(problem_dilation0_),
      at(problem_dilation0_ + 1), at(problem_dilation0_ + 2), cutlass::conv::Mode::kCrossCorrelation, 1, 1);
  Layout const x_layout = Layout::packed({n, d, h, w, c});
  Layout const w_layout = Layout::packed({k, t, r, s, c});
  Layout const y_layout = Layout::packed({n, z, p, q, k});""",
}

TEXT = """\
#include "cutlass/cutlass.h"
#include "cutlass/conv/kernel/{header}.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle.h"
#include "cutlass/conv/threadblock/threadblock_swizzle.h"

struct Words {{
  int64_t words[{count}];
  CUTLASS_HOST_DEVICE int64_t integer(int i) const {{ return words[i]; }}
  CUTLASS_HOST_DEVICE void* pointer(int i) const {{ return (void*)words[i]; }}
}};
enum Place {{ {places} }};

using Element = {element};
using ElementD = {d};
using Layout = cutlass::layout::{layout};
using Combination = cutlass::epilogue::thread::LinearCombination<ElementD, {align_d}, float, float{scale}>;
using Swizzle = {swizzle};
using Conv = cutlass::conv::kernel::{kernel}<
    Element, Layout, Element, Layout, ElementD, Layout, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
    cutlass::gemm::GemmShape<{tile}>, cutlass::gemm::GemmShape<{warp}>, cutlass::gemm::GemmShape<{instruction}>,
    Combination, Swizzle, {stages}, cutlass::arch::OpMultiplyAdd,
    {options}>::Kernel;

extern "C" __global__ void __launch_bounds__(Conv::kThreadCount) gemm(Conv::Params params) {{
  extern __shared__ int shared[];
  Conv conv;
  conv(params, *reinterpret_cast<Conv::SharedStorage*>(shared));
}}

// One thread: the kernel's parameters for these words, and how it is launched.
extern "C" __global__ void fill(Words in, Conv::Params* params, int64_t* launch) {{
  auto const at = [&](int place) {{ return int(in.integer(place)); }};
{problem}
  Conv::Arguments const arguments(
      problem, {{(Element*)in.pointer(a_), {a}_layout}}, {{(Element*)in.pointer(b_), {b}_layout}},
      {{(ElementD*)in.pointer(c_), {out}_layout}}, {{(ElementD*)in.pointer(out_), {out}_layout}},
      Combination::Params((float const*)in.pointer(alpha_), (float const*)in.pointer(beta_)));
  *params = Conv::Params(arguments);
  dim3 const grid = Swizzle().get_grid_shape(params->grid_tiled_shape);
  int64_t const facts[] = {{
      int64_t(sizeof(Conv::Params)), int64_t(sizeof(Conv::SharedStorage)), Conv::kThreadCount, grid.x, grid.y, grid.z,
      1, 0, 0}};
  for (int i = 0; i < 9; ++i) {{ launch[i] = facts[i]; }}
}}

extern "C" __global__ void scale(float*, int64_t, float) {{}}
"""


def emit(spec: MultistageConvSpec) -> Source:
    """The source of a multistage convolution."""
    tiles, warps, instruction, stages = TILES[spec.dtype]
    words = (*problem_words(spec.dims), *WORDS)
    name = f"conv{spec.dims}d_{'group_' if spec.groups else ''}{MODES[spec.mode].lower()}"
    kernel = f"DefaultConv{spec.dims}d{'Group' if spec.groups else ''}{MODES[spec.mode]}"
    a, b, out = OPERANDS[spec.mode]
    text = TEXT.format(
        header=f"default_{name}",
        count=len(words),
        places=", ".join(f"{word.name.replace('.', '_')}_ = {place}" for place, word in enumerate(words)),
        element="cutlass::tfloat32_t" if spec.dtype is F32 else ELEMENT[spec.dtype],
        d=ELEMENT[spec.d],
        layout="TensorNHWC" if spec.dims == 2 else "TensorNDHWC",
        align_d=spec.alignment[1] * 8 // spec.d.bits,
        scale="" if spec.source else ", cutlass::epilogue::thread::ScaleType::OnlyAlphaScaling",
        swizzle=STRIDED_SWIZZLE if spec.strided and spec.dims == 2 else SWIZZLE,
        kernel=kernel,
        tile=tiles[spec.small],
        warp=warps[spec.small],
        instruction=instruction,
        stages=stages,
        options=_options(spec),
        problem=PROBLEM[spec.dims],
        a=a,
        b=b,
        out=out,
    )
    return Source(f"{PROLOGUE}{text}", words)


def _options(spec: MultistageConvSpec) -> str:
    """The kernel's iterator options: CUTLASS has a fast iterator for most convolutions, and a general one for all."""
    plain = spec.groups == "kMultipleGroup" or (spec.strided and spec.dims == 3)
    way = f"cutlass::conv::IteratorAlgorithm::{'kAnalytic' if plain else 'kOptimized'}"
    stride = f"cutlass::conv::StrideSupport::{'kStrided' if spec.strided else 'kUnity'}"
    if spec.mode == "bwd_filter":  # the default of this mode, without effect
        stride = "cutlass::conv::StrideSupport::kStrided"
    parts = ([f"cutlass::conv::GroupMode::{spec.groups}"] if spec.groups else []) + [way, stride]
    if spec.dims == 2:
        elements = spec.alignment[0] * 8 // spec.dtype.bits
        parts += [str(elements), str(elements)]
    return ", ".join(parts)
