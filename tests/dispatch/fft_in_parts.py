"""What tests of transforms over several GPUs share: numbers, what is right, and a plan that goes there and back."""

import numpy as np

NUMPY = {"c64": "c8", "c128": "c16", "f32": "f4", "f64": "f8"}


def drawn(rng, shape, dtype="c64"):
    values = rng.standard_normal(shape)
    if dtype[0] == "c":
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(NUMPY[dtype])


def right(x, sizes, norm=None):
    """In double precision."""
    axes = tuple(range(-len(sizes), 0))
    wide = x.astype("c16" if x.dtype.kind == "c" else "f8")
    return (np.fft.fftn if x.dtype.kind == "c" else np.fft.rfftn)(wide, axes=axes, norm=norm)


def close(found, expected):
    """To some units of the last place of the norm."""
    error = np.linalg.norm((found - expected).ravel()) / np.linalg.norm(expected.ravel())
    bound = 4 * np.finfo(found.dtype).eps * np.log2(2 * found.size)
    assert error <= bound, f"{error:.2e} > {bound:.2e}"


def look_at_parts(plan, whole):
    """Each part has what `split` says, and all of them have each element once."""
    parts, pieces = plan.parts, plan.split(whole)
    for part, piece in zip(parts, pieces, strict=True):
        assert part.shape == piece.shape
        assert np.array_equal(part.numpy(), piece)
    assert sum(piece.size for piece in pieces) == whole.size


def there_and_back(plan, x, sizes):
    plan.write(x)
    assert np.array_equal(plan.read(), x)
    look_at_parts(plan, x)
    for norm in (None, "ortho", "forward"):
        spectrum = plan.forward(norm).read()
        close(spectrum, right(x, sizes, norm))
        look_at_parts(plan, spectrum)
        close(plan.inverse(norm).read(), x)
        plan.write(x)
