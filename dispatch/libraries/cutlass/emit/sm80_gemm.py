"""The source of a kernel for sm_80 and newer: CUTLASS's multistage GEMM, which needs no tensor maps.

It serves what Hopper's own kernels do not: float64, older GPUs, and operands whose lines are not 16 bytes apart. Its
epilogue is alpha · A · B + beta · C, with both scalars read on the device. Nothing here calls a library.
"""

from __future__ import annotations

from dataclasses import dataclass

from dispatch.keys import BF16, F16, F32, F64, I8, I32, Arch, Dtype
from dispatch.libraries.cutlass.emit.sm90_gemm import PROLOGUE, Source
from dispatch.libraries.cutlass.visitors import ELEMENT, STRIDE, Word

__all__ = ["TILES", "MultistageSpec", "emit"]


@dataclass(frozen=True)
class MultistageSpec:
    """The key of a multistage kernel's compilation, without M, N and K.

    Attributes:
        arch: the architecture to compile for, sm_80 or newer.
        a, b, d: the dtypes; C is of D's.
        orders: "row" or "column" for each of a, b; C and D have dense rows.
        alignment: bytes that each operand's lines and extents are multiples of, for each of a, b, c and d.
        source: whether C is read.
        small: whether the tile is the smaller one of the dtype's two.
    """

    arch: Arch
    a: Dtype
    b: Dtype
    d: Dtype
    orders: tuple[str, str]
    alignment: tuple[int, int, int]
    source: bool
    small: bool

    @property
    def target(self) -> str:
        """The architecture that NVRTC compiles for."""
        return f"sm_{int(self.arch)}"

    @property
    def accumulator(self) -> Dtype:
        """The dtype of sums, and of alpha and beta."""
        return F64 if self.a is F64 else I32 if self.a is I8 else F32


# Threadblock and warp tile of the large and the small kernel, the instruction, and the stages of the pipeline.
TILES: dict[Dtype, tuple[tuple[str, str], tuple[str, str], str, int]] = {
    F64: (("128, 64, 16", "64, 32, 16"), ("32, 32, 16", "16, 16, 16"), "8, 8, 4", 3),
    F32: (("128, 128, 16", "64, 64, 16"), ("64, 64, 16", "32, 32, 16"), "16, 8, 8", 3),
    F16: (("128, 128, 32", "64, 64, 32"), ("64, 64, 32", "32, 32, 32"), "16, 8, 16", 4),
    BF16: (("128, 128, 32", "64, 64, 32"), ("64, 64, 32", "32, 32, 32"), "16, 8, 16", 4),
    I8: (("128, 128, 64", "64, 64, 64"), ("64, 64, 64", "32, 32, 64"), "16, 8, 32", 3),
}

# fmt: off
WORDS = (
    Word("m"), Word("n"), Word("k"), Word("batches"), Word("multiprocessors"),
    Word("a", "pointer"), Word("a.pitch"), Word("a.batch"), Word("b", "pointer"), Word("b.pitch"), Word("b.batch"),
    Word("c", "pointer"), Word("c.pitch"), Word("c.batch"), Word("out", "pointer"), Word("out.pitch"),
    Word("out.batch"), Word("alpha", "pointer"), Word("beta", "pointer"),
)
# fmt: on

