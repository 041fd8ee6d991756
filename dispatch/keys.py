"""The axes of the table, in NVIDIA's words: Dtype, Compute, Epilogue, ScaleMode, Arch; and their named groups.

Everybody imports this module; it imports no CUDA module and no library. The numbers are those of NVIDIA's headers
(`cudaDataType_t`, `cublasComputeType_t`, `cublasLtEpilogue_t`, `cublasLtMatmulMatrixScale_t`); a test holds them
against the generated bindings.
"""

from __future__ import annotations

from enum import EnumMeta, IntEnum
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

__all__ = [
    "FP8",
    "HALF",
    "HOST",
    "Arch",
    "Choice",
    "Compute",
    "Dtype",
    "Epilogue",
    "ScaleMode",
    "meant",
]


class Dtype:
    """One element type: its short name, its NumPy dtype, NVIDIA's `cudaDataType_t` number and its width in bits.

    The 17 instances are module constants (`F32`, `BF16`, …); compare them with `is`, or with anything NumPy takes as
    a dtype by `==`.
    """

    __slots__ = ("bits", "cuda", "is_complex", "is_fp8", "name", "numpy")
    by_name: ClassVar[dict[str, Dtype]] = {}
    by_numpy: ClassVar[dict[np.dtype[Any], Dtype]] = {}
    # Names that are refused: to NumPy 8 counts bytes, here bits.
    ambiguous: ClassVar[dict[str, str]] = {"f8": "float64 is f64; of 8 bits there are f8e4m3 and f8e5m2"}

    def __init__(self, name: str, scalar: Any, cuda: int, bits: int = 0) -> None:
        self.name = name
        self.numpy: np.dtype[Any] = np.dtype(scalar)
        self.cuda = cuda
        self.bits = bits or self.numpy.itemsize * 8
        self.is_complex = self.numpy.kind == "c"
        self.is_fp8 = name in ("f8e4m3", "f8e5m2")
        Dtype.by_name[name] = self
        Dtype.by_numpy[self.numpy] = self

    @staticmethod
    def of(spec: Any) -> Dtype:
        """The Dtype of a short name ("bf16"), a Dtype, or anything `numpy.dtype` takes; TypeError names the choices."""
        if isinstance(spec, Dtype):
            return spec
        try:
            if isinstance(spec, str) and spec in Dtype.by_name:
                return Dtype.by_name[spec]
            if spec is not None and not (isinstance(spec, str) and spec in Dtype.ambiguous):  # None is NumPy's f64
                return Dtype.by_numpy[np.dtype(spec)]
        except Exception:  # noqa: BLE001  # NumPy reads lists, dicts and attributes, and raises what those raise
            pass
        choices = ", ".join(Dtype.by_name)
        if type(spec) is str and spec in Dtype.ambiguous:
            choices += f". {Dtype.ambiguous[spec]}"
        raise TypeError(
            f"{spec if isinstance(spec, str) else type(spec)!r} is no dtype of this library; it has {choices}"
        )

    @property
    def itemsize(self) -> int:
        """Bytes of one element; 0 for the packed 4-bit type, which has two elements in a byte."""
        return self.bits // 8

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Dtype) or other is None:
            return self is other
        try:
            return Dtype.of(other) is self
        except TypeError:
            return False

    def __hash__(self) -> int:
        return hash(self.numpy)

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        return self.name.upper()  # the module constant: unpickling gives back the one instance


# fmt: off
F64    = Dtype("f64",    np.float64,                 1)
F32    = Dtype("f32",    np.float32,                 0)
F16    = Dtype("f16",    np.float16,                 2)
BF16   = Dtype("bf16",   ml_dtypes.bfloat16,        14)
F8E4M3 = Dtype("f8e4m3", ml_dtypes.float8_e4m3fn,   28)
F8E5M2 = Dtype("f8e5m2", ml_dtypes.float8_e5m2,     29)
E8M0   = Dtype("e8m0",   ml_dtypes.float8_e8m0fnu,  30)
F4E2M1 = Dtype("f4e2m1", ml_dtypes.float4_e2m1fn,   33, bits=4)
I8     = Dtype("i8",     np.int8,                    3)
U8     = Dtype("u8",     np.uint8,                   8)
I32    = Dtype("i32",    np.int32,                  10)
U32    = Dtype("u32",    np.uint32,                 12)
I64    = Dtype("i64",    np.int64,                  24)
U64    = Dtype("u64",    np.uint64,                 26)
BOOL   = Dtype("bool",   np.bool_,                  -1)  # NVIDIA's libraries have no such type: memory only
C64    = Dtype("c64",    np.complex64,               4)
C128   = Dtype("c128",   np.complex128,              5)
# fmt: on

