"""A supervisor whose workers are in a child process: the same results, and what is left when the child is not."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import (
    BadRequest,
    Closed,
    DeadlineExceeded,
    DeviceFault,
    OutOfMemory,
    StaleTensor,
    TaintedTensor,
    Undelivered,
    WorkerFailed,
)
from dispatch.supervise.process import sending
from dispatch.supervise.process import shared_device as memory
from dispatch.supervise.process.child_process import Standby

ROOT = Path(__file__).parents[3]
PATIENCE = 120  # seconds, on a machine that has other things to do
N = 16


@pytest.fixture
def open_supervisor(trouble):
    """Makes supervisors, and lets the memory of all go at the end."""
    made = []

    def make(**options):
        sup = dp.Supervisor("host", isolation="process", setup=(trouble.__name__,), **{"streams": 2, **options})
        made.append(sup)
        return sup

    yield make
    for sup in made:
        sup.device.close()


@pytest.fixture
def hold(trouble, tmp_path):
    return trouble.Hold(tmp_path)


def child_of(sup):
    return sup._pool._child.process.pid


def pair(dev, rng):
    a, b = (rng.standard_normal((N, N)).astype(np.float32) for _ in range(2))
    return dp.MatmulRequest(dev.array(a), dev.array(b), out=dev.array(np.full((N, N), np.nan, np.float32))), a @ b


def vector(dev, value=0.0):
    return dev.array(np.full(8, value, np.float32))


def close(tensor, expected):
    return np.allclose(tensor.numpy(), expected, rtol=1e-5, atol=1e-5)


# -- the same as with threads ---------------------------------------------------------------------------------------
def test_products_come_out_as_numpy_has_them(open_supervisor, rng):
    with open_supervisor(streams=3) as sup:
        assert child_of(sup) != os.getpid()
        work = [pair(sup.device, rng) for _ in range(40)]
        for _ in range(3):
            for future, (_, right) in zip(sup.submit_many([request for request, _ in work]), work, strict=True):
                assert close(future.result(PATIENCE), right)
        a, b = work[0][0].a, work[0][0].b
        fresh = sup.submit(dp.MatmulRequest(a, b, epilogue=dp.Epilogue.RELU)).result(PATIENCE)
        assert close(fresh, np.maximum(work[0][1], 0))
        assert (sup.stats().done, sup.stats().failed, sup.generation) == (121, 0, 1)


def test_several_outputs_come_back(open_supervisor, rng):
    with open_supervisor() as sup:
        request, right = pair(sup.device, rng)
        both = dp.MatmulRequest(request.a, request.b, epilogue=dp.Epilogue.GELU_AUX)
        _, aux = sup.submit(both).result(PATIENCE)
        assert close(aux, right)


def test_a_refusal_of_the_table_reaches_the_future(open_supervisor):
    with open_supervisor() as sup:
        a = sup.device.array(np.ones((4, 4)), "f64")
        b = sup.device.array(np.ones((4, 4)), "f32")
        with pytest.raises(dp.errors.NoRow, match="needs dtypes"):
            sup.submit(dp.MatmulRequest(a, b)).result(PATIENCE)


def test_asyncio_and_concurrent_futures_wait_for_results(open_supervisor, rng):
    async def main(sup, request):
        return await asyncio.wait_for(sup.submit(request), PATIENCE)

    with open_supervisor() as sup:
        request, right = pair(sup.device, rng)
        assert close(asyncio.run(main(sup, request)), right)
        done, _ = concurrent.futures.wait([sup.submit(request) for _ in range(10)], PATIENCE)
        assert len(done) == 10


def test_a_callback_may_submit(open_supervisor, rng):
    ended = threading.Event()
    with open_supervisor(streams=1) as sup:
        request, _ = pair(sup.device, rng)

        def more(_):
            sup.submit(request).add_done_callback(lambda _: ended.set())

        sup.submit(request).add_done_callback(more)
        assert ended.wait(PATIENCE)


def test_threads_submit_at_once(open_supervisor, rng):
    with open_supervisor(streams=4, queue_size=32) as sup:
        work = [pair(sup.device, rng) for _ in range(8)]
        failed = []

        def go(request, right):
            failed.extend(_ for _ in range(50) if not close(sup.submit(request).result(PATIENCE), right))

        threads = [threading.Thread(target=go, args=one) for one in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not failed
        assert sup.stats().done == 400


def test_what_is_no_request_fails_and_is_not_waited_for(open_supervisor):
    with open_supervisor() as sup:
        futures = [sup.submit(None), sup.submit(None, timeout=60), *sup.submit_many([None, 0, "x"])]
        for future in futures:
            with pytest.raises(BadRequest, match=r"expected a dispatch\.Request"):
                future.result(60)


def test_memory_of_other_devices_and_direct_calls_are_refused(open_supervisor, rng):
    with open_supervisor() as sup:
        elsewhere, _ = pair(dp.device("host"), rng)
        with pytest.raises(BadRequest, match=r"sup\.device\.array"):
            sup.submit(elsewhere).result(PATIENCE)
        request, _ = pair(sup.device, rng)
        with pytest.raises(BadRequest, match=r"sup\.submit"):
            dp.run(request)
        with pytest.raises(BadRequest, match=r"sup\.submit"):
            dp.prepare(request)
        with pytest.raises(BadRequest, match=r"dispatch\.Request"):
            sup.submit("a request").result(PATIENCE)


def test_a_class_that_the_child_cannot_import_is_refused_with_a_hint(trouble):
    sup = dp.Supervisor("host", streams=1, isolation="process")
    sys.path.remove(str(ROOT / "tests"))
    try:
        with dp.Supervisor("host", streams=1, isolation="process") as blind:
            one = vector(blind.device)
            with pytest.raises(BadRequest, match="setup="):
                blind.submit(trouble.Trouble("fine", one, vector(blind.device))).result(PATIENCE)
    finally:
        sys.path.insert(0, str(ROOT / "tests"))
        sup.close()


def test_a_setup_that_fails_is_raised_where_the_supervisor_is_made(capfd):
    with pytest.raises(WorkerFailed, match="before it was ready"):
        dp.Supervisor("host", isolation="process", setup=("no_such_module",))
    assert "no_such_module" in capfd.readouterr().err


NARROW = """
import select
from pathlib import Path
from dispatch.supervise.process.child_workers import HostChild
opened = HostChild._open

