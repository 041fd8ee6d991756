"""Tensor algebra with NumPy's signatures: `dispatch.tensors`, by the requests `einsum`, `reduce_modes` and `permute`.

Operands may be of torch, CuPy or JAX, as everywhere, and are f16, bf16, f32, f64, c64 or c128. Axes may be counted from
the end. Follows https://numpy.org/doc/stable/reference/routines.linalg.html, and opt_einsum for `contract_expression`.
"""

from __future__ import annotations

import builtins
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.checks import as_python_ints, check_bool, check_int, check_shape, names_arguments, shown
from dispatch.errors import BadRequest, BadType, type_shown
from dispatch.keys import F16, F32, Dtype
from dispatch.ops import contraction as ops
from dispatch.ops.contraction import einsum, reduce_modes
from dispatch.ops.contraction.base import NUMBERS
from dispatch.ops.contraction.block_sparse import BlockSparseForm, reachable
from dispatch.ops.contraction.block_sparse_tensor import BlockSparseTensor
from dispatch.ops.contraction.einsum import EinsumRequest
from dispatch.ops.contraction.einsum_call import spec_and_operands
from dispatch.ops.contraction.modes import canonical_spec, explicit_spec, mode_letter, parse, shown_spec
from dispatch.ops.contraction.vjp import einsum_vjp
from dispatch.unknown_arguments import did_you_mean, signature_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.ops.contraction.choices import TensorOp

MAX_OFFSET = 2**62
__all__ = [
    "BlockSparseForm",
    "BlockSparseTensor",
    "ContractExpression",
    "contract_block_sparse",
    "contract_expression",
    "einsum",
    "einsum_path",
    "einsum_vjp",
    "inner",
    "kron",
    "max",
    "mean",
    "min",
    "outer",
    "prod",
    "sum",
    "tensordot",
    "trace",
    "transpose",
]

Axes = int | tuple[int, ...] | None


def rank(name: str, tensor: Any) -> int:
    """The number of axes of an operand; BadType if it has no shape."""
    try:
        return len(tensor.shape)
    except (AttributeError, TypeError):
        expected = "a tensor, or an array of another library"
        raise BadType(name, type_shown(tensor), expected, "dispatch.device().array(x) makes one") from None


def modes(count: int, first: int = 0) -> str:
    """`count` letters."""
    return "".join(mode_letter(first + number) for number in range(count))


def axes_of(axis: Axes | list[int], count: int, name: str = "axis") -> tuple[int, ...]:
    """Axes as numbers from 0 on, each once; all for None."""
    if axis is None:
        return tuple(range(count))
    numbers = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    axes = tuple(check_int(name, one, -count, count - 1) % count for one in numbers) if count else numbers
    if len(set(axes)) < len(axes) or (not count and numbers):
        raise BadRequest(
            name, repr(axis), f"each of {count} axes at most once" if count else "None, because there are no axes"
        )
    return axes


# -- products ---------------------------------------------------------------------------------------------------------
@names_arguments
def tensordot(a: Any, b: Any, axes: int | Sequence[Any] = 2, out: Any = None) -> Any:
    """Σ over axes of a with axes of b: the last ones of a with the first of b, or the named ones: ((a's), (b's))."""
    ranks = rank("a", a), rank("b", b)
    if isinstance(axes, int):
        check_int("axes", axes, 0, builtins.min(ranks))
        pairs = list(zip(range(ranks[0] - axes, ranks[0]), range(axes), strict=True))
    else:
        if not isinstance(axes, (tuple, list)) or len(axes) != 2:
            raise BadRequest("axes", shown(axes), "a number, or the axes of a and those of b")
        first, second = axes_of(axes[0], ranks[0], "axes"), axes_of(axes[1], ranks[1], "axes")
        if len(first) != len(second):
            raise BadRequest("axes", f"{len(first)} of a, {len(second)} of b", "as many axes of a as of b")
        pairs = list(zip(first, second, strict=True))
    of_a, of_b = list(modes(ranks[0])), list(modes(ranks[1], ranks[0]))
    for one, other in pairs:
        of_b[other] = of_a[one]
    summed = {of_a[one] for one, _ in pairs}
    for (one, other), mode in zip(pairs, (of_a[one] for one, _ in pairs), strict=True):
        if a.shape[one] != b.shape[other]:  # einsum would broadcast
            actual = f"{b.shape[other]} along axis {other}"
            raise BadRequest("b", actual, f"{a.shape[one]}, the extent of a along axis {one} ({mode})")
    output = "".join(mode for mode in (*of_a, *of_b) if mode not in summed)
    return einsum(f"{''.join(of_a)},{''.join(of_b)}->{output}", a, b, out=out)


