"""Lines of callers' operators: compiled by NVRTC, shown where they do not compile, and which rows take them."""

# ruff: noqa: E501 - tables of errors

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from cudabind import nvrtc
from cudabind.errors import LibraryNotFound
from dispatch.errors import BadRequest
from dispatch.keys import C128, F32, F64, HOST, Dtype
from dispatch.libraries.cusparse.operator_source import KERNEL_OPTIONS, Operators
from dispatch.libraries.nvrtc import launching
from dispatch.ops.sparse import own_compiled, product_kernels, semiring_kernels
from dispatch.ops.sparse.cases_compiled import EPILOGUES, OF_COMPLEX, OF_REAL, SEMIRINGS
from dispatch.ops.sparse.semiring_tiles import Shape, Tile, shape_of, tile_of
from dispatch.ops.sparse.semirings import NAMED_SEMIRINGS
from dispatch.table.select import select

spec = importlib.util.spec_from_file_location("matrices_on_cpu", Path(__file__).with_name("matrices_on_cpu.py"))
shared = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shared)
GPU, of_lengths, tensors = shared.GPU, shared.of_lengths, shared.tensors

S = dp.sparse
DEV = None


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = dp.device("host")


@pytest.fixture
def executor(tmp_path, monkeypatch):
    on_cpu = shared.compiled_on_cpu
    return on_cpu.executor_on(on_cpu.blocks_on_cpu.InBlocks(tmp_path), monkeypatch)


@pytest.fixture(scope="module")
def compiler():
    try:
        nvrtc.nvrtcVersion()
    except LibraryNotFound as error:
        pytest.skip(str(error))


def operators(name, dtype, *, adds_c=False):
    ring = SEMIRINGS[name]
    ending = None if ring.epilogue is None else ring.epilogue.code
    return Operators(dtype, ring.multiply.code, ring.add.code, ending, ring.identity, adds_c)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64", "c64", "c128"])
def test_nvrtc_compiles_them(dtype):
    dtype = Dtype.of(dtype)
    compute = own_compiled.COMPUTE.get(dtype, F32)
    widest = 16 // compute.itemsize
    for number, name in enumerate(OF_COMPLEX if dtype.is_complex else OF_REAL):
        vector = widest if number % 2 else 1
        text = semiring_kernels.source(
            operators(name, compute, adds_c=number % 3 == 1).as_namespace(),
            (dtype, dtype),
            (4, 8) if number % 2 else (8, 4),
            Tile(1024, 1 if vector > 1 else 4),
            Shape(vector, 8),
            (number % 2 == 1, True),
        )
        assert nvrtc.compile(text, "kernel.cu", ("-arch=sm_90", *KERNEL_OPTIONS)).code


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("dtype", "name"),
    [("f32", "positive"), ("f64", "by row"), ("c64", "conjugate"), ("c128", "by row"), ("f16", "by row")],
)
def test_nvrtc_compiles_epilogues_of_rows(dtype, name, rng):
    dtype = Dtype.of(dtype)
    request = dp.SpmvOpRequest(
        *tensors(of_lengths(rng, [1, 2], 3, dtype)), DEV.zeros((3,), str(dtype)), EPILOGUES[name]
    )
    tile = product_kernels.tile_of(dtype, 10**6)
    chosen = product_kernels.options(dtype, dtype, (4, 4), tile, conj=False, strided=False)
    text, _, options = own_compiled.epilogue_kernel(request, chosen)
    assert nvrtc.compile(text, "kernel.cu", ("-arch=sm_90", *options)).code


LINES = {
    "multiply": ("return a * q;", r"semiring.multiply: got semiring.multiply.code, of which line 1, `return a \* q;`, does not compile: identifier \"q\" is undefined; expected CUDA C\+\+ that returns a Number; it can read a and b"),
    "add": ("if (a < b)\n    return a;\nreturn STEPS;", "semiring.add: got semiring.add.code, of which line 3, `return STEPS;`, does not compile: identifier \"STEPS\" is undefined"),
    "epilogue": ("sum = c;", "semiring.epilogue: got semiring.epilogue.code, of which line 1, `sum = c;`, does not compile: missing return statement.*it can read sum and c"),
    "of rows": ("return x * THREADS;", "epilogue: got epilogue.code, of which line 1, `return x . THREADS;`, does not compile: identifier \"THREADS\" is undefined.*it can read row and x"),
}  # fmt: skip


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("side", LINES)
def test_lines_that_do_not_compile_are_shown_and_see_nothing_of_the_kernel(side, executor, monkeypatch, rng):
    code, said = LINES[side]
    monkeypatch.setattr(
        launching,
        "loaded",
        lambda text, name, options, _: nvrtc.compile(text, f"{name}.cu", ("-arch=sm_90", *options)).code,
    )
    a = tensors(of_lengths(rng, [1, 2], 3))
    own = S.SparseOperator(code, np.add)
    if side == "of rows":
        request = dp.SpmvOpRequest(*a, DEV.zeros((3,), "f64"), own)
    else:
        request = dp.SpmmOpRequest(*a, DEV.zeros((3, 2), "f64"), replace(NAMED_SEMIRINGS["plus_times"], **{side: own}))
    with pytest.raises(BadRequest, match=said):
        own_compiled.plan(request, executor, select(request, GPU))


# -- what is chosen ---------------------------------------------------------------------------------------------------
def test_this_librarys_rows_come_first_and_take_all_that_cusparse_refuses(rng):
    for index, base in (("i4", 0), ("i8", 1)):
        a = tensors(of_lengths(rng, [0, 0], 3), base, (index, "i4"))
        for request in (
            dp.SpmmOpRequest(*a, DEV.zeros((3, 2), "f64")),
            dp.SpmvOpRequest(*a, DEV.zeros((3,), "f64")),
        ):
            assert select(request, GPU).library == "own"
            assert select(request, HOST).stands_for == "own"


def test_tiles_follow_the_extents_alone_and_fit():
    for rows, count, columns in ((10**4, 10**5, 64), (10**5, 10**6, 1), (10**6, 10**7, 64), (5, 0, 3), (1, 10**6, 200)):
        tile = tile_of(rows, count, columns)
        assert tile.max_row >= semiring_kernels.LONG
        for dtype in (F32, F64, C128):
            for vector in (1, 16 // dtype.itemsize):
                shape = shape_of(vector, columns, tile.element_lanes)
                assert tile.element_lanes * shape.column_lanes <= 32
                elements = (tile.steps + tile.max_row) * (dtype.itemsize + 8)
                shared = elements + 4 * (tile.steps + 2) + semiring_kernels.RUNS * shape.wide * dtype.itemsize
                assert shared + 256 <= 48 << 10
    assert shape_of(4, 64, 1) == (4, 16)
    assert shape_of(1, 33, 1).column_lanes in (8, 16)
