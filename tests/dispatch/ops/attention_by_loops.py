"""Attention by plain loops over queries and keys, and operands that are drawn for it."""

import itertools

import numpy as np
import pytest
from scipy.special import log_softmax, logsumexp

import dispatch as dp
from dispatch.ops.sdpa import Diagonal

MASKS = [
    {},
    {"right_bound": 0},
    {"right_bound": 2},
    {"left_bound": 3},
    {"left_bound": 2, "right_bound": 0},
    {"right_bound": 0, "diagonal": Diagonal.BOTTOM_RIGHT},
    {"left_bound": 3, "right_bound": 1, "diagonal": Diagonal.BOTTOM_RIGHT},
]


@pytest.fixture
def host():
    return dp.device("host")


def by_loops(q, k, v, scale, sees, bias):
    """The definition, query by query."""
    b, h, sq, _ = q.shape
    out, stats = np.zeros((b, h, sq, v.shape[3])), np.full((b, h, sq, 1), -np.inf)
    group_k, group_v = h // k.shape[1], h // v.shape[1]
    for i, j, row in itertools.product(range(b), range(h), range(sq)):
        seen = [c for c in range(k.shape[2]) if sees(row, c)]
        if not seen:
            continue
        scores = np.array([scale * q[i, j, row] @ k[i, j // group_k, c] + bias[i, j, row, c] for c in seen])
        stats[i, j, row] = logsumexp(scores)
        out[i, j, row] = np.exp(log_softmax(scores)) @ v[i, j // group_v, seen]
    return out, stats


def drawn(rng):
    shapes = {"q": (9, 4, 8), "k": (13, 2, 8), "v": (13, 1, 6)}
    return {name: rng.standard_normal(shape).astype(np.float16).astype(float) for name, shape in shapes.items()}
