"""The kernels of the iterations in CUDA C++: all vector work of a method; its scalars stay on the device.

krylov_methods.py and krylov_gmres.py have the methods. A pass is a product q = A·in by cuSPARSE, followed by the
kernels of a method in order. With incomplete factors there are two triangular solves between these, also by cuSPARSE,
which read one vector and write another. With block Jacobi one of the kernels multiplies a vector with the inverses of
the blocks; each thread computes one row of a block. A kernel updates vectors and adds up dot products. Its last block
has the sums, and one of its threads computes the scalar recurrence, so that this needs no launch. The first pass
computes the residual of x0. All arithmetic is in double precision. Sums are added in a fixed order, so that two runs
give the same bits, if the product does.

Follows Saad, Iterative Methods for Sparse Linear Systems; Paige and Saunders, Solution of Sparse Indefinite Systems of
Linear Equations; and van der Vorst, Bi-CGSTAB.
"""

from __future__ import annotations

from typing import Any

from dispatch.ops.sparse.krylov_gmres import GMRES
from dispatch.ops.sparse.krylov_methods import BICGSTAB, CG, MINRES
from dispatch.ops.sparse.wide_numbers import ARITHMETIC

__all__ = ["IN", "KERNELS", "SOLVED", "SOLVES", "SOURCES", "VECTORS", "M", "Q", "R", "passes"]

IN, Q, R, M = range(1, 5)  # the vectors that products and solves read and write, as numbered below

COMMON = (
    ARITHMETIC
    + r"""
// What stays between the kernels. `more` is what the while node looks at, and comes first.
struct State {
    int more, over, info, pass, iterations, column, restarting, count, claimed, broke;
    unsigned tickets, reserved;
    double norm, target, last;
    double alfa, sigma, before, dbar, epsilon, epsilon_before, delta, gamma, phi, phibar, cosine, sine, size;
    Wide rho, alpha, beta, omega;
};

struct Solve {
    Element* vectors;
    State* state;
    Wide* tables;   // of GMRES
    Wide* partial;  // of the sums of blocks
    const Element* values;
    const void *lines, *places;  // of a matrix in CSR, of which the diagonal is taken
    const Element *b, *start, *scale;  // scale: the diagonal of M, or the inverses of blocks along A's
    Element* out;
    int *info, *iterations;
    REAL* residual;
    Int n, stride, base, block_step, row_step, column_step;  // the steps are those between elements of the inverses
    double rtol, atol;
    int limit, restart, has_scale, block;
};

enum { X, IN, Q, R, M, FIRST };  // M: the diagonal of a preconditioner, or what a step of its own reads or writes
#define APART (FACTORED || BLOCKED)  // whether M is multiplied with in a step of its own, once a vector is whole
#define UNSOLVED (APART ? M : IN)  // where a vector is put that is to be preconditioned
enum { BREAKDOWN = -1, NOT_FINITE = -2, STAGNATED = -3 };
#define VECTOR(number) (s.vectors + (number) * s.stride)
#define EACH(i) for (Int i = (Int)blockIdx.x * THREADS + threadIdx.x; i < s.n; i += (Int)gridDim.x * THREADS)

__device__ Wide preconditioned(const Solve& s, Int i, Wide value)
{
    return s.has_scale ? wide(VECTOR(M)[i]) * value : value;
}

// Element i of M·x for block Jacobi: the row of an inverse times a part of x.
__device__ Wide from_blocks(const Solve& s, Int i, const Element* x)
{
    const Int number = i / s.block, first = number * s.block;
    const int extent = int(s.n - first < s.block ? s.n - first : s.block);
    const Element* at = s.scale + number * s.block_step + (i - first) * s.row_step;
    Wide sum = wide(0.0);
    for (int j = 0; j < extent; ++j) sum = sum + wide(at[j * s.column_step]) * wide(x[first + j]);
    return sum;
}

// The sum over the threads of a block, for all of them.
__device__ Wide of_block(Wide mine)
{
    __shared__ Wide room[THREADS];
    room[threadIdx.x] = mine;
    __syncthreads();
    for (int half = THREADS / 2; half; half /= 2) {
        if ((int)threadIdx.x < half) room[threadIdx.x] = room[threadIdx.x] + room[threadIdx.x + half];
        __syncthreads();
    }
    const Wide all = room[0];
    __syncthreads();
    return all;
}

// Whether this block is the last that comes here, and sees what the others have written.
__device__ bool is_last(const Solve& s)
{
    __shared__ unsigned ticket;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) ticket = atomicInc(&s.state->tickets, gridDim.x - 1);
    __syncthreads();
    const bool found = ticket == gridDim.x - 1;
    __syncthreads();
    if (found) __threadfence();
    return found;
}

__device__ Wide of_blocks(const Solve& s, int number)
{
    Wide mine = wide(0.0);
    for (unsigned block = threadIdx.x; block < gridDim.x; block += THREADS)
        mine = mine + fetched(s.partial + (Int)number * gridDim.x + block);
    return of_block(mine);
}

// Sums over all threads of the grid; one thread alone is told that they are there.
template <int COUNT> __device__ bool totals(const Solve& s, Wide* sums)
{
    for (int k = 0; k < COUNT; ++k) {
        const Wide all = of_block(sums[k]);
        if (threadIdx.x == 0) s.partial[(Int)k * gridDim.x + blockIdx.x] = all;
    }
    if (!is_last(s)) return false;
    for (int k = 0; k < COUNT; ++k) sums[k] = of_blocks(s, k);
    return threadIdx.x == 0;
}

__device__ void stop(State& t, int info)
{
    if (!t.more) return;
    t.more = 0;
    t.info = info;
}

// What becomes of the iteration with a residual of this norm.
__device__ void judge(State& t, double norm, bool at_limit)
{
    t.norm = norm;
    if (norm <= t.target) stop(t, 0);
    else if (!is_finite(norm)) stop(t, NOT_FINITE);
    else if (at_limit) stop(t, t.iterations);
}

__device__ Wide diagonal(const Solve& s, Int i)
{
    Wide found = wide(0.0);
    const Int end = (Int)((const LINE*)s.lines)[i + 1] - s.base;
    for (Int k = (Int)((const LINE*)s.lines)[i] - s.base; k < end; ++k)
        if ((Int)((const PLACE*)s.places)[k] - s.base == i) found = found + wide(s.values[k]);
    if (is_zero(found)) return wide(1.0);
    return wide(1.0) / (INDEFINITE ? wide(size_of(found)) : found);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) begin(Solve s)
{
    Wide sums[1] = {wide(0.0)};
    EACH(i) {
        const Element start = s.start ? s.start[i] : narrow(wide(0.0));
        VECTOR(X)[i] = VECTOR(IN)[i] = start;
        VECTOR(R)[i] = s.b[i];
        if (s.has_scale) VECTOR(M)[i] = s.scale ? s.scale[i] : narrow(diagonal(s, i));
        const Wide b = wide(s.b[i]);
        const Wide weighted = BLOCKED ? from_blocks(s, i, s.b) : preconditioned(s, i, b);
        sums[0] = sums[0] + conj(b) * (INDEFINITE ? weighted : b);
    }
    if (!totals<1>(s, sums)) return;
    State made = {};
    const double norm = sqrt(fabs(real(sums[0]))), relative = s.rtol * norm;
    made.target = relative > s.atol ? relative : s.atol;
    made.more = norm != 0;
    made.over = norm == 0;
    made.restarting = 1;
    *s.state = made;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) finish(Solve s)
{
    const State& t = *s.state;
    const double none = t.norm - t.norm;  // NaN where that is why it has ended
    EACH(i) s.out[i] = t.over ? narrow(wide(0.0)) : t.info == NOT_FINITE ? narrow(whole(none)) : VECTOR(X)[i];
    if (blockIdx.x || threadIdx.x) return;
    *s.info = t.info;
    *s.iterations = t.iterations;
    *s.residual = REAL(t.norm);
}
"""
)

