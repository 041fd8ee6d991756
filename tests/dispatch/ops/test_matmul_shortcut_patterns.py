"""A pattern of layouts that `matmul` has seen: the problem, the shapes and the rows that a request would have."""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from cudabind.sys import cublasLt as lt
from dispatch.core.fusion import Fusion
from dispatch.keys import Epilogue
from dispatch.ops import matmul
from dispatch.ops.matmul import cublaslt, exact
from dispatch.ops.matmul import shortcut as short_ways
from dispatch.ops.matmul.lower import lower
from dispatch.table.table import TABLE

spec = importlib.util.spec_from_file_location("noted_products", Path(__file__).with_name("noted_products.py"))
products = importlib.util.module_from_spec(spec)
spec.loader.exec_module(products)
dev, taken_by = products.dev, products.taken_by

SHAPES = [(32, 16, 48), (33, 17, 49), (8, 256, 2), (2, 2, 2), (130, 64, 8)]
DTYPES = {"f64": "f64", "f32": "f32", "bf16": "bf16", "f16": "f16", "c64": "c64"}


def drawn(dev, rng, dtype, rows, columns, order):
    """A dense operand in some order, of a larger one or whole, so that steps and alignments differ too."""
    pad, skip = (int(x) for x in rng.integers(0, 4, 2))
    extents = (rows, columns) if order == "row" else (columns, rows)
    view = dev.zeros((extents[0] + 1, extents[1] + pad + skip), dtype)[1:, skip : skip + extents[1]]
    return view if order == "row" else view.mT


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "orders", ["row row row", "row column row", "column column row", "column row column", "row row"]
)
@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.RELU, Epilogue.GELU_BIAS], ids=lambda e: e.name)
def test_a_pattern_makes_the_problem_that_a_request_would(dev, monkeypatch, dtype, orders, epilogue):
    in_order = dict(zip(("a", "b", "out"), orders.split(), strict=False))
    if dtype == "c64" and epilogue is not Epilogue.NONE:
        epilogue = Epilogue.NONE  # nothing else is fused for complex numbers
    if epilogue is Epilogue.GELU_BIAS and in_order.get("out") == "column":
        epilogue = Epilogue.GELU  # a bias does not run along the columns
    rng = np.random.default_rng(3)
    made, real = [], short_ways.recognize
    monkeypatch.setattr(short_ways, "recognize", lambda *given: made.append(real(*given)) or made[-1])
    monkeypatch.setattr(matmul, "recognize", short_ways.recognize)
    for m, k, n in SHAPES:
        for _ in range(3):
            extents = {"a": (m, k), "b": (k, n), "out": (m, n)}
            fields = {name: drawn(dev, rng, dtype, *extents[name], order) for name, order in in_order.items()}
            if epilogue.adds_bias:
                fields["bias"] = dev.zeros((n,), dtype)
            request = dp.MatmulRequest(**fields, epilogue=epilogue)
            result = dp.matmul(fields.pop("a"), fields.pop("b"), epilogue=epilogue, **fields)
            assert result.shape == (m, n)
            if made and made[-1] is not None:
                plan = made.pop().plan
                lowered = lower(request, plan.row.compute)
                if epilogue.activation == "gelu" and dtype == "f64":  # whose GELU is a kernel behind the product
                    lowered = lowered._replace(problem=exact.product_of(lowered.problem, epilogue))
                assert plan.lowered == lowered
                made.append("seen")
                assert taken_by(dev)[-1][0][:6] == request.arguments({"out": result})[:6]
    assert made.count("seen") > len(SHAPES), "most calls were to be recognized by their pattern"


def test_rows_that_look_at_extents_have_no_pattern(dev):
    for rows in (32, 64):
        dp.matmul(dev.zeros((rows, 16), "i8"), dev.zeros((16, 48), "i8"))
    assert not dev.executor().patterns
    with pytest.raises(dp.errors.NoRow, match="multiple of 4"):
        dp.matmul(dev.zeros((32, 18), "i8"), dev.zeros((18, 48), "i8"))


