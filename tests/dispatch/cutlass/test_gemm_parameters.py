"""A product's parameters without a GPU: `fill`, compiled for the CPU by g++, against tensor maps derived by hand.

It is done as for convolutions, whose driver and glue it takes: the words of a launch, the order of tiles among them,
are tried in earnest.
"""

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

import dispatch as dp
from dispatch.keys import Arch
from dispatch.libraries.cutlass import headers
from dispatch.libraries.cutlass.config import LARGE, RASTERS
from dispatch.libraries.cutlass.emit import sm90_grouped_gemm as grouped
from dispatch.libraries.cutlass.emit.sm90_gemm import emit
from dispatch.libraries.cutlass.params import Template, TensorMap, stand_ins
from dispatch.ops.grouped_matmul.config import MEDIUM
from dispatch.ops.grouped_matmul.cutlass import ARRAYS
from dispatch.ops.grouped_matmul.cutlass import spec_of as grouped_spec
from dispatch.ops.matmul import MatmulRequest
from dispatch.ops.matmul.cutlass import fixed_words, spec_of

try:
    headers.find()
    MISSING = "" if shutil.which("g++") else "g++ is not installed"
except headers.HeadersMissing as missing:
    MISSING = str(missing)
pytestmark = [pytest.mark.compiles, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

M, N, K = 1500, 3000, 136
BF16_BYTES, BF16_FORMAT, SWIZZLE_64B, SWIZZLE_128B = 2, 9, 2, 3
MANY = 10_000  # multiprocessors: as many as there are tiles


def for_the_cpu(sources):
    """The types and the `fill` of each source in a namespace of its own, with stand-ins for CUDA and its driver."""
    path = Path(__file__).with_name("test_conv_parameters.py")
    spec = importlib.util.spec_from_file_location("conv_parameters", path)
    stands = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stands)
    texts = [stands.DEVICE, stands.DRIVER]
    for name, source in sources.items():
        head, _, rest = source.text.partition("\nnamespace {\n")
        types = rest[: rest.index('extern "C" __global__ void __launch_bounds__')]
        fill = rest[rest.index("// One thread:") : rest.index('extern "C" __global__ void scale')]
        if len(texts) == 2:
            begin = head.index("// What CUTLASS takes from namespace std")  # here namespace std is the real one
            texts.append(head[:begin] + head[head.index("#include", begin) :])
        texts.append(f"namespace {name} {{\nnamespace {{\n{types}\n{fill.replace('void fill(', f'void {name}(')}\n}}")
    return "\n".join(texts)


@pytest.fixture(scope="module")
def request_():
    dev = dp.device("host")
    out = dev.zeros((M, N + 8), "bf16")[:, :N]
    return MatmulRequest(dev.zeros((M, K), "bf16"), dev.zeros((N, K), "bf16").T, out=out, library="cutlass")


@pytest.fixture(scope="module")
def groups():
    dev = dp.device("host")
    b = dev.zeros((4, 24, 16), "bf16").mT
    return dp.GroupedMatmulRequest(dev.zeros((300, 16), "bf16"), b, dev.array([75, 150, 225, 300], "i32"))


@pytest.fixture(scope="module")
def sources(request_, groups):
    return {
        "product": emit(spec_of(request_.form, Arch(90), LARGE)),
        "groups": grouped.emit(grouped_spec(groups, Arch(90), MEDIUM)),
    }


