"""What cuSPARSELt takes beyond its dtypes: each rule gives "needs …, has …", or ""."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.core.layouts import at_multiples
from dispatch.keys import BF16, F8E4M3, F8E5M2, F16, F32, HALF, I8, Arch, Dtype
from dispatch.ops.structured.layout import is_row_major, leading_dimension
from dispatch.ops.structured.product import Activation24

if TYPE_CHECKING:
    from dispatch.device.layout import Layout

__all__ = [
    "SAFE_KERNELS",
    "aligned",
    "columns_of_f32",
    "contiguous",
    "contiguous_batch",
    "dense_vectors",
    "factor_vectors",
]
__all__ += ["gelu_dtypes", "is_faulty", "matrix_order", "operand_orders", "safe_kernels", "same_layout"]
__all__ += ["separate_results"]

ALIGNMENT, STRUCTURED_LINE = 16, 32  # bytes
SM100 = Arch(100)
# The dtypes of A and of D for which the library has GELU, as its own messages list them (0.8.0 and 0.10.0): on each
# GPU, and beside these before sm_100, and from there on.
GELU_DTYPES = ((I8, I8), (F8E4M3, BF16), (F8E4M3, F8E4M3), (F8E5M2, F8E5M2))
GELU_DTYPES_BEFORE_SM100, GELU_DTYPES_FROM_SM100 = ((F8E5M2, BF16),), ((F8E4M3, F16),)
# Libraries and GPUs of which some kernels ended in CUDA_ERROR_ILLEGAL_INSTRUCTION, as a stamp begins and ends: of the
# 52 that 0.8.0 counts for a product of f16 on an H100 the first was number 36. No case did by the library's own choice.
FAULTY_LIBRARIES: tuple[tuple[str, str], ...] = (("cusparseLt 0.8.", " sm_90"),)
# So many kernels are asked of these: on an H200 those of nine products in five dtypes gave right results.
SAFE_KERNELS = 30


def aligned(request: Any) -> str:
    """Every operand begins at a multiple of 16 bytes."""
    return at_multiples(request, ALIGNMENT)


def check_order(name: str, layout: Layout, *, by_rows: bool | None = None, line: int = ALIGNMENT) -> str:
    """Row-major or column-major matrices, or those of one order, whose lines lie at multiples of so many bytes."""
    if not layout.size:
        return ""
    orders = (True, False) if by_rows is None else (by_rows,)
    ld = next((found for order in orders if (found := leading_dimension(layout, by_rows=order)) is not None), None)
    if ld is None:
        wanted = " or ".join("row-major" if order else "column-major" for order in orders)
        return f"needs {name} {wanted}, with adjacent elements in each line, has {layout}: copy it"
    item = layout.dtype.itemsize
    if ld * item % line:
        return f"needs lines of {name} at multiples of {line} bytes, has {layout}: copy it"
    if any(step * item % ALIGNMENT for step in layout.strides[:-2]):
        return f"needs matrices of {name} at multiples of {ALIGNMENT} bytes, has {layout}: copy it"
    long = layout.shape[-2] if is_row_major(layout) else layout.shape[-1]
    if any(0 < abs(step) < ld * long or step < 0 for step in layout.strides[:-2]):
        return f"needs the matrices of {name} one behind another, or one for all, has {layout}: copy it"
    return ""


def has_8_bits(dtype: Dtype) -> bool:
    """Whether elements have 8 bits, of which A is row-major and B column-major."""
    return dtype.itemsize == 1


def matrix_order(request: Any) -> str:
    """The matrix is row-major or column-major, one of 8 bits row-major, with lines at multiples of 32 bytes."""
    by_rows = True if has_8_bits(request.a.dtype) else None
    return check_order("a", request.a.layout, by_rows=by_rows, line=STRUCTURED_LINE)


def same_layout(request: Any) -> str:
    """A result with the strides of the matrix."""
    a, out = request.a.layout, request.layout_of("out")
    return _strides_apart("out", out, "a", a, "a")


def contiguous(request: Any) -> str:
    """A matrix that is dense in memory, for its form has no strides."""
    layout = request.a.layout
    m, n = layout.shape[-2:]
    step = n if is_row_major(layout) else m
    apart = layout.strides[:-2] and layout.strides[0] != m * n and layout.shape[0] > 1
    if leading_dimension(layout, by_rows=is_row_major(layout)) != step or apart:
        return f"needs a dense in memory, has {layout}: copy it"
    return ""


def contiguous_batch(request: Any) -> str:
    """A batch without gaps, so that it can be checked as one tall matrix."""
    layout = request.a.layout
    if len(layout.shape) == len(("m", "k")) or layout.shape[0] < 2:
        return ""
    by_rows = is_row_major(layout)
    ld, long = leading_dimension(layout, by_rows=by_rows), layout.shape[-2 if by_rows else -1]
    return "" if ld is not None and layout.strides[0] == ld * long else f"needs a without gaps, has {layout}: copy it"


def operand_orders(request: Any) -> str:
    """B and D are row-major or column-major; of 8 bits A is row-major and B column-major. C lies as D does."""
    is_narrow, out = has_8_bits(request.a_dtype), request.layout_of("out")
    if is_narrow and not request.form.by_rows:
        return "needs a compressed matrix that was row-major, has one that was column-major: compress a copy"
    reason = check_order("b", request.b.layout, by_rows=False if is_narrow else None) or check_order("out", out)
    if reason or request.c is None:
        return reason
    c = request.c.layout
    return _strides_apart("c", c, "out", out, "c")


def _strides_apart(name: str, layout: Layout, other_name: str, other: Layout, copied: str) -> str:
    """The reason where two matrices differ in strides, even in that of an axis of one element; "" without elements.

    One descriptor has the leading dimension of both. Layouts that print alike are told apart by their strides.
    """
    if layout.strides == other.strides or not layout.size:
        return ""
    given = f"{layout} and {other}"
    if str(layout) == str(other):
        given = f"{layout} with element strides {layout.strides} and {other.strides}"
    return f"needs {name} laid out as {other_name}, has {given}: pass out, or copy {copied}"


def separate_results(request: Any) -> str:
    """Separate memory of D for each product of a batch."""
    out = request.layout_of("out")
    return "" if len(out.shape) < 3 or out.strides[0] or out.shape[0] < 2 else f"needs out apart, has {out}"


def dense_vectors(request: Any) -> str:
    """Vectors whose elements are one behind another."""
    for name in ("bias", "alpha_vector", "beta_vector"):
        vector = getattr(request, name)
        if vector is None or not vector.layout.size:
            continue
        *outer, step = vector.layout.strides
        if step != 1 or any(0 < one < vector.shape[-1] for one in outer):
            return f"needs {name} dense, has {vector.layout}: copy it"
    return ""


def factor_vectors(request: Any) -> str:
    """Vectors of factors beside whole numbers alone, and C with a vector where the product has one."""
    given = request.alpha_vector is not None or request.beta_vector is not None
    if request.alpha_vector is not None and request.reads_c and request.beta_vector is None:
        return "needs beta_vector for c beside alpha_vector, has a number, which the library then leaves out"
    if request.a_dtype is I8 and request.bias is not None and request.d_dtype in HALF:
        return f"needs no bias for i8 to {request.d_dtype}, has one: cuSPARSELt 0.8 gave other numbers; ask for i32"
    return f"needs i8 for vectors of factors, has {request.a_dtype}" if given and request.a_dtype is not I8 else ""


def gelu_dtypes(request: Any) -> str:
    """The dtypes that GELU is there for on the GPU that has compressed A; on the host those of every GPU."""
    if request.activation is not Activation24.GELU:
        return ""
    known: tuple[tuple[Dtype, Dtype], ...] = GELU_DTYPES + GELU_DTYPES_BEFORE_SM100 + GELU_DTYPES_FROM_SM100
    where = request.form.made_by.rpartition(" ")[2]
    if where.removeprefix("sm_").isdigit():
        known = GELU_DTYPES + (GELU_DTYPES_FROM_SM100 if Arch.of(where) >= SM100 else GELU_DTYPES_BEFORE_SM100)
    if (request.a_dtype, request.d_dtype) in known:
        return ""
    listed = ", ".join(f"{a} to {d}" for a, d in known)
    return f"needs {listed} for GELU, has {request.a_dtype} to {request.d_dtype}"


def is_faulty(stamp: str) -> bool:
    """Whether some kernels of the library and GPU that have compressed a matrix end the process."""
    return any(stamp.startswith(begins) and stamp.endswith(ends) for begins, ends in FAULTY_LIBRARIES)


def columns_of_f32(request: Any) -> str:
    """B column-major for f32 where cuSPARSELt does not end, or by an error, when it plans another: 0.8.0 on an H200.

    The six cases with a row-major B failed, each in a process of its own, and the six with a column-major one passed.
    """
    if request.a_dtype is not F32 or not is_faulty(stamp := request.form.made_by):
        return ""
    reason = check_order("b", request.b.layout, by_rows=False)
    return f"{reason}, for {stamp} does not end planning f32 with another" if reason else ""


def safe_kernels(request: Any) -> str:
    """The first kernels where later ones have faulted, by which a process loses its GPU."""
    if request.config_id is None or request.config_id < SAFE_KERNELS or not is_faulty(stamp := request.form.made_by):
        return ""
    what = "of whose later kernels some end the process by an illegal instruction"
    return f"needs config_id below {SAFE_KERNELS} with {stamp}, {what}, has {request.config_id}"
