"""Processes that are forked while other threads are at work: on the host all goes on, in both."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("forked_programs", Path(__file__).with_name("forked_programs.py"))
programs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(programs)
run = programs.run

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
