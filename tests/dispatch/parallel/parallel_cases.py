"""Each building block against one device in float64: what every rank of a world runs, whichever kind of world it is.

`failures(world)` gives lines; tests run it in worlds of threads, of MPI's processes, and on GPUs. All ranks draw the
same numbers.
"""

from __future__ import annotations

import numpy as np

import dispatch as dp
from dispatch import parallel
from dispatch.errors import NoRow

# Batch, heads of Q, of K and V, rows of a rank, width, causal.
ATTENTION = ((2, 3, 3, 8, 16, False), (1, 4, 2, 16, 32, True), (1, 1, 1, 1, 8, True))
UNIT = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}


def failures(world, dtype="f64", seed=7, large=1):
    """What is wrong; `large` makes the products that many times as large."""
    failed = []
    for part in (products, buckets, experts, attention, stages):
        failed += [f"{part.__name__}: {why}" for why in part(world, dtype, seed, large)]
    return failed


def far(found, right, size, dtype, steps):
    """ "" where a result is within so many roundings of numbers of a size, else how far it is off."""
    found = found.numpy().astype(np.float64)
    if found.shape != right.shape:
        return f"{found.shape} for {right.shape}"
    if not right.size:
        return ""
    off, allowed = np.abs(found - right), steps * UNIT[dtype] * size + 1e-300
    return "" if (off <= allowed).all() else f"off by {(off / allowed).max():.3g} times what is allowed"


def rounded(world, x, dtype):
    """Numbers on the device, and what they are once rounded."""
    made = world.device.array(x).astype(dtype)
    return made, made.numpy().astype(np.float64)


