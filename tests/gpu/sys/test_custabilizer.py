"""cuStabilizer: errors carried through a Clifford circuit, bit by bit, against the rules of the tableau."""

from __future__ import annotations

from ctypes import byref, c_int64

import numpy as np
import pytest

from cudabind.errors import CustabilizerError
from cudabind.sys import custabilizer as stabilizer

LIBRARIES = ("cuda", "custabilizer")
QUBITS, SHOTS = 4, 96
CIRCUIT = b"H 0\nCNOT 0 1\nS 1\nCZ 1 2\nM 3\n"


@pytest.fixture
def handle(gpu):
    return gpu.make(stabilizer.custabilizerHandle_t, stabilizer.custabilizerCreate, stabilizer.custabilizerDestroy)


def carried(x, z):
    """What CIRCUIT makes of the X and the Z part of the errors of each qubit."""
    x, z = x.copy(), z.copy()
    x[0], z[0] = z[0].copy(), x[0].copy()  # H
    x[1] ^= x[0]  # CNOT: X goes to the target,
    z[0] ^= z[1]  # Z to the control
    z[1] ^= x[1]  # S makes Y of X
    z[1], z[2] = z[1] ^ x[2], z[2] ^ x[1]  # CZ
    return x, z


def test_errors_are_carried_through_a_circuit(gpu, handle, rng):
    size = c_int64()
    stabilizer.custabilizerCircuitSizeFromString(handle, CIRCUIT, byref(size))
    circuit = gpu.make(
        stabilizer.custabilizerCircuit_t,
        lambda made: stabilizer.custabilizerCreateCircuitFromString(
            handle, CIRCUIT, gpu.workspace(size.value), size.value, made
        ),
        stabilizer.custabilizerDestroyCircuit,
    )
    x, z = (rng.integers(0, 2**32, (QUBITS, SHOTS // 32)).astype(np.uint32) for _ in range(2))
    simulator = gpu.make(
        stabilizer.custabilizerFrameSimulator_t,
        lambda made: stabilizer.custabilizerCreateFrameSimulator(handle, QUBITS, SHOTS, 1, SHOTS // 8, made),
        stabilizer.custabilizerDestroyFrameSimulator,
    )
    d_x, d_z, d_m = gpu.array(x), gpu.array(z), gpu.array(np.zeros((1, SHOTS // 32), np.uint32))
    stabilizer.custabilizerFrameSimulatorApplyCircuit(
        handle, simulator, circuit, 0, 5, d_x.ptr, d_z.ptr, d_m.ptr, stabilizer.cudaStream_t()
    )
    expected_x, expected_z = carried(x, z)
    assert np.array_equal(d_x.numpy(), expected_x)
    assert np.array_equal(d_z.numpy()[:3], expected_z[:3])  # what is measured may lose its Z
    assert np.array_equal(d_m.numpy()[0], x[3])  # an X before it flips a measurement


def test_a_circuit_that_is_none_is_refused(gpu, handle):
    """When its size is asked for, or when it is made: which, hangs on the version."""
    wrong = b"NO_SUCH_GATE 0\n"

    def make():
        size, made = c_int64(), stabilizer.custabilizerCircuit_t()
        stabilizer.custabilizerCircuitSizeFromString(handle, wrong, byref(size))
        memory = gpu.workspace(size.value)
        stabilizer.custabilizerCreateCircuitFromString(handle, wrong, memory, size.value, made)

    with pytest.raises(CustabilizerError) as caught:
        make()
    assert caught.value.name.startswith("CUSTABILIZER_STATUS_")
