"""Numbers drawn element by element, in NumPy: the host's rows and the reference, with the same steps as the kernels.

Only elements whose candidate was rejected take part in the next round, with the next words of their own streams.
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
    """The streams of all elements; the argument `at` of methods contains the indices of elements."""

    def __init__(self, seed: int, index: Array) -> None:
        self.seed, self.index = seed, index.astype(np.uint64)
        self.used = np.zeros(len(index), np.uint64)

    def pair(self, at: Array) -> Array:
        """The next two words of each stream as the halves of a word of 64 bits."""
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

    def draw_until_accepted(self, at: Array, attempt: Callable[[Array], tuple[Array, Array]]) -> Array:
        """Repeat `attempt(at)`, which returns candidates and whether they are accepted, for the rejected elements."""
        out, left = np.empty(len(at)), np.arange(len(at))
        while len(left):
            candidate, accepted = attempt(at[left])
            out[left[accepted]] = candidate[accepted]
            left = left[~accepted]
        return out


def log_factorial(k: Array) -> Array:
    """log(k!) by Stirling's series for arguments of at least 10."""
    x, factor = k + 1.0, np.ones(len(k))
    while (low := x < 10).any():
        factor[low] *= x[low]
        x[low] += 1
    r = 1 / (x * x)
    rest = (1 / 12 - r * (1 / 360 - r * (1 / 1260 - r * (1 / 1680 - r / 1188)))) / x
    return np.asarray((x - 0.5) * np.log(x) - x + 0.9189385332046727 + rest - np.log(factor))


def counts(d: Draws, at: Array, table: AliasTable) -> Array:
    """Poisson or binomial numbers by table."""
    return table.draw(words_of(d, at), lambda indices: d.pair(at[indices]) & LOW)


def poisson(d: Draws, at: Array, lam: float) -> Array:
    """Poisson numbers with a mean of at least 10."""
    hat = poisson_hat(lam)

    def attempt(here: Array) -> tuple[Array, Array]:
        k, v, us, immediate = transformed(d, here, hat)
        undecided = ~immediate & (k >= 0) & ~((us < 0.013) & (v > us))
        safe = np.where(undecided, k, 1.0)
        height = safe * hat.log_odds - lam - log_factorial(safe)
        return k, immediate | (undecided & (np.log(v * hat.alpha / (hat.a / (us * us) + hat.b)) <= height))

    return d.draw_until_accepted(at, attempt)


def transformed(d: Draws, here: Array, hat: Hat) -> tuple[Array, Array, Array, Array]:
    """Hoermann's candidates, the uniform numbers that decide on them, 0.5 - |u|, and which are accepted at once."""
    u, v = d.unit(here) - 0.5, d.unit(here)
    us = 0.5 - np.abs(u)
    return np.floor((2 * hat.a / us + hat.b) * u + hat.center), v, us, (us >= 0.07) & (v <= hat.accept_below)


def searched(u: Array, first: float | Array, growth: Callable[[int], Any], most: int) -> Array:
    """The first k with a cumulative probability of at least u; a probability is `growth(k)` times the previous one."""
    p, k = np.broadcast_to(np.asarray(first, float), u.shape).copy(), np.zeros(len(u))
    total, number = p.copy(), 0
    while number < most and (on := u > total).any():
        number += 1
        k[on] = number
        p = p * growth(number)
        total[on] += p[on]
    return k


def binomial(d: Draws, at: Array, trials: Array, p: Array) -> Array:
    """Binomial numbers; each element has its own number of trials and probability."""
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

    def attempt(here: Array) -> tuple[Array, Array]:
        k, v, us, immediate = transformed(d, here, hat)
        inside = (k >= 0) & (k <= n)
        safe = np.where(inside, k, 0.0)
        height = hat.top - log_factorial(safe) - log_factorial(n - safe) + (safe - hat.mode) * hat.log_odds
        return k, immediate | (inside & (np.log(v * hat.alpha / (hat.a / (us * us) + hat.b)) <= height))

    return d.draw_until_accepted(at, attempt)


def large_gamma(d: Draws, at: Array, shape: float) -> Array:
    """Gamma numbers with a shape of at least 1."""
    w = shape - 1 / 3
    c = 1 / math.sqrt(9 * w)

    def attempt(here: Array) -> tuple[Array, Array]:
        x = d.gaussian(here)
        root, accepted = 1 + c * x, np.zeros(len(here), bool)
        some = root > 0  # the others take no further words of their streams
        x, v, u = x[some], root[some] ** 3, d.unit(here[some])
        accepted[some] = (u < 1 - 0.0331 * (x * x) ** 2) | (np.log(u) < 0.5 * x * x + w * (1 - v + np.log(v)))
        return w * root**3, accepted

    return d.draw_until_accepted(at, attempt)


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

    return d.draw_until_accepted(at, by_normal if high - low > 2.5066282746310002 else by_uniform)