HALF = (F16, BF16)
FP8 = (F8E4M3, F8E5M2)


class _Choices(EnumMeta):
    """The class of enums that say which names they have."""

    def __getitem__(cls, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except KeyError:
            raise KeyError(_unknown(cls, name)) from None


class Choice(IntEnum, metaclass=_Choices):
    """An enum in NVIDIA's words; an error about a name or number that it has not lists those that it has."""

    @classmethod
    def _missing_(cls, value: object) -> Any:
        raise ValueError(_unknown(cls, value))


def _unknown(kind: Any, value: object) -> str:
    return f"{repr(value)[:60]} is no {kind.__name__}; it has {', '.join(kind.__members__)}{meant(kind, value)}"


def meant(kind: Any, value: object) -> str:
    """`. Did you mean Epilogue.GELU?`, or nothing where no name of an enum is like what was given."""
    if not isinstance(value, str):
        return ""
    from difflib import get_close_matches  # for an error alone: `import dispatch` stays quick

    like = get_close_matches(value.strip().upper().replace("-", "_"), list(kind.__members__), 1, 0.7)
    return f". Did you mean {kind.__name__}.{like[0]}?" if like else ""


class Compute(Choice):
    """`cublasComputeType_t`: the precision of the products and sums; TF32 and the other fast modes only when asked."""

    COMPUTE_16F = 64
    COMPUTE_32F = 68
    COMPUTE_64F = 70
    COMPUTE_32I = 72
    COMPUTE_32F_FAST_16F = 74
    COMPUTE_32F_FAST_16BF = 75
    COMPUTE_32F_FAST_TF32 = 77


class Epilogue(Choice):
    """`cublasLtEpilogue_t`: what is fused to the end of a product.

    BGRADA and BGRADB name the operands of the request (row-major), as DRELU_BGRAD and DGELU_BGRAD name its D; the
    lowering to cuBLASLt, which is column-major and so exchanges A and B, exchanges these two as well.
    """

    NONE = 1
    RELU = 2
    BIAS = 4
    RELU_BIAS = 6
    GELU = 32
    GELU_BIAS = 36
    RELU_AUX = 130
    RELU_AUX_BIAS = 134
    DRELU = 136
    DRELU_BGRAD = 152
    GELU_AUX = 160
    GELU_AUX_BIAS = 164
    DGELU = 192
    DGELU_BGRAD = 208
    BGRADA = 256
    BGRADB = 512

    adds_bias: bool  # adds a bias vector of length n to every row of D
    activation: str  # "relu", "gelu" or "" for none; of DRELU and DGELU, the one whose gradient is taken
    is_gradient: bool  # DRELU*, DGELU*: reads the aux tensor that the forward pass stored
    writes_aux: bool  # stores what the backward pass needs: the ReLU bit mask, or the input of GELU
    writes_bgrad: bool  # stores a bias gradient: of D's columns, or of operand a or b summed over k

    def __init__(self, bits: int) -> None:
        self.adds_bias = bool(bits & 4)
        self.activation = "relu" if bits & (2 | 8) else "gelu" if bits & (32 | 64) else ""
        self.is_gradient = bool(bits & (8 | 64))
        self.writes_aux = bool(bits & 128) and not self.is_gradient
        self.writes_bgrad = bool(bits & (16 | 256 | 512))


class ScaleMode(Choice):
    """`cublasLtMatmulMatrixScale_t`: how far one scale factor reaches."""

    SCALAR_32F = 0
    VEC16_UE4M3 = 1
    VEC32_UE8M0 = 2
    OUTER_VEC_32F = 3
    VEC128_32F = 4
    BLK128x128_32F = 5


LONGEST_ARCH = 4  # digits


class Arch(int):
    """A GPU architecture by its compute capability (90 for sm_90), or the host, which is 0 and older than none."""

    __slots__ = ()

    @staticmethod
    def of(spec: str | int | Arch) -> Arch:
        """Read "sm_90", "sm_90a", "90", 90 or "host"; ValueError otherwise."""
        if isinstance(spec, int) and not isinstance(spec, bool) and spec >= 0:
            return Arch(spec)
        text = spec.strip().lower() if isinstance(spec, str) else ""
        if text == "host":
            return HOST
        digits = text.removeprefix("sm_").rstrip("af")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= LONGEST_ARCH):
            raise ValueError(f"{spec!r} is no architecture; write it like sm_90, or host")
        return Arch(int(digits))

    def __str__(self) -> str:
        return f"sm_{int(self)}" if self else "host"

    __repr__ = __str__


HOST = Arch(0)
