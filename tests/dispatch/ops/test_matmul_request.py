"""What a request refuses, and that each refusal names the operand, what was given, what was expected and a way out."""

import pickle

import numpy as np
import pytest

import dispatch
from dispatch import Epilogue, MatmulRequest, ScaleMode, Scales, aux_shape
from dispatch.core.overlap import overlap
from dispatch.errors import BadRequest, NoRow, StaleTensor
from dispatch.keys import BF16, F8E4M3, F16, F32, I32, U8, Arch, Compute
from dispatch.ops.matmul.scales import scale_shape
from dispatch.table.select import select

E = Epilogue


@pytest.fixture
def dev():
    return dispatch.device("host")


def zeros(*shape, dtype="f32"):
    return dispatch.device("host").zeros(shape, dtype)


def fields(**changes):
    return {"a": zeros(4, 6), "b": zeros(6, 8), **changes}


def fp8(**changes):
    return {"a": zeros(16, 32, dtype="f8e4m3"), "b": zeros(16, 32, dtype="f8e4m3").mT, **changes}


# fmt: off
REFUSED = [  # what is changed in a good request, the operand that is named, what was given, what was expected
    (lambda: fields(a=[[0.0] * 6] * 4),                             "a",        "list",             "Tensor"),
    (lambda: fields(b=None),                                        "b",        "NoneType",         "Tensor"),
    (lambda: fields(a=zeros(6)),                                    "a",        "f32[6]",           "two axes"),
    (lambda: fields(b=zeros(7, 8)),                                 "b",        "f32[7, 8]",        "6 rows"),
    (lambda: fields(a=zeros(2, 4, 6), b=zeros(3, 6, 8)),            "b",        "f32[3, 6, 8]",     "broadcast"),
    (lambda: fields(a=zeros(8, 12)[::2, ::2]),                      "a",        "strides [24, 2]",  "dense"),
    (lambda: fields(c=zeros(4, 9)),                                 "c",        "(4, 9)",           "(4, 8)"),
    (lambda: fields(out=zeros(8, 4)),                               "out",      "(8, 4)",           "(4, 8)"),
    (lambda: fields(out=zeros(32)),                                 "out",      "(32,)",            "(4, 8)"),
    (lambda: fields(out=zeros(4, 8), out_dtype="f16"),              "out_dtype", "f16",             "f32"),
    (lambda: fields(out_dtype="f31"),                               "out_dtype", "f31",             "dtype"),
    (lambda: fields(beta=1.0),                                      "beta",     "1.0",              "neither c nor"),
    (lambda: fields(epilogue="RELUX"),                              "epilogue", "'RELUX'",          "Epilogue"),
    (lambda: fields(compute=68),                                    "compute",  "68",               "Compute"),
    (lambda: fields(scales=2.0),                                    "scales",   "2.0",              "Scales"),
    (lambda: fields(fast_accum=1),                                  "fast_accum", "1",              "bool"),
    (lambda: fields(reduced_precision=1),                           "reduced_precision", "1",       "bool"),
    (lambda: fields(workspace=-1),                                  "workspace", "-1",              "0 or more"),
    (lambda: fields(alpha="x"),                                     "alpha",    "'x'",              "number"),
    (lambda: fields(alpha=True),                                    "alpha",    "True",             "number"),
    (lambda: fields(alpha=1j),                                      "alpha",    "1j",               "real"),
    (lambda: fields(alpha=zeros(2)),                                "alpha",    "f32[2]",           "one element"),
    (lambda: fields(alpha=zeros(1, dtype="f64")),                   "alpha",    "f64[1]",           "dtype f32"),
    (lambda: fields(c=zeros(4, 8), beta=np.ones(2)),                "beta",     "f64[2]",           "one element"),
    (lambda: fields(epilogue=E.BIAS),                               "bias",     "nothing",          "BIAS reads"),
    (lambda: fields(bias=zeros(8)),                                 "bias",     "f32[8]",           "NONE has no bias"),
    (lambda: fields(epilogue=E.BIAS, bias=zeros(4)),                "bias",     "(4,)",             "(8,)"),
    (lambda: fields(epilogue=E.BIAS, bias=zeros(16)[::2]),          "bias",     "stride 2",         "dense"),
    (lambda: fields(epilogue=E.DRELU),                              "aux",      "nothing",          "DRELU reads"),
    (lambda: fields(aux=zeros(4, 8)),                               "aux",      "f32[4, 8]",        "NONE has no aux"),
    (lambda: fields(epilogue=E.DRELU, aux=zeros(4, 16)),            "aux",      "f32[4, 16]",       "u8[4, 16]"),
    (lambda: fields(epilogue=E.DRELU, aux=zeros(4, 1, dtype="u8")), "aux",      "(4, 1)",           "(4, 16)"),
    (lambda: fields(epilogue=E.DGELU, aux=zeros(4, 9)[:, :8]),      "aux",      "(9, 1)",           "multiple of 8"),
    (lambda: fields(bgrad=zeros(8)),                                "bgrad",    "f32[8]",           "has no bgrad"),
    (lambda: fields(epilogue=E.BGRADA, bgrad=zeros(8)),             "bgrad",    "(8,)",             "(4,)"),
    (lambda: fields(epilogue=E.BGRADB, bgrad=zeros(4)),             "bgrad",    "(4,)",             "(8,)"),
    (lambda: fields(a=zeros(0, 6), epilogue=E.BGRADB),              "epilogue", "empty D",          "elements"),
    (lambda: fp8(scales=Scales(a=0.0)),                             "scales.a", "0.0",              "above 0"),
    (lambda: fp8(scales=Scales(d=float("nan"))),                    "scales.d", "nan",              "above 0"),
    (lambda: fp8(scales=Scales(b="1")),                             "scales.b", "'1'",              "number"),
    (lambda: fp8(scales=Scales(a=zeros(2))),                        "scales.a", "(2,)",             "(1,)"),
    (lambda: fp8(scales=Scales(a=zeros(1, dtype="f16"))),           "scales.a", "f16[1]",           "f32"),
    (lambda: fp8(scales=Scales(a=1.0, a_mode=3)),                   "scales.a_mode", "3",           "ScaleMode"),
    (lambda: fp8(scales=Scales(a=1.0, a_mode=ScaleMode.OUTER_VEC_32F)), "scales.a", "1.0",          "tensor"),
    (lambda: fp8(scales=Scales(b=zeros(32), b_mode=ScaleMode.OUTER_VEC_32F)), "scales.b", "(32,)",  "(16,)"),
    (lambda: fp8(scales=Scales(aux=1.0)),                           "scales.aux", "a factor",       "no aux"),
    (lambda: fp8(scales=Scales(amax_d=zeros(2))),                   "scales.amax_d", "f32[2]",      "one element"),
]
# fmt: on


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_a_refusal_names_operand_given_and_expected(number):
    make, operand, given, expected = REFUSED[number]
    with pytest.raises(BadRequest) as caught:
        MatmulRequest(**make())
    error = caught.value
    assert error.operand == operand
    assert given in error.given
    assert expected in error.expected
    assert str(error).startswith(f"{operand}: got {error.given}; expected {error.expected}")
    assert str(error).endswith(f"Hint: {error.hint}" if error.hint else error.expected)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.operand) == (BadRequest, str(error), operand)


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: fields(a=[[0.0] * 6] * 4), "dev.array"),
        (lambda: fields(b=zeros(7, 8)), "mT"),
        (lambda: fields(a=zeros(8, 12)[::2, ::2]), "copy it"),
        (lambda: fields(bias=zeros(8)), "RELU_BIAS"),
        (lambda: fields(epilogue=E.DRELU, aux=zeros(4, 16)), "forward"),
        (lambda: fields(alpha=zeros(1, dtype="f64")), "dev.array([x], 'f32')"),
        (lambda: fields(beta=1.0), "pass c="),
    ],
)
def test_a_refusal_says_what_to_do(make, hint):
    with pytest.raises(BadRequest) as caught:
        MatmulRequest(**make())
    assert hint in caught.value.hint


