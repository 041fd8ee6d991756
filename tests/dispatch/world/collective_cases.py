"""Every collective on all ranks of a world, held against the reference from the parts of all; for any kind of world.

Each rank draws the operands of all ranks from one seed, so that it knows what the others have.
"""

import itertools
from types import SimpleNamespace

import numpy as np

import dispatch as dp
from dispatch.keys import BF16, F8E4M3, F8E5M2, F16, F32, F64, I8, I32, I64, U8, U32, U64
from dispatch.ops.collective.cases import bound
from dispatch.ops.collective.reference import RankInput, rank_result
from dispatch.testing.check import normal

DTYPES = (F64, F32, F16, BF16, F8E4M3, F8E5M2, I8, U8, I32, U32, I64, U64)
COUNT = [0]  # of results that were compared


def drawn(rng, dtype, shape, size, how):
    """The operands of all ranks; those that are multiplied are near 1, so that nothing overflows."""
    parts = [normal(rng, dtype, shape) for _ in range(size)]
    if how is dp.RedOp.PROD:
        parts = [np.sign(part.astype(np.float64)).astype(dtype.numpy) + dtype.numpy.type(1) for part in parts]
    return parts


def forms(size):
    """The classes with the shapes of x and the choices that there are for so many ranks, without op and dtype."""
    rows = tuple(range(1, size + 1))
    total = sum(rows)
    root = size - 1
    return [
        (dp.AllReduceRequest, lambda _: (5, 7), {}),
        (dp.AllReduceRequest, lambda _: (1,), {"inplace": True}),
        (dp.ReduceToRequest, lambda _: (33,), {"root": root}),
        (dp.ReduceScatterRequest, lambda _: (size, 3), {}),
        (dp.ReduceScatterRequest, lambda _: (total, 2), {"counts": rows}),
        (dp.BroadcastRequest, lambda _: (3, 3), {"root": root}),
        (dp.BroadcastRequest, lambda _: (17,), {"root": 0, "inplace": True}),
        (dp.AllGatherRequest, lambda _: (2, 3), {}),
        (dp.AllGatherRequest, lambda r: (rows[r], 3), {"counts": rows}),
        (dp.GatherToRequest, lambda _: (4,), {"root": root}),
        (dp.GatherToRequest, lambda r: (rows[r], 3), {"root": 0, "counts": rows}),
        (dp.ScatterFromRequest, lambda _: (size, 5), {"root": root}),
        (dp.ScatterFromRequest, lambda _: (total, 2), {"root": 0, "counts": rows}),
        (dp.AllToAllRequest, lambda _: (size, 4), {}),
        (dp.AllToAllRequest, lambda _: (total, 2), {"uneven": True}),
        (dp.SendRecvRequest, lambda _: (6,), {"ring": True}),
    ]


def uneven(rank, size):
    """How many rows a rank sends to each: any matrix would do, whose rows sum up to one number."""
    return tuple((np.arange(size) + rank) % size + 1)


def make(kind, world, x, choices, dtype):
    """This rank's request."""
    given = {name: value for name, value in choices.items() if name not in ("inplace", "uneven", "ring")}
    rank, size = world.rank, world.size
    if choices.get("uneven"):
        given["send_counts"] = tuple(map(int, uneven(rank, size)))
        given["recv_counts"] = tuple(int(uneven(other, size)[rank]) for other in range(size))
    if choices.get("ring"):
        given |= {"dest": (rank + 1) % size, "source": (rank - 1) % size}
    if kind is dp.ScatterFromRequest and rank != choices["root"]:
        shape = (choices["counts"][rank], *x.shape[1:]) if "counts" in choices else x.shape[1:]
        return kind(None, comm=world, out=world.device.empty(shape, dtype), **given)
    operand = world.device.array(x)
    if choices.get("inplace"):
        given["out"] = operand
    return kind(operand, comm=world, **given)


def failures(world, dtypes=DTYPES, seed=3):
    """What is wrong, as lines; each rank looks at its own results."""
    return [*compared(world, dtypes, seed), *between_two(world), *in_views(world)]


