"""A thread's requests in flight under tests/chaos.py, each with what must come of it."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

import dispatch as dp
from dispatch.errors import DeviceFault, TaintedTensor

if TYPE_CHECKING:
    from chaos import Storm

N = 16  # extent of the products
WINDOW = 16  # requests that a thread has in flight
PATIENCE = 120  # seconds: longer is a deadlock


class Client:
    """One thread's requests in flight, each with what must come of it."""

    def __init__(self, storm: Storm, rng: np.random.Generator) -> None:
        self.storm, self.rng = storm, rng
        dev = storm.sup.device
        self.slots = deque(dev.array(np.full((N, N), np.nan, np.float32)) for _ in range(WINDOW + 1))
        self.copies = deque(dev.array(np.full(64, np.nan, np.float32)) for _ in range(WINDOW + 1))
        self.sum = dev.zeros((N, N))
        self.total = np.zeros((N, N))
        self.flying: deque[tuple[str, dp.Future, Any]] = deque()  # kind, future, right result

    def send(self, ticket: int) -> None:
        kind = ("product", "fresh", "copy", "sum")[int(self.rng.integers(4))]
        a, b, right = self.storm.pairs[int(self.rng.integers(len(self.storm.pairs)))]
        if kind == "product":
            self.slots.rotate()
            self.slots[0].copy_from(np.full((N, N), np.nan, np.float32))
            request: Any = dp.MatmulRequest(a, b, out=self.slots[0])
        elif kind == "fresh":
            request = dp.MatmulRequest(a, b)
        elif kind == "copy":
            self.copies.rotate()
            self.copies[0].copy_from(np.full(64, np.nan, np.float32))
            request = sys.modules["trouble"].Trouble("fine", self.storm.source, self.copies[0])
            right = self.storm.vector
        else:
            self.settle(0)  # it reads what it writes: alone, so that its value is known
            request = dp.MatmulRequest(a, b, c=self.sum, beta=1.0, out=self.sum)
            self.settle_sum(self.storm.submit(ticket, request), right)
            return
        self.flying.append((kind, self.storm.submit(ticket, request), right))
        self.settle(WINDOW)

    def settle_sum(self, future: dp.Future, right: Any) -> None:
        """End the sum; where it could not be repeated, what it wrote must not be readable before it is overwritten."""
        error = future.exception(PATIENCE)
        self.storm.count("sum", error)
        if error is None:
            self.total = self.total + right
            if not is_close(self.sum.numpy(), self.total):
                self.storm.wrong("a sum is not right")
        elif not isinstance(error, DeviceFault) or "cannot be run again" not in str(error):
            self.storm.wrong(f"a sum ended in {error!r}")
        else:
            try:
                self.sum.numpy()
                self.storm.wrong("what may be half written was read")
            except TaintedTensor:
                self.total = np.zeros((N, N))
                self.sum.copy_from(self.total)

    def settle(self, left: int) -> None:
        """Wait for the oldest, until only so many are left."""
        while len(self.flying) > left:
            kind, future, right = self.flying.popleft()
            error = future.exception(PATIENCE)
            self.storm.count(kind, error)
            if error is not None:
                self.storm.wrong(f"a {kind}, which could be repeated, ended in {error!r}")
            elif not is_close(future.result().numpy(), right):
                self.storm.wrong(f"a {kind} is not right")


def is_close(found: Any, right: Any) -> bool:
    """Sums of 16 products in f32, and up to thousands of those added up: far below what a lost product would make."""
    return bool(np.abs(found - right).max() <= 1e-3 * max(1.0, np.abs(right).max()))
