"""A convolution's parameters without a GPU: `fill`, compiled for the CPU by g++, against tensor maps derived by hand.

CUTLASS's host code asks the driver for tensor maps, and the driver here writes down what it is asked, as the record of
a kernel would. So the words of a request, their order in the source, and what params.py learns are tried in earnest.
"""

import ctypes
import shutil
import subprocess

import numpy as np
import pytest

import dispatch as dp
from dispatch.keys import Arch
from dispatch.libraries.cutlass import headers
from dispatch.libraries.cutlass.emit import sm80_conv as emit_conv80
from dispatch.libraries.cutlass.emit.sm90_conv import emit
from dispatch.libraries.cutlass.im2col import IM2COL
from dispatch.libraries.cutlass.params import Im2colMap, Template, TensorMap, stand_ins
from dispatch.ops.conv import channels_last
from dispatch.ops.conv.config import MEDIUM
from dispatch.ops.conv.cutlass import spec_of
from dispatch.ops.conv.problem import words_of
from dispatch.ops.conv.sm80 import spec_of as multistage_spec

try:
    headers.find()
    MISSING = "" if shutil.which("g++") else "g++ is not installed"
except headers.HeadersMissing as missing:
    MISSING = str(missing)
# Ten seconds of one core for g++, which a busy machine makes many times that.
pytestmark = [pytest.mark.compiles, pytest.mark.skipif(bool(MISSING), reason=MISSING), pytest.mark.timeout(600)]

# What CUDA's own compilers know without being told; none of it is called.
DEVICE = r"""
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#include <cmath>
#include <cstring>
#include <cuda.h>
#include <cuda_runtime.h>
static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
inline void __syncthreads() {}
inline void __syncwarp(unsigned = 0) {}
template <class T> T __shfl_sync(unsigned, T x, int, int = 32) { return x; }
template <class T> T __shfl_down_sync(unsigned, T x, int, int = 32) { return x; }
template <class T> T __shfl_xor_sync(unsigned, T x, int, int = 32) { return x; }
inline void __threadfence() {}
inline int atomicMin(int*, int) { return 0; }
inline unsigned atomicMax(unsigned*, unsigned) { return 0; }
inline float __int_as_float(int) { return 0; }
inline int __float_as_int(float) { return 0; }
inline float __uint_as_float(unsigned) { return 0; }
inline unsigned __float_as_uint(float) { return 0; }
inline int __syncthreads_and(int x) { return x; }
namespace cutlass::arch {
inline int SmId() { return 0; }
inline int LaneId() { return 0; }
}
extern "C" cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return cudaSuccess; }
extern "C" cudaError_t cudaGetLastError() { return cudaSuccess; }
extern "C" cudaError_t cudaDeviceGetAttribute(int*, cudaDeviceAttr, int) { return cudaSuccess; }
extern "C" cudaError_t cudaGetDevice(int*) { return cudaSuccess; }
"""