def compared(world, dtypes=DTYPES, seed=3, run=dp.run):
    rng, failed = np.random.default_rng(seed), []
    for kind, shape_of, choices in forms(world.size):
        reduces = hasattr(kind, "reduce")
        for dtype, how in itertools.product(dtypes, dp.RedOp if reduces else (None,)):
            if how is dp.RedOp.PREMUL_SUM and world.size == 1 and dtype in (F8E4M3, F8E5M2):
                continue  # which the rows refuse
            seeds = rng.integers(1 << 30)
            xs = [drawn(np.random.default_rng([seeds, r]), dtype, shape_of(r), 1, how)[0] for r in range(world.size)]
            factors = [float(1 + r % 3) for r in range(world.size)]
            given = dict(choices)
            if how is not None:
                given["reduce"] = how
            if how is dp.RedOp.PREMUL_SUM:
                given["factor"] = factors[world.rank]
            request = make(kind, world, xs[world.rank], given, dtype)
            why = wrong(world, request, xs, factors, how, run)
            if why:
                failed.append(f"{request.op} {dtype} {how and how.name} {choices}: {why}")
    return failed


def wrong(world, request, xs, factors, how, run=dp.run):
    """Run a request and compare; "" where it is right."""
    own = np.float64 if xs[0].dtype.kind not in "iu" else xs[0].dtype
    counts = [getattr(request, "send_counts", None) or getattr(request, "counts", None)] * world.size
    if getattr(request, "send_counts", None) is not None:
        counts = [tuple(map(int, uneven(r, world.size))) for r in range(world.size)]
    if request.op in ("all_reduce", "reduce_to", "reduce_scatter"):
        parts = [
            RankInput(x.astype(own), f if how is dp.RedOp.PREMUL_SUM else 1, c)
            for x, f, c in zip(xs, factors, counts, strict=True)
        ]
        spread = [RankInput(np.abs(p.x.astype(np.float64)), p.factor, c) for p, c in zip(parts, counts, strict=True)]
        kept = SimpleNamespace(
            **{n: getattr(request, n, None) for n in ("op", "red_op", "counts")},
            root=getattr(request, "root", world.rank),
        )
        size = rank_result(kept, world.rank, spread)
    else:
        parts, size = [RankInput(x, 1, c) for x, c in zip(xs, counts, strict=True)], None
    expected = rank_result(request, world.rank, parts)
    result = run(request)
    COUNT[0] += 1
    if expected is None or result is None:
        return "" if expected is None and result is None else f"gave {result}, expected {expected}"
    found = result.numpy().astype(np.float64)
    far = np.abs(found - expected.astype(np.float64))
    allowed = bound(request, expected.astype(np.float64), size if size is not None else 0, world.size)
    if far.shape != np.shape(expected) or not (far <= allowed).all():
        return f"off by {far.max() if far.size else far.shape}"
    return ""


def between_two(world):
    """Sends and receives in a group, both ways at once, and a barrier."""
    rank, size = world.rank, world.size
    device, failed = world.device, []
    sent = device.array(np.full((3, 2), rank, np.float32))
    back, onward = device.empty((3, 2)), device.empty((3, 2))
    right, left = (rank + 1) % size, (rank - 1) % size
    with dp.collective_group():
        dp.send(sent, comm=world, peer=right)
        dp.send(sent, comm=world, peer=left)
        dp.recv(onward, comm=world, peer=left)
        dp.recv(back, comm=world, peer=right)
        total = dp.all_reduce(sent, comm=world)
    dp.barrier(comm=world)
    # From the two neighbours, which are one where there are two ranks: what comes first is what was sent first.
    if not (onward.numpy() == left).all() or not (back.numpy() == right).all():
        failed.append("a group of sends and receives")
    if not (total.numpy() == sum(range(size))).all():
        failed.append("a sum in a group")
    COUNT[0] += 3
    return failed


def in_views(world):
    """all_gather and reduce_scatter whose part is a view of the whole."""
    rank, size, failed = world.rank, world.size, []
    whole = world.device.array(np.zeros((size, 4), np.float32))
    whole[rank].copy_from(np.full(4, rank + 1.0))
    dp.all_gather(whole[rank], comm=world, out=whole)
    if not (whole.numpy() == np.arange(1, size + 1)[:, None]).all():
        failed.append("all_gather in place")
    dp.reduce_scatter(whole, comm=world, out=whole[rank])
    if not (whole[rank].numpy() == (rank + 1.0) * size).all():
        failed.append("reduce_scatter in place")
    COUNT[0] += 2
    return failed
