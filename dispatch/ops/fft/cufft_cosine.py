"""Cosine and sine transforms by cuFFT: a pass that folds each line, its Fourier transform, and a pass that unfolds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.errors import WorkerFailed
from dispatch.keys import C64, C128, F32, F64
from dispatch.libraries.cufft.cosines import Fold, Lines, points_of
from dispatch.libraries.cufft.layouts import COMPLEX, View, merged_axes, transform_spec, view_of
from dispatch.libraries.cufft.steps import Steps

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.fft.cosine import CosineRequest

__all__ = ["plan"]

REALS = {C64: F32, C128: F64}
REAL_TYPES, TWO, THREE = (1, 2), 2, 3


def plan(request: CosineRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; without elements it has no steps."""
    steps = Steps(executor, row, len(request.reads) + len(request.writes))
    x, out = (in_parts(view_of(request.layout_of(name), request.place_of(name))) for name in ("x", "out"))
    axis, real = request.axis % request.x.ndim, out.dtype
    if not request.layout_of("out").size:
        return steps.plan()
    extents = list(out.shape)
    parts = tuple(merged_axes((axis,), x.cropped(tuple(extents)), out))
    lines = Lines(request.summed, request.sine, request.points, axis, parts, request.is_orthogonal, request.factor)
    points, count = points_of(lines), lines.line_count
    half = points // 2 + 1
    is_real = lines.type in REAL_TYPES
    before = (real, points) if is_real else (COMPLEX[real], half if lines.type == THREE else points)
    folded = steps.scratch(before[0], (count, before[1]), (1,))
    transformed = folded
    if is_real:
        transformed = steps.scratch(COMPLEX[real], (count, half), (1,))
    elif lines.type == THREE:
        transformed = steps.scratch(real, (count, points), (1,))
    steps.append(Fold(executor, "fold", lines, x.cropped(tuple(extents)), folded, real))
    if points > 1:
        spec = transform_spec((1,), folded, transformed)
        if spec is None:
            raise WorkerFailed("cuFFT's plan refuses dense memory")
        steps.transform([spec], forward=lines.type != THREE)
    elif transformed is not folded:
        steps.move(folded, transformed)  # the transform of one point is that point
    steps.append(Fold(executor, "unfold", lines, transformed, out, real))
    return steps.plan()


def in_parts(view: View) -> View:
    """Complex numbers as pairs of real ones along one more axis."""
    if not view.dtype.is_complex:
        return view
    strides = (*(2 * step for step in view.strides), 1)
    return view._replace(dtype=REALS[view.dtype], shape=(*view.shape, TWO), strides=strides)