# A driver that writes down what it is asked for, in the layouts that params.py reads.
DRIVER = r"""
struct Writer {
  char* at;
  template <class T, class S> void put(int place, S value) { T x = T(value); memcpy(at + place, &x, sizeof x); }
};
static Writer begin(
    CUtensorMap* map, unsigned long long magic, unsigned rank, void* address, cuuint64_t const* sizes,
    cuuint64_t const* strides) {
  Writer to{memset(map, 0, 128) ? (char*)map : nullptr};
  to.put<unsigned long long>(0, magic);
  to.put<void*>(8, address);
  for (unsigned i = 0; i < rank; ++i) { to.put<unsigned>(16 + 4 * i, sizes[i]); }
  for (unsigned i = 0; i + 1 < rank; ++i) { to.put<unsigned long long>(40 + 8 * i, strides[i]); }
  return to;
}
extern "C" CUresult cuTensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, cuuint64_t const* sizes,
    cuuint64_t const* strides, cuuint32_t const* box, cuuint32_t const* steps, CUtensorMapInterleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  Writer to = begin(map, TILED_MAGIC, rank, address, sizes, strides);
  for (unsigned i = 0; i < rank; ++i) { to.put<short>(72 + 2 * i, box[i]); to.put<char>(82 + i, steps[i]); }
  to.put<char>(87, rank); to.put<char>(88, swizzle); to.put<char>(90, type);
  return CUDA_SUCCESS;
}
extern "C" CUresult cuTensorMapEncodeIm2col(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, cuuint64_t const* sizes,
    cuuint64_t const* strides, int const* lower, int const* upper, cuuint32_t channels, cuuint32_t pixels,
    cuuint32_t const* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
    CUtensorMapFloatOOBfill) {
  Writer to = begin(map, IM2COL_MAGIC, rank, address, sizes, strides);
  for (unsigned i = 0; i + 2 < rank; ++i) { to.put<int>(72 + 4 * i, lower[i]); to.put<int>(84 + 4 * i, upper[i]); }
  to.put<short>(96, channels); to.put<short>(98, pixels);
  for (unsigned i = 0; i < rank; ++i) { to.put<char>(100 + i, steps[i]); }
  to.put<char>(105, rank); to.put<char>(106, swizzle); to.put<char>(108, type);
  return CUDA_SUCCESS;
}
"""

X, W = (2, 72, 15, 17), (136, 72, 3, 2)
PAD, DILATION = ((1, 2), (0, 1)), (1, 3)


def zeros(*shape):
    return channels_last(dp.device("host").array(np.zeros(shape), "bf16"))


def requests():
    y = dp.ConvFwdRequest(zeros(*X), zeros(*W), pad=PAD, dilation=DILATION).y_shape
    steps = {"pad": PAD, "dilation": DILATION, "config": MEDIUM}
    return {
        "fwd": dp.ConvFwdRequest(zeros(*X), zeros(*W), stride=(2, 1), **steps),
        "bwd_data": dp.ConvBwdDataRequest(zeros(*y), zeros(*W), **steps),
        "bwd_filter": dp.ConvBwdFilterRequest(zeros(*y), zeros(*X), w_extents=W[2:], z=zeros(*W), beta=0.5, **steps),
    }


def for_the_cpu(sources, types):
    """One text of several sources: what they begin with, each one's types and `fill` in a namespace of its own.

    `types` is the line that ends what they begin with.
    """
    wanted = "#include " + IM2COL[IM2COL.index('"cute/atom/copy_traits_sm90_im2col.hpp"') :]
    texts = [DEVICE, DRIVER]
    for name, source in sources.items():
        head, _, rest = source.text.partition(types)
        own, _, rest = rest.partition('extern "C" __global__ void __launch_bounds__')
        fill = rest[rest.index("// One thread:") : rest.index('extern "C" __global__ void scale')]
        begin = head.index("// What CUTLASS takes from namespace std")  # here namespace std is the real one
        head = head[:begin] + head[head.index("#include", begin) :].replace(IM2COL, wanted)
        fill = fill.replace("void fill(", f"void {name}(")
        texts += [head] if head not in texts else []
        texts.append(f"namespace {name} {{\n{types}\n{own}\n{fill}\n}}")
    return "\n".join(texts)


