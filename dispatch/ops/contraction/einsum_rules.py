"""The rules of einsum's rows beyond dtypes: each returns "needs …, has …", or ""."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.device.layout import c_strides
from dispatch.keys import BF16, C64, C128, F16, F32, F64, Compute, Dtype, member
from dispatch.ops.contraction.einsum import unique_layout
from dispatch.ops.contraction.modes import shown_spec
from dispatch.ops.contraction.product import product_of

if TYPE_CHECKING:
    from dispatch.device.layout import Layout
    from dispatch.ops.contraction.einsum import EinsumRequest

__all__ = ["computes", "gapless_diagonals", "only_products", "strides_along_modes"]

OF_F32 = (Compute.COMPUTE_32F_FAST_TF32, Compute.COMPUTE_32F_FAST_3XTF32, Compute.COMPUTE_32F_EMULATED_16BFX9)
OF_F64 = (Compute.COMPUTE_64F, Compute.COMPUTE_32F, Compute.COMPUTE_64F_EMULATED_FIXEDPOINT)
# The compute types of contractions of each dtype.
COMPUTES: dict[Dtype, tuple[Compute, ...]] = {
    **dict.fromkeys((F16, BF16), (Compute.COMPUTE_32F,)),
    **dict.fromkeys((F64, C128), OF_F64),
    F32: (Compute.COMPUTE_32F, *OF_F32, Compute.COMPUTE_32F_EMULATED_16FX4,
          Compute.COMPUTE_32F_FAST_16BF, Compute.COMPUTE_32F_FAST_16F),
    C64: (Compute.COMPUTE_32F, *OF_F32, Compute.COMPUTE_32F_EMULATED_16FX4),
}  # fmt: skip


def computes(request: EinsumRequest) -> str:
    """A compute type that the dtype has."""
    compute: Any = member(request.compute)
    supported = COMPUTES[request.dtype]
    if compute is None or compute in supported:
        return ""
    return f"needs compute {', '.join(one.name for one in supported)} for {request.dtype}, has {compute.name}"


def strides_along_modes(request: EinsumRequest) -> str:
    """Sums have an element, and each mode has a stride in some operand: else nothing is summed over or repeated."""
    empty = [mode for mode, extent in request.sizes.items() if not extent]
    if empty and request.out_layout().size and not request.out_layout().fills_bytes:
        return f"needs an element along {empty[0]}, or a result without gaps, which can be filled with 0"
    strides_along_modes = {
        mode
        for modes, tensor in zip(request.parsed[0], request.operands, strict=True)
        for mode, extent, step in zip(modes, tensor.shape, tensor.layout.strides, strict=True)
        if extent > 1 and step
    }
    lost = [mode for mode, extent in request.sizes.items() if extent > 1 and mode not in strides_along_modes]
    return (
        f"needs an operand with a nonzero stride along {lost[0]}, has none: copy one with dev.array(x)" if lost else ""
    )


def gapless_diagonals(request: EinsumRequest) -> str:
    """A result with a diagonal has memory without gaps, because zeros are written to all of it."""
    output = request.parsed[1]
    if len(set(output)) == len(output) or request.out_layout().fills_bytes:
        return ""
    return f"needs a result without gaps if it has a mode twice, has {request.out_layout()}"


# The compute types of cuBLASLt's rows of contractions.
OF_PRODUCTS: dict[Dtype, tuple[Compute, ...]] = {
    **dict.fromkeys((F16, BF16), (Compute.COMPUTE_32F,)),
    **dict.fromkeys((F32, C64), (Compute.COMPUTE_32F, Compute.COMPUTE_32F_FAST_TF32)),
    **dict.fromkeys((F64, C128), (Compute.COMPUTE_64F,)),
}


class StepView(NamedTuple):
    """The part of a step that decides whether it is a matrix product: the layouts and modes of operands and result."""

    sizes: dict[str, int]
    modes: dict[str, str]
    layouts: dict[str, Layout]
    reads_added: bool = False

    def modes_of(self, name: str) -> str:
        """The modes of an operand, or of the result."""
        return self.modes[name]

    def layout_of(self, name: str) -> Layout:
        """The layout of an operand, or of the result."""
        return self.layouts[name]


def only_products(request: EinsumRequest) -> str:
    """Each step is a matrix product with its operands' layouts: no permutations, conjugates or sums of one operand."""
    if len({tensor.dtype for tensor in request.operands}) > 1:
        return f"needs operands of one dtype, has {', '.join(str(tensor.dtype) for tensor in request.operands)}"
    if request.jit:
        return "needs jit False, has True, which only cuTENSOR supports"
    compute: Any = member(request.compute)
    if compute is not None and compute not in OF_PRODUCTS[request.dtype]:
        supported = ", ".join(one.name for one in OF_PRODUCTS[request.dtype])
        return f"needs compute {supported} for products of {request.dtype}, has {compute.name}"
    steps, device = request.schedule.steps, request.device
    layouts = [tensor.layout for tensor in request.operands]
    for number, step in enumerate(steps):
        if step.op != "contract":
            return f"needs steps that are matrix products, has {step.op}({shown_spec(step.spec)!r})"
        if any(step.conj):
            return f"needs operands without conjugation, has {shown_spec(step.spec)!r}"
        inputs, output = step.spec.split("->")
        dense = device.layout(request.dtype, step.shape, c_strides(step.shape), 256)
        layouts.append(dense if number < len(steps) - 1 else unique_layout(request))
        names = dict(zip(("a", "b", "out"), (*inputs.split(","), output), strict=True))
        lying = dict(zip(names, (*(layouts[one] for one in step.inputs), layouts[-1]), strict=True))
        sizes = {mode: request.sizes[mode] for modes in names.values() for mode in modes}
        product = product_of(StepView(sizes, names, lying))
        if isinstance(product, str):
            return f"{product} ({shown_spec(step.spec)!r})"
    return ""
