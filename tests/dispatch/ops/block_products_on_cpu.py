"""The kernels of BSR times a dense matrix, compiled by g++ and run over the host's memory, and matrices for them."""

import ctypes
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.keys import C128, F32, F64, HALF, HOST, Arch
from dispatch.libraries.nvrtc import launching
from dispatch.ops.sparse import block_mma_kernels as mma
from dispatch.ops.sparse import block_product_kernels as kernels
from dispatch.ops.sparse import own_block_product
from dispatch.ops.sparse.plain_operators import BatchStrides
from dispatch.table.select import select
from dispatch.testing.check import ROUNDOFF

sp = pytest.importorskip("scipy.sparse")
spec = importlib.util.spec_from_file_location("blocks_on_cpu", Path(__file__).with_name("blocks_on_cpu.py"))
blocks_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(blocks_on_cpu)

GPU = Arch(90)
OPS = ("spmm", "spmm_batched")
ROWS = [row for op in OPS for row in dp.TABLE.of(op) if row.function == kernels.NAME and row.min_arch != HOST]
QUICK = ("f32", "c128")  # kernels are compiled for each dtype and block, which takes a second: others are exhaustive
PARAMETERS = (
    *("const Number* elements", "const LINE* offsets", "const PLACE* places", "const Number* b", "const Result* c"),
    *("Result* out", "Sum alpha", "Sum beta", "Int count", "Int base", "Int columns", "Int b_row", "Int b_column"),
    *("Int c_row", "Int c_column", "Int out_row", "Int out_column", "int parts", "int tiles", "int each"),
    "BatchStrides strides",
)
DEV = None
# The instructions of tensor cores, as PTX's manual defines which thread has which elements.
ON_CPU = r"""
static const void* row_of[1024];
static unsigned x_of[1024][4], y_of[1024][2];
static void copy_vector(void* to, const void* from, bool is_there)
{
    is_there ? memcpy(to, from, 16) : memset(to, 0, 16);
}
static void end_stage() {}
template <int LEFT> static void wait_for_stages() {}
template <int COUNT> static void load_matrices(unsigned (&x)[COUNT], const void* row, bool transposed)
{
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x - lane;
    row_of[threadIdx.x] = row;
    __syncwarp();
    for (unsigned i = 0; i < COUNT; ++i) {
        unsigned short pair[2];
        for (unsigned j = 0; j < 2; ++j) {
            const unsigned low = lane / 4, high = lane % 4 * 2 + j, line = transposed ? high : low;
            pair[j] = ((const unsigned short*)row_of[warp + i * 8 + line])[transposed ? low : high];
        }
        x[i] = pair[0] | (unsigned)pair[1] << 16;
    }
    __syncwarp();
}
static void load_a(unsigned (&x)[4], const Number* row) { load_matrices(x, row, false); }
static void load_b(unsigned (&y)[4], const Number* row) { load_matrices(y, row, true); }
static float half_of(unsigned pair, unsigned which)
{
    Number number;
    const unsigned short bits = pair >> 16 * which;
    memcpy(&number, &bits, 2);
    return read(number.part[0]);
}
static void multiply(float (&sum)[4], const unsigned (&x)[4], unsigned y, unsigned z)
{
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x - lane;
    memcpy(x_of[threadIdx.x], x, sizeof x), y_of[threadIdx.x][0] = y, y_of[threadIdx.x][1] = z;
    __syncwarp();
    for (unsigned n = 0; n < 4; ++n)
        for (unsigned k = 0; k < 16; ++k) {
            const unsigned row = lane / 4 + n / 2 * 8, column = lane % 4 * 2 + n % 2, owner = k % 8 / 2;
            const unsigned a = x_of[warp + row % 8 * 4 + owner][row / 8 + k / 8 * 2];
            sum[n] += half_of(a, k % 2) * half_of(y_of[warp + column * 4 + owner][k / 8], k % 2);
        }
    __syncwarp();
}
"""


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = dp.device("host")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return blocks_on_cpu.InBlocks(tmp_path_factory.mktemp("block_products"))


