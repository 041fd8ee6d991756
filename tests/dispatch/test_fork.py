"""Processes that are forked while other threads are at work: on the host all goes on, in both; a parent loses nothing.

Each in a process of its own: what goes wrong here is a deadlock. A child that hangs is ended by an alarm and counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE = 600  # for a whole program, on a machine that has other things to do

BEGIN = """
import faulthandler, gc, itertools, os, signal, socket, sys, tempfile, threading, time, traceback, warnings
warnings.simplefilter("ignore")
import numpy as np
import dispatch as dp
from dispatch.supervise import status_server as status
from dispatch.errors import Closed, DispatchError

status.PATIENCE = 120.0  # seconds that an answer may take: how busy the machine is must not matter
ALARM = 300  # seconds that a forked process has, which needs a fraction of one
host = dp.device("host")
faulthandler.register(signal.SIGALRM, chain=True)  # says where a forked process hangs, which ends by it

def forked(work):
    # Run in a forked process; its exit status, or minus the signal that ended it.
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(ALARM)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def product(n=4, m=5, k=3):
    a, b = host.array(np.ones((n, k), np.float32)), host.array(np.ones((k, m), np.float32))
    assert (np.asarray(dp.matmul(a, b)) == k).all()

def exchange():
    tensor = host.array(np.arange(6, dtype=np.float32))
    assert np.from_dlpack(tensor)[5] == 5
    assert dp.from_dlpack(np.arange(3))[2].item() == 2
    tensor.__dlpack__()  # which nobody consumes
"""


def run(program):
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), f"{done.returncode} {done.stdout} {done.stderr[-3000:]}"


STORM = """
from cudabind import _lazy
from cudabind.sys import cublasLt, cudnn
from dispatch.supervise.process.shared_device import SharedHost
from dispatch.execute.algorithm_cache import AlgorithmCache, Algorithm

shared = SharedHost()
sup = dp.Supervisor("host", streams=2)
child = dp.Supervisor("host", streams=1, isolation="process")
cache = AlgorithmCache("a gpu", "a library", folder=__import__("pathlib").Path(tempfile.mkdtemp()))
counter = itertools.count(1)

def allocate():
    kept = [shared.empty((next(counter) % 5000 + 1,)) for _ in range(20)]
    kept[0] = None
    shared.bytes_in_use()

def grow():
    shared.empty((65 << 20,), "u8")
    shared.trim()

def submit():
    a = host.array(np.ones((3, 3), np.float32))
    for future in sup.submit_many([dp.MatmulRequest(a, a) for _ in range(20)]):
        assert future.result()[0, 0].item() == 3

def submit_to_child():
    a = child.device.array(np.ones((3, 3), np.float32))
    future = child.submit(dp.MatmulRequest(a, a))
    future.add_done_callback(lambda _: None)
    assert future.result()[0, 0].item() == 3

def requests():
    n = next(counter) % 50 + 1
    product(n, 2 * n, n)

def names():
    for module in (cublasLt, cudnn):
        for name in dir(module)[next(counter) % 97 :: 97]:
            getattr(module, name)

def rows():
    len(list(dp.TABLE))
    x = host.array(np.ones((2, 3), np.float32))
    dp.softmax(x)

def tune():
    cache.put("op", str(next(counter) % 9), Algorithm(b"x", 1))
    cache.get("op", "1")

def streams():
    host.executor()
    with host.stream():
        product()

def ask():
    status.ask(os.getpid())

def open_and_close():
    with dp.Supervisor("host", streams=1) as short:
        short.stats()

JOBS = {jobs}
ends = []
go = threading.Event()

def hammer(job):
    try:
        while not ends:
            go.wait()
            job()
    except BaseException:
        traceback.print_exc()
        os._exit(9)

def everything():
    product(7, 2, 9)
    exchange()
    requests()
    names()
    rows()
    tune()
    streams()
    allocate()
    grow()
    kept = shared.array(np.full(1000, 7.0))
    assert (kept.numpy() == 7).all()
    with dp.Supervisor("host", streams=2) as own:
        a = host.array(np.ones((3, 3), np.float32))
        assert own.submit(dp.MatmulRequest(a, a)).result()[0, 0].item() == 3
        assert len(status.ask(os.getpid())) == 1
    for other in (sup, child):
        try:
            other.submit(dp.MatmulRequest(a, a))
        except Closed as error:
            assert "os.fork" in str(error)
        else:
            raise AssertionError("it took a request")
        other.stats()
        other.close()
    child.device.empty((3,))
    child.device.close()
    gc.collect()

