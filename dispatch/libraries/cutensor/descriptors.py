"""What cuTENSOR is told of an operation: tensors, modes, operators, a compute type; and what it makes of it, a plan.

Follows https://docs.nvidia.com/cuda/cutensor/latest/api/cutensor.html: descriptors of the tensors, of the operation,
a preference, an estimate of the workspace, a plan. All of it is in host memory.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind.errors import CutensorError
from cudabind.sys import cutensor
from dispatch.errors import Refused
from dispatch.keys import BF16, C64, C128, F16, F32, F64, Compute, Dtype
from dispatch.libraries.finalizer import finalizer

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["OWN_CHOICE", "KernelPlan", "Operation", "Preference", "TensorOperand"]

# Of the address of a tensor, in bytes: what cuTENSOR's kernels ask for at most.
ALIGNMENT = 128
COMPUTE = {
    Compute.COMPUTE_16F: "16F",
    Compute.COMPUTE_32F: "32F",
    Compute.COMPUTE_64F: "64F",
    Compute.COMPUTE_32F_FAST_16F: "16F",
    Compute.COMPUTE_32F_FAST_16BF: "16BF",
    Compute.COMPUTE_32F_FAST_TF32: "TF32",
    Compute.COMPUTE_32F_FAST_3XTF32: "3XTF32",
    Compute.COMPUTE_32F_EMULATED_16BFX9: "9X16BF",
    Compute.COMPUTE_32F_EMULATED_16FX4: "4X16F",
    Compute.COMPUTE_64F_EMULATED_FIXEDPOINT: "8XINT8",
}
SCALARS = {dtype.cuda: dtype for dtype in (F16, BF16, F32, F64, C64, C128)}
REFUSALS = (
    *("CUTENSOR_STATUS_NOT_SUPPORTED", "CUTENSOR_STATUS_ARCH_MISMATCH", "CUTENSOR_STATUS_INVALID_VALUE"),
    "CUTENSOR_STATUS_INSUFFICIENT_WORKSPACE",
)


class TensorOperand(NamedTuple):
    """A tensor of an operation: its modes, each once, with extents above 0, strides above 0, and its operator."""

    modes: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Dtype
    alignment: int  # of its address, in bytes
    operator: int = 1  # cutensorOperator_t: CUTENSOR_OP_IDENTITY


class Operation(NamedTuple):
    """What is to be done: the function that describes it, `inputs` in its order, and the result."""

    create: str  # such as cutensorCreateContraction
    inputs: tuple[TensorOperand, ...]
    output: TensorOperand
    binary: tuple[int, ...]  # operators of two elements, in the order of `create`
    compute: Compute


class Preference(NamedTuple):
    """Which kernels may be taken."""

    algo: int = -1  # cutensorAlgo_t: CUTENSOR_ALGO_DEFAULT
    kernel_rank: int | None = None
    jit: bool = False
    workspace: int | None = None  # the most bytes; None for what cuTENSOR suggests
    incremental_count: int = 0  # kernels that cuTENSOR tries, one for each plan of the operation; 0 for none


OWN_CHOICE = Preference()


class OwnedHandle:
    """Something of cuTENSOR's, destroyed with this object, and before what it was made of.

    Whether cuTENSOR copies that it says nowhere.
    """

    __slots__ = ("_dependencies", "_destroy", "handle")

    def __init__(self, kind: str, *needs: OwnedHandle) -> None:
        names = {"cutensorPlan_t": "cutensorDestroyPlan", "cutensorPlanPreference_t": "cutensorDestroyPlanPreference"}
        last: Any = getattr(cutensor, names.get(kind, f"cutensorDestroy{kind[8:-2]}"))
        self._destroy, self._dependencies = last.unchecked, needs
        self.handle: Any = getattr(cutensor, kind)()

    @finalizer
    def __del__(self) -> None:
        handle = getattr(self, "handle", None)
        if handle:
            self._destroy(handle)


class KernelPlan:
    """An operation with the kernel that cuTENSOR has chosen for it; Refused where it has none.

    `workspace` is how many bytes the kernel works in, and `scalar` the dtype of its factors in host memory.
    """

    __slots__ = ("handle", "plan", "scalar", "workspace")

    def __init__(self, handle: Any, operation: Operation, preference: Preference = OWN_CHOICE) -> None:
        self.handle = handle
        try:
            described = self._describe(operation)
            self.scalar = SCALARS[_attribute(handle, described, "SCALAR_TYPE", ctypes.c_int32)]
            self.plan = self._make_plan(described, preference)
            self.workspace = self._required()
        except CutensorError as error:
            if error.name in REFUSALS:
                raise Refused(f"cuTENSOR has no kernel for it: {error}") from error
            raise

    def _describe(self, operation: Operation) -> OwnedHandle:
        tensors: list[OwnedHandle] = []
        arguments: list[Any] = []
        for operand in operation.inputs:
            tensors.append(tensor_descriptor(self.handle, operand))
            arguments += [tensors[-1].handle, mode_numbers(operand.modes), operand.operator]
        # What is added comes last and lies as the result does: the two are to have the very same descriptor.
        is_alike = operation.inputs[-1]._replace(operator=1) == operation.output
        tensors.append(tensors[-1] if is_alike else tensor_descriptor(self.handle, operation.output))
        arguments += [tensors[-1].handle, mode_numbers(operation.output.modes), *operation.binary]
        described = OwnedHandle("cutensorOperationDescriptor_t", *tensors)
        compute = getattr(cutensor, f"CUTENSOR_COMPUTE_DESC_{COMPUTE[operation.compute]}")
        getattr(cutensor, operation.create)(self.handle, ctypes.byref(described.handle), *arguments, compute)
        return described

    def _make_plan(self, described: OwnedHandle, preference: Preference) -> OwnedHandle:
        handle, chosen = self.handle, OwnedHandle("cutensorPlanPreference_t")
        plan = OwnedHandle("cutensorPlan_t", described, chosen)
        jit, algo = cutensor.cutensorJitMode_t, cutensor.cutensorAlgo_t(preference.algo)
        mode = jit.CUTENSOR_JIT_MODE_DEFAULT if preference.jit else jit.CUTENSOR_JIT_MODE_NONE
        cutensor.cutensorCreatePlanPreference(handle, ctypes.byref(chosen.handle), algo, mode)
        named = {}
        if preference.kernel_rank is not None:
            named["KERNEL_RANK"] = preference.kernel_rank
        if preference.incremental_count:
            named["AUTOTUNE_MODE"] = int(cutensor.cutensorAutotuneMode_t.CUTENSOR_AUTOTUNE_MODE_INCREMENTAL)
            named["CACHE_MODE"] = int(cutensor.cutensorCacheMode_t.CUTENSOR_CACHE_MODE_PEDANTIC)
            named["INCREMENTAL_COUNT"] = preference.incremental_count
        elif preference[:3] != OWN_CHOICE[:3]:
            # cuTENSOR's own cache of plans is asked by the operation: it may give one that was chosen otherwise.
            named["CACHE_MODE"] = int(cutensor.cutensorCacheMode_t.CUTENSOR_CACHE_MODE_NONE)
        for name, value in named.items():
            attribute = cutensor.cutensorPlanPreferenceAttribute_t[f"CUTENSOR_PLAN_PREFERENCE_{name}"]
            number = ctypes.c_int32(value)
            cutensor.cutensorPlanPreferenceSetAttribute(handle, chosen.handle, attribute, ctypes.byref(number), 4)
        limit = preference.workspace
        if limit is None:
            suggested, kind = ctypes.c_uint64(), cutensor.cutensorWorksizePreference_t.CUTENSOR_WORKSPACE_DEFAULT
            cutensor.cutensorEstimateWorkspaceSize(
                handle, described.handle, chosen.handle, kind, ctypes.byref(suggested)
            )
            limit = suggested.value
        cutensor.cutensorCreatePlan(handle, ctypes.byref(plan.handle), described.handle, chosen.handle, limit)
        return plan

    def _required(self) -> int:
        found = ctypes.c_uint64()
        attribute = cutensor.cutensorPlanAttribute_t.CUTENSOR_PLAN_REQUIRED_WORKSPACE
        cutensor.cutensorPlanGetAttribute(self.handle, self.plan.handle, attribute, ctypes.byref(found), 8)
        return found.value


def tensor_descriptor(handle: Any, operand: TensorOperand) -> OwnedHandle:
    """The descriptor of a tensor."""
    made, count = OwnedHandle("cutensorTensorDescriptor_t"), len(operand.modes)
    kind: Any = ctypes.c_int64 * max(count, 1)
    extents, strides = kind(*operand.extents), kind(*operand.strides)
    dtype = cutensor.cudaDataType_t(operand.dtype.cuda)
    alignment = min(operand.alignment, ALIGNMENT)
    cutensor.cutensorCreateTensorDescriptor(
        handle, ctypes.byref(made.handle), count, extents, strides, dtype, alignment
    )
    return made


def mode_numbers(modes: Sequence[str]) -> Any:
    """Modes as cuTENSOR names them, by numbers."""
    kind: Any = ctypes.c_int32 * max(len(modes), 1)
    return kind(*map(ord, modes))


def _attribute(handle: Any, described: OwnedHandle, name: str, kind: Any) -> int:
    """An attribute of an operation's descriptor."""
    found = kind()
    attribute = cutensor.cutensorOperationDescriptorAttribute_t[f"CUTENSOR_OPERATION_DESCRIPTOR_{name}"]
    size = ctypes.sizeof(kind)
    cutensor.cutensorOperationDescriptorGetAttribute(handle, described.handle, attribute, ctypes.byref(found), size)
    return int(found.value)
