"""What every test may ask for: random numbers that can be repeated, and a `gpu` mark that says why it skips.

Everything in tests/gpu and tests/benchmarks carries the mark by its place; a test elsewhere asks for it by name.
"""

import functools
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it in what it starts with &
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also in what the tests start, which interrupt it

HERE = Path(__file__).parent
NEEDS_GPU = (HERE / "gpu", HERE / "benchmarks")
# Their tests, or some of them, use several GPUs if there are.
NEEDS_SEVERAL = {
    HERE / "gpu/collective",
    HERE / "gpu/ops/test_fft_several_gpus.py",
    HERE / "gpu/sys/test_cublasXt.py",
    HERE / "gpu/sys/test_cufft.py",
    HERE / "gpu/sys/test_cusolverMg.py",
    HERE / "gpu/sys/test_cutensorMg.py",
    HERE / "gpu/sys/test_nccl.py",
    HERE / "gpu/test_two_gpus.py",
}
# Where several processes run the tests, a file stays in one of them; but these are long, and their tests share nothing.
SPREAD = {
    HERE / "dispatch/cutlass/test_compile.py",
    HERE / "dispatch/test_power.py",
    HERE / "gpu/cudnn",
    HERE / "gpu/cutlass",
    HERE / "gpu/ops",
    HERE / "gpu/test_nonfinite.py",
    HERE / "test_examples.py",
}
# Of files alike in how many tests they have, the first to be handed out and the last: so no process waits for another's
# long test at the end.
TURNS = {HERE / "test_examples.py": -1, HERE / "dispatch/isolate/test_chaos.py": -1, HERE / "dispatch/test_power.py": 1}
# Of these, one process asks gcc about a library's headers: their parameters begin with the library's module.
BY_MODULE = HERE / "cudabind/proof/modules"
SAMPLE, EVERYTHING = "sample]", "all]"  # how names of tests end that run some of their cases, and all
PATIENCE = 120  # seconds that a thread of a closed supervisor has to end, on a machine that has other things to do
SEED = pytest.StashKey[int]()
LINKER = pytest.StashKey[tempfile.TemporaryDirectory[str]]()

# Worker processes are interpreters of their own: let a crash in one of them show where it was, too.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")


def gpu_of(worker: str, visible: str | None, gpus: int) -> str | None:
    """The GPU that one of several processes sees, of those that are visible, or of so many; None for all."""
    names = visible.split(",") if visible else [str(number) for number in range(gpus)]
    return names[int(worker.removeprefix("gw")) % len(names)] if worker and names else None


if "GPU_PER_PROCESS" in os.environ:  # of `make test-gpu`; before anything asks the driver
    seen = gpu_of(
        os.environ.get("PYTEST_XDIST_WORKER", ""),
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        len(list(Path("/dev").glob("nvidia[0-9]*"))),
    )
    if seen is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = seen


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption("--seed", default="0", help="seed of the `rng` fixture: a number (default 0), or 'random'")
    if not pluginmanager.hasplugin("timeout"):
        # The GPU tests also run where only pytest is installed. Then tests have no time limit, rather than no chance.
        parser.addini("timeout", "seconds one test may take (needs pytest-timeout)")


def pytest_configure(config: pytest.Config) -> None:
    given = config.getoption("--seed")
    config.stash[SEED] = int.from_bytes(os.urandom(4), "little") if given == "random" else int(given)
    config.option.seed = str(config.stash[SEED])  # which pytest-xdist's workers are given
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): not enforced, pytest-timeout is not installed")
    link_fast(config)


def link_fast(config: pytest.Config) -> None:
    """Have gcc find gold where there is one: hundreds of small libraries are linked, each in 30 ms less with UBSan."""
    if (gold := shutil.which("ld.gold")) and "COMPILER_PATH" not in os.environ:
        config.stash[LINKER] = folder = tempfile.TemporaryDirectory(prefix="linker")
        Path(folder.name, "ld").symlink_to(gold)
        os.environ["COMPILER_PATH"] = folder.name


def pytest_unconfigure(config: pytest.Config) -> None:
    if folder := config.stash.get(LINKER, None):
        del os.environ["COMPILER_PATH"]
        folder.cleanup()


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.stash[SEED]} (repeat with --seed={config.stash[SEED]})"


@functools.cache
def why_no_gpu() -> str | None:
    """Return why no GPU can be used, or None where one can.

    Asks NVIDIA's own binding and not `cudabind.driver`: a fault of ours must fail the GPU tests, never skip them.
    """
    try:
        from cuda.bindings import driver

        (status,) = driver.cuInit(0)
    except (ImportError, RuntimeError, OSError) as error:  # how a missing libcuda shows depends on the version
        return f"no CUDA driver: {error}"
    if status != driver.CUresult.CUDA_SUCCESS:
        return f"cuInit returned {status.name}"
    status, count = driver.cuDeviceGetCount()
    if status != driver.CUresult.CUDA_SUCCESS or count == 0:
        return f"the driver shows no GPU: cuDeviceGetCount returned {status.name}, {count}"
    return None


