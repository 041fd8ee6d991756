"""Choosing a row: the first that takes a request, and a refusal lists every row and leads to a request that runs."""

# ruff: noqa: E501 - a row of a table is one line

import dataclasses
import pickle
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dispatch as dp
from dispatch import Arch, Compute, Dtype, Epilogue, MatmulRequest, ScaleMode, Scales
from dispatch.errors import LINE, NoRow, Refused
from dispatch.keys import HOST
from dispatch.ops.conv import ConvFwdRequest
from dispatch.ops.matmul.reference import reference
from dispatch.ops.norm import NormFwdRequest
from dispatch.ops.reduction import ReduceRequest
from dispatch.ops.sdpa import SdpaFwdRequest
from dispatch.refusal import Kind, Refusal
from dispatch.table.select import candidates, no_row, reasons, select

RNG = np.random.default_rng(5)
E, C = Epilogue, Compute
SM80, SM90, SM100 = Arch(80), Arch(90), Arch(100)


def home() -> dp.Device:
    """The live host: another test may have closed the one before."""
    return dp.device("host")


def short(name: str) -> str:
    """A row's name without its op and cublasLt, and with an x that a keyboard has."""
    return name.removeprefix("matmul ").removesuffix(" cublasLt").replace("\u00d7", "x")


def tensor(dtype: str, rows: int = 32, columns: int = 32, dense: str = "rows") -> dp.Tensor:
    """Small whole numbers, which every dtype holds."""
    values = RNG.integers(-3, 4, (rows, columns))
    return home().array(values.T, dtype).T if dense == "columns" else home().array(values, dtype)


def vector(dtype: str, size: int = 32) -> dp.Tensor:
    return home().array(RNG.integers(-3, 4, size), dtype)


def fp8(**fields: Any) -> MatmulRequest:
    """An e4m3 product as Hopper takes it."""
    return MatmulRequest(**({"a": tensor("f8e4m3"), "b": tensor("f8e4m3", dense="columns")} | fields))


def plain(dtype: str, **fields: Any) -> MatmulRequest:
    return MatmulRequest(**({"a": tensor(dtype), "b": tensor(dtype)} | fields))


# fmt: off
CHOICES = {
    "f32":                  (lambda: plain("f32"), SM80, "f32xf32→f32 32F sm_80"),
    "TF32 only when asked": (lambda: plain("f32", compute=C.COMPUTE_32F_FAST_TF32), SM90, "f32xf32→f32 32F_FAST_TF32 sm_80"),
    "the default, asked":   (lambda: plain("f32", compute=C.COMPUTE_32F), SM90, "f32xf32→f32 32F sm_80"),
    "bf16 to f32":          (lambda: plain("bf16", out_dtype="f32"), SM100, "bf16xbf16→f32 32F sm_80"),
    "i8":                   (lambda: plain("i8"), SM80, "i8xi8→i32 32I sm_80"),
    "c128":                 (lambda: plain("c128"), SM90, "c128xc128→c128 64F sm_80"),
    "fp8 with a GELU":      (lambda: fp8(bias=vector("bf16"), epilogue=E.GELU_BIAS), SM90, "f8e4m3xf8e4m3→bf16 32F sm_90"),
    "fp8 on newer":         (fp8, SM100, "f8e4m3xf8e4m3→bf16 32F sm_90"),
    "fp8 result":           (lambda: fp8(out_dtype="f8e4m3"), SM90, "f8e4m3xf8e4m3+bf16→f8e4m3 32F sm_90"),
    "fp8 and f16 bias":     (lambda: fp8(out_dtype="f8e4m3", bias=vector("f16"), epilogue=E.BIAS), SM90, "f8e4m3xf8e4m3+f16→f8e4m3 32F sm_90"),
    "on the host":          (lambda: plain("f64"), HOST, "f64xf64→f64 64F host numpy"),
}


@pytest.mark.parametrize(("make", "arch", "name"), CHOICES.values(), ids=CHOICES)
def test_the_row_that_is_meant_is_taken(make: Callable[[], MatmulRequest], arch: Arch, name: str):
    request = make()
    assert short(select(request, arch).name) == name
    assert dp.explain(request, arch).row is select(request, arch)
    assert next(iter(candidates(request, arch))) is select(request, arch)