TEXT = """\
#include "cutlass/cutlass.h"
#include "cutlass/gemm/kernel/default_gemm_universal.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle.h"

struct Words {{
  int64_t words[{count}];
  CUTLASS_HOST_DEVICE int64_t integer(int i) const {{ return words[i]; }}
  CUTLASS_HOST_DEVICE void* pointer(int i) const {{ return (void*)words[i]; }}
}};
enum Place {{ {places} }};

using Scalar = {scalar};
using Combination = cutlass::epilogue::thread::LinearCombination<{d}, {align_d}, {scalar}, Scalar{scale}>;
using Gemm = cutlass::gemm::kernel::DefaultGemmUniversal<
    {a}, {order_a}, cutlass::ComplexTransform::kNone, {align_a},
    {b}, {order_b}, cutlass::ComplexTransform::kNone, {align_b},
    {d}, cutlass::layout::RowMajor, {scalar}, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
    cutlass::gemm::GemmShape<{tile}>, cutlass::gemm::GemmShape<{warp}>, cutlass::gemm::GemmShape<{instruction}>,
    Combination, cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<4>, {stages},
    {operation}>::GemmKernel;

extern "C" __global__ void __launch_bounds__(Gemm::kThreadCount) gemm(Gemm::Params params) {{
  extern __shared__ int shared[];
  Gemm::invoke(params, *reinterpret_cast<Gemm::SharedStorage*>(shared));
}}

// One thread: the kernel's parameters for these words, and how it is launched.
extern "C" __global__ void fill(Words in, Gemm::Params* params, int64_t* launch) {{
  int const batches = int(in.integer(batches_));
  Gemm::Arguments arguments(
      batches > 1 ? cutlass::gemm::GemmUniversalMode::kBatched : cutlass::gemm::GemmUniversalMode::kGemm,
      {{int(in.integer(m_)), int(in.integer(n_)), int(in.integer(k_))}}, batches,
      Combination::Params((Scalar const*)in.pointer(alpha_), (Scalar const*)in.pointer(beta_)),
      in.pointer(a_), in.pointer(b_), in.pointer(c_), in.pointer(out_),
      in.integer(a_batch_), in.integer(b_batch_), in.integer(c_batch_), in.integer(out_batch_),
      in.integer(a_pitch_), in.integer(b_pitch_), in.integer(c_pitch_), in.integer(out_pitch_));
  *params = Gemm::Params(arguments, int(in.integer(multiprocessors_)), 1);
  dim3 const grid = params->get_grid_dims();
  int64_t const facts[] = {{
      int64_t(sizeof(Gemm::Params)), int64_t(sizeof(Gemm::SharedStorage)), Gemm::kThreadCount, grid.x, grid.y, grid.z,
      1, 0, 0}};
  for (int i = 0; i < 9; ++i) {{ launch[i] = facts[i]; }}
}}

extern "C" __global__ void scale(float*, int64_t, float) {{}}
"""


def emit(spec: MultistageSpec) -> Source:
    """The source of a multistage kernel."""
    tiles, warps, instruction, stages = TILES[spec.a]
    bits = {"a": spec.a.bits, "b": spec.b.bits, "d": spec.d.bits}
    align = {name: str(size * 8 // bits[name]) for name, size in zip("abd", spec.alignment, strict=True)}
    operation = "OpMultiplyAddSaturate" if spec.a is I8 else "OpMultiplyAdd"
    text = TEXT.format(
        count=len(WORDS),
        places=", ".join(f"{word.name.replace('.', '_')}_ = {place}" for place, word in enumerate(WORDS)),
        scalar=ELEMENT[spec.accumulator],
        scale="" if spec.source else ", cutlass::epilogue::thread::ScaleType::OnlyAlphaScaling",
        a=_operand(spec.a),
        b=_operand(spec.b),
        d=ELEMENT[spec.d],
        order_a=STRIDE[spec.orders[0]],
        order_b=STRIDE[spec.orders[1]],
        align_a=align["a"],
        align_b=align["b"],
        align_d=align["d"],
        tile=tiles[spec.small],
        warp=warps[spec.small],
        instruction=instruction,
        stages=stages,
        operation=f"cutlass::arch::{operation}",
    )
    return Source(f"{PROLOGUE}{text}", WORDS)


def _operand(dtype: Dtype) -> str:
    """f32 operands are read unchanged and rounded to TF32 by the tensor cores."""
    return "cutlass::tfloat32_t" if dtype is F32 else ELEMENT[dtype]
