"""This library's kernel of spmm and spmm_batched on the GPU: patterns of many blocks, widths, strides, batches."""

import numpy as np
import pytest

import dispatch as dp

sp = pytest.importorskip("scipy.sparse")

S = dp.sparse
BOUNDS = {
    "f32": 2.0**-24,
    "f64": 2.0**-53,
    "c64": 4 * 2.0**-24,
    "c128": 4 * 2.0**-53,
    "f16": 2.0**-24,
    "bf16": 2.0**-24,
}
ROUNDED = {"f16": 2.0**-11, "bf16": 2.0**-8}


def lengths_of(rng):
    """Rows by their elements: few and many, one of half of all, a power law, none in places."""
    dense = np.full(30_000, 3)
    dense[[0, 22_222, 29_999]] = 5000, 100_000, 257
    holes = np.zeros(200_000, int)
    holes[100_000:105_000] = 20
    return {
        "even": rng.poisson(7, 40_000),
        "one dense row": dense,
        "a power law": np.minimum((rng.pareto(1.0, 30_000) * 3).astype(int), 100_000),
        "nearly all empty": holes,
        "one row": np.array([300_000]),
        "rows of about a block": rng.choice([0, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025, 3000], 300),
    }


def drawn(rng, dtype, *shape):
    values = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype[0] == "c" else 0)
    return values.astype(dp.keys.Dtype.of(dtype).numpy)


def wide(array):
    return array.astype("c16" if array.dtype.kind == "c" else "f8")


def right(matrix, b):
    """What is right, and the magnitudes that it is a sum of."""
    values, ends, columns, n = matrix
    shape = (len(ends) - 1, n)
    exact, sizes = (sp.csr_array((some, columns, ends), shape=shape) for some in (wide(values), np.abs(wide(values))))
    return exact @ wide(b), sizes @ np.abs(wide(b))


def close(found, exact, size, dtype):
    assert found.shape == exact.shape
    off, own = np.abs(wide(found) - exact), ROUNDED.get(dtype, 0)
    least = 2.0**-25 if dtype == "f16" else 0  # half the least number
    assert (off <= 100 * BOUNDS[dtype] * size + own * np.abs(exact) + least).all(), off.max()


def matrix_of(rng, name, dtype, n=5000):
    lengths = lengths_of(rng)[name]
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype("i4")
    return drawn(rng, dtype, ends[-1]), ends, rng.integers(0, n, ends[-1]).astype("i4"), n


# Each kernel is compiled once, which takes a second: of other dtypes there are two patterns.
PATTERNS = [(name, dtype) for name in lengths_of(np.random.default_rng(0)) for dtype in ("f32", "c128")]
PATTERNS += [(name, dtype) for name in ("one dense row", "a power law") for dtype in ("f64", "c64", "f16", "bf16")]


@pytest.mark.parametrize(("name", "dtype"), PATTERNS)
def test_any_pattern_gives_what_is_right_and_the_same_bits(name, dtype, gpu, rng):
    values, ends, columns, n = matrix = matrix_of(rng, name, dtype)
    a = S.csr(*map(gpu.array, (values, ends, columns)), (len(ends) - 1, n))
    for k in (8, 5) if dtype == "f32" else (8,):
        b = drawn(rng, dtype, n, k)
        request = dp.SpmmRequest(*a, gpu.array(b), library="own")
        found = dp.run(request).numpy()
        close(found, *right(matrix, b), dtype)
        for _ in range(5):
            assert dp.run(request).numpy().tobytes() == found.tobytes()


WIDTHS = [(k, "f32") for k in (1, 2, 3, 7, 16, 33, 64, 130, 260)] + [(3, "f64"), (64, "f64")]


@pytest.mark.parametrize(("k", "dtype"), WIDTHS)
@pytest.mark.parametrize("by_rows", [True, False])
def test_any_width_and_order(k, dtype, by_rows, gpu, rng):
    """A column-major B of several columns is copied; what is added and the result lie in that order, too."""
    values, ends, columns, n = matrix = matrix_of(rng, "one dense row", dtype)
    m = len(ends) - 1
    a = S.csr(*map(gpu.array, (values, ends, columns)), (m, n))
    b, c = drawn(rng, dtype, n, k), drawn(rng, dtype, m, k)
    exact, size = right(matrix, b)

    def laid(array):
        return gpu.array(array) if by_rows else gpu.array(np.ascontiguousarray(array.T)).T

    out = laid(np.full_like(c, np.nan))
    call = dp.prepare(dp.SpmmRequest(*a, laid(b), c=laid(c), alpha=-2.0, beta=0.5, out=out, library="own"))
    for _ in range(3):  # the second is recorded, the third a replay
        close(call().numpy(), 0.5 * wide(c) - 2 * exact, 2 * size + np.abs(wide(c)), dtype)


@pytest.mark.parametrize(("dtype", "index"), [*((dtype, "i4") for dtype in BOUNDS), ("f32", "i8")])
@pytest.mark.parametrize("kind", ["each", "one offsets", "one pattern", "one A"])
def test_a_batch_is_one_launch_over_matrices_of_any_size(dtype, kind, index, gpu, rng):
    """Of one block each, and of several with long rows, and with more columns than a block has."""
    for lengths, n, k in ((rng.poisson(4, 30), 20, 8), (rng.choice([0, 3, 70, 500, 2000], 200), 700, 140)):
        orders = [rng.permutation(lengths) if kind == "each" else lengths for _ in range(5)]
        ends = np.array([np.concatenate([[0], np.cumsum(order)]) for order in orders]).astype(index)
        values = drawn(rng, dtype, 5, ends[0, -1])
        columns = rng.integers(0, n, values.shape).astype(index)
        parts = [
            values[0] if kind == "one A" else values,
            ends if kind == "each" else ends[0],
            columns[0] if kind in ("one A", "one pattern") else columns,
        ]
        b = drawn(rng, dtype, 5, n, k)
        request = dp.BatchedSpmmRequest(
            *map(gpu.array, parts), dp.SparseForm("csr", (len(lengths), n)), gpu.array(b), library="own"
        )
        call = dp.prepare(request)
        found = [call().numpy() for _ in range(3)]
        assert len({one.tobytes() for one in found}) == 1
        for number in range(5):
            own = [part if part.ndim == 1 else part[number] for part in parts]
            close(found[0][number], *right((*own, n), b[number]), dtype)


