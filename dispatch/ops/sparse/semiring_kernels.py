"""The kernel of a product over a semiring in CUDA C++: CSR times a dense matrix, with a caller's operators.

It also computes plain products (plain_operators.py): by the rows of CSR, or the columns of CSC, and in batches.

Rows and elements are one path of rows + nnz steps, all elements of a row, then its end, and each block does the same
number of steps, whatever the pattern: so power laws and one dense row are split like all else. A block copies its
elements to shared memory, once for all columns, and its teams process its rows one after another. Each lane along the
columns of B has as many neighbouring columns as 16 bytes of sums; if B has few columns, a team also has lanes along the
elements of a row, which take turns. A sum begins with its first term, so the caller's addition needs no identity.

The order of a sum never depends on addresses or on which thread comes first:
- a row of at most LONG elements is added up by its first block from its first element on, each element lane by itself,
  and then by a tree over the lanes;
- a longer one is split into RUNS runs of neighbours, each added up as above, and then from the first run on;
- one of more than MAX_ROW elements is split into pieces at the ends of blocks, each added up as above, and then the
  pieces in RUNS runs again. Each block stores its piece in memory of the plan, and the last block to finish adds them.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from dispatch.keys import F32, HALF
from dispatch.libraries.cusparse.operator_source import fill_template
from dispatch.libraries.nvrtc.number_types import NAMES, NUMBERS, WIDEST
from dispatch.ops.sparse.product_kernels import BITS, INDICES, REAL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dispatch.keys import Dtype
    from dispatch.ops.sparse.semiring_tiles import Shape, Tile

__all__ = ["NAME", "RUNS", "THREADS", "source"]

NAME, THREADS = "multiply_over", 256
RUNS = 16
LONG = 64  # elements of the longest row that one team adds up alone
# Resident blocks of each multiprocessor: each thread has 64 registers at most, or 80 if numbers need several.
BLOCKS, BLOCKS_OF_WIDE = 4, 3
UNROLLED = 4  # rows of B that a lane reads at once

KERNEL = r"""
typedef long long Int;
typedef operators::Real Real;
typedef operators::Number Sum;
typedef $LINE$ Line;
typedef $PLACE$ Column;
const int PARTS = sizeof(Sum) / sizeof(Real);
const int THREADS = $THREADS$, STEPS = $STEPS$, MAX_ROW = $MAX_ROW$, LONG = $LONG$, RUNS = $RUNS$;
const int UNROLLED = $UNROLLED$;
const int COLUMN_LANES = $COLUMN_LANES$, ELEMENT_LANES = $ELEMENT_LANES$, VECTOR = $VECTOR$;
const int TEAM = COLUMN_LANES * ELEMENT_LANES, TEAMS = THREADS / TEAM, WIDE = COLUMN_LANES * VECTOR;
const int CAPACITY = STEPS + MAX_ROW;  // elements of a block: a row that is not long goes on behind its steps
const int LONGS = STEPS / LONG + 3;  // long rows that may be in a block
const int FAR = 1 << 29;  // beyond all that a block has
const unsigned ALL = 0xffffffffu;
static_assert(LONG <= MAX_ROW && TEAM <= 32, "what is cut is long, and a team is of one warp");

struct alignas(sizeof($STORED$) * PARTS) Element { $STORED$ part[PARTS]; };
struct alignas(sizeof($RESULT$) * PARTS) Result { $RESULT$ part[PARTS]; };
template <class E> struct alignas(sizeof(E) * VECTOR < 16 ? sizeof(E) * VECTOR : 16) Vector { E at[VECTOR]; };

__device__ int clamp_far(Int x) { return x < -FAR ? -FAR : x > FAR ? FAR : (int)x; }
__device__ int clamp(int x, int least, int most) { return x < least ? least : x > most ? most : x; }

template <class E> __device__ Sum number(const E& x)
{
    Sum found;
    for (int i = 0; i < PARTS; ++i) ((Real*)&found)[i] = read(x.part[i]);
    return found;
}

__device__ Result rounded(const Sum& x)
{
    Result found;
    for (int i = 0; i < PARTS; ++i) write(found.part[i], ((const Real*)&x)[i]);
    return found;
}

__device__ Sum shuffle_down(unsigned lanes, Sum x, int further)
{
    for (int i = 0; i < PARTS; ++i) ((Real*)&x)[i] = __shfl_down_sync(lanes, ((Real*)&x)[i], further, TEAM);
    return x;
}

// What other blocks have written, and no cache of this one's own may have as it was.
__device__ Vector<Sum> fetched(const Sum* at)
{
    union { $SUM_BITS$ bits; Vector<Sum> sums; } both;
    both.bits = __ldcg((const $SUM_BITS$*)at);
    return both.sums;
}

