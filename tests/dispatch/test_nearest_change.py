"""The change that a refusal names: it is a small one, and with it the request runs."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest

import dispatch as dp
from dispatch.errors import BadRequest, NoRow, Undelivered, error_text
from dispatch.keys import HOST, Arch, Compute
from dispatch.ops.grouped_matmul.request_lists import GroupedMatmulListRequest
from dispatch.refusal import Kind
from dispatch.table.select import select

if TYPE_CHECKING:
    from collections.abc import Callable

H100 = Arch(90)
C = Compute


def zeros(*shape: int, dtype: str = "f32") -> dp.Tensor:
    return dp.device("host").zeros(shape, dtype)


def square(dtype: str) -> dp.Tensor:
    return zeros(16, 16, dtype=dtype)


def grouped(a: str, b: str) -> dp.Request:
    return GroupedMatmulListRequest([square(a)] * 2, [square(b)] * 2)


CHANGES = {  # a request, what to change, and the request with each of these changes
    "mixed dtypes": (
        lambda: dp.MatmulRequest(square("f32"), square("f16")),
        "b f32 (now f16), or a f16 (now f32)",
        [
            lambda: dp.MatmulRequest(square("f32"), square("f32")),
            lambda: dp.MatmulRequest(square("f16"), square("f16")),
        ],
    ),
    "no such dtype": (
        lambda: dp.MatmulRequest(square("i64"), square("i64")),
        "a and b both f64 (now i64), or a and b both f32 (now i64)",
        [
            lambda: dp.MatmulRequest(square("f64"), square("f64")),
            lambda: dp.MatmulRequest(square("f32"), square("f32")),
        ],
    ),
    "whole numbers": (
        lambda: dp.MatmulRequest(square("i32"), square("i32")),
        "a and b both i8 (now i32), or a and b both f64 (now i32)",
        [
            lambda: dp.MatmulRequest(square("i8"), square("i8")),
            lambda: dp.MatmulRequest(square("f64"), square("f64")),
        ],
    ),
    "lists": (
        lambda: grouped("i32", "i32"),
        "a and b both f16 (now i32), or a and b both f32 (now i32)",
        [lambda: grouped("f16", "f16"), lambda: grouped("f32", "f32")],
    ),
    "one of two lists": (
        lambda: grouped("f32", "f16"),
        "b f32 (now f16), or a f16 (now f32)",
        [lambda: grouped("f32", "f32"), lambda: grouped("f16", "f16")],
    ),
    "the dtype of a result": (
        lambda: dp.ReduceRequest(square("bf16"), 0),
        "out_dtype=f32 (now None)",
        [lambda: dp.ReduceRequest(square("bf16"), 0, out_dtype="f32")],
    ),
    "another dtype of a result": (
        lambda: dp.ReduceRequest(square("bf16"), 0, out_dtype="i8"),
        "out_dtype=f32 (now i8)",
        [lambda: dp.ReduceRequest(square("bf16"), 0, out_dtype="f32")],
    ),
    "what is given to write": (
        lambda: dp.ReduceRequest(square("bf16"), 0, out=zeros(16, dtype="bf16")),
        "out f32 (now bf16)",
        [lambda: dp.ReduceRequest(square("bf16"), 0, out=zeros(16))],
    ),
    "a compute type": (
        lambda: dp.MatmulRequest(square("f64"), square("f64"), compute=C.COMPUTE_16F),
        "compute=None (now COMPUTE_16F)",
        [lambda: dp.MatmulRequest(square("f64"), square("f64"))],
    ),
    "an output": (
        lambda: dp.MatmulRequest(square("f16"), square("f16"), out=square("f64")),
        "out f16 (now f64)",
        [lambda: dp.MatmulRequest(square("f16"), square("f16"))],
    ),
    "a bias": (
        lambda: dp.MatmulRequest(square("f8e4m3"), square("f8e4m3").T, bias=zeros(16), epilogue="gelu_aux_bias"),
        "bias bf16 (now f32)",
        [
            lambda: dp.MatmulRequest(
                square("f8e4m3"), square("f8e4m3").T, bias=zeros(16, dtype="bf16"), epilogue="gelu_aux_bias"
            )
        ],
    ),
    "filters": (
        lambda: dp.ConvFwdRequest(zeros(2, 8, 5, 5, dtype="f16"), zeros(8, 8, 3, 3)),
        "w f16 (now f32), or x f32 (now f16)",
        [lambda: dp.ConvFwdRequest(zeros(2, 8, 5, 5), zeros(8, 8, 3, 3))],
    ),
    "three operands": (
        lambda: dp.SdpaFwdRequest(*[zeros(1, 2, 64, 64)] * 3),
        "q, k and v all f16 (now f32), or q, k and v all bf16 (now f32)",
        [lambda: dp.SdpaFwdRequest(*[zeros(1, 2, 64, 64, dtype="f16")] * 3)],
    ),
    "one operand": (
        lambda: dp.SoftmaxRequest(square("i32")),
        "x f64 (now i32), or x f32 (now i32)",
        [lambda: dp.SoftmaxRequest(square("f32"))],
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_the_change_that_is_named_works(case: str) -> None:
    make, change, changed = CHANGES[case]
    with pytest.raises(NoRow) as caught:
        dp.run(make())
    error = caught.value
    said = error.change
    assert said == change
    assert str(error).split("\n")[1] == f"Nearest that works: {said}"
    assert pickle.loads(pickle.dumps(error)).change == said
    for request in changed:
        dp.run(request())


def test_what_a_rule_says_is_told_as_it_is() -> None:
    request = dp.MatmulRequest(square("f8e4m3"), square("f8e4m3"))
    with pytest.raises(NoRow, match=r"Nearest that works: matmul f8e4m3.*, which needs b column-major") as caught:
        select(request, HOST)
    assert caught.value.change == ""


def test_an_explanation_of_what_nothing_takes_says_so_and_does_not_raise() -> None:
    found = dp.explain(dp.MatmulRequest(square("f32"), square("f16")))
    assert found.row is None
    assert found.refusal is not None
    assert list(found.refusals) == found.refusal.nearest_first
    assert len(found.refusals) == len(dp.TABLE.of("matmul"))
    lines = str(found).split("\n")
    assert lines[1:3] == ["-> no row takes it", f"   nearest that works: {found.refusal.change}"]
    assert len(lines) == 3 + len(found.refusals)
    assert dp.explain(dp.MatmulRequest(square("f32"), square("f32"))).refusal is None


@pytest.mark.parametrize("run", [dp.run, dp.prepare, dp.explain], ids=["run", "prepare", "explain"])
def test_a_library_that_has_no_rows_of_an_op_is_told_which_have(run: Callable[[dp.Request], object]) -> None:
    with pytest.raises(
        BadRequest, match=r"^library: got 'cudnn'; expected a library that has rows of matmul: .*cublasLt"
    ):
        run(dp.MatmulRequest(square("f32"), square("f32"), library="cudnn", out_dtype="f64"))
    with pytest.raises(ValueError, match="cublasLt, cutlass, cublas; or None"):
        run(dp.MatmulRequest(square("f32"), square("f32"), library="cuBLASLt"))


def test_an_old_library_s_rows_are_as_far_as_what_else_they_refuse() -> None:
    with pytest.raises(NoRow) as caught:
        select(dp.MatmulRequest(square("f32"), square("f16")), H100, {"cublasLt": (12, 1)})
    reasons = dict(caught.value.tried)["matmul f64×f64→f64 64F sm_80 cublasLt"]  # noqa: RUF001
    assert [reason.kind for reason in reasons] == [Kind.VERSION, Kind.DTYPES]


def test_another_error_is_told_in_one_line() -> None:
    with pytest.raises(NoRow) as caught:
        dp.matmul(square("f32"), square("f16"))
    error = caught.value
    assert error_text(error) == repr(error) == f"NoRow({str(error).splitlines()[0]!r})"
    assert error_text(error, str) == str(error).splitlines()[0]
    assert error_text(ValueError("one\ntwo")) == "ValueError('one')"
    assert len(error_text(ValueError("x" * 5000))) <= 400
    text = str(Undelivered([error] * 12))
    assert text.splitlines()[1] == f"  NoRow: {str(error).splitlines()[0]}"
    assert len(text.splitlines()) == 12
    assert len(text) < 2000
