"""Probe: a request that runs a function of the test's own, through the table, a row and a worker like any other.

And a stand-in for the driver, in the place of it in all modules that call it for memory, streams and captures.
"""

import gc
import importlib.util
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import dispatch as dp
from dispatch.bind import refit
from dispatch.core.request import Plan, Request, Signature
from dispatch.device import (
    async_copy,
    callers_graph,
    context,
    cuda,
    external,
    gpus,
    host_copies,
    memory_pool,
    pinned,
    releases,
    stream,
)
from dispatch.device.cuda import CudaDevice
from dispatch.device.storage import Storage
from dispatch.execute import cuda_executor, cuda_graph, graph_nodes, launches, learner, relocated_graph
from dispatch.keys import F32, HOST

# The modules of dispatch/device that call the driver.
DEVICE = (
    *(async_copy, callers_graph, context, cuda, external, gpus),
    *(host_copies, memory_pool, pinned, releases, stream),
)
PATIENCE = 120  # seconds, on a machine that has other things to do
OF_DISPATCH = "dispatch.probe"  # the module of a probe: what it raises is a defect, and no error of a user's code


class Probe(Request):
    """Runs `action()` where a product would be computed; its result is what that returns."""

    op = "probe"
    __module__ = OF_DISPATCH

    def __init__(self, action: Callable[[], Any] = lambda: None) -> None:
        self.action = action
        self.home = dp.device("host")

    @property
    def device(self) -> dp.Device:
        return self.home

    def signature(self) -> Signature:
        return Signature((F32,))

    def key(self) -> tuple[Any, ...]:
        return (self.home,)

    def arguments(self, outputs: Any) -> tuple[Any, ...]:
        return ()

    def tensors(self) -> Iterator[Any]:
        return iter(())

    def unallocated(self) -> dict[str, Any]:
        return {}

    def result(self, outputs: Any) -> Any:
        return self.value

    def replace(self, **operands: Any) -> "Probe":
        return self

    def describe(self) -> str:
        return "probe()"


def run_probe(_: Plan, request: Probe, _outputs: Any) -> None:
    request.value = request.action()


class ProbePlan(Plan):
    __slots__ = ()
    run = FunctionType(run_probe.__code__, {"__name__": OF_DISPATCH})  # type: ignore[assignment]


def probe_plan(_request: Probe, _executor: Any, row: dp.Row) -> Plan:
    return ProbePlan(row, capture_safe=False)


ROW = dp.Row("probe", (F32,), None, (), HOST, HOST, (), "tests", "probe", probe_plan)


@pytest.fixture
def each(rng: Any) -> Callable[[Any, Callable[[Any, Any], Any]], None]:
    """`each(cases, check)`: each case is checked with a generator of its own, and all that fail are told.

    Of thousands of cases of some milliseconds one test for each would take most of the time for itself.
    """

    def run(cases: Any, check: Callable[[Any, Any], Any]) -> None:
        failed = []
        for case, numbers in zip(cases, rng.spawn(len(cases)), strict=True):
            try:
                check(case, numbers)
            except Exception as error:  # noqa: BLE001, PERF203  # whatever it is, the other cases are tried
                failed.append(f"{case.id}: {type(error).__name__}: {error}")
        assert not failed, "\n".join([f"{len(failed)} of {len(cases)} cases fail", *failed[:20]])

    return run


@pytest.fixture
def drop() -> Callable[[list[dp.Supervisor]], None]:
    """`drop([sup])`: let go of a supervisor that was not closed, and see it warn; nothing else may refer to it."""

    def let_go(left: list[dp.Supervisor]) -> None:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            left.clear()
            ends = time.monotonic() + PATIENCE
            while not seen and time.monotonic() < ends:  # who asks for its status, from any process, holds it meanwhile
                time.sleep(0.001)
        assert any("garbage-collected without close" in str(warning.message) for warning in seen)

    return let_go


@pytest.fixture
def probe() -> Iterator[type[Probe]]:
    dp.register(ROW)
    yield Probe
    dp.TABLE.unregister(ROW)


@pytest.fixture
def stand_in(monkeypatch):
    """Put a StandIn (stand_in.py) of so many GPUs in the driver's place."""
    spec = importlib.util.spec_from_file_location("stand_in", Path(__file__).with_name("stand_in.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def install(count):
        made = module.StandIn(count)
        for caller in (
            *DEVICE,
            cuda_executor,
            cuda_graph,
            graph_nodes,
            launches,
            learner,
            relocated_graph,
            refit,
        ):
            monkeypatch.setattr(caller, "driver", made)
        monkeypatch.setattr(cuda, "Storage", module.watched(made, Storage))
        stream.exchange_mode.cache_clear()
        return made

    yield install
    gc.collect()  # devices lie in cycles; what they have must not be given back to the driver itself
    stream.exchange_mode.cache_clear()


@pytest.fixture
def driver(stand_in):
    """The stand-in of a driver with one GPU."""
    return stand_in(1)


@pytest.fixture
def run(driver):
    """`run(work)` calls `work(device)` on a thread of its own, which has no executors yet, and looks at the driver
    then.

    No memory was touched or freed too early, and no recording of anybody's was lost, unless `may_lose` says so.
    """

    def run(work, *, may_lose=False):
        def guarded():
            work(CudaDevice(0, 1))
            assert driver.thread.__dict__.get("mode", 0) == 0, "the thread's own mode is as it was"

        with ThreadPoolExecutor(1) as pool:
            pool.submit(guarded).result()
        assert (driver.touched, driver.early) == ([], [])
        assert may_lose or not driver.lost

    return run