# -- overlap ------------------------------------------------------------------------------------------------------
def test_out_may_be_c_but_no_part_of_anything_else():
    memory = zeros(12, 8)
    a, b = zeros(4, 6), zeros(6, 8)
    part = memory[:4]
    assert MatmulRequest(a=a, b=b, c=part, out=part).c_is_out
    assert MatmulRequest(a=a, b=b, c=memory[:4], out=memory[:4]).shape == (4, 8)
    for operands in (
        {"a": a, "b": memory[:6], "out": memory[5:9]},
        {"a": a, "b": b, "c": memory[:4], "out": memory[1:5]},
        {"a": memory[:4, :6], "b": b, "out": memory[:4]},
        {"a": a, "b": b, "out": memory[:4], "bias": memory[3], "epilogue": E.BIAS},
        {"a": a, "b": b, "out": memory[:4], "bgrad": memory[0], "epilogue": E.BGRADB},
    ):
        with pytest.raises(BadRequest, match="overlaps"):
            MatmulRequest(**operands)


def test_views_of_which_it_is_too_hard_to_tell_count_as_overlapping():
    memory = np.zeros(1 << 17, np.float32)
    strides = (10007, 1009, 101, 11)
    one, other = (
        dispatch.from_dlpack(
            np.lib.stride_tricks.as_strided(memory[at:], (6,) * 4, [4 * (s + 2 * at) for s in strides])
        )
        for at in (0, 1)
    )
    lent = [np.from_dlpack(each) for each in (one, other)]
    with pytest.raises(np.exceptions.TooHardError):
        np.shares_memory(*lent, max_work=10_000)
    assert overlap(one, other)


