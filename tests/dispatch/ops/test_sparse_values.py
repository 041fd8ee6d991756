"""The kernel of products of known patterns, compiled by g++ and run over the host's memory, against SciPy."""

import ctypes
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dispatch.errors import Refused
from dispatch.keys import C64, C128, F32, F64
from dispatch.libraries.cusparse import spgemm_values
from dispatch.libraries.cusparse.descriptors import SparseSpec
from dispatch.libraries.cusparse.spgemm_values import PatternProduct, entries_of, lanes_of, longest_row
from dispatch.libraries.nvrtc.kernel import Kernel
from dispatch.testing.check import ROUNDOFF

sp = pytest.importorskip("scipy.sparse")
spec = importlib.util.spec_from_file_location("blocks_on_cpu", Path(__file__).with_name("blocks_on_cpu.py"))
blocks_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(blocks_on_cpu)

CSR = 1
LANES = """
template <class E> static E __shfl_sync(unsigned, E x, int from)
{
    static E given[1024];
    given[threadIdx.x] = x;
    __syncthreads();
    const E theirs = given[threadIdx.x / 32 * 32 + from];
    __syncthreads();
    return theirs;
}
static int atomicCAS(int* at, int expected, int x) { const int old = *at; if (old == expected) *at = x; return old; }
template <class E> static E atomicAdd(E* at, E x) { const E old = *at; *at += x; return old; }
"""
PARAMETERS = {
    spgemm_values.LIST: (
        *("const int* a_rows", "const int* a_columns", "const int* b_rows", "const int* b_columns"),
        *("const int* known_rows", "const int* known_columns", "int* starts", "Term* terms"),
        *("int lines", "unsigned entries"),
    ),
    spgemm_values.ADD: (
        *(
            "const Number* a_values",
            "const Number* b_values",
            "Number* out_values",
            "int* out_rows",
            "int* out_columns",
        ),
        *("const int* known_rows", "const int* known_columns", "const int* starts", "const Term* terms"),
        *("Number alpha", "int lines", "int count"),
    ),
}


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return blocks_on_cpu.InBlocks(tmp_path_factory.mktemp("values"))


@pytest.fixture
def executor(on_cpu, monkeypatch):
    """What launches are made for, which run on the CPU: a warp's turns one by one, as its lanes wait for each other."""
    made, known = SimpleNamespace(target=SimpleNamespace(value=3), stream=None, launches=[]), []
    made.device = SimpleNamespace(allocate=lambda nbytes, _: Room(nbytes))

    def loaded(source, name, chosen, _):
        assert source == spgemm_values.SOURCE
        known.append((name, chosen))
        return len(known)

    def launch(function, blocks, *rest):
        *extents, shared, target, pointers, _ = rest
        assert tuple(extents) == (1, 1, spgemm_values.THREADS, 1, 1)
        assert target is made.target
        assert shared <= spgemm_values.MAX_BYTES
        name, chosen = known[function.value - 1]
        words = dict(option[2:].split("=") for option in chosen[1:])
        made.launches.append((name, int(words["GROUP"]), int(words["LANES"])))
        real = ctypes.c_double if words["REAL"] == "double" else ctypes.c_float
        number = type("Number", (ctypes.Structure,), {"_fields_": [("part", real * int(words["PARTS"]))]})
        by_value = {"Number": number, "int": ctypes.c_int, "unsigned": ctypes.c_uint}
        parameters = PARAMETERS[name]
        kinds = [by_value.get(one.rpartition(" ")[0], ctypes.c_void_p) for one in parameters]
        given = [kind.from_address(at) for kind, at in zip(kinds, pointers, strict=True)]
        source = LANES + spgemm_values.SOURCE
        on_cpu.launched(source, name, chosen, parameters, (blocks, spgemm_values.THREADS), given)
        return 0

    def copied(to, source, nbytes, _):
        ctypes.memmove(to, source, nbytes)

    driver = SimpleNamespace(
        cuLaunchKernel=SimpleNamespace(unchecked=launch),
        cuMemcpyDtoHAsync=copied,
        cuMemcpyHtoDAsync=copied,
        cuStreamSynchronize=lambda _: None,
    )
    monkeypatch.setattr(spgemm_values, "driver", driver)
    monkeypatch.setattr(spgemm_values, "loaded", loaded)
    return made


