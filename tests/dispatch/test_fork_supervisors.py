"""Processes that are forked beside supervisors, their children and their memory: a parent loses nothing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("forked_programs", Path(__file__).with_name("forked_programs.py"))
programs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(programs)
run = programs.run

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
