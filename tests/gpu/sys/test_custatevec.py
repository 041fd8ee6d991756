"""cuStateVec: gates one after the other make a GHZ state, whose amplitudes are known."""

from __future__ import annotations

from ctypes import byref, c_int32, c_size_t

import numpy as np
import pytest

from cudabind.sys import custatevec as sv

LIBRARIES = ("cuda", "custatevec")
QUBITS = 9
KIND, COMPUTE = sv.cudaDataType_t.CUDA_C_64F, sv.custatevecComputeType_t.CUSTATEVEC_COMPUTE_64F
ROWS = sv.custatevecMatrixLayout_t.CUSTATEVEC_MATRIX_LAYOUT_ROW
HADAMARD = np.array([[1, 1], [1, -1]], np.complex128) / np.sqrt(2)
NOT = np.array([[0, 1], [1, 0]], np.complex128)


@pytest.fixture
def handle(gpu):
    return gpu.make(sv.custatevecHandle_t, sv.custatevecCreate, sv.custatevecDestroy)


def apply(gpu, handle, state, gate, target, control=None):
    """A gate of one qubit, controlled by another."""
    size, controls = c_size_t(), (c_int32 * 1)(control or 0)
    matrix, count = gate.ctypes.data, 0 if control is None else 1
    sv.custatevecApplyMatrixGetWorkspaceSize(
        handle, KIND, QUBITS, matrix, KIND, ROWS, 0, 1, count, COMPUTE, byref(size)
    )
    sv.custatevecApplyMatrix(
        handle, state.ptr, KIND, QUBITS, matrix, KIND, ROWS, 0, (c_int32 * 1)(target), 1,
        controls if count else None, None, count, COMPUTE, gpu.workspace(size.value), size.value,
    )  # fmt: skip


def test_the_amplitudes_of_ghz_are_those_of_all_zeros_and_all_ones(gpu, handle):
    start = np.zeros(2**QUBITS, np.complex128)
    start[0] = 1
    state = gpu.array(start)
    apply(gpu, handle, state, HADAMARD, 0)
    for qubit in range(1, QUBITS):
        apply(gpu, handle, state, NOT, qubit, qubit - 1)
    expected = np.zeros_like(start)
    expected[[0, -1]] = 1 / np.sqrt(2)
    assert np.abs(state.numpy() - expected).max() < 1e-15 * 4


def test_gates_are_products_of_matrices(gpu, handle, rng):
    start = rng.standard_normal(2**QUBITS) + 1j * rng.standard_normal(2**QUBITS)
    state = gpu.array(start)
    gate = rng.standard_normal((2, 2)) + 1j * rng.standard_normal((2, 2))
    apply(gpu, handle, state, gate, 3)
    expected = np.einsum("ij,ajb->aib", gate, start.reshape(2 ** (QUBITS - 4), 2, 8)).ravel()
    assert np.abs(state.numpy() - expected).max() < 1e-14