def test_a_users_row_that_looks_at_extents_gets_every_request(dev):
    asked = []
    mine = replace(TABLE[1], rules=(lambda request: "needs m 8" if request.m != 8 else "",), call=TABLE[1].call)
    with_rule = replace(mine, call=lambda *given: asked.append(given[0].m) or TABLE[1].call(*given))
    dp.register(with_rule)
    try:
        for rows in (32, 16, 8):
            dp.matmul(dev.zeros((rows, 16)), dev.zeros((16, 48)))
    finally:
        TABLE.unregister(with_rule)
    assert asked == [8]


WRITING = [e for e in Epilogue if e.writes_aux or e.writes_bgrad]


@pytest.mark.parametrize("epilogue", [*WRITING, Epilogue.NONE, Epilogue.GELU_BIAS], ids=lambda e: e.name)
def test_outputs_that_are_left_open_have_the_shapes_of_their_own_call(dev, epilogue):
    for m, n, k in [(32, 48, 16), (40, 56, 24), (24, 16, 64), (7, 300, 5), (32, 48, 16)]:
        a = dev.zeros((k, m)).mT if epilogue is Epilogue.BGRADA else dev.zeros((m, k))
        fields = {"bias": dev.zeros((n,))} if epilogue.adds_bias else {}
        if epilogue.is_gradient:
            shape, _ = dp.aux_shape(epilogue, (m, n))
            relu = epilogue.activation == "relu"
            fields["aux"] = dev.zeros((m, shape[-1] if relu else -(-n // 8) * 8), "u8" if relu else "f32")[
                :, : shape[-1]
            ]
        request = dp.MatmulRequest(a, dev.zeros((k, n)), epilogue=epilogue, **fields)
        for _ in range(2):
            result = dp.matmul(a, request.b, epilogue=epilogue, **fields)
            outputs = result if isinstance(result, tuple) else (result,)
            wanted = list(request.unallocated().values())
            assert [(t.shape, t.layout.strides, t.dtype) for t in outputs] == wanted


def test_a_library_that_refuses_a_first_row_is_asked_again_for_other_extents(dev):
    """The pattern of the row that then took the call would keep other extents from the first."""
    answers, real = [], matmul.cublaslt_matmul

    def refuse_once(request, executor_, row):
        answers.append((request.m, row.name))
        if len(answers) == 1:
            raise dp.errors.Refused("not these extents")
        return real(request, executor_, row)

    first = replace(TABLE[1], variant="first", fusion=Fusion(), call=refuse_once)
    dp.register(first)
    try:
        for rows in (32, 40):
            dp.matmul(dev.zeros((rows, 16)), dev.zeros((16, 48)))
    finally:
        TABLE.unregister(first)
    assert [m for m, _ in answers] == [32, 40]


@pytest.mark.parametrize("skew", [0, 4, 8, 16])
def test_the_heuristic_is_told_how_a_bias_is_aligned(dev, monkeypatch, skew):
    """By the pointer that is set when it is asked, whether by a request or for a pattern."""
    seen = []

    def heuristic(_handle, descriptors, *_):
        pointer, size = ctypes.c_uint64(), ctypes.c_size_t()
        attribute = cublaslt.Desc.CUBLASLT_MATMUL_DESC_BIAS_POINTER
        get = lt.cublasLtMatmulDescGetAttribute.unchecked
        assert get(descriptors.matmul, attribute, ctypes.byref(pointer), 8, ctypes.byref(size)) == 0
        seen.append(pointer.value)
        return [lt.cublasLtMatmulHeuristicResult_t()]

    monkeypatch.setattr(cublaslt, "heuristic", heuristic)
    for rows in (32, 40):  # the second by its pattern
        bias = dev.zeros((64,))[skew : skew + 48]
        dp.matmul(dev.zeros((rows, 16)), dev.zeros((16, 48)), bias=bias, epilogue=Epilogue.BIAS)
    assert set(seen) == {bias.layout.alignment}
    assert len(dev.executor().patterns) == 1


def test_a_bias_of_another_dtype_is_no_call_of_the_same_pattern(dev):
    a, b = (dev.zeros(shape, "bf16") for shape in ((32, 16), (16, 48)))
    dp.matmul(a, b, bias=dev.zeros((48,), "bf16"), epilogue=Epilogue.BIAS)
    assert dev.executor().patterns
    with pytest.raises(dp.errors.NoRow, match="bias"):
        dp.matmul(dev.zeros((40, 16), "bf16"), b, bias=dev.zeros((48,), "f64"), epilogue=Epilogue.BIAS)
