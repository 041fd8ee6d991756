"""cuTENSOR's descriptors: an operation's tensors, modes, operators and compute type; and the plan made from them.

Follows https://docs.nvidia.com/cuda/cutensor/latest/api/cutensor.html: descriptors of the tensors and the operation,
a plan preference, an estimate of the workspace, a plan. All of them are in host memory.
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

# The largest alignment of a tensor's address, in bytes, that cuTENSOR's kernels require.
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
    """A tensor of an operation: its modes, each once, with extents above 0 and strides above 0, and its operator."""

    modes: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Dtype
    alignment: int  # of the address, in bytes
    operator: int = 1  # cutensorOperator_t: CUTENSOR_OP_IDENTITY


class Operation(NamedTuple):
    """An operation: the function that creates its descriptor, `inputs` in that function's order, and the output."""

    create: str  # such as cutensorCreateContraction
    inputs: tuple[TensorOperand, ...]
    output: TensorOperand
    binary: tuple[int, ...]  # operators of two elements, in the order of the arguments of `create`
    compute: Compute


class Preference(NamedTuple):
    """The kernels that cuTENSOR may choose from."""

    algo: int = -1  # cutensorAlgo_t: CUTENSOR_ALGO_DEFAULT
    kernel_rank: int | None = None
    jit: bool = False
    workspace: int | None = None  # the limit in bytes; None for what cuTENSOR suggests
    incremental_count: int = 0  # kernels that cuTENSOR tries, one for each plan of the operation; 0 for no tuning


OWN_CHOICE = Preference()


