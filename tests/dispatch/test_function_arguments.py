"""Arguments of SciPy-like functions that lead to several requests: errors have the function's own name for them."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest

sp = pytest.importorskip("scipy.sparse")
S, F, T = dp.sparse, dp.fft, dp.tensors
A = sp.eye_array(4, format="csr")
B, X, SECTIONS = np.ones(4), np.ones((4, 4)), ((2, 2), (2, 2))
BLOCKS = dp.BlockSparseTensor

CALLS = [
    # of dispatch.sparse
    (lambda: S.sparse_tensor(A, device=0), "device: got 0"),
    (lambda: S.sparse_tensor(A, validate="no"), "validate: got 'no'; expected a bool"),
    (lambda: S.tosell(A, device=0), "device: got 0"),
    (lambda: S.toblocked_ell(A, block=2, device=0), "device: got 0"),
    (lambda: S.to_scipy(X), "a: got .*expected a SparseTensor"),
    (lambda: S.to_torch(None), "a: got None; expected a SparseTensor"),
    (lambda: S.spsolve_triangular(A, [1.0] * 4), "b: got a list"),
    (lambda: S.spsolve_triangular(A, B, "upper"), "lower: got 'upper'; expected a bool"),
    (lambda: S.spsolve_triangular(A, B, unit_diagonal="no"), "unit_diagonal: got 'no'; expected a bool"),
    (lambda: S.spmv(3, B), "a: got an int; expected a sparse matrix"),
    (lambda: S.spgemm(A, 3), "b: got an int; expected a sparse matrix"),
    (lambda: S.sddmm(3, X, X), "c: got an int; expected a sparse matrix"),
    (lambda: S.cg(3, B), "A: got an int; expected a sparse matrix"),
    (lambda: S.spsolve(3, B), "A: got an int; expected a sparse matrix"),
    (lambda: S.splu(3), "A: got an int; expected a sparse matrix"),
    (lambda: S.ilu0(3), "A: got an int; expected a sparse matrix"),
    (lambda: S.block_jacobi(3, 2), "A: got an int; expected a sparse matrix"),
    # of axes and numbers of points
    (lambda: F.fft2(X, s=4), r"s: got 4; expected a number for each of the 2 axes \(-2, -1\)"),
    (lambda: F.fftn(X, axes=np.array(0.5)), "axes: got "),
    (lambda: F.fftshift(X, axes=""), "axes: got ''"),
    (lambda: F.fftshift(X, axes={}), "axes: got {}"),
    (lambda: dp.dft(X, "c2c", s=4, axes=(0, 1)), "s: got 4; expected a number for each of the 2 axes"),
    (lambda: dp.signal.fftconvolve(B, B, axes=np.array(0.5)), "axes: got "),
    (lambda: T.transpose(X, axes=1), "axes: got 1; expected each of 2 axes"),
    (lambda: T.transpose(X, axes=0.5), "axes: got 0.5"),
    # of arrays and other values
    (lambda: dp.signal.fftconvolve(B.astype(object), B), "in1: got .*expected a dtype"),
    (lambda: dp.signal.stft(B, nperseg=2, detrend=B), "detrend: got "),
    (lambda: dp.signal.stft(B, nperseg=2, window=()), r"window: got \(\); expected a window name"),
    (lambda: dp.signal.istft(X.astype(complex), nperseg=B), "nperseg: got .*expected a whole number"),
    (lambda: F.fft(B, load=B), "load: got "),
    (lambda: dp.linalg.lu_factor(X, check=B), "check: got .*expected a bool"),
    (lambda: dp.structured.compress(np.zeros((16, 16), "f2"), validate=B), "validate: got .*expected a bool"),
    (lambda: dp.random.Generator(1, device="host").multinomial(3, [1.0], out=True), "out: got True; expected a Tensor"),
    (lambda: BLOCKS.from_dense(X, 4), "sections: got 4"),
    (lambda: BLOCKS.from_dense(X, SECTIONS, 4), "blocks: got 4"),
    (lambda: BLOCKS.from_dense(X, SECTIONS, None, 0), "device: got 0"),
    (lambda: BLOCKS.from_blocks([(0, 0)], SECTIONS), "blocks: got .*expected a Mapping"),
    (lambda: BLOCKS.from_blocks({(0, 0): X[:2, :2]}, SECTIONS, 0), "device: got 0"),
]


@pytest.mark.parametrize(("call", "said"), CALLS, ids=[said for _, said in CALLS])
def test_it_is_refused_by_the_name_that_the_function_has_for_it(call, said):
    with pytest.raises(BadRequest, match=f"^{said}"):
        call()


def test_what_numpy_takes_for_axes_is_taken():
    x = dp.device("host").array(X)  # another test may have closed an earlier one
    shifted = np.fft.fftshift(X)
    for axes in ([0, 1], np.array([0, 1]), range(2), (np.int64(0), 1)):
        np.testing.assert_array_equal(F.fftshift(x, axes).numpy(), shifted)
        assert F.fftn(x, axes=axes).shape == (4, 4)
        assert dp.signal.fftconvolve(x, x, axes=axes).shape == (7, 7)
        assert T.transpose(x, axes).shape == (4, 4)
