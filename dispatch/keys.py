"""The keys of the table, in NVIDIA's terms: Dtype, Compute, Epilogue, ScaleMode, Arch; and their named groups.

Every part of the package imports this module; it imports no CUDA module and no library. The numbers are those of
NVIDIA's headers (`cudaDataType_t`, `cublasComputeType_t`, `cublasLtEpilogue_t`, `cublasLtMatmulMatrixScale_t`); a test
compares them with the generated bindings.
"""

from __future__ import annotations

from enum import EnumMeta, IntEnum
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FP8", "HALF", "HOST", "Arch", "Choice", "Compute", "Dtype", "Epilogue", "ScaleMode"]
__all__ += ["did_you_mean", "member"]


class Dtype:
    """One element type: its short name, its NumPy dtype, NVIDIA's `cudaDataType_t` number and its width in bits.

    The 17 instances are module constants (`F32`, `BF16`, …). Compare them with `is`; `==` also takes NumPy's dtypes.
    Names count bits: "i8" and "u8" are int8 and uint8; NumPy's "i8" and "u8" have 8 bytes and are i64 and u64 here.
    """

    __slots__ = ("bits", "cuda", "is_complex", "is_fp8", "name", "numpy")
    by_name: ClassVar[dict[str, Dtype]] = {}
    by_numpy: ClassVar[dict[np.dtype[Any], Dtype]] = {}
    # Names of the dtypes in other libraries, in addition to those of NumPy and ml_dtypes.
    # fmt: off
    aliases: ClassVar[dict[str, str]] = {
        "fp64": "f64", "fp32": "f32", "fp16": "f16", "fp4": "f4e2m1", "torch.float": "f32", "torch.int": "i32",
        "e4m3": "f8e4m3", "fp8e4m3": "f8e4m3", "fp8_e4m3": "f8e4m3", "f8e4m3fn": "f8e4m3", "e2m1": "f4e2m1",
        "e5m2": "f8e5m2", "fp8e5m2": "f8e5m2", "fp8_e5m2": "f8e5m2", "fp4_e2m1": "f4e2m1",
    }
    # fmt: on
    # Names that are refused as ambiguous, with a hint: NumPy counts bytes.
    ambiguous: ClassVar[dict[str, str]] = {
        "f8": "float64 is f64; the dtypes of 8 bits are f8e4m3 and f8e5m2",
        **dict.fromkeys(("fp8", "float8"), "It may mean f8e4m3 (more digits) or f8e5m2 (more range): name one of them"),
        "float8_e4m3": "It has infinities; NVIDIA's type f8e4m3 (float8_e4m3fn) does not",
        "tf32": "It is not a storage type: use f32 with compute='tf32'",
        **dict.fromkeys(("int16", "uint16"), "No library supports it: dev.array(x, 'i32') converts"),
        **dict.fromkeys(("float96", "float128"), "No library supports it: dev.array(x, 'f64') rounds to f64"),
        **dict.fromkeys(("complex192", "complex256"), "No library supports it: dev.array(x, 'c128') rounds to c128"),
        "torch.float4_e2m1fn_x2": "Its elements are pairs; f4e2m1 is the type of single elements",
    }

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
        """The Dtype of a specification; TypeError lists the choices.

        It is a short name ("bf16"), one of other libraries ("float16", "half", "fp16", "torch.bfloat16"), a Dtype, or a
        dtype of torch, JAX, ml_dtypes or anything else that `numpy.dtype` takes. "fp8" is ambiguous, and is refused.
        """
        if isinstance(spec, Dtype):
            return spec
        try:
            if isinstance(spec, str):
                if spec in Dtype.by_name:
                    return Dtype.by_name[spec]
                return _dtype_by_name(spec)
            if spec is not None:  # NumPy reads None as f64
                if _is_of_torch(spec):
                    return _dtype_by_name(str(spec))
                return Dtype.by_numpy[np.dtype(spec)]
        except Exception:  # noqa: BLE001  # NumPy reads lists, dicts and attributes, which may raise anything
            pass
        hint = Dtype.hint(spec)
        choices = ", ".join(Dtype.by_name) + (f". {hint}" if hint else "")
        raise TypeError(f"{spec if isinstance(spec, str) else type(spec)!r} is not a dtype of this library: {choices}")

    @staticmethod
    def hint(spec: object) -> str:
        """What to use in place of a refused name or torch dtype; "" if that is not known."""
        if not (isinstance(spec, (str, np.dtype)) or _is_of_torch(spec)):
            return ""
        text = str(spec).lower()
        if text.startswith((">", "<")):
            return "Tensors have this machine's byte order; dev.array(x) converts an array of the other byte order"
        return Dtype.ambiguous.get(text) or Dtype.ambiguous.get(text.rpartition(".")[2], "")

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
        return self.name.upper()  # the module constant, so unpickling returns the same instance


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


def _is_of_torch(spec: object) -> bool:
    kind = type(spec)
    return kind.__module__ == "torch" and kind.__name__ == "dtype"