@names_arguments
def inner(a: Any, b: Any, out: Any = None) -> Any:
    """Σ over the last axes of both; the product if one is a scalar."""
    if not rank("a", a) or not rank("b", b):
        return tensordot(a, b, 0, out)
    return tensordot(a, b, ((-1,), (-1,)), out)


@names_arguments
def outer(a: Any, b: Any) -> Any:
    """a[i] · b[j] for all elements, a matrix."""
    own_a, own_b = modes(rank("a", a)), modes(rank("b", b), rank("a", a))
    product = einsum(f"{own_a},{own_b}->{own_a}{own_b}", a, b, order="C")
    return product.reshape((math.prod(a.shape), math.prod(b.shape)))


@names_arguments
def kron(a: Any, b: Any) -> Any:
    """The Kronecker product: blocks of b, each multiplied by an element of a."""
    count = builtins.max((rank("a", a), rank("b", b)))
    of_a, of_b = modes(count), modes(count, count)
    own_a, own_b = of_a[count - len(a.shape) :], of_b[count - len(b.shape) :]
    output = "".join(mode for pair in zip(of_a, of_b, strict=True) for mode in pair if mode in own_a + own_b)
    blocks = einsum(f"{own_a},{own_b}->{output}", a, b, order="C")
    wide = [(1,) * (count - len(one.shape)) + tuple(one.shape) for one in (a, b)]
    return blocks.reshape(tuple(x * y for x, y in zip(*wide, strict=True)))


@names_arguments
def trace(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, out: Any = None) -> Any:
    """The sum of a diagonal of two axes; `offset` is its distance from the main diagonal."""
    count = rank("a", a)
    if count < 2:
        raise BadRequest("a", f"{count} axes", "two or more")
    first, second = axes_of((axis1, axis2), count, "axis2")
    rows, columns = a.shape[first], a.shape[second]
    check_int("offset", offset, -MAX_OFFSET, MAX_OFFSET)
    length = builtins.max(0, builtins.min(rows + offset, columns - offset, rows, columns))
    index: list[Any] = [slice(None)] * count
    begin_row, begin_column = (builtins.max((0, step)) if length else 0 for step in (-offset, offset))
    index[first], index[second] = slice(begin_row, begin_row + length), slice(begin_column, begin_column + length)
    letters = list(modes(count))
    letters[second] = letters[first]
    output = "".join(mode for axis, mode in enumerate(letters) if axis not in (first, second))
    return einsum(f"{''.join(letters)}->{output}", a[tuple(index)], out=out)


@names_arguments
def transpose(a: Any, axes: Sequence[int] | None = None, out: Any = None) -> Any:
    """A copy with the axes in another order, by default reversed; `a.transpose()` of a tensor is a view."""
    count = rank("a", a)
    order = tuple(reversed(range(count))) if axes is None else axes_of(as_python_ints("axes", axes), count, "axes")
    if len(order) != count:
        raise BadRequest("axes", repr(axes), f"each of {count} axes")
    letters = modes(count)
    return einsum(f"{letters}->{''.join(letters[axis] for axis in order)}", a, out=out)


# -- reductions -------------------------------------------------------------------------------------------------------
def _reduced(a: Any, axis: Axes, keepdims: bool, out: Any, reduce: TensorOp | str, *, mean: bool = False) -> Any:
    count = rank("a", a)
    axes = axes_of(axis, count)
    check_bool("keepdims", keepdims)
    letters = modes(count)
    wide = tuple(1 if place in axes else extent for place, extent in enumerate(a.shape))
    target = out
    if keepdims and out is not None:
        if tuple(out.shape) != wide:
            raise BadRequest("out", f"shape {list(out.shape)}", f"{list(wide)}, the shape of the result with keepdims")
        index = tuple(0 if place in axes else slice(None) for place in range(count))
        target = out[index + (...,)]  # noqa: RUF005  # a view; Python 3.10 unpacks nothing in an index
    output = "".join(mode for place, mode in enumerate(letters) if place not in axes)
    elements = math.prod(a.shape[place] for place in axes)
    if mean and not elements:
        raise BadRequest("a", f"{list(a.shape)}", "at least one element for the mean")
    reduced = reduce_modes(f"{letters}->{output}", a, reduce=reduce, alpha=1 / elements if mean else 1.0, out=target)
    if not keepdims:
        return reduced
    return reduced.reshape(wide) if out is None else out  # type: ignore[attr-defined,unused-ignore]


