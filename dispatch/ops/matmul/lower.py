"""Translate a row-major request to cuBLASLt's column-major problem. It computes numbers only, so tests need no GPU.

A row-major D (m, n) is a column-major Dᵀ (n, m) = Bᵀ · Aᵀ. So the request's B becomes cuBLASLt's A and vice versa, and
their scales and BGRADA / BGRADB are exchanged, too. The bias then runs along cuBLASLt's rows, as cuBLASLt requires.
"""

from __future__ import annotations

from itertools import product
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.core.layouts import merge_axes
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.keys import BOOL, Compute, Dtype, Epilogue, ScaleMode
from dispatch.libraries.cublaslt.problem import Matrix, Problem
from dispatch.ops.matmul.scales import NO_SCALES, Scales, scale_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.device.layout import Layout
    from dispatch.ops.matmul.request import MatmulRequest

__all__ = ["Lowered", "lower", "vector_alignment"]

EXCHANGED = {Epilogue.BGRADA: Epilogue.BGRADB, Epilogue.BGRADB: Epilogue.BGRADA}
LD_PADDING = 16  # the leading dimension of an operand with one row is a multiple of this; any would be valid
NO_OFFSETS = (0,) * 7
NO_STRIDES = dict.fromkeys(("a", "b", "c", "bias", "aux", "bgrad", "d"), 0)  # batch strides of a single product
Unallocated = dict[str, tuple[tuple[int, ...], tuple[int, ...], Dtype]]  # see Request.unallocated
NO_K = 16  # with k = 0 this many columns of zeros replace both operands, because cuBLASLt refuses an empty sum


class Lowered(NamedTuple):
    """A problem, and the byte offsets of (a, b, c, bias, aux, bgrad, out) for each library call of the request.

    `exchanged`: the request's b is cuBLASLt's A. `empty_k`: both operands are replaced by NO_K columns of zeros.
    """

    problem: Problem
    offsets: tuple[tuple[int, ...], ...]
    exchanged: bool
    empty_k: bool


class _View(NamedTuple):
    """The layout of an operand: `trans` for dense columns, the leading dimension, and batch strides, in elements."""

    trans: bool
    ld: int
    batch: tuple[int, ...]


def lower(request: MatmulRequest, compute: Compute) -> Lowered:
    """The problem of a request whose D has elements; BadRequest for an order of D that its epilogue cannot have."""
    m, n, k = request.m, request.n, request.k
    a, b, c, d = views = _views(request)
    if request.c is not None and c.trans != d.trans:
        layout_text = str(request.c.layout)
        raise BadRequest("c", layout_text, "the same order (row- or column-major) as out", "copy one of them")
    if not request.batch:
        problem = _problem(request, compute, (m, n, k), (a, b, c, d), 1, NO_STRIDES)
        return Lowered(problem, (NO_OFFSETS,), not d.trans, k == 0)
    extents, steps = _axes(request, views)
    if len(extents) == 1 and _can_fold_batch(request, a, c, d, steps[0], extents[0]):
        m, extents, steps = m * extents[0], [], []
    outer = _outer(steps)
    together = len(outer) < len(steps)
    stride = dict(zip(NO_STRIDES, steps[-1], strict=True)) if together else NO_STRIDES
    problem = _problem(request, compute, (m, n, k), (a, b, c, d), extents[-1] if together else 1, stride)
    lowered = Lowered(problem, (NO_OFFSETS,), exchanged=not d.trans, empty_k=k == 0)
    if not outer:
        return lowered
    offsets = tuple(_offsets(request, request.unallocated(), extents[: len(outer)], outer))
    return lowered._replace(problem=_aligned(lowered, offsets), offsets=offsets)


def vector_alignment(request: MatmulRequest, name: str) -> int:
    """The alignment in bytes, up to 256, that bias, aux or bgrad has in every library call of a request."""
    tensor, output = getattr(request, name), request.unallocated().get(name)
    alignment = 256 if tensor is None else tensor.layout.alignment
    if (tensor is None and output is None) or 0 in request.shape or not request.batch:
        return alignment
    dtype = output[2] if output is not None else tensor.dtype
    _, steps = _axes(request, _views(request))
    place = list(NO_STRIDES).index(name)
    return gcd(alignment, *(step[place] * dtype.itemsize for step in _outer(steps)))


