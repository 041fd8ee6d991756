"""cuBLASLt's descriptors of a problem, and what its heuristic suggests for them.

`cublaslt.py` makes them for the problems of `lower.py`. Descriptors need no GPU, the heuristic needs a handle. This
module launches nothing.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from cudabind.errors import CublasLtError
from cudabind.sys import cublasLt as lt
from dispatch.errors import Refused
from dispatch.keys import Epilogue, ScaleMode
from dispatch.libraries.cublaslt.kernel_recording import LOW_PRECISION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.libraries.cublaslt.problem import Matrix, Problem

__all__ = ["Desc", "Descriptors", "OperationDescriptors", "heuristic", "preference_of", "reduced_demands", "suggested"]

Desc = lt.cublasLtMatmulDescAttributes_t
LayoutAttribute = lt.cublasLtMatrixLayoutAttribute_t
Preference = lt.cublasLtMatmulPreferenceAttributes_t
ALIGNMENT = (
    Preference.CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
    Preference.CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
    Preference.CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
    Preference.CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
)
Scheme = lt.cublasLtReductionScheme_t
ALIGNED = 16  # bytes, which every kernel with vector loads needs; some are offered only for no larger alignment
UNSUPPORTED = (lt.cublasStatus_t.CUBLAS_STATUS_NOT_SUPPORTED, lt.cublasStatus_t.CUBLAS_STATUS_INVALID_VALUE)


class OperationDescriptors:
    """The descriptor of an operation and those of its matrices, destroyed with this object; they need no GPU."""

    def __init__(self, compute: Any, scale: Any) -> None:
        self.matmul = lt.cublasLtMatmulDesc_t()
        self.layouts: dict[str, Any] = {}
        lt.cublasLtMatmulDescCreate(self.matmul, compute, scale)

    @property
    def is_shared(self) -> bool:
        """Whether the operation's descriptor belongs to another object, which destroys it."""
        return False

    def set(self, attribute: lt.cublasLtMatmulDescAttributes_t, value: Any) -> None:
        """Set one attribute of the operation from a ctypes value of its type."""
        lt.cublasLtMatmulDescSetAttribute(self.matmul, attribute, ctypes.byref(value), ctypes.sizeof(value))

    def point(self, attribute: lt.cublasLtMatmulDescAttributes_t, address: int) -> None:
        """Set one pointer of the operation."""
        self.set(attribute, ctypes.c_void_p(address))

    def read_scalars_on_device(self) -> None:
        """Have alpha and beta be addresses on the device."""
        device = lt.cublasLtPointerMode_t.CUBLASLT_POINTER_MODE_DEVICE
        self.set(Desc.CUBLASLT_MATMUL_DESC_POINTER_MODE, ctypes.c_int32(device))

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        for layout in {id(layout): layout for layout in self.layouts.values()}.values():
            lt.cublasLtMatrixLayoutDestroy.unchecked(layout)
        if self.matmul.value and not self.is_shared:
            lt.cublasLtMatmulDescDestroy.unchecked(self.matmul)


class Descriptors(OperationDescriptors):
    """The descriptors of a problem; `like` are those of another problem that differs only in its matrices.

    The two then share the operation's descriptor, which belongs to `like`.
    """

    def __init__(self, problem: Problem, like: Descriptors | None = None) -> None:
        self._like = like
        if like is None:
            super().__init__(problem.compute, problem.scale)
            self._set(problem)
        else:
            self.matmul, self.layouts = like.matmul, {}
        for name in "abd":
            self.layouts[name] = _layout(getattr(problem, name), problem.batch)
        self.layouts["c"] = self.layouts["d"] if problem.c == problem.d else _layout(problem.c, problem.batch)

    @property
    def is_shared(self) -> bool:
        return self._like is not None

    def _set(self, problem: Problem) -> None:
        if problem.op_a:
            self.set(Desc.CUBLASLT_MATMUL_DESC_TRANSA, ctypes.c_int32(1))
        if problem.op_b:
            self.set(Desc.CUBLASLT_MATMUL_DESC_TRANSB, ctypes.c_int32(1))
        if problem.epilogue != Epilogue.NONE:
            self._set_epilogue(problem)
        if problem.device_scalars:
            self.read_scalars_on_device()
        if problem.fast_accum:
            self.set(Desc.CUBLASLT_MATMUL_DESC_FAST_ACCUM, ctypes.c_int8(1))
        for attribute, mode in (
            (Desc.CUBLASLT_MATMUL_DESC_A_SCALE_MODE, problem.a_scale_mode),
            (Desc.CUBLASLT_MATMUL_DESC_B_SCALE_MODE, problem.b_scale_mode),
        ):
            if mode > ScaleMode.SCALAR_32F:  # per tensor is the default, and older libraries know no other
                self.set(attribute, ctypes.c_int32(mode))

    def _set_epilogue(self, problem: Problem) -> None:
        self.set(Desc.CUBLASLT_MATMUL_DESC_EPILOGUE, ctypes.c_uint32(problem.epilogue))
        if problem.bias_dtype >= 0:
            self.set(Desc.CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, ctypes.c_int32(problem.bias_dtype))
            self.set(Desc.CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, ctypes.c_int64(problem.bias_stride))
        if problem.aux_ld:
            self.set(Desc.CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, ctypes.c_int64(problem.aux_ld))
            self.set(Desc.CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, ctypes.c_int64(problem.aux_stride))
            if problem.aux_dtype >= 0:
                self.set(Desc.CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, ctypes.c_int32(problem.aux_dtype))