def run_together(name: str) -> str:
    """Tests with the same answer are run by one process, one behind the other."""
    file, _, test = name.partition("::")
    is_spread, by_module = sharing(file)
    if is_spread:
        return name
    parameter = test.partition("[")[2] if by_module else ""
    return f"{BY_MODULE} {parameter.rstrip(']').partition('-')[0]}" if parameter else file


@functools.cache
def sharing(file: str) -> tuple[bool, bool]:
    """Whether a file is in `SPREAD`, and whether in `BY_MODULE`: it is asked for each of its tests, several times."""
    path = HERE.parent / file
    return not SPREAD.isdisjoint((path, *path.parents)), BY_MODULE in path.parents


@functools.cache
def needs_gpu(path: Path) -> bool:
    return any(folder in path.parents for folder in NEEDS_GPU)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What --dist loadscope hands out at once is what `run_together` says.

    Marks of pytest-xdist would say the same, but those it writes into names, which it cannot with pytest 9.2.
    """
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return run_together(nodeid)

        def add_node_collection(self, node: Any, collection: Any) -> None:
            super().add_node_collection(node, collection)
            if node in self.registered_collections:
                self.registered_collections[node] = Places(collection)

        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            """What is done is let go: at each test's end the tests are counted that a process still has."""
            super().mark_test_complete(node, item_index, duration)
            units = self.assigned_work[node]
            scope = self._split_scope(self.registered_collections[node][item_index])
            if all(units[scope].values()):
                del units[scope]

    return Scheduling(config, log)


class Places(list[str]):
    """Names of which each one's place is known: pytest-xdist asks for that of every test, through all before it."""

    def __init__(self, names: Any) -> None:
        super().__init__(names)
        self.places = {name: place for place, name in reversed(list(enumerate(self)))}

    def index(self, name: str, *_within: Any) -> int:
        return self.places[name]


class TurnedDir(pytest.Dir):
    """A folder that each of several processes goes through from a place of its own.

    All of them import all files, and each finds most of the others' compiled then: in lock step all compile all.
    """

    def collect(self) -> Any:
        found = list(super().collect())
        worker = self.config.workerinput  # type: ignore[attr-defined]
        number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
        start = number % count * len(found) // count  # one in the place of another that crashed has a higher number
        return found[start:] + found[:start]


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if hasattr(parent.config, "workerinput") and not (path / "__init__.py").exists():
        return TurnedDir.from_parent(parent, path=path)  # type: ignore[no-any-return]
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path.parts)  # all processes have the same order, wherever they began
    items.sort(key=lambda item: TURNS.get(item.path, 0))
    for item in items:
        if needs_gpu(item.path):
            item.add_marker(pytest.mark.gpu)
        if not NEEDS_SEVERAL.isdisjoint((item.path, *item.path.parents)):
            item.add_marker(pytest.mark.several_gpus)
        if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
            item.add_marker(pytest.mark.skip(reason=reason))
    found = yield
    drop_samples(config, items)
    return found


def drop_samples(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where a test runs with all of its cases, its sample of them is not run beside it."""
    chosen = {item.nodeid for item in items}
    named = [item for item in items if item.nodeid.endswith(SAMPLE)]
    samples = [item for item in named if item.nodeid.removesuffix(SAMPLE) + EVERYTHING in chosen]
    if samples:
        config.hook.pytest_deselected(items=samples)
        dropped = set(samples)
        items[:] = [item for item in items if item not in dropped]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Of what is collected nothing is let go: to look for that again and again takes a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Thousands of tests are many objects; from here on no `gc.collect()` of a test looks through these."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _nothing_left() -> Iterator[None]:
    """Nothing that a file's tests made is left to another file's in the same process: no thread, no child, no path."""
    gc.collect()
    gc.freeze()  # what the files before have imported: beside torch each `gc.collect()` of a test takes half a second
    threads, path = set(threading.enumerate()), list(sys.path)
    yield
    gc.collect()
    left = [thread for thread in threading.enumerate() if thread not in threads and thread.name.startswith("dispatch")]
    deadline = time.monotonic() + PATIENCE
    for thread in left:  # one that is about to end may be slow
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not (alive := [thread.name for thread in left if thread.is_alive()]), f"these run on: {alive}"
    assert sys.path == path


@pytest.fixture(scope="module")
def trouble(_nothing_left):
    """The module tests/trouble.py, by the name by which children import it; its rows are in the table as long."""
    sys.path.insert(0, str(HERE))
    module = importlib.import_module("trouble")
    yield module
    for row in module.ROWS:
        module.dp.TABLE.unregister(row)
    del sys.modules["trouble"]
    sys.path.remove(str(HERE))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator of this test's own: the same whichever other tests run, and in whatever order."""
    seed, name = request.config.stash[SEED], request.node.nodeid
    print(f"rng: --seed={seed} for {name}")  # pytest shows it when the test fails
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many requests are made, by op."""
    from dispatch.core.operands import OperandRequest
    from dispatch.ops.matmul.request import MatmulRequest

    count: Counter[str] = Counter()
    for kind in (OperandRequest, MatmulRequest):
        before = kind.__post_init__

        def counted(self: Any, before: Any = before) -> None:
            count[type(self).op] += 1
            before(self)

        monkeypatch.setattr(kind, "__post_init__", counted)
    return count