def open_late(self):
    told = Path(__file__).with_name("told")
    if self.queue.index == 1 and not told.exists():
        select.select([self.queue.link.socket], [], [])  # until there is a job
        told.touch()
        raise RuntimeError("no room for a stream")
    opened(self)

HostChild._open = open_late
"""


# -- the child is lost ----------------------------------------------------------------------------------------------
def test_a_worker_that_cannot_be_opened_costs_the_child_and_no_request(rng, tmp_path, monkeypatch):
    (tmp_path / "narrow.py").write_text(NARROW)
    monkeypatch.syspath_prepend(tmp_path)
    with dp.Supervisor("host", isolation="process", streams=2, setup=("narrow",)) as sup:
        request, right = pair(sup.device, rng)
        assert np.allclose(sup.submit(request, worker=1).result(PATIENCE).numpy(), right, atol=1e-5)
        assert sup.stats().restarts == 1
    sup.device.close()


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV], ids=lambda s: s.name)
def test_what_was_in_flight_and_queued_ends_well_when_the_child_is_lost(open_supervisor, rng, hold, sent, spare):
    with open_supervisor(spare=spare) as sup:
        work = [pair(sup.device, rng) for _ in range(300)]
        held = trouble_of(sup, "held", once=hold.once)
        futures = sup.submit_many([held, *(request for request, _ in work)])
        hold.release_behind(child_of(sup), sent, PATIENCE)
        for future, (_, right) in zip(futures[1:], work, strict=True):
            assert close(future.result(PATIENCE), right)
        assert futures[0].result(PATIENCE) is held.out
        assert sup.generation == 2
        assert (sup.stats().restarts, sup.stats().failed) == (1, 0)


def trouble_of(sup, kind, value=3.0, **fields):
    return sys.modules["trouble"].Trouble(kind, vector(sup.device, value), vector(sup.device), **fields)


def test_only_the_guilty_request_fails_and_names_itself(open_supervisor, rng):
    with open_supervisor(max_restarts=10, max_seconds=600) as sup:
        work = [pair(sup.device, rng) for _ in range(100)]
        guilty = trouble_of(sup, "exit")
        requests = [request for request, _ in work]
        futures = sup.submit_many([*requests[:50], guilty, *requests[50:]])
        error = futures.pop(50).exception(PATIENCE)
        assert isinstance(error, DeviceFault)
        assert "trouble(exit)" in str(error)
        for future, (_, right) in zip(futures, work, strict=True):
            assert close(future.result(PATIENCE), right)


def test_a_request_that_dies_once_is_not_taken_to_be_guilty(open_supervisor, tmp_path):
    with open_supervisor(max_restarts=10, max_seconds=600) as sup:
        request = trouble_of(sup, "die once", once=str(tmp_path / "died"))
        assert close(sup.submit(request).result(PATIENCE), 3.0)
        assert sup.stats().restarts == 1


def test_what_may_be_half_written_cannot_be_read_until_it_is_overwritten(open_supervisor):
    with open_supervisor(streams=1, max_restarts=10, max_seconds=600) as sup:
        guilty = trouble_of(sup, "die")
        other = vector(sup.device, 5.0)
        with pytest.raises(DeviceFault):
            sup.submit(guilty).result(PATIENCE)
        half = guilty.out
        for read in (half.numpy, lambda: np.asarray(half), lambda: np.from_dlpack(half), half[:2].numpy):
            with pytest.raises(TaintedTensor, match="half written"):
                read()
        dependent = sys.modules["trouble"].Trouble("fine", half, vector(sup.device))
        with pytest.raises(TaintedTensor):
            sup.submit(dependent).result(PATIENCE)
        assert close(guilty.a, 3.0)
        assert close(other, 5.0)
        half[:2].copy_from(np.ones(2, np.float32))
        assert close(half[:2], 1.0)
        with pytest.raises(TaintedTensor):
            half[2:].numpy()
        sup.submit(sys.modules["trouble"].Trouble("fine", other, half)).result(PATIENCE)
        assert close(half, 5.0)
        assert sup.device.taints == 0


def test_a_request_that_reads_what_it_writes_is_not_run_again(open_supervisor, rng, hold):
    with open_supervisor(streams=1) as sup:
        dev = sup.device
        a, b, c = (dev.array(rng.standard_normal((N, N)), "f32") for _ in range(3))
        held = trouble_of(sup, "held", once=hold.once)
        futures = sup.submit_many([held, dp.MatmulRequest(a, b, c=c, out=c)])
        hold.release_behind(child_of(sup), signal.SIGKILL, PATIENCE)
        with pytest.raises(DeviceFault, match="reads what it writes"):
            futures[1].result(PATIENCE)
        with pytest.raises(TaintedTensor):
            c.numpy()
        futures[0].result(PATIENCE)


def test_a_request_whose_operand_was_overwritten_behind_it_is_not_run_again(open_supervisor, hold):
    make = sys.modules["trouble"].Trouble
    with open_supervisor(streams=1) as sup:
        x, y, z = (vector(sup.device, value) for value in (1.0, 2.0, 4.0))
        held = trouble_of(sup, "held", once=hold.once)
        futures = sup.submit_many([held, make("fine", x, y), make("fine", z, x)])
        hold.release_behind(child_of(sup), signal.SIGKILL, PATIENCE)
        with pytest.raises(DeviceFault, match="overwrites its operand a"):
            futures[1].result(PATIENCE)
        assert close(futures[2].result(PATIENCE), 4.0)
        with pytest.raises(TaintedTensor):
            y.numpy()


def test_a_defect_costs_its_request_and_no_process(open_supervisor, rng):
    with open_supervisor(streams=1) as sup:
        request, right = pair(sup.device, rng)
        pid = child_of(sup)
        broken, good = sup.submit_many([trouble_of(sup, "raise"), request])
        with pytest.raises(WorkerFailed, match="a defect"):
            broken.result(PATIENCE)
        assert close(good.result(PATIENCE), right)
        assert (child_of(sup), sup.generation) == (pid, 1)


def test_a_lack_of_memory_costs_its_request_alone(open_supervisor, rng):
    with open_supervisor(streams=1) as sup:
        request, right = pair(sup.device, rng)
        short, good = sup.submit_many([trouble_of(sup, "out of memory"), request])
        with pytest.raises(OutOfMemory):
            short.result(PATIENCE)
        assert close(good.result(PATIENCE), right)
        assert sup.stats().restarts == 0


def test_the_circuit_opens_when_children_are_lost_too_often(open_supervisor, rng):
    sup = open_supervisor(streams=1, max_restarts=1, max_seconds=600)
    request, _ = pair(sup.device, rng)
    futures = sup.submit_many([trouble_of(sup, "die"), request, trouble_of(sup, "die"), request, request])
    errors = [future.exception(PATIENCE) for future in futures]
    assert [type(error) for error in errors] == [DeviceFault, type(None), *[WorkerFailed] * 3]
    assert "max_restarts=1" in str(errors[2])
    with pytest.raises(WorkerFailed, match="2 times"):
        sup.submit(request)
    stats = sup.stats()
    assert (stats.running, stats.queued, stats.done, stats.failed) == (0, 0, 1, 4)
    sup.close()


# -- deadlines ------------------------------------------------------------------------------------------------------
def test_a_request_without_an_end_is_ended_at_its_deadline(open_supervisor, rng):
    with open_supervisor(streams=2) as sup:
        work = [pair(sup.device, rng) for _ in range(20)]
        hung = sup.submit(trouble_of(sup, "hang"), timeout=0.3, worker=0)
        futures = [sup.submit(request, worker=index % 2) for index, (request, _) in enumerate(work)]
        with pytest.raises(DeadlineExceeded):
            hung.result(PATIENCE)
        for future, (_, right) in zip(futures, work, strict=True):
            assert close(future.result(PATIENCE), right)


def test_a_request_that_hangs_before_one_with_a_deadline_is_ended_too(open_supervisor, rng):
    with open_supervisor(streams=1) as sup:
        request, right = pair(sup.device, rng)
        hung = sup.submit(trouble_of(sup, "hang"))
        late = sup.submit(request, timeout=PATIENCE)
        while not late.is_launched:
            threading.Event().wait(0.001)
        late.deadline = 0.0  # it is over only now that the child has it, however long that took
        sup._pool.watch_deadline(late, sup._pool.queues[0])
        with pytest.raises(DeadlineExceeded):
            late.result(PATIENCE)
        again = sup.submit(request, timeout=PATIENCE)
        with pytest.raises(DeadlineExceeded, match="without an end"):
            hung.result(PATIENCE)
        assert close(again.result(PATIENCE), right)


def test_a_request_is_taken_back_before_it_starts(open_supervisor, rng, hold, monkeypatch):
    monkeypatch.setattr(sending, "WINDOW", 1)
    with open_supervisor(streams=1) as sup, hold:
        request, _ = pair(sup.device, rng)
        first, last = sup.submit(trouble_of(sup, "held", once=hold.once)), sup.submit(request)
        assert last.cancel()
        hold.release()
        first.result(PATIENCE)
        assert np.isnan(request.out.numpy()).all()


# -- generations and endings ----------------------------------------------------------------------------------------
def test_observers_hear_of_every_new_generation(open_supervisor, trouble, tmp_path):
    heard = []
    with open_supervisor(max_restarts=10, max_seconds=600) as sup:
        sup.watch_generation(heard.append)
        for _ in range(2):
            hold = trouble.Hold(tmp_path)
            held = sup.submit(trouble_of(sup, "held", once=hold.once))
            hold.release_behind(child_of(sup), signal.SIGKILL, PATIENCE)
            held.result(PATIENCE)
        assert heard == [2, 3]


def test_failures_that_nobody_asked_for_are_raised_at_the_end(open_supervisor):
    with pytest.raises(Undelivered, match=r"trouble\(exit\)"), open_supervisor(max_restarts=10) as sup:
        sup.submit(trouble_of(sup, "exit"))


def test_closing_without_waiting_cancels_what_was_not_sent(open_supervisor, rng, hold):
    sup = open_supervisor(streams=1)
    request, _ = pair(sup.device, rng)
    futures = [sup.submit(trouble_of(sup, "held", once=hold.once)), *sup.submit_many([request] * 1000)]
    with hold:
        sup.close(wait=False)
    done, left = concurrent.futures.wait(futures, PATIENCE)
    assert not left
    assert any(future.cancelled() for future in done)
    with pytest.raises(Closed):
        sup.submit(request)


def test_results_stay_when_the_supervisor_is_closed_until_the_device_is(open_supervisor, rng):
    with open_supervisor() as sup:
        request, right = pair(sup.device, rng)
        out = sup.submit(request).result(PATIENCE)
    assert close(out, right)
    sup.device.close()
    with pytest.raises(StaleTensor):
        out.numpy()


def test_nothing_is_left_behind(open_supervisor, rng, trouble, tmp_path):
    gc.collect()
    before = (set(os.listdir("/proc/self/fd")), set(threading.enumerate()))
    for spare in (False, True):
        with open_supervisor(spare=spare) as sup:
            request, _ = pair(sup.device, rng)
            hold = trouble.Hold(tmp_path)
            held = sup.submit(trouble_of(sup, "held", once=hold.once))
            hold.release_behind(child_of(sup), signal.SIGKILL, PATIENCE)
            held.result(PATIENCE)
            sup.submit(request).result(PATIENCE)
            pids = [child.process.pid for child in sup._pool._children()]
        sup.device.close()
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert len(os.listdir("/proc/self/fd")) <= len(before[0])
    assert not set(threading.enumerate()) - before[1]


def mapped(pid):
    """Bytes of the shared memory that a process maps."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if "memfd:dispatch" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


