"""grouped_matmul by cuBLASLt's grouped layouts, without a GPU: all but the library's own kernels.

The small kernels are compiled for the CPU by g++, descriptors are the installed library's own, and in the place of
`cublasLtMatmul` stands a product that finds its groups as the documentation says: from the descriptors alone.
"""

import ctypes
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from cudabind import _load, driver, nvrtc
from cudabind.errors import LibraryNotFound
from cudabind.sys import cublasLt as lt
from dispatch.errors import NoRow
from dispatch.keys import BF16, F8E4M3, F16, F32, HOST, Arch, Dtype
from dispatch.libraries.cublaslt.grouped import Groups
from dispatch.libraries.cutlass import evt, staged
from dispatch.ops.grouped_matmul import GroupedMatmulListRequest, GroupedMatmulRequest, cublaslt, grouped_matmul, plans
from dispatch.ops.grouped_matmul.cases import cases
from dispatch.ops.grouped_matmul.config import LARGE
from dispatch.ops.grouped_matmul.rules import steps_of_32_bits
from dispatch.table.select import explain, select

ROWS = [row for row in dp.TABLE.of("grouped_matmul") if row.library == "cublasLt"]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]
WIDTH = 16  # bytes that TMA stores at once

BEFORE = """
#define __global__
#define __device__ static
#define __grid_constant__
static struct { int x; } threadIdx{0}, blockDim{1};
"""
BEHIND = """
extern "C" void place_at(Placed const* placed, Int first, Int count, Int groups, int* numbers, Int* addresses) {
  place(*placed, first, count, groups, numbers, addresses);
}
"""
DTYPES = {int(dtype.cuda): dtype for dtype in (F16, BF16, F32, F8E4M3)}


@pytest.fixture
def host():
    return dp.device("host")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """`library(options)` is the two small kernels as functions of the host."""
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    folder, known = tmp_path_factory.mktemp("small"), {}

    def compiled(options):
        if options not in known:
            name = folder / f"small{len(known)}"
            name.with_suffix(".cpp").write_text(BEFORE + cublaslt.SETUP_SOURCE + BEHIND)
            command = ["g++", *options, "-shared", "-fPIC", f"{name}.cpp", "-o", f"{name}.so"]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[:2000]
            known[options] = ctypes.CDLL(f"{name}.so")
        return known[options]

    return compiled


def skip_without_layouts():
    """Skip where the installed library has no grouped layouts."""
    try:
        version = _load.version("cublasLt")
    except LibraryNotFound:
        pytest.skip("cublasLt is not installed")
    if tuple(map(int, version.split("."))) < (13, 2):
        pytest.skip(f"needs cublasLt 13.2 or newer, {version} is installed")


def attribute(get, descriptor, name, kind):
    value, size = kind(), ctypes.c_size_t()
    get(descriptor, name, ctypes.byref(value), ctypes.sizeof(value), ctypes.byref(size))
    return value.value or 0


def at(address, kind, count):
    return np.ctypeslib.as_array((kind * count).from_address(address)).tolist()


def layout(descriptor):
    """The dtype, and rows, columns and step of each group's matrix, as the library has them."""
    names = lt.cublasLtMatrixLayoutAttribute_t
    get = lt.cublasLtMatrixLayoutGetAttribute
    assert attribute(get, descriptor, names.CUBLASLT_MATRIX_LAYOUT_BATCH_MODE, ctypes.c_uint32) == 2
    count = attribute(get, descriptor, names.CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, ctypes.c_int32)
    dtype = DTYPES[attribute(get, descriptor, names.CUBLASLT_MATRIX_LAYOUT_TYPE, ctypes.c_uint32)]
    arrays = (getattr(names, f"CUBLASLT_GROUPED_MATRIX_LAYOUT_{name}_ARRAY") for name in ("ROWS", "COLS", "LD"))
    numbers = (at(attribute(get, descriptor, name, ctypes.c_void_p), ctypes.c_int32, count) for name in arrays)
    return dtype, list(zip(*numbers, strict=True))


def lines(dtype: Dtype, address, columns, step, length):
    """The columns of a column-major matrix, each `length` elements of a line of `step`."""
    size = ((columns - 1) * step + length) * dtype.itemsize
    flat = np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype.numpy)
    return np.lib.stride_tricks.as_strided(flat, (columns, length), (step * dtype.itemsize, dtype.itemsize))


