"""Ctrl-C in the main thread at every place where the interpreter lets it in: every future ends, nothing stays held."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest

import dispatch as dp

spec = importlib.util.spec_from_file_location("interrupts", Path(__file__).with_name("interrupts.py"))
interrupts = importlib.util.module_from_spec(spec)
spec.loader.exec_module(interrupts)
PATIENCE, EVERYWHERE, Interrupts = interrupts.PATIENCE, interrupts.EVERYWHERE, interrupts.Interrupts
made, settle, request_of = interrupts.made, interrupts.settle, interrupts.request_of
check_works, no_threads_left = interrupts.check_works, interrupts.no_threads_left


def awaited(sup, request):
    """As asyncio.run() does, but that a loop that was interrupted runs nothing more."""

    async def one():
        return [await future for future in [sup.submit(request), sup.submit(request)]]

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(one())
    finally:
        loop.close()


def cancel_some(sup, request):
    futures = sup.submit_many([request] * 4)
    for future in futures[::-1]:
        future.cancel()


def known(sup, request):
    """A request with an output of its own, which its child will know."""
    kept = vars(request)
    if "again" not in kept:
        kept["again"] = dp.MatmulRequest(request.a, request.a, out=sup.device.zeros((4, 4)))
    return kept["again"]


def submit_known(sup, request):
    """As many at once, whose child knows them, as go together."""
    sup.submit_many([known(sup, request)] * 12)


def sampled(sup, request):
    """Submit as often as it takes for the last request to be one whose latency is measured."""
    while True:
        future = sup.submit(request)
        if future._wait_list is not None and future._wait_list.callbacks:
            return future
        future.result(PATIENCE)


ACTIONS = {
    "submit": lambda sup, request: [sup.submit(request) for _ in range(2)],
    "submit later": lambda sup, request: sup.submit(
        request, timeout=PATIENCE, priority=-1, after=[sup.submit(request)]
    ),
    "submit fresh": lambda sup, request: sup.submit(request.replace(a=request.a, b=request.b)),
    "submit many": lambda sup, request: sup.submit_many([request] * 12),
    "submit known": submit_known,
    "submit known alone": lambda sup, request: sup.submit(known(sup, request)).result(PATIENCE),
    "result": lambda sup, request: sup.submit(request).result(PATIENCE),
    "results": lambda sup, request: [future.result(PATIENCE) for future in sup.submit_many([request] * 3)],
    "await": awaited,
    "cancel": cancel_some,
    "sample": lambda sup, request: sampled(sup, request).result(PATIENCE),
    "callback": lambda sup, request: sup.submit(request).add_done_callback(lambda future: future.done()),
}


def go_through(sup, made, action, share, rng):
    request = request_of(sup)
    check_works(sup, request, "nothing")
    interrupts, count, quiet = Interrupts(share, rng), 0, 0
    while quiet < 3:  # what other threads do varies: not every run comes to the same places
        if interrupts.run(lambda: action(sup, request)):
            count, quiet = count + 1, 0
        else:
            quiet += 1
        settle(sup, made, interrupts.place)
        check_works(sup, request, interrupts.place)
        made.clear()
    return count


@pytest.mark.parametrize("what", ACTIONS)
@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.usefixtures("no_threads_left")
def test_an_interrupt_anywhere_ends_every_future_and_harms_no_other(isolation, what, made, rng):
    share = 1 if isolation == "thread" or EVERYWHERE else 5
    with dp.Supervisor("host", streams=2, isolation=isolation, queue_size=4) as sup:
        count = go_through(sup, made, ACTIONS[what], share, rng)
        assert sup._pool.failures.take() is None  # no interrupt was kept in the place of a callback's error
    print(f"{count} places")
    assert count >= 10
    if isolation == "process":
        sup.device.close()
