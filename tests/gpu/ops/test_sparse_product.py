"""This library's kernel of sparse_mv on the GPU: patterns of many blocks, the same bits each time, several streams."""

import numpy as np
import pytest

import dispatch as dp

sp = pytest.importorskip("scipy.sparse")

S = dp.sparse
BOUNDS = {"f4": 2.0**-24, "f8": 2.0**-53, "c8": 4 * 2.0**-24, "c16": 4 * 2.0**-53}


def lengths_of(rng):
    """Rows by their elements: few and many, one of half of all, a power law, none in places."""
    dense = np.full(100_000, 3)
    dense[[0, 77_777, 99_999]] = 5000, 400_000, 257
    holes = np.zeros(700_000, int)
    holes[300_000:310_000] = 20
    return {
        "even": rng.poisson(7, 200_000),
        "one dense row": dense,
        "a power law": np.minimum((rng.pareto(1.0, 100_000) * 3).astype(int), 200_000),
        "nearly all empty": holes,
        "one row": np.array([3_000_000]),
        "rows of about a block": rng.choice([0, 255, 256, 257, 1535, 1536, 1537, 5000], 400),
    }


def drawn(rng, dtype, *shape):
    values = rng.standard_normal(shape)
    return (values + (1j * rng.standard_normal(shape) if dtype.startswith("c") else 0)).astype(dtype)


def parts_of(rng, name, dtype, n=50_000):
    lengths = lengths_of(rng)[name]
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype("i4")
    return drawn(rng, dtype, ends[-1]), rng.integers(0, n, ends[-1]).astype("i4"), ends


def right(values, columns, ends, x):
    """What is right, and the magnitudes that it is a sum of."""
    wide = np.complex128 if np.iscomplexobj(values) else np.float64
    shape = (len(ends) - 1, len(x))
    of = ((some, columns, ends) for some in (values.astype(wide), np.abs(values.astype(wide))))
    exact, sizes = (sp.csr_array(one, shape=shape) for one in of)
    return exact @ x.astype(wide), sizes @ np.abs(x.astype(wide))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", lengths_of(np.random.default_rng(0)))
def test_any_pattern_gives_what_is_right_and_the_same_bits(name, dtype, gpu, rng):
    values, columns, ends = parts_of(rng, name, dtype)
    x = drawn(rng, dtype, 50_000)
    a = S.csr(*map(gpu.array, (values, ends, columns)), (len(ends) - 1, len(x)))
    request = dp.SparseMvRequest(*a, gpu.array(x), library="own")
    found = dp.run(request).numpy()
    exact, size = right(values, columns, ends, x)
    assert (np.abs(found - exact) <= 60 * BOUNDS[dtype] * size).all()
    for _ in range(10):
        assert dp.run(request).numpy().tobytes() == found.tobytes()


def test_runs_on_several_streams_at_once_do_not_share_what_blocks_leave(gpu, rng):
    made = []
    for name in ("one dense row", "one row", "a power law"):
        values, columns, ends = parts_of(rng, name, "f8")
        x = drawn(rng, "f8", 50_000)
        a = S.csr(*map(gpu.array, (values, ends, columns)), (len(ends) - 1, len(x)))
        made.append((dp.SparseMvRequest(*a, gpu.array(x), library="own"), right(values, columns, ends, x)))
    gpu.synchronize()
    streams = [gpu.stream() for _ in range(3)]
    found = []
    for turn in range(30):
        for number, stream in enumerate(streams):
            request, expected = made[(turn + number) % len(made)]
            with stream:
                found.append((dp.run(request), expected))
    gpu.synchronize()
    for result, (exact, size) in found:
        assert (np.abs(result.numpy() - exact) <= 60 * BOUNDS["f8"] * size).all()
