"""The kernels of restarted GMRES; krylov_kernels.py has their building blocks."""

from __future__ import annotations

__all__ = ["GMRES"]

# Passes with `restarting` compute the residual; each later pass computes one vector of the basis. The tables hold the
# new column and its second part, the triangle, the rotations, the right-hand side and the solution of a cycle.
GMRES = r"""
#define BASIS(number) VECTOR(FIRST + (number))
struct Tables { Wide *h, *more, *triangle, *cosines, *sines, *right, *y; };

__device__ Tables tables(const Solve& s)
{
    const int m = s.restart;
    Wide* at = s.tables;
    Tables made = {at, at + m + 1, at + 2 * (m + 1), 0, 0, 0, 0};
    made.cosines = made.triangle + m * m;
    made.sines = made.cosines + m;
    made.right = made.sines + m;
    made.y = made.right + m + 1;
    return made;
}

// Dot products of the basis with q.
__device__ bool project(const Solve& s, int count, Wide* into)
{
    for (int j = 0; j < count; ++j) {
        Wide mine = wide(0.0);
        EACH(i) mine = mine + conj(wide(BASIS(j)[i])) * wide(VECTOR(Q)[i]);
        const Wide all = of_block(mine);
        if (threadIdx.x == 0) s.partial[(Int)j * gridDim.x + blockIdx.x] = all;
    }
    if (!is_last(s)) return false;
    for (int j = 0; j < count; ++j) {
        const Wide all = of_blocks(s, j);
        if (threadIdx.x == 0) into[j] = all;
    }
    return threadIdx.x == 0;
}

__device__ void subtract(const Solve& s, int count, const Wide* by, Wide* sums)
{
    EACH(i) {
        Wide q = wide(VECTOR(Q)[i]);
        for (int j = 0; j < count; ++j) q = q - by[j] * wide(BASIS(j)[i]);
        VECTOR(Q)[i] = narrow(q);
        sums[0] = sums[0] + conj(q) * q;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) project_once(Solve s)
{
    State& t = *s.state;
    if (t.over) return;
    if (!t.restarting) {
        if (project(s, t.column + 2, tables(s).h)) t.column += 1;
        return;
    }
    Wide sums[1] = {wide(0.0)};
    EACH(i) {
        const Wide r = wide(VECTOR(R)[i]) - wide(VECTOR(Q)[i]);
        VECTOR(Q)[i] = narrow(r);
        sums[0] = sums[0] + conj(r) * r;
    }
    if (!totals<1>(s, sums)) return;
    const double norm = sqrt(real(sums[0]));
    judge(t, norm, t.pass >= s.limit);
    if ((t.claimed || t.broke) && !(norm < 0.9 * t.last)) stop(t, t.claimed ? STAGNATED : BREAKDOWN);
    t.pass += 1;
    t.last = t.sigma = norm;
    t.column = -1;
    t.restarting = t.claimed = t.broke = 0;
    tables(s).right[0] = wide(norm);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) subtract_once(Solve s)
{
    const State& t = *s.state;
    if (t.over || t.column < 0) return;
    Wide unused[1] = {wide(0.0)};
    subtract(s, t.column + 1, tables(s).h, unused);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) project_twice(Solve s)
{
    const State& t = *s.state;
    if (t.over || t.column < 0) return;
    project(s, t.column + 1, tables(s).more);
}

// The new column of the triangle, and what is left of the residual.
__device__ void rotate(const Solve& s, State& t, double next)
{
    const Tables at = tables(s);
    const int k = t.column;
    double size = next * next;
    for (int j = 0; j <= k; ++j) {
        at.h[j] = at.h[j] + at.more[j];
        size += square(at.h[j]);
    }
    if (next <= 4 * EPSILON * sqrt(size)) {
        next = 0;
        t.broke = 1;
    }
    Wide below = at.h[0];
    for (int j = 0; j < k; ++j) {
        const Wide after = at.h[j + 1];
        at.triangle[k * s.restart + j] = at.cosines[j] * below + at.sines[j] * after;
        below = at.cosines[j] * after - conj(at.sines[j]) * below;
    }
    const double here = size_of(below), both = sqrt(here * here + next * next);
    const Wide phase = here == 0 ? wide(1.0) : scaled(below, 1 / here);
    at.cosines[k] = wide(both == 0 ? 1 : here / both);
    at.sines[k] = both == 0 ? wide(0.0) : scaled(phase, next / both);
    at.triangle[k * s.restart + k] = both <= 4 * EPSILON * sqrt(size) ? wide(0.0) : scaled(phase, both);
    at.right[k + 1] = wide(0.0) - conj(at.sines[k]) * at.right[k];
    at.right[k] = at.cosines[k] * at.right[k];
    t.sigma = next;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) subtract_twice(Solve s)
{
    State& t = *s.state;
    if (t.over || t.column < 0) return;
    Wide sums[1] = {wide(0.0)};
    subtract(s, t.column + 1, tables(s).more, sums);
    if (!totals<1>(s, sums)) return;
    const Tables at = tables(s);
    rotate(s, t, sqrt(real(sums[0])));
    t.iterations += 1;
    t.count = t.column + 1;
    const double left = size_of(at.right[t.count]);
    t.claimed = left <= t.target && !is_zero(at.triangle[t.column * s.restart + t.column]);
    if (!is_finite(left)) {
        t.count = 0;
        t.norm = left;
        t.restarting = 1;
        stop(t, NOT_FINITE);
    } else if (t.claimed || t.broke || t.count == s.restart) {
        t.restarting = 1;
        for (int j = t.count - 1; j >= 0; --j) {
            Wide left = at.right[j];
            for (int k = j + 1; k < t.count; ++k) left = left - at.triangle[k * s.restart + j] * at.y[k];
            const Wide by = at.triangle[j * s.restart + j];
            at.y[j] = is_zero(by) ? wide(0.0) : left / by;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) extend(Solve s)
{
    const State& t = *s.state;
    if (t.over) return;
    const Wide* y = tables(s).y;
    EACH(i) {
        if (t.restarting) {
            Wide sum = wide(0.0);
            for (int j = 0; j < t.count; ++j) sum = sum + y[j] * wide(BASIS(j)[i]);
            if (APART) VECTOR(M)[i] = narrow(sum);
            else VECTOR(X)[i] = VECTOR(IN)[i] = narrow(wide(VECTOR(X)[i]) + preconditioned(s, i, sum));
        } else {
            const Element v = narrow(scaled(wide(VECTOR(Q)[i]), 1 / t.sigma));
            BASIS(t.column + 1)[i] = v;
            VECTOR(UNSOLVED)[i] = narrow(preconditioned(s, i, wide(v)));
        }
    }
}

// With incomplete factors: a cycle's step, once the solves have made M·sum. With blocks it makes that, and M·v, too.
extern "C" __global__ void __launch_bounds__(THREADS, 1) correct(Solve s)
{
    const State& t = *s.state;
    if (t.over || !(BLOCKED || t.restarting)) return;
    EACH(i) {
        const Wide step = BLOCKED ? from_blocks(s, i, VECTOR(M)) : wide(VECTOR(IN)[i]);
        const Element next = narrow(t.restarting ? wide(VECTOR(X)[i]) + step : step);
        if (t.restarting) VECTOR(X)[i] = next;
        VECTOR(IN)[i] = next;
    }
}
"""
