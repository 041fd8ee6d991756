"""The kernels of conjugate gradients, Bi-CGSTAB and MINRES; krylov_kernels.py has their building blocks."""

from __future__ import annotations

__all__ = ["BICGSTAB", "CG", "MINRES"]

CG = r"""
__device__ void carry(State& t, Wide rho)
{
    t.beta = rho / t.rho;
    t.rho = rho;
    if (is_zero(rho)) stop(t, BREAKDOWN);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) curvature(Solve s)
{
    State& t = *s.state;
    if (t.over) return;
    const bool first = t.pass == 0;
    Wide sums[2] = {wide(0.0), wide(0.0)};
    EACH(i) {
        if (first) {
            const Wide r = wide(VECTOR(R)[i]) - wide(VECTOR(Q)[i]);
            VECTOR(R)[i] = narrow(r);
            sums[0] = sums[0] + conj(r) * r;
            sums[1] = sums[1] + conj(r) * preconditioned(s, i, r);
        } else {
            sums[0] = sums[0] + conj(wide(VECTOR(IN)[i])) * wide(VECTOR(Q)[i]);
        }
    }
    if (!totals<2>(s, sums)) return;
    t.pass += 1;
    if (first) {
        t.rho = sums[1];
        judge(t, sqrt(real(sums[0])), false);
    } else if (is_zero(sums[0])) {
        t.alpha = wide(0.0);
        stop(t, BREAKDOWN);
    } else {
        t.alpha = t.rho / sums[0];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) advance(Solve s)
{
    State& t = *s.state;
    if (t.over || t.pass == 1) return;
    Wide sums[2] = {wide(0.0), wide(0.0)};
    const Wide alpha = t.alpha;
    EACH(i) {
        VECTOR(X)[i] = narrow(wide(VECTOR(X)[i]) + alpha * wide(VECTOR(IN)[i]));
        const Wide r = wide(VECTOR(R)[i]) - alpha * wide(VECTOR(Q)[i]);
        VECTOR(R)[i] = narrow(r);
        sums[0] = sums[0] + conj(r) * r;
        sums[1] = sums[1] + conj(r) * preconditioned(s, i, r);
    }
    if (!totals<2>(s, sums)) return;
    t.iterations += 1;
    judge(t, sqrt(real(sums[0])), t.iterations >= s.limit);
    if (!APART) carry(t, sums[1]);
}

// With incomplete factors: what `advance` does of rho, once the solves have made M·r. With blocks it makes M·r, too.
extern "C" __global__ void __launch_bounds__(THREADS, 1) weigh(Solve s)
{
    State& t = *s.state;
    if (t.over) return;
    Wide sums[1] = {wide(0.0)};
    EACH(i) {
        if (BLOCKED) VECTOR(M)[i] = narrow(from_blocks(s, i, VECTOR(R)));
        sums[0] = sums[0] + conj(wide(VECTOR(R)[i])) * wide(VECTOR(M)[i]);
    }
    if (!totals<1>(s, sums)) return;
    if (t.pass == 1) t.rho = wide(1.0);
    carry(t, sums[0]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) turn(Solve s)
{
    const State& t = *s.state;
    if (t.over) return;
    const bool first = t.pass == 1;
    const Wide beta = t.beta;
    EACH(i) {
        const Wide z = APART ? wide(VECTOR(M)[i]) : preconditioned(s, i, wide(VECTOR(R)[i]));
        VECTOR(IN)[i] = narrow(first ? z : z + beta * wide(VECTOR(IN)[i]));
    }
}
"""

