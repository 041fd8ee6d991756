"""Ops of one's own whose calls step: a kernel that draws the block of its launch's number, and cuRAND.

The plans declare a counter. Each call has the block of the sequence that is its number's, bit for bit, however it is
carried out: by the library, launched, prepared, in turn with calls of other forms, from several threads, and after the
plans were forgotten. A generator of cuRAND makes its state anew behind a change of its offset, which fails under
capture (cuRAND 10.4: CURAND_STATUS_LAUNCH_FAILURE), so that its calls are numbered and stay the library's own.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

import dispatch as dp
from cudabind.errors import LibraryNotFound
from cudabind.sys import curand
from dispatch.errors import Refused
from dispatch.keys import F32, Arch

if TYPE_CHECKING:
    from collections.abc import Iterator

sys.path.insert(0, str(Path(__file__).parents[1]))

from address_sets import bits

sys.path.remove(str(Path(__file__).parents[1]))  # else every child of a later test would find it, too

SIZE = 1000  # numbers a call: a multiple of the four that Philox makes at once
SEED, OTHER_SEED = 1234, 99
CALLS = 300  # those of the library, the steps of learning between, and many launches with comparisons among them
PATIENCE = 60
PHILOX = curand.curandRngType_t.CURAND_RNG_PSEUDO_PHILOX4_32_10
counters: dict[int, dp.CallCounter] = {}


# -- the op -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class UniformRequest(dp.OperandRequest["dp.Tensor"]):
    """As many uniform numbers as `like` has elements: the next block of the sequence of a seed."""

    op: ClassVar[str] = "sequence_uniform"
    reads: ClassVar[tuple[str, ...]] = ("like",)
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "like")})
    like: dp.Tensor
    seed: int = SEED
    is_declared: bool = True  # else the plan keeps its number to itself
    out: dp.Tensor | None = None

    def check_fields(self) -> None:
        """All is fine."""


def shape_of(request: UniformRequest, *values: Any, **counted: Any) -> dp.Launch:
    n = request.like.size
    return dp.Launch((-(-n // 256),), (256,), (ctypes.c_int64(n), ctypes.c_uint64(request.seed), *values), **counted)


SOURCE = """
extern "C" __global__ void uniform(
    const float* like, float* out, long long n, unsigned long long seed, unsigned long long number
) {
    long long i = blockIdx.x * 256LL + threadIdx.x;
    if (i >= n) return;
    unsigned long long z = seed + 0x9E3779B97F4A7C15ULL * (number * n + i + 1);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    out[i] = ((z ^ (z >> 31)) >> 40) * (1.0f / (1 << 24));
}"""


def block(number: int) -> bytes:
    """What the kernel draws, by NumPy."""
    with np.errstate(over="ignore"):
        i = np.arange(SIZE, dtype=np.uint64) + np.uint64(number * SIZE + 1)
        z = np.uint64(SEED) + np.uint64(0x9E3779B97F4A7C15) * i
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (((z ^ (z >> np.uint64(31))) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)).tobytes()


class CountsByItself(dp.Plan):
    """Whose calls step, which it does not declare."""

    __slots__ = ("_number", "_plan")

    def __init__(self, request: UniformRequest, executor: Any, row: dp.Row) -> None:
        super().__init__(row, capture_safe=True)
        self._number = ctypes.c_uint64(0)
        self._plan = dp.Kernel(SOURCE, "uniform", lambda asked: shape_of(asked, self._number))(request, executor, row)

    def enqueue(self, arguments: tuple[Any, ...]) -> None:
        self._number.value += 1
        self._plan.enqueue(arguments)


def uniform_plan(request: UniformRequest, executor: Any, row: dp.Row) -> dp.Plan:
    if not request.is_declared:
        return CountsByItself(request, executor, row)
    counter = counters.setdefault(request.seed, dp.CallCounter())
    return dp.Kernel(SOURCE, "uniform", lambda asked: shape_of(asked, counter=counter))(request, executor, row)


uniform_row = dp.Row("sequence_uniform", (F32, F32), None, (), Arch(75), None, (), "own", "uniform", uniform_plan)
uniform = dp.request_function(UniformRequest, "uniform")


# -- what is right ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def sequence() -> list[bytes]:
    blocks = [block(number) for number in range(4 * CALLS + 50)]
    assert len(set(blocks)) == len(blocks)
    return blocks


@pytest.fixture(autouse=True, scope="module")
def rows() -> Iterator[None]:
    """The rows of the ops, for these tests alone: others take all that there are."""
    dp.register(uniform_row, random_row)
    yield
    for row in (uniform_row, random_row):
        dp.TABLE.unregister(row)


@pytest.fixture(autouse=True)
def begin() -> None:
    counters.setdefault(SEED, dp.CallCounter()).reset()


def outs_of(dev: dp.Device, count: int) -> list[dp.Tensor]:
    """Outputs, at addresses of many alignments that are the same to a key."""
    return [dev.array(np.full(SIZE, np.nan), "f32") for _ in range(count)]


def relocation_of(dev: dp.Device, out: dp.Tensor) -> Any:
    """What is known of the plan of such calls on the current stream."""
    return dev.executor().plan(UniformRequest(out, out=out)).relocation


def blocks_of(outs: list[dp.Tensor]) -> list[bytes]:
    return [bits(out) for out in outs]


# -- one thread -------------------------------------------------------------------------------------------------------
def test_calls_one_after_the_other_are_the_sequence(dev, sequence):
    with dev.stream():
        outs = outs_of(dev, CALLS)
        for out in outs:
            uniform(out, out=out)
        assert blocks_of(outs) == sequence[:CALLS]
        relocation = relocation_of(dev, outs[0])
        assert relocation.why == ""
        assert relocation.launches >= 100
        assert dev.executor().relocation_stats()["differed"] == 0


def test_it_can_be_learnt_at_once_and_that_takes_no_numbers(dev, sequence):
    with dev.stream():
        outs = outs_of(dev, 60)
        request = UniformRequest(outs[0], out=outs[0])
        executor = dev.executor()
        plan = executor.plan(request)
        assert executor.relocate(plan, request.arguments({})) == ""
        for out in outs:
            uniform(out, out=out)
        assert blocks_of(outs) == sequence[:60]
        assert plan.relocation.launches >= 58  # the very first number is the plan's own


def test_launches_in_turn_with_calls_that_are_not_relocated(dev, sequence, rng):
    """Calls of another form go by the plan itself, and comparisons come in between."""
    with dev.stream():
        likes, outs = outs_of(dev, CALLS), outs_of(dev, CALLS)
        for like, out in zip(likes, outs, strict=True):
            if rng.random() < 0.3:
                uniform(like, out=out)
            else:
                uniform(out, out=out)
            if rng.random() < 0.1:
                for graph in relocation_of(dev, outs[0]).graphs if relocation_of(dev, outs[0]) else ():
                    graph.counts.until_check = 0
        assert blocks_of(outs) == sequence[:CALLS]
        stats = dev.executor().relocation_stats()
        assert stats["checked"] > 0
        assert stats["differed"] == 0


def test_a_prepared_call_goes_on_each_time_too(dev, sequence):
    with dev.stream():
        out = outs_of(dev, 1)[0]
        call = dp.prepare(UniformRequest(out, out=out))
        others = outs_of(dev, 100)
        found = []
        for other in others:
            call()
            found.append(bits(out))
            call(like=other, out=other)
            found.append(bits(other))
        assert found == sequence[:200]


def test_what_is_forgotten_goes_on_and_what_is_reset_begins_anew(dev, sequence):
    with dev.stream():
        outs = outs_of(dev, CALLS)
        for number, out in enumerate(outs):
            if number in (70, 75, 200):
                dev.executor().forget()
            uniform(out, out=out)
        assert blocks_of(outs) == sequence[:CALLS]
        for first in (0, 1, 17):
            counters[SEED].reset(first)
            for out in outs[:30]:
                uniform(out, out=out)
            assert blocks_of(outs[:30]) == sequence[first : first + 30]


def test_a_plan_that_does_not_declare_its_steps_keeps_its_own_call(dev):
    with dev.stream():
        out = outs_of(dev, 1)[0]
        request = UniformRequest(out, OTHER_SEED, is_declared=False, out=out)
        executor = dev.executor()
        assert "depends on no operand or number" in executor.relocate(executor.plan(request), request.arguments({}))
        assert executor.plan(request).launch is None


# -- several ----------------------------------------------------------------------------------------------------------
def test_four_threads_have_each_block_once(dev, sequence):
    start, errors = threading.Barrier(4), []
    found: list[bytes] = []

    def run() -> None:
        try:
            with dev.stream():
                outs = outs_of(dev, CALLS)
                dev.executor().plan(UniformRequest(outs[0], out=outs[0]))
                start.wait(PATIENCE)
                for out in outs:
                    uniform(out, out=out)
                found.extend(blocks_of(outs))
                if relocation_of(dev, outs[0]).launches < 50:
                    errors.append("hardly a launch was relocated")
        except BaseException as error:  # noqa: BLE001  # shown below
            errors.append(repr(error))
            start.abort()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert Counter(found) == Counter(sequence[: 4 * CALLS])


def test_a_caller_s_capture_has_one_number(dev, sequence):
    """Each launch of his graph repeats it; what comes after that goes on."""
    from cudabind import driver

    with dev.stream() as stream:
        out, after = outs_of(dev, 2)
        uniform(out, out=out)
        stream.synchronize()
        driver.cuStreamBeginCapture(stream.handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        uniform(out, out=out)
        graph = driver.cuStreamEndCapture(stream.handle)
        executable = driver.cuGraphInstantiate(graph, 0)
        uniform(after, out=after)
        for _ in range(2):
            driver.cuGraphLaunch(executable, stream.handle)
            stream.synchronize()
            assert bits(out) == sequence[1]
        assert bits(after) == sequence[2]
        driver.cuGraphExecDestroy(executable)
        driver.cuGraphDestroy(graph)


# -- cuRAND -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class RandomRequest(UniformRequest):
    """The same by cuRAND's Philox."""

    op: ClassVar[str] = "sequence_random"


