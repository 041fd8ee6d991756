"""The axes of the table: names and numbers are NVIDIA's, dtypes are NumPy's."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest

from cudabind.sys import cublasLt, cuda_types
from dispatch import keys
from dispatch.keys import HOST, Arch, Compute, Dtype, Epilogue, ScaleMode

# fmt: off
NVIDIA = {
    "f64": "CUDA_R_64F", "f32": "CUDA_R_32F", "f16": "CUDA_R_16F", "bf16": "CUDA_R_16BF", "f8e4m3": "CUDA_R_8F_E4M3",
    "f8e5m2": "CUDA_R_8F_E5M2", "e8m0": "CUDA_R_8F_UE8M0", "f4e2m1": "CUDA_R_4F_E2M1", "i8": "CUDA_R_8I",
    "u8": "CUDA_R_8U", "i32": "CUDA_R_32I", "u32": "CUDA_R_32U", "i64": "CUDA_R_64I", "u64": "CUDA_R_64U",
    "c64": "CUDA_C_32F", "c128": "CUDA_C_64F",
}
# fmt: on


def test_all_dtypes_are_there_and_bool_alone_is_not_nvidias():
    assert {*NVIDIA, "bool"} == set(Dtype.by_name)
    assert Dtype.of("bool").cuda == -1


@pytest.mark.parametrize("name", NVIDIA)
def test_a_dtype_has_nvidias_number(name):
    assert Dtype.of(name).cuda == cuda_types.cudaDataType_t[NVIDIA[name]]


@pytest.mark.parametrize("name", list(Dtype.by_name))
def test_a_dtype_is_found_by_each_of_its_names(name):
    dtype = Dtype.of(name)
    assert Dtype.of(dtype) is dtype
    assert Dtype.of(dtype.numpy) is dtype
    assert Dtype.of(dtype.numpy.type) is dtype
    assert getattr(keys, name.upper()) is dtype
    assert dtype == dtype.numpy
    assert repr(dtype) == name


@pytest.mark.parametrize("name", list(Dtype.by_name))
def test_a_dtype_stays_itself_through_copies(name):
    dtype = Dtype.of(name)
    assert pickle.loads(pickle.dumps(dtype)) is dtype
    assert copy.deepcopy(dtype) is dtype


def test_sizes_in_bits_and_bytes():
    assert {name: Dtype.of(name).bits for name in ("f64", "bf16", "f8e5m2", "f4e2m1", "c128")} == {
        "f64": 64, "bf16": 16, "f8e5m2": 8, "f4e2m1": 4, "c128": 128,
    }  # fmt: skip
    assert Dtype.of("f4e2m1").itemsize == 0
    assert Dtype.of("c64").is_complex
    assert not Dtype.of("f64").is_complex


def test_equality_is_with_anything_that_names_the_dtype():
    bf16 = Dtype.of("bf16")
    assert bf16 == "bf16"
    assert bf16 == ml_dtypes.bfloat16
    assert bf16 != "f16"
    assert bf16 != None  # noqa: E711  # NumPy reads None as float64
    assert Dtype.of("f64") != None  # noqa: E711
    assert bf16 != object()
    assert {bf16: 1}[Dtype.of(ml_dtypes.bfloat16)] == 1


@pytest.mark.parametrize("spec", ["f31", object(), "S4", np.dtype([("x", "f4")]), 3])
def test_what_is_no_dtype_says_which_there_are(spec):
    with pytest.raises(TypeError, match=r"bf16.*c128"):
        Dtype.of(spec)


OF_CUTENSOR = (Compute.COMPUTE_32F_FAST_3XTF32, Compute.COMPUTE_32F_EMULATED_16FX4)


@pytest.mark.parametrize("compute", Compute)
def test_compute_types_have_nvidias_numbers(compute):
    if compute in OF_CUTENSOR:  # cuBLAS has no such type, and none of its own has the number
        assert compute not in [int(member) for member in cublasLt.cublasComputeType_t]
    else:
        assert cublasLt.cublasComputeType_t[f"CUBLAS_{compute.name}"] == compute


@pytest.mark.parametrize("epilogue", Epilogue)
def test_epilogues_have_nvidias_numbers(epilogue):
    name = "DEFAULT" if epilogue is Epilogue.NONE else epilogue.name
    assert cublasLt.cublasLtEpilogue_t[f"CUBLASLT_EPILOGUE_{name}"] == epilogue


def test_all_epilogues_of_cublaslt_are_there():
    known = {int(member) for member in cublasLt.cublasLtEpilogue_t if "SWISH" not in member.name}
    assert {int(epilogue) for epilogue in Epilogue} <= known
    assert len(Epilogue) == 16


@pytest.mark.parametrize("mode", ScaleMode)
def test_scale_modes_have_nvidias_numbers(mode):
    assert cublasLt.cublasLtMatmulMatrixScale_t[f"CUBLASLT_MATMUL_MATRIX_SCALE_{mode.name}"] == mode


@pytest.mark.parametrize("epilogue", Epilogue)
def test_what_an_epilogue_does_is_in_its_name(epilogue):
    words = epilogue.name.split("_")
    assert epilogue.adds_bias is ("BIAS" in words)
    assert epilogue.writes_aux is ("AUX" in words)
    assert epilogue.is_gradient is (words[0] in ("DRELU", "DGELU"))
    assert epilogue.writes_bgrad is any(word.startswith("BGRAD") for word in words)
    assert epilogue.activation == ("relu" if "RELU" in words[0] else "gelu" if "GELU" in words[0] else "")


@pytest.mark.parametrize(("spec", "number"), [("sm_90", 90), ("sm_90a", 90), ("SM_100f", 100), ("90", 90), (80, 80)])
def test_an_architecture_is_read_as_it_is_written(spec, number):
    assert Arch.of(spec) == number
    assert str(Arch.of(spec)) == f"sm_{number}"
    assert Arch.of(str(Arch.of(spec))) == Arch.of(spec)


def test_the_host_is_an_architecture_older_than_all():
    assert Arch.of("host") is HOST
    assert str(HOST) == "host"
    assert Arch.of("sm_50") > HOST


@pytest.mark.parametrize("spec", ["", "sm_", "hopper", "sm_x"])
def test_what_is_no_architecture_is_an_error(spec):
    with pytest.raises(ValueError, match="is not an architecture"):
        Arch.of(spec)