def grouped_product(*arguments):
    """What `cublasLtMatmul` does with grouped layouts; D is written as TMA does, in whole 16 bytes."""
    for kind, argument in zip(lt.cublasLtMatmul.unchecked.argtypes, arguments, strict=True):
        kind.from_param(argument)  # as ctypes asks of each, and raises
    _handle, operation, alpha, *operands = arguments
    a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout = operands[:9]
    transposed = attribute(
        lt.cublasLtMatmulDescGetAttribute,
        operation,
        lt.cublasLtMatmulDescAttributes_t.CUBLASLT_MATMUL_DESC_TRANSA,
        ctypes.c_int32,
    )
    names = lt.cublasLtMatmulDescAttributes_t
    for side in "AB" if layout(a_layout)[0] is F8E4M3 else "":
        mode = getattr(names, f"CUBLASLT_MATMUL_DESC_{side}_SCALE_MODE")
        assert attribute(lt.cublasLtMatmulDescGetAttribute, operation, mode, ctypes.c_int32) == 6  # one for each group
        scale = getattr(names, f"CUBLASLT_MATMUL_DESC_{side}_SCALE_POINTER")
        array = attribute(lt.cublasLtMatmulDescGetAttribute, operation, scale, ctypes.c_void_p)
        factors = at(array, ctypes.c_int64, len(layout(d_layout)[1]))
        assert {ctypes.c_float.from_address(address).value for address in factors} == {1.0}
    factor = ctypes.c_float.from_address(alpha).value
    assert ctypes.c_float.from_address(beta).value == 0
    assert c == d
    assert c_layout is d_layout
    (a_dtype, in_a), (b_dtype, in_b), (d_dtype, in_d) = map(layout, (a_layout, b_layout, d_layout))
    addresses = (at(array, ctypes.c_int64, len(in_d)) for array in (a, b, d))
    for at_a, at_b, at_d, of_a, of_b, of_d in zip(*addresses, in_a, in_b, in_d, strict=True):
        (rows, columns, step), k = of_d, of_b[0]
        assert (of_a[:2], of_b[1]) == ((k, rows) if transposed else (rows, k), columns)
        assert min(of_a[2] - of_a[0], of_b[2] - k, step - rows) >= 0
        assert not any(address % WIDTH for address in (at_a, at_b, at_d))
        if columns == 0:
            continue
        left = lines(a_dtype, at_a, of_a[1], of_a[2], of_a[0]).astype(np.float32)
        right = lines(b_dtype, at_b, columns, of_b[2], k).astype(np.float32)
        value = factor * (right @ (left.T if transposed else left))
        stored = -(-rows * d_dtype.itemsize // WIDTH) * WIDTH // d_dtype.itemsize
        for column in range(columns):
            line = np.zeros(stored, d_dtype.numpy)
            line[:rows] = value[column].astype(d_dtype.numpy)
            ctypes.memmove(at_d + column * step * d_dtype.itemsize, line.ctypes.data, line.nbytes)
    return 0


@pytest.fixture
def executor(host, library, monkeypatch):
    """An executor of a GPU whose memory is the host's."""
    skip_without_layouts()

    def small(plan, arguments):
        entries, entry = plan._setup_kernel
        if entry == "arrange":
            entries.arrange(*arguments)
        else:
            entries.place_at(ctypes.byref(arguments[0]), *arguments[1:])

    def copy(asked, _stream):
        for line in range(asked.Height):
            to, of = asked.dstDevice + line * asked.dstPitch, asked.srcDevice + line * asked.srcPitch
            ctypes.memmove(to, of, asked.WidthInBytes)

    names = {"CUDA_MEMCPY3D": SimpleNamespace, "CUmemorytype": driver.CUmemorytype, "cuMemcpy3DAsync": copy}
    monkeypatch.setattr(staged, "driver", SimpleNamespace(**names))
    monkeypatch.setattr(plans._Plan, "_launch_setup", small)
    monkeypatch.setattr(cublaslt, "loaded", lambda _source, entry, options, _device: (library(options), entry))
    monkeypatch.setattr(cublaslt, "handle_of", lambda _: None)
    monkeypatch.setattr(cublaslt, "lt", SimpleNamespace(cublasLtMatmul=SimpleNamespace(unchecked=grouped_product)))
    chosen = SimpleNamespace(algo=lt.cublasLtMatmulAlgo_t(), workspaceSize=0)
    monkeypatch.setattr(cublaslt, "grouped_heuristic", lambda *_: chosen)
    zero = ctypes.c_float(0)
    return SimpleNamespace(
        device=None,
        target=ctypes.c_void_p(0),
        empty=host.executor().empty,
        workspace=SimpleNamespace(nbytes=0, c_ptr=None),
        scalar=lambda value, dtype: ctypes.addressof(zero) if (value, dtype) == (0.0, F32) else None,
    )


@pytest.mark.parametrize(("row", "case"), CASES)
def test_the_library_is_told_where_each_group_lies(row, case, host, executor, rng):
    check = case.check(host, rng)
    assert select(check.request, Arch(90)) is row
    plan = cublaslt.plan(check.request, executor, row)
    for _ in range(2):
        check.renew()
        plan.enqueue(check.request.arguments({}))
        check.verify(check.request.result({}))


@pytest.mark.parametrize("entry", ["arrange", "place"])
def test_the_small_kernels_compile_for_hopper(entry):
    try:
        code = nvrtc.compile(
            cublaslt.SETUP_SOURCE, "small.cu", ("-arch=sm_90", "-std=c++17", "-DSIZE=2", "-DSIZE_D=4")
        ).code
    except LibraryNotFound:
        pytest.skip("NVRTC is not installed")
    assert entry.encode() in code


@pytest.mark.parametrize("count", [1, 2, 5, 64])
def test_the_arrays_are_apart_and_begin_at_16_bytes(count):
    groups = Groups(4096, count)
    begins = [(groups.addresses(name), 8) for name in ("a", "b", "d", "scale")]
    begins += [(groups.numbers(name), 4) for name in ("m", "n", "k", "step_a", "step_b", "step_d")]
    ends = [*(begin for begin, _ in begins[1:]), 4096 + groups.size - 4]
    assert begins[0][0] == 4096
    for (begin, size), end in zip(begins, ends, strict=True):
        assert begin % 16 == 0
        assert end - begin >= size * count


def small_request(dev, **options):
    fields = {"a": dev.zeros((6, 16), "bf16"), "b": dev.zeros((2, 16, 8), "bf16"), "ends": dev.array([2, 6], "i32")}
    return GroupedMatmulRequest(**(fields | {"library": "cublasLt"} | options))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"epilogue": evt.relu(evt.scalar("alpha") * evt.accumulator())},
            r"needs an epilogue of alpha · acc, has relu",
        ),
        ({"config": LARGE}, "needs config=None, has 128x256"),
        ({"fast_accum": True}, "needs fast_accum=False"),
        ({"out_dtype": "f16"}, "bf16"),
    ],
)
def test_what_the_library_does_not_do_is_refused(options, reason, host):
    with pytest.raises(NoRow, match=reason):
        dp.run(small_request(host, **options))


