"""CUDA C++ of load and store callbacks: a user's lines, and the code that computes his element from cuFFT's offset.

cuFFT gets a plan of dense operands, whatever the layout of the tensors. It reads and writes elements only through the
callbacks, and passes the offset of the element in the dense operand (`dense`). The generated code computes from it the
element's coordinates, its index in C order, which is the user's `i`, and its offset in the tensor (`tensor`). So
strides, gaps, dtypes and zero padding need no extra pass. This file calls no library and does not depend on requests.
Follows https://docs.nvidia.com/cuda/cufft/#cufft-callback-routines.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, NamedTuple

from dispatch.device.layout import c_strides
from dispatch.keys import BF16, BOOL, C64, C128, F16, F32, F64, I8, I32, I64, U8, U32, U64

if TYPE_CHECKING:
    from dispatch.keys import Dtype
    from dispatch.libraries.cufft.layouts import View
    from dispatch.libraries.cufft.moves import Hermitian

__all__ = ["EACH", "NUMBERS", "OPTIONS", "RESERVED", "STORED", "WORDS", "WRITE_WORDS"]
__all__ += ["CallbackSide", "Operand", "source_of"]

EACH = 4  # elements of a thread in a pass; all are loaded before the first is written
WORDS = 32  # words of 8 bytes that a callback gets: addresses and numbers
SMALL = 1 << 31
OPTIONS = ("-std=c++17", "-diag-suppress=177", "-diag-error=940")  # unused functions; functions that return no value
NUMBERS = {F32: "float", F64: "double", C64: "ComplexOf<float>", C128: "ComplexOf<double>", I8: "signed char",
           U8: "unsigned char", BOOL: "unsigned char", I32: "int", U32: "unsigned", I64: "long long",
           U64: "unsigned long long"}  # fmt: skip
STORED = {**NUMBERS, F16: "unsigned short", BF16: "unsigned short"}
RESERVED = frozenset({"x", "raw", "i", "at", "shape", "rank", "user", "Real", "Complex", "ComplexOf", "Result",
                      "Stored", "Number", "Value", "Index", "Block", "bits_of", "half_of", "brain_of", "conj", "real",
                      "imag", "norm", "abs"})  # fmt: skip

# Friends rather than templates, so that `x * 2` and `x * window[i]` convert real numbers as C++ does.
HEADER = r"""
template <class T> struct alignas(2 * sizeof(T)) ComplexOf {
    T x, y;
    ComplexOf() = default;
    __device__ ComplexOf(T real, T imaginary = 0) : x(real), y(imaginary) {}
    friend __device__ ComplexOf operator+(ComplexOf a, ComplexOf b) { return ComplexOf(a.x + b.x, a.y + b.y); }
    friend __device__ ComplexOf operator-(ComplexOf a, ComplexOf b) { return ComplexOf(a.x - b.x, a.y - b.y); }
    friend __device__ ComplexOf operator-(ComplexOf a) { return ComplexOf(-a.x, -a.y); }
    friend __device__ ComplexOf operator*(ComplexOf a, ComplexOf b)
    {
        return ComplexOf(a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x);
    }
    friend __device__ ComplexOf operator*(ComplexOf a, T b) { return ComplexOf(a.x * b, a.y * b); }
    friend __device__ ComplexOf operator*(T a, ComplexOf b) { return ComplexOf(a * b.x, a * b.y); }
    friend __device__ ComplexOf operator/(ComplexOf a, T b) { return ComplexOf(a.x / b, a.y / b); }
    friend __device__ ComplexOf conj(ComplexOf a) { return ComplexOf(a.x, -a.y); }
    friend __device__ T real(ComplexOf a) { return a.x; }
    friend __device__ T imag(ComplexOf a) { return a.y; }
    friend __device__ T norm(ComplexOf a) { return a.x * a.x + a.y * a.y; }
    friend __device__ T abs(ComplexOf a) { return hypot(a.x, a.y); }
};
static __device__ double bits_of(unsigned long long word)
{
    union { unsigned long long word; double number; } both;
    both.word = word;
    return both.number;
}
static __device__ float half_of(unsigned short bits)
{
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    union { unsigned word; float number; } both;
    both.word = exponent == 31 ? 0x7f800000u | unsigned(fraction) << 13
                               : unsigned(exponent + 112) << 23 | unsigned(fraction) << 13;
    const float size = exponent ? both.number : fraction * 5.9604644775390625e-8f;
    return bits >> 15 ? -size : size;
}
static __device__ float brain_of(unsigned short bits)
{
    union { unsigned word; float number; } both;
    both.word = unsigned(bits) << 16;
    return both.number;
}
struct Block { unsigned long long word[32]; };
"""

# Writes the words of the callbacks to device memory, in stream order: earlier launches have read theirs by then.
WRITE_WORDS = r"""
struct Blocks { unsigned long long word[64]; };
extern "C" __global__ void write_words(Blocks* at, Blocks given) { at->word[threadIdx.x] = given.word[threadIdx.x]; }
"""


class Operand(NamedTuple):
    """An operand that the user's lines name: a tensor of a dtype, or a number: "int", "long long", "Real" or "Complex".

    With `strides`, one for each axis of the transform's tensor, the name is the operand's element at the same
    coordinates.
    """

    name: str
    kind: Dtype | str
    strides: tuple[int, ...] | None = None

    @property
    def words(self) -> int:
        return 2 if self.is_number and self.kind == "Complex" else 1

    @property
    def is_number(self) -> bool:
        """Whether it is passed by value. A Dtype compares equal to its names, and "complex" is one of them."""
        return isinstance(self.kind, str)

    @property
    def declaration(self) -> str:
        kind = self.kind if isinstance(self.kind, str) else NUMBERS[self.kind]
        is_pointer = not self.is_number and self.strides is None
        return f"const {kind}* {self.name}" if is_pointer else f"{kind} {self.name}"

    def expression(self, word: int, shape: tuple[int, ...]) -> str:
        """The C++ expression for its value or address."""
        at = f"block->word[{word}]"
        if self.is_number:
            integer = f"({self.kind}){at}"
            real = f"Real(bits_of({at}))"
            both = f"Complex({real}, Real(bits_of(block->word[{word + 1}])))"
            return {"Real": real, "Complex": both}.get(str(self.kind), integer)
        pointer = f"(const {NUMBERS[self.kind]}*){at}"  # type: ignore[index]  # it is a dtype
        return pointer if self.strides is None else f"({pointer})[{_sum(shape, self.strides, 'long long')}]"


class CallbackSide(NamedTuple):
    """One side of a transform.

    Attributes:
        name: "load" or "store".
        code: the body of the user's function; "" leaves elements as they are.
        operands: the operands that it names, in the order of their words, which follow the word of the tensor's
            address.
        tensor: the tensor.
        dense: a dense view of the transform's extents; cuFFT passes offsets in it.
        real: f32 or f64, the precision of the computation.
        number: the dtype of cuFFT's elements.
        value: the dtype of the transform's number in the user's function: "x" for a store, the return value for a load.
        is_direct: whether cuFFT itself has the tensor's address.
        factor, conj: applied to the transform's numbers: after the user's function in a load, before it in a store.
        hermitian: the axes along which a half spectrum is made Hermitian.
    """

    name: str
    code: str
    operands: tuple[Operand, ...]
    tensor: View
    dense: View
    real: Dtype
    number: Dtype
    value: Dtype
    is_direct: bool
    factor: float = 1.0
    conj: bool = False
    hermitian: Hermitian | None = None

    @property
    def elements(self) -> int:
        """The number of elements that cuFFT counts."""
        return math.prod(self.dense.shape)

    @property
    def symbol(self) -> str:
        return f"dispatch_{self.name}"


def source_of(side: CallbackSide, *, as_pass: bool = False) -> str:
    """The program of a callback, or of the pass that does the same without cuFFT: `load_pass` or `store_pass`.

    cuFFT cannot link a callback from code that also has a kernel: with `load_pass` in the same LTO-IR, making a plan
    always failed with CUFFT_INTERNAL_ERROR on an H100 (cuFFT 12.0).
    """
    arguments, word = [], 1
    for operand in side.operands:
        arguments.append(operand.expression(word, side.tensor.shape))
        word += operand.words
    rank = max(1, len(side.tensor.shape))
    wide = max(side.elements, math.prod(side.tensor.shape)) >= SMALL
    parts = {
        "INDEX": "long long" if wide else "int",
        "EACH": str(EACH),
        "REAL": NUMBERS[side.real],
        "NUMBER": "Complex" if side.number.is_complex else "Real",
        "PAIR": ("double2" if side.real is F64 else "float2") if side.number.is_complex else NUMBERS[side.real],
        "STORED": STORED[side.tensor.dtype],
        "VALUE": "Complex" if side.value.is_complex else "Real",
        "RANK": str(rank),
        "SHAPE": ", ".join(map(str, side.tensor.shape or (1,))),
        "DECLARED": "".join(f", {operand.declaration}" for operand in side.operands),
        "TAKEN": "".join(f", {one}" for one in arguments),
        "CODE": side.code.rstrip("\n") or "return x;",
        "COORDINATES": _coordinates(side),
        "ORDER": _order(side),
        "PLACE": _offset(side),
        "TENSOR": "data" if side.is_direct else "block->word[0]",
    }
    is_load = side.name == "load"
    parts |= _load_parts(side) if is_load else _store_parts(side)
    text = (LOAD if is_load else STORE) + (LOAD_PASS if is_load else STORE_PASS) * as_pass
    return HEADER + re.sub(r"\$([A-Z]+)\$", lambda match: parts[match.group(1)], COMMON + text)


def _load_parts(side: CallbackSide) -> dict[str, str]:
    dtype, pair = side.tensor.dtype, "double2" if side.real is F64 else "float2"
    limits = [
        f"at[{axis}] >= {extent}"
        for axis, (extent, dense_extent) in enumerate(zip(side.tensor.shape, side.dense.shape, strict=True))
        if extent < dense_extent
    ]
    value = {F16: "half_of(raw)", BF16: "brain_of(raw)"}.get(dtype, "raw")
    x = "Complex" if dtype.is_complex else "Real"
    return {
        "X": x,
        "READ": f"Complex(Real({value}.x), Real({value}.y))" if dtype.is_complex else f"Real({value})",
        "OUTSIDE": f"if ({' || '.join(limits)}) return Number(0);" if limits else "",
        "HERMITIAN": _hermitian(side),
        "CONJ": "found = conj(found);" if side.conj else "",
        "MULTIPLIED": "found" if side.factor == 1 else f"found * Real({side.factor!r})",
        "GIVEN": f"{pair}{{y.x, y.y}}" if side.number.is_complex else "y",
    }


def _store_parts(side: CallbackSide) -> dict[str, str]:
    lines = [] if side.factor == 1 else [f"y = y * Real({side.factor!r});"]
    lines += ["y = conj(y);"] if side.conj else []
    return {
        "CHANGED": " ".join(lines),
        "X": "y.x" if side.number.is_complex and not side.value.is_complex else "y",
        "RECEIVED": "Number(y.x, y.y)" if side.number.is_complex else "y",
        "RESULT": "Result" if side.code else "Value",
        "RETURNED": "bool" if side.tensor.dtype is BOOL else "Stored",
        "WRITTEN": "Stored(found.x, found.y)" if side.tensor.dtype.is_complex else "Stored(found)",
    }


def _coordinates(side: CallbackSide) -> str:
    """The element's coordinates in the dense operand."""
    shape, strides = side.dense.shape, side.dense.strides
    if not shape:
        return "at[0] = 0;"
    outermost = max((axis for axis in range(len(shape)) if shape[axis] > 1), key=strides.__getitem__, default=0)
    lines = []
    for axis, (extent, stride) in enumerate(zip(shape, strides, strict=True)):
        divided = "Index(offset)" if stride == 1 else f"Index(offset) / {stride}"
        coordinate = divided if axis == outermost else f"({divided}) % {extent}"
        lines.append(f"at[{axis}] = {'0' if extent == 1 else coordinate};")
    return " ".join(lines)


