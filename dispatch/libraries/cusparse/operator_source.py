"""CUDA C++ of the caller's operators as functions that cuSPARSE links into its kernels: `add_op`, `mul_op`, `epilogue`.

Also the same lines as a namespace for this library's own kernels, in which they cannot see other names either.

cuSPARSE has no argument for an identity, and NVIDIA does not state the initial value of sums; users observed 0, which
is the identity of + alone. So its kernels do not add up the numbers themselves but encoded ones: the bits of each are
XORed with those of one NaN, so that this NaN becomes 0. A 0 with which cuSPARSE begins decodes to that NaN, `is_empty`;
`add_op` skips it, and `epilogue` replaces it by the identity. Each other number is encoded without loss; no arithmetic
produces this NaN. No library is called here. Follows https://docs.nvidia.com/cuda/cusparse/#cusparse-generic-functions,
SpMMOp and SpMVOp.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dispatch.keys import C64, C128, F32, F64

if TYPE_CHECKING:
    from dispatch.keys import Dtype

__all__ = ["EMPTY_ROWS", "KERNEL_OPTIONS", "LTO_OPTIONS", "Operators", "row_epilogue_namespace", "row_epilogue_source"]

LTO_OPTIONS = ("-std=c++17", "-diag-suppress=177", "-diag-error=940", "-dlto", "-rdc=true")  # 177 unused, 940 no return
KERNEL_OPTIONS = ("-std=c++17", "-diag-suppress=177", "-diag-error=940")
EMPTY_ROWS = "empty_rows"
REAL = {F32: "float", F64: "double", C64: "float", C128: "double"}
WORDS = {"float": "unsigned", "double": "unsigned long long"}
EMPTY_NAN = {"float": "0x7fe5b1c9u", "double": "0x7ffcb1c95a3d0e67ull"}  # NaN that no arithmetic produces
# The types of cuSPARSE's kernels: cuComplex is float2, cuDoubleComplex double2.
CUSPARSE_TYPES = {F32: "float", F64: "double", C64: "float2", C128: "double2"}

COMPLEX_NUMBERS = r"""
struct alignas(2 * sizeof(Real)) Complex {
    Real x, y;
    Complex() = default;
    __device__ Complex(Real real, Real imaginary = 0) : x(real), y(imaginary) {}
    friend __device__ Complex operator+(Complex a, Complex b) { return Complex(a.x + b.x, a.y + b.y); }
    friend __device__ Complex operator-(Complex a, Complex b) { return Complex(a.x - b.x, a.y - b.y); }
    friend __device__ Complex operator-(Complex a) { return Complex(-a.x, -a.y); }
    friend __device__ Complex operator*(Complex a, Complex b)
    {
        return Complex(a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x);
    }
    friend __device__ Complex operator/(Complex a, Real b) { return Complex(a.x / b, a.y / b); }
    friend __device__ bool operator==(Complex a, Complex b) { return a.x == b.x && a.y == b.y; }
    friend __device__ bool operator!=(Complex a, Complex b) { return a.x != b.x || a.y != b.y; }
    friend __device__ Complex conj(Complex a) { return Complex(a.x, -a.y); }
    friend __device__ Real real(Complex a) { return a.x; }
    friend __device__ Real imag(Complex a) { return a.y; }
    friend __device__ Real norm(Complex a) { return a.x * a.x + a.y * a.y; }
    friend __device__ Real abs(Complex a) { return hypot(a.x, a.y); }
};
typedef Complex Number;
static __device__ Number number_of(Given x) { return Number(x.x, x.y); }
static __device__ Given given_of(Number x) { return Given{x.x, x.y}; }
static __device__ Given exchanged(Given x) { return Given{exchanged_part(x.x), exchanged_part(x.y)}; }
static __device__ bool is_empty(Given x) { return bits_of(x.x) == 0 && bits_of(x.y) == 0; }
"""
REAL_NUMBERS = r"""
typedef Real Number;
static __device__ Number number_of(Given x) { return x; }
static __device__ Given given_of(Number x) { return x; }
static __device__ Given exchanged(Given x) { return exchanged_part(x); }
static __device__ bool is_empty(Given x) { return bits_of(x) == 0; }
"""
PRELUDE = r"""
typedef $REAL$ Real;
typedef $GIVEN$ Given;
typedef $WORD$ Word;
union Bits { Real real; Word word; };
static __device__ Word bits_of(Real x) { Bits bits; bits.real = x; return bits.word; }
static __device__ Real real_of(Word word) { Bits bits; bits.word = word; return bits.real; }
static __device__ Real exchanged_part(Real x) { return real_of(bits_of(x) ^ $NOTHING$); }
"""
USER_FUNCTION = r"""
static __device__ Number user_$NAME$(Number $FIRST$, Number $SECOND$)
{
#line 1 "$NAME$"
$CODE$
}
#line 1 "dispatch"
"""
MULTIPLY = r"""
__device__ Given mul_op(Given a, Given b) { return exchanged(given_of(user_multiply(number_of(a), number_of(b)))); }
"""
ADD = r"""
__device__ Given add_op(Given a, Given b)
{
    if (is_empty(a)) return b;
    if (is_empty(b)) return a;
    return exchanged(given_of(user_add(number_of(exchanged(a)), number_of(exchanged(b)))));
}
"""
EPILOGUE = r"""
__device__ Given epilogue(Given sum, Given c)
{
    const Number found = is_empty(sum) ? $IDENTITY$ : number_of(exchanged(sum));
    return given_of($FINISHED$);
}
"""
# cuSPARSE 12.6 does not write rows of C for which A has no element; our own kernel writes them.
EMPTY_ROWS_KERNEL = r"""
extern "C" __global__ void empty_rows(const INDEX* begins, Given* out, long long rows, long long cols)
{
    const long long number = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (number >= rows * cols) return;
    const long long row = number / cols;
    if (begins[row] != begins[row + 1]) return;
    Given nothing = {};
    out[number] = epilogue(nothing, out[number]);
}
"""
# In cuSPARSE's documentation a row is an int; the overload is for versions with another type.
USER_ROW_EPILOGUE = r"""
static __device__ Number user_epilogue(long long row, Number x)
{
#line 1 "epilogue"
$CODE$
}
#line 1 "dispatch"
"""
ROW_EPILOGUES = r"""
__device__ Real spmvop_epilogue(int row, Real x) { return user_epilogue(row, x); }
__device__ Real spmvop_epilogue(long row, Real x) { return user_epilogue(row, x); }
__device__ Real spmvop_epilogue(long long row, Real x) { return user_epilogue(row, x); }
"""
IDENTITY_AND_EPILOGUE = r"""
static __device__ Number identity() { return $IDENTITY$; }
static __device__ Number finished(Number found, Number c) { return $FINISHED$; }
"""
# For a sum that a kernel stores as an array of its parts.
EPILOGUE_OF_PARTS = r"""
template <class Sum> static __device__ Sum of_row(long long row, Sum sum)
{
    Number x;
    for (int i = 0; i < int(sizeof(Number) / sizeof(Real)); ++i) ((Real*)&x)[i] = sum.part[i];
    x = user_epilogue(row, x);
    for (int i = 0; i < int(sizeof(Number) / sizeof(Real)); ++i) sum.part[i] = ((Real*)&x)[i];
    return sum;
}
"""


class Operators(NamedTuple):
    """The source of a product's operators, and the dtype of the computation.

    Attributes:
        dtype: f32, f64, c64 or c128.
        multiply, add: bodies of functions of `a` and `b`.
        epilogue: the body of a function of `sum` and `c`, or None.
        identity: the sum of no products.
        adds_c: whether, without an epilogue, `c` is added to the sum.
    """

    dtype: Dtype
    multiply: str
    add: str
    epilogue: str | None
    identity: complex
    adds_c: bool

    def sources(self) -> dict[str, str]:
        """The programs by the names of their functions; each is passed to cuSPARSE separately."""
        common = prelude_of(self.dtype)
        add, end = user_function("add", "a", "b", self.add), self.user_epilogue()
        if self.epilogue is None and self.adds_c:
            end = add
        parts = {"IDENTITY": self.identity_expression(), "FINISHED": self.epilogue_expression("number_of(c)")}
        return {
            "add_op": common + add + ADD,
            "mul_op": common + user_function("multiply", "a", "b", self.multiply) + MULTIPLY,
            "epilogue": common + end + fill_template(EPILOGUE, parts),
        }

    def as_namespace(self) -> str:
        """All of them as the namespace `operators`: `user_multiply`, `user_add`, `identity` and `finished`."""
        lines = (user_function(name, "a", "b", code) for name, code in (("multiply", self.multiply), ("add", self.add)))
        parts = {"IDENTITY": self.identity_expression(), "FINISHED": self.epilogue_expression("c")}
        return in_namespace(self.dtype, *lines, self.user_epilogue(), fill_template(IDENTITY_AND_EPILOGUE, parts))

    def user_epilogue(self) -> str:
        """The caller's epilogue as a function; "" if there is none."""
        return "" if self.epilogue is None else user_function("epilogue", "sum", "c", self.epilogue)

    def epilogue_expression(self, given: str) -> str:
        """The expression of the result for the sum `found`; `given` is the expression of C's element as a number."""
        if self.epilogue is not None:
            return f"user_epilogue(found, {given})"
        return f"user_add(found, {given})" if self.adds_c else "found"

    def empty_rows_source(self) -> str:
        """The program of `empty_rows`, a kernel over dense memory of the result; INDEX is the type of A's offsets."""
        return self.sources()["epilogue"] + EMPTY_ROWS_KERNEL

    def identity_expression(self) -> str:
        """The identity as an expression, exact to the bit."""
        real = np.dtype(np.float32 if REAL[self.dtype] == "float" else np.float64)
        word, ending = (np.uint32, "u") if real.itemsize == np.dtype(np.uint32).itemsize else (np.uint64, "ull")
        value = complex(self.identity)
        with np.errstate(over="ignore"):
            words = np.array([value.real, value.imag]).astype(real).view(word).tolist()
        parts = [f"real_of({one:#x}{ending})" for one in words]
        return f"Number({', '.join(parts if self.dtype.is_complex else parts[:1])})"


