"""How rates change with the number of threads that call and of streams that a supervisor has; bench_supervisor asks."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from timing import Candidate

import dispatch as dp

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

THREADS = (1, 4, 16, 64)
STREAMS = (1, 4, 8, 16)
PATIENCE = 120  # seconds that a burst of all threads may take


def threads_name(count: int) -> str:
    return f"matmul(out=), {count} thread{'s' * (count > 1)}"


def streams_name(count: int) -> str:
    return f"submit_many, {count} stream{'s' * (count > 1)}"


class Callers:
    """Threads that call `matmul(out=)` in bursts, each on a stream of its own and into outputs of its own."""

    def __init__(self, requests: list[dp.MatmulRequest], count: int) -> None:
        self._start, self._end = (threading.Barrier(count + 1, timeout=None) for _ in range(2))
        self._ending = False
        self._errors: list[BaseException] = []
        shares = [requests[number::count] for number in range(count)]
        self._threads = [threading.Thread(target=self._run, args=(share,), daemon=True) for share in shares]
        for thread in self._threads:
            thread.start()

    def _run(self, share: list[dp.MatmulRequest]) -> None:
        matmul = dp.matmul
        while True:
            self._start.wait()
            if self._ending:
                return
            try:
                for request in share:
                    matmul(request.a, request.b, out=request.out)
                share[0].device.executor().stream.synchronize()
            except BaseException as error:  # noqa: BLE001 - it is raised where the burst was asked for
                self._errors.append(error)
            self._end.wait()

    def burst(self) -> None:
        """All of them make their calls, and wait for these."""
        self._start.wait(PATIENCE)
        self._end.wait(PATIENCE)
        if self._errors:
            raise self._errors.pop()

    def close(self) -> None:
        self._ending = True
        self._start.wait(PATIENCE)
        for thread in self._threads:
            thread.join(PATIENCE)


def threads(stack: ExitStack, requests: Callable[[], list[Any]], timed: Callable[..., Any]) -> list[Candidate]:
    """Each number of threads, over requests of its own; they end with the stack."""
    found = []
    for count in THREADS:
        mine = requests()
        callers = Callers(mine, count)
        stack.callback(callers.close)
        found.append(Candidate(threads_name(count), timed(callers.burst), _last(mine)))
    return found


def streams(
    stack: ExitStack, device: dp.Device, requests: Callable[[], list[Any]], timed: Callable[..., Any]
) -> list[Candidate]:
    """Each number of streams of a supervisor, over requests of its own; the supervisors end with the stack."""
    found = []
    for count in STREAMS:
        mine = requests()
        sup = stack.enter_context(dp.Supervisor(device, streams=count))

        def work(sup: dp.Supervisor = sup, mine: list[Any] = mine) -> None:
            for future in sup.submit_many(mine):
                future.result()

        found.append(Candidate(streams_name(count), timed(work), _last(mine)))
    return found


def _last(requests: list[Any]) -> Callable[[], Any]:
    return lambda: requests[-1].out.numpy().astype("f8")