@pytest.mark.parametrize("spare", [False, True])
def test_memory_that_no_tensor_uses_is_given_back_by_parent_and_children(open_supervisor, rng, spare, monkeypatch):
    monkeypatch.setattr(memory, "LET_GO_SECONDS", PATIENCE)  # they are looked at once they all have let go
    gc.collect()  # memory of earlier tests' devices is mapped until then
    with open_supervisor(streams=1, spare=spare) as sup:
        request, right = pair(sup.device, rng)
        sup.submit(request).result(PATIENCE)
        pids = [os.getpid(), child_of(sup)]
        kept = [mapped(pid) for pid in pids]
        assert all(kept)
        big = sup.device.array(np.ones((1 << 25,), np.float32))
        sup.submit(sys.modules["trouble"].Trouble("fine", big, sup.device.empty(big.shape))).result(PATIENCE)
        assert all(mapped(pid) >= before + 2 * big.nbytes for pid, before in zip(pids, kept, strict=True))
        del big
        sup.device.trim()
        assert [mapped(pid) for pid in pids] == kept
        assert close(sup.submit(request).result(PATIENCE), right)
        os.kill(child_of(sup), signal.SIGKILL)  # the next child has never had what was given back
        assert close(sup.submit(request).result(PATIENCE), right)
        assert mapped(child_of(sup)) == kept[1]


