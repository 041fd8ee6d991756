"""Numbers that are drawn by rejection, in NumPy: the host's rows and the reference, step by step like the kernels.

Only elements whose candidate was rejected take part in the next round; each takes the next words of its own stream.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import numpy_call
from dispatch.libraries.nvrtc.philox import HALF, LOW, QUAD, philox
from dispatch.ops.random.alias_table import table_of
from dispatch.ops.random.bounded_integers import WORD
from dispatch.ops.random.methods import binomial_hat, poisson_hat
from dispatch.ops.random.permutations import ROUNDS, SMALL
from dispatch.ops.random.reference_single import numbers_of_single
from dispatch.ops.random.single_precision import is_single
from dispatch.ops.random.streams import LAST_BLOCK, TAG

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.host_plan import Results
    from dispatch.device.layout import Array
    from dispatch.ops.random.alias_table import AliasTable
    from dispatch.ops.random.methods import Hat

__all__ = ["Draws", "evaluate_drawn", "numpy_draws"]


class Draws:
    """The streams of elements; `at` says which of them a method is about."""

    def __init__(self, seed: int, index: Array) -> None:
        self.seed, self.index = seed, index.astype(np.uint64)
        self.used = np.zeros(len(index), np.uint64)

    def pair(self, at: Array) -> Array:
        """The next two words of each as the halves of one."""
        used, index = self.used[at], self.index[at]
        last = np.full(len(at), TAG, np.uint64)
        block = philox((used // np.uint64(2), index & LOW, index >> HALF, last), self.seed).astype(np.uint64)
        self.used[at] = used + np.uint64(1)
        first = np.where(used % np.uint64(2), block[:, 2], block[:, 0])
        second = np.where(used % np.uint64(2), block[:, 3], block[:, 1])
        return np.asarray(first | second << HALF)

    def unit(self, at: Array) -> Array:
        """Uniform in (0, 1]."""
        return ((self.pair(at) >> np.uint64(11)) + np.uint64(1)) * 2.0**-53  # type: ignore[no-any-return]

    def gaussian(self, at: Array) -> Array:
        """Normal."""
        size = np.sqrt(-2 * np.log(self.unit(at)))
        return np.asarray(size * np.cos(2 * math.pi * self.unit(at)))

    def repeat_until_taken(self, at: Array, turn: Callable[[Array], tuple[Array, Array]]) -> Array:
        """Repeat `turn(at)`, which gives numbers and which of them are taken, for those that are not."""
        out, left = np.empty(len(at)), np.arange(len(at))
        while len(left):
            found, taken = turn(at[left])
            out[left[taken]] = found[taken]
            left = left[~taken]
        return out


def log_factorial(k: Array) -> Array:
    """log(k!) by Stirling's series, from 10 on."""
    x, passed = k + 1.0, np.ones(len(k))
    while (low := x < 10).any():
        passed[low] *= x[low]
        x[low] += 1
    r = 1 / (x * x)
    rest = (1 / 12 - r * (1 / 360 - r * (1 / 1260 - r * (1 / 1680 - r / 1188)))) / x
    return np.asarray((x - 0.5) * np.log(x) - x + 0.9189385332046727 + rest - np.log(passed))


def counts(d: Draws, at: Array, table: AliasTable) -> Array:
    """Counts by their table."""
    return table.drawn(words_of(d, at), lambda places: d.pair(at[places]) & LOW)


def poisson(d: Draws, at: Array, lam: float) -> Array:
    """Numbers of events where many are expected."""
    hat = poisson_hat(lam)

    def turn(here: Array) -> tuple[Array, Array]:
        k, v, us, sure = transformed(d, here, hat)
        open_ones = ~sure & (k >= 0) & ~((us < 0.013) & (v > us))
        safe = np.where(open_ones, k, 1.0)
        height = safe * hat.log_odds - lam - log_factorial(safe)
        return k, sure | (open_ones & (np.log(v * hat.alpha / (hat.a / (us * us) + hat.b)) <= height))

    return d.repeat_until_taken(at, turn)