def generator(seed: int) -> curand.curandGenerator_t:
    """A generator; it is not destroyed, for its plans end with the process or with the device."""
    handle = curand.curandGenerator_t()
    curand.curandCreateGenerator(handle, PHILOX)
    curand.curandSetPseudoRandomGeneratorSeed(handle, seed)
    return handle


class RandomPlan(dp.Plan):
    """curandGenerateUniform at the offset of the call's number."""

    __slots__ = ("_executor", "_generator", "_size")

    def __init__(self, request: RandomRequest, executor: Any, row: dp.Row) -> None:
        super().__init__(row, capture_safe=False, counter=dp.CallCounter())
        self._executor, self._generator, self._size = executor, generator(request.seed), request.like.size

    def enqueue(self, arguments: tuple[Any, ...]) -> None:
        curand.curandSetStream(self._generator, self._executor.target.value or 0)
        curand.curandSetGeneratorOffset(self._generator, int(arguments[-1]) * self._size)
        curand.curandGenerateUniform(self._generator, arguments[1], self._size)


def random_plan(request: RandomRequest, executor: Any, row: dp.Row) -> dp.Plan:
    try:
        return RandomPlan(request, executor, row)
    except LibraryNotFound as error:
        raise Refused(str(error)) from error


random_row = dp.Row("sequence_random", (F32, F32), None, (), Arch(75), None, (), "curand", "random", random_plan)
random = dp.request_function(RandomRequest, "random")


def test_numbered_calls_of_a_library_are_its_own_sequence(dev):
    with dev.stream() as stream, dev.context:
        try:
            handle = generator(SEED)
        except LibraryNotFound as error:
            pytest.skip(str(error))
        curand.curandSetStream(handle, stream.handle)
        right, outs = outs_of(dev, 100), outs_of(dev, 100)
        for out in right:
            curand.curandGenerateUniform(handle, out.ptr, SIZE)
        for out in outs:
            random(out, out=out)
        assert blocks_of(outs) == blocks_of(right)
        assert len(set(blocks_of(outs))) == len(outs)
        curand.curandDestroyGenerator(handle)
