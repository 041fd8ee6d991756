"""cuSOLVER's routines of symmetric and Hermitian indefinite matrices over memory of the host: LAPACK's."""

# ruff: noqa: ARG001 - functions have the arguments of the library's

import numpy as np

from dispatch.ops.linalg.reference import lapack

base = None  # the stand-in of the other routines, whose helpers these use
takes_nan = False  # which a test sets that has some in a triangle; it gives finite factors then


def install(stand_in):
    """Add these routines to those of a stand-in."""
    globals()["base"] = stand_in
    stand_in.X.update({"Xhetrf": xhetrf, "Xsytrs": xsytrs, "Xhetrs": xhetrs})
    stand_in.OLDER["sytrf"] = sytrf


def factorize_indefinite(kind, uplo, a, pivots, info):
    """As LAPACK, but for a first column of zeros, of which 12.0 told nothing; beside the triangle is what it used."""
    lower = uplo == base.LOWER
    kept = np.tri(*a.shape, dtype=bool) if lower else np.tri(*a.shape, dtype=bool).T
    assert takes_nan or not np.isnan(a[kept]).any(), "a triangle that is not A's"
    packed, found, status = lapack(f"{kind}trf", a.dtype)(np.nan_to_num(a), lower=lower)
    a[...] = np.where(kept, packed, 7)
    pivots[...] = found
    base.put_info(info, 0 if status == 1 else status)
    base.waited.clear()


def sytrf(dtype, uplo, n, a, lda, pivots, work, size, info):
    assert size == base.WORK
    factorize_indefinite(
        "sy", uplo, base.columns(a, dtype, n, n, lda), base.strided(base.value(pivots), np.int32, (n,), (1,)), info
    )


def xhetrf(uplo, n, kind, a, lda, pivots, other, *rest):
    assert kind == other
    a = base.columns(a, base.DTYPES[kind], n, n, lda)
    assert a.dtype.kind == "c"
    factorize_indefinite("he", uplo, a, base.strided(base.value(pivots), np.int64, (n,), (1,)), rest[-1])


def substitute_indefinite(which, uplo, n, right, kind, a, lda, pivots, other, b, ldb, *rest):
    assert kind == other
    assert rest[1] == rest[3] == base.WORK
    assert base.waited, "the pivots are read beside the stream"
    b = base.columns(b, base.DTYPES[kind], n, right, ldb)
    found = base.strided(base.value(pivots), np.int64, (n,), (1,))
    a = base.columns(a, b.dtype, n, n, lda)
    b[...] = lapack(f"{which}trs", b.dtype)(a, found, b, lower=uplo == base.LOWER)[0]
    base.put_info(rest[-1], 0)


def xsytrs(*arguments):
    substitute_indefinite("sy", *arguments)


def xhetrs(*arguments):
    assert base.DTYPES[arguments[3]].kind == "c"
    substitute_indefinite("he", *arguments)