SOURCES = {
    name: COMMON + text for name, text in (("cg", CG), ("bicgstab", BICGSTAB), ("minres", MINRES), ("gmres", GMRES))
}
SOLVES = "the two triangular solves"
# The kernels of a pass, in order: with a diagonal or no M, with incomplete factors, and with inverses of blocks.
KERNELS = {
    "cg": ("curvature", "advance", "turn"),
    "bicgstab": ("products", "half_step", "turn"),
    "minres": ("curvature", "rotate", "turn"),
    "gmres": ("project_once", "subtract_once", "project_twice", "subtract_twice", "extend"),
}
FACTORED = {
    "cg": ("curvature", "advance", SOLVES, "weigh", "turn"),
    "bicgstab": (*KERNELS["bicgstab"], SOLVES),
    "gmres": (*KERNELS["gmres"], SOLVES, "correct"),
}
BLOCKED = {
    "cg": ("curvature", "advance", "weigh", "turn"),
    "bicgstab": (*KERNELS["bicgstab"], "multiply_blocks"),
    "minres": ("curvature", "rotate", "weigh", "turn"),
    "gmres": (*KERNELS["gmres"], "correct"),
}
# The vector that the solves read, and the one that they write; Q is unused meanwhile.
SOLVED = {"cg": (R, M), "bicgstab": (M, IN), "gmres": (M, IN)}
# The number of vectors of a method; GMRES has those of its basis in addition.
VECTORS = {"cg": 5, "bicgstab": 8, "minres": 8, "gmres": 5}


def passes(request: Any) -> tuple[str, ...]:
    """The kernels of a pass of a request; `SOLVES` among them stands for the two triangular solves."""
    return (FACTORED if request.is_factored else BLOCKED if request.is_blocked else KERNELS)[request.op]