@pytest.fixture(scope="module")
def library(sources, tmp_path_factory):
    """`fill` of the largest tile's kernel and of a grouped one, as functions of the host."""
    folder = tmp_path_factory.mktemp("fill")
    (folder / "cutlass/arch").mkdir(parents=True)
    (folder / "cutlass/arch/wmma.h").write_text("#pragma once\n")
    (folder / "fill.cpp").write_text(for_the_cpu(sources))
    options = ["-std=c++17", "-O0", "-w", "-fpermissive", "-shared", "-fPIC", "-DNDEBUG"]
    options += ["-DTILED_MAGIC=0x70616d5f726f736eull", "-DIM2COL_MAGIC=0x6d5f6c6f63326d69ull"]
    options += ["-DCUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL", "-DCUTLASS_UINT128_NATIVE", f"-I{folder}"]
    options += [f"-I{path}" for path in headers.find().include]
    command = ["g++", *options, str(folder / "fill.cpp"), "-o", str(folder / "fill.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]
    return ctypes.CDLL(str(folder / "fill.so"))


def learned(function, words, values):
    """The template of the parameters that `fill` writes, and the facts of the launch."""

    class Words(ctypes.Structure):
        _fields_ = [("words", ctypes.c_int64 * len(words))]

    function.argtypes = [Words, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = None
    images = []
    for which in (0, 1, 0):
        memory, facts = (ctypes.c_uint8 * 4160)(), (ctypes.c_int64 * 9)()
        start = -(-ctypes.addressof(memory) // 64) * 64
        given = Words((ctypes.c_int64 * len(words))(*stand_ins(words, values, which)))
        function(given, start, ctypes.addressof(facts))
        images.append(ctypes.string_at(start, facts[0]))
    first, second, again = images
    padding = frozenset(o for o in range(0, len(first), 4) if first[o : o + 4] != again[o : o + 4])
    return Template.learn(words, (first, second), padding), tuple(facts)


@pytest.fixture(scope="module")
def launched(request_, sources, library):
    """What is learned for one order of tiles."""

    def launch(raster="heuristic", swizzle=1, processors=132, clusters=0):
        order = {"swizzle": swizzle, "raster": RASTERS.index(raster), "clusters": clusters}
        values = {**fixed_words(request_.form, processors), **order}
        return learned(library.product, sources["product"].words, values)

    return launch


def test_the_tensor_maps_are_those_of_the_matrices(launched):
    template, facts = launched()
    a, b, out = (next(m for m in template.maps if m.word == name)._replace(offset=0) for name in ("a", "b", "out"))
    ones = (1, 1, 1)
    step = (BF16_BYTES * K, 0)
    assert a == TensorMap(0, "a", a.format, 3, (K, M, 1), step, (64, 128, 1), ones, SWIZZLE_128B)
    # Each of the two blocks of a cluster fetches half of the tile's 256 columns of B.
    assert b == TensorMap(0, "b", a.format, 3, (K, N, 1), step, (64, 128, 1), ones, SWIZZLE_128B)
    step = (BF16_BYTES * (N + 8), 0)
    assert out == TensorMap(
        0, "out", out.format, 3, (N, M, 1), step, (32, 128, 1), ones, SWIZZLE_64B
    )  # both groups' rows
    assert [name for _, name in template.numbers] == ["alpha.value"]
    assert [name for _, name in template.pointers] == []
    size, shared, threads, *_ = facts
    assert (size, threads) == (len(template.image), 3 * 128)
    assert 4 * (128 + 256) * 64 * BF16_BYTES < shared <= 227 << 10  # four stages, and what the epilogue needs


# Tiles: 12 along m and 12 along n; a stripe of a swizzle is that many clusters of two wide, and they are filled up.
@pytest.mark.parametrize(
    ("raster", "swizzle", "expected"),
    [
        ("along_n", 1, (2, 12 * 12 // 2)),
        ("along_m", 1, (12 * 12, 1)),
        ("heuristic", 1, (2, 12 * 12 // 2)),
        ("along_n", 8, (2, 16 * 16 // 2)),
        ("along_m", 2, (12 * 12, 1)),
        ("along_m", 8, (16 * 16, 1)),
    ],
)
def test_the_order_of_tiles_is_told_by_the_words_of_a_launch(raster, swizzle, expected, launched):
    _, facts = launched(raster, swizzle, MANY)
    assert (*facts[3:6],) == (*expected, 1)


def test_as_many_blocks_are_launched_as_there_are_multiprocessors(launched):
    _, facts = launched()
    assert (*facts[3:6],) == (2, 66, 1)


def test_no_more_clusters_are_launched_than_run_at_once(launched):
    _, facts = launched("along_m", clusters=60)
    assert (*facts[3:6],) == (120, 1, 1)


def test_a_grouped_kernel_finds_its_arrays_by_their_addresses(sources, library):
    arrays = dict.fromkeys(("shapes", *ARRAYS), 1)
    values = {**arrays, "groups": 4, "multiprocessors": 132, "workspace": 0x7000}
    template, facts = learned(library.groups, sources["groups"].words, values)
    assert {name for _, name in template.pointers} == set(arrays)
    assert [name for _, name in template.numbers] == ["alpha.value"]
    # Stand-ins for the kernel's own, which it makes for each group in its workspace; the driver wants 16 bytes of them.
    sizes = {found.word: (found.sizes, found.strides) for found in template.maps}
    empty, tile = ((1, 1), (0,)), ((128, 128), (0,))
    assert sizes == {"addresses_a": empty, "addresses_b": empty, "addresses_d": tile}
    size, shared, threads, *_, workspace, _ = facts
    assert (size, threads) == (len(template.image), 3 * 128)
    assert 0 < shared <= 227 << 10
    assert workspace >= 132 * 3 * 128  # of each multiprocessor, one map for each matrix
