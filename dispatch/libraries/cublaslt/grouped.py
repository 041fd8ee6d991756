"""cuBLASLt's grouped layouts: products of different extents as one; extents, strides and addresses in device memory.

The library supports them for Hopper from 13.4 on, with 32-bit extents, one alpha for all, and no epilogue but a bias.
Its matrices are column-major, so the rows of a row-major A are the columns of its B, and D is transposed. `Groups` has
the addresses of the arrays. This file launches nothing.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind.sys import cublasLt as lt
from dispatch.keys import F32, FP8, Compute
from dispatch.libraries.cublaslt.descriptors import Desc, OperationDescriptors, preference_of, suggested

if TYPE_CHECKING:
    from dispatch.keys import Dtype

__all__ = ["NUMBERS", "GroupedDescriptors", "Groups", "grouped_heuristic"]

ADDRESSES = ("a", "b", "d", "scale")
NUMBERS = ("m", "n", "k", "step_a", "step_b", "step_d")
ALIGNMENTS = (16, 16, 16, 16)  # bytes that every group's matrix begins at a multiple of
Preference = lt.cublasLtMatmulPreferenceAttributes_t
MEANS = (
    Preference.CUBLASLT_MATMUL_PREF_GROUPED_DESC_D_AVERAGE_COLS,
    Preference.CUBLASLT_MATMUL_PREF_GROUPED_DESC_D_AVERAGE_ROWS,
    Preference.CUBLASLT_MATMUL_PREF_GROUPED_AVERAGE_REDUCTION_DIM,
)

PER_GROUP = lt.cublasLtMatmulMatrixScale_t.CUBLASLT_MATMUL_MATRIX_SCALE_PER_BATCH_SCALAR_32F
SCALES = (
    (Desc.CUBLASLT_MATMUL_DESC_A_SCALE_MODE, Desc.CUBLASLT_MATMUL_DESC_A_SCALE_POINTER),
    (Desc.CUBLASLT_MATMUL_DESC_B_SCALE_MODE, Desc.CUBLASLT_MATMUL_DESC_B_SCALE_POINTER),
)


class Groups(NamedTuple):
    """The arrays in device memory: from `at` on the addresses of A, B, D and a factor, then extents and strides as i32.

    The factor, for fp8 matrices, is a 1 in f32 after the arrays: the library needs an address for each group.
    """

    at: int
    number: int  # of groups

    @property
    def capacity(self) -> int:
        """The number of groups that fit in each array: arrays begin at multiples of 16 bytes."""
        return -(-self.number // 4) * 4

    @property
    def size(self) -> int:
        """The bytes of all arrays, and of the factor."""
        return self.capacity * (8 * len(ADDRESSES) + 4 * len(NUMBERS)) + 4

    def addresses(self, name: str) -> int:
        """The address of the array of a matrix's addresses."""
        return self.at + 8 * self.capacity * ADDRESSES.index(name)

    def numbers(self, name: str) -> int:
        """The address of the array of the extents or strides of this name."""
        return self.at + self.capacity * (8 * len(ADDRESSES) + 4 * NUMBERS.index(name))


class GroupedDescriptors(OperationDescriptors):
    """The descriptors of A · B for each group, row-major A and D, B of either order."""

    def __init__(
        self,
        groups: Groups,
        dtypes: tuple[Dtype, Dtype, Dtype],
        order_b: str,
        *,
        device_alpha: bool,
        fast_accum: bool,
    ) -> None:
        super().__init__(Compute.COMPUTE_32F, F32.cuda)
        a, b, d = dtypes
        by_rows = order_b == "row"
        self._layout("a", b, groups, *(("n", "k") if by_rows else ("k", "n")), "step_b")
        self._layout("b", a, groups, "k", "m", "step_a")
        self._layout("d", d, groups, "n", "m", "step_d")
        self.layouts["c"] = self.layouts["d"]
        if not by_rows:
            self.set(Desc.CUBLASLT_MATMUL_DESC_TRANSA, ctypes.c_int32(1))
        if device_alpha:
            self.read_scalars_on_device()
        if a in FP8:
            for mode, pointer in SCALES:
                self.set(mode, ctypes.c_int32(PER_GROUP))
                self.point(pointer, groups.addresses("scale"))
            self.set(Desc.CUBLASLT_MATMUL_DESC_FAST_ACCUM, ctypes.c_int8(fast_accum))

    def _layout(self, place: str, dtype: Dtype, groups: Groups, rows: str, columns: str, step: str) -> None:
        layout = lt.cublasLtMatrixLayout_t()
        kind: Any = dtype.cuda
        arrays = (groups.numbers(name) for name in (rows, columns, step))
        lt.cublasLtGroupedMatrixLayoutCreate(layout, kind, groups.number, *arrays)
        self.layouts[place] = layout


def grouped_heuristic(
    handle: lt.cublasLtHandle_t, descriptors: GroupedDescriptors, workspace: int, means: tuple[int, int, int]
) -> lt.cublasLtMatmulHeuristicResult_t:
    """The algorithm that cuBLASLt suggests for the groups' mean rows, columns and k; Refused if there is none."""
    schemes = lt.cublasLtReductionScheme_t.CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE
    preference = preference_of(workspace, ALIGNMENTS, schemes)
    try:
        for attribute, mean in zip(MEANS, means, strict=True):
            number = ctypes.c_int64(mean)  # the header says uint32_t, but the library accepts only eight bytes
            lt.cublasLtMatmulPreferenceSetAttribute(preference, attribute, ctypes.byref(number), 8)
        return suggested(handle, descriptors, preference, 1)[0]
    finally:
        lt.cublasLtMatmulPreferenceDestroy.unchecked(preference)