def test_views_that_interleave_without_sharing_an_element_do_not_overlap():
    memory = zeros(8, 16)
    request = MatmulRequest(a=zeros(8, 6), b=zeros(6, 8), c=memory[:, :8], out=memory[:, 8:])
    assert not request.c_is_out


def test_out_is_neither_read_only_nor_broadcast(dev):
    frozen = np.zeros((4, 8), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(BadRequest, match="read-only"):
        MatmulRequest(**fields(out=dispatch.from_dlpack(frozen)))
    row = dispatch.from_dlpack(np.zeros((1, 8), np.float32))
    spread = dispatch.Tensor(row.storage, row.ptr, dev.layout(F32, (4, 8), (0, 1), row.ptr))
    with pytest.raises(BadRequest) as caught:
        MatmulRequest(**fields(out=spread))
    assert caught.value.operand == "out"


def test_tensors_of_a_closed_device_are_stale_before_anything_else(dev):
    a, b = zeros(4, 6), zeros(6, 8)
    request = MatmulRequest(a=a, b=b)
    dev.close()
    with pytest.raises(StaleTensor, match="closed"):
        MatmulRequest(a=a, b=b)
    with pytest.raises(StaleTensor):
        MatmulRequest(a=zeros(4, 6), b=b)
    with pytest.raises(StaleTensor):
        dispatch.run(request)


# -- what a request says of itself --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("a", "given", "d", "c"),
    [
        ("f32", {}, F32, F32),
        ("bf16", {}, BF16, BF16),
        ("bf16", {"out_dtype": "f32"}, F32, F32),
        ("f8e4m3", {}, BF16, BF16),
        ("f8e4m3", {"out_dtype": "f8e4m3"}, F8E4M3, BF16),
        ("f8e4m3", {"out_dtype": "f16"}, F16, F16),
        ("i8", {}, I32, I32),
    ],
)
def test_dtypes_that_are_left_open(a, given, d, c):
    request = MatmulRequest(a=zeros(16, 16, dtype=a), b=zeros(16, 16, dtype=a), **given)
    assert (request.d_dtype, request.c_dtype) == (d, c)


def test_beta_is_1_with_c_and_0_without():
    assert MatmulRequest(**fields()).beta == 0
    assert MatmulRequest(**fields(c=zeros(4, 8))).beta == 1
    assert MatmulRequest(**fields(c=zeros(4, 8), beta=0.5)).beta == 0.5