def _layout(matrix: Matrix, batch: int) -> Any:
    layout = lt.cublasLtMatrixLayout_t()
    lt.cublasLtMatrixLayoutCreate(layout, matrix.dtype, matrix.rows, matrix.cols, matrix.ld)
    if batch > 1:
        for attribute, value in (
            (LayoutAttribute.CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, ctypes.c_int32(batch)),
            (LayoutAttribute.CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, ctypes.c_int64(matrix.batch_stride)),
        ):
            lt.cublasLtMatrixLayoutSetAttribute(layout, attribute, ctypes.byref(value), ctypes.sizeof(value))
    return layout


def reduction_schemes(problem: Problem) -> int:
    """The mask of `cublasLtReductionScheme_t`: how partial sums over k may be added up.

    The in-place and output-type schemes round partial sums to D's dtype before adding them: that is allowed if D is as
    precise as the sums, or if the request asks for it. Not to split k is always allowed.
    """
    if problem.reduced_precision or problem.d.dtype not in LOW_PRECISION:
        return Scheme.CUBLASLT_REDUCTION_SCHEME_MASK
    return Scheme.CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE


def preference_of(workspace: int, aligned: tuple[int, int, int, int], schemes: int) -> lt.cublasLtMatmulPreference_t:
    """A preference for the heuristic; the caller destroys it."""
    preference = lt.cublasLtMatmulPreference_t()
    lt.cublasLtMatmulPreferenceCreate(preference)
    size = ctypes.c_uint64(workspace)
    limit = Preference.CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
    lt.cublasLtMatmulPreferenceSetAttribute(preference, limit, ctypes.byref(size), 8)
    mask, allowed = Preference.CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, ctypes.c_uint32(schemes)
    lt.cublasLtMatmulPreferenceSetAttribute(preference, mask, ctypes.byref(allowed), 4)
    for attribute, alignment in zip(ALIGNMENT, aligned, strict=True):
        number = ctypes.c_uint32(alignment)
        lt.cublasLtMatmulPreferenceSetAttribute(preference, attribute, ctypes.byref(number), 4)
    return preference


_preference = cache(preference_of)  # there are few, and they are only read, so they are cached


def heuristic(
    handle: lt.cublasLtHandle_t, descriptors: Descriptors, problem: Problem, workspace: int, count: int = 1
) -> list[lt.cublasLtMatmulHeuristicResult_t]:
    """The algorithms that cuBLASLt suggests, best first; Refused with its status where it has none."""
    aligned = (problem.a.alignment, problem.b.alignment, problem.c.alignment, problem.d.alignment)
    return suggested(handle, descriptors, _preference(workspace, aligned, reduction_schemes(problem)), count)


def suggested(
    handle: lt.cublasLtHandle_t,
    descriptors: OperationDescriptors,
    preference: lt.cublasLtMatmulPreference_t,
    count: int,
) -> list[lt.cublasLtMatmulHeuristicResult_t]:
    """The algorithms that cuBLASLt suggests for descriptors, best first; Refused with its status where it has none."""
    results = (lt.cublasLtMatmulHeuristicResult_t * count)()
    result_count = ctypes.c_int32()
    a, b, c, d = (descriptors.layouts[name] for name in "abcd")
    try:
        lt.cublasLtMatmulAlgoGetHeuristic(
            handle, descriptors.matmul, a, b, c, d, preference, count, results, ctypes.byref(result_count)
        )
    except CublasLtError as error:
        if error.status not in UNSUPPORTED:
            raise
        raise Refused(f"cublasLtMatmulAlgoGetHeuristic returned {error.name}") from error
    usable = [result for result in results[: result_count.value] if result.state == 0]
    if not usable:
        raise Refused("cublasLtMatmulAlgoGetHeuristic finds no algorithm")
    return usable


def reduced_demands(problem: Problem, limit: int) -> Iterator[tuple[Problem, int]]:
    """The problem with smaller demands (workspace, alignment), for which the heuristic may name faster algorithms."""
    for workspace in (8 << 20, 1 << 20, 0):
        if workspace < limit:
            yield problem, workspace
    matrices = {name: getattr(problem, name) for name in "abcd"}
    if all(matrix.alignment > ALIGNED for matrix in matrices.values()):
        yield problem._replace(**{name: m._replace(alignment=ALIGNED) for name, m in matrices.items()}), limit
