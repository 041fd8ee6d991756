"""What is drawn by rejection for f32, f16 and bf16, in CUDA C++: in f32, by a GPU's fast units, from words of 32 bits.

Numbers are taken or not as in f64 all the same: where a decision lies within a margin of its boundary, which is several
times the error of f32, it is made again in f64, from the same words. So seeds lead to the same numbers as in NumPy,
whose reference (reference_single.py) knows no f32 but that of uniform numbers, and what f32 changes is the last bits.

The first candidates of four neighbours come from blocks that these share (streams.py), each a normal number; where one
is not taken, which is seldom so, the element goes on by its own stream. Kinds of which the first one is left too often,
or that need more words, take their own streams at once. There an element's blocks are:

| | words of a block | candidates |
|---|---|---|
| gamma, beta | a pair of normal numbers, one to take or leave each of them | two; beta's numbers take turns |
| the same, of a shape below 1 | the same of one; the last word leads from shape + 1 to the shape | one |
| truncated normal, around 0 | two pairs of normal numbers | four |
| truncated normal, elsewhere | a place and one to take or leave it, twice | two |

Candidates are counted, and a loop over them goes on as one for all elements of a warp.
"""

from __future__ import annotations

__all__ = ["SINGLE"]

SINGLE = r"""
#ifndef MARGIN
#define MARGIN 1.0f  // what margins are times
#endif
#ifndef __CUDACC__
#ifndef NOISE
#define NOISE 1.0f  // what errors are times
#endif
// On the CPU, where tests run it, functions are off by as much as a GPU's fast units may be, now up and now down.
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

// Sine and cosine of so many half turns, from -1 to 1.
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

// Two normal numbers by Box and Muller's formula.
__device__ void normals(unsigned word, unsigned angle, float& one, float& other)
{
    const float u = unit_of(word), rest = 1 - u;
    // Near 1 a logarithm of the fast unit may be off by all of itself.
    const float series = rest * (2 + rest * (1 + rest * (0.66666667f + rest * 0.5f)));
    const float size = root_of(rest < 0.02f ? series : log_2(u) * -1.3862944f);
    turn(turns_of(angle), other, one);
    one *= size;
    other *= size;
}

// One of the two in f64.
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
// Of a shape, or of shape + 1 where it is below 1: w = shape - 1/3, c = 1 / sqrt(9 w), and 1 / shape, else 0.
struct GammaShape { double w, c; float w_single, c_single, boost, unused; };
struct GammaShapes { GammaShape one, other; float scale; int is_small; };

// Whether Marsaglia and Tsang's test takes a normal number x, by a uniform one; v is (1 + c x)^3 then. What is not sure
// is to be decided in f64.
__device__ bool takes(const GammaShapes& g, bool is_other, float x, unsigned chance, float& v, bool& sure)
{
    const float w = is_other ? g.other.w_single : g.one.w_single, c = is_other ? g.other.c_single : g.one.c_single;
    const float t = c * x, root = 1 + t;
    sure = true;
    if (root <= 0) return false;
    v = root * root * root;
    float height;
    if (w < 50) {
        height = 0.5f * x * x + w * (1 - v + 2.0794415f * log_2(root));
    } else {  // the same as a series: of a large w what is left of the sum is less than its error
        const float series = 0.25f - t * (1.0f / 5 - t * (1.0f / 6 - t * (1.0f / 7 - t * (1.0f / 8 - t * (1.0f / 9
            - t * (1.0f / 10 - t * (1.0f / 11 - t * (1.0f / 12))))))));
        height = x * x * t * t * series * -0.33333333f;
    }
    const float over = height - 0.69314718f * log_2(unit_of(chance)), far = (over < 0 ? -over : over) * root;
    const bool taken = over > 0;
    sure = far >= MARGIN * (2.5e-4f * root + 2.5e-5f) && !(taken && root < 0.05f);  // near 0 f32 has lost v
    return taken;
}

__device__ bool takes_exactly(
    const GammaShapes& g, bool is_other, unsigned word, unsigned angle, bool second, unsigned chance, float& v)
{
    const double w = is_other ? g.other.w : g.one.w, c = is_other ? g.other.c : g.one.c;
    const double x = exact_normal(word, angle, second), root = 1 + c * x, cube = root * root * root;
    v = (float)cube;
    return root > 0 && log((double)unit_of(chance)) < 0.5 * x * x + w * (1 - cube + log(cube));
}

// 1 or 2 gamma numbers, as v and the word of what is left to do.
template <int NUMBERS> __device__ void gammas(
    Whole seed, Whole index, unsigned replay, const GammaShapes& g, float* v, unsigned* last)
{
    Block w;
    float one = 0, other = 0;
    int made = 0;
    for (unsigned candidate = 0; made < NUMBERS; ++candidate) {
        const bool second = !g.is_small && candidate % 2;
        if (!second) {
            w = at_place(g.is_small ? candidate : candidate / 2, index, replay, seed);
            normals(w.at[0], w.at[1], one, other);
        }
        const unsigned chance = second ? w.at[3] : w.at[2];
        float cube;
        bool sure, taken = takes(g, made, second ? other : one, chance, cube, sure);
        if (!sure) taken = takes_exactly(g, made, w.at[0], w.at[1], second, chance, cube);
        if (taken) {
            v[NUMBERS - 1] = cube;
            last[NUMBERS - 1] = w.at[3];
            if (NUMBERS == 2 && !made) {
                v[0] = cube;
                last[0] = w.at[3];
            }
            ++made;
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

// The first candidates of four neighbours; a bit of `missed` says that one is not taken, of `open` that it is not sure.
__device__ void first(
    Whole seed, Whole q, unsigned replay, const GammaShapes& g, float* x, unsigned& missed, unsigned& open)
{
    const Block w = at_place(0xfffffffcu, q, replay, seed), chances = at_place(0xffffffffu, q, replay, seed);
    normals(w.at[0], w.at[1], x[0], x[1]);
    normals(w.at[2], w.at[3], x[2], x[3]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float v;
        bool sure;
        if (!takes(g, false, x[j], chances.at[j], v, sure)) missed |= 1u << j;
        if (!sure) open |= 1u << j;
        x[j] = v * g.scale;
    }
}

// Whether one of them is taken.
__device__ bool first_exactly(Whole seed, Whole index, unsigned replay, const GammaShapes& g, float& x)
{
    const Block w = at_place(0xfffffffcu, index / 4, replay, seed);
    const Block chances = at_place(0xffffffffu, index / 4, replay, seed);
    const unsigned j = index % 4, chance = j & 2 ? (j & 1 ? chances.at[3] : chances.at[2]) : chances.at[j & 1 ? 1 : 0];
    float v;
    const bool taken = takes_exactly(g, false, j & 2 ? w.at[2] : w.at[0], j & 2 ? w.at[3] : w.at[1], j & 1, chance, v);
    x = v * g.scale;
    return taken;
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
// Of candidates that begin at one of the bounds: how far the other one is, how much more the rate of exponential
// candidates is than the bound, and what a candidate's distance is in units of. In standard deviations.
template <class T> struct Tail { T low, width, excess, unit; };

struct TruncationBounds {
    double low, high;
    Tail<double> exact;
    Tail<float> single;
    float inner_low, inner_high, outer_low, outer_high;  // far enough within the bounds, and without
    float origin, scale, least, most;  // the number is origin + scale * x, between the last two
    int method, unused;
};

// Whether a candidate so far behind the bound is taken.
template <class T> __device__ bool takes(const Tail<T>& g, int method, T d, T chance, T margin, bool& sure)
{
    T height;
    if (method == 1) height = (g.low + d) * (g.low + d) * (T)-0.5;
    else if (method == 2) height = (d - g.excess) * (d - g.excess) * (T)-0.5;
    else height = -d * (g.low + d * (T)0.5);
    height = sizeof(T) == 8 ? (T)exp((double)height) : (T)power_of_2((float)height * 1.4426950f);
    sure = chance < height - margin || chance > height + margin;
    if (method == 2) sure = sure && (d < g.width * (1 - margin) || d > g.width * (1 + margin));
    return chance <= height && (method != 2 || d <= g.width);
}

// The number that a standard one leads to: rounding does not lead beyond the bounds.
__device__ float within(const TruncationBounds& g, float x)
{
    const float made = g.origin + g.scale * x;
    return made < g.least ? g.least : made > g.most ? g.most : made;
}

__device__ float truncated(Whole seed, Whole index, unsigned replay, const TruncationBounds& g)
{
    Block w;
    float x = 0, other = 0;
    for (unsigned candidate = 0;; ++candidate) {
        const unsigned part = g.method ? candidate % 2 : candidate % 4 / 2;
        if (g.method ? !part : candidate % 4 == 0) w = at_place(candidate / (g.method ? 2 : 4), index, replay, seed);
        const unsigned one = part ? w.at[2] : w.at[0], two = part ? w.at[3] : w.at[1];
        bool taken;
        if (g.method == 0) {
            const bool second = candidate % 2;
            if (second) x = other;
            else normals(one, two, x, other);
            taken = x > g.inner_low && x < g.inner_high;
            if (!taken && x >= g.outer_low && x <= g.outer_high) {
                const double exact = exact_normal(one, two, second);
                taken = exact >= g.low && exact <= g.high;
            }
        } else {
            const float u = unit_of(one), chance = unit_of(two);
            x = (g.method == 2 ? log_2(u) * -0.69314718f : u) * g.single.unit;
            bool sure;
            taken = takes(g.single, g.method, x, chance, MARGIN * 1e-5f, sure);
            if (!sure) {
                const double d = (g.method == 2 ? -log((double)u) : (double)u) * g.exact.unit;
                taken = takes(g.exact, g.method, d, (double)chance, 0.0, sure);
            }
        }
        if (taken) break;
    }
    return within(g, x);
}

// As for gamma numbers; of normal candidates alone.
__device__ void first(
    Whole seed, Whole q, unsigned replay, const TruncationBounds& g, float* x, unsigned& missed, unsigned& open)
{
    const Block w = at_place(0xfffffffcu, q, replay, seed);
    normals(w.at[0], w.at[1], x[0], x[1]);
    normals(w.at[2], w.at[3], x[2], x[3]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if (!(x[j] > g.inner_low && x[j] < g.inner_high)) missed |= 1u << j;
        if ((missed >> j & 1) && x[j] >= g.outer_low && x[j] <= g.outer_high) open |= 1u << j;
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
    Number* out, Whole seed, Whole offset, Whole count, const GIVEN given, const unsigned* replays)
{
    const Whole step = (Whole)gridDim.x * blockDim.x, start = (Whole)blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned replay = replays ? *replays : 0;
#if BY_QUADS
    for (Whole q = offset / 4 + start; q < (offset + count + 3) / 4; q += step) {
        float x[4];
        unsigned missed = 0, open = 0;
        first(seed, q, replay, given, x, missed, open);
        Group group;
#pragma unroll
        for (int j = 0; j < 4; ++j) write(group.at[j], x[j]);
        put(out, group, (long long)(GROUP * q - offset), count, is_aligned(out, offset));
        // Those that are not taken are drawn by their own streams, where they lie: the loop needs to hold none of them.
#pragma unroll 1
        for (unsigned left = missed | open; left; left &= left - 1) {
            const int j = lowest(left);
            const Whole at = 4 * q + j - offset;
            if (at >= count) continue;  // one before the first is a large number
            float made;
            if (!(open >> j & 1) || !first_exactly(seed, 4 * q + j, replay, given, made))
                made = METHOD(seed, 4 * q + j, replay, given);
            write(out[at], made);
        }
    }
#else
    for (Whole i = start; i < count; i += step) write(out[i], METHOD(seed, offset + i, replay, given));
#endif
}
"""
SINGLE += SHAPES + BOUNDS + KERNEL