def _dtype_by_name(text: str) -> Dtype:
    """The dtype of a long name, in upper or lower case; TypeError or KeyError if there is none."""
    lower = text.strip().lower()
    if lower.startswith("torch."):
        lower = lower if lower in Dtype.aliases or lower in Dtype.ambiguous else lower.removeprefix("torch.")
    if lower in Dtype.ambiguous:
        raise KeyError(text)
    lower = Dtype.aliases.get(lower, lower)
    if lower in Dtype.by_name:
        return Dtype.by_name[lower]
    try:
        return Dtype.by_numpy[np.dtype(text)]
    except (TypeError, KeyError):
        return Dtype.by_numpy[np.dtype(lower)]


M = TypeVar("M", bound="Choice | bool | None")
MAX_NAMES = 1024  # names whose members are cached


class _Choices(EnumMeta):
    """The metaclass of enums whose errors list their names."""

    def __getitem__(cls, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except KeyError:
            raise KeyError(_unknown_text(cls, name)) from None


class Choice(IntEnum, metaclass=_Choices):
    """An enum with NVIDIA's names; the error for an unknown name or number lists the members.

    Wherever a member is expected, its name may be given instead, in any case and with "-", "_" or nothing between its
    words. A prefix of all members may be left out, and words at the beginning or end of a name are enough if no other
    member has them: "gelu_bias", "rms", "tf32", "COMPUTE_32F_FAST_TF32", "CUBLAS_COMPUTE_32F_FAST_TF32".
    """

    @classmethod
    def named(cls, text: str) -> Self | None:
        """The member with a name or a part of it; None if there is none, or if there are several."""
        result: Self | None = find_member(cls, text)
        return result

    @staticmethod
    def other_names() -> dict[str, str]:
        """From names of members in other libraries, without "_", to the names of the members."""
        return {}

    @staticmethod
    def replacements() -> dict[str, str]:
        """From names that no member has, without "_", to a sentence about what to use instead."""
        return {}

    @classmethod
    def _missing_(cls, value: object) -> Any:
        if isinstance(value, str) and (result := cls.named(value)) is not None:
            return result
        raise ValueError(_unknown_text(cls, value))


def member(value: M | str) -> M:
    """Narrow the type of a field that takes members and names: once its request is made, it is a member."""
    return value  # type: ignore[return-value]


@lru_cache(MAX_NAMES)
def find_member(kind: Any, text: str) -> Any:
    """The member of a Choice for a name, or None."""
    spellings = _member_spellings(kind)
    name = _normalized(text.rpartition(".")[2])
    if name in spellings or not name.startswith(("CUBLAS", "CUDNN", "CUSPARSE")):
        return spellings.get(name)
    words = text.upper().split("_")  # NVIDIA's full name: the member's name follows the enum's prefix
    rests = ("".join(words[place:]) for place in range(1, len(words)))
    return next((spellings[rest] for rest in rests if rest in spellings), None)


def _normalized(text: str) -> str:
    return text.strip().upper().replace("-", "").replace("_", "").replace(" ", "")


@cache
def _member_spellings(kind: Any) -> dict[str, Any]:
    """All names of all members, without separators; unique parts of names are included, full names take precedence."""
    members: dict[str, Any] = dict(kind.__members__)
    spellings = {_normalized(name): member for name, member in members.items()}
    spellings |= {other: members[name] for other, name in kind.other_names().items()}
    words = {name: name.split("_") for name in members}
    if len({each[0] for each in words.values()}) == 1:
        words = {name: each[1:] for name, each in words.items()}
        spellings = {"".join(each).upper(): members[name] for name, each in words.items() if each} | spellings
    parts: dict[str, set[Any]] = {}
    for name, each in words.items():
        for place in range(1, len(each)):
            for part in (each[:place], each[place:]):
                parts.setdefault("".join(part).upper(), set()).add(members[name])
    return {part: min(of) for part, of in parts.items() if len(of) == 1} | spellings


def _unknown_text(kind: Any, value: object) -> str:
    members = ", ".join(kind.__members__)
    return f"{repr(value)[:60]} is not a {kind.__name__}; its members are {members}{did_you_mean(kind, value)}"


def _names_with_similar_word(word: str, names: list[str]) -> list[str]:
    """The name that has a word similar to the given one: LAYER_NORM for LEYER; none if there are several."""
    from difflib import get_close_matches

    by_word: dict[str, list[str]] = {}
    for name in names:
        for each in set(name.upper().split("_")):
            by_word.setdefault(each, []).append(name)
    like = get_close_matches(word, by_word, 1, 0.7)
    return by_word[like[0]] if like and len(by_word[like[0]]) == 1 else []


def did_you_mean(kind: Any, value: object) -> str:
    """`. Did you mean Epilogue.GELU?`, or a replacement; "" if no name of the enum is similar."""
    if not isinstance(value, str):
        return ""
    from difflib import get_close_matches  # imported only for an error, so that `import dispatch` stays fast

    if sentence := kind.replacements().get(_normalized(value.rpartition(".")[2])):
        return f". {sentence}"
    word = value.rpartition(".")[2].strip().upper().replace("-", "_")
    like = get_close_matches(word, list(kind.__members__), 1, 0.7)
    like = like or [name for name in kind.__members__ if word in name.upper().split("_")]  # "average"
    like = like or _names_with_similar_word(word, list(kind.__members__))
    return f". Did you mean {' or '.join(f'{kind.__name__}.{name}' for name in like)}?" if like else ""


class Compute(Choice):
    """`cublasComputeType_t`: the precision of products and sums; TF32 and the other fast modes only on request.

    COMPUTE_32F_EMULATED_16BFX9 splits each f32 into three bf16 numbers, and COMPUTE_64F_EMULATED_FIXEDPOINT splits
    each f64 into as many 8-bit numbers as it needs, if that is faster on tensor cores; both are as precise as the type
    that they emulate. On an H100 cuBLAS 13.1 emulates neither: results are those of COMPUTE_32F and COMPUTE_64F bit for
    bit, in the same time. The largest error of a product of 512 x 512 normally distributed numbers there is 1.6 in f32
    and 5.1 in f64, in units of roundoff times |A| |B|; 1,590 in TF32. COMPUTE_16F sums in f16; alpha and beta are f16,
    too. Tests limit its error to 8 + 4·√k + k/8 of its roundoffs, 2⁻¹¹, times |A| |B|, and sums beyond 65,504 are
    infinite. Only cuTENSOR has 3XTF32 and 16FX4, which use two TF32 or f16 numbers for an f32.
    """

    COMPUTE_16F = 64
    COMPUTE_32F = 68
    COMPUTE_64F = 70
    COMPUTE_32I = 72
    COMPUTE_32F_FAST_16F = 74
    COMPUTE_32F_FAST_16BF = 75
    COMPUTE_32F_FAST_TF32 = 77
    COMPUTE_32F_EMULATED_16BFX9 = 78
    COMPUTE_64F_EMULATED_FIXEDPOINT = 79
    COMPUTE_32F_FAST_3XTF32 = 1001
    COMPUTE_32F_EMULATED_16FX4 = 1002

    @staticmethod
    def other_names() -> dict[str, str]:
        plain = {"F16": "16F", "F32": "32F", "F64": "64F", "I32": "32I", "FP16": "16F", "FP32": "32F", "FP64": "64F"}
        fast = {"FASTF16": "32F_FAST_16F", "FASTFP16": "32F_FAST_16F", "FASTBF16": "32F_FAST_16BF"}
        emulated = {"BF16X9": "32F_EMULATED_16BFX9", "OZAKI": "64F_EMULATED_FIXEDPOINT"}
        emulated |= {
            "9X16BF": "32F_EMULATED_16BFX9",
            "8XINT8": "64F_EMULATED_FIXEDPOINT",
            "4X16F": "32F_EMULATED_16FX4",
        }
        return {other: f"COMPUTE_{name}" for other, name in (plain | fast | emulated).items()}


class Epilogue(Choice):
    """`cublasLtEpilogue_t`: the operation that is fused to the end of a product.

    BGRADA and BGRADB refer to the operands of the request (row-major), as DRELU_BGRAD and DGELU_BGRAD refer to its D.
    cuBLASLt is column-major, so the call to it exchanges A and B, and these two as well.
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
    activation: str  # "relu", "gelu" or "" for none; for DRELU and DGELU, the activation whose gradient is computed
    is_gradient: bool  # DRELU*, DGELU*: reads the aux tensor that the forward pass stored
    writes_aux: bool  # stores the ReLU bit mask or the input of GELU for the backward pass
    writes_bgrad: bool  # stores a bias gradient: of D's columns, or of operand a or b summed over k

    @staticmethod
    def other_names() -> dict[str, str]:
        return {"DEFAULT": "NONE"}

    def __init__(self, bits: int) -> None:
        self.adds_bias = bool(bits & 4)
        self.activation = "relu" if bits & (2 | 8) else "gelu" if bits & (32 | 64) else ""
        self.is_gradient = bool(bits & (8 | 64))
        self.writes_aux = bool(bits & 128) and not self.is_gradient
        self.writes_bgrad = bool(bits & (16 | 256 | 512))


class ScaleMode(Choice):
    """`cublasLtMatmulMatrixScale_t`: the block of elements that one scale factor applies to."""

    SCALAR_32F = 0
    VEC16_UE4M3 = 1
    VEC32_UE8M0 = 2
    OUTER_VEC_32F = 3
    VEC128_32F = 4
    BLK128x128_32F = 5


LONGEST_ARCH = 4  # digits


class Arch(int):
    """A GPU architecture as its compute capability (90 for sm_90), or the host (0), which is not a GPU."""

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
            raise ValueError(f"{spec!r} is not an architecture; write it like sm_90, or host")
        return Arch(int(digits))

    def __str__(self) -> str:
        return f"sm_{int(self)}" if self else "host"

    __repr__ = __str__


HOST = Arch(0)