@pytest.mark.parametrize(("n", "mask"), [(1, 16), (128, 16), (129, 32)])
def test_the_shape_of_aux(n, mask):
    assert aux_shape(E.RELU_AUX, (2, 3, n)) == ((2, 3, mask), (3 * mask, mask, 1))
    row = -(-n // 8) * 8
    assert aux_shape(E.GELU_AUX, (2, 3, n)) == ((2, 3, n), (3 * row, row, 1))


@pytest.mark.parametrize("epilogue", list(Epilogue))
def test_what_a_run_gives_back(epilogue):
    needs = {}
    if epilogue.adds_bias:
        needs["bias"] = zeros(8)
    if epilogue.is_gradient:
        needs["aux"] = zeros(4, 16, dtype="u8") if epilogue.activation == "relu" else zeros(4, 8)
    if epilogue is E.BGRADA:
        needs["a"] = zeros(6, 4).mT
    request = MatmulRequest(**fields(epilogue=epilogue, **needs))
    result = dispatch.run(request)
    several = epilogue.writes_aux or epilogue.writes_bgrad
    assert isinstance(result, tuple) is several
    out, *others = result if several else (result,)
    assert out.shape == (4, 8)
    if epilogue.writes_aux:
        assert (others[0].shape, others[0].dtype) == (((4, 16), U8) if epilogue.activation == "relu" else ((4, 8), F32))
    if epilogue.writes_bgrad:
        assert others[-1].shape == ((4,) if epilogue is E.BGRADA else (8,))


def test_requests_that_differ_only_in_numbers_have_one_key():
    first, second = MatmulRequest(**fields(alpha=2.0)), MatmulRequest(**fields(alpha=3.0))
    assert first.key() == second.key()
    changes = ({"epilogue": E.RELU}, {"compute": Compute.COMPUTE_32F}, {"c": zeros(4, 8)}, {"out_dtype": "f16"})
    for change in (*changes, {"autotune": True}, {"reduced_precision": True}):
        assert MatmulRequest(**fields(**change)).key() != first.key()


def test_replace_takes_operands_by_name_and_checks_them():
    request = MatmulRequest(**fields())
    other = zeros(4, 6)
    assert request.replace(a=other).a is other
    with pytest.raises(BadRequest, match="b: got"):
        request.replace(b=zeros(5, 5))
    with pytest.raises(BadRequest) as caught:
        request.replace(x=other)
    assert caught.value.operand == "x"


def test_a_request_describes_itself_in_one_line():
    text = MatmulRequest(**fields(epilogue=E.RELU, compute=Compute.COMPUTE_32F_FAST_TF32)).describe()
    assert text.splitlines() == [text]
    for part in ("f32[4, 6]", "f32[6, 8]", "f32[4, 8]", "RELU", "COMPUTE_32F_FAST_TF32"):
        assert part in text


def test_what_no_library_offers_is_no_row_with_reasons_and_a_way_out():
    with pytest.raises(NoRow) as caught:
        dispatch.matmul(zeros(4, 6, dtype="f16"), zeros(6, 8, dtype="bf16"))
    assert len(caught.value.tried) >= 1
    assert all(reasons for _, reasons in caught.value.tried)
    assert caught.value.change == "b f16 (now bf16), or a bf16 (now f16)"
    assert f"Nearest that works: {caught.value.change}\n" in str(caught.value)
    assert f"\n  {caught.value.nearest.partition(', which ')[0]}: " in str(caught.value)


@pytest.mark.parametrize("name", ["bias", "aux", "bgrad"])
@pytest.mark.parametrize("dtype", ["f16", "f32", "f64"])
def test_what_an_epilogue_takes_must_lie_aligned(name, dtype):
    """A kernel may read 16 bytes of it at once, and the library is not told where it lies."""
    dev = dispatch.device("host")
    epilogue = {"bias": Epilogue.BIAS, "aux": Epilogue.DGELU, "bgrad": Epilogue.BGRADB}[name]
    a, b = dev.zeros((16, 32), dtype), dev.zeros((32, 24), dtype)
    shape = (16, 24) if name == "aux" else (24,)
    memory = dev.zeros((16 * 24 + 32,), dtype)
    for first in range(17):
        vector = memory[first : first + int(np.prod(shape))].reshape(shape)
        request = MatmulRequest(a, b, epilogue=epilogue, library="cublasLt", **{name: vector})
        if first * vector.dtype.itemsize % 16 == 0:
            dispatch.run(request)
            continue
        with pytest.raises(NoRow, match=f"{name} at a multiple of 16 bytes, has {vector.layout.alignment}: copy it"):
            dispatch.run(request)


MODES = [
    (ScaleMode.VEC128_32F, ScaleMode.BLK128x128_32F),
    (ScaleMode.BLK128x128_32F, ScaleMode.VEC128_32F),
    (ScaleMode.VEC32_UE8M0, ScaleMode.VEC32_UE8M0),
]


@pytest.mark.parametrize("modes", MODES, ids=lambda modes: "-".join(mode.name for mode in modes))
@pytest.mark.parametrize("name", "ab")
def test_factors_of_blocks_must_lie_aligned(modes, name):
    """cuBLASLt's documentation asks for it, and its heuristic is not told where they lie."""
    dev, m, n, k = dispatch.device("host"), 128, 256, 512
    a, b = dev.zeros((m, k), "f8e4m3"), dev.zeros((n, k), "f8e4m3").mT
    arch = Arch(100 if modes[0] is ScaleMode.VEC32_UE8M0 else 90)
    for first in (0, 1, 2, 3, 4, 8, 15, 16):
        factors = {}
        for side, mode, lines in zip("ab", modes, (m, n), strict=True):
            dtype, shape = scale_shape(mode, lines, k)
            size, start = int(np.prod(shape)), first if side == name else 0
            factors[side] = dev.zeros(size + 16, dtype)[start : start + size].reshape(shape)
        request = MatmulRequest(a, b, scales=Scales(**factors, a_mode=modes[0], b_mode=modes[1]), out_dtype="bf16")
        if factors[name].layout.alignment >= 16:
            assert select(request, arch).scales == (modes,)
            continue
        text = f"scales.{name} at a multiple of 16 bytes, has {factors[name].layout.alignment}: copy it"
        with pytest.raises(NoRow, match=text):
            select(request, arch)
