"""Rejection methods in f64, in CUDA C++: each element uses its own stream and uniform numbers of 53 bits.

Poisson and binomial numbers are drawn here if their variance is too large for a table (alias_table.py), or as parts of
multinomial numbers. distributions.py cites the methods; `reference_distributions.py` does the same steps in NumPy.
"""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["METHODS", "Hat", "binomial_hat", "poisson_hat"]

METHODS = r"""
// Uniform in (0, 1].
__device__ double unit(Draw& d) { return ((pair(d) >> 11) + 1) * 1.1102230246251565e-16; }

__device__ double gaussian(Draw& d)
{
    const double size = sqrt(-2.0 * log(unit(d)));
#ifdef __CUDACC__
    return size * cospi(2 * unit(d));
#else
    return size * cos(6.283185307179586 * unit(d));
#endif
}

// log(k!) by Stirling's series for arguments of at least 10.
__device__ double log_factorial(double k)
{
    double x = k + 1, factor = 1;
    for (; x < 10; x += 1) factor *= x;
    const double r = 1 / (x * x);
    const double rest = (1.0 / 12 - r * (1.0 / 360 - r * (1.0 / 1260 - r * (1.0 / 1680 - r / 1188)))) / x;
    return (x - 0.5) * log(x) - x + 0.9189385332046727 + rest - log(factor);
}

// The constants of Hoermann's transformed rejection for given parameters. For Poisson numbers n is the mean, and
// log_odds its logarithm.
struct Hat { double a, b, center, accept_below, alpha, n, mode, top, log_odds; };

// Poisson numbers with a mean of at least 10.
__device__ double poisson(Draw& d, const Hat& h)
{
    for (;;) {
        const double u = unit(d) - 0.5, v = unit(d), us = 0.5 - (u < 0 ? -u : u);
        const double k = floor((2 * h.a / us + h.b) * u + h.center);
        if (us >= 0.07 && v <= h.accept_below) return k;
        if (k < 0 || (us < 0.013 && v > us)) continue;
        if (log(v * h.alpha / (h.a / (us * us) + h.b)) <= k * h.log_odds - h.n - log_factorial(k)) return k;
    }
}

// Binomial numbers with n p of at least 10.
__device__ double binomial_by_rejection(Draw& d, const Hat& h)
{
    for (;;) {
        const double u = unit(d) - 0.5, v = unit(d), us = 0.5 - (u < 0 ? -u : u);
        const double k = floor((2 * h.a / us + h.b) * u + h.center);
        if (us >= 0.07 && v <= h.accept_below) return k;
        if (!(k >= 0 && k <= h.n)) continue;
        const double height = h.top - log_factorial(k) - log_factorial(h.n - k);
        if (log(v * h.alpha / (h.a / (us * us) + h.b)) <= height + (k - h.mode) * h.log_odds) return k;
    }
}

// The constants for parameters that are computed by the thread.
__device__ Hat hat_of(double n, double p)
{
    const double q = 1 - p, spread = sqrt(n * p * q), b = 1.15 + 2.53 * spread, mode = floor((n + 1) * p);
    Hat h;
    h.a = -0.0873 + 0.0248 * b + 0.01 * p;
    h.b = b;
    h.center = n * p + 0.5;
    h.accept_below = 0.92 - 4.2 / b;
    h.alpha = (2.83 + 5.1 / b) * spread;
    h.n = n;
    h.mode = mode;
    h.top = log_factorial(mode) + log_factorial(n - mode);
    h.log_odds = log(p / q);
    return h;
}

__device__ double binomial_by_inversion(Draw& d, double n, double p)
{
    const double u = unit(d), odds = p / (1 - p);
    double q = exp(n * log(1 - p)), sum = q, k = 0;
    while (u > sum && k < n && k < 1000) {
        k += 1;
        q *= (n - k + 1) / k * odds;
        sum += q;
    }
    return k;
}

__device__ double binomial(Draw& d, double n, double p)
{
    if (n == 0 || p <= 0) return 0;
    if (p >= 1) return n;
    const double less = p > 0.5 ? 1 - p : p;
    const double k = n * less < 10 ? binomial_by_inversion(d, n, less) : binomial_by_rejection(d, hat_of(n, less));
    return p > 0.5 ? n - k : k;
}

// A gamma number with a shape of at least 1.
__device__ double large_gamma(Draw& d, double shape)
{
    const double w = shape - 1.0 / 3, c = 1 / sqrt(9 * w);
    for (;;) {
        const double x = gaussian(d), root = 1 + c * x;
        if (root <= 0) continue;
        const double v = root * root * root, u = unit(d);
        if (u < 1 - 0.0331 * (x * x) * (x * x) || log(u) < 0.5 * x * x + w * (1 - v + log(v))) return w * v;
    }
}

// The logarithm of a gamma number: with a small shape the number itself may underflow.
__device__ double log_gamma(Draw& d, double shape)
{
    if (shape >= 1) return log(large_gamma(d, shape));
    const double grown = log(large_gamma(d, shape + 1));
    return grown + log(unit(d)) / shape;
}

__device__ double beta(Draw& d, double a, double b)
{
    const double x = log_gamma(d, a), y = log_gamma(d, b);
    return 1 / (1 + exp(y - x));
}

// A normal number above a positive lower bound.
__device__ double truncated_tail(Draw& d, double low, double high)
{
    const double root = sqrt(low * low + 4), rate = (low + root) / 2;
    const bool wide = high - low > 2 / (low + root) * exp(0.5 - low / (low + root));
    for (;;) {
        const double x = wide ? low - log(unit(d)) / rate : low + (high - low) * unit(d), u = unit(d);
        if (x <= high && u <= exp(wide ? -(x - rate) * (x - rate) / 2 : (low - x) * (low + x) / 2)) return x;
    }
}

__device__ double truncated(Draw& d, double low, double high)
{
    if (low > 0) return truncated_tail(d, low, high);
    if (high < 0) return -truncated_tail(d, -high, -low);
    if (high - low > 2.5066282746310002) {
        for (;;) {
            const double x = gaussian(d);
            if (x >= low && x <= high) return x;
        }
    }
    for (;;) {
        const double x = low + (high - low) * unit(d), u = unit(d);
        if (u <= exp(-x * x / 2)) return x;
    }
}
"""


