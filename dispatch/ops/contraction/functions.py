"""Tensor algebra in NumPy's words: `dispatch.tensors`, by the requests `einsum`, `reduce_modes` and `permute`.

Operands may be of torch, CuPy or JAX, as everywhere, and are f16, bf16, f32, f64, c64 or c128. Axes may be counted from
the end. Follows https://numpy.org/doc/stable/reference/routines.linalg.html, and opt_einsum for `contract_expression`.
"""

from __future__ import annotations

import builtins
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.checks import check_bool, check_int, check_shape, shown
from dispatch.errors import BadRequest
from dispatch.keys import F16, F32, Dtype
from dispatch.ops import contraction as ops
from dispatch.ops.contraction import einsum, reduce_modes
from dispatch.ops.contraction.base import NUMBERS
from dispatch.ops.contraction.block_sparse import BlockSparseForm, reachable
from dispatch.ops.contraction.block_sparse_tensor import BlockSparseTensor
from dispatch.ops.contraction.einsum import EinsumRequest, explicit_spec
from dispatch.ops.contraction.einsum_call import spec_and_operands
from dispatch.ops.contraction.modes import canonical_spec, mode_letter, parse, shown_spec
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
    """How many axes an operand has; BadRequest for what has no shape."""
    try:
        return len(tensor.shape)
    except (AttributeError, TypeError):
        raise BadRequest(
            name, f"a {type(tensor).__name__}", "a tensor", "dispatch.device().array(x) makes one"
        ) from None


def modes(count: int, first: int = 0) -> str:
    """So many letters."""
    return "".join(mode_letter(first + number) for number in range(count))


def axes_of(axis: Axes | list[int], count: int, name: str = "axis") -> tuple[int, ...]:
    """Axes from 0 on, each once; all for None."""
    if axis is None:
        return tuple(range(count))
    given = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    found = tuple(check_int(name, one, -count, count - 1) % count for one in given) if count else given
    if len(set(found)) < len(found) or (not count and given):
        raise BadRequest(name, repr(axis), f"each of {count} axes once at most")
    return found


# -- products ---------------------------------------------------------------------------------------------------------
def tensordot(a: Any, b: Any, axes: int | Sequence[Any] = 2, out: Any = None) -> Any:
    """Σ over axes of a with axes of b: the last ones of a with the first of b, or ((a's), (b's)) as they are said."""
    ranks = rank("a", a), rank("b", b)
    if isinstance(axes, int):
        check_int("axes", axes, 0, builtins.min(ranks))
        pairs = list(zip(range(ranks[0] - axes, ranks[0]), range(axes), strict=True))
    else:
        if not isinstance(axes, (tuple, list)) or len(axes) != 2:
            raise BadRequest("axes", shown(axes), "a number, or the axes of a and those of b")
        first, second = axes_of(axes[0], ranks[0], "axes"), axes_of(axes[1], ranks[1], "axes")
        if len(first) != len(second):
            raise BadRequest("axes", f"{len(first)} of a, {len(second)} of b", "as many of each")
        pairs = list(zip(first, second, strict=True))
    of_a, of_b = list(modes(ranks[0])), list(modes(ranks[1], ranks[0]))
    for one, other in pairs:
        of_b[other] = of_a[one]
    summed = {of_a[one] for one, _ in pairs}
    for (one, other), mode in zip(pairs, (of_a[one] for one, _ in pairs), strict=True):
        if a.shape[one] != b.shape[other]:  # einsum would broadcast
            given = f"{b.shape[other]} along axis {other}"
            raise BadRequest("b", given, f"{a.shape[one]}, as a has along axis {one} ({mode})")
    kept = "".join(mode for mode in (*of_a, *of_b) if mode not in summed)
    return einsum(f"{''.join(of_a)},{''.join(of_b)}->{kept}", a, b, out=out)