def built(text, folder):
    """A library of a text, by g++."""
    # The header of the first tensor cores wants a compiler that knows them; nothing here needs it.
    (folder / "cutlass/arch").mkdir(parents=True)
    (folder / "cutlass/arch/wmma.h").write_text("#pragma once\n")
    (folder / "fill.cpp").write_text(text)
    magic = ["-DTILED_MAGIC=0x70616d5f726f736eull", "-DIM2COL_MAGIC=0x6d5f6c6f63326d69ull"]
    options = ["-std=c++17", "-O0", "-w", "-fpermissive", "-shared", "-fPIC", "-DNDEBUG", *magic]
    options += ["-DCUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL", "-DCUTLASS_UINT128_NATIVE", f"-I{folder}"]
    options += [f"-I{path}" for path in headers.find().include]
    command = ["g++", *options, str(folder / "fill.cpp"), "-o", str(folder / "fill.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]
    return ctypes.CDLL(str(folder / "fill.so"))


@pytest.fixture(scope="module")
def parameters(tmp_path_factory):
    """For each mode, what its `fill` gives: the template that is learned from it, and the facts of its launch."""
    asked = requests()
    sources = {name: emit(spec_of(request, Arch(90), MEDIUM)) for name, request in asked.items()}
    library = built(for_the_cpu(sources, "\nnamespace {\n"), tmp_path_factory.mktemp("fill"))
    found = {}
    for name, request in asked.items():
        values = {**words_of(request, 132), "swizzle": 1}
        found[name] = learn(getattr(library, name), sources[name].words, values)
    return found


def learn(fill, words, values):
    class Words(ctypes.Structure):
        _fields_ = [("words", ctypes.c_int64 * len(words))]

    fill.argtypes = [Words, ctypes.c_void_p, ctypes.c_void_p]
    fill.restype = None
    images = []
    for which in (0, 1, 0):
        memory, facts = (ctypes.c_uint8 * 4160)(), (ctypes.c_int64 * 9)()
        start = -(-ctypes.addressof(memory) // 64) * 64
        fill(Words((ctypes.c_int64 * len(words))(*stand_ins(words, values, which))), start, ctypes.addressof(facts))
        images.append(ctypes.string_at(start, facts[0]))
    first, second, again = images
    padding = frozenset(o for o in range(0, len(first), 4) if first[o : o + 4] != again[o : o + 4])
    return Template.learn(words, (first, second), padding), tuple(facts)


def maps_of(template):
    """By operand, without where they stand in the parameters."""
    return {found.word: found._replace(offset=0) for found in template.maps}


BF16_BYTES, UINT16, SWIZZLE_64B, SWIZZLE_128B = 2, 1, 2, 3
Y = (2, 136, 16, 15)  # with stride 1: 15 + 1 + 2 - 2, 17 + 1 - 3


def pixels(channels, height, width):
    """Steps in bytes of an image: from pixel to pixel, row to row, image to image."""
    return tuple(BF16_BYTES * channels * n for n in (1, width, width * height))


def test_forward_steps_over_x_from_the_padding_on(parameters):
    template, facts = parameters["fwd"]
    x, w, y = (maps_of(template)[name] for name in ("a", "b", "out"))
    assert x == Im2colMap(
        0, "a", UINT16, 4, (72, 17, 15, 2), pixels(72, 15, 17),
        lower=(-0, -1), upper=(1 - 1 * 3, 2 - 2 * 1), channels=64, pixels=128, steps=(1, 1, 2, 1), swizzle=SWIZZLE_128B,
    )  # fmt: skip
    # A filter (K, R, S, C) as C, K, S, R; each block of the cluster fetches half of the tile's filters.
    steps = tuple(BF16_BYTES * n for n in (72 * 6, 72, 72 * 2))
    assert w == TensorMap(0, "b", UINT16, 4, (72, 136, 2, 3), steps, (64, 64, 1, 1), (1, 1, 1, 1), SWIZZLE_128B)
    assert (y.sizes[:2], y.strides[0]) == ((136, 2 * 8 * 15), BF16_BYTES * 136)
    assert template.pointers == ()
    assert [name for _, name in template.numbers] == ["alpha.value"]
    size, shared, threads, *grid, _, _, _ = facts
    assert (size, threads, grid) == (len(template.image), 3 * 128, [2, 2, 1])
    assert 0 < shared <= 227 << 10


def test_the_gradient_of_the_data_steps_backwards(parameters):
    """DX at h is the sum over taps of DY at h + pad - tap · dilation: windows begin where the last tap lies."""
    template, _ = parameters["bwd_data"]
    dy, w, dx = (maps_of(template)[name] for name in ("a", "b", "out"))
    lower = (0 - 1 * 3, 1 - 2 * 1)
    assert dy == Im2colMap(
        0, "a", UINT16, 4, (136, 15, 16, 2), pixels(136, 16, 15),
        lower=lower, upper=(lower[0] + 17 - 15, lower[1] + 15 - 16), channels=64, pixels=128, steps=(1, 1, 1, 1),
        swizzle=SWIZZLE_128B,
    )  # fmt: skip
    steps = tuple(BF16_BYTES * n for n in (72 * 6, 72, 72 * 2))
    assert (w.sizes, w.strides) == ((72, 136, 2, 3), steps)
    assert (dx.sizes[:2], dx.strides[0]) == ((72, 2 * 15 * 17), BF16_BYTES * 72)


def test_the_gradient_of_filters_multiplies_pixels(parameters):
    template, facts = parameters["bwd_filter"]
    found = maps_of(template)
    dy, x, c, dw = (found[name] for name in ("a", "b", "c", "out"))
    assert (dy.sizes[:2], dy.strides[0]) == ((136, 2 * 16 * 15), BF16_BYTES * 136)
    assert (x.sizes, x.lower, x.upper, x.steps) == ((72, 17, 15, 2), (0, -1), (1 - 1 * 3, 2 - 2 * 1), (1, 1, 1, 1))
    # The result as C, K, S, R: channels and taps are one mode of the product.
    assert (dw.sizes[:4], dw.strides[:3]) == ((72, 136, 2, 3), tuple(BF16_BYTES * n for n in (72 * 6, 72, 72 * 2)))
    assert (c.sizes, c.strides) == (dw.sizes, dw.strides)
    assert {name for _, name in template.numbers} == {"alpha.value", "beta.value"}
    assert facts[3] * facts[4] * facts[5] == 2 * 6  # two tiles of filters, one of channels for each of six taps


# -- multistage kernels, whose parameters begin with the problem ------------------------------------------------------
def multistage_requests():
    steps = {"pad": PAD, "stride": (2, 3), "dilation": DILATION}
    volume = {"pad": ((1, 0), 1, (0, 2)), "stride": (2, 1, 3)}
    return {
        "image": dp.ConvFwdRequest(zeros(*X), zeros(*W), **steps),
        "volume": dp.ConvBwdDataRequest(
            zeros(2, 32, 2, 8, 4), zeros(32, 16, 3, 2, 1), x_extents=(5, 7, 9), z=zeros(2, 16, 5, 7, 9), **volume
        ),
    }


def test_a_multistage_kernel_knows_its_problem(tmp_path):
    """In the order of Conv2dProblemSize and Conv3dProblemSize, which the kernels' parameters begin with."""
    asked = multistage_requests()
    sources = {name: emit_conv80.emit(multistage_spec(request, Arch(90), 132)) for name, request in asked.items()}
    library = built(for_the_cpu(sources, "\nstruct Words {"), tmp_path)
    found = {}
    for name, request in asked.items():
        values = {**words_of(request, 132), "alpha": 1, "beta": 1}
        found[name], facts = learn(getattr(library, name), sources[name].words, values)
        assert facts[0] == len(found[name].image)
        assert facts[2] == 4 * 32  # four warps to a small tile
    n_h_w_c, p_q, k_r_s = (2, 15, 17, 72), (8, 5), (136, 3, 2)
    flat = np.frombuffer(found["image"].image, np.int32, 18)
    assert tuple(flat) == (
        *n_h_w_c,
        *p_q,
        *k_r_s,
        1,
        0,
        2,
        3,
        1,
        3,
        0,
        1,
        1,
    )  # pad, stride, dilation, mode, slices, groups
    solid = np.frombuffer(found["volume"].image, np.int32, 24)
    assert tuple(solid[:18]) == (2, 7, 9, 16, 8, 4, 32, 2, 1, 1, 0, 1, 3, 1, 1, 0, 1, 1)
    assert tuple(solid[18:]) == (5, 3, 2, 1, 2, 1)  # D, T, Z; its padding, stride and dilation
    names = {"a", "b", "out", "alpha", "beta"}
    assert {name for _, name in found["image"].pointers} == names
    assert {name for _, name in found["volume"].pointers} == names | {"c"}