class Room:
    """Memory of the host, filled with what nobody wrote."""

    def __init__(self, nbytes):
        self.held = np.full(nbytes, 0xA5, np.uint8)
        self.base = self.held.ctypes.data


def drawn(rng, dtype, count):
    values = rng.standard_normal(count) + (1j * rng.standard_normal(count) if dtype.is_complex else 0)
    return values.astype(dtype.numpy)


def pattern(rng, m, n, counts):
    """Offsets and sorted columns of rows with so many elements, none twice."""
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    columns = [np.sort(rng.choice(n, count, replace=False)) for count in counts]
    return ends, np.concatenate([*columns, np.zeros(0)]).astype(np.int32), (m, n)


def said_of(shape, dtype, nnz, first):
    return SparseSpec(CSR, shape, nnz, 0, (1, 1), dtype.cuda, 4, 4, first, first + 1, first + 2)


def multiplied(executor, a, b, exact, dtype, alpha, rng, turns=1):
    """Values by the kernel, for a pattern whose columns come in any order, and that order."""
    (m, n) = exact.shape
    spans = zip(exact.indptr[:-1], exact.indptr[1:], strict=True)
    order = np.concatenate([rng.permutation(np.arange(*span)) for span in spans])
    rows, columns = exact.indptr.astype(np.int32), exact.indices[order.astype(int)].astype(np.int32)
    sizes = entries_of(longest_row(executor, rows.ctypes.data, m))
    out = np.full(exact.nnz, np.nan, dtype.numpy), np.full(m + 1, -7, np.int32), np.full(exact.nnz, -7, np.int32)
    arrays = (*a[:3], *b[:3], *out)
    front = said_of(a[3], dtype, len(a[0]), 0), said_of(b[3], dtype, len(b[0]), 3)
    spec = said_of((m, n), dtype, exact.nnz, 6)
    held = rows.ctypes.data, columns.ctypes.data
    addresses = [one.ctypes.data for one in arrays]
    launch = PatternProduct(executor, front, spec, alpha, held, [addresses[at] for at in (1, 2, 4, 5)], sizes)
    for at in (1, 2, 4, 5):
        addresses[at] = None  # of indices, which are read no more
    for _ in range(turns):
        out[0][...], out[1][...], out[2][...] = np.nan, -7, -7
        launch.enqueue(addresses)
    np.testing.assert_array_equal(out[1], rows)
    np.testing.assert_array_equal(out[2], columns)
    return out[0], order.astype(int)


CASES = {  # extents, and the elements of each row of A and of B; a number for any up to it
    "short rows": ((37, 50, 40), 5, 8),
    "empty rows and one long": ((40, 300, 900), [0] * 7 + [60] + [0] * 32, 29),
    "more elements of A than a warp has lanes": ((3, 200, 64), [90, 33, 0], 3),
    "nothing": ((4, 5, 6), [0] * 4, [1] * 5),
}


