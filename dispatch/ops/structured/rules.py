"""The operands that cuSPARSELt supports beyond its dtypes: each rule returns "needs …, has …", or ""."""

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
# The dtypes of A and of D for which the library supports GELU, according to its own messages (0.8.0 and 0.10.0): on all
# GPUs, and additional ones before sm_100, and from sm_100 on.
GELU_DTYPES = ((I8, I8), (F8E4M3, BF16), (F8E4M3, F8E4M3), (F8E5M2, F8E5M2))
GELU_DTYPES_BEFORE_SM100, GELU_DTYPES_FROM_SM100 = ((F8E5M2, BF16),), ((F8E4M3, F16),)
# The beginnings and endings of stamps of libraries and GPUs with kernels that end in CUDA_ERROR_ILLEGAL_INSTRUCTION: of
# the 52 that 0.8.0 counts for a product of f16 on an H100 the first was number 36. No case failed with the library's
# own choice.
FAULTY_LIBRARIES: tuple[tuple[str, str], ...] = (("cusparseLt 0.8.", " sm_90"),)
# Only so many kernels are used there: on an H200 those of nine products in five dtypes gave correct results.
SAFE_KERNELS = 30


def aligned(request: Any) -> str:
    """Every operand is aligned to 16 bytes."""
    return at_multiples(request, ALIGNMENT)


def check_order(name: str, layout: Layout, *, by_rows: bool | None = None, line: int = ALIGNMENT) -> str:
    """Row-major or column-major matrices, or those of one order, with lines aligned to so many bytes."""
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
        return f"needs contiguous matrices of {name}, or one for all, has {layout}: copy it"
    return ""


def has_8_bits(dtype: Dtype) -> bool:
    """Whether elements have 8 bits, which need a row-major A and a column-major B."""
    return dtype.itemsize == 1


def matrix_order(request: Any) -> str:
    """The matrix is row-major or column-major, an 8-bit one row-major, with lines aligned to 32 bytes."""
    by_rows = True if has_8_bits(request.a.dtype) else None
    return check_order("a", request.a.layout, by_rows=by_rows, line=STRUCTURED_LINE)


def same_layout(request: Any) -> str:
    """A result with the strides of the matrix."""
    a, out = request.a.layout, request.layout_of("out")
    return _strides_apart("out", out, "a", a, "a")


def contiguous(request: Any) -> str:
    """A contiguous matrix, because its form has no strides."""
    layout = request.a.layout
    m, n = layout.shape[-2:]
    step = n if is_row_major(layout) else m
    has_gap = layout.strides[:-2] and layout.strides[0] != m * n and layout.shape[0] > 1
    if leading_dimension(layout, by_rows=is_row_major(layout)) != step or has_gap:
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
    """B and D are row-major or column-major; for 8 bits A is row-major and B column-major. C has the layout of D."""
    is_narrow, out = has_8_bits(request.a_dtype), request.layout_of("out")
    if is_narrow and not request.form.by_rows:
        return "needs a compressed matrix that was row-major, has one that was column-major: compress a copy"
    reason = check_order("b", request.b.layout, by_rows=False if is_narrow else None) or check_order("out", out)
    if reason or request.c is None:
        return reason
    c = request.c.layout
    return _strides_apart("c", c, "out", out, "c")


def _strides_apart(name: str, layout: Layout, other_name: str, other: Layout, copied: str) -> str:
    """The reason if two matrices differ in strides, even for an axis of one element; "" without elements.

    One descriptor has the leading dimension of both. The message includes strides if the layouts print alike.
    """
    if layout.strides == other.strides or not layout.size:
        return ""
    both = f"{layout} and {other}"
    if str(layout) == str(other):
        both = f"{layout} with element strides {layout.strides} and {other.strides}"
    return f"needs {name} with the layout of {other_name}, has {both}: pass out, or copy {copied}"


def separate_results(request: Any) -> str:
    """Separate memory of D for each product of a batch."""
    out = request.layout_of("out")
    return "" if len(out.shape) < 3 or out.strides[0] or out.shape[0] < 2 else f"needs out apart, has {out}"


def dense_vectors(request: Any) -> str:
    """Contiguous vectors."""
    for name in ("bias", "alpha_vector", "beta_vector"):
        vector = getattr(request, name)
        if vector is None or not vector.layout.size:
            continue
        *outer, step = vector.layout.strides
        if step != 1 or any(0 < one < vector.shape[-1] for one in outer):
            return f"needs {name} dense, has {vector.layout}: copy it"
    return ""


def factor_vectors(request: Any) -> str:
    """Vectors of factors only for integers, and for C a vector if the product has one."""
    is_used = request.alpha_vector is not None or request.beta_vector is not None
    if request.alpha_vector is not None and request.reads_added and request.beta_vector is None:
        return "needs beta_vector for c with alpha_vector, has a number, which the library would ignore"
    if request.a_dtype is I8 and request.bias is not None and request.d_dtype in HALF:
        return (
            f"needs no bias for i8 to {request.d_dtype}, has one: cuSPARSELt 0.8 computed wrong results; use"
            " out_dtype='i32'"
        )
    return f"needs i8 for vectors of factors, has {request.a_dtype}" if is_used and request.a_dtype is not I8 else ""


def gelu_dtypes(request: Any) -> str:
    """The dtypes for which the GPU that compressed A supports GELU; on the host those of every GPU."""
    if request.activation is not Activation24.GELU:
        return ""
    supported: tuple[tuple[Dtype, Dtype], ...] = GELU_DTYPES + GELU_DTYPES_BEFORE_SM100 + GELU_DTYPES_FROM_SM100
    where = request.form.made_by.rpartition(" ")[2]
    if where.removeprefix("sm_").isdigit():
        supported = GELU_DTYPES + (GELU_DTYPES_FROM_SM100 if Arch.of(where) >= SM100 else GELU_DTYPES_BEFORE_SM100)
    if (request.a_dtype, request.d_dtype) in supported:
        return ""
    listed = ", ".join(f"{a} to {d}" for a, d in supported)
    return f"needs {listed} for GELU, has {request.a_dtype} to {request.d_dtype}"


def is_faulty(stamp: str) -> bool:
    """Whether some kernels of the library and GPU that compressed a matrix end the process."""
    return any(stamp.startswith(begins) and stamp.endswith(ends) for begins, ends in FAULTY_LIBRARIES)


def columns_of_f32(request: Any) -> str:
    """B column-major for f32 if cuSPARSELt ends, or fails, when it plans a row-major one: 0.8.0 on an H200.

    The six cases with a row-major B failed, each in a separate process, and the six with a column-major one passed.
    """
    if request.a_dtype is not F32 or not is_faulty(stamp := request.form.made_by):
        return ""
    reason = check_order("b", request.b.layout, by_rows=False)
    return f"{reason}, because with other operands planning f32 does not terminate in {stamp}" if reason else ""


def safe_kernels(request: Any) -> str:
    """The first kernels if later ones have faulted; after a fault a process loses its GPU."""
    if request.config_id is None or request.config_id < SAFE_KERNELS or not is_faulty(stamp := request.form.made_by):
        return ""
    what = "some of whose later kernels fail with an illegal instruction"
    return f"needs config_id below {SAFE_KERNELS} with {stamp}, {what}, has {request.config_id}"