# -- products ---------------------------------------------------------------------------------------------------------
def products(world, dtype, seed, large):
    rank, size, failed = world.rank, world.size, []
    for *extents, chunks in ((12, 5, 7, 1), (13, 8, 3, 2), (64, 16, 24, 4), (3, 1, 2, 8), (10, 6, 4, None)):
        m, k, n = (size * extent * large for extent in extents)
        rng = np.random.default_rng([seed, m, k])
        a, b, bias = rng.standard_normal((m, k)), rng.standard_normal((k, n)), rng.standard_normal(n)
        (x, a), (w, b), (v, bias) = (rounded(world, each, dtype) for each in (a, b, bias))
        right, spread = a @ b, (np.abs(a) @ np.abs(b)) * (1 + size)
        columns = slice(rank * k // size, (rank + 1) * k // size)
        rows, outs = (slice(rank * each // size, (rank + 1) * each // size) for each in (m, n))
        kept = {"comm": world, "chunks": chunks}
        steps = k + 4 if dtype in ("f64", "f32") else 4
        by_rows = (x[:, columns], w[columns])
        active = np.maximum(right + bias, 0)[:, outs]
        mine = (x[rows], w[:, outs])
        for name, found, wanted, span in (
            ("matmul_all_reduce", parallel.matmul_all_reduce(*by_rows, **kept), right, spread),
            ("matmul_reduce_scatter", parallel.matmul_reduce_scatter(*by_rows, **kept), right[rows], spread[rows]),
            ("all_gather_matmul", parallel.all_gather_matmul(*mine, **kept), right[:, outs], spread[:, outs]),
            ("matmul_all_gather", parallel.matmul_all_gather(x, w[:, outs], **kept), right, spread),
            (
                "all_gather_matmul, RELU_BIAS",
                parallel.all_gather_matmul(*mine, bias=v[outs].copy(), epilogue="RELU_BIAS", **kept),
                active,
                spread[:, outs] + np.abs(bias[outs]),
            ),
        ):  # fmt: skip
            if why := far(found, wanted, span, dtype, steps):
                failed.append(f"{name} of {m}x{k}x{n} in {chunks} chunks: {why}")
    return failed


# -- gradients --------------------------------------------------------------------------------------------------------
def buckets(world, dtype, seed, large):
    del large
    rng, failed = np.random.default_rng([seed, 1]), []
    shapes = [(3, 5), (7,), (16, 16), (1,), (0, 4), (40, 3)]
    made = parallel.GradientBuckets(shapes, comm=world, dtype=dtype, bucket_bytes=1200)
    if made.count < 2:
        failed.append(f"{made.count} buckets")
    for step in range(3):
        drawn = [rng.standard_normal((world.size, *shape)) for shape in shapes]
        order = [int(place) for place in rng.permutation(len(shapes))]
        values = [each.astype(made.gradients[0].dtype.numpy) for each in drawn]
        for place in order[world.rank % 2 :] + order[: world.rank % 2]:  # not the same order on all ranks
            made.gradients[place].copy_from(values[place][world.rank])
            made.ready(place)
        for place, found in enumerate(made.wait()):
            exact = values[place].astype(np.float64)
            if why := far(found, exact.mean(0), np.abs(exact).sum(0), dtype, world.size + 2):
                failed.append(f"gradient {place} of step {step}: {why}")
    return failed


# -- experts ----------------------------------------------------------------------------------------------------------
def experts(world, dtype, seed, large):
    rank, size, failed = world.rank, world.size, []
    for local in (1, 3):
        rng, k, n = np.random.default_rng([seed, local]), 16 * large, 8 * large
        counts = rng.integers(0, 9, (size, size * local))
        counts[:, -1] = 0  # an expert that nobody asks
        counts[0] *= rng.integers(0, 2)
        x = [rng.standard_normal((int(each.sum()), k)) for each in counts]
        weights = rng.standard_normal((size * local, k, n))
        mine, w = rounded(world, x[rank], dtype), rounded(world, weights, dtype)
        own = w[0][rank * local : (rank + 1) * local]
        found = parallel.expert_matmul(mine[0], own, counts[rank], comm=world)
        of = np.repeat(np.arange(size * local), counts[rank])
        right = np.einsum("ik,ikn->in", mine[1], w[1][of])
        spread = np.einsum("ik,ikn->in", np.abs(mine[1]), np.abs(w[1][of]))
        if why := far(found, right, spread, dtype, k + 4 if dtype in ("f64", "f32") else 4):
            failed.append(f"{local} experts a rank: {why}")
    return failed


# -- attention --------------------------------------------------------------------------------------------------------
def attention(world, dtype, seed, large):
    """In f16 and bf16, which is what `sdpa_fwd` has rows for; in the others it is these."""
    rank, size, failed = world.rank, world.size, []
    kinds = (dtype,) if dtype in ("f16", "bf16") else ("f16", "bf16")
    for kind in kinds:
        for batch, heads, of_k, own, width, causal in ATTENTION:
            rng, rows = np.random.default_rng([seed, own]), size * own * large
            shapes = ((batch, heads, rows, width), *[(batch, of_k, rows, width)] * 2)
            q, k, v = (rounded(world, rng.standard_normal(shape), kind) for shape in shapes)
            here = slice(rank * own * large, (rank + 1) * own * large)
            mine = [each[0][:, :, here].copy() for each in (q, k, v)]
            try:
                o, stats = parallel.ring_attention(*mine, comm=world, causal=causal)
            except NoRow as refused:
                failed.append(str(refused).splitlines()[0])
                continue
            exact, sums = whole(q[1], np.repeat(k[1], heads // of_k, 1), np.repeat(v[1], heads // of_k, 1), causal)
            largest = np.abs(v[1]).max()
            if why := far(o, exact[:, :, here], largest, kind, 8):
                failed.append(f"{kind}, causal={causal}, {own} rows: O {why}")
            if why := far(stats, sums[:, :, here], 8 + np.abs(sums[:, :, here]), kind, 2):
                failed.append(f"{kind}, causal={causal}, {own} rows: statistics {why}")
    return failed


def whole(q, k, v, causal):
    """Attention over all rows, and the logarithm of each row's sum."""
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    powers = np.exp(scores - top)
    total = powers.sum(-1, keepdims=True)
    return powers / total @ v, top + np.log(total)


# -- stages -----------------------------------------------------------------------------------------------------------
def stages(world, dtype, seed, large):
    """A chain of products with tanh left out: gradients of every stage's weights against those of one device."""
    rank, size, failed = world.rank, world.size, []
    width, rows = 8 * large, 4
    for count in (1, 2, 5):
        rng = np.random.default_rng([seed, count])
        inputs = [rounded(world, rng.standard_normal((rows, width)), dtype) for _ in range(count)]
        weights = [rounded(world, rng.standard_normal((width, width)) / np.sqrt(width), dtype) for _ in range(size)]
        w, kept, seen = weights[rank][0], {}, []

        def forward(number, x, w=w, kept=kept, inputs=inputs):
            kept[number] = inputs[number][0] if x is None else x
            return dp.matmul(kept[number], w)

        def backward(number, dy, w=w, kept=kept, seen=seen):
            x = kept.pop(number)
            dy = dp.matmul(x, w) if dy is None else dy  # of the loss that is half the sum of squares
            seen.append((number, dp.matmul(x.T, dy)))
            return dp.matmul(dy, w.T)

        like = None if rank == 0 else world.device.empty((rows, width), dtype)
        parallel.one_forward_one_backward(forward, backward, count, comm=world, activation=like)
        for number, found in seen:
            xs = [inputs[number][1]]
            for _, each in weights:
                xs.append(xs[-1] @ each)
            dy = xs[-1]
            for _, each in weights[:rank:-1]:
                dy = dy @ each.T
            right = xs[rank].T @ dy
            steps = (width if dtype in ("f64", "f32") else 1) * 4 * (size + 2)  # each product is rounded once in f16
            if why := far(found, right, np.abs(right).max() + 1, dtype, steps):
                failed.append(f"{count} micro-batches, weights of stage {rank}, number {number}: {why}")
        if sorted(number for number, _ in seen) != list(range(count)):
            failed.append(f"{count} micro-batches: {[number for number, _ in seen]}")
    return failed