def _outer(steps: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The strides of the batch axes that need one call for each index: all axes but the last.

    cuBLASLt does not document negative batch strides of a bias; with one, the last axis also takes one call per index.
    """
    return steps[:-1] if steps and min(steps[-1]) >= 0 else steps


def _views(request: MatmulRequest) -> tuple[_View, _View, _View, _View]:
    """The layouts of a, b, c and D."""
    m, n, k = request.m, request.n, request.k
    dims = request.batch
    a = _view(request.a.layout, m, k, len(dims), prefer_trans=False)
    b = _view(request.b.layout, k, n, len(dims), prefer_trans=True)
    if k == 0:  # the zeros that stand for both have no batches
        a, b = (_View(view.trans, view.ld, (0,) * len(dims)) for view in (a, b))
    d_layout = request.out.layout if request.out is not None else None
    d = _dense_view(m, n, dims) if d_layout is None else _view(d_layout, m, n, len(dims), prefer_trans=False)
    c_layout = None if _c_operand(request) is request.out else request.c.layout  # type: ignore[union-attr]
    return a, b, d if c_layout is None else _view(c_layout, m, n, len(dims), prefer_trans=d.trans), d


def _c_operand(request: MatmulRequest) -> Tensor | None:
    """The tensor that the library gets as C: `out` where there is no c, or where beta is 0 and nothing reads c."""
    is_read = request.has_beta or request.c_dtype is not request.d_dtype
    return request.c if request.c is not None and is_read else request.out


def _axes(request: MatmulRequest, views: tuple[_View, _View, _View, _View]) -> tuple[list[int], list[tuple[int, ...]]]:
    """The merged batch axes: their extents, and the strides of each operand in the order of NO_STRIDES."""
    a, b, c, d = views
    unallocated, dims = request.unallocated(), request.batch
    vectors = [_vector_strides(request, name, unallocated, len(dims)) for name in ("bias", "aux", "bgrad")]
    return merge_axes(dims, [a.batch, b.batch, c.batch, *vectors, d.batch])


def _aligned(lowered: Lowered, offsets: tuple[tuple[int, ...], ...]) -> Problem:
    """The problem with the alignments that its operands have at all of these offsets."""
    a, b, c, bias, aux, bgrad, d = (gcd(*of_one) for of_one in zip(*offsets, strict=True))
    problem = lowered.problem
    steps = {"a": b, "b": a, "c": c, "d": d} if lowered.exchanged else {"a": a, "b": b, "c": c, "d": d}
    matrices = {name: getattr(problem, name) for name in steps}
    return problem._replace(
        **{name: m._replace(alignment=gcd(m.alignment, steps[name])) for name, m in matrices.items()},
        bias_alignment=gcd(problem.bias_alignment, bias, bgrad),
        aux_alignment=gcd(problem.aux_alignment, aux),
    )


def _problem(
    request: MatmulRequest,
    compute: Compute,
    extents: tuple[int, int, int],
    views: tuple[_View, _View, _View, _View],
    batch: int,
    stride: dict[str, int],
) -> Problem:
    m, n, k = extents
    a, b, c, d = views
    scales, epilogue = request.scales, request.plain_epilogue
    flipped = d.trans  # a column-major D is in cuBLASLt's own order: nothing is exchanged
    if flipped and epilogue not in (Epilogue.NONE, Epilogue.RELU, Epilogue.GELU):
        raise BadRequest(
            "out", "a column-major view", f"a row-major one for epilogue {epilogue.name}", "leave out=None"
        )
    mat_a = _matrix(request.a, request.a.dtype, (m, k), a, stride["a"])
    mat_b = _matrix(request.b, request.b.dtype, (k, n), b, stride["b"])
    mat_c = _matrix(_c_operand(request), request.c_dtype, (m, n), c, stride["c"])
    mat_d = _matrix(request.out, request.d_dtype, (m, n), d, stride["d"])
    if (mat_c.ld, mat_c.batch_stride) != (mat_d.ld, mat_d.batch_stride):
        # Where C and D have different strides, cuBLASLt 13.1 looks only at C's, and may choose kernels whose stores are
        # too wide for D: on an H200 one product in 60 ended in CUDA_ERROR_MISALIGNED_ADDRESS, which loses the device.
        # With the smaller of the two alignments given for both, none of 1,600 products that add C did.
        least = min(_column_alignment(mat_c, request.c_dtype, batch), _column_alignment(mat_d, request.d_dtype, batch))
        mat_c, mat_d = mat_c._replace(alignment=least), mat_d._replace(alignment=least)
    if k == 0:
        mat_a, mat_b = (Matrix(x.dtype, NO_K, extent, NO_K) for x, extent in ((mat_a, m), (mat_b, n)))
        a, b = _View(False, NO_K, ()), _View(True, NO_K, ())
    first, second = ((mat_a, a.trans), (mat_b, b.trans)) if flipped else ((mat_b, b.trans), (mat_a, a.trans))
    return Problem(
        a=first[0],
        b=second[0],
        c=mat_c,
        d=mat_d,
        op_a=first[1] != flipped,
        op_b=second[1] != flipped,
        batch=batch,
        compute=int(compute),
        scale=scale_dtype(request.a.dtype, compute).cuda,
        epilogue=int(EXCHANGED.get(epilogue, epilogue)),
        **({} if epilogue is Epilogue.NONE else _epilogue_fields(request, stride)),
        **({} if scales is NO_SCALES else _scale_fields(scales, flipped, k)),
        fast_accum=request.fast_accum,
        device_scalars=isinstance(request.alpha, Tensor) or isinstance(request.beta, Tensor),
        adds_c=request.has_beta,
        reduced_precision=request.reduced_precision,
    )


def _column_alignment(matrix: Matrix, dtype: Dtype, batch: int) -> int:
    """The alignment in bytes that every column of a matrix has, in each product of a batch."""
    steps = [matrix.ld] * (matrix.cols > 1) + [matrix.batch_stride] * (batch > 1)
    return gcd(matrix.alignment, *(step * dtype.itemsize for step in steps))


def _scale_fields(scales: Scales, flipped: bool, k: int) -> dict[str, Any]:
    a, b = (
        -1 if factor is None or k == 0 else int(mode)
        for factor, mode in ((scales.a, scales.a_mode), (scales.b, scales.b_mode))
    )
    factors = tuple(name for name in ("c", "d", "aux", "amax_d", "amax_aux") if getattr(scales, name) is not None)
    return {"a_scale_mode": a if flipped else b, "b_scale_mode": b if flipped else a, "factors": factors}


def _epilogue_fields(request: MatmulRequest, stride: dict[str, int]) -> dict[str, Any]:
    epilogue = request.plain_epilogue
    fields: dict[str, Any] = {}
    if epilogue.adds_bias or epilogue.writes_bgrad:
        name = "bias" if epilogue.adds_bias else "bgrad"
        tensor = getattr(request, name)
        dtype = request.c_dtype if tensor is None else tensor.dtype
        fields["bias_dtype"] = dtype.cuda
        fields["bias_stride"] = stride[name]
        fields["bias_alignment"] = _alignment(tensor, dtype, stride[name])
    if epilogue.writes_aux or epilogue.is_gradient:
        rows = _aux_rows(request)[0]
        in_elements = 8 if epilogue.activation == "relu" else 1  # the mask is addressed in bits
        fields["aux_ld"] = rows * in_elements
        fields["aux_stride"] = stride["aux"] * in_elements
        fields["aux_alignment"] = _alignment(request.aux, request.aux_dtype, stride["aux"])
        fields["aux_dtype"] = -1 if epilogue.activation == "relu" else request.aux_dtype.cuda
    return fields


def _alignment(tensor: Tensor | None, dtype: Dtype, batch_stride: int) -> int:
    """The alignment of a vector or of aux in every product of a batch; memory that we allocate is aligned to 256."""
    return gcd(256 if tensor is None else tensor.layout.alignment, batch_stride * dtype.itemsize)


def _matrix(tensor: Tensor | None, dtype: Dtype, shape: tuple[int, int], view: _View, batch_stride: int) -> Matrix:
    """The memory of a (rows, columns) operand as a column-major matrix; memory that we allocate is aligned to 256."""
    rows, cols = shape
    stored = (rows, cols) if view.trans else (cols, rows)
    return Matrix(dtype.cuda, *stored, view.ld, batch_stride, 256 if tensor is None else tensor.layout.alignment)


def _dense_view(m: int, n: int, dims: tuple[int, ...]) -> _View:
    steps, step = [], m * n
    for extent in reversed(dims):
        steps.append(step)
        step *= extent
    return _View(False, _line_ld(n) if m <= 1 else max(n, 1), tuple(reversed(steps)))


def _view(layout: Layout, rows: int, cols: int, batch_dims: int, *, prefer_trans: bool) -> _View:
    """The layout of a (…, rows, cols) operand: with dense rows, or with dense columns (`trans`).

    `prefer_trans` decides if both are dense.
    """
    down, right = layout.strides[-2:]
    row_major = (right == 1 or cols <= 1) and (down >= cols or rows <= 1)
    column_major = (down == 1 or rows <= 1) and (right >= rows or cols <= 1)
    trans = column_major and (prefer_trans or not row_major)
    extent, count, ld = (rows, cols, right) if trans else (cols, rows, down)
    if count <= 1:  # a single line: its stride is never used, so we may give the one that suits the library best
        ld = _line_ld(extent)
    batch = layout.shape[:-2]
    steps = [0 if e == 1 else s for e, s in zip(batch, layout.strides[:-2], strict=True)]
    return _View(trans, max(ld, extent, 1), (*(0,) * (batch_dims - len(batch)), *steps))


def _line_ld(extent: int) -> int:
    return -(-max(extent, 1) // LD_PADDING) * LD_PADDING


def _vector_strides(request: MatmulRequest, name: str, missing: Unallocated, batch_dims: int) -> tuple[int, ...]:
    """The batch strides of bias, aux or bgrad, in elements; of the output that we allocate if none is given."""
    tensor = getattr(request, name)
    inner = 2 if name == "aux" else 1
    if tensor is not None:
        batch = tensor.layout.shape[:-inner]
        steps = [0 if e == 1 else s for e, s in zip(batch, tensor.layout.strides[:-inner], strict=True)]
        return (*(0,) * (batch_dims - len(batch)), *steps)
    output = missing.get(name)
    return (0,) * batch_dims if output is None else output[1][:-inner]


def _aux_rows(request: MatmulRequest) -> tuple[int, int]:
    """The stride of aux from row to row, and its row length, in elements."""
    if request.aux is not None:
        shape, strides = request.aux.shape, request.aux.layout.strides
    else:
        shape, strides, _ = request.unallocated()["aux"]
    multiple = 16 if request.plain_epilogue.activation == "relu" else 8
    step = strides[-2] if shape[-2] > 1 else -(-shape[-1] // multiple) * multiple
    return step, shape[-1]


def _can_fold_batch(request: MatmulRequest, a: _View, c: _View, d: _View, steps: tuple[int, ...], extent: int) -> bool:
    """Whether a batch that shares B can be one taller product: A, C, D and aux are contiguous across the batch."""
    m = request.m
    step_a, step_b, step_c, step_bias, step_aux, _, step_d = steps
    if step_b or a.trans or c.trans or d.trans or step_bias or request.plain_epilogue.writes_bgrad:
        return False
    if extent * m > 2**31 - 1 or request.scales.a_mode is not ScaleMode.SCALAR_32F:
        return False
    aux = request.plain_epilogue.writes_aux or request.plain_epilogue.is_gradient
    aux_follows = not aux or step_aux == m * _aux_rows(request)[0]
    lines = ((step_a, a.ld), (step_c, c.ld), (step_d, d.ld))
    return aux_follows and all(step == m * ld for step, ld in lines)


def _offsets(
    request: MatmulRequest, made: Unallocated, extents: list[int], steps: list[tuple[int, ...]]
) -> Iterator[tuple[int, ...]]:
    """Byte offsets of (a, b, c, bias, aux, bgrad, out) for each index of the outer batch axes."""
    dtypes = [request.a.dtype, request.b.dtype, request.c_dtype]
    for name in ("bias", "aux", "bgrad"):
        tensor = getattr(request, name)
        dtypes.append(tensor.dtype if tensor is not None else made[name][2] if name in made else BOOL)
    dtypes.append(request.d_dtype)
    for index in product(*map(range, extents)):
        elements = [sum(i * step[operand] for i, step in zip(index, steps, strict=True)) for operand in range(7)]
        yield tuple(count * dtype.bits // 8 for count, dtype in zip(elements, dtypes, strict=True))