def outer() -> Scales:
    mode = ScaleMode.OUTER_VEC_32F
    ones = home().array(np.ones(32, np.float32))
    return Scales(a=ones, b=ones, a_mode=mode, b_mode=mode)


REFUSED = {
    "a dtype of D that no row has":  lambda: plain("f32", out_dtype="f64"),
    "dtypes that do not mix":        lambda: plain("f32", b=tensor("f64")),
    "mixed halves":                  lambda: plain("f16", b=tensor("bf16")),
    "complex and real":              lambda: plain("c64", b=tensor("f32")),
    "unsigned bytes":                lambda: plain("u8"),
    "a compute type of another":     lambda: plain("bf16", compute=C.COMPUTE_32F_FAST_TF32),
    "16-bit sums of bf16":           lambda: plain("bf16", compute=C.COMPUTE_16F),
    "16-bit sums to f32":            lambda: plain("f16", compute=C.COMPUTE_16F, out_dtype="f32"),
    "an epilogue of integers":       lambda: plain("i8", epilogue=E.RELU),
    "an epilogue of complex":        lambda: plain("c64", epilogue=E.GELU),
    "BGRADB of fp8":                 lambda: fp8(epilogue=E.BGRADB),
    "BGRADA in rows":                lambda: plain("f32", epilogue=E.BGRADA),
    "BGRADB in columns":             lambda: plain("f32", b=tensor("f32", dense="columns"), epilogue=E.BGRADB),
    "fp8 b in rows":                 lambda: fp8(b=tensor("f8e4m3")),
    "fp8 a in columns":              lambda: fp8(a=tensor("f8e4m3", dense="columns")),
    "fp8 both":                      lambda: fp8(a=tensor("f8e4m3", dense="columns"), b=tensor("f8e4m3")),
    "fp8 odd k":                     lambda: fp8(a=tensor("f8e4m3", 32, 20), b=tensor("f8e4m3", 20, 32, dense="columns")),
    "fp8 odd n":                     lambda: fp8(b=tensor("f8e4m3", 32, 12, dense="columns")),
    "fp8 with an f32 bias":          lambda: fp8(bias=vector("f32"), epilogue=E.BIAS),
    "e5m2 twice":                    lambda: fp8(a=tensor("f8e5m2"), b=tensor("f8e5m2", dense="columns")),
    "fp8 to f64":                    lambda: fp8(out_dtype="f64"),
    "fp8 to f64, b in rows":         lambda: fp8(b=tensor("f8e4m3"), out_dtype="f64"),
    "fp8, a factor of D":            lambda: fp8(scales=Scales(a=2.0, d=0.5)),
    "f32 with a factor":             lambda: plain("f32", scales=Scales(a=2.0)),
    "f32 with fast accumulation":    lambda: plain("f32", fast_accum=True),
    "f32 with f16 bias":             lambda: plain("f32", bias=vector("f16"), epilogue=E.RELU_BIAS),
    "i8, n of 6":                    lambda: plain("i8", b=tensor("i8", 32, 6)),
    "outer vectors, BIAS, f32":      lambda: fp8(scales=outer(), out_dtype="f32", bias=vector("bf16"), epilogue=E.BIAS),
}
# fmt: on


def change(request: MatmulRequest, words: str) -> MatmulRequest:
    """Do to a request what its refusal says, word by word, as a person would."""
    todo: dict[str, Any] = {}
    if found := re.search(r"needs dtypes \(([^)]*)\)", words):
        names = found[1].split(", ")
        todo |= {side: cast(getattr(request, side), name) for side, name in zip("ab", names, strict=False)}
        todo["out_dtype"] = names[3]
    if found := re.search(r"epilogue operand of (\w+)", words):
        todo["bias"] = cast(request.bias, found[1])
    if found := re.search(r"needs compute (\w+)", words):
        todo["compute"] = Compute[found[1]]
    if found := re.search(r"an epilogue of ([A-Z_, ]+)", words):
        todo["epilogue"] = Epilogue[found[1].split(", ")[0]]
        todo |= {"bias": None, "aux": None, "bgrad": None}
    if "needs scale modes (none, none)" in words or "needs no scales." in words:
        todo["scales"] = remain(request.scales, words)
    if "fast_accum=False" in words:
        todo["fast_accum"] = False
    return arrange(dataclasses.replace(request, **todo), words)