def test_memory_made_while_the_child_is_replaced_reaches_the_next_one(open_supervisor, monkeypatch):
    with open_supervisor(streams=1) as sup:
        made = []
        take = Standby.take

        def take_and_grow(self):
            child = take(self)
            made.append(sup.device.array(np.full(1 << 24, 2.0, np.float32)))
            return child

        monkeypatch.setattr(Standby, "take", take_and_grow)
        assert isinstance(sup.submit(trouble_of(sup, "die")).exception(PATIENCE), DeviceFault)
        out = sup.device.empty(made[-1].shape)
        sup.submit(sys.modules["trouble"].Trouble("fine", made[-1], out)).result(PATIENCE)
        assert out.numpy().all()


def test_ends_of_a_child_before_that_a_forked_process_holds_are_passed_over(open_supervisor, monkeypatch):
    """Closed here, and open in a copy, they stay among what is listened to, and tell that nobody is there."""
    with open_supervisor(streams=1) as sup:
        request = trouble_of(sup, "fine")
        sup.submit(request).result(PATIENCE)
        link = sup._pool._child.links[0].socket
        copy = os.dup(link.fileno())
        os.kill(child_of(sup), signal.SIGKILL)
        sup.submit(request).result(PATIENCE)
        stale, other = os.pipe()
        os.close(other)
        looked, patience = threading.Semaphore(0), sup._pool._patience
        monkeypatch.setattr(sup._pool, "_patience", lambda: looked.release() or patience())
        sup._pool.poll.register(stale, select.EPOLLIN)  # told of at once, and again and again
        for _ in range(5):
            assert looked.acquire(timeout=PATIENCE)
        sup.submit(request).result(PATIENCE)
        assert sup.generation == 2
        sup._pool.poll.unregister(stale)
        os.close(stale)
        os.close(copy)