def transformed(d: Draws, here: Array, hat: Hat) -> tuple[Array, Array, Array, Array]:
    """Hoermann's candidates, what they are taken or left by, their places from an end, and which are taken at once."""
    u, v = d.unit(here) - 0.5, d.unit(here)
    us = 0.5 - np.abs(u)
    return np.floor((2 * hat.a / us + hat.b) * u + hat.center), v, us, (us >= 0.07) & (v <= hat.sure)


def searched(u: Array, first: float | Array, growth: Callable[[int], Any], most: int) -> Array:
    """The first k whose sum of probabilities is no less than u; each is `growth(k)` times the one before."""
    p, k = np.broadcast_to(np.asarray(first, float), u.shape).copy(), np.zeros(len(u))
    total, number = p.copy(), 0
    while number < most and (on := u > total).any():
        number += 1
        k[on] = number
        p = p * growth(number)
        total[on] += p[on]
    return k


def binomial(d: Draws, at: Array, trials: Array, p: Array) -> Array:
    """How many of so many trials succeed, each element with its own."""
    out = np.where(p >= 1, trials, 0.0)
    drawn = np.flatnonzero((trials > 0) & (p > 0) & (p < 1))
    less = np.where(p > 0.5, 1 - p, p)
    scarce = drawn[trials[drawn] * less[drawn] < 10]
    for n, share in {(trials[i], less[i]) for i in scarce}:
        these = scarce[(trials[scarce] == n) & (less[scarce] == share)]
        out[these] = binomial_by_inversion(d, at[these], n, share)
    for n, share in {(trials[i], less[i]) for i in drawn if trials[i] * less[i] >= 10}:
        these = drawn[(trials[drawn] == n) & (less[drawn] == share)]
        out[these] = binomial_by_rejection(d, at[these], n, share)
    return np.where((p > 0.5) & (p < 1), trials - out, out)


def binomial_by_inversion(d: Draws, at: Array, n: float, p: float) -> Array:
    odds = p / (1 - p)
    first = math.exp(n * math.log(1 - p))
    return searched(d.unit(at), first, lambda k: (n - k + 1) / k * odds, int(min(n, 1000)))


def binomial_by_rejection(d: Draws, at: Array, n: float, p: float) -> Array:
    hat = binomial_hat(n, p)

    def turn(here: Array) -> tuple[Array, Array]:
        k, v, us, sure = transformed(d, here, hat)
        inside = (k >= 0) & (k <= n)
        safe = np.where(inside, k, 0.0)
        height = hat.top - log_factorial(safe) - log_factorial(n - safe) + (safe - hat.mode) * hat.log_odds
        return k, sure | (inside & (np.log(v * hat.alpha / (hat.a / (us * us) + hat.b)) <= height))

    return d.repeat_until_taken(at, turn)


def large_gamma(d: Draws, at: Array, shape: float) -> Array:
    """Gamma numbers of a shape of 1 or more."""
    w = shape - 1 / 3
    c = 1 / math.sqrt(9 * w)

    def turn(here: Array) -> tuple[Array, Array]:
        x = d.gaussian(here)
        root, taken = 1 + c * x, np.zeros(len(here), bool)
        some = root > 0  # the others take no more of their streams
        x, v, u = x[some], root[some] ** 3, d.unit(here[some])
        taken[some] = (u < 1 - 0.0331 * (x * x) ** 2) | (np.log(u) < 0.5 * x * x + w * (1 - v + np.log(v)))
        return w * root**3, taken

    return d.repeat_until_taken(at, turn)


def log_gamma(d: Draws, at: Array, shape: float) -> Array:
    """Logarithms of gamma numbers."""
    if shape >= 1:
        return np.asarray(np.log(large_gamma(d, at, shape)))
    grown = np.log(large_gamma(d, at, shape + 1))
    return np.asarray(grown + np.log(d.unit(at)) / shape)


