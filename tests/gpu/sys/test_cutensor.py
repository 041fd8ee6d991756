"""cuTENSOR: a contraction, a reduction, a permutation and an elementwise sum, each as descriptor, plan and execution.

Axes are named by numbers, here those of letters, as einsum names them. An operand is told by its strides.
"""

from __future__ import annotations

from ctypes import byref, c_int32, c_int64, c_uint64, sizeof

import numpy as np
import pytest

from cudabind.errors import CutensorError
from cudabind.sys import cutensor as ct

LIBRARIES = ("cutensor",)
OP = ct.cutensorOperator_t
SAME = OP.CUTENSOR_OP_IDENTITY
TYPE = {
    "float32": ct.cudaDataType_t.CUDA_R_32F,
    "float64": ct.cudaDataType_t.CUDA_R_64F,
    "complex128": ct.cudaDataType_t.CUDA_C_64F,
}
ALIGNMENT = 128  # bytes; device memory is allocated at multiples of 256


@pytest.fixture
def handle(gpu):
    return gpu.make(ct.cutensorHandle_t, ct.cutensorCreate, ct.cutensorDestroy)


@pytest.fixture
def tensor(gpu, handle):
    """`tensor(memory, "abc")`: descriptor and modes, the two arguments by which every operation knows an operand."""

    def make(memory, modes):
        rank, strides = len(memory.shape), np.empty(memory.shape, memory.dtype).strides
        extents = (c_int64 * rank)(*memory.shape)
        steps = (c_int64 * rank)(*(stride // memory.dtype.itemsize for stride in strides))
        made = gpu.make(
            ct.cutensorTensorDescriptor_t,
            lambda made: ct.cutensorCreateTensorDescriptor(
                handle, made, rank, extents, steps, TYPE[memory.dtype.name], ALIGNMENT
            ),
            ct.cutensorDestroyTensorDescriptor,
        )
        return made, (c_int32 * rank)(*map(ord, modes))

    return make


@pytest.fixture
def operation(gpu, handle):
    """`operation(create, …)`: the descriptor of an operation, by the function that creates it and its arguments."""

    def make(create, *arguments):
        return gpu.make(
            ct.cutensorOperationDescriptor_t,
            lambda made: create(handle, made, *arguments),
            ct.cutensorDestroyOperationDescriptor,
        )

    return make


@pytest.fixture
def plan(gpu, handle):
    """`made, workspace, size = plan(operation)`."""

    def make(made):
        preference = gpu.make(
            ct.cutensorPlanPreference_t,
            lambda new: ct.cutensorCreatePlanPreference(
                handle, new, ct.cutensorAlgo_t.CUTENSOR_ALGO_DEFAULT, ct.cutensorJitMode_t.CUTENSOR_JIT_MODE_NONE
            ),
            ct.cutensorDestroyPlanPreference,
        )
        limit, size = c_uint64(), c_uint64()
        usual = ct.cutensorWorksizePreference_t.CUTENSOR_WORKSPACE_DEFAULT
        ct.cutensorEstimateWorkspaceSize(handle, made, preference, usual, byref(limit))
        found = gpu.make(
            ct.cutensorPlan_t,
            lambda new: ct.cutensorCreatePlan(handle, new, made, preference, limit.value),
            ct.cutensorDestroyPlan,
        )
        needed = ct.cutensorPlanAttribute_t.CUTENSOR_PLAN_REQUIRED_WORKSPACE
        ct.cutensorPlanGetAttribute(handle, found, needed, byref(size), sizeof(size))
        return found, gpu.workspace(size), size.value

    return make


def random(rng, shape, dtype):
    values = rng.standard_normal(shape)
    return (values + 1j * rng.standard_normal(shape) if np.issubdtype(dtype, np.complexfloating) else values).astype(
        dtype
    )


@pytest.mark.parametrize(
    ("dtype", "compute", "op"),
    [
        ("float32", "32F", "IDENTITY"),
        ("float64", "64F", "IDENTITY"),
        ("complex128", "64F", "CONJ"),
    ],
)
def test_a_contraction_over_two_axes(gpu, handle, tensor, operation, plan, rng, close, dtype, compute, op):
    extents = {"m": 7, "u": 5, "n": 6, "v": 9, "h": 11, "k": 4}
    shapes = {
        name: tuple(extents[mode] for mode in modes) for name, modes in (("a", "mhkn"), ("b", "ukvh"), ("c", "mnuv"))
    }
    a, b, c = (random(rng, shapes[name], dtype) for name in "abc")
    alpha, beta = random(rng, (2, 1), dtype)
    d_d, c_desc = gpu.poisoned(c.shape, c.dtype), tensor(gpu.array(c), "mnuv")
    d_a, d_b = gpu.array(a), gpu.array(b)
    made = operation(
        *(ct.cutensorCreateContraction, *tensor(d_a, "mhkn"), OP[f"CUTENSOR_OP_{op}"], *tensor(d_b, "ukvh"), SAME),
        *(*c_desc, SAME, *c_desc, getattr(ct, f"CUTENSOR_COMPUTE_DESC_{compute}")),
    )
    scalar, wanted = c_int32(-1), ct.cutensorOperationDescriptorAttribute_t.CUTENSOR_OPERATION_DESCRIPTOR_SCALAR_TYPE
    ct.cutensorOperationDescriptorGetAttribute(handle, made, wanted, byref(scalar), sizeof(scalar))
    assert scalar.value == TYPE[dtype], "alpha and beta are expected in another type"
    chosen, workspace, size = plan(made)
    ct.cutensorContract(
        *(handle, chosen, alpha.ctypes.data, d_a.ptr, d_b.ptr, beta.ctypes.data, gpu.array(c).ptr, d_d.ptr),
        *(workspace, size, None),
    )
    wide = np.complex128 if dtype == "complex128" else np.float64
    a, b, c = (x.astype(wide) for x in (a.conj() if op == "CONJ" else a, b, c))
    expected = alpha * np.einsum("mhkn,ukvh->mnuv", a, b) + beta * c
    magnitude = abs(alpha) * np.einsum("mhkn,ukvh->mnuv", np.abs(a), np.abs(b)) + abs(beta) * np.abs(c)
    terms = extents["h"] * extents["k"]
    close(d_d.numpy(), expected, (2 * terms + 4) * np.finfo(dtype).eps * magnitude)


@pytest.mark.parametrize("op", ["ADD", "MAX"])
def test_a_reduction_of_two_axes(gpu, handle, tensor, operation, plan, rng, close, op):
    a = rng.standard_normal((8, 13, 5, 17))
    d_a, d_d, one, zero = gpu.array(a), gpu.poisoned((17, 13), np.float64), np.ones(1), np.zeros(1)
    out = tensor(d_d, "zb")
    made = operation(
        *(ct.cutensorCreateReduction, *tensor(d_a, "abcz"), SAME, *out, SAME, *out),
        *(OP[f"CUTENSOR_OP_{op}"], ct.CUTENSOR_COMPUTE_DESC_64F),
    )
    chosen, workspace, size = plan(made)
    ct.cutensorReduce(
        *(handle, chosen, one.ctypes.data, d_a.ptr, zero.ctypes.data, d_d.ptr, d_d.ptr, workspace, size, None),
    )
    expected = {"ADD": a.sum(axis=(0, 2)), "MAX": a.max(axis=(0, 2))}[op].T
    bound = {"ADD": 8 * 5 * np.finfo(np.float64).eps * np.abs(a).sum(axis=(0, 2)).T, "MAX": 0}[op]
    close(d_d.numpy(), expected, bound)


def test_a_permutation_is_exact(gpu, handle, tensor, operation, plan, rng):
    a = rng.standard_normal((6, 10, 7, 3)).astype(np.float32)
    d_a, d_b, two = gpu.array(a), gpu.poisoned((3, 7, 6, 10), np.float32), np.array([2], np.float32)
    made = operation(
        *(ct.cutensorCreatePermutation, *tensor(d_a, "abcd"), SAME, *tensor(d_b, "dcab")),
        ct.CUTENSOR_COMPUTE_DESC_32F,
    )
    ct.cutensorPermute(handle, plan(made)[0], two.ctypes.data, d_a.ptr, d_b.ptr, None)
    assert np.array_equal(d_b.numpy(), 2 * a.transpose(3, 2, 0, 1))


def test_a_sum_of_tensors_whose_axes_are_in_another_order(gpu, handle, tensor, operation, plan, rng, close):
    a, c = rng.standard_normal((9, 4, 15)), rng.standard_normal((15, 9, 4))
    alpha, gamma = rng.standard_normal((2, 1))
    d_a, d_c, d_d = gpu.array(a), gpu.array(c), gpu.poisoned(c.shape, np.float64)
    out = tensor(d_c, "zxy")
    made = operation(
        *(ct.cutensorCreateElementwiseBinary, *tensor(d_a, "xyz"), OP.CUTENSOR_OP_ABS, *out, SAME, *out),
        *(OP.CUTENSOR_OP_ADD, ct.CUTENSOR_COMPUTE_DESC_64F),
    )
    ct.cutensorElementwiseBinaryExecute(
        handle, plan(made)[0], alpha.ctypes.data, d_a.ptr, gamma.ctypes.data, d_c.ptr, d_d.ptr, None
    )
    terms = alpha * np.abs(a).transpose(2, 0, 1), gamma * c
    close(d_d.numpy(), sum(terms), 4 * np.finfo(np.float64).eps * (np.abs(terms[0]) + np.abs(terms[1])))


def test_an_axis_that_only_the_result_has_is_refused_by_name(gpu, tensor, operation):
    a, b, d = (gpu.poisoned(shape, np.float64) for shape in ((4, 5), (5, 3), (4, 3, 2)))
    out = tensor(d, "mnz")
    with pytest.raises(CutensorError) as caught:
        operation(
            *(ct.cutensorCreateContraction, *tensor(a, "mk"), SAME, *tensor(b, "kn"), SAME, *out, SAME, *out),
            ct.CUTENSOR_COMPUTE_DESC_64F,
        )
    assert caught.value.name == "CUTENSOR_STATUS_INVALID_VALUE"
    assert caught.value.function == "cutensorCreateContraction"
    # cuTENSOR's words for a status are its name; what it objects to, it writes to its log.
    assert caught.value.text == ct.cutensorGetErrorString(caught.value.status) == caught.value.name
