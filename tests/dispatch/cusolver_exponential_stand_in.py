"""The kernels between the products of a matrix exponential, written down anew, over memory of the host."""

# ruff: noqa: ARG001 - functions have the arguments of the kernels

from math import ceil, factorial, log2

import numpy as np

from dispatch.libraries.cusolver.matrix import Matrix


def install(products):
    """Add these kernels to those of a stand-in."""
    kernels = (scale_to, pade_sums, sum_and_difference, keep_squares, join_status)
    products.KERNELS.update({kernel.__name__: kernel for kernel in kernels})


def dense(vector, place, number, n, dtype):
    """A matrix of columns that are one behind another."""
    assert not isinstance(place, Matrix)
    return vector(place, number, n * n, dtype).reshape(n, n).T


def number_of(vector, place, number):
    return vector(place, number, 1, np.int32)


def scale_to(matrix, vector, dtype, number, a, n, norms, theta, most, squarings, status):
    norm = float(vector(norms, number, 1)[0])
    wrong, power = 2, 0
    if np.isfinite(norm):
        power = max(0, ceil(log2(norm / theta))) if norm else 0
        wrong = int(power > most)
    found = dense(vector, a, number, n, dtype)
    found[...] = 0 if wrong else found / 2.0**power
    number_of(vector, squarings, number)[0] = 0 if wrong else power
    number_of(vector, status, number)[0] = wrong


def coefficients(dtype):
    degree = 13 if np.dtype(dtype).name in ("float64", "complex128") else 7
    return [factorial(2 * degree - j) // (factorial(degree - j) * factorial(j)) for j in range(degree + 1)]


def pade_sums(matrix, vector, dtype, number, n, second, fourth, sixth, odd, even):
    two, four, six, odd, even = (dense(vector, one, number, n, dtype) for one in (second, fourth, sixth, odd, even))
    b, one = coefficients(dtype), np.eye(n)
    odd[...] = b[7] * six + b[5] * four + b[3] * two + b[1] * one
    even[...] = b[6] * six + b[4] * four + b[2] * two + b[0] * one
    if len(b) > 8:
        high, other = (b[k] * six + b[k - 2] * four + b[k - 4] * two for k in (13, 12))
        two[...], four[...] = high, other


def sum_and_difference(matrix, vector, dtype, number, n, u, v):
    one, other = matrix(u, number), dense(vector, v, number, n, dtype)
    one[...], other[...] = other + one, other - one


def keep_squares(matrix, vector, dtype, number, n, squarings, place, squares, x):
    if number_of(vector, squarings, number)[0] > place:
        matrix(x, number)[...] = dense(vector, squares, number, n, dtype)


def join_status(matrix, vector, dtype, number, status, info):
    said, found = number_of(vector, status, number)[0], number_of(vector, info, number)
    found[0] = said or (found[0] and found[0] + 2)
