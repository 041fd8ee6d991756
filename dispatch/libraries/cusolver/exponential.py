"""Kernels between the products of a matrix exponential: scaling, sums and selection. They do not depend on requests.

The first argument of each is the batch, as in reductions.py, and blocks are independent of each other. Matrices without
stride arguments are dense, n columns of n.
"""

from __future__ import annotations

__all__ = ["NOT_FINITE", "SINGULAR", "SOURCE", "TOO_LARGE"]

# The meanings of a status above 0; for an exact 0 on U's diagonal it is SINGULAR plus the index, counted from 1.
TOO_LARGE, NOT_FINITE, SINGULAR = 1, 2, 2

SOURCE = r"""
typedef long long Int;
#define EACH for (Int number = blockIdx.y; number < batch; number += gridDim.y)
#define ELEMENTS(count) \
    for (Int i = (Int)blockIdx.x * blockDim.x + threadIdx.x; i < (count); i += (Int)gridDim.x * blockDim.x)
#define PARTS_OF(part) for (int part = 0; part < PARTS; part++)
struct __align__(sizeof(REAL) * PARTS) Element { REAL part[PARTS]; };
struct Strides { Int row, col, batch; };

// A becomes A / 2^s, with the least s from 0 on that makes its norm theta or less. Where that is above `most`, and
// where the norm is no number, A becomes 0, which nothing stumbles over, and the status says so.
extern "C" __global__ void scale_to(
    Int batch, Element* all, Int n, const REAL* norms, double theta, Int most, int* squarings, int* status)
{
    EACH {
        const double norm = norms[number];
        int power = 0, wrong = 2;
        if (norm <= 1.7e308) {
            if (frexp(norm / theta, &power) == 0.5) power--;
            power = power > 0 ? power : 0;
            wrong = power > most;
        }
        if (wrong) power = 0;
        Element* a = all + number * n * n;
        if (wrong || power)
            ELEMENTS(n * n) PARTS_OF(part) a[i].part[part] = wrong ? 0 : (REAL)ldexp((double)a[i].part[part], -power);
        if (blockIdx.x == 0 && threadIdx.x == 0) squarings[number] = power, status[number] = wrong;
    }
}

// Of Padé's approximant (V - U)^-1 (V + U) what stands beside products, from the powers of A. For double it is that of
// degree 13:  U = A (A^6 (b13 A^6 + b11 A^4 + b9 A^2) + b7 A^6 + b5 A^4 + b3 A^2 + b1),  V alike with the even ones;
// the sums in brackets take the places of A^2 and A^4. For float it is that of degree 7, without these.
extern "C" __global__ void pade_sums(
    Int batch, Int n, Element* second, Element* fourth, const Element* sixth, Element* odd, Element* even)
{
    const double of_13[] = {64764752532480000., 32382376266240000., 7771770303897600., 1187353796428800.,
                            129060195264000., 10559470521600., 670442572800., 33522128640., 1323241920., 40840800.,
                            960960., 16380., 182., 1.};
    const double of_7[] = {17297280., 8648640., 1995840., 277200., 25200., 1512., 56., 1.};
    const bool is_double = sizeof(REAL) == 8;
    const double* b = is_double ? of_13 : of_7;
    EACH ELEMENTS(n * n) {
        const Int at = number * n * n + i;
        PARTS_OF(part) {
            const REAL two = second[at].part[part], four = fourth[at].part[part], six = sixth[at].part[part];
            const REAL one = part == 0 && i % (n + 1) == 0;
            if (is_double) {
                second[at].part[part] = (REAL)of_13[13] * six + (REAL)of_13[11] * four + (REAL)of_13[9] * two;
                fourth[at].part[part] = (REAL)of_13[12] * six + (REAL)of_13[10] * four + (REAL)of_13[8] * two;
            }
            odd[at].part[part] = (REAL)b[7] * six + (REAL)b[5] * four + (REAL)b[3] * two + (REAL)b[1] * one;
            even[at].part[part] = (REAL)b[6] * six + (REAL)b[4] * four + (REAL)b[2] * two + (REAL)b[0] * one;
        }
    }
}

// U becomes V + U, and V becomes V - U.
extern "C" __global__ void sum_and_difference(Int batch, Int n, Element* u, Strides at, Element* v)
{
    EACH ELEMENTS(n * n) {
        Element* one = u + number * at.batch + i % n * at.row + i / n * at.col;
        Element* other = v + number * n * n + i;
        PARTS_OF(part) {
            const REAL x = one->part[part], y = other->part[part];
            one->part[part] = y + x, other->part[part] = y - x;
        }
    }
}

// The squares of those matrices that are to be squared in this round take their places.
extern "C" __global__ void keep_squares(
    Int batch, Int n, const int* squarings, Int round, const Element* squares, Element* x, Strides at)
{
    EACH {
        if (squarings[number] <= round) continue;
        ELEMENTS(n * n) x[number * at.batch + i % n * at.row + i / n * at.col] = squares[number * n * n + i];
    }
}

// The status of the norm, or what LU found, behind it.
extern "C" __global__ void join_status(Int batch, const int* status, int* info)
{
    EACH if (blockIdx.x == 0 && threadIdx.x == 0)
        info[number] = status[number] ? status[number] : info[number] ? info[number] + 2 : 0;
}
"""