PARENT = """
import os, signal, sys, time
import dispatch as dp, trouble
sup = dp.Supervisor("host", streams=1, isolation="process", setup=("trouble",), spare=True)
dev = sup.device
sup.submit(trouble.Trouble(sys.argv[1], dev.zeros(8), dev.zeros(8)))
print(*(child.process.pid for child in sup._pool._children()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("busy_with", ["fine", "hang", "stop"])
@pytest.mark.usefixtures("trouble")
def test_a_parent_that_dies_leaves_no_child(busy_with):
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    done = subprocess.run(
        [sys.executable, "-c", PARENT, busy_with],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    for pid in done.stdout.split():
        gone(int(pid))


def gone(pid):
    """Wait until a process that is not ours has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], PATIENCE)[0], f"process {pid} is still there"
    finally:
        os.close(handle)


FORK = """
import os
import numpy as np
import dispatch as dp
with dp.Supervisor("host", streams=1, isolation="process") as sup:
    a = sup.device.array(np.eye(4, dtype=np.float32))
    pid = os.fork()
    if pid == 0:
        try:
            sup.submit(dp.MatmulRequest(a, a))
        except dp.errors.Closed as error:
            os._exit(7 if "spawn" in str(error) else 1)
        os._exit(2)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print(np.array_equal(sup.submit(dp.MatmulRequest(a, a)).result(120).numpy(), np.eye(4)))
"""


def test_a_fork_of_the_parent_is_refused_and_harms_nobody():
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.split() == ["7", "True"], done.stderr