def truncated(d: Draws, at: Array, low: float, high: float) -> Array:
    """Standard normal numbers between two bounds."""
    if low > 0:
        return truncated_tail(d, at, low, high)
    if high < 0:
        return -truncated_tail(d, at, -high, -low)

    def by_normal(here: Array) -> tuple[Array, Array]:
        x = d.gaussian(here)
        return x, (x >= low) & (x <= high)

    def by_uniform(here: Array) -> tuple[Array, Array]:
        x, u = low + (high - low) * d.unit(here), d.unit(here)
        return x, u <= np.exp(-x * x / 2)

    return d.repeat_until_taken(at, by_normal if high - low > 2.5066282746310002 else by_uniform)


def truncated_tail(d: Draws, at: Array, low: float, high: float) -> Array:
    root = math.sqrt(low * low + 4)
    rate = (low + root) / 2
    wide = high - low > 2 / (low + root) * math.exp(0.5 - low / (low + root))

    def turn(here: Array) -> tuple[Array, Array]:
        first = d.unit(here)
        x = low - np.log(first) / rate if wide else low + (high - low) * first
        u = d.unit(here)
        height = np.exp(-((x - rate) ** 2) / 2 if wide else (low - x) * (low + x) / 2)
        return x, (x <= high) & (u <= height)

    return d.repeat_until_taken(at, turn)


def neighbours(d: Draws, at: Array, block: int) -> Array:
    """The words that quads have in a block, [elements, 4]: each element's own quad's."""
    quads = d.index[at] // np.uint64(QUAD)
    first, last = np.full(len(at), block, np.uint64), np.full(len(at), TAG, np.uint64)
    return philox((first, quads & LOW, quads >> HALF, last), d.seed).astype(np.uint64)


def words_of(d: Draws, at: Array) -> Array:
    """A word of 32 bits of each, from a block that four neighbours share."""
    return np.asarray(neighbours(d, at, LAST_BLOCK)[np.arange(len(at)), d.index[at] % np.uint64(QUAD)])


def whole_numbers(d: Draws, at: Array, count: int) -> Array:
    """Whole numbers below a count, by a word each that neighbours share blocks of, else by an element's own stream."""
    if count <= WORD:
        x = words_of(d, at)
        out, rest, least = x * np.uint64(count) >> HALF, x * np.uint64(count) & LOW, WORD % count
    else:
        place, rows = d.index[at] % np.uint64(QUAD), np.arange(len(at))
        words = np.where((place < 2)[:, None], neighbours(d, at, LAST_BLOCK - 1), neighbours(d, at, LAST_BLOCK - 2))
        first = place % np.uint64(2) * np.uint64(2)
        x = words[rows, first] | words[rows, first + np.uint64(1)] << HALF
        out, rest, least = upper(x, count), x * np.uint64(count % 2**64), WORD**2 % count
    missed = rest < np.uint64(least)
    out[missed] = below(d, at[missed], count)
    return np.asarray(out)


def upper(x: Array, span: int) -> Array:
    """The upper 64 bits of the products of words of 64 bits and a span; the words themselves, of a span of 2^64."""
    if span == WORD**2:
        return x
    r_low, r_high = np.uint64(span & 0xFFFFFFFF), np.uint64(span >> 32)
    low, high = x & LOW, x >> HALF
    cross, other = low * r_high, high * r_low
    middle = (low * r_low >> HALF) + (cross & LOW) + (other & LOW)
    return np.asarray(high * r_high + (cross >> HALF) + (other >> HALF) + (middle >> HALF))


def below(d: Draws, at: Array, span: int) -> Array:
    """Whole numbers below a span of up to 2^64, as u64."""
    least, out, left = np.uint64((2**64 - span) % span), np.empty(len(at), np.uint64), np.arange(len(at))
    while len(left):
        x = d.pair(at[left])
        made, taken = upper(x, span), x * np.uint64(span) >= least
        out[left[taken]] = made[taken]
        left = left[~taken]
    return out


