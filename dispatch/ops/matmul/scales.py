"""Scale factors, aux and bgrad of a product: their modes, dtypes, shapes and strides.

A request holds a `Scales`; validation and the reference use the shape functions. The scaling modes are those of
https://docs.nvidia.com/cuda/cublas/#cublasltmatmulmatrixscale-t.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from dispatch.checks import check_enum, check_shape, names_arguments, read_choices, shown
from dispatch.core.layouts import merge_axes
from dispatch.device.layout import c_strides
from dispatch.errors import BadRequest
from dispatch.keys import C64, C128, E8M0, F8E4M3, F16, F32, F64, I8, I32, Compute, Dtype, Epilogue, ScaleMode, member

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dispatch.device.layout import Layout
    from dispatch.device.tensor import Tensor

__all__ = [
    "AMAX",
    "BLOCK",
    "FACTORS",
    "FACTORS_AND_AMAX",
    "NO_SCALES",
    "Scales",
    "aux_shape",
    "bgrad_strides",
    "scale_dtype",
    "scale_shape",
]

Shape = tuple[int, ...]
BLOCK = 128
DOUBLE = (Compute.COMPUTE_64F, Compute.COMPUTE_64F_EMULATED_FIXEDPOINT)
VECTOR = {ScaleMode.VEC16_UE4M3: 16, ScaleMode.VEC32_UE8M0: 32, ScaleMode.VEC128_32F: BLOCK}
AUX_BITS = 128  # cuBLASLt requires the leading dimension of the ReLU mask, in bits, to be a multiple of this
AUX_ELEMENTS = 8  # and that of the GELU input, in elements, to be a multiple of this


@names_arguments
@dataclass(frozen=True, eq=False)
class Scales:
    """Scale factors: D = scale_d · epilogue(alpha · scale_a · scale_b · A · B + beta · scale_c · C + bias).

    A factor is a number above 0, or a tensor on the device. Per tensor: f32 of one element. For A (m, k) and B (k, n)
    also, by mode: OUTER_VEC_32F f32 (m,) for A and (n,) for B; VEC128_32F f32 (ceil(k/128), m) for A and
    (ceil(k/128), n) for B; BLK128x128_32F f32 (ceil(m/128), 4·ceil(k/512)) for A and (ceil(n/128), 4·ceil(k/512)) for
    B; only the first ceil(k/128) columns are read.
    `amax_d` and `amax_aux` are f32 tensors of one element that receive the largest magnitude before scaling; a GPU has
    no row for them where the batch axes of the operands do not join to one.
    """

    a: Tensor | float | None = None
    b: Tensor | float | None = None
    c: Tensor | float | None = None
    d: Tensor | float | None = None
    aux: Tensor | float | None = None
    a_mode: ScaleMode | str = ScaleMode.SCALAR_32F
    b_mode: ScaleMode | str = ScaleMode.SCALAR_32F
    amax_d: Tensor | None = None
    amax_aux: Tensor | None = None

    def __post_init__(self) -> None:
        read_choices(self)

    def __reduce__(self) -> Any:
        if self is NO_SCALES:
            return "NO_SCALES"  # the module constant: unpickling returns the one instance
        return Scales, tuple(getattr(self, field.name) for field in fields(self))

    def modes(self) -> tuple[ScaleMode | None, ScaleMode | None]:
        """The modes of A and B; None where there is no factor."""
        return (None if self.a is None else member(self.a_mode), None if self.b is None else member(self.b_mode))


NO_SCALES = Scales()
FACTORS = ("a", "b", "c", "d", "aux")
AMAX = ("amax_d", "amax_aux")
FACTORS_AND_AMAX = (*FACTORS, *AMAX)


def aux_shape(epilogue: Epilogue | str, shape: Shape) -> tuple[Shape, Shape]:
    """Shape and strides (elements) of the aux tensor for a D of this shape (…, m, n).

    ReLU: a bit mask, u8 (…, m, 16 · ceil(n / 128)), bit j % 8 of byte j // 8 for column j, set where the input of the
    ReLU was above 0. GELU: its input, (…, m, n), in rows of a length that is a multiple of 8.
    """
    checked = check_enum("epilogue", epilogue, Epilogue)
    if len(check_shape("shape", shape)) < 2:
        raise BadRequest("shape", shown(shape), "that of a D, with two axes or more")
    *batch, m, n = shape
    if checked.activation == "relu":
        mask = (*batch, m, -(-n // AUX_BITS) * AUX_BITS // 8)
        return mask, c_strides(mask)
    return tuple(shape), c_strides((*batch, m, -(-n // AUX_ELEMENTS) * AUX_ELEMENTS))


def bgrad_strides(shape: Shape, dtype: Dtype, matrices: Iterable[Layout]) -> Shape:
    """The strides of a bgrad (…, extent) that is allocated: dense if each library call gets a part at 16 bytes.

    There is a call for each index of all batch axes but the last, after axes are merged that are one axis in the
    product's matrices and in bgrad. Otherwise each line begins at a multiple of 16 bytes.
    """
    dense, batch = c_strides(shape), shape[:-1]
    steps = [dense[:-1]]
    for layout in matrices:
        extents, strides = layout.shape[:-2], layout.strides[:-2]
        own = [0 if extent == 1 else step for extent, step in zip(extents, strides, strict=True)]
        steps.append((*(0,) * (len(batch) - len(own)), *own))
    _, merged = merge_axes(batch, steps)
    line = 128 // dtype.bits  # the elements in 16 bytes
    if all(outer[0] % line == 0 for outer in merged[:-1]):
        return dense
    pitch = -(-shape[-1] // line) * line
    return (*(step * pitch for step in c_strides(batch)), 1)


def scale_dtype(operand: Dtype, compute: Compute | None) -> Dtype:
    """The dtype of alpha and beta for an operand's dtype and a compute type; None is the operand's default."""
    if operand.is_complex:
        return C128 if compute in DOUBLE or (compute is None and operand is C128) else C64
    if compute is None:
        return {F64: F64, I8: I32}.get(operand, F32)
    kinds = {**dict.fromkeys(DOUBLE, F64), Compute.COMPUTE_32I: I32, Compute.COMPUTE_16F: F16}
    return kinds.get(compute, F32)


def scale_shape(mode: ScaleMode, outer: int, k: int) -> tuple[Dtype, Shape]:
    """Dtype and shape of the factor tensor of A (outer m) or B (outer n) in a mode; () for one element."""
    if mode is ScaleMode.SCALAR_32F:
        return F32, ()
    if mode is ScaleMode.OUTER_VEC_32F:
        return F32, (outer,)
    if mode is ScaleMode.VEC128_32F:
        return F32, (-(-k // BLOCK), outer)
    if mode is ScaleMode.BLK128x128_32F:
        return F32, (-(-outer // BLOCK), -(-k // (4 * BLOCK)) * 4)  # rows padded to a multiple of four
    # The block-scaled formats of sm_100 and newer: 128 by 4 tiles of factors, in the tensor cores' order.
    dtype = F8E4M3 if mode is ScaleMode.VEC16_UE4M3 else E8M0
    factors = -(-k // VECTOR[mode])
    return dtype, (-(-outer // BLOCK) * BLOCK, -(-factors // 4) * 4)
