"""Many calls by tensors of torch's from many threads, and torch at work beside a child that faults; see test_models."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import real_models
import torch

import dispatch as dp
from dispatch import torch as ours

if TYPE_CHECKING:
    from collections.abc import Callable

F = torch.nn.functional
PATIENCE = 60
NEAR = 2e-2  # of the largest element: bf16 keeps 8 bits, and gradients are products of what was rounded before
SLACK = 64 << 20  # bytes: the allocators of 8 threads; what a call in a hundred thousand may not leave is 1 KiB
EXTENTS = ((16, 64, 32), (33, 40, 24), (64, 128, 128), (7, 256, 64))  # rows, in, out


class Work:
    """One linear layer with GELU, its gradients, a plain product and a norm, for one set of extents."""

    def __init__(self, place: str, rows: int, wide: int, out: int) -> None:
        torch.manual_seed(rows)
        shapes = ((rows, wide), (out, wide), (out,))
        self.x, self.weight, self.bias = (torch.randn(shape).bfloat16().to(place) for shape in shapes)
        self.leaves = [t.clone().requires_grad_() for t in (self.x, self.weight, self.bias)]
        self.dy = torch.randn(rows, out).bfloat16().to(place)
        x, weight, bias = (t.detach().double().requires_grad_() for t in (self.x, self.weight, self.bias))
        y = F.gelu(F.linear(x, weight, bias), approximate="tanh")
        dx, dweight, dbias = torch.autograd.grad(y, (x, weight, bias), self.dy.double())
        y, product = y.detach(), (x @ weight.T).detach()
        norm = F.layer_norm(x, (wide,)).detach()
        self.turns: list[tuple[Callable[[], tuple[Any, ...]], tuple[Any, ...]]] = [
            (lambda: (dp.matmul(self.x, self.weight.T),), (product,)),
            (lambda: (ours.linear(self.x, self.weight, self.bias, "gelu"),), (y,)),
            (lambda: (ours.layer_norm(self.x, (wide,)),), (norm,)),
            (self._gradients, (dx, dweight, dbias)),
        ]

    def _gradients(self) -> tuple[Any, ...]:
        y = ours.linear(*self.leaves, "gelu")
        return torch.autograd.grad(y, self.leaves, self.dy)


def resident() -> int:
    """The bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def hammer(place: str, threads: int, calls: int) -> dict[str, int]:
    """So many calls from so many threads, each on two streams of its own, every result checked; memory stays flat.

    Results are held against float64 where they are, without waiting for them: each thread waits at its end alone.
    Gives back by how many bytes memory grew after the first tenth of the calls: the process's, and torch's on a GPU.
    """
    on_gpu = place != "cpu"
    everything = [Work(place, *extents) for extents in EXTENTS]
    turns = [turn for work in everything for turn in work.turns]
    streams = [[torch.cuda.Stream(), torch.cuda.Stream()] if on_gpu else [None, None] for _ in range(threads)]
    if on_gpu:
        torch.cuda.synchronize()  # the operands are there for all streams

    def work(number: int, count: int) -> float:
        worst = [torch.zeros((), dtype=torch.float64, device=place) for _ in streams[number]]
        if on_gpu:
            torch.cuda.synchronize()
        for turn in range(count):
            side = turn // 3 % 2
            with torch.cuda.stream(streams[number][side]) if on_gpu else contextlib.nullcontext():
                call, wants = turns[(turn + number) % len(turns)]
                for found, want in zip(call(), wants, strict=True):
                    off = (found.double() - want).abs().max() / want.abs().max()
                    worst[side] = torch.maximum(worst[side], off.nan_to_num(torch.inf))
        if on_gpu:
            for stream in streams[number]:
                stream.synchronize()
        return max(float(one) for one in worst)

    errors: list[float] = []
    both = threading.Barrier(threads + 1)

    def life(number: int) -> None:
        """The same thread has the same streams throughout: what is kept for them is there after the first part."""
        try:
            for part in (calls // 10, calls):
                errors.append(work(number, part // threads))
                both.wait()  # memory is looked at
                both.wait()
        except BaseException:
            both.abort()
            raise

    def memory() -> dict[str, int]:
        gc.collect()
        found = {"resident": resident()}
        if on_gpu:
            torch.cuda.synchronize()
            found |= {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
            found["taken"] = -torch.cuda.mem_get_info()[0]
        return found

    looks = []
    with ThreadPoolExecutor(threads) as pool:
        lives = [pool.submit(life, number) for number in range(threads)]
        with contextlib.suppress(threading.BrokenBarrierError):  # a thread has failed, and says so below
            for _ in range(2):
                both.wait()
                looks.append(memory())
                both.wait()
        for failure in [one.exception() for one in lives]:
            if failure is not None and not isinstance(failure, threading.BrokenBarrierError):
                raise failure
    before, after = looks
    assert max(errors) <= NEAR, errors
    grown = {name: after[name] - before[name] for name in before}
    assert grown.get("allocated", 0) == 0, grown
    assert all(growth <= SLACK for growth in grown.values()), grown
    return grown


def beside_a_fault(trouble: Any, device: str, place: str, kind: str, rounds: int) -> int:
    """Requests in a child that fault, one after the other, while torch runs a fused model here, forward and backward.

    Gives back how often torch ran; each time its numbers were those of before.
    """
    case = real_models.CASES["encoder"]
    model, x = case.model(True, place, torch.bfloat16), case.operand(True, place, torch.bfloat16)
    report = ours.fuse(model)
    assert report.replaced
    wants = {name: t.double() for name, t in real_models.forward_and_back(model, x).items()}
    done, failures, ended = 0, [], threading.Event()

    def check() -> None:
        found = real_models.forward_and_back(model, x)
        for name, want in wants.items():
            off = float((found[name].double() - want).norm() / want.norm())
            assert off <= NEAR, (name, off)

    def torchs() -> None:
        nonlocal done
        try:
            while not ended.is_set():
                check()
                done += 1
        except BaseException as error:  # noqa: BLE001  # told by who waits for this thread
            failures.append(error)

    many: dict[str, Any] = {"streams": 2, "max_restarts": 100, "max_seconds": 600}
    sup = dp.Supervisor(device, isolation="process", setup=(trouble.__name__,), **many)
    beside = threading.Thread(target=torchs)
    try:
        with sup:
            a = sup.device.array(np.full(4096, 3.0, np.float32))
            sup.submit(trouble.Trouble("fine", a, sup.device.zeros(4096))).result(PATIENCE)
            beside.start()
            for _ in range(rounds):
                guilty = sup.submit(trouble.Trouble(kind, a, sup.device.zeros(4096)))
                error = guilty.exception(PATIENCE)
                assert isinstance(error, dp.errors.DispatchError), error
                good = sup.submit(trouble.Trouble("fine", a, sup.device.zeros(4096))).result(PATIENCE)
                assert (good.numpy() == 3.0).all()
            ended.set()
            beside.join(PATIENCE)
            assert sup.stats().restarts >= rounds
    finally:
        ended.set()
        if beside.ident is not None:
            beside.join(PATIENCE)
        sup.device.close()
    if failures:
        raise failures[0]
    check()
    return done