def inner(a: Any, b: Any, out: Any = None) -> Any:
    """Σ over the last axes of both; of a scalar the product."""
    if not rank("a", a) or not rank("b", b):
        return tensordot(a, b, 0, out)
    return tensordot(a, b, ((-1,), (-1,)), out)


def outer(a: Any, b: Any) -> Any:
    """a[i] · b[j] for all elements, a matrix."""
    own_a, own_b = modes(rank("a", a)), modes(rank("b", b), rank("a", a))
    found = einsum(f"{own_a},{own_b}->{own_a}{own_b}", a, b, order="C")
    return found.reshape((math.prod(a.shape), math.prod(b.shape)))


def kron(a: Any, b: Any) -> Any:
    """The Kronecker product: blocks of b, each multiplied by an element of a."""
    count = builtins.max((rank("a", a), rank("b", b)))
    of_a, of_b = modes(count), modes(count, count)
    own_a, own_b = of_a[count - len(a.shape) :], of_b[count - len(b.shape) :]
    kept = "".join(mode for pair in zip(of_a, of_b, strict=True) for mode in pair if mode in own_a + own_b)
    found = einsum(f"{own_a},{own_b}->{kept}", a, b, order="C")
    wide = [(1,) * (count - len(one.shape)) + tuple(one.shape) for one in (a, b)]
    return found.reshape(tuple(x * y for x, y in zip(*wide, strict=True)))


def trace(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, out: Any = None) -> Any:
    """The sum of a diagonal of two axes, `offset` beside the main one."""
    count = rank("a", a)
    if count < 2:
        raise BadRequest("a", f"{count} axes", "two or more")
    first, second = axes_of((axis1, axis2), count, "axis2")
    rows, columns = a.shape[first], a.shape[second]
    check_int("offset", offset, -MAX_OFFSET, MAX_OFFSET)
    length = builtins.max(0, builtins.min(rows + offset, columns - offset, rows, columns))
    there: list[Any] = [slice(None)] * count
    begin_row, begin_column = (builtins.max((0, step)) if length else 0 for step in (-offset, offset))
    there[first], there[second] = slice(begin_row, begin_row + length), slice(begin_column, begin_column + length)
    own = list(modes(count))
    own[second] = own[first]
    kept = "".join(mode for axis, mode in enumerate(own) if axis not in (first, second))
    return einsum(f"{''.join(own)}->{kept}", a[tuple(there)], out=out)


def transpose(a: Any, axes: Sequence[int] | None = None, out: Any = None) -> Any:
    """A copy with the axes in another order, backwards unless it is said; `a.transpose()` of a tensor is a view."""
    count = rank("a", a)
    order = tuple(reversed(range(count))) if axes is None else axes_of(tuple(axes), count, "axes")
    if len(order) != count:
        raise BadRequest("axes", repr(axes), f"each of {count} axes")
    own = modes(count)
    return einsum(f"{own}->{''.join(own[axis] for axis in order)}", a, out=out)


# -- reductions -------------------------------------------------------------------------------------------------------
def _reduced(a: Any, axis: Axes, keepdims: bool, out: Any, reduce: TensorOp | str, *, mean: bool = False) -> Any:
    count = rank("a", a)
    axes = axes_of(axis, count)
    check_bool("keepdims", keepdims)
    own = modes(count)
    wide = tuple(1 if place in axes else extent for place, extent in enumerate(a.shape))
    given = out
    if keepdims and out is not None:
        if tuple(out.shape) != wide:
            raise BadRequest("out", f"shape {list(out.shape)}", f"{list(wide)}, as keepdims has it")
        there = tuple(0 if place in axes else slice(None) for place in range(count))
        given = out[there + (...,)]  # noqa: RUF005  # a view; Python 3.10 unpacks nothing in an index
    kept = "".join(mode for place, mode in enumerate(own) if place not in axes)
    elements = math.prod(a.shape[place] for place in axes)
    if mean and not elements:
        raise BadRequest("a", f"{list(a.shape)}", "an element at least to take the mean of")
    found = reduce_modes(f"{own}->{kept}", a, reduce=reduce, alpha=1 / elements if mean else 1.0, out=given)
    if not keepdims:
        return found
    return found.reshape(wide) if out is None else out  # type: ignore[attr-defined,unused-ignore]