def permutation(request: Any) -> Array:
    """The first numbers of a random order."""
    n, count, offset = request.population, request.count, request.offset
    if n <= SMALL:
        d, order, zero = Draws(request.seed, np.array([offset])), list(range(n)), np.zeros(1, np.intp)
        for i in range(count):
            j = i + int(below(d, zero, n - i)[0])
            order[i], order[j] = order[j], order[i]
        return np.array(order[:count], np.int64)
    bits = max(2, (n - 1).bit_length())
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << (bits - bits // 2)) - 1)
    found, left = np.arange(count, dtype=np.uint64), np.arange(count)
    while len(left):
        low, high = found[left] & low_mask, found[left] >> low_bits
        for turn in range(ROUNDS):
            at = np.uint64(offset) + (high if turn % 2 else low)
            counter = (np.full_like(at, turn), at & LOW, at >> HALF, np.full_like(at, TAG))
            word = philox(counter, request.seed)[:, 0].astype(np.uint64)
            if turn % 2:
                low = low ^ (word & low_mask)
            else:
                high = high ^ (word & high_mask)
        found[left] = high << low_bits | low
        left = left[found[left] >= np.uint64(n)]
    return found.astype(np.int64)


def multinomial(request: Any, d: Draws, at: Array) -> Array:
    """How many trials have each outcome."""
    p = np.asarray(request.pvals)
    out = np.empty((len(at), len(p)), np.int64)
    trials, left = np.full(len(at), float(request.n)), 1.0
    for k in range(len(p)):
        share = 1.0 if k + 1 == len(p) else p[k] / left if left > 0 else 0.0
        out[:, k] = binomial(d, at, trials, np.full(len(at), min(share, 1.0)))
        trials = trials - out[:, k]
        left -= p[k]
    return out


def numbers(request: Any) -> Any:
    """The numbers of a request, one behind the other."""
    if is_single(request):
        return numbers_of_single(request)
    d, at = Draws(request.seed, request.offset + np.arange(request.count)), np.arange(request.count)
    table = table_of(request)
    if table is not None:
        return counts(d, at, table)
    match request.op:
        case "random_integers":
            return np.uint64(request.low % 2**64) + whole_numbers(d, at, request.high - request.low)
        case "random_poisson":
            return poisson(d, at, float(request.lam))
        case "random_gamma":
            shape = float(request.shape_parameter)
            return np.exp(log_gamma(d, at, shape)) * request.scale if shape else np.zeros(len(at))
        case "random_beta":
            x, y = log_gamma(d, at, float(request.a)), log_gamma(d, at, float(request.b))
            return np.asarray(1 / (1 + np.exp(y - x)))
        case "random_binomial":
            return binomial(d, at, np.full(len(at), float(request.n)), np.full(len(at), float(request.p)))
        case "random_truncated_normal":
            return request.mean + request.std * truncated(d, at, *request.standard)
        case "random_choice":
            sums = np.asarray(request.sums)
            u = (d.pair(at) >> np.uint64(11)) * 2.0**-53 * sums[-1]
            return np.minimum(np.searchsorted(sums, u, "right"), len(sums) - 1)
        case "random_multinomial":
            return multinomial(request, d, at)
        case _:
            return permutation(request)


def evaluate_drawn(request: Any, _: np.dtype[Any] | None = None) -> Results:
    """The numbers of a request by name; those of a floating point dtype in f64."""
    shape = request.outputs()["out"].shape
    with np.errstate(all="ignore"):
        found = numbers(request)
    if request.op == "random_integers":
        found = found.astype(request.kind.numpy)
    return {"out": found.reshape(shape)}


numpy_draws = numpy_call(evaluate_drawn)
