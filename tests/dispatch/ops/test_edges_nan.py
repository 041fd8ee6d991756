"""One NaN anywhere in a matrix of linear algebra, as the docs say: small and larger, oblong, and one of a batch.

Of the table of docs/linear_algebra.md the calls whose results have NaN then. Which kernel or library carries a call out
hangs on the size, on the batch and on `library`, and what it does with NaN on where that stands.
"""

import importlib.util
import inspect
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, NoRow, Refused

SOURCE = Path(__file__).with_name("test_edges.py")
spec = importlib.util.spec_from_file_location("edges", SOURCE)
edges = importlib.util.module_from_spec(spec)
spec.loader.exec_module(edges)

CALLS = [call for call, said in edges.SAID.items() if said["NaN"] in ("NaN", "rank 0")]
SQUARE = ((1, 1), (4, 4), (65, 65), (130, 130))
OBLONG = ((65, 40), (40, 65), (15, 33), (63, 3))
TALL_OR_WIDE = (
    "lu_factor(a)", "qr(a)", 'qr(a, mode="raw")', 'lstsq(a, b, driver="gels")', "lstsq(a, b)", "svd(a)", "pinv(a)",
    'svd(a, driver="gesvdj")', 'svd(a, driver="gesvdp")', "matrix_rank(a)", "matrix_norm(a)", "refined_lstsq(a, b)",
)  # fmt: skip
HALF = ("chol", "cho_", "ldl", "eigh", "generalized", 'assume_a="pos"', 'assume_a="sym"')  # of which a triangle is read
REFLECT = ("qr", "orgqr", "ormqr", "qr_multiply")
LIBRARIES = ("own", "cublas", "cusolverDn")
BATCH = 3


def op_of(call):
    """The op of a call of the table."""
    return call.split("(")[0]


def spots(call, rows, cols):
    """Places of a NaN that the call reads, and that all of its results hang on; as the docs say of reflections."""
    if rows == cols == 1 and op_of(call) in (*REFLECT, "randomized_svd"):
        return  # R's alone, and refused
    yield rows // 2, min(rows, cols) // 3
    yield rows - 1, 0
    if op_of(call) in ("orgqr", "ormqr"):
        return
    yield 0, 0
    if op_of(call) in REFLECT and rows <= cols:
        return  # what is right of the last reflection, or is its last element, is R's alone
    yield rows - 1, cols - 1
    if 'assume_a="lower"' not in call:
        yield 0, cols - 1


def sound(shape):
    """A positive definite matrix, or any oblong one, whose determinant is in the range of f32."""
    rng = np.random.default_rng(shape[0])
    a = rng.standard_normal(shape)
    return a / np.sqrt(shape[0]) if shape[0] != shape[1] else a @ a.T / (5 * shape[0]) + np.eye(shape[0])


def operands(shape, spot, dtype, batch, dev, *, mirrored):
    """What a call of the table names; of a batch the matrix in the middle has the NaN."""
    rows, cols = shape
    a = np.broadcast_to(sound(shape), (*batch, *shape)).copy()
    for row, col in (spot, spot[::-1]) if mirrored else (spot,):
        a[(*(1 for _ in batch), row, col)] = np.nan
    values = {"b": np.ones((rows, 2)), "p": np.eye(cols), "tau": np.ones(min(shape))}
    given = {name: dev.array(np.broadcast_to(one, (*batch, *one.shape)).copy(), dtype) for name, one in values.items()}
    pivots = np.broadcast_to(np.arange(1, rows + 1), (*batch, rows)).copy()
    return {"a": dev.array(a, dtype), "pivots": dev.array(pivots, "i64"), **given}


def complaint(call, made, batch):
    """What is otherwise than it should be: NaN in each result of one matrix, and none in those of the others."""
    broken = [False, True, False] if batch else [True]
    for number, tensor in enumerate(made if isinstance(made, tuple) else (made,)):
        array = tensor.numpy()
        if op_of(call) == "matrix_rank" and number == 0:
            found = (array.reshape(len(broken), -1) == 0).all(axis=1)
        elif array.dtype.kind not in "fc" or not array.size:
            continue
        else:
            each = array.reshape(len(broken), -1)
            found = np.isnan(each).any(axis=1)
            if np.isinf(each).any():
                return f"result {number} has infinities"
        if found.tolist() != broken:
            return f"result {number} has NaN of {found.tolist()}"
    return ""


def libraries(call, dev):
    """The libraries that a call may be given by name, and none."""
    takes = "library" in inspect.signature(getattr(dp, op_of(call))).parameters
    return (None, *LIBRARIES) if takes and dev.name != "host" else (None,)


def complaints_of(dev, call, shape, dtype):
    """Each place, with one matrix and a batch, and each library."""
    mirrored = any(word in call for word in HALF)
    for batch in ((), (BATCH,)):
        for spot in spots(call, *shape):
            names = {"dp": dp, **operands(shape, spot, dtype, batch, dev, mirrored=mirrored)}
            for library in libraries(call, dev):
                named = call if library is None else f"{call[:-1]}, library={library!r})"
                try:
                    with np.errstate(all="ignore"):
                        made = eval(f"dp.{named}", names)
                except (BadRequest, NoRow, Refused):  # a library that has none of its rows, or none that takes it
                    assert library, f"{named} of {shape} {dtype} is refused"
                    continue
                if said := complaint(call, made, batch):
                    yield f"{named} of {batch + shape} {dtype} with NaN at {spot}: {said}"


@pytest.mark.parametrize("call", CALLS)
def test_a_nan_anywhere_is_in_each_result_of_its_matrix(call):
    pytest.importorskip("scipy")
    dev = dp.device("host")
    for shape, dtype in zip(SQUARE[:3], ("f64", "f32", "f64"), strict=True):
        assert not list(complaints_of(dev, call, shape, dtype))


@pytest.mark.parametrize("call", TALL_OR_WIDE)
def test_a_nan_anywhere_in_an_oblong_matrix_is_in_each_result(call):
    pytest.importorskip("scipy")
    assert set(TALL_OR_WIDE) <= set(CALLS)
    for shape in OBLONG:
        if shape[0] > shape[1] or "refined" not in call:
            assert not list(complaints_of(dp.device("host"), call, shape, "f64"))