def truncated_tail(d: Draws, at: Array, low: float, high: float) -> Array:
    root = math.sqrt(low * low + 4)
    rate = (low + root) / 2
    wide = high - low > 2 / (low + root) * math.exp(0.5 - low / (low + root))

    def attempt(here: Array) -> tuple[Array, Array]:
        first = d.unit(here)
        x = low - np.log(first) / rate if wide else low + (high - low) * first
        u = d.unit(here)
        height = np.exp(-((x - rate) ** 2) / 2 if wide else (low - x) * (low + x) / 2)
        return x, (x <= high) & (u <= height)

    return d.draw_until_accepted(at, attempt)


def neighbours(d: Draws, at: Array, block: int) -> Array:
    """The words of each element's quad in a block, [elements, 4]."""
    quads = d.index[at] // np.uint64(QUAD)
    first, last = np.full(len(at), block, np.uint64), np.full(len(at), TAG, np.uint64)
    return philox((first, quads & LOW, quads >> HALF, last), d.seed).astype(np.uint64)


def words_of(d: Draws, at: Array) -> Array:
    """A word of 32 bits for each element, from a block that four neighbours share."""
    return np.asarray(neighbours(d, at, LAST_BLOCK)[np.arange(len(at)), d.index[at] % np.uint64(QUAD)])


def bounded_integers(d: Draws, at: Array, count: int) -> Array:
    """Integers below `count`, from a word of a shared block, or from the element's own stream if that is rejected."""
    if count <= WORD:
        x = words_of(d, at)
        out, rest, least = x * np.uint64(count) >> HALF, x * np.uint64(count) & LOW, WORD % count
    else:
        place, rows = d.index[at] % np.uint64(QUAD), np.arange(len(at))
        words = np.where((place < 2)[:, None], neighbours(d, at, LAST_BLOCK - 1), neighbours(d, at, LAST_BLOCK - 2))
        first = place % np.uint64(2) * np.uint64(2)
        x = words[rows, first] | words[rows, first + np.uint64(1)] << HALF
        out, rest, least = upper(x, count), x * np.uint64(count % 2**64), WORD**2 % count
    rejected = rest < np.uint64(least)
    out[rejected] = below(d, at[rejected], count)
    return np.asarray(out)


def upper(x: Array, span: int) -> Array:
    """The upper 64 bits of the products of words of 64 bits and a span; the words themselves if the span is 2^64."""
    if span == WORD**2:
        return x
    r_low, r_high = np.uint64(span & 0xFFFFFFFF), np.uint64(span >> 32)
    low, high = x & LOW, x >> HALF
    cross, other = low * r_high, high * r_low
    middle = (low * r_low >> HALF) + (cross & LOW) + (other & LOW)
    return np.asarray(high * r_high + (cross >> HALF) + (other >> HALF) + (middle >> HALF))


def below(d: Draws, at: Array, span: int) -> Array:
    """Integers below a span of up to 2^64, as u64."""
    least, out, left = np.uint64((2**64 - span) % span), np.empty(len(at), np.uint64), np.arange(len(at))
    while len(left):
        x = d.pair(at[left])
        numbers, accepted = upper(x, span), x * np.uint64(span) >= least
        out[left[accepted]] = numbers[accepted]
        left = left[~accepted]
    return out


def permutation(request: Any) -> Array:
    """The first `count` numbers of a random permutation."""
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
    numbers, left = np.arange(count, dtype=np.uint64), np.arange(count)
    while len(left):
        low, high = numbers[left] & low_mask, numbers[left] >> low_bits
        for step in range(ROUNDS):
            at = np.uint64(offset) + (high if step % 2 else low)
            counter = (np.full_like(at, step), at & LOW, at >> HALF, np.full_like(at, TAG))
            word = philox(counter, request.seed)[:, 0].astype(np.uint64)
            if step % 2:
                low = low ^ (word & low_mask)
            else:
                high = high ^ (word & high_mask)
        numbers[left] = high << low_bits | low
        left = left[numbers[left] >= np.uint64(n)]
    return numbers.astype(np.int64)


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
    """The numbers of a request in one array."""
    if is_single(request):
        return numbers_of_single(request)
    d, at = Draws(request.seed, request.offset + np.arange(request.count)), np.arange(request.count)
    table = table_of(request)
    if table is not None:
        return counts(d, at, table)
    match request.op:
        case "random_integers":
            return np.uint64(request.low % 2**64) + bounded_integers(d, at, request.high - request.low)
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
    """The results of a request; floating-point numbers in f64."""
    shape = request.outputs()["out"].shape
    with np.errstate(all="ignore"):
        out = numbers(request)
    if request.op == "random_integers":
        out = out.astype(request.kind.numpy)
    return {"out": out.reshape(shape)}


numpy_draws = numpy_call(evaluate_drawn)