__device__ Element load_streaming(const Element* at)
{
    union { $BITS$ bits; Element element; } both;
    both.bits = __ldcs((const $BITS$*)at);
    return both.element;
}

__device__ Vector<Element> load_vector(const Element* at)
{
    union { $WIDE_BITS$ bits; Vector<Element> elements; } both;
    both.bits = __ldg((const $WIDE_BITS$*)at);
    return both.elements;
}

// The first row whose beginning on the path is not before a step, by all lanes of a warp.
__device__ Int first_row(const Line* offsets, Int rows, Int base, Int step)
{
    Int low = 0, high = rows;
    while (low < high) {
        const Int stride = (high - low + 31) >> 5, probe = low + (threadIdx.x % 32 + 1) * stride - 1;
        const bool is_before = probe < high && (Int)offsets[probe] - base + probe < step;
        low += __popc(__ballot_sync(ALL, is_before)) * stride;
        if (low + stride - 1 < high) high = low + stride - 1;
    }
    return low;
}

// For each WIDE of `columns` columns, in each matrix of a batch, there are `block_count` blocks. `arrived` counts those
// that have left a piece of a long row, and is 0 before a launch and after it. Without `c` there is nothing beside the
// sums.
extern "C" __global__ void __launch_bounds__(THREADS, $BLOCKS$) multiply_over(
    const Element* __restrict__ values, const Line* __restrict__ offsets, const Column* __restrict__ places,
    const Element* __restrict__ b, const Result* c, Result* out, $FACTORS$Int rows, Int count, Int base, Int columns,
    Int b_row, Int b_column, Int c_row, Int c_column, Int out_row, Int out_column, int block_count, unsigned* arrived,
    Sum* pieces$BATCH_STRIDES$)
{
    __shared__ Element value[CAPACITY];
    __shared__ Column place[CAPACITY];
    __shared__ int begins[STEPS + 2];  // of the row before the block's first one, of its rows, and where they end
    __shared__ Sum partial[RUNS * WIDE];
    __shared__ Int bounds[2];
    __shared__ int taken, longs[LONGS], long_count, opening, members;
    __shared__ bool is_last;
    const int thread = threadIdx.x, lane = thread % COLUMN_LANES, turn = thread / COLUMN_LANES % ELEMENT_LANES;
    const int team = thread / TEAM;
    const unsigned mates = (ALL >> (32 - TEAM)) << (thread % 32 / TEAM * TEAM);
    const Int tile = blockIdx.x / (unsigned)block_count, block = blockIdx.x - tile * block_count, start = block * STEPS;
    $OF_BATCH$
    const Int column = (tile_of_columns * COLUMN_LANES + lane) * VECTOR;
    const bool is_there = column < columns;

    // The rows that begin in the block.
    if (thread < 64) {
        const Int found = first_row(offsets, rows, base, start + thread / 32 * STEPS);
        if (thread % 32 == 0) bounds[thread / 32] = found;
    }
    __syncthreads();
    const Int first = bounds[0], zero = start - first;  // an element that is `zero` were the first step's
    const int lines = clamp(clamp_far(bounds[1] - first), 0, STEPS);
    for (int at = thread; at < lines + 2; at += THREADS) {
        const Int row = first - 1 + at;
        begins[at] = clamp_far((Int)offsets[row < 0 ? 0 : row > rows ? rows : row] - base - zero);
    }
    __syncthreads();

    // Of the row before them there is a part here if it is long; a long one that begins here may go on behind these.
    const bool continues = begins[1] - begins[0] > MAX_ROW && begins[1] > 1;
    const bool is_cut = lines && begins[lines + 1] - begins[lines] > MAX_ROW && begins[lines + 1] > STEPS - lines + 1;
    const int until = is_cut ? STEPS - lines + 1 : lines ? begins[lines + 1] : clamp(begins[1], 1, STEPS + 1);
    const int from = continues ? 1 : begins[1];
    const Int front = zero + from;
    const int most = clamp(clamp_far(front < 0 ? 0 : count - front), 0, CAPACITY);  // within A, whatever offsets are
    const int size = clamp(lines || continues ? until - from : 0, 0, most);
#pragma unroll
    for (int i = 0; i < (CAPACITY + THREADS - 1) / THREADS; ++i)
        if (const int at = i * THREADS + thread; at < size) {
            value[at] = load_streaming(values + front + at);
            place[at] = __ldcs(places + front + at) - (Column)base;
        }
    if (!thread) taken = 0, long_count = continues, longs[0] = -1;
    __syncthreads();

    // The sum of a lane's columns over elements begin, ..., end - 1 of the block; the first element lane has it.
    const Element* const b_columns = b + (is_there ? column * b_column : 0);
    const auto sum_elements = [&](int begin, int end, Sum* sum) {
        bool is_begun = false;
        for (int at = begin + turn; at < end && is_there; at += UNROLLED * ELEMENT_LANES) {
            Vector<Element> others[UNROLLED];
#pragma unroll
            for (int i = 0; i < UNROLLED; ++i)
                if (const int one = at + i * ELEMENT_LANES; one < end)
                    others[i] = load_vector(b_columns + place[one] * b_row);
#pragma unroll
            for (int i = 0; i < UNROLLED; ++i)
                if (const int one = at + i * ELEMENT_LANES; one < end) {
                    const Sum left = $LEFT$;
#pragma unroll
                    for (int v = 0; v < VECTOR; ++v) {
                        const Sum right = number(others[i].at[v]);
                        $TERM$
                    }
                }
            is_begun = true;
        }
        int there = end - begin;
#pragma unroll
        for (int by = ELEMENT_LANES / 2; by; by /= 2) {
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
                const Sum other = shuffle_down(mates, sum[v], by * COLUMN_LANES);
                if (turn < by && turn + by < there) sum[v] = operators::user_add(sum[v], other);
            }
            there = there < by ? there : by;
        }
    };
    const auto store = [&](Int row, const Sum* sum, bool is_any) {
        Vector<Result> given, made;
        Result* const target = out + row * out_row + column * out_column;
        if (c) {
            const Result* const beside = c + row * c_row + column * c_column;
            if ($C_WIDE$) given = *(const Vector<Result>*)beside;
            else for (int v = 0; v < VECTOR; ++v) given.at[v] = beside[v * c_column];
        }
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
            const Sum found = is_any ? sum[v] : operators::identity();
            made.at[v] = rounded(operators::finished(found, c ? number(given.at[v]) : Sum(Real(0))$BESIDE$));
        }
        if ($OUT_WIDE$) *(Vector<Result>*)target = made;
        else for (int v = 0; v < VECTOR; ++v) target[v * out_column] = made.at[v];
    };
    // Of the runs, which are in `partial`, the sum of the lane's columns.
    const auto sum_runs = [&](int runs, Sum* sum) {
        for (int v = 0; v < VECTOR; ++v) sum[v] = partial[lane * VECTOR + v];
        for (int run = 1; run < runs; ++run)
            for (int v = 0; v < VECTOR; ++v)
                sum[v] = operators::user_add(sum[v], partial[run * WIDE + lane * VECTOR + v]);
    };

    for (;;) {
        int mine = 0;
        if (thread % TEAM == 0) mine = atomicAdd(&taken, 1);
        mine = __shfl_sync(mates, mine, 0, TEAM);
        if (mine >= lines) break;
        const int begin = clamp(begins[mine + 1] - from, 0, size), end = begins[mine + 2] - from;
        if (end - begin > LONG) {
            if (thread % TEAM == 0)
                if (const int slot = atomicAdd(&long_count, 1); slot < LONGS) longs[slot] = mine;
            continue;
        }
        Sum sum[VECTOR] = {};
        sum_elements(begin, end < size ? end : size, sum);
        if (!turn && is_there) store(first + mine, sum, end > begin);
    }
    __syncthreads();

    for (int number = 0; number < long_count && number < LONGS; ++number) {
        const int mine = longs[number];
        const bool goes_on = mine < 0 ? begins[1] > STEPS + 1 : is_cut && mine == lines - 1;
        const int begin = mine < 0 ? 0 : clamp(begins[mine + 1] - from, 0, size);
        const int end = goes_on ? size : clamp(begins[mine + 2] - from, begin, size);
        const int each = (end - begin + RUNS - 1) / RUNS;
        const Int row = first + mine;
        for (int run = team; run < RUNS; run += TEAMS) {
            Sum sum[VECTOR] = {};
            const int at = begin + run * each;
            sum_elements(at, at + each < end ? at + each : end, sum);
            if (!turn)
                for (int v = 0; v < VECTOR; ++v) partial[run * WIDE + lane * VECTOR + v] = sum[v];
        }
        __syncthreads();
        Sum sum[VECTOR] = {};
        if (thread < COLUMN_LANES) {
            sum_runs(each ? (end - begin + each - 1) / each : 0, sum);
            if (mine < 0 || goes_on) {
                Sum* const own = pieces + ((tile * block_count + block) * 2 + (mine >= 0)) * WIDE + lane * VECTOR;
                for (int v = 0; v < VECTOR; ++v) own[v] = sum[v];
                __threadfence();
            } else if (is_there) store(row, sum, true);
        }
        __syncthreads();
        if (mine >= 0 && !goes_on) continue;

        // A piece: who comes last of those that have one adds them all up.
        if (!thread) {
            const Int step = (Int)offsets[row] - base + row, last_step = (Int)offsets[row + 1] - base - 1 + row;
            opening = clamp(clamp_far(step / STEPS), 0, (int)block);
            members = clamp(clamp_far(last_step / STEPS) - opening + 1, 1, block_count - opening);
            is_last = (int)atomicInc(arrived + tile * block_count + opening, members - 1) == members - 1;
        }
        __syncthreads();
        if (is_last) {
            __threadfence();
            const Int opened = (tile * block_count + opening) * 2;
            const int share = (members + RUNS - 1) / RUNS;
            for (int run = thread / COLUMN_LANES; run < RUNS; run += THREADS / COLUMN_LANES) {
                const int at = run * share, stop = at + share < members ? at + share : members;
                for (int piece = at; piece < stop; piece += UNROLLED) {
                    Vector<Sum> others[UNROLLED];
#pragma unroll
                    for (int i = 0; i < UNROLLED; ++i)
                        if (const int one = piece + i; one < stop)
                            others[i] = fetched(pieces + (opened + one * 2 + !one) * WIDE + lane * VECTOR);
#pragma unroll
                    for (int i = 0; i < UNROLLED; ++i)
                        for (int v = 0; v < VECTOR; ++v)
                            if (piece + i < stop)
                                sum[v] = i || piece > at ? operators::user_add(sum[v], others[i].at[v])
                                                         : others[i].at[v];
                }
                for (int v = 0; v < VECTOR; ++v) partial[run * WIDE + lane * VECTOR + v] = sum[v];
            }
            __syncthreads();
            if (thread < COLUMN_LANES && is_there) {
                sum_runs((members + share - 1) / share, sum);
                store(row, sum, true);
            }
        }
        __syncthreads();
    }
}
"""

# A sum begins with its first term, so the caller's addition needs no identity.
CALLER_TERM = """const Sum term = operators::user_multiply(left, right);
                        sum[v] = i || is_begun ? operators::user_add(sum[v], term) : term;"""
CALLER_WORDS = {"TERM": CALLER_TERM, "FACTORS": "", "BESIDE": ""}
SINGLE_PRODUCT_WORDS = {"BATCH_STRIDES": "", "OF_BATCH": "const Int tile_of_columns = tile;"}


def source(
    operators: str,
    dtypes: tuple[Dtype, Dtype],
    indices: tuple[int, int],
    tile: Tile,
    shape: Shape,
    wide: tuple[bool, bool],
    overrides: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The program: the caller's operators, followed by the kernel, so that the operators cannot see its names.

    Args:
        operators: the result of `Operators.as_namespace`.
        dtypes: those of A and of the result.
        indices: the bytes of A's offsets and of its columns.
        tile: how the steps are split.
        shape: how teams lie over columns.
        wide: whether C and the result can be accessed by vectors of a lane's columns.
        overrides: replacements for the template's parts for one product over a semiring.
    """
    stored, result = (REAL.get(dtype, dtype) for dtype in dtypes)
    compute = F32 if dtypes[0] in HALF else dtypes[0]
    nbytes = dtypes[0].itemsize
    words = {
        "STORED": NAMES[stored],
        "RESULT": NAMES[result],
        "BITS": BITS[nbytes],
        "SUM_BITS": BITS[shape.vector * compute.itemsize],
        "WIDE_BITS": BITS[min(WIDEST, nbytes * shape.vector)],
        "LINE": INDICES[indices[0]],
        "PLACE": INDICES[indices[1]],
        "VECTOR": shape.vector,
        "COLUMN_LANES": shape.column_lanes,
        "ELEMENT_LANES": tile.element_lanes,
        "STEPS": tile.steps,
        "MAX_ROW": tile.max_row,
        "C_WIDE": "true" if wide[0] else "false",
        "OUT_WIDE": "true" if wide[1] else "false",
        "THREADS": THREADS,
        "LONG": LONG,
        "RUNS": RUNS,
        "UNROLLED": UNROLLED,
        "BLOCKS": BLOCKS if compute is F32 else BLOCKS_OF_WIDE,
        "LEFT": "number(value[one])",
        **CALLER_WORDS,
        **SINGLE_PRODUCT_WORDS,
        **overrides,
    }
    return operators + NUMBERS + fill_template(KERNEL, {name: str(word) for name, word in words.items()})
