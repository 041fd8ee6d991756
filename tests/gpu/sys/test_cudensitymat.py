"""cuDensityMat: norms of states, and an operator of two terms acting on a state of two modes, against NumPy."""

from __future__ import annotations

from ctypes import byref, c_int32, c_int64, c_size_t, c_void_p

import numpy as np
import pytest

from cudabind.sys import cudensitymat as dm

LIBRARIES = ("cuda", "cutensor", "cutensornet", "cudensitymat")
SIZES = (3, 4)
KIND, COMPUTE = dm.cudaDataType_t.CUDA_C_64F, dm.cudensitymatComputeType_t.CUDENSITYMAT_COMPUTE_64F
DEVICE, SCRATCH = (
    dm.cudensitymatMemspace_t.CUDENSITYMAT_MEMSPACE_DEVICE,
    dm.cudensitymatWorkspaceKind_t.CUDENSITYMAT_WORKSPACE_SCRATCH,
)
DENSE = dm.cudensitymatElementaryOperatorSparsity_t.CUDENSITYMAT_OPERATOR_SPARSITY_NONE
PURE = dm.cudensitymatStatePurity_t.CUDENSITYMAT_STATE_PURITY_PURE
LIMIT, NO_STREAM = 1 << 28, dm.cudaStream_t()
SCALAR = dm.cudensitymatWrappedScalarCallback_t, dm.cudensitymatWrappedScalarGradientCallback_t
TENSOR = dm.cudensitymatWrappedTensorCallback_t, dm.cudensitymatWrappedTensorGradientCallback_t


@pytest.fixture
def handle(gpu):
    return gpu.make(dm.cudensitymatHandle_t, dm.cudensitymatCreate, dm.cudensitymatDestroy)


def longs(values):
    return (c_int64 * len(values))(*values)


def number(value):
    return dm.cuDoubleComplex(complex(value).real, complex(value).imag)


def none_of(kinds):
    """NULL for an optional callback and its gradient: a struct of a device kind and a NULL wrapper."""
    return [kind() for kind in kinds]


def random(rng, shape):
    return rng.standard_normal(shape) + 1j * rng.standard_normal(shape)


def state_over(gpu, handle, array):
    """A pure state over device memory."""
    state = gpu.make(
        dm.cudensitymatState_t,
        lambda made: dm.cudensitymatCreateState(handle, PURE, len(SIZES), longs(SIZES), 1, KIND, made),
        dm.cudensitymatDestroyState,
    )
    size = c_size_t()
    dm.cudensitymatStateGetComponentStorageSize(handle, state, 1, byref(size))
    assert size.value == array.nbytes
    dm.cudensitymatStateAttachComponentStorage(handle, state, 1, (c_void_p * 1)(array.ptr), (c_size_t * 1)(size.value))
    return state


def test_the_norm_of_a_state_is_numpys(gpu, handle, rng):
    psi = random(rng, SIZES)
    d_psi, norm = gpu.array(psi, order="F"), gpu.poisoned(1, np.float64)
    dm.cudensitymatStateComputeNorm(handle, state_over(gpu, handle, d_psi), norm.ptr, NO_STREAM)
    assert abs(norm.numpy()[0] / np.linalg.norm(psi) ** 2 - 1) < 1e-14


def elementary(gpu, handle, matrix):
    """A dense operator of one mode."""
    memory = gpu.array(matrix, order="F")
    return gpu.make(
        dm.cudensitymatElementaryOperator_t,
        lambda made: dm.cudensitymatCreateElementaryOperator(
            handle, 1, longs(matrix.shape[:1]), DENSE, 0, None, KIND, memory.ptr, *none_of(TENSOR), made
        ),
        dm.cudensitymatDestroyElementaryOperator,
    )


def test_an_operator_acts_on_a_state(gpu, handle, rng):
    psi, a, b = random(rng, SIZES), random(rng, (3, 3)), random(rng, (4, 4))
    operators = [elementary(gpu, handle, matrix) for matrix in (a, b)]
    term = gpu.make(
        dm.cudensitymatOperatorTerm_t,
        lambda made: dm.cudensitymatCreateOperatorTerm(handle, 2, longs(SIZES), made),
        dm.cudensitymatDestroyOperatorTerm,
    )
    for chosen, modes, factor in ((operators, (0, 1), 2 - 1j), (operators[1:], (1,), 0.5j)):  # of a⊗b and of 1⊗b
        dm.cudensitymatOperatorTermAppendElementaryProduct(
            handle, term, len(chosen), (dm.cudensitymatElementaryOperator_t * len(chosen))(*chosen),
            (c_int32 * len(modes))(*modes), (c_int32 * len(modes))(), number(factor), *none_of(SCALAR),
        )  # fmt: skip
    whole = gpu.make(
        dm.cudensitymatOperator_t,
        lambda made: dm.cudensitymatCreateOperator(handle, 2, longs(SIZES), made),
        dm.cudensitymatDestroyOperator,
    )
    dm.cudensitymatOperatorAppendTerm(handle, whole, term, 0, number(3), *none_of(SCALAR))
    before = random(rng, SIZES)
    d_in, d_out = gpu.array(psi, order="F"), gpu.array(before, order="F")  # to which the action is added
    state, result = state_over(gpu, handle, d_in), state_over(gpu, handle, d_out)
    work = gpu.make(
        dm.cudensitymatWorkspaceDescriptor_t,
        lambda made: dm.cudensitymatCreateWorkspace(handle, made),
        dm.cudensitymatDestroyWorkspace,
    )
    dm.cudensitymatOperatorPrepareAction(handle, whole, state, result, COMPUTE, LIMIT, work, NO_STREAM)
    size = c_size_t()
    dm.cudensitymatWorkspaceGetMemorySize(handle, work, DEVICE, SCRATCH, byref(size))
    assert size.value <= LIMIT
    if size.value:
        dm.cudensitymatWorkspaceSetMemory(handle, work, DEVICE, SCRATCH, gpu.workspace(size.value), size.value)
    dm.cudensitymatOperatorComputeAction(handle, whole, 0.0, 1, 0, None, state, result, work, NO_STREAM)
    expected = before + 3 * ((2 - 1j) * a @ psi @ b.T + 0.5j * psi @ b.T)
    assert np.abs(d_out.numpy() - expected).max() < 1e-12 * np.abs(expected).max()