def _order(side: CallbackSide) -> str:
    """The index of the element in C order, in the tensor."""
    return _offset_expression(side, c_strides(side.tensor.shape), "Index")


def _offset(side: CallbackSide) -> str:
    return _offset_expression(side, side.tensor.strides, "long long")


def _offset_expression(side: CallbackSide, strides: tuple[int, ...], kind: str) -> str:
    """`offset` itself if the tensor has the dense strides: unused coordinates are then not computed."""
    shape, dense = side.tensor.shape, side.dense
    axes = zip(dense.shape, dense.strides, strides, strict=True)
    if shape == dense.shape and side.hermitian is None and all(n == 1 or one == other for n, one, other in axes):
        return f"({kind})offset"
    return _sum(shape, strides, kind)


def _sum(shape: tuple[int, ...], strides: tuple[int, ...], kind: str) -> str:
    terms = [
        f"({kind})at[{axis}] * {stride}"
        for axis, (extent, stride) in enumerate(zip(shape, strides, strict=True))
        if extent > 1 and stride
    ]
    return " + ".join(terms) or "0"


def _hermitian(side: CallbackSide) -> str:
    """Makes the spectrum Hermitian where it is its own mirror image."""
    hermitian = side.hermitian
    if hermitian is None:
        return ""
    edge = f"if (at[{hermitian.axis}] == 0 || 2 * at[{hermitian.axis}] == {hermitian.size})"
    if not hermitian.others:
        return f"{edge} found.y = 0;"
    shape = side.dense.shape
    turned = " ".join(f"other[{k}] = at[{k}] ? {shape[k]} - at[{k}] : 0;" for k in hermitian.others)
    copied = " ".join(f"other[{k}] = at[{k}];" for k in range(len(shape)))
    return f"""{edge} {{
        Index other[{len(shape)}]; {copied} {turned}
        const Number beside = element(tensor, other, offset, block);
        found = Number(found.x / 2 + beside.x / 2, found.y / 2 - beside.y / 2);
    }}"""


