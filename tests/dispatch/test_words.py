"""Enums and dtypes as people write them: by their names in any spelling, and by other libraries' dtypes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Optional

import ml_dtypes
import numpy as np
import pytest

import dispatch as dp
from dispatch.__main__ import main
from dispatch.checks import check_enum
from dispatch.cli.probe import request_classes
from dispatch.core.operands import OperandRequest
from dispatch.errors import BadRequest
from dispatch.keys import BF16, F8E4M3, F8E5M2, F16, F32, Choice, Compute, Dtype, Epilogue, ScaleMode
from dispatch.ops.activation import ActivationMode
from dispatch.ops.conv.base import Activation
from dispatch.ops.norm.request import NormMode
from dispatch.ops.pooling import PoolingMode
from dispatch.ops.reduction import ReduceOp
from dispatch.ops.rnn.network import RnnBiasMode, RnnMode
from dispatch.ops.sdpa.base import Diagonal
from dispatch.ops.softmax import SoftmaxAlgorithm

ENUMS: list[type[Choice]] = [
    *(Compute, Epilogue, ScaleMode, ActivationMode, Activation, NormMode, PoolingMode, ReduceOp, RnnMode, RnnBiasMode),
    *(Diagonal, SoftmaxAlgorithm),
]


def host() -> dp.Device:
    """Asked for anew, for other tests close it."""
    return dp.device("host")


# -- names ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ENUMS, ids=lambda kind: kind.__name__)
def test_each_spelling_of_a_name_is_its_member(kind: type[Choice]) -> None:
    for name, member in kind.__members__.items():
        for spelt in (name, name.lower(), name.title(), name.replace("_", "-"), name.lower().replace("_", " ")):
            assert kind.named(spelt) is kind.named(f" {spelt} ") is kind(spelt) is member
        assert kind.named(f"{kind.__name__}.{name}") is kind.named(name.replace("_", "")) is member


@pytest.mark.parametrize(
    ("kind", "text", "name"),
    [
        (Epilogue, "gelu-bias", "GELU_BIAS"),
        (Epilogue, "CUBLASLT_EPILOGUE_GELU_AUX_BIAS", "GELU_AUX_BIAS"),
        (Epilogue, "CUBLASLT_EPILOGUE_DEFAULT", "NONE"),
        (Compute, "tf32", "COMPUTE_32F_FAST_TF32"),
        (Compute, "fast_tf32", "COMPUTE_32F_FAST_TF32"),
        (Compute, "32F_fast_tf32", "COMPUTE_32F_FAST_TF32"),
        (Compute, "CUBLAS_COMPUTE_32F_FAST_TF32", "COMPUTE_32F_FAST_TF32"),
        (Compute, "16f", "COMPUTE_16F"),
        (Compute, "fast_16f", "COMPUTE_32F_FAST_16F"),
        (Compute, "fp32", "COMPUTE_32F"),
        (Compute, "fast_bf16", "COMPUTE_32F_FAST_16BF"),
        (NormMode, "RMSNorm", "RMS_NORM"),
        (NormMode, "layer", "LAYER_NORM"),
        (NormMode, "CUDNN_GROUP_NORM", "GROUP_NORM"),
        (Activation, "gelu", "GELU_FWD"),
        (Activation, "relu", "RELU_FWD"),
        (Activation, "CUDNN_POINTWISE_GELU_APPROX_TANH_FWD", "GELU_APPROX_TANH_FWD"),
        (PoolingMode, "exclude_padding", "AVERAGE_COUNT_EXCLUDE_PADDING"),
        (PoolingMode, "max", "MAX"),
        (ReduceOp, "sum", "ADD"),
        (ReduceOp, "mean", "AVG"),
        (ReduceOp, "mul", "MUL"),
        (RnnMode, "tanh", "RNN_TANH"),
        (RnnBiasMode, "double", "DOUBLE_BIAS"),
        (ScaleMode, "blk128x128", "BLK128x128_32F"),
        (ScaleMode, "outer_vec", "OUTER_VEC_32F"),
    ],
)
def test_short_forms_and_nvidia_s_own_names_are_taken(kind: type[Choice], text: str, name: str) -> None:
    assert kind.named(text) is kind[name]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *(
            (Epilogue, text)
            for text in ("", "bgrad", "aux", "AUX_BIAS", "gelu_", "x.y", "32", "CUBLAS", "CUDNN_GELU_X")
        ),
        *((Compute, text) for text in ("fast", "bf16", "COMPUTE", "32")),
        *((PoolingMode, text) for text in ("average", "avg", "padding")),
        *((NormMode, "norm"), (ScaleMode, "32f"), (RnnBiasMode, "single"), (Activation, "fwd"), (ReduceOp, "norm")),
        (dp.SparseFactorPrecision, ""),  # an enum of one member
    ],
)
def test_what_may_mean_two_or_none_is_no_name(kind: type[Choice], text: str) -> None:
    if text == "gelu_":  # as good as without
        assert kind.named(text) is Epilogue.GELU
        return
    assert kind.named(text) is None
    with pytest.raises(BadRequest, match=rf"^mode: got '{text}'; expected an? {kind.__name__}: "):
        check_enum("mode", text, kind)


@pytest.mark.parametrize(
    ("kind", "text", "end"),
    [
        (NormMode, "leyer", ". Did you mean NormMode.LAYER_NORM?"),
        (Compute, "tf23", ". Did you mean Compute.COMPUTE_32F_FAST_TF32?"),
        (NormMode, "nrom", ", RMS_NORM"),  # a word of five names
    ],
)
def test_one_word_of_a_name_may_be_misspelt(kind: type[Choice], text: str, end: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check_enum("mode", text, kind)
    assert str(caught.value).endswith(end)


def test_of_two_that_a_word_may_mean_both_are_named() -> None:
    with pytest.raises(BadRequest) as caught:
        dp.pooling(host().zeros((1, 1, 4, 4)), 2, mode="average")
    meant = ("PoolingMode.AVERAGE_COUNT_INCLUDE_PADDING", "PoolingMode.AVERAGE_COUNT_EXCLUDE_PADDING")
    assert str(caught.value).endswith(f". Did you mean {' or '.join(meant)}?")


# -- fields and arguments ---------------------------------------------------------------------------------------------
def zeros(*shape: int, dtype: Any = "f32") -> dp.Tensor:
    return host().zeros(shape, dtype)


def fields_of_requests() -> list[tuple[Any, str, str, Choice]]:
    """A request by a name, the field, the name, and the member that it is to be."""
    return [
        (
            lambda n: dp.MatmulRequest(zeros(4, 4), zeros(4, 4), bias=zeros(4), epilogue=n),
            "epilogue",
            "gelu_bias",
            Epilogue.GELU_BIAS,
        ),
        (
            lambda n: dp.MatmulRequest(zeros(4, 4), zeros(4, 4), compute=n),
            "compute",
            "tf32",
            Compute.COMPUTE_32F_FAST_TF32,
        ),
        (lambda n: dp.PoolingRequest(zeros(1, 2, 5, 5), 2, mode=n), "mode", "max", PoolingMode.MAX),
        (lambda n: dp.ActivationRequest(zeros(4, 4), mode=n), "mode", "swish", ActivationMode.SWISH),
        (lambda n: dp.SoftmaxRequest(zeros(4, 4), algorithm=n), "algorithm", "log", SoftmaxAlgorithm.LOG),
        (lambda n: dp.NormFwdRequest(zeros(4, 4), zeros(4), mode=n), "mode", "rms_norm", NormMode.RMS_NORM),
        (lambda n: dp.ReduceRequest(zeros(4, 4), 0, reduce=n), "reduce", "max", ReduceOp.MAX),
        (
            lambda n: dp.ConvFwdRequest(zeros(1, 2, 5, 5), zeros(3, 2, 1, 1), activation=n),
            "activation",
            "relu",
            Activation.RELU_FWD,
        ),
        (
            lambda n: dp.ConvFwdRequest(zeros(1, 2, 5, 5), zeros(3, 2, 1, 1), compute=n),
            "compute",
            "32f",
            Compute.COMPUTE_32F,
        ),
        (
            lambda n: dp.SdpaFwdRequest(
                zeros(1, 1, 4, 8, dtype="f16"),
                zeros(1, 1, 4, 8, dtype="f16"),
                zeros(1, 1, 4, 8, dtype="f16"),
                diagonal=n,
            ),
            "diagonal",
            "bottom-right",
            Diagonal.BOTTOM_RIGHT,
        ),
        (lambda n: dp.Network(n, 4, 3), "mode", "lstm", RnnMode.LSTM),
        (lambda n: dp.Network("gru", 4, 3, bias=n), "bias", "no_bias", RnnBiasMode.NO_BIAS),
        (lambda n: dp.Scales(a_mode=n), "a_mode", "vec128", ScaleMode.VEC128_32F),
    ]


@pytest.mark.parametrize(
    ("make", "field", "name", "member"), fields_of_requests(), ids=lambda value: getattr(value, "name", None)
)
def test_a_field_takes_a_name_and_has_the_member(make: Any, field: str, name: str, member: Choice) -> None:
    by_name, by_member = make(name), make(member)
    assert getattr(by_name, field) is getattr(by_member, field) is member
    assert getattr(make(np.str_(name)), field) is member
    if isinstance(by_name, dp.Request):
        assert by_name.key() == by_member.key()
        assert by_name.describe() == by_member.describe()


@pytest.mark.parametrize(
    ("make", "field", "name", "member"), fields_of_requests(), ids=lambda value: getattr(value, "name", None)
)
def test_a_wrong_name_is_refused_with_those_that_there_are(make: Any, field: str, name: str, member: Choice) -> None:
    assert make(name)
    if field == "a_mode":
        make = lambda n: dp.MatmulRequest(zeros(4, 4), zeros(4, 4), scales=dp.Scales(a=1.0, a_mode=n))  # noqa: E731
    wrong = f"{member.name}X"
    for value in (wrong, 3, 1.5, object(), *([True] if field != "bias" else [])):  # a network's bias may be a bool
        with pytest.raises(BadRequest, match=rf"{field}: got .*; expected an? {type(member).__name__}: ") as caught:
            make(value)
        assert all(each in str(caught.value) for each in type(member).__members__)
        assert (f"Did you mean {type(member).__name__}.{member.name}?" in str(caught.value)) == (value is wrong)


def test_every_field_that_is_an_enum_says_that_it_takes_names() -> None:
    kinds: set[Any] = {kind for op in dp.TABLE.ops for kind in request_classes(op)} | {dp.Network, dp.Scales}
    names = {enum.__name__ for enum in ENUMS}
    said = {str(field.type) for kind in kinds for field in fields(kind)}
    found = [text for text in said if names & set(text.split(" | "))]
    assert len(found) > 8
    assert all("str" in text.split(" | ") for text in found)


def test_the_functions_compute_the_same_by_names() -> None:
    rng = np.random.default_rng(0)
    a, b, bias = (host().array(rng.standard_normal(shape), "f32") for shape in ((4, 8), (8, 16), (16,)))
    by_name, by_member = (dp.matmul(a, b, bias=bias, epilogue=e) for e in ("Gelu-Bias", Epilogue.GELU_BIAS))
    assert (by_name.numpy() == by_member.numpy()).all()
    assert dp.aux_shape("relu_aux", (4, 16)) == dp.aux_shape(Epilogue.RELU_AUX, (4, 16))
    assert dp.reduce(a, 0, reduce="mean").numpy() == pytest.approx(a.numpy().mean(0), rel=1e-6)
    with pytest.raises(BadRequest, match=r"^epilogue: got 'relux'; expected an Epilogue: "):
        dp.aux_shape("relux", (4, 16))


class Mode(Choice):
    SLOW_WAY = 0
    FAST_WAY = 1


@dataclass(frozen=True, eq=False)
class MineRequest(OperandRequest[dp.Tensor]):
    op: ClassVar[str] = "mine"
    reads: ClassVar[tuple[str, ...]] = ("x",)
    x: dp.Tensor
    mode: Mode = Mode.SLOW_WAY
    other: Optional[Mode] = None  # noqa: UP045
    out: dp.Tensor | None = None

    def check_fields(self) -> None:
        pass


def test_an_op_of_the_user_s_own_takes_names_by_its_annotations() -> None:
    request = MineRequest(zeros(4), "fast", "slow-way")  # type: ignore[arg-type]
    assert (request.mode, request.other) == (Mode.FAST_WAY, Mode.SLOW_WAY)
    with pytest.raises(BadRequest, match=r"^mode: got 'fats'; expected a Mode: SLOW_WAY, FAST_WAY"):
        MineRequest(zeros(4), "fats")  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match=r"^mode: got 1; expected a Mode: "):
        MineRequest(zeros(4), 1)  # type: ignore[arg-type]


# -- dtypes -----------------------------------------------------------------------------------------------------------
# fmt: off
MEANT = {
    "f16": ["float16", "half", "fp16", "FP16", "Float16", " f16 ", np.float16, np.dtype("f2"), "torch.float16",
            "torch.half"],
    "f32": ["float32", "fp32", "F32", "single", np.float32, "torch.float", "torch.float32"],
    "f64": ["float64", "fp64", "double", float, np.float64, "torch.double"],
    "bf16": ["bfloat16", "BF16", "BFloat16", ml_dtypes.bfloat16, "torch.bfloat16"],
    "f8e4m3": ["e4m3", "fp8_e4m3", "FP8E4M3", "float8_e4m3fn", ml_dtypes.float8_e4m3fn, "torch.float8_e4m3fn"],
    "f8e5m2": ["e5m2", "fp8_e5m2", "float8_e5m2", ml_dtypes.float8_e5m2],
    "f4e2m1": ["fp4", "e2m1", "float4_e2m1fn", ml_dtypes.float4_e2m1fn],
    "i8": ["int8", "INT8", "I8", np.int8], "u8": ["uint8", "U8", np.uint8], "i32": ["int32", "torch.int"],
    "i64": ["int64", int], "bool": ["bool", bool, "torch.bool"], "c64": ["complex64", "C64"],
}
# fmt: on


@pytest.mark.parametrize(("name", "spec"), [(name, spec) for name, specs in MEANT.items() for spec in specs], ids=str)
def test_a_dtype_is_found_by_what_others_call_it(name: str, spec: Any) -> None:
    assert Dtype.of(spec) is Dtype.by_name[name]
    if Dtype.by_name[name].bits >= 8:
        assert host().empty(2, spec).dtype is Dtype.by_name[name]


@pytest.mark.parametrize("spec", ["fp8", "FP8", "float8", "torch.float8"])
def test_fp8_is_refused_with_the_two_that_it_may_mean(spec: str) -> None:
    for ask in (lambda: host().empty(2, spec), lambda: dp.matmul(zeros(4, 4), zeros(4, 4), out_dtype=spec)):
        with pytest.raises(BadRequest, match=r"It may mean f8e4m3 .* or f8e5m2 .*: name one of them") as caught:
            ask()
        assert all(name in str(caught.value) for name in Dtype.by_name)


@pytest.mark.parametrize(
    ("spec", "hint"), [("tf32", "compute='tf32'"), ("f8", "float64 is f64"), ("float8_e4m3", "float8_e4m3fn")]
)
def test_other_names_that_are_none_are_told_what_to_take(spec: str, hint: str) -> None:
    with pytest.raises(TypeError, match=hint):
        Dtype.of(spec)


@pytest.mark.parametrize(
    "spec", ["", " ", "f33", "torch.", "torch.zeros", "int16", "f16,f16", "x" * 500, 3, None, [], {}]
)
def test_what_is_no_dtype_is_told_with_those_that_there_are(spec: Any) -> None:
    with pytest.raises(TypeError, match=r"is not a dtype of this library: f64, f32"):
        Dtype.of(spec)


def test_dtypes_of_torch_are_taken_and_torch_is_not_imported_for_it() -> None:
    torch = pytest.importorskip("torch")
    known = {"float16": F16, "half": F16, "bfloat16": BF16, "float32": F32, "float": F32}
    known |= {"float8_e4m3fn": F8E4M3, "float8_e5m2": F8E5M2}
    for name, dtype in known.items():
        assert Dtype.of(getattr(torch, name)) is dtype
        assert dtype == getattr(torch, name)
    with pytest.raises(TypeError, match="is not a dtype of this library: f64, f32"):
        Dtype.of(torch.int16)
    if hasattr(torch, "float4_e2m1fn_x2"):
        with pytest.raises(TypeError, match="Its elements are pairs"):
            Dtype.of(torch.float4_e2m1fn_x2)
    assert dp.matmul(zeros(4, 4), zeros(4, 4), out_dtype=torch.float32).dtype is F32
    with pytest.raises(TypeError, match="is not a dtype"):
        Dtype.of(torch.zeros(2))


def test_an_object_with_a_dtype_is_taken_as_numpy_takes_it() -> None:
    """As JAX's are: `jnp.bfloat16` is not a dtype, but has one."""
    kind = type("_ScalarMeta", (type,), {"dtype": np.dtype(ml_dtypes.bfloat16)})("bfloat16", (), {})
    assert Dtype.of(kind) is BF16


