"""The user's installation of CUTLASS's and CCCL's headers, and the amendments that NVRTC needs to compile them.

compile.py takes the include folders and the amended texts from here. Nothing is copied into this project: an amendment
inserts a few lines into the installed text at compile time, and an error names a text that it does not fit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dispatch.errors import DispatchError

__all__ = ["Headers", "HeadersMissing", "find"]

CUTLASS_VERSIONS = ((4, 2),)  # the amendments below were tested with these versions
CCCL_MAJOR, CCCL_MINOR = 3, 0  # of CUDA 13.0; 3.3's declarations of std::tuple_size clash with those of CUTLASS 4.2
INSTALL = (
    "pip install 'cudabind[cutlass]' (nvidia-cutlass 4.2, nvidia-cuda-cccl 13.0, nvidia-cuda-crt 13), with a CUDA 13"
    " runtime's headers"
)


class HeadersMissing(DispatchError, ImportError):
    """The headers for compiling a kernel are not installed, or have an unsupported version."""


@dataclass(frozen=True)
class Headers:
    """The paths of the headers, their versions, and the texts that NVRTC gets instead of a file's own."""

    include: tuple[str, ...]
    cutlass: str
    cccl: str
    texts: dict[str, str]


@cache
def find() -> Headers:
    """The installed headers, amended; HeadersMissing names what to install."""
    from cuda.pathfinder import find_nvidia_header_directory

    folder_of = {name: find_nvidia_header_directory(name) for name in ("cutlass", "cccl", "cudart")}
    missing = [name for name, folder in folder_of.items() if folder is None]
    if missing:
        raise HeadersMissing(f"CUTLASS kernels need the headers of {', '.join(missing)}: {INSTALL}")
    cutlass, cccl, runtime = (Path(str(folder_of[name])) for name in ("cutlass", "cccl", "cudart"))
    version = _version(cutlass / "cutlass/version.h", "CUTLASS_MAJOR", "CUTLASS_MINOR", "CUTLASS_PATCH")
    if version[:2] not in CUTLASS_VERSIONS:
        versions = ", ".join(".".join(map(str, supported)) for supported in CUTLASS_VERSIONS)
        raise HeadersMissing(f"CUTLASS {_dotted(version)} in {cutlass}; supported versions: {versions}. {INSTALL}")
    packed = _version(cccl / "cuda/std/__cccl/version.h", "CCCL_VERSION")[0]
    collection = (packed // 1_000_000, packed // 1000 % 1000, packed % 1000)
    if collection[:2] != (CCCL_MAJOR, CCCL_MINOR):
        wanted = f"{CCCL_MAJOR}.{CCCL_MINOR}"
        raise HeadersMissing(f"CCCL {_dotted(collection)} in {cccl}; CUTLASS 4.2 compiles with {wanted}. {INSTALL}")
    texts = {name: _amend(cutlass / name, changes) for name, changes in AMENDMENTS.items()}
    # CUTLASS includes <cccl/cuda/std/…> and CCCL itself <cuda/std/…>; the runtime's headers may be elsewhere.
    # Convolution takes the strides of dense tensors from CUTLASS's tools, which the wheel has next to the headers.
    tools = cutlass.parent / "tools/util/include"
    folders = (cutlass, *((tools,) if tools.is_dir() else ()), cccl, cccl.parent, runtime)
    if not any((folder / "crt/mma.h").is_file() for folder in folders):
        raise HeadersMissing(f"crt/mma.h, which the runtime's headers in {runtime} include, does not exist: {INSTALL}")
    return Headers(tuple(dict.fromkeys(map(str, folders))), _dotted(version), _dotted(collection), texts)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:  # another version, or an incomplete installation
        raise HeadersMissing(f"{path} cannot be read: {error}. {INSTALL}") from error


def _version(path: Path, *names: str) -> tuple[int, ...]:
    text = _text(path)
    matches = [re.search(rf"^#\s*define\s+{name}\s+(\d+)", text, re.MULTILINE) for name in names]
    if None in matches:
        raise HeadersMissing(f"{path} does not define {' and '.join(names)}: {INSTALL}")
    return tuple(int(match[1]) for match in matches if match)


def _amend(path: Path, changes: tuple[tuple[str, str, int], ...]) -> str:
    text = _text(path)
    for pattern, replacement, count in changes:
        text, done = re.subn(pattern, replacement, text)
        if done != count:
            raise HeadersMissing(f"{path} differs from CUTLASS 4.2 ({pattern!r} matches {done} times). {INSTALL}")
    return text


# The driver makes a tensor map on the host. Under NVRTC the host's part runs in a one-thread kernel, which stores the
# arguments of the driver's call in the place of the tensor map; params.py finds them by the magic number.
RECORD = r"""
template <class T>
CUTE_HOST_DEVICE constexpr int recorded_format() {
  if constexpr (is_same_v<T, uint16_t>)   { return 1; } else
  if constexpr (is_same_v<T, uint32_t>)   { return 2; } else
  if constexpr (is_same_v<T, int32_t>)    { return 3; } else
  if constexpr (is_same_v<T, uint64_t>)   { return 4; } else
  if constexpr (is_same_v<T, int64_t>)    { return 5; } else
  if constexpr (is_same_v<T, half_t>)     { return 6; } else
  if constexpr (is_same_v<T, float>)      { return 7; } else
  if constexpr (is_same_v<T, double>)     { return 8; } else
  if constexpr (is_same_v<T, bfloat16_t>) { return 9; } else
  if constexpr (is_same_v<T, tfloat32_t>) { return 11; } else
  { static_assert(sizeof(T) == 1, "this element has no tensor map format here"); return 0; }
}

template <class T, class Sizes, class Strides, class Box, class Steps>
CUTE_HOST_DEVICE TmaDescriptor record_tensor_map(
    void const* address, Sizes const& sizes, Strides const& strides, Box const& box, Steps const& steps, int rank,
    int swizzle_bits, int swizzle_base) {
  TmaDescriptor recorded = {};
  auto* words = reinterpret_cast<uint64_t*>(recorded.bytes);
  auto* extents = reinterpret_cast<uint32_t*>(recorded.bytes + 16);
  auto* pitches = reinterpret_cast<uint64_t*>(recorded.bytes + 40);
  auto* boxes = reinterpret_cast<uint16_t*>(recorded.bytes + 72);
  auto* small = reinterpret_cast<uint8_t*>(recorded.bytes + 82);
  words[0] = 0x70616d5f726f736eull;
  words[1] = reinterpret_cast<uint64_t>(address);
  for (int i = 0; i < 5; ++i) {
    extents[i] = static_cast<uint32_t>(sizes[i]);
    boxes[i] = static_cast<uint16_t>(box[i]);
    small[i] = static_cast<uint8_t>(steps[i]);
    if (i > 0) { pitches[i - 1] = strides[i]; }
  }
  small[5] = static_cast<uint8_t>(rank);
  small[6] = static_cast<uint8_t>(swizzle_bits);
  small[7] = static_cast<uint8_t>(swizzle_base);
  small[8] = static_cast<uint8_t>(recorded_format<T>());
  return recorded;
}
"""

RECORD_CALL = r"""  #else
    tma_desc = record_tensor_map<TmaInternalType>(
        gmem_address, gmem_prob_shape, gmem_prob_stride, smem_box_shape, smem_box_stride, int(tma_dim),
        int(get_tma_swizzle_bits(swizzle)), int(get_tma_swizzle_base(swizzle)));
\g<0>"""

# NVRTC's front end took 33 s for a kernel, 8 s of them in the standard library's tuple_element and 11 s in return types
# that spell out the element's type three times, which every mangled name then repeats. The machine code is the same.
ELEMENT = r"""
namespace cudabind {
template <size_t I, class First, class... Rest> struct element : element<I - 1, Rest...> {};
template <class First, class... Rest> struct element<0, First, Rest...> { using type = First; };
}
namespace cute
{"""

# Structured bindings of a constant tuple, which CUTLASS leaves to the standard library.
BINDINGS = """
namespace std {
template <class... T>
struct tuple_size<cute::tuple<T...> const> : CUTE_STL_NAMESPACE::integral_constant<size_t, sizeof...(T)> {};
template <size_t I, class... T>
struct tuple_element<I, cute::tuple<T...> const> { using type = typename ::cudabind::element<I, T...>::type const; };
}
"""

NO_QUERY = """\
#if defined(__CUDACC_RTC__)
  CUTLASS_HOST_DEVICE static int query_device_multiprocessor_count(int = 0) { return 0; }
#else
  static inline int
"""
TYPE = r"cute::tuple_element_t<N, cute::tuple<T\.\.\.>>"
IS_EMPTY = rf"cute::is_empty<{TYPE}>::value"

AMENDMENTS: dict[str, tuple[tuple[str, str, int], ...]] = {
    "cutlass/kernel_hardware_info.h": (
        (
            r"#if !defined\(__CUDACC_RTC__\)\n  static inline int\n",
            NO_QUERY,
            1,
        ),
    ),
    # The size of stream-K's workspace is computed by plain arithmetic, which NVRTC can compile as well.
    "cutlass/gemm/kernel/tile_scheduler_params.h": (
        (r"#if !defined\(__CUDACC_RTC__\)(\n  static void\n  get_workspace_component_sizes\()", r"#if 1\1", 1),
        (r"#if !defined\(__CUDACC_RTC__\)(\n      get_workspace_component_sizes\()", r"#if 1\1", 1),
    ),
    "cute/atom/copy_traits_sm90_tma.hpp": (
        (
            r"  #endif // \(__CUDACC_VER_MAJOR__ >= 12\) && !defined\(__CUDACC_RTC__\)\n  auto recast_ratio",
            RECORD_CALL,
            1,
        ),
        (r"namespace cute\n\{\n", "\\g<0>" + RECORD.replace("\\", "\\\\"), 1),
    ),
    # The code that makes Blackwell's tensor maps, which NVRTC can compile as well.
    "cute/atom/copy_traits_sm100_tma.hpp": (
        (r"#if !defined\(__CUDACC_RTC__\)(\n/\*\* Make a CuTe CTA-collective TiledCopy)", r"#if 1\1", 1),
        (r"\nCUTE_HOST\n", "\nCUTE_HOST_RTC\n", 5),
    ),
    "cute/container/tuple.hpp": (
        (
            r": CUTE_STL_NAMESPACE::tuple_element<I, CUTE_STL_NAMESPACE::tuple<T\.\.\.>>",
            ": ::cudabind::element<I, T...>",
            2,
        ),
        (
            rf"cute::conditional_t<{IS_EMPTY},\n\s+{TYPE},\n\s+{TYPE} ?(?:const&|&&|&)>\n",
            "decltype(auto)\n",
            3,
        ),
        (
            rf"(if constexpr \({IS_EMPTY}\) \{{\n    return) \{{\}};",
            r"\1 cute::tuple_element_t<N, cute::tuple<T...>>{};",
            3,
        ),
        (r"\nnamespace cute\n\{", ELEMENT, 1),
        (r"\Z", BINDINGS, 1),
    ),
}