def cast(tensor: dp.Tensor, dtype: str) -> dp.Tensor:
    """The same numbers in the same order of memory, in another dtype."""
    values = tensor.numpy()
    if values.dtype.kind == "c" and not Dtype.of(dtype).is_complex:
        values = values.real
    dense = tensor.ndim > 1 and tensor.layout.strides[-1] != 1
    return home().array(values.T.copy(), dtype).T if dense else home().array(values, dtype)


def remain(scales: Scales, words: str) -> Scales:
    """Scales without those that the words name, or without any."""
    named = re.findall(r"scales\.(\w+)", words)
    return dataclasses.replace(scales, **dict.fromkeys(named)) if named else Scales()


def arrange(request: MatmulRequest, words: str) -> MatmulRequest:
    """Operands in the order and with the extents that the words ask for."""
    a, b = request.a.numpy(), request.b.numpy()
    if found := re.search(r"k a multiple of (\d+)", words):
        a, b = a[:, : a.shape[1] // int(found[1]) * int(found[1])], b[: b.shape[0] // int(found[1]) * int(found[1])]
    if found := re.search(r"n a multiple of (\d+)", words):
        b = b[:, : b.shape[1] // int(found[1]) * int(found[1])]
    dense = {side: getattr(request, side).layout.strides[-1] == 1 for side in "ab"}
    for side in "ab":
        dense[side] = (dense[side] or f"{side} row-major" in words) and f"{side} column-major" not in words
    made = {
        side: home().array(values) if dense[side] else home().array(values.T.copy()).T
        for side, values in zip("ab", (a, b), strict=True)
    }
    return dataclasses.replace(request, **made)


@pytest.mark.parametrize("arch", [HOST, SM90], ids=str)
@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_a_refusal_lists_every_row_and_its_advice_works(make: Callable[[], MatmulRequest], arch: Arch):
    request = dataclasses.replace(make(), library="cublasLt")  # some of these CUTLASS takes
    with pytest.raises(NoRow) as caught:
        select(request, arch)
    refusal = caught.value
    rows = dp.TABLE.of("matmul")
    assert [name for name, _ in refusal.tried] == [row.name for row in rows]
    assert all(why and all(isinstance(reason, Refusal) and str(reason) for reason in why) for _, why in refusal.tried)
    assert refusal.request == request.describe()
    first, second, *_ = str(refusal).split("\n")
    assert len(first) <= LINE
    assert all(f"{name} {t.dtype}{list(t.shape)}" in first for name, t, _ in request.tensors() if "." not in name)
    assert "library=cublasLt" in first
    assert first.endswith(f" on {arch}")
    assert second == f"Nearest that works: {refusal.change or refusal.nearest}"
    name, _, words = refusal.nearest.partition(", which ")
    mended = change(request, words)
    assert select(mended, arch).name == name
    right(mended)


def right(request: MatmulRequest) -> None:
    """Run a request on the host and compare it with its reference."""
    expected = reference(request)["out"]
    result = dp.run(request)
    result = result[0] if isinstance(result, tuple) else result
    values = np.asarray(result).astype(expected.dtype)
    top = (
        2.0**-2
        if result.dtype.is_fp8
        else float(ml_dtypes.finfo(result.dtype.numpy).eps)
        if expected.dtype.kind != "i"
        else 0
    )
    np.testing.assert_allclose(values, expected, rtol=4 * top, atol=1e-6)


@pytest.mark.parametrize("make", [REFUSED["fp8 b in rows"], REFUSED["mixed halves"]], ids=["a rule", "a column"])
def test_a_run_is_refused_as_a_selection_is(make: Callable[[], MatmulRequest]):
    request = make()
    with pytest.raises(NoRow) as run:
        dp.run(request)
    with pytest.raises(NoRow) as prepared:
        dp.prepare(request)
    explained = dp.explain(request)
    assert explained.row is None
    assert run.value.tried == prepared.value.tried == explained.refusal.tried
    assert run.value.nearest == prepared.value.nearest == explained.refusal.nearest
    assert str(run.value) == str(explained.refusal)
    assert list(explained.refusals) == run.value.nearest_first
    text = str(explained)
    assert "no row takes it" in text
    assert all(name in text and all(str(reason) in text for reason in why) for name, why in run.value.tried)
    copy = pickle.loads(pickle.dumps(run.value))
    assert (str(copy), copy.tried, copy.change) == (str(run.value), run.value.tried, run.value.change)


def test_a_gpu_that_is_too_old_is_told_which_would_do():
    with pytest.raises(NoRow) as caught:
        select(fp8(), SM80)
    told = {short(name): why for name, why in caught.value.tried}
    (open_end,), (one,) = told["f8e4m3xf8e4m3→bf16 32F sm_90"], told["f8e4m3xf8e4m3→bf16 32F OUTER_VEC_32F sm_90"]
    assert (open_end, str(open_end)) == (Refusal(Kind.ARCH, (SM90, None), SM80), "needs sm_90 or newer, has sm_80")
    assert (one, str(one)) == (Refusal(Kind.ARCH, (SM90, SM90), SM80), "needs sm_90, has sm_80")
    assert "sm_80" in caught.value.nearest


def test_no_row_is_for_an_unheard_of_gpu():
    with pytest.raises(NoRow, match="Nearest that works: no row"):
        select(plain("f32"), Arch(10))


def test_a_library_that_is_too_old_is_told_which_would_do():
    with pytest.raises(NoRow, match=r"needs cublasLt 12\.9, has 12\.1"):
        select(dataclasses.replace(plain("f32"), library="cublasLt"), SM90, {"cublasLt": (12, 1)})
    assert select(plain("f32"), SM90, {"cublasLt": (13, 1, 0)}).library == "cublasLt"


def test_reasons_are_empty_only_for_the_rows_that_take_the_request():
    request = plain("f32")
    takers = [row for row, why in reasons(request, SM90) if not why]
    assert takers == list(candidates(request, SM90))
    assert [short(row.name) for row in takers] == ["f32xf32→f32 32F sm_80", "f32xf32→f32 32F sm_80 cublas"]


def test_an_explanation_reads_well():
    text = str(dp.explain(fp8(bias=vector("bf16"), epilogue=Epilogue.GELU_BIAS), SM90))
    assert "GELU_BIAS" in text
    assert "cudabind.sys.cublasLt.cublasLtMatmul" in text
    assert "cublasLt 12.9 or newer" in text
    assert "H200" in text
    assert "no machine yet" in str(dp.explain(fp8(scales=blocks()), SM100))


def blocks() -> Scales:
    mode = ScaleMode.VEC32_UE8M0
    return Scales(a=home().empty((128, 4), "e8m0"), b=home().empty((128, 4), "e8m0"), a_mode=mode, b_mode=mode)


def test_a_library_s_refusal_comes_with_what_helps_for_its_op():
    """Every request that a library refuses says what the library takes of its own op, and none what another op needs."""
    host = dp.device("host")
    image, filters = host.zeros((2, 8, 5, 5), "f16"), host.zeros((8, 8, 3, 3), "f16")
    head = host.zeros((1, 2, 64, 64), "f16")
    requests = [
        MatmulRequest(host.zeros((4, 4)), host.zeros((4, 4))),
        ConvFwdRequest(image, filters),
        SdpaFwdRequest(head, head, head),
        NormFwdRequest(image, host.zeros((5,), "f16")),
    ]
    said = []
    for request in requests:
        row = select(request, SM90)
        error = no_row(request, SM90, refused={row: Refused("cudnnBackendFinalize makes no plan")})
        assert error.nearest == f"{row.name} with {request.advice}"
        assert dict(error.tried)[row.name] == (Refusal(Kind.LIBRARY, "cudnnBackendFinalize makes no plan"),)
        said.append(request.advice)
    assert len(set(said)) == len(requests)
    assert [text for text in said if "column-major" in text] == said[:1]


def test_without_advice_the_nearest_row_is_one_that_no_library_refused():
    host = dp.device("host")
    request = ReduceRequest(host.zeros((8, 6)), 0)
    first = select(request, SM90)
    error = no_row(request, SM90, refused={first: Refused("cuDNN takes no such graph")})
    assert not error.nearest.startswith(first.name)