def sum(a: Any, axis: Axes = None, keepdims: bool = False, out: Any = None) -> Any:  # noqa: A001  # NumPy's word
    """The sum along axes, all of them unless it is said."""
    return _reduced(a, axis, keepdims, out, "add")


def mean(a: Any, axis: Axes = None, keepdims: bool = False, out: Any = None) -> Any:
    """The mean along axes."""
    return _reduced(a, axis, keepdims, out, "add", mean=True)


def max(a: Any, axis: Axes = None, keepdims: bool = False, out: Any = None) -> Any:  # noqa: A001  # NumPy's word
    """The largest element along axes."""
    return _reduced(a, axis, keepdims, out, "max")


def min(a: Any, axis: Axes = None, keepdims: bool = False, out: Any = None) -> Any:  # noqa: A001  # NumPy's word
    """The smallest element along axes."""
    return _reduced(a, axis, keepdims, out, "min")


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
    """alpha · Σ A · B + beta · C of block-sparse tensors: the request of that name, whose other fields it takes.

    The result has the blocks of `out_form`, `out` or `c`; else all that a pair of blocks of A and B adds to.
    """
    for name, one in (("a", a), ("b", b), ("c", c), ("out", out)):
        given: object = one
        if not isinstance(given, BlockSparseTensor) and (given is not None or name in "ab"):
            hint = "BlockSparseTensor.from_dense(x, sections) makes one"
            raise BadRequest(name, f"a {type(given).__name__}", "a BlockSparseTensor", hint)
    form = next((one.form for one in (out, c) if one is not None), None) if out_form is None else out_form
    values = [None if one is None else one.values for one in (c, out)]
    given = (spec, a.values, a.form, b.values, b.form)
    found = ops.contract_block_sparse(*given, out_form=form, c=values[0], out=values[1], **choices)
    if form is None:
        modes, output = parse(canonical_spec(spec), 2)
        form = reachable(modes, output, (a.form, b.form))
    return BlockSparseTensor(found, form) if out is None else out


# -- contractions that come again -------------------------------------------------------------------------------------
class ContractExpression:
    """A contraction of operands of these shapes, which is called with them: `expression(a, b)`.

    Its path is found once, while it is made, or with a `memory_limit` at the first call with operands of a dtype; the
    plan of a call is that of `einsum`, found again by the layouts.
    """

    def __init__(self, spec: str, shapes: tuple[tuple[int, ...], ...], options: dict[str, Any]) -> None:
        self.spec, self.shapes, self._options = spec, shapes, options

    def __call__(self, *operands: Any, out: Any = None) -> Any:
        """The contraction of some operands; BadRequest for others than were said."""
        try:
            fits = len(operands) == len(self.shapes) and all(map(_has_shape, operands, self.shapes))
        except AttributeError:  # of what has no shape
            fits = False
        if not fits:
            given = tuple(tuple(one.shape) if hasattr(one, "shape") else None for one in operands)
            raise BadRequest("operands", shown(given), f"tensors of the shapes {self.shapes}")
        return einsum(self.spec, *operands, out=out, **self._options)

    def __repr__(self) -> str:
        return f"<ContractExpression {shown_spec(self.spec)} of {', '.join(map(str, self.shapes))}>"


def _has_shape(one: Any, shape: tuple[int, ...]) -> bool:
    return bool(one.shape == shape)


