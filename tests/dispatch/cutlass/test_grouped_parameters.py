"""Where a grouped kernel finds its groups: `arrange` and `place`, compiled for the CPU by g++, against NumPy.

They are plain C++ but for their thread's number, so they run as they are, on addresses of real arrays.
"""

import ctypes
import itertools
import shutil
import subprocess

import numpy as np
import pytest

import dispatch as dp
from dispatch.keys import Arch
from dispatch.libraries.cutlass.emit.sm90_grouped_gemm import PLACED, emit
from dispatch.ops.grouped_matmul import GroupedMatmulListRequest, GroupedMatmulRequest
from dispatch.ops.grouped_matmul.config import MEDIUM
from dispatch.ops.grouped_matmul.cutlass import ARRAYS, array_offsets, spec_of
from dispatch.ops.grouped_matmul.plans import chunks

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")

BEFORE = """
#include <cstdint>
#define __global__
#define __grid_constant__
static struct { int x; } threadIdx{0}, blockDim{1};
struct Extents { int m, n, k; };
namespace cute { inline Extents make_shape(int m, int n, int k) { return {m, n, k}; } }
using ElementA = uint16_t;
using ElementB = uint16_t;
using ElementD = float;
"""
BEHIND = """
extern "C" void place_at(
    Placed const* placed, int64_t first, int64_t count, int64_t groups, Extents* shapes, int64_t* arrays) {
  place(*placed, first, count, groups, shapes, arrays);
}
"""


@pytest.fixture(scope="module")
def host():
    return dp.device("host")


@pytest.fixture(scope="module")
def entries(host, tmp_path_factory):
    """The two small kernels as functions of the host."""
    folder = tmp_path_factory.mktemp("small")
    text = emit(spec_of(rows_request(host), Arch(90), MEDIUM)).text
    begin = text.index("// The groups' extents, addresses and steps")
    small = text[begin : text.index('extern "C" __global__ void scale')]
    (folder / "small.cpp").write_text(BEFORE + small + BEHIND)
    command = ["g++", "-std=c++17", "-shared", "-fPIC", str(folder / "small.cpp"), "-o", str(folder / "small.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]
    return ctypes.CDLL(str(folder / "small.so"))


def rows_request(host):
    ends = host.array([3, 3, 10], "i32")
    b = host.zeros((3, 24, 16), "bf16").mT
    return GroupedMatmulRequest(host.zeros((12, 32), "bf16")[:, :16], b, ends, out_dtype="f32")


def arrays_of(groups):
    return np.zeros((groups, 3), np.int32), np.zeros((len(ARRAYS), array_offsets(groups)[0][ARRAYS[1]] // 8), np.int64)


def words(*values):
    return [ctypes.c_int64(int(value)) for value in values]


def test_groups_of_rows_begin_where_the_one_before_ends(host, entries):
    asked = rows_request(host)
    a, b, ends = (np.asarray(x) for x in (asked.a, asked.b, asked.ends))
    out = np.zeros((12, 24), np.float32)
    shapes, arrays = arrays_of(3)
    array_offsets = (ends.ctypes.data, 3, 24, 16, a.ctypes.data, 32, b.ctypes.data, 16, 24 * 16, out.ctypes.data, 24)
    entries.arrange(*words(*array_offsets, shapes.ctypes.data, arrays.ctypes.data))
    assert shapes.tolist() == [[3, 24, 16], [0, 24, 16], [7, 24, 16]]
    at = dict(zip(ARRAYS, arrays[:, :3].tolist(), strict=True))
    assert at["addresses_a"] == [a[begin:].ctypes.data for begin in (0, 3, 3)]
    assert at["addresses_b"] == [b[g].ctypes.data for g in range(3)]
    assert at["addresses_d"] == [out[begin:].ctypes.data for begin in (0, 3, 3)]
    steps = [at[name] for name in ("steps_a", "steps_b", "steps_d")]
    assert steps == [[a.strides[0] // 2] * 3, [b.strides[2] // 2] * 3, [out.strides[0] // 4] * 3]


def test_products_are_placed_as_the_host_says(host, entries):
    count = PLACED + 5
    shape = [(1 + g, 8 * (1 + g % 3), 16 * (1 + g % 2)) for g in range(count)]
    asked = GroupedMatmulListRequest(
        tuple(host.zeros((m, k), "bf16") for m, _, k in shape),
        tuple(host.zeros((n, k), "bf16").T for _, n, k in shape),
        out=tuple(host.zeros((m, n), "f32") for m, n, _ in shape),
    )
    matrices = [[np.asarray(x) for x in tensors] for tensors in (asked.a, asked.b, asked.out)]
    a, b, out = matrices
    steps = [[x.strides[0] // 2 for x in a], [x.strides[1] // 2 for x in b], [x.strides[0] // 4 for x in out]]
    addresses = [[x.ctypes.data for x in tensors] for tensors in matrices]
    shapes, arrays = arrays_of(count)
    groups = list(zip(asked.extents, *steps, strict=True))
    for first, number, told in chunks(groups, *addresses):
        rest = words(first, number, count, shapes.ctypes.data, arrays.ctypes.data)
        entries.place_at(ctypes.byref(told), *rest)
    assert shapes.tolist() == [list(extents) for extents in shape]
    assert arrays[:, :count].tolist() == [*addresses, *steps]


@pytest.mark.parametrize("groups", [1, 2, 5, 64])
def test_the_arrays_are_apart_and_begin_at_16_bytes(groups):
    offsets, size = array_offsets(groups)
    assert list(offsets) == [*ARRAYS, "shapes"]
    begins = list(offsets.values())
    assert all(begin % 16 == 0 for begin in begins)
    assert all(after - before >= 8 * groups for before, after in itertools.pairwise(begins))
    assert size == begins[-1] + 12 * groups