@names_arguments
def sum(a: Any, axis: Axes = None, keepdims: bool = False, out: Any = None) -> Any:  # noqa: A001  # NumPy's word
    """The sum along axes, by default all of them."""
    return _reduced(a, axis, keepdims, out, "add")


@names_arguments
def mean(a: Any, axis: Axes = None, keepdims: bool = False, out: Any = None) -> Any:
    """The mean along axes."""
    return _reduced(a, axis, keepdims, out, "add", mean=True)


@names_arguments
def max(a: Any, axis: Axes = None, keepdims: bool = False, out: Any = None) -> Any:  # noqa: A001  # NumPy's word
    """The largest element along axes."""
    return _reduced(a, axis, keepdims, out, "max")


@names_arguments
def min(a: Any, axis: Axes = None, keepdims: bool = False, out: Any = None) -> Any:  # noqa: A001  # NumPy's word
    """The smallest element along axes."""
    return _reduced(a, axis, keepdims, out, "min")


@names_arguments
def prod(a: Any, axis: Axes = None, keepdims: bool = False, out: Any = None) -> Any:
    """The product along axes."""
    return _reduced(a, axis, keepdims, out, "mul")


# -- block-sparse tensors ---------------------------------------------------------------------------------------------
def contract_block_sparse(
    spec: Any,
    a: BlockSparseTensor,
    b: BlockSparseTensor,
    *,
    c: BlockSparseTensor | None = None,
    out: BlockSparseTensor | None = None,
    out_form: BlockSparseForm | None = None,
    **choices: Any,
) -> BlockSparseTensor:
    """alpha · Σ A · B + beta · C of block-sparse tensors: the request of that name; `choices` are its other fields.

    The result has the blocks of `out_form`, `out` or `c`; else all that a pair of blocks of A and B contributes to.
    """
    for name, one in (("a", a), ("b", b), ("c", c), ("out", out)):
        argument: object = one
        if not isinstance(argument, BlockSparseTensor) and (argument is not None or name in "ab"):
            hint = "BlockSparseTensor.from_dense(x, sections) makes one"
            raise BadRequest(name, type_shown(argument), "a BlockSparseTensor", hint)
    form = next((one.form for one in (out, c) if one is not None), None) if out_form is None else out_form
    values = [None if one is None else one.values for one in (c, out)]
    operands = (spec, a.values, a.form, b.values, b.form)
    values_of_d = ops.contract_block_sparse(*operands, out_form=form, c=values[0], out=values[1], **choices)
    if form is None:
        modes, output = parse(canonical_spec(spec), 2)
        form = reachable(modes, output, (a.form, b.form))
    return BlockSparseTensor(values_of_d, form) if out is None else out


# -- repeated contractions --------------------------------------------------------------------------------------------
class ContractExpression:
    """A contraction of operands of these shapes; call it with operands: `expression(a, b)`.

    Its path is computed once, in the constructor, or with a `memory_limit` at the first call with operands of a dtype;
    the plan of a call is that of `einsum`, looked up by the layouts.
    """

    def __init__(self, spec: str, shapes: tuple[tuple[int, ...], ...], options: dict[str, Any]) -> None:
        self.spec, self.shapes, self._options = spec, shapes, options

    def __call__(self, *operands: Any, out: Any = None) -> Any:
        """The contraction of some operands; BadRequest if their shapes differ from the expression's."""
        try:
            fits = len(operands) == len(self.shapes) and all(map(_has_shape, operands, self.shapes))
        except AttributeError:  # the operand has no shape
            fits = False
        if not fits:
            shapes = tuple(tuple(one.shape) if hasattr(one, "shape") else None for one in operands)
            raise BadRequest("operands", shown(shapes), f"tensors of the shapes {self.shapes}")
        return einsum(self.spec, *operands, out=out, **self._options)

    def __repr__(self) -> str:
        return f"<ContractExpression {shown_spec(self.spec)} of {', '.join(map(str, self.shapes))}>"