@pytest.fixture
def executor(on_cpu, monkeypatch):
    """What plans are made for: launches run on the CPU; `launched` has the options, blocks and threads of each."""
    made = SimpleNamespace(target=ctypes.c_void_p(7), launched=[], names=[], device=SimpleNamespace(arch=GPU))
    known = []

    def loaded(source, name, chosen, _):
        assert (source, name) in ((each.SOURCE, each.NAME) for each in (kernels, mma))
        known.append((source.replace(mma.INSTRUCTIONS, ON_CPU), name, chosen))
        return len(known)

    def launch(function, blocks, *rest):
        *extents, target, pointers, _ = rest
        (source, name, chosen), threads = known[function.value - 1], extents[2]
        assert tuple(extents[:-1]) == (1, 1, threads, 1, 1)
        assert target is made.target
        words = dict(option[2:].split("=") for option in chosen[1:])
        real = ctypes.c_double if words["REAL"] == "double" else ctypes.c_float
        sum_of = type("Sum", (ctypes.Structure,), {"_fields_": [("part", real * int(words["PARTS"]))]})
        by_value = {"Sum": sum_of, "Int": ctypes.c_int64, "int": ctypes.c_int, "BatchStrides": BatchStrides}
        kinds = [by_value.get(one.rpartition(" ")[0], ctypes.c_void_p) for one in PARAMETERS]
        given = [kind.from_address(at) for kind, at in zip(kinds, pointers, strict=True)]
        made.launched.append((words, blocks, threads))
        made.names.append(name)
        on_cpu.launched(source, name, chosen, PARAMETERS, (blocks, threads), given)
        return 0

    monkeypatch.setattr(launching, "loaded", loaded)
    monkeypatch.setattr(launching, "permit_shared", lambda *_: None)
    monkeypatch.setattr(launching, "driver", SimpleNamespace(cuLaunchKernel=SimpleNamespace(unchecked=launch)))
    return made


def plan_of(request, executor):
    row = select(request.replace(library="own"), GPU)
    assert row.function == kernels.NAME
    return own_block_product.plan(request, executor, row)


def result_of(request, executor):
    """The same bits in two runs into poisoned memory."""
    plan, found = plan_of(request, executor), []
    assert plan.capture_safe
    for _ in range(2):
        outputs = DEV.executor().outputs(request)
        for tensor in outputs.values():
            tensor.copy_from(np.full(tensor.shape, np.nan, tensor.dtype.numpy))
        plan.enqueue(request.arguments(outputs))
        found.append(request.result(outputs).numpy())
    assert found[0].tobytes() == found[1].tobytes()
    return found[0]


def drawn(rng, dtype, *shape):
    return (rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype.is_complex else 0)).astype(
        dtype.numpy
    )


def matrix_of(rng, lengths, columns, block, dtype=F32, base=0, widths=("i4", "i4")):
    """BSR whose rows have so many blocks, in any order and some twice: the tensors, and the matrix densely in f64."""
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    places = rng.integers(0, columns, ends[-1])
    values = drawn(rng, dtype, ends[-1], *block)
    wide = np.complex128 if dtype.is_complex else np.float64
    dense = np.zeros((len(lengths) * block[0], columns * block[1]), wide)
    for line in range(len(lengths)):
        for at in range(ends[line], ends[line + 1]):
            rows, cols = (slice(i * size, (i + 1) * size) for i, size in zip((line, places[at]), block, strict=True))
            dense[rows, cols] += values[at].astype(wide)
    parts = values, (ends + base).astype(widths[0]), (places + base).astype(widths[1])
    form = dp.SparseForm("bsr", dense.shape, base, block)
    return [*map(DEV.array, parts), form], dense


def laid(array, how):
    """By rows, by columns, with every other column, or reversed."""
    if how == "columns":
        return DEV.array(np.ascontiguousarray(array.T)).T
    if how == "apart":
        wide = np.full((len(array), 2 * array.shape[1]), np.nan, array.dtype)
        wide[:, ::2] = array
        return DEV.array(wide)[:, ::2]
    return DEV.array(array)


def check(found, dense, b, dtype, terms, c=0.0, alpha=1.0, beta=0.0):
    wide = dense.dtype
    expected = alpha * (dense @ b.astype(wide)) + (beta * c.astype(wide) if beta else 0)
    size = abs(alpha) * (np.abs(dense) @ np.abs(b.astype(wide))) + (np.abs(beta * c.astype(wide)) if beta else 0)
    work = F64 if dtype in (F64, C128) else F32
    unit = ROUNDOFF[work][0] * (terms + 8) * (4 if dtype.is_complex else 1)
    own = ROUNDOFF[dtype][0] if dtype in HALF else 0
    assert np.isfinite(found).all()
    # Blocks that are stored twice are added up by the reference first.
    assert (np.abs(found.astype(wide) - expected) <= 2 * unit * size + 2 * own * np.abs(expected) + own * 1e-6).all()


def stacked(parts):
    return DEV.array(np.stack([part.numpy() for part in parts]))
