"""What one would write without a supervisor to have a GPU's work in other processes; bench_isolation races them.

torch.multiprocessing: workers that share the parent's tensors and get the numbers of those to multiply over queues.
Ray: actors that keep their operands and are called. Both answer when a product is done, as a supervisor's future does.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
from bench_supervisor import timed
from timing import Candidate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench_supervisor import Product

TORCH_ONE, TORCH_MANY = "torch.multiprocessing, one by one", "torch.multiprocessing, lists of 128"
TORCH_LONE = "torch.multiprocessing, a lone request"
RAY_MANY, RAY_LONE = "Ray actors, all at once", "Ray actors, a lone request"
LIST = 128  # numbers in a message: as many as a supervisor sends at once


def torch_worker(orders: Any, answers: Any) -> None:
    """In a process of its own: multiply what is named, answer when the GPU is done with it."""
    import torch

    a, b, outs = orders.get()
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    answers.put([])
    with torch.cuda.stream(stream):
        while (numbers := orders.get()) is not None:
            for number in numbers:
                torch.mm(a, b, out=outs[number])
            event.record()
            event.synchronize()
            answers.put(numbers)


@contextlib.contextmanager
def torch_processes(product: Product, workers: int) -> Iterator[list[Candidate]]:
    """Candidates over torch.multiprocessing, whose processes end with the block."""
    import torch
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    a, b = (torch.from_numpy(x).to("cuda", torch.bfloat16) for x in (product.a, product.b))
    outs = torch.full((product.calls, *product.a.shape), float("nan"), dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    orders, answers = [context.SimpleQueue() for _ in range(workers)], context.SimpleQueue()
    processes = [context.Process(target=torch_worker, args=(queue, answers), daemon=True) for queue in orders]
    for process, queue in zip(processes, orders, strict=True):
        process.start()
        queue.put((a, b, outs))
    for _ in processes:
        answers.get()

    def rate(size: int) -> None:
        missing = product.calls
        for number, start in enumerate(range(0, product.calls, size)):
            orders[number % workers].put(list(range(start, min(start + size, product.calls))))
        while missing:
            missing -= len(answers.get())

    def lone() -> None:
        for number in range(product.calls):
            orders[0].put([number])
            answers.get()

    def result() -> Any:
        return outs[-1].float().cpu().numpy()

    try:
        yield [
            Candidate(TORCH_ONE, timed(lambda: rate(1)), result),
            Candidate(TORCH_MANY, timed(lambda: rate(LIST)), result),
            Candidate(TORCH_LONE, timed(lone), result),
        ]
    finally:
        for process, queue in zip(processes, orders, strict=True):
            queue.put(None)
            process.join(10)
            process.kill()


@contextlib.contextmanager
def ray_actors(product: Product, workers: int) -> Iterator[list[Candidate]]:
    """Candidates over Ray's actors on this machine, which end with the block."""
    import ray

    class Worker:
        def __init__(self, a: Any, b: Any, calls: int) -> None:
            self.a, self.b = a, b
            self.outs = np.full((calls, *a.shape), np.nan, np.float32)

        def multiply(self, number: int) -> None:
            np.matmul(self.a, self.b, out=self.outs[number])

        def result(self, number: int) -> Any:
            return self.outs[number]

    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        kind = ray.remote(num_cpus=1)(Worker)
        actors = [kind.remote(product.a, product.b, product.calls) for _ in range(workers)]

        def many() -> None:
            ray.get([actors[number % workers].multiply.remote(number) for number in range(product.calls)])

        def lone() -> None:
            for number in range(product.calls):
                ray.get(actors[0].multiply.remote(number))

        last = product.calls - 1
        yield [
            Candidate(RAY_MANY, timed(many), lambda: ray.get(actors[last % workers].result.remote(last))),
            Candidate(RAY_LONE, timed(lone), lambda: ray.get(actors[0].result.remote(last))),
        ]
    finally:
        ray.shutdown()