@pytest.mark.parametrize("dtype", [F32, F64, C64, C128], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_it_multiplies_as_scipy_does(case, dtype, executor, rng):
    (m, k, n), *counts = CASES[case]
    of_a, of_b = (
        rng.integers(0, each + 1, rows) if isinstance(each, int) else each
        for each, rows in zip(counts, (m, k), strict=True)
    )
    (a_ends, a_columns, a_shape), (b_ends, b_columns, b_shape) = pattern(rng, m, k, of_a), pattern(rng, k, n, of_b)
    a_values, b_values = drawn(rng, dtype, len(a_columns)), drawn(rng, dtype, len(b_columns))
    wide = np.complex128 if dtype.is_complex else np.float64
    a = sp.csr_array((a_values.astype(wide), a_columns, a_ends), a_shape)
    b = sp.csr_array((b_values.astype(wide), b_columns, b_ends), b_shape)
    exact = (a @ b).tocsr()
    alpha = 0.5 - 2j if dtype.is_complex else -1.5
    given = (a_values, a_ends, a_columns, a_shape), (b_values, b_ends, b_columns, b_shape)
    found, order = multiplied(executor, *given, exact, dtype, alpha, rng, turns=2)
    size = (abs(a) @ abs(b)).tocsr()
    expected, bound = alpha * exact.data[order], 8 * abs(alpha) * ROUNDOFF[dtype][0] * (m + k) ** 0.5
    assert (np.abs(found - expected) <= bound * size.data[order]).all()
    group = spgemm_values.THREADS if "long" in case else 32
    assert [name for name, *_ in executor.launches[-4:]].count(spgemm_values.ADD) == 2
    assert {one for _, one, _ in executor.launches} == {group}


def test_elements_that_are_stored_twice_count_twice(executor, rng):
    ends, columns = np.array([0, 3, 4], np.int32), np.array([1, 1, 0, 1], np.int32)
    values = np.array([1.0, 2.0, 4.0, 8.0])
    a = sp.csr_array((values, columns, ends), (2, 2))
    exact = sp.csr_array(np.ones((2, 2)))
    given = values, ends, columns, (2, 2)
    found, order = multiplied(executor, given, given, exact, F64, 1.0, rng)
    np.testing.assert_array_equal(found, (a.toarray() @ a.toarray()).reshape(-1)[order])


def test_terms_come_in_the_order_of_the_elements_of_a(executor, rng):
    """So that a sum of the same numbers is the same each time; these are so far apart that another order shows."""
    k = 70
    ends, columns = np.array([0, k], np.int32), np.arange(k, dtype=np.int32)
    a_values = (10.0 ** rng.integers(-8, 8, k) * rng.choice([-1, 1], k)).astype(np.float32)
    b_ends, b_columns = np.arange(k + 1, dtype=np.int32), np.zeros(k, np.int32)
    given = (a_values, ends, columns, (1, k)), (np.ones(k, np.float32), b_ends, b_columns, (k, 1))
    exact = sp.csr_array(np.ones((1, 1)))
    found = {float(multiplied(executor, *given, exact, F32, 1.0, rng)[0][0]) for _ in range(5)}
    lanes = executor.launches[-1][2]
    partial = np.zeros(lanes, np.float32)
    for at, value in enumerate(a_values):
        partial[at % lanes] += value
    while len(partial) > 1:
        half = len(partial) // 2
        partial = partial[:half] + partial[half:]
    assert found == {float(partial[0])}


def test_more_lanes_add_up_a_sum_where_sums_are_few_or_long():
    assert lanes_of(3_400_000, 7) == 1
    assert lanes_of(100, 3000) == 32
    assert lanes_of(0, 0) == 1
    lanes = [lanes_of(10**6, longest) for longest in (1, 100, 10_000, 1_000_000)]
    assert lanes == sorted(lanes)
    assert lanes[-1] == 32


def test_products_of_too_many_terms_are_the_librarys(executor, rng, monkeypatch):
    ends, columns = np.array([0, 2, 4], np.int32), np.array([0, 1, 0, 1], np.int32)
    given = np.ones(4), ends, columns, (2, 2)
    monkeypatch.setattr(spgemm_values, "MAX_TERMS", 7)
    with pytest.raises(Refused, match="8 terms"):
        multiplied(executor, given, given, sp.csr_array(np.ones((2, 2))), F64, 1.0, rng)
    monkeypatch.setattr(spgemm_values, "MAX_TERMS", 8)
    found, _ = multiplied(executor, given, given, sp.csr_array(np.ones((2, 2))), F64, 1.0, rng)
    np.testing.assert_array_equal(found, 2)


def test_tables_are_as_small_as_their_rows_let_them_be():
    assert entries_of(0) == (8, 32)
    assert entries_of(6) == (8, 32)
    assert entries_of(7) == (16, 32)
    assert entries_of(384) == (512, 32)
    assert entries_of(385) == (1024, 256)
    assert entries_of(3072) == (4096, 256)
    assert entries_of(3073) is None


@pytest.mark.parametrize("dtype", [F32, F64, C64, C128], ids=str)
@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("lanes", [1, 8])
def test_nvrtc_compiles_it(dtype, name, lanes):
    chosen = spgemm_values.options(dtype.cuda, 32 if lanes > 1 else 256, lanes)
    kernel = Kernel(spgemm_values.SOURCE, name, lambda _: None, chosen)
    assert blocks_on_cpu.kernels_on_cpu.size_for_sm_90(kernel) > 0
