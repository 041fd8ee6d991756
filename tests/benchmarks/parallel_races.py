"""What blocks of `dispatch.parallel` take on this rank: sharded products, and training beside torch's DDP.

bench_collectives.py calls it on every rank, in processes that have torch.distributed and a world of ours.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import dispatch as dp
from dispatch import parallel

if TYPE_CHECKING:
    from collections.abc import Callable

    Call = Callable[[], object]

SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 28672, 8192))  # m, k and n of all ranks, bf16
NETWORKS = {"digits": ((64, 128, 10), 96), "wide": ((64, 4096, 4096, 4096, 10), 2048)}  # layers, batch of a rank
STEPS = 20


def calls_of(comm: Any, m: int, k: int, n: int) -> dict[str, tuple[Call, Call, Call]]:
    """Each block, its product alone and its collective alone, over the same operands."""
    import torch

    size, device = comm.size, comm.device
    shapes = ((m, k // size), (k // size, n), (m // size, k), (k, n // size))
    x, w, rows, columns = (dp.from_dlpack(torch.randn(s, device="cuda", dtype=torch.bfloat16)) for s in shapes)
    shapes = ((m, n), (m // size, n), (m, k), (m, n // size))
    whole, share, gathered, out = (device.zeros(s, "bf16") for s in shapes)
    of_ranks, wide = whole.reshape(size, m // size, n), gathered.reshape(size, m // size, k)
    return {
        "matmul_all_reduce": (
            lambda: parallel.matmul_all_reduce(x, w, comm=comm),
            lambda: dp.matmul(x, w, out=whole),
            lambda: dp.all_reduce(whole, comm=comm, out=whole),
        ),
        "matmul_reduce_scatter": (
            lambda: parallel.matmul_reduce_scatter(x, w, comm=comm),
            lambda: dp.matmul(x, w, out=whole),
            lambda: dp.reduce_scatter(of_ranks, comm=comm, out=share),
        ),
        "all_gather_matmul": (
            lambda: parallel.all_gather_matmul(rows, columns, comm=comm),
            lambda: dp.matmul(gathered, columns, out=out),
            lambda: dp.all_gather(rows, comm=comm, out=wide),
        ),
    }


def products(comm: Any, quick: bool, timed: Callable[[Call, int], float]) -> dict[str, float]:
    """Seconds of each block, of its product alone and of its collective alone; `timed(call, repeats)` measures."""
    found: dict[str, float] = {}
    for m, k, n in SHAPES[:1] if quick else SHAPES:
        for name, each in calls_of(comm, m, k, n).items():
            for what, call in zip(("block", "product", "collective"), each, strict=True):
                repeats, turns = (3, 1) if quick else (20, 4)
                found[f"{name} {m}x{k}x{n} {what}"] = min(timed(call, repeats) for _ in range(turns))
    return found


def share_of_ideal(found: dict[str, float]) -> dict[str, float]:
    """The longer of product and collective, by what the block takes."""
    names = [name.removesuffix(" block") for name in found if name.endswith(" block")]
    return {n: max(found[f"{n} product"], found[f"{n} collective"]) / found[f"{n} block"] for n in names}


def training(world: Any, rank: int, quick: bool) -> dict[str, Any]:
    """Milliseconds of a step of one network: alone, by DDP, and by data_parallel; and how far the weights are apart."""
    import time

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    found: dict[str, Any] = {}
    for name, (sizes, batch) in NETWORKS.items():

        def made(sizes: tuple[int, ...] = sizes) -> Any:
            torch.manual_seed(3)
            layers: list[Any] = []
            for before, after in itertools.pairwise(sizes):
                layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
            return torch.nn.Sequential(*layers[:-1]).cuda()

        generator = torch.Generator("cuda").manual_seed(rank)
        x = torch.randn(batch, sizes[0], device="cuda", generator=generator)
        y = torch.randint(10, (batch,), device="cuda", generator=generator)
        sides = {
            "alone": Plain(made()),
            "DDP": Plain(DistributedDataParallel(made())),
            "dispatch": Averaged(made(), world),
        }
        best = dict.fromkeys(sides, float("inf"))
        for turn in range(2 if quick else 8):
            for side in list(sides)[:: 1 if turn % 2 else -1]:
                dist.barrier()
                torch.cuda.synchronize()
                begun = time.perf_counter()
                for _ in range(STEPS):
                    sides[side].step(x, y)
                torch.cuda.synchronize()
                best[side] = min(best[side], (time.perf_counter() - begun) / STEPS * 1e3)
        pairs = zip(sides["DDP"].network.parameters(), sides["dispatch"].network.parameters(), strict=True)
        found |= {f"{name}, {side}, ms": took for side, took in best.items()}
        found[f"{name}, weights apart"] = max(float((a - b).abs().max()) for a, b in pairs)
    return found


class Plain:
    """A step of torch's own."""

    def __init__(self, network: Any) -> None:
        import torch

        self.network = network
        self.optimizer = torch.optim.SGD(network.parameters(), 0.05)

    def step(self, x: Any, y: Any) -> None:
        """Forward, backward, update."""
        import torch

        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.network(x), y).backward()
        self.optimizer.step()


class Averaged(Plain):
    """The same with gradients that come out of the backward pass as the mean over all ranks."""

    def __init__(self, network: Any, world: Any) -> None:
        from dispatch.torch import data_parallel

        super().__init__(network)
        self.parallel = data_parallel(network, comm=world.communicator)
