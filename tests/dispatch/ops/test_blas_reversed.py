"""Vectors that go backwards, as x[::-1] does: all calls of BLAS that refuse them are those that docs/blas.md lists."""

import inspect
import itertools
import re
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import NoRow
from dispatch.keys import Arch
from dispatch.ops import FAMILIES, blas
from dispatch.table.cublas import LEVEL3
from dispatch.table.select import select

DOCS = Path(__file__).parents[3] / "docs" / "blas.md"
N = 4
NUMBERS = ("rotg", "rotmg")  # they take no vectors
KINDS = {
    kind.op: kind
    for kind in vars(blas).values()
    if inspect.isclass(kind) and getattr(kind, "op", None) in FAMILIES["blas"][1]
}
OPS = [op for op in KINDS if op not in (*LEVEL3, *NUMBERS)] + ["dgmm"]
LISTED = re.compile(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", re.MULTILINE)


def vector(dtype, step):
    values = dp.device("host").array(np.arange(1, 1 + N * abs(step)), dtype)
    return values[::step]


def matrix(dtype, order):
    values = dp.device("host").array(np.ones((N, N)), dtype)
    return values.mT if order == "column-major" else values


def operands(op, dtype, order="row-major", steps=MappingProxyType({})):
    """Operands of a request, those vectors named in `steps` with that step."""
    dev, kind = dp.device("host"), KINDS[op]
    real = {"c64": "f32", "c128": "f64"}.get(dtype, dtype)
    others = {
        "a": lambda: matrix(dtype, order),
        "ab": lambda: matrix(dtype, "column-major")[:3] if op == "gbmv" else matrix(dtype, "column-major")[:2],
        "ap": lambda: dev.array(np.ones(N * (N + 1) // 2), dtype),
        "c": lambda: dev.array(0.6, real),
        "s": lambda: dev.array(0.8, dtype),
        "param": lambda: dev.array(np.ones(5), dtype),
    }
    given = {name: others[name]() for name in kind.reads if name in others}
    given |= {name: vector(dtype, steps.get(name, 1)) for name in ("x", "y") if name in kind.reads}
    given |= {name: vector(dtype, step) for name, step in steps.items() if name not in given}
    return given | ({"kl": 1, "ku": 1} if op == "gbmv" else {})


def vectors(op, dtype):
    """The names of a request's vectors, results included."""
    kind = KINDS[op]
    outputs = kind(**operands(op, dtype)).outputs()
    results = [name for name, out in outputs.items() if len(out.shape) == 1 and "ap" not in kind.reads[-1:]]
    return [*(name for name in ("x", "y") if name in kind.reads), *results]


def is_taken(request):
    try:
        select(request, Arch(90))
    except NoRow:
        return False
    return True


def refused(op, dtype):
    """The names of the vectors that may not go backwards, with the order of the matrix and `trans`."""
    kind = KINDS[op]
    orders = ("row-major", "column-major") if "a" in kind.reads else ("",)
    ways = "ntc" if "trans" in inspect.signature(kind).parameters else ("",)
    for order, trans in itertools.product(orders, ways):
        choices = {"trans": trans} if trans else {}
        if not is_taken(kind(**operands(op, dtype, order), **choices)):
            continue
        for name in vectors(op, dtype):
            if not is_taken(kind(**operands(op, dtype, order, {name: -1}), **choices)):
                yield name, order, trans


def listed(op, dtype):
    """What the docs list of an op and a dtype, in the words of `refused`."""
    for name, dtypes, names, where in LISTED.findall(DOCS.read_text()):
        if name != op or (dtypes == "complex" and dtype[0] != "c"):
            continue
        orders = ("row-major",) if "row-major" in where else ("row-major", "column-major")
        orders = orders if "a" in KINDS[op].reads else ("",)
        ways = re.findall('trans="(.)"', where) or [""]
        yield from itertools.product(re.findall("`(.+?)`", names), orders, ways)


@pytest.mark.parametrize("op", OPS)
def test_a_vector_that_goes_backwards_is_refused_where_the_docs_list_it(op):
    dtypes = [dtype for dtype in ("f32", "f64", "c64", "c128") if is_taken(KINDS[op](**operands(op, dtype)))]
    assert dtypes
    for dtype in dtypes:
        assert set(refused(op, dtype)) == set(listed(op, dtype)), dtype


@pytest.mark.parametrize("op", ["gerc", "her", "her2", "hemv", "gemv"])
def test_a_copy_of_such_a_vector_is_taken(op):
    given = operands(op, "c64", "row-major", {"x": -1})
    choices = {"trans": "c"} if op == "gemv" else {}
    assert not is_taken(KINDS[op](**given, **choices))
    with pytest.raises(NoRow, match=r"needs x with a stride above 0, has .*: copy it"):
        dp.run(KINDS[op](**given, **choices))
    assert is_taken(KINDS[op](**(given | {"x": given["x"].copy()}), **choices))
    if op in ("gerc", "her", "her2"):  # a result that is left open is row-major
        assert not is_taken(KINDS[op](**{name: one for name, one in given.items() if name != "a"}))


def test_a_matrix_without_columns_takes_no_such_y():
    dev = dp.device("host")
    for dtype in ("f32", "c64"):
        given = dev.zeros((N, 0), dtype), dev.zeros((0,), dtype)
        assert is_taken(dp.GemvRequest(*given, y=vector(dtype, 1)))
        assert not is_taken(dp.GemvRequest(*given, y=vector(dtype, -1)))
        assert not is_taken(dp.GemvRequest(*given, out=vector(dtype, -1)))