# Each pass after the first computes half of an iteration, in turn that of alpha and that of omega.
BICGSTAB = r"""
enum { SHADOW = FIRST, P, V };

extern "C" __global__ void __launch_bounds__(THREADS, 1) products(Solve s)
{
    State& t = *s.state;
    if (t.over) return;
    const bool first = t.pass == 0, is_half = t.pass % 2 == 1;
    Wide sums[2] = {wide(0.0), wide(0.0)};
    EACH(i) {
        const Wide q = wide(VECTOR(Q)[i]);
        if (first) {
            const Wide r = wide(VECTOR(R)[i]) - q;
            VECTOR(R)[i] = VECTOR(SHADOW)[i] = narrow(r);
            sums[0] = sums[0] + conj(r) * r;
        } else if (is_half) {
            sums[0] = sums[0] + conj(wide(VECTOR(SHADOW)[i])) * q;
        } else {
            sums[0] = sums[0] + conj(q) * wide(VECTOR(R)[i]);
            sums[1] = sums[1] + conj(q) * q;
        }
    }
    if (!totals<2>(s, sums)) return;
    t.pass += 1;
    if (first) {
        t.rho = sums[0];
        judge(t, sqrt(real(sums[0])), false);
        return;
    }
    const Wide by = is_half ? sums[0] : sums[1];
    Wide& factor = is_half ? t.alpha : t.omega;
    if (is_zero(by)) {
        factor = wide(0.0);
        stop(t, BREAKDOWN);
    } else {
        factor = is_half ? t.rho / by : sums[0] / by;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) half_step(Solve s)
{
    State& t = *s.state;
    const int pass = t.pass - 1;
    if (t.over || pass == 0) return;
    const bool is_half = pass % 2 == 1;
    const Wide factor = is_half ? t.alpha : t.omega;
    Wide sums[2] = {wide(0.0), wide(0.0)};
    EACH(i) {
        const Wide q = wide(VECTOR(Q)[i]), r = wide(VECTOR(R)[i]) - factor * q;
        VECTOR(X)[i] = narrow(wide(VECTOR(X)[i]) + factor * wide(VECTOR(IN)[i]));
        VECTOR(R)[i] = narrow(r);
        sums[0] = sums[0] + conj(r) * r;
        if (is_half) {
            VECTOR(V)[i] = VECTOR(Q)[i];
            VECTOR(UNSOLVED)[i] = narrow(preconditioned(s, i, r));
        } else {
            sums[1] = sums[1] + conj(wide(VECTOR(SHADOW)[i])) * r;
        }
    }
    if (!totals<2>(s, sums)) return;
    const double norm = sqrt(real(sums[0]));
    if (is_half) {
        if (norm > t.target && is_finite(norm)) return;
        t.iterations += 1;
        judge(t, norm, false);
        return;
    }
    t.iterations += 1;
    const Wide rho = sums[1];
    const bool breaks = is_zero(rho) || is_zero(t.omega);
    t.beta = breaks ? wide(0.0) : rho / t.rho * (t.alpha / t.omega);
    t.rho = rho;
    judge(t, norm, t.iterations >= s.limit);
    if (breaks) stop(t, BREAKDOWN);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) turn(Solve s)
{
    const State& t = *s.state;
    const int pass = t.pass - 1;
    if (t.over || pass % 2 == 1) return;
    EACH(i) {
        Wide p = wide(VECTOR(R)[i]);
        if (pass) p = p + t.beta * (wide(VECTOR(P)[i]) - t.omega * wide(VECTOR(V)[i]));
        VECTOR(P)[i] = narrow(p);
        VECTOR(UNSOLVED)[i] = narrow(preconditioned(s, i, p));
    }
}

// With blocks: what the next product is of.
extern "C" __global__ void __launch_bounds__(THREADS, 1) multiply_blocks(Solve s)
{
    if (s.state->over) return;
    EACH(i) VECTOR(IN)[i] = narrow(from_blocks(s, i, VECTOR(M)));
}
"""

