"""cuPauliProp: a rotation turns Pauli strings as trigonometry says, and back; their expectation in the zero state."""

from __future__ import annotations

from ctypes import byref, c_double, c_int32, c_int64

import numpy as np
import pytest

from cudabind import driver
from cudabind.sys import cupauliprop as prop

LIBRARIES = ("cuda", "cupauliprop")
QUBITS, ROOM, LIMIT, ANGLE = 3, 64, 1 << 26, 0.7
DEVICE = prop.cupaulipropMemspace_t.CUPAULIPROP_MEMSPACE_DEVICE
SCRATCH = prop.cupaulipropWorkspaceKind_t.CUPAULIPROP_WORKSPACE_SCRATCH
ANY_ORDER = prop.cupaulipropSortOrder_t.CUPAULIPROP_SORT_ORDER_NONE
NO_STREAM = prop.cudaStream_t()
Z0, Z0Z1, X2, Y0, Y0Z1 = (0, 1), (0, 3), (4, 0), (1, 1), (1, 3)  # X bits and Z bits, qubit 0 the lowest


@pytest.fixture
def handle(gpu):
    if prop._lib.version() < "0.5":
        pytest.skip("this test is written for cuPauliProp 0.5, whose trace is a pair of numbers")
    return gpu.make(prop.cupaulipropHandle_t, prop.cupaulipropCreate, prop.cupaulipropDestroy)


@pytest.fixture
def work(gpu, handle):
    return gpu.make(
        prop.cupaulipropWorkspaceDescriptor_t,
        lambda made: prop.cupaulipropCreateWorkspaceDescriptor(handle, made),
        prop.cupaulipropDestroyWorkspaceDescriptor,
    )


class Expansion:
    """A sum of Pauli strings, {(X bits, Z bits): coefficient}, in device memory with room for more of them."""

    def __init__(self, gpu, handle, terms):
        bits, factors = np.zeros((ROOM, 2), np.uint64), np.zeros(ROOM)
        bits[: len(terms)], factors[: len(terms)] = list(terms) or 0, list(terms.values()) or 0
        self.gpu, self.handle, self.bits, self.factors = gpu, handle, gpu.array(bits), gpu.array(factors)
        self.expansion = gpu.make(
            prop.cupaulipropPauliExpansion_t,
            lambda made: prop.cupaulipropCreatePauliExpansion(
                handle, QUBITS, self.bits.ptr, self.bits.nbytes, self.factors.ptr, self.factors.nbytes,
                prop.cudaDataType_t.CUDA_R_64F, len(terms), ANY_ORDER, 0, made,
            ),
            prop.cupaulipropDestroyPauliExpansion,
        )  # fmt: skip

    def __len__(self):
        count = c_int64(-1)
        prop.cupaulipropPauliExpansionGetNumTerms(self.handle, self.expansion, byref(count))
        return count.value

    def view(self):
        """All of its terms."""
        return self.gpu.make(
            prop.cupaulipropPauliExpansionView_t,
            lambda made: prop.cupaulipropPauliExpansionGetContiguousRange(
                self.handle, self.expansion, 0, len(self), made
            ),
            prop.cupaulipropDestroyPauliExpansionView,
        )

    def terms(self):
        count = len(self)
        strings = [tuple(map(int, string)) for string in self.bits.numpy()[:count]]
        assert len(set(strings)) == count  # duplicates were not allowed
        return dict(zip(strings, self.factors.numpy()[:count], strict=True))


def give_memory(gpu, handle, work):
    size = c_int64()
    prop.cupaulipropWorkspaceGetMemorySize(handle, work, DEVICE, SCRATCH, byref(size))
    assert 0 <= size.value <= LIMIT
    prop.cupaulipropWorkspaceSetMemory(handle, work, DEVICE, SCRATCH, gpu.workspace(size.value), size.value)


def applied(gpu, handle, work, expansion, gate, adjoint):
    view, out = expansion.view(), Expansion(gpu, handle, {})
    bits, factors = c_int64(), c_int64()
    prop.cupaulipropPauliExpansionViewPrepareOperatorApplication(
        handle, view, gate, ANY_ORDER, 0, 0, None, LIMIT, byref(bits), byref(factors), work
    )
    assert bits.value <= out.bits.nbytes
    assert factors.value <= out.factors.nbytes
    give_memory(gpu, handle, work)
    prop.cupaulipropPauliExpansionViewComputeOperatorApplication(
        handle, view, out.expansion, gate, adjoint, ANY_ORDER, 0, 0, None, work, NO_STREAM
    )
    return out


def expectation(gpu, handle, work, expansion):
    view, part, power = expansion.view(), c_double(np.nan), c_double(np.nan)
    prop.cupaulipropPauliExpansionViewPrepareTraceWithZeroState(handle, view, LIMIT, work)
    give_memory(gpu, handle, work)
    prop.cupaulipropPauliExpansionViewComputeTraceWithZeroState(
        handle, view, byref(part), byref(power), work, NO_STREAM
    )
    driver.cuCtxSynchronize()  # the trace is written when the stream is done
    return part.value * 2.0**power.value


def test_a_rotation_turns_pauli_strings(gpu, handle, work, rng):
    a, b, c = rng.uniform(0.5, 2, 3)
    start = Expansion(gpu, handle, {Z0: a, Z0Z1: b, X2: c})
    assert abs(expectation(gpu, handle, work, start) - (a + b)) < 1e-14
    gate = gpu.make(
        prop.cupaulipropQuantumOperator_t,
        lambda made: prop.cupaulipropCreatePauliRotationGateOperator(
            handle,
            ANGLE,
            1,
            (c_int32 * 1)(0),
            (c_int32 * 1)(int(prop.cupaulipropPauliKind_t.CUPAULIPROP_PAULI_X)),
            made,
        ),
        prop.cupaulipropDestroyOperator,
    )
    turned = applied(gpu, handle, work, start, gate, 1)
    terms = turned.terms()
    assert set(terms) == {Z0, Z0Z1, X2, Y0, Y0Z1}
    cos, sin = np.cos(ANGLE), np.sin(ANGLE)
    expected = {Z0: a * cos, Z0Z1: b * cos, X2: c}  # exp(iθX/2)·Z·exp(-iθX/2) = cos θ·Z + sin θ·Y
    assert all(abs(terms[string] - value) < 1e-14 for string, value in expected.items())
    assert np.sign(terms[Y0]) == np.sign(terms[Y0Z1])
    assert abs(abs(terms[Y0]) - a * sin) < 1e-14
    assert abs(abs(terms[Y0Z1]) - b * sin) < 1e-14
    assert abs(expectation(gpu, handle, work, turned) - (a + b) * cos) < 1e-14
    back = applied(gpu, handle, work, turned, gate, 0).terms()
    assert all(abs(back.pop(string) - value) < 1e-14 for string, value in {Z0: a, Z0Z1: b, X2: c}.items())
    assert all(abs(left) < 1e-14 for left in back.values())  # Y, whose two parts cancel