class OwnedHandle:
    """A cuTENSOR object; it is destroyed with this Python object, and before the objects that it was created from.

    The documentation does not say whether cuTENSOR copies those.
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
    """An operation with the kernel that cuTENSOR chose for it; Refused where cuTENSOR has none.

    `workspace` is the size of the kernel's workspace in bytes, and `scalar` the dtype of its factors in host memory.
    """

    __slots__ = ("handle", "plan", "scalar", "workspace")

    def __init__(self, handle: Any, operation: Operation, preference: Preference = OWN_CHOICE) -> None:
        self.handle = handle
        try:
            descriptor = self._describe(operation)
            self.scalar = SCALARS[_attribute(handle, descriptor, "SCALAR_TYPE", ctypes.c_int32)]
            self.plan = self._make_plan(descriptor, preference)
            self.workspace = self._required()
        except CutensorError as error:
            if error.name in REFUSALS:
                raise Refused(f"cuTENSOR has no kernel for this operation: {error}") from error
            raise

    def _describe(self, operation: Operation) -> OwnedHandle:
        tensors: list[OwnedHandle] = []
        arguments: list[Any] = []
        for operand in operation.inputs:
            tensors.append(tensor_descriptor(self.handle, operand))
            arguments += [tensors[-1].handle, mode_numbers(operand.modes), operand.operator]
        # The added operand is the last input. If it has the output's layout, the two must share one descriptor object.
        is_alike = operation.inputs[-1]._replace(operator=1) == operation.output
        tensors.append(tensors[-1] if is_alike else tensor_descriptor(self.handle, operation.output))
        arguments += [tensors[-1].handle, mode_numbers(operation.output.modes), *operation.binary]
        descriptor = OwnedHandle("cutensorOperationDescriptor_t", *tensors)
        compute = getattr(cutensor, f"CUTENSOR_COMPUTE_DESC_{COMPUTE[operation.compute]}")
        getattr(cutensor, operation.create)(self.handle, ctypes.byref(descriptor.handle), *arguments, compute)
        return descriptor

    def _make_plan(self, operation: OwnedHandle, preference: Preference) -> OwnedHandle:
        handle, preference_handle = self.handle, OwnedHandle("cutensorPlanPreference_t")
        plan = OwnedHandle("cutensorPlan_t", operation, preference_handle)
        jit, algo = cutensor.cutensorJitMode_t, cutensor.cutensorAlgo_t(preference.algo)
        mode = jit.CUTENSOR_JIT_MODE_DEFAULT if preference.jit else jit.CUTENSOR_JIT_MODE_NONE
        cutensor.cutensorCreatePlanPreference(handle, ctypes.byref(preference_handle.handle), algo, mode)
        attributes = {}
        if preference.kernel_rank is not None:
            attributes["KERNEL_RANK"] = preference.kernel_rank
        if preference.incremental_count:
            attributes["AUTOTUNE_MODE"] = int(cutensor.cutensorAutotuneMode_t.CUTENSOR_AUTOTUNE_MODE_INCREMENTAL)
            attributes["CACHE_MODE"] = int(cutensor.cutensorCacheMode_t.CUTENSOR_CACHE_MODE_PEDANTIC)
            attributes["INCREMENTAL_COUNT"] = preference.incremental_count
        elif preference[:3] != OWN_CHOICE[:3]:
            # cuTENSOR's plan cache is keyed by the operation alone: it might return a plan with another preference.
            attributes["CACHE_MODE"] = int(cutensor.cutensorCacheMode_t.CUTENSOR_CACHE_MODE_NONE)
        for name, value in attributes.items():
            attribute = cutensor.cutensorPlanPreferenceAttribute_t[f"CUTENSOR_PLAN_PREFERENCE_{name}"]
            number = ctypes.c_int32(value)
            cutensor.cutensorPlanPreferenceSetAttribute(
                handle, preference_handle.handle, attribute, ctypes.byref(number), 4
            )
        limit = preference.workspace
        if limit is None:
            suggested, kind = ctypes.c_uint64(), cutensor.cutensorWorksizePreference_t.CUTENSOR_WORKSPACE_DEFAULT
            cutensor.cutensorEstimateWorkspaceSize(
                handle, operation.handle, preference_handle.handle, kind, ctypes.byref(suggested)
            )
            limit = suggested.value
        cutensor.cutensorCreatePlan(
            handle, ctypes.byref(plan.handle), operation.handle, preference_handle.handle, limit
        )
        return plan

    def _required(self) -> int:
        size = ctypes.c_uint64()
        attribute = cutensor.cutensorPlanAttribute_t.CUTENSOR_PLAN_REQUIRED_WORKSPACE
        cutensor.cutensorPlanGetAttribute(self.handle, self.plan.handle, attribute, ctypes.byref(size), 8)
        return size.value


def tensor_descriptor(handle: Any, operand: TensorOperand) -> OwnedHandle:
    """The descriptor of a tensor."""
    descriptor, count = OwnedHandle("cutensorTensorDescriptor_t"), len(operand.modes)
    kind: Any = ctypes.c_int64 * max(count, 1)
    extents, strides = kind(*operand.extents), kind(*operand.strides)
    dtype = cutensor.cudaDataType_t(operand.dtype.cuda)
    alignment = min(operand.alignment, ALIGNMENT)
    cutensor.cutensorCreateTensorDescriptor(
        handle, ctypes.byref(descriptor.handle), count, extents, strides, dtype, alignment
    )
    return descriptor


def mode_numbers(modes: Sequence[str]) -> Any:
    """Modes as the integers that cuTENSOR names them by."""
    kind: Any = ctypes.c_int32 * max(len(modes), 1)
    return kind(*map(ord, modes))


def _attribute(handle: Any, described: OwnedHandle, name: str, kind: Any) -> int:
    """An attribute of an operation's descriptor."""
    value = kind()
    attribute = cutensor.cutensorOperationDescriptorAttribute_t[f"CUTENSOR_OPERATION_DESCRIPTOR_{name}"]
    size = ctypes.sizeof(kind)
    cutensor.cutensorOperationDescriptorGetAttribute(handle, described.handle, attribute, ctypes.byref(value), size)
    return int(value.value)