threads = [threading.Thread(target=hammer, args=(job,)) for job in JOBS for _ in range({each})]
sys.setswitchinterval(1e-5)
go.set()
for thread in threads:
    thread.start()
results = [forked(everything)]  # the first one imports what the parent has not imported yet
go.clear()  # what the parent lacks takes a second by itself, and twenty where all others go on
rows()
product()
go.set()
results += [forked(everything) for _ in range({count} - 1)]
ends.append(True)
for thread in threads:
    thread.join()
sys.setswitchinterval(5e-3)
assert results == [0] * {count}, results
for each in (product, exchange, allocate, grow, submit, submit_to_child, requests, names, rows, tune, streams, ask):
    each()
sup.close()
child.close()
child.device.close()
shared.close()
print("fine")
"""
KINDS = {
    "exchange": ("exchange",),
    "memory": ("allocate", "grow"),
    "requests": ("requests", "rows", "streams"),
    "supervisors": ("submit", "submit_to_child", "open_and_close"),
    "tables": ("names", "tune", "ask"),
    "all": ("exchange", "allocate", "grow", "requests", "rows", "submit", "submit_to_child", "open_and_close", "names"),
}


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        pytest.param("requests", 1, id="requests-once"),
        *(pytest.param(kind, 8, id=kind, marks=pytest.mark.exhaustive) for kind in KINDS),
    ],
)
def test_a_process_may_be_forked_at_any_moment(kind, count):
    jobs = f"[{', '.join(KINDS[kind])}]"
    run(STORM.replace("{jobs}", jobs).replace("{each}", "2").replace("{count}", str(count)))


def test_a_product_imports_no_logging():
    """Its lock would be taken before ours at a fork, and by imports while ours are held."""
    run("""
product()
assert "logging" not in sys.modules
print("fine")
""")


ROOMS = """
ends = []
results = []
begun = threading.Barrier(2)

def first_products():
    begun.wait()
    dp.softmax(host.array(np.ones((1, 2, 4, 4), np.float32)))

thread = threading.Thread(target=first_products)
thread.start()
begun.wait()

def work():
    x = host.array(np.ones((2, 3), np.float32))
    assert np.allclose(np.asarray(dp.softmax(x)), 1 / 3)

results = [forked(work) for _ in range(5)]
thread.join()
assert results == [0] * 5, results
print("fine")
"""


def test_rows_that_come_in_as_a_process_is_forked_are_there_in_it():
    for _ in range(3):
        run(ROOMS)


SHARED = """
from dispatch.supervise.process.shared_device import SharedHost

dev = SharedHost()
old = dev.array(np.arange(1000))
view, lent = np.asarray(old), np.from_dlpack(old)
inside, outside = socket.socketpair()

def work():
    fresh = [dev.array(np.full(1000, 9)) for _ in range(50)]
    assert (old.numpy() == np.arange(1000)).all() and (lent == np.arange(1000)).all()
    assert all((each.numpy() == 9).all() for each in fresh)
    inside.send(b"1")
    inside.recv(1)
    assert all((each.numpy() == 9).all() for each in fresh)
    old[0:1].copy_from(np.array([-5]))  # as another process that maps a file
    fresh.clear()
    dev.trim()
    view[999] = -7
    dev.close()
    view[998] = -6
    os._exit(0)

made = []

def answer():
    outside.recv(1)
    made.extend(dev.array(np.full(1000, 4)) for _ in range(50))
    outside.send(b"2")

threading.Thread(target=answer).start()
assert forked(work) == 0
assert [*view[[0, 998, 999]]] == [-5, -6, -7] and view[997] == 997
assert all((each.numpy() == 4).all() for each in made) and len(made) == 50
more = dev.array(np.full(1000, 8))
assert (more.numpy() == 8).all() and len(dev.chunks) == 1
dev.close()
print("fine")
"""


def test_a_forked_process_makes_memory_of_its_own_and_sees_what_was_there():
    run(SHARED)


UNHARMED = """
sups = [dp.Supervisor("host", streams=2, isolation=isolation) for isolation in ("thread", "process")]
requests = []
for sup in sups:
    a = (sup.device if sup.device.name == "host" else host).array(np.eye(8, dtype=np.float32))
    requests.append(dp.MatmulRequest(a, a))

