"""Rejection methods for f32, f16 and bf16 in CUDA C++: in f32, with a GPU's fast instructions and words of 32 bits.

Candidates are accepted or rejected exactly as in f64: if a decision is within a margin of its boundary, which is
several times the error of f32, it is repeated in f64 with the same words. So a seed gives the same numbers as in NumPy,
except for the last bits. The reference (reference_single.py) uses f32 only for uniform numbers.

The first candidates of four neighbours are normal numbers from blocks that these share (streams.py). If one is
rejected, which is rare, the element continues with its own stream. Distributions whose first candidate is rejected too
often, or that need more words, use their own streams at once. The blocks of an element's stream are:

| | words of a block | candidates |
|---|---|---|
| gamma, beta | a pair of normal numbers, and a word for each to accept or reject it | two; beta's in turn |
| gamma, beta, with a shape below 1 | the same for one; the last word converts from shape + 1 to the shape | one |
| truncated normal, around 0 | two pairs of normal numbers | four |
| truncated normal, elsewhere | a position and a word to accept or reject it, twice | two |

Candidates are numbered, so that all elements of a warp share one loop over them.
"""

from __future__ import annotations

__all__ = ["SINGLE"]

SINGLE = r"""
#ifndef MARGIN
#define MARGIN 1.0f  // a factor of all margins
#endif
#ifndef __CUDACC__
#ifndef NOISE
#define NOISE 1.0f  // a factor of all simulated errors
#endif
// On the CPU, where tests run this code, simulate the errors of a GPU's fast instructions, with varying sign.
__device__ float off(float x, float by)
{
    unsigned bits;
    memcpy(&bits, &x, sizeof bits);
    return bits * 2654435761u >> 31 ? x + NOISE * by : x - NOISE * by;
}
#endif

__device__ float log_2(float x)
{
#ifdef __CUDACC__
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    const float y = logf(x) * 1.4426950f;
    return x == 1 ? 0 : off(y, 2.4e-7f * (y > 1 || y < -1 ? (y < 0 ? -y : y) : 1));
#endif
}

__device__ float power_of_2(float x)
{
#ifdef __CUDACC__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    const float y = expf(x * 0.69314718f);
    return off(y, 2.4e-7f * y);
#endif
}

__device__ float root_of(float x)
{
#ifdef __CUDACC__
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    const float y = sqrtf(x);
    return off(y, 1.2e-7f * y);
#endif
}

// Sine and cosine of an angle in half turns, from -1 to 1.
__device__ void turn(float turns, float& sine, float& cosine)
{
#ifdef __CUDACC__
    __sincosf(turns * 3.1415927f, &sine, &cosine);
#else
    sine = off(sinf(turns * 3.1415927f), 3.6e-7f);
    cosine = off(cosf(turns * 3.1415927f), 3.6e-7f);
#endif
}

__device__ float unit_of(unsigned word) { return word * 2.3283064e-10f + 2.3283064e-10f / 2; }  // in (0, 1]

__device__ float turns_of(unsigned word) { return (int)word * 4.6566129e-10f; }

// Two normal numbers by the Box-Muller transform.
__device__ void normals(unsigned word, unsigned angle, float& one, float& other)
{
    const float u = unit_of(word), rest = 1 - u;
    // Near 1 the relative error of the fast logarithm may be 100%.
    const float series = rest * (2 + rest * (1 + rest * (0.66666667f + rest * 0.5f)));
    const float size = root_of(rest < 0.02f ? series : log_2(u) * -1.3862944f);
    turn(turns_of(angle), other, one);
    one *= size;
    other *= size;
}

// One of the two numbers in f64.
__device__ double exact_normal(unsigned word, unsigned angle, bool second)
{
    const double size = sqrt(-2.0 * log((double)unit_of(word))), turns = turns_of(angle);
#ifdef __CUDACC__
    return size * (second ? sinpi(turns) : cospi(turns));
#else
    return size * (second ? sin(3.141592653589793 * turns) : cos(3.141592653589793 * turns));
#endif
}
"""
SHAPES = r"""
// For a shape, or for shape + 1 if it is below 1: w = shape - 1/3, c = 1 / sqrt(9 w); boost is 1 / shape if it is below
// 1, else 0.
struct GammaShape { double w, c; float w_single, c_single, boost, unused; };
struct GammaShapes { GammaShape one, other; float scale; int is_small; };

// Whether Marsaglia and Tsang's test accepts a normal number x, with a uniform one; then v is (1 + c x)^3. If it is not
// certain, the test must be repeated in f64.
__device__ bool accepts(const GammaShapes& g, bool is_other, float x, unsigned chance, float& v, bool& certain)
{
    const float w = is_other ? g.other.w_single : g.one.w_single, c = is_other ? g.other.c_single : g.one.c_single;
    const float t = c * x, root = 1 + t;
    certain = true;
    if (root <= 0) return false;
    v = root * root * root;
    float height;
    if (w < 50) {
        height = 0.5f * x * x + w * (1 - v + 2.0794415f * log_2(root));
    } else {  // the same as a series: for large w the terms of the sum cancel
        const float series = 0.25f - t * (1.0f / 5 - t * (1.0f / 6 - t * (1.0f / 7 - t * (1.0f / 8 - t * (1.0f / 9
            - t * (1.0f / 10 - t * (1.0f / 11 - t * (1.0f / 12))))))));
        height = x * x * t * t * series * -0.33333333f;
    }
    const float over = height - 0.69314718f * log_2(unit_of(chance)), far = (over < 0 ? -over : over) * root;
    const bool accepted = over > 0;
    certain = far >= MARGIN * (2.5e-4f * root + 2.5e-5f) && !(accepted && root < 0.05f);  // near 0 f32 has lost v
    return accepted;
}

__device__ bool accepts_exactly(
    const GammaShapes& g, bool is_other, unsigned word, unsigned angle, bool second, unsigned chance, float& v)
{
    const double w = is_other ? g.other.w : g.one.w, c = is_other ? g.other.c : g.one.c;
    const double x = exact_normal(word, angle, second), root = 1 + c * x, cube = root * root * root;
    v = (float)cube;
    return root > 0 && log((double)unit_of(chance)) < 0.5 * x * x + w * (1 - cube + log(cube));
}

// 1 or 2 gamma numbers, as v and the word for the remaining step of small shapes.
template <int NUMBERS> __device__ void gammas(
    Whole seed, Whole index, unsigned replay, const GammaShapes& g, float* v, unsigned* last)
{
    Block w;
    float one = 0, other = 0;
    int done = 0;
    for (unsigned candidate = 0; done < NUMBERS; ++candidate) {
        const bool second = !g.is_small && candidate % 2;
        if (!second) {
            w = at_place(g.is_small ? candidate : candidate / 2, index, replay, seed);
            normals(w.at[0], w.at[1], one, other);
        }
        const unsigned chance = second ? w.at[3] : w.at[2];
        float cube;
        bool certain, accepted = accepts(g, done, second ? other : one, chance, cube, certain);
        if (!certain) accepted = accepts_exactly(g, done, w.at[0], w.at[1], second, chance, cube);
        if (accepted) {
            v[NUMBERS - 1] = cube;
            last[NUMBERS - 1] = w.at[3];
            if (NUMBERS == 2 && !done) {
                v[0] = cube;
                last[0] = w.at[3];
            }
            ++done;
        }
    }
}

__device__ float gamma(Whole seed, Whole index, unsigned replay, const GammaShapes& g)
{
    float v;
    unsigned last;
    gammas<1>(seed, index, replay, g, &v, &last);
    v *= g.scale;
    if (!g.is_small) return v;
    const float half = power_of_2(log_2(unit_of(last)) * 0.5f * g.one.boost);  // as two factors it does not underflow
    return v * half * half;
}

// The first candidates of four neighbours. Bits of `rejected` mark rejected ones, of `uncertain` uncertain decisions.
__device__ void first(
    Whole seed, Whole q, unsigned replay, const GammaShapes& g, float* x, unsigned& rejected, unsigned& uncertain)
{
    const Block w = at_place(0xfffffffcu, q, replay, seed), chances = at_place(0xffffffffu, q, replay, seed);
    normals(w.at[0], w.at[1], x[0], x[1]);
    normals(w.at[2], w.at[3], x[2], x[3]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float v;
        bool certain;
        if (!accepts(g, false, x[j], chances.at[j], v, certain)) rejected |= 1u << j;
        if (!certain) uncertain |= 1u << j;
        x[j] = v * g.scale;
    }
}

// Decides in f64 whether one of the first candidates is accepted.
__device__ bool first_exactly(Whole seed, Whole index, unsigned replay, const GammaShapes& g, float& x)
{
    const Block w = at_place(0xfffffffcu, index / 4, replay, seed);
    const Block chances = at_place(0xffffffffu, index / 4, replay, seed);
    const unsigned j = index % 4, chance = j & 2 ? (j & 1 ? chances.at[3] : chances.at[2]) : chances.at[j & 1 ? 1 : 0];
    float v;
    const unsigned word = j & 2 ? w.at[2] : w.at[0], angle = j & 2 ? w.at[3] : w.at[1];
    const bool accepted = accepts_exactly(g, false, word, angle, j & 1, chance, v);
    x = v * g.scale;
    return accepted;
}

__device__ float beta(Whole seed, Whole index, unsigned replay, const GammaShapes& g)
{
    float v[2];
    unsigned last[2];
    gammas<2>(seed, index, replay, g, v, last);
    const float x = v[0] * g.one.w_single, y = v[1] * g.other.w_single;
    if (!g.is_small) return x / (x + y);
    const float log_x = log_2(x) + log_2(unit_of(last[0])) * g.one.boost;
    const float log_y = log_2(y) + log_2(unit_of(last[1])) * g.other.boost;
    return 1 / (1 + power_of_2(log_y - log_x));
}
"""
BOUNDS = r"""
// For candidates that are measured from one of the bounds: this bound, the distance to the other one, the rate of
// exponential candidates minus the bound, and the unit of a candidate's distance. All are in standard deviations.
template <class T> struct Tail { T low, width, excess, unit; };

struct TruncationBounds {
    double low, high;
    Tail<double> exact;
    Tail<float> single;
    float inner_low, inner_high, outer_low, outer_high;  // safely inside the bounds, and safely outside
    float origin, scale, least, most;  // the number is origin + scale * x, between the last two
    int method, unused;
};

// Whether a candidate at the distance d from the bound is accepted.
template <class T> __device__ bool accepts(const Tail<T>& g, int method, T d, T chance, T margin, bool& certain)
{
    T height;
    if (method == 1) height = (g.low + d) * (g.low + d) * (T)-0.5;
    else if (method == 2) height = (d - g.excess) * (d - g.excess) * (T)-0.5;
    else height = -d * (g.low + d * (T)0.5);
    height = sizeof(T) == 8 ? (T)exp((double)height) : (T)power_of_2((float)height * 1.4426950f);
    certain = chance < height - margin || chance > height + margin;
    if (method == 2) certain = certain && (d < g.width * (1 - margin) || d > g.width * (1 + margin));
    return chance <= height && (method != 2 || d <= g.width);
}

// The result for a standard normal number, clamped to the bounds in case of rounding.
__device__ float within(const TruncationBounds& g, float x)
{
    const float number = g.origin + g.scale * x;
    return number < g.least ? g.least : number > g.most ? g.most : number;
}

__device__ float truncated(Whole seed, Whole index, unsigned replay, const TruncationBounds& g)
{
    Block w;
    float x = 0, other = 0;
    for (unsigned candidate = 0;; ++candidate) {
        const unsigned part = g.method ? candidate % 2 : candidate % 4 / 2;
        if (g.method ? !part : candidate % 4 == 0) w = at_place(candidate / (g.method ? 2 : 4), index, replay, seed);
        const unsigned one = part ? w.at[2] : w.at[0], two = part ? w.at[3] : w.at[1];
        bool accepted;
        if (g.method == 0) {
            const bool second = candidate % 2;
            if (second) x = other;
            else normals(one, two, x, other);
            accepted = x > g.inner_low && x < g.inner_high;
            if (!accepted && x >= g.outer_low && x <= g.outer_high) {
                const double exact = exact_normal(one, two, second);
                accepted = exact >= g.low && exact <= g.high;
            }
        } else {
            const float u = unit_of(one), chance = unit_of(two);
            x = (g.method == 2 ? log_2(u) * -0.69314718f : u) * g.single.unit;
            bool certain;
            accepted = accepts(g.single, g.method, x, chance, MARGIN * 1e-5f, certain);
            if (!certain) {
                const double d = (g.method == 2 ? -log((double)u) : (double)u) * g.exact.unit;
                accepted = accepts(g.exact, g.method, d, (double)chance, 0.0, certain);
            }
        }
        if (accepted) break;
    }
    return within(g, x);
}

// As for gamma numbers; only for normal candidates.
__device__ void first(
    Whole seed, Whole q, unsigned replay, const TruncationBounds& g, float* x, unsigned& rejected, unsigned& uncertain)
{
    const Block w = at_place(0xfffffffcu, q, replay, seed);
    normals(w.at[0], w.at[1], x[0], x[1]);
    normals(w.at[2], w.at[3], x[2], x[3]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if (!(x[j] > g.inner_low && x[j] < g.inner_high)) rejected |= 1u << j;
        if ((rejected >> j & 1) && x[j] >= g.outer_low && x[j] <= g.outer_high) uncertain |= 1u << j;
        x[j] = within(g, x[j]);
    }
}

__device__ bool first_exactly(Whole seed, Whole index, unsigned replay, const TruncationBounds& g, float& x)
{
    const Block w = at_place(0xfffffffcu, index / 4, replay, seed);
    const bool later = index & 2;
    const double exact = exact_normal(later ? w.at[2] : w.at[0], later ? w.at[3] : w.at[1], index & 1);
    x = within(g, (float)exact);
    return exact >= g.low && exact <= g.high;
}
"""
KERNEL = r"""
#ifdef __CUDACC__
__device__ int lowest(unsigned bits) { return __ffs(bits) - 1; }
#else
__device__ int lowest(unsigned bits) { return __builtin_ctz(bits); }
#endif

extern "C" __global__ void FUNCTION(
    Number* out, Whole seed, Whole offset, Whole count, const PARAMETERS parameters, const unsigned* replays)
{
    const Whole step = (Whole)gridDim.x * blockDim.x, start = (Whole)blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned replay = replays ? *replays : 0;
#if BY_QUADS
    for (Whole q = offset / 4 + start; q < (offset + count + 3) / 4; q += step) {
        float x[4];
        unsigned rejected = 0, uncertain = 0;
        first(seed, q, replay, parameters, x, rejected, uncertain);
        Group group;
#pragma unroll
        for (int j = 0; j < 4; ++j) write(group.at[j], x[j]);
        put(out, group, (long long)(GROUP * q - offset), count, is_aligned(out, offset));
        // Rejected ones are drawn from their own streams and written to memory, so the loop need not hold them.
#pragma unroll 1
        for (unsigned left = rejected | uncertain; left; left &= left - 1) {
            const int j = lowest(left);
            const Whole at = 4 * q + j - offset;
            if (at >= count) continue;  // an index before the first wraps to a large number
            float number;
            if (!(uncertain >> j & 1) || !first_exactly(seed, 4 * q + j, replay, parameters, number))
                number = METHOD(seed, 4 * q + j, replay, parameters);
            write(out[at], number);
        }
    }
#else
    for (Whole i = start; i < count; i += step) write(out[i], METHOD(seed, offset + i, replay, parameters));
#endif
}
"""
SINGLE += SHAPES + BOUNDS + KERNEL