def row_epilogue_source(dtype: Dtype, code: str) -> str:
    """The program of SpMVOp's epilogue."""
    return prelude_of(dtype) + fill_template(USER_ROW_EPILOGUE, {"CODE": code.rstrip("\n")}) + ROW_EPILOGUES


def row_epilogue_namespace(dtype: Dtype, code: str) -> str:
    """An epilogue of rows as the namespace `operators`: `of_row` takes a row and its sum, a structure of `part`s."""
    return in_namespace(dtype, fill_template(USER_ROW_EPILOGUE, {"CODE": code.rstrip("\n")}), EPILOGUE_OF_PARTS)


def in_namespace(dtype: Dtype, *parts: str) -> str:
    """Functions over numbers of a dtype as a namespace, to be put before a kernel."""
    return "".join(("namespace operators {\n", prelude_of(dtype), *parts, "}\n"))


def prelude_of(dtype: Dtype) -> str:
    """The common beginning of all programs of a dtype."""
    real = REAL[dtype]
    parts = {"REAL": real, "GIVEN": CUSPARSE_TYPES[dtype], "WORD": WORDS[real], "NOTHING": EMPTY_NAN[real]}
    return fill_template(PRELUDE, parts) + (COMPLEX_NUMBERS if dtype.is_complex else REAL_NUMBERS)


def user_function(name: str, first: str, second: str, code: str) -> str:
    """A caller's code as a function of two numbers."""
    return fill_template(USER_FUNCTION, {"NAME": name, "FIRST": first, "SECOND": second, "CODE": code.rstrip("\n")})


def fill_template(text: str, parts: dict[str, str]) -> str:
    """A template with its parts filled in; text within a part that looks like a placeholder is not replaced."""
    return re.sub(r"\$([A-Z_]+)\$", lambda found: parts[found.group(1)], text)