def contract_expression(spec: Any, *shapes: Any, **options: Any) -> ContractExpression:
    """What contracts operands of these shapes, or of those of the tensors given: with `einsum`'s options, but `out`.

    The options are checked here and now, but for `library`, whose rows are asked with the operands of a call. So is
    `memory_limit`, for the dtypes of the tensors given; shapes alone may be of f16, the smallest, and the call checks
    it for the dtypes of its operands.
    """
    spec, given = (spec, shapes) if is_one_shape(shapes) else spec_and_operands(spec, shapes)
    found = tuple(tuple(one.shape) if hasattr(one, "shape") else check_shape("shapes", one) for one in given)
    known = [name for name in signature_of(einsum).parameters if name not in ("spec", "operands", "out")]
    for name in options:
        if name not in known:
            hint = ": give it to each call." if name == "out" else did_you_mean(name, known) or "."
            takes = f"It takes spec, shapes, {', '.join(known)}"
            raise TypeError(f"contract_expression() got an unexpected keyword argument {name!r}{hint} {takes}")
    text = explicit_spec(spec, tuple(map(len, found)))
    request = _placeholder_request(text, found, _dtypes(given, F16), options)
    if request.memory_limit is None:  # else the path depends on the dtypes, and each call finds that of its operands
        options["optimize"] = request.schedule.path
    return ContractExpression(text, found, options)


def is_one_shape(shapes: tuple[Any, ...]) -> bool:
    """Whether there is one thing, a shape: numbers, which no list of operands has."""
    one = shapes[0] if len(shapes) == 1 else None
    return isinstance(one, tuple) and all(isinstance(extent, (int, np.integer)) for extent in one)


def _dtypes(given: Sequence[Any], of_shapes: Dtype) -> tuple[Dtype, ...]:
    """The dtypes of operands; of shapes, and of tensors that einsum does not take, that of the first which it does."""
    found = tuple(map(_dtype, given))
    usual = next((dtype for dtype in found if dtype is not None), of_shapes)
    return tuple(dtype or usual for dtype in found)


def _dtype(one: Any) -> Dtype | None:
    try:
        dtype = Dtype.of(one.dtype)
    except (AttributeError, TypeError):  # a shape, or a dtype that is none here
        return None
    return dtype if dtype in NUMBERS else None


def _placeholder_request(
    spec: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[Dtype, ...], options: dict[str, Any]
) -> EinsumRequest:
    """A request over tensors of these shapes and dtypes, of one element in memory each, for its path."""
    from dispatch.device.registry import device

    ones = (device("host").zeros((), dtype) for dtype in dtypes)
    tensors = tuple(one.strided(shape, (0,) * len(shape)) for one, shape in zip(ones, shapes, strict=True))
    return EinsumRequest(spec, tensors, **options)


def einsum_path(spec: Any, *operands: Any, optimize: Any = "auto", memory_limit: int | None = None) -> str:
    """The path of a contraction as a table: each step, what it gives, and what it costs.

    Operands are tensors, or shapes, which are taken to be of f32.
    """
    spec, given = spec_and_operands(spec, operands)
    shapes = tuple(tuple(one.shape) if hasattr(one, "shape") else check_shape("shapes", one) for one in given)
    text = explicit_spec(spec, tuple(map(len, shapes)))
    options = {"optimize": optimize, "memory_limit": memory_limit}
    schedule = _placeholder_request(text, shapes, _dtypes(given, F32), options).schedule
    lines = [f"{shown_spec(text)}  path {' '.join(str(step).replace(' ', '') for step in schedule.path)}"]
    specs = [shown_spec(step.spec) for step in schedule.steps]
    wide = builtins.max(map(len, specs))
    for number, (step, shown_as) in enumerate(zip(schedule.steps, specs, strict=True)):
        inputs = ", ".join(f"[{one}]" for one in step.inputs)
        what = f"[{len(shapes) + number}] = {step.op}({inputs})"
        lines.append(f"  {what:<32} {shown_as:<{wide}}  {list(step.shape)}  {float(step.flops):.3g} operations")
    lines.append(f"  {float(schedule.flops):.3g} operations in all, {schedule.largest:,} elements on the way at most")
    return "\n".join(lines)