def _has_shape(one: Any, shape: tuple[int, ...]) -> bool:
    return bool(one.shape == shape)


def contract_expression(spec: Any, *shapes: Any, **options: Any) -> ContractExpression:
    """A callable that contracts operands of these shapes, or like these tensors; `einsum`'s options except `out`.

    The options are checked here, except `library`, whose rows depend on the operands of a call. `memory_limit` is also
    checked here for the dtypes of tensors; shapes alone may be f16, the smallest dtype, and the call checks the limit
    for the dtypes of its operands.
    """
    spec, operands = (spec, shapes) if is_one_shape(shapes) else spec_and_operands(spec, shapes)
    extents = tuple(tuple(one.shape) if hasattr(one, "shape") else check_shape("shapes", one) for one in operands)
    names = [name for name in signature_of(einsum).parameters if name not in ("spec", "operands", "out")]
    for name in options:
        if name not in names:
            hint = ": pass it to each call." if name == "out" else did_you_mean(name, names) or "."
            takes = f"It takes spec, shapes, {', '.join(names)}"
            raise TypeError(f"contract_expression() got an unexpected keyword argument {name!r}{hint} {takes}")
    text = explicit_spec(spec, tuple(map(len, extents)))
    request = _placeholder_request(text, extents, _dtypes(operands, F16), options)
    if request.memory_limit is None:  # else the path depends on the dtypes, and each call computes that of its operands
        options["optimize"] = request.schedule.path
    return ContractExpression(text, extents, options)


def is_one_shape(shapes: tuple[Any, ...]) -> bool:
    """Whether the only argument is a shape: numbers, which no list of operands contains."""
    one = shapes[0] if len(shapes) == 1 else None
    return isinstance(one, tuple) and all(isinstance(extent, (int, np.integer)) for extent in one)


def _dtypes(given: Sequence[Any], of_shapes: Dtype) -> tuple[Dtype, ...]:
    """The dtypes of operands; shapes, and tensors that einsum does not support, get the first supported dtype."""
    dtypes = tuple(map(_dtype, given))
    usual = next((dtype for dtype in dtypes if dtype is not None), of_shapes)
    return tuple(dtype or usual for dtype in dtypes)


def _dtype(one: Any) -> Dtype | None:
    try:
        dtype = Dtype.of(one.dtype)
    except (AttributeError, TypeError):  # a shape, or an unsupported dtype
        return None
    return dtype if dtype in NUMBERS else None


def _placeholder_request(
    spec: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[Dtype, ...], options: dict[str, Any]
) -> EinsumRequest:
    """A request over tensors of these shapes and dtypes, of one element in memory each, to compute its path."""
    from dispatch.device.registry import device

    ones = (device("host").zeros((), dtype) for dtype in dtypes)
    tensors = tuple(one.strided(shape, (0,) * len(shape)) for one, shape in zip(ones, shapes, strict=True))
    return EinsumRequest(spec, tensors, **options)


@names_arguments
def einsum_path(spec: Any, *operands: Any, optimize: Any = "auto", memory_limit: int | None = None) -> str:
    """The path of a contraction as a table: each step, its result, and its cost.

    Operands are tensors, or shapes, which are assumed to be f32.
    """
    spec, arguments = spec_and_operands(spec, operands)
    shapes = tuple(tuple(one.shape) if hasattr(one, "shape") else check_shape("shapes", one) for one in arguments)
    text = explicit_spec(spec, tuple(map(len, shapes)))
    options = {"optimize": optimize, "memory_limit": memory_limit}
    schedule = _placeholder_request(text, shapes, _dtypes(arguments, F32), options).schedule
    lines = [f"{shown_spec(text)}  path {' '.join(str(step).replace(' ', '') for step in schedule.path)}"]
    specs = [shown_spec(step.spec) for step in schedule.steps]
    wide = builtins.max(map(len, specs))
    for number, (step, shown_as) in enumerate(zip(schedule.steps, specs, strict=True)):
        inputs = ", ".join(f"[{one}]" for one in step.inputs)
        what = f"[{len(shapes) + number}] = {step.op}({inputs})"
        lines.append(f"  {what:<32} {shown_as:<{wide}}  {list(step.shape)}  {float(step.flops):.3g} operations")
    lines.append(
        f"  {float(schedule.flops):.3g} operations in all, {schedule.largest:,} elements of intermediate results"
        " at most"
    )
    return "\n".join(lines)
