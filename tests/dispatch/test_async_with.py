"""`async with` a supervisor: the loop goes on while it starts and while it drains, and nothing is lost in silence."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

import dispatch as dp
from dispatch.errors import BadRequest, Undelivered

PATIENCE = 120  # seconds, on a machine that has other things to do
TICKS = 50  # of the loop, without which a request that is slow does not end


class Slow:
    """A request's work that ends once the loop has ticked: where draining blocks the loop, it never does."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.entered, self.release, self.then = threading.Event(), threading.Event(), then
        self.is_done = False

    def __call__(self) -> None:
        self.entered.set()
        assert self.release.wait(PATIENCE)
        self.then()
        self.is_done = True


def refuse() -> None:
    raise BadRequest("a", "this", "that")


async def tick(then: Callable[[], object]) -> None:
    for _ in range(TICKS):
        await asyncio.sleep(0.001)
    then()


async def entered(slow: Slow) -> None:
    assert await asyncio.to_thread(slow.entered.wait, PATIENCE)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_the_loop_ticks_while_one_is_made_on_a_thread(isolation):
    async def main() -> int:
        ticks = 0

        async def count() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        counting = asyncio.create_task(count())
        async with await asyncio.to_thread(dp.Supervisor, "host", streams=1, isolation=isolation) as sup:
            counting.cancel()
            x = sup.device.zeros((2, 2))
            assert (await sup.submit(dp.MatmulRequest(x, x))).shape == (2, 2)
        if isolation == "process":
            sup.device.close()
        return ticks

    assert asyncio.run(main()) > 0


def test_the_loop_ticks_while_a_slow_request_drains(probe):
    async def main() -> None:
        slow = Slow()
        async with dp.Supervisor("host", streams=1) as sup:
            future = sup.submit(probe(slow))
            queued = sup.submit(probe(lambda: 7))
            await entered(slow)
            ticking = asyncio.create_task(tick(slow.release.set))
        assert slow.is_done
        assert future.done()
        assert queued.result() == 7
        await ticking

    before = set(threading.enumerate())
    asyncio.run(main())
    left = set(threading.enumerate()) - before
    for thread in left:  # one that has told the loop that all is closed may still be about to return
        thread.join(timeout=60)
    assert not [thread.name for thread in left if thread.is_alive()]


def test_draining_waits_for_no_thread_of_the_loops_executor(probe):
    async def main() -> None:
        slow, loop = Slow(), asyncio.get_running_loop()
        async with dp.Supervisor("host", streams=1) as sup:
            future = sup.submit(probe(slow))
            for _ in range(64):  # more than the executor has threads
                loop.run_in_executor(None, future.result)
            ticking = asyncio.create_task(tick(slow.release.set))
        await ticking

    asyncio.run(main())


def test_what_nobody_asked_for_is_raised_as_the_block_is_left(probe):
    async def main(error: Exception | None) -> None:
        async with dp.Supervisor("host", streams=1) as sup:
            sup.submit(probe(refuse))
            if error is not None:
                raise error

    with pytest.raises(Undelivered, match="1 failure"):
        asyncio.run(main(None))
    with pytest.raises(KeyError) as caught:
        asyncio.run(main(KeyError("the user's")))
    assert isinstance(caught.value.__context__, Undelivered)


@pytest.mark.parametrize("end", ["with the loop", "after the loop"])
def test_who_is_cancelled_while_it_drains_leaves_at_once_and_the_drain_goes_on(probe, end, monkeypatch):
    told: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    slow, left = Slow(refuse), []
    behind = Slow()
    behind.release.set()

    async def leave() -> None:
        async with dp.Supervisor("host", streams=1) as sup:
            sup.submit(probe(slow))
            sup.submit(probe(behind))
            await entered(slow)
            left.append(sup)

    async def main() -> None:
        leaving = asyncio.create_task(leave())
        while not any(thread.name == "dispatch host closing" for thread in threading.enumerate()):
            await asyncio.sleep(0.001)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert not behind.is_done
        if end == "with the loop":
            slow.release.set()
            await asyncio.to_thread(joined)

    def joined() -> None:
        for thread in threading.enumerate():
            if thread.name == "dispatch host closing":
                assert not thread.daemon  # the interpreter does not exit before it has ended
                thread.join(PATIENCE)

    asyncio.run(main())
    slow.release.set()
    joined()
    assert behind.is_done  # what was queued has run
    assert left[0].stats().queued == 0
    assert [type(args.exc_value) for args in told] == [Undelivered]
    assert [type(error) for error in told[0].exc_value.exceptions] == [BadRequest]


def test_what_has_come_as_the_task_is_cancelled_is_told_to_the_loop(probe):
    told: list[dict] = []

    async def leave() -> None:
        async with dp.Supervisor("host", streams=1) as sup:
            sup.submit(probe(refuse))

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        leaving = asyncio.create_task(leave())
        await asyncio.sleep(0)  # it is draining
        for thread in threading.enumerate():
            if thread.name == "dispatch host closing":
                thread.join(PATIENCE)  # drained: the loop has not heard of that yet
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving

    asyncio.run(main())
    assert [type(context["exception"]) for context in told] == [Undelivered]


def test_without_a_thread_to_be_had_it_drains_all_the_same(probe, monkeypatch):
    ran = []

    async def main() -> None:
        async with dp.Supervisor("host", streams=1) as sup:
            sup.submit(probe(lambda: ran.append(1)))
            monkeypatch.setattr(threading.Thread, "start", no_thread)
        monkeypatch.undo()

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    asyncio.run(main())
    assert ran == [1]


def test_an_interpreter_drains_before_it_exits():
    script = """
import asyncio, time
import dispatch as dp

async def leave():
    async with dp.Supervisor("host", streams=1) as sup:
        x = sup.device.array([[1.0]])
        for _ in range(2000):
            sup.submit(dp.MatmulRequest(x, x)).add_done_callback(lambda _: time.sleep(0.0005))
        sup.submit(dp.MatmulRequest(x, x)).add_done_callback(lambda _: print("the last", flush=True))

async def main():
    leaving = asyncio.create_task(leave())
    await asyncio.sleep(0.05)
    leaving.cancel()
    print("left", flush=True)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split("\n")[:2] == ["left", "the last"]