MINRES = r"""
enum { BEFORE_R = FIRST, W, BEFORE_W };

// What the method begins with, of rᵀ·M·r.
__device__ void set_out(State& t, double weight)
{
    if (weight < 0) stop(t, BREAKDOWN);  // M is not positive definite
    t.sigma = t.phibar = sqrt(fabs(weight));
    t.cosine = -1;
    judge(t, t.phibar, false);
}

// The rotation that an iteration adds, of rᵀ·M·r.
__device__ void go_on(const Solve& s, State& t, double weight)
{
    t.iterations += 1;
    const bool is_positive = !(weight < 0);
    t.before = t.sigma;
    t.sigma = sqrt(fabs(weight));
    t.size += t.alfa * t.alfa + t.before * t.before + t.sigma * t.sigma;
    t.epsilon_before = t.epsilon;
    t.delta = t.cosine * t.dbar + t.sine * t.alfa;
    const double gbar = t.sine * t.dbar - t.cosine * t.alfa;
    t.epsilon = t.sine * t.sigma;
    t.dbar = -t.cosine * t.sigma;
    t.gamma = sqrt(gbar * gbar + t.sigma * t.sigma);
    const double whole = sqrt(t.size), before = t.phibar;
    const double falls = sqrt(gbar * gbar + t.dbar * t.dbar);  // of A·r, by the norm of r
    const double least = 64 * EPSILON > 1e-3 * s.rtol ? 64 * EPSILON : 1e-3 * s.rtol;
    if (falls <= least * whole) {  // r is all but orthogonal to what A makes: x is a least squares solution
        t.phi = 0;
        t.gamma = 1;
        judge(t, before, false);
        stop(t, STAGNATED);
        return;
    }
    t.cosine = gbar / t.gamma;
    t.sine = t.sigma / t.gamma;
    t.phi = t.cosine * t.phibar;
    t.phibar = t.sine * t.phibar;
    judge(t, t.phibar, t.iterations >= s.limit);
    if (!is_positive) stop(t, BREAKDOWN);
    if (t.sigma <= EPSILON * whole) stop(t, BREAKDOWN);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) curvature(Solve s)
{
    State& t = *s.state;
    if (t.over) return;
    const bool first = t.pass == 0;
    const double back = t.pass > 1 ? t.sigma / t.before : 0;
    Wide sums[1] = {0};
    EACH(i) {
        Wide y = wide(VECTOR(Q)[i]);
        if (first) {
            y = wide(VECTOR(R)[i]) - y;
            VECTOR(R)[i] = narrow(y);
            sums[0] += y * preconditioned(s, i, y);
        } else {
            if (back != 0) y -= back * wide(VECTOR(BEFORE_R)[i]);
            VECTOR(Q)[i] = narrow(y);
            sums[0] += wide(VECTOR(IN)[i]) * y;
        }
    }
    if (!totals<1>(s, sums)) return;
    t.pass += 1;
    if (!first) t.alfa = sums[0];
    else if (!BLOCKED) set_out(t, sums[0]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) rotate(Solve s)
{
    State& t = *s.state;
    if (t.over || t.pass == 1) return;
    const double by = t.alfa / t.sigma;
    Wide sums[1] = {0};
    EACH(i) {
        const Wide y = wide(VECTOR(Q)[i]) - by * wide(VECTOR(R)[i]);
        VECTOR(BEFORE_R)[i] = VECTOR(R)[i];
        VECTOR(R)[i] = narrow(y);
        sums[0] += y * preconditioned(s, i, y);
    }
    if (BLOCKED) return;
    if (totals<1>(s, sums)) go_on(s, t, sums[0]);
}

// With blocks: M·r, and what is to be done once it is there.
extern "C" __global__ void __launch_bounds__(THREADS, 1) weigh(Solve s)
{
    State& t = *s.state;
    if (t.over) return;
    Wide sums[1] = {0};
    EACH(i) {
        const Wide z = from_blocks(s, i, VECTOR(R));
        VECTOR(M)[i] = narrow(z);
        sums[0] += wide(VECTOR(R)[i]) * z;
    }
    if (!totals<1>(s, sums)) return;
    if (t.pass == 1) set_out(t, sums[0]);
    else go_on(s, t, sums[0]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) turn(Solve s)
{
    const State& t = *s.state;
    if (t.over) return;
    const int pass = t.pass - 1;
    EACH(i) {
        if (pass) {
            const Wide older = pass > 2 ? wide(VECTOR(BEFORE_W)[i]) : 0, old = pass > 1 ? wide(VECTOR(W)[i]) : 0;
            const Wide w = (wide(VECTOR(IN)[i]) - t.epsilon_before * older - t.delta * old) / t.gamma;
            VECTOR(BEFORE_W)[i] = narrow(old);
            VECTOR(W)[i] = narrow(w);
            VECTOR(X)[i] = narrow(wide(VECTOR(X)[i]) + t.phi * w);
        }
        const Wide z = BLOCKED ? wide(VECTOR(M)[i]) : preconditioned(s, i, wide(VECTOR(R)[i]));
        VECTOR(IN)[i] = narrow(z / t.sigma);
    }
}
"""