COMMON = r"""
typedef $REAL$ Real;
typedef ComplexOf<Real> Complex;
typedef $INDEX$ Index;
typedef $STORED$ Stored;
typedef $NUMBER$ Number;
typedef $VALUE$ Value;
"""
LOAD = r"""
static __device__ Value user($X$ x, Stored raw, Index i, const Index* at$DECLARED$)
{
    const int rank = $RANK$;
    const Index shape[] = {$SHAPE$};
#line 1 "load"
$CODE$
}
#line 1 "dispatch"
static __device__ Number element(
    const Stored* tensor, const Index* at, unsigned long long offset, const Block* block)
{
    $OUTSIDE$
    const Index i = $ORDER$;
    const Stored raw = tensor[$PLACE$];
    return Number(user($READ$, raw, i, at$TAKEN$));
}

static __device__ Number loaded(const void* data, unsigned long long offset, const Block* block)
{
    Index at[$RANK$];
    $COORDINATES$
    const Stored* tensor = (const Stored*)$TENSOR$;
    Number found = element(tensor, at, offset, block);
    $HERMITIAN$
    $CONJ$
    return $MULTIPLIED$;
}

__device__ $PAIR$ dispatch_load(void* data, unsigned long long offset, void* info, void*)
{
    const Number y = loaded(data, offset, (const Block*)info);
    return $GIVEN$;
}
"""
LOAD_PASS = r"""
extern "C" __global__ void load_pass(const Stored* data, Number* target, long long count, Block block)
{
    const long long first = blockIdx.x * (long long)($EACH$ * blockDim.x) + threadIdx.x;
    Number found[$EACH$];
#pragma unroll
    for (int k = 0; k < $EACH$; k++) {
        const long long offset = first + k * (long long)blockDim.x;
        if (offset < count) found[k] = loaded(data, offset, &block);
    }
#pragma unroll
    for (int k = 0; k < $EACH$; k++) {
        const long long offset = first + k * (long long)blockDim.x;
        if (offset < count) target[offset] = found[k];
    }
}
"""
STORE = r"""
typedef $RETURNED$ Result;
static __device__ $RESULT$ user(Value x, Index i, const Index* at$DECLARED$)
{
    const int rank = $RANK$;
    const Index shape[] = {$SHAPE$};
#line 1 "store"
$CODE$
}
#line 1 "dispatch"
static __device__ void stored(void* data, unsigned long long offset, Number y, const Block* block)
{
    Index at[$RANK$];
    $COORDINATES$
    $CHANGED$
    const Index i = $ORDER$;
    const $RESULT$ found = user(Value($X$), i, at$TAKEN$);
    ((Stored*)$TENSOR$)[$PLACE$] = $WRITTEN$;
}

__device__ void dispatch_store(void* data, unsigned long long offset, $PAIR$ y, void* info, void*)
{
    stored(data, offset, $RECEIVED$, (const Block*)info);
}
"""
STORE_PASS = r"""
extern "C" __global__ void store_pass(const Number* source, Stored* data, long long count, Block block)
{
    const long long first = blockIdx.x * (long long)($EACH$ * blockDim.x) + threadIdx.x;
    Number given[$EACH$];
#pragma unroll
    for (int k = 0; k < $EACH$; k++) {
        const long long offset = first + k * (long long)blockDim.x;
        if (offset < count) given[k] = source[offset];
    }
#pragma unroll
    for (int k = 0; k < $EACH$; k++) {
        const long long offset = first + k * (long long)blockDim.x;
        if (offset < count) stored(data, offset, given[k], &block);
    }
}
"""