def use():
    for sup, request in zip(sups, requests):
        futures = sup.submit_many([request] * 50)
        assert all(future.result(120) is not None for future in futures)

use()
pending = [sup.submit_many([request] * 200) for sup, request in zip(sups, requests)]

def work():
    for futures in pending:
        for future in futures[-3:]:
            try:
                future.result(120)
            except Closed as error:
                assert "os.fork" in str(error)
            future.add_done_callback(lambda _: None)
            future.cancel()
    for sup in sups:
        for call in (lambda: sup.submit(requests[0]), lambda: sup.submit_many([requests[0]])):
            try:
                call()
            except Closed:
                continue
            raise AssertionError("it took a request")
        repr(sup), sup.stats()
        sup.close()
        sup.close(wait=False)
    product()
    {how}

import concurrent.futures, select
for _ in range(6):
    assert forked(work) == 0
    use()
for futures in pending:
    assert all(future.result(120) is not None for future in futures)
from dispatch.supervise.status_server import ask
assert len(ask(os.getpid())) == 2
assert [sup.stats().failed for sup in sups] == [0, 0] and [sup.generation for sup in sups] == [1, 1]
for sup in sups:
    sup.close()
print("fine")
"""


@pytest.mark.parametrize(
    "how",
    ["pass", "gc.collect(); sups.clear(); pending.clear(); gc.collect()", "import atexit; atexit._run_exitfuncs()"],
)
def test_what_a_forked_process_does_harms_no_supervisor_of_its_parent(how):
    run(UNHARMED.replace("{how}", how))


ENDS = """
import subprocess
given = []
popen = subprocess.Popen

def noting(command, **options):
    given.extend(os.fstat(fd).st_ino for fd in options["pass_fds"])
    time.sleep(0)
    return popen(command, **options)

subprocess.Popen = noting
stop, sups = [], []

def start():
    for _ in range(6):
        sups.append(dp.Supervisor("host", streams=2, isolation="process"))
    stop.append(True)

def held():
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.stat(f"/proc/self/fd/{name}").st_ino)
        except OSError:
            pass
    return inodes

thread = threading.Thread(target=start)
thread.start()
sys.setswitchinterval(1e-5)
reader, writer = os.pipe()
pids = []
while not stop:
    pid = os.fork()
    if pid == 0:
        os.write(writer, b"!" if held() & set(given) else b".")
        signal.pause()
        os._exit(0)
    pids.append(pid)
    assert os.read(reader, 1) == b".", "a forked process holds an end that is a child's"
    if len(pids) > 30:
        os.kill(pids[0], signal.SIGKILL)
        os.waitpid(pids.pop(0), 0)
thread.join()
for sup in sups:  # while the forked ones live
    a = sup.device.array(np.eye(3, dtype=np.float32))
    request = dp.MatmulRequest(a, a)
    assert sup.submit(request).result(120)[0, 0].item() == 1
    os.kill(sup._pool._child.process.pid, signal.SIGKILL)
    assert sup.submit(request).result(120)[0, 0].item() == 1
    assert sup.generation == 2
    sup.close()
for pid in pids:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
print("fine")
"""


def test_a_forked_process_keeps_no_end_of_a_connection_to_a_child():
    run(ENDS)


TWICE = """
def work(depth):
    product()
    exchange()
    with dp.Supervisor("host", streams=1, isolation="process" if depth == 2 else "thread") as sup:
        a = sup.device.array(np.eye(3, dtype=np.float32))
        assert sup.submit(dp.MatmulRequest(a, a)).result(120)[0, 0].item() == 1
        if depth:
            assert forked(lambda: work(depth - 1)) == 0
        assert sup.submit(dp.MatmulRequest(a, a)).result(120)[0, 0].item() == 1

work(3)
import multiprocessing
def job(number):
    product(number + 1)
    return number * number
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(job, range(20)) == [n * n for n in range(20)]
print("fine")
"""


def test_forked_processes_fork_and_supervise_again():
    run(TWICE)