def test_repeated_calls_over_other_memory_and_factors(gpu, rng):
    """What is remembered, recorded and relocated is compared with each matrix's own product."""
    held = []
    for _ in range(4):
        values, ends, columns, n = matrix = matrix_of(rng, "rows of about a block", "f64")
        b = drawn(rng, "f64", n, 6)
        count = 60_000  # as many in each, so that their layouts are one
        ends = np.minimum(ends, count)
        ends[-1] = count
        matrix = (np.resize(values, count), ends, np.resize(columns, count), n)
        on_gpu = S.csr(*map(gpu.array, matrix[:3]), (len(ends) - 1, n))
        held.append((on_gpu, gpu.array(b), right(matrix, b)))
    for turn in range(120):
        a, b, (exact, size) = held[turn % 4]
        close(S.spmm(a, b, alpha=1.0 + turn).numpy(), (1 + turn) * exact, (1 + turn) * size, "f64")


def test_runs_on_several_streams_at_once_do_not_share_what_blocks_leave(gpu, rng):
    made = []
    for name in ("one dense row", "one row", "a power law"):
        values, ends, columns, n = matrix = matrix_of(rng, name, "f64")
        b = drawn(rng, "f64", n, 4)
        a = S.csr(*map(gpu.array, (values, ends, columns)), (len(ends) - 1, n))
        made.append((dp.SpmmRequest(*a, gpu.array(b), library="own"), right(matrix, b)))
    gpu.synchronize()
    streams, found = [gpu.stream() for _ in range(3)], []
    for turn in range(20):
        for number, stream in enumerate(streams):
            request, expected = made[(turn + number) % len(made)]
            with stream:
                found.append((dp.run(request), expected))
    gpu.synchronize()
    for result, (exact, size) in found:
        close(result.numpy(), exact, size, "f64")


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
def test_batches_of_16_bits_in_each_format_are_added_up_in_f32(kind, dtype, gpu):
    """So many ones are no sum of numbers that are rounded to 16 bits at each addition."""
    count, form = 4096, dp.SparseForm(kind, (1, 4096) if kind != "csc" else (4096, 1))
    of_one, at = np.array([0, count], "i4"), np.arange(count, dtype="i4")
    rows, columns = {"csr": (of_one, at), "csc": (at, of_one), "coo": (np.zeros_like(at), at)}[kind]
    values = gpu.array(np.ones((3, count))).astype(dtype)
    b = gpu.array(np.ones((3, form.shape[1], 4))).astype(dtype)
    if kind == "csc":
        trans, b = "t", gpu.array(np.ones((3, count, 4))).astype(dtype)
    else:
        trans = "n"
    parts = (values, gpu.array(rows), gpu.array(columns), form, b)
    for library in ("own", "cusparse") if kind != "coo" else ("cusparse",):
        for out in (None, gpu.zeros((3, 1, 4), "f32")):
            found = dp.spmm_batched(*parts, trans=trans, out=out, library=library)
            np.testing.assert_array_equal(found.numpy().astype("f4"), np.full((3, 1, 4), count))


@pytest.mark.parametrize("dtype", ["f32", "f64", "c64", "c128", "f16", "bf16"])
@pytest.mark.parametrize("kind", ["csc", "bsr"])
def test_batches_in_csc_and_of_blocks(kind, dtype, gpu, rng):
    count, m, n, k = 4, 96, 128, 16
    if kind == "csc":
        rows = np.array(
            [np.concatenate([np.sort(rng.choice(m, 5, replace=False)) for _ in range(n)]) for _ in range(count)]
        )
        columns, values = np.arange(0, 5 * n + 1, 5), drawn(rng, dtype, count, 5 * n)
        matrices = [sp.csc_array((wide(v), r, columns), (m, n)) for v, r in zip(values, rows, strict=True)]
        form = dp.SparseForm("csc", (m, n))
    else:
        columns = np.array(
            [np.concatenate([np.sort(rng.choice(32, 6, replace=False)) for _ in range(24)]) for _ in range(count)]
        )
        rows, values = np.arange(0, 6 * 24 + 1, 6), drawn(rng, dtype, count, 144, 4, 4)
        matrices = [sp.bsr_array((wide(v), c, rows), (m, n)) for v, c in zip(values, columns, strict=True)]
        form = dp.SparseForm("bsr", (m, n), 0, (4, 4))
    b, c = drawn(rng, dtype, count, n, k), drawn(rng, dtype, count, m, k)
    parts = [gpu.array(part) for part in (values, rows.astype("i4"), columns.astype("i4"))]
    for right_side in (gpu.array(b), gpu.array(np.ascontiguousarray(b.swapaxes(1, 2))).mT):
        call = dp.prepare(dp.BatchedSpmmRequest(*parts, form, right_side, c=gpu.array(c), alpha=2.0, beta=-1.0))
        for _ in range(3):
            found = call().numpy()
            for number, matrix in enumerate(matrices):
                one, size = matrix @ wide(b[number]), abs(matrix) @ np.abs(wide(b[number]))
                close(found[number], 2 * one - wide(c[number]), 2 * size + np.abs(wide(c[number])), dtype)