class Hat(NamedTuple):
    """The constants of transformed rejection for a Poisson or binomial distribution, as in the kernel."""

    a: float
    b: float
    center: float
    accept_below: float
    alpha: float
    n: float
    mode: float
    top: float
    log_odds: float


def poisson_hat(lam: float) -> Hat:
    """For a mean of at least 10."""
    b = 0.931 + 2.53 * math.sqrt(lam)
    accept_below, alpha = 0.9277 - 3.6224 / (b - 2), 1.1239 + 1.1328 / (b - 3.4)
    return Hat(-0.059 + 0.02483 * b, b, lam + 0.43, accept_below, alpha, lam, 0.0, 0.0, math.log(lam))


def binomial_hat(n: float, p: float) -> Hat:
    """For p up to 1/2 and n p of at least 10."""
    q = 1 - p
    spread = math.sqrt(n * p * q)
    b = 1.15 + 2.53 * spread
    mode = math.floor((n + 1) * p)
    alpha, top = (2.83 + 5.1 / b) * spread, log_factorial(mode) + log_factorial(n - mode)
    a, accept_below = -0.0873 + 0.0248 * b + 0.01 * p, 0.92 - 4.2 / b
    return Hat(a, b, n * p + 0.5, accept_below, alpha, n, mode, top, math.log(p / q))


def log_factorial(k: float) -> float:
    """log(k!) by Stirling's series for arguments of at least 10, as in the kernel."""
    x, factor = k + 1.0, 1.0
    while x < 10:
        factor, x = factor * x, x + 1
    r = 1 / (x * x)
    rest = (1 / 12 - r * (1 / 360 - r * (1 / 1260 - r * (1 / 1680 - r / 1188)))) / x
    return (x - 0.5) * math.log(x) - x + 0.9189385332046727 + rest - math.log(factor)