def test_lines_further_apart_than_i32_are_refused(host):
    whole = host.zeros(256, "bf16")
    far = dp.Tensor(whole.storage, whole.ptr, host.layout(whole.dtype, (6, 16), (1 << 32, 1), whole.ptr))
    reason = steps_of_32_bits(SimpleNamespace(matrices=[("a", far), ("b", whole[None])]))
    assert reason == "needs lines up to 2147483647 elements apart, a has 4294967296"


@pytest.mark.parametrize("tree", [None, evt.accumulator(), evt.accumulator() * evt.scalar("alpha")], ids=str)
def test_an_epilogue_may_be_spelled_out(tree, host):
    assert select(small_request(host, epilogue=tree), Arch(90)).library == "cublasLt"
    assert select(small_request(host, epilogue=tree), HOST).stands_for == "cublasLt"


def test_an_older_library_is_refused_with_both_versions(host):
    request = small_request(host)
    with pytest.raises(NoRow, match=r"13\.5.*13\.1"):
        select(request, Arch(90), {"cublasLt": (13, 1, 0)})
    assert select(request, Arch(90), {"cublasLt": (13, 5, 0)}).library == "cublasLt"
    assert explain(request, Arch(100)).row is None  # nobody has run it there


def test_cutlass_comes_first_and_autotune_asks_both(host):
    request = small_request(host, library=None, autotune=True)
    rows = [row.library for row in dp.TABLE.of("grouped_matmul") if row.on(Arch(90)) and row.dtypes == (BF16,) * 4]
    assert rows == ["cutlass", "cublasLt", "cublas"]
    assert select(request, Arch(90)).library == "cutlass"
    assert request.key() != small_request(host, library=None).key()
    a, b = host.array(np.ones((4, 16)), "bf16"), host.array(np.ones((16, 8)), "bf16")
    assert (grouped_matmul([a], [b], autotune=True)[0].numpy().astype(float) == 16).all()
    assert (grouped_matmul(a, b[None], [4], autotune=True).numpy().astype(float) == 16).all()


def test_groups_are_told_in_the_mean(host):
    assert cublaslt.mean_extents(small_request(host)) == (3, 8, 16)
    a = tuple(host.zeros((m, k), "bf16") for m, k in ((2, 16), (6, 48)))
    b = tuple(host.zeros((k, n), "bf16") for k, n in ((16, 8), (48, 24)))
    assert cublaslt.mean_extents(GroupedMatmulListRequest(a, b)) == (4, 16, 32)
