"""Systems of linear equations that iterations solve, and requests for that."""

import numpy as np
import scipy.sparse as sp

import dispatch as dp
from dispatch.ops.sparse.cases_krylov import KRYLOV


def poisson(*extents):
    lines = [sp.diags_array([-np.ones(n - 1), 2 * np.ones(n), -np.ones(n - 1)], offsets=[-1, 0, 1]) for n in extents]
    found = lines[0]
    for line in lines[1:]:
        found = sp.kron(found, sp.eye_array(line.shape[0])) + sp.kron(sp.eye_array(found.shape[0]), line)
    return found.tocsr()


def convection(n, speed=0.7):
    """Convection and diffusion on a square: not symmetric."""
    along = sp.diags_array(
        [-(1 + speed) * np.ones(n - 1), 2 * np.ones(n), -(1 - speed) * np.ones(n - 1)], offsets=[-1, 0, 1]
    )
    return (sp.kron(along, sp.eye_array(n)) + sp.kron(sp.eye_array(n), along)).tocsr()


def request_of(op, a, b, x0=None, dtype="f64", **choices):
    dev = dp.device("host")
    matrix = dp.sparse.sparse_tensor(sp.csr_array(a).astype(dp.keys.Dtype.of(dtype).numpy))
    start = None if x0 is None else dev.array(x0, dtype)
    if "M" in choices:
        choices["M"] = dev.array(choices["M"], dtype)
    return KRYLOV[op](*matrix, dev.array(b, dtype), start, **choices)