# -- the command line -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("matmul --dtype fp16 --epilogue gelu_bias", "f16[256, 256] GELU_BIAS"),
        ("matmul --dtype BFloat16 --epilogue Gelu-Bias --arch sm_90", "bf16[256, 256] GELU_BIAS"),
        ("matmul --dtype f32 --compute tf32 --arch sm_90", "COMPUTE_32F_FAST_TF32"),
        ("matmul --shape 8x8:half --shape 8x8:torch.float16 --out-dtype fp32 --arch sm_90", "-> f32[8, 8]"),
        ("softmax --shape 4x8:float32 --algorithm log", "algorithm=LOG"),
        ("reduce --shape 4x8:float32 --axes 1 --reduce mean", "reduce=AVG"),
        ("norm_fwd --shape 4x8:f16 --shape 8:f32 --mode rms --arch sm_90", "RMS_NORM"),
    ],
)
def test_the_command_line_takes_the_same_words(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain", *words.split()])
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("matmul --dtype fp8", "It may mean f8e4m3 (more digits) or f8e5m2 (more range): name one of them"),
        ("matmul --dtype f16 --epilogue gelu_bais", "Did you mean Epilogue.GELU_BIAS?"),
        ("pooling --dtype f16 --mode average", "Did you mean PoolingMode.AVERAGE_COUNT_INCLUDE_PADDING or "),
    ],
)
def test_the_command_line_says_what_may_be_meant(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", *words.split()])
    assert said in " ".join(capsys.readouterr().err.split())
