"""Networks of small tensors that tests share: drawn ones of up to 24 operands, which lie in any way."""

import numpy as np

import dispatch as dp
from dispatch.ops.contraction import network

EXTENTS = (1, 1, 2, 3, 5, 7, 11)
MAX_ELEMENTS = 20_000  # elements of all operands and results on the way


def drawn(rng, most):
    """A spec of up to so many operands with up to 12 modes, and shapes: modes of one, of several, of all, twice."""
    while True:
        modes = "abcdefghijkl"[: rng.integers(1, 13)]
        sizes = {mode: int(rng.choice(EXTENTS)) for mode in modes}
        terms = []
        for _ in range(int(rng.integers(1, most + 1))):
            term = list(rng.choice(list(modes), int(rng.integers(0, min(4, len(modes)) + 1)), replace=False))
            if term and rng.random() < 0.1:
                term.append(term[int(rng.integers(len(term)))])
            terms.append("".join(term))
        there = sorted({mode for term in terms for mode in term})
        kept = [mode for mode in rng.permutation(there) if rng.random() < 0.3] if there else []
        spec, shapes = f"{','.join(terms)}->{''.join(kept)}", [tuple(sizes[mode] for mode in term) for term in terms]
        one = dp.device("host").zeros((), "f64")
        blank = [one.strided(shape, (0,) * len(shape)) for shape in shapes]
        if sum(map(len, terms)) < 60 and network.elements_of(dp.EinsumRequest(spec, blank)) < MAX_ELEMENTS:
            return spec, shapes


def numbers(rng, shape, kind):
    """Normal numbers, complex ones in both parts."""
    array = rng.standard_normal(shape)
    return (array + 1j * rng.standard_normal(shape) if kind[0] == "c" else array).astype(kind)


def lying(rng, dev, array):
    """An array as a tensor whose axes lie in any order, each forwards or backwards, with gaps or without."""
    order = rng.permutation(array.ndim)
    steps = [int(rng.choice([1, 1, 2, -1, -2])) for _ in order]
    wide = np.full(
        [array.shape[axis] * abs(step) for axis, step in zip(order, steps, strict=True)], np.nan, array.dtype
    )
    inside = tuple(slice(None, None, step) for step in steps)
    wide[inside] = array.transpose(order)
    part = dev.array(wide)[inside]
    strides = tuple(part.layout.strides[place] for place in np.argsort(order))
    return part.strided(array.shape, strides)


def numpys(spec, arrays, path):
    """The result in double precision, and that of the operands' magnitudes, two operands at a time."""
    optimize = ["einsum_path", *path] if len(arrays) > 2 else False
    wide = [array.astype(np.complex128 if array.dtype.kind == "c" else np.float64) for array in arrays]
    return [np.einsum(spec, *some, optimize=optimize) for some in (wide, [np.abs(array) for array in wide])]


def is_near(found, expected, size, arrays):
    """Whether a result is as near as roundoff lets it be, where each step adds that of its sums."""
    eps = np.finfo(found.dtype).eps
    return bool((np.abs(found - expected) <= 40 * len(arrays) * eps * (size + eps)).all())
