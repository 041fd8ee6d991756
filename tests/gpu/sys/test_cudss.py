"""cuDSS: sparse systems solved directly, against NumPy; and a second right side by the same factors."""

from __future__ import annotations

import numpy as np
import pytest

from cudabind.sys import cudss

LIBRARIES = ("cuda", "cudss")
N = 200
INT, DOUBLE = cudss.cudaDataType_t.CUDA_R_32I, cudss.cudaDataType_t.CUDA_R_64F
COLUMNS = cudss.cudssLayout_t.CUDSS_LAYOUT_COL_MAJOR
PHASES = cudss.cudssPhase_t


@pytest.fixture
def handle(gpu):
    return gpu.make(cudss.cudssHandle_t, cudss.cudssCreate, cudss.cudssDestroy)


@pytest.fixture(params=["GENERAL", "SPD"])
def system(request, sparse_matrix):
    """The matrix, and what cuDSS is told of it."""
    a = sparse_matrix(N, N) + 4 * np.eye(N)
    if request.param == "SPD":
        a = a @ a.T + np.eye(N)
    return a, getattr(cudss.cudssMatrixType_t, f"CUDSS_MTYPE_{request.param}")


def as_matrix(gpu, array):
    """A dense descriptor over columns."""
    return gpu.make(
        cudss.cudssMatrix_t,
        lambda made: cudss.cudssMatrixCreateDn(made, *array.shape, array.shape[0], array.ptr, DOUBLE, COLUMNS),
        cudss.cudssMatrixDestroy,
    )


def test_a_direct_solve_is_numpys(gpu, handle, system, csr, rng, solves):
    a, kind = system
    offsets, columns, values = csr(a)
    d = [gpu.array(each) for each in (offsets, columns, values)]
    types = (INT, DOUBLE) if cudss._lib.version() < "1" else (INT, INT, DOUBLE)
    view, base = cudss.cudssMatrixViewType_t.CUDSS_MVIEW_FULL, cudss.cudssIndexBase_t.CUDSS_BASE_ZERO
    matrix = gpu.make(
        cudss.cudssMatrix_t,
        lambda made: cudss.cudssMatrixCreateCsr(
            made, N, N, len(values), d[0].ptr, None, d[1].ptr, d[2].ptr, *types, kind, view, base
        ),
        cudss.cudssMatrixDestroy,
    )
    config = gpu.make(cudss.cudssConfig_t, cudss.cudssConfigCreate, cudss.cudssConfigDestroy)
    data = gpu.make(
        cudss.cudssData_t,
        lambda made: cudss.cudssDataCreate(handle, made),
        lambda made: cudss.cudssDataDestroy(handle, made),
    )
    b = rng.standard_normal((N, 3))
    d_b, d_x = gpu.array(b, order="F"), gpu.poisoned(b.shape, np.float64, "F")
    right, solution = as_matrix(gpu, d_b), as_matrix(gpu, d_x)
    for phase in (PHASES.CUDSS_PHASE_ANALYSIS, PHASES.CUDSS_PHASE_FACTORIZATION, PHASES.CUDSS_PHASE_SOLVE):
        cudss.cudssExecute(handle, phase, config, data, matrix, solution, right)
    solves(d_x.numpy(), a, b)
    again = rng.standard_normal(b.shape)
    d_b.fill(again)
    cudss.cudssExecute(handle, PHASES.CUDSS_PHASE_SOLVE, config, data, matrix, solution, right)
    solves(d_x.numpy(), a, again)
