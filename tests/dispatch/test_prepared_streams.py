"""When a prepared call is one launch: on a stream of ours, and on another library's that is that library's current one.

Executors and streams are stand-ins; tests/gpu/test_prepared_of_others.py has the order of real ones.
"""

import ctypes
from types import SimpleNamespace

import pytest

from dispatch.bind.prepare import BoundCall
from dispatch.device.stream import NULL_CONTEXT, order
from dispatch.execute.cuda_executor import CudaExecutor


class Executor(CudaExecutor):
    """Counts what it is asked for."""

    captured = False

    def __init__(self, stream):
        self.stream, self.device, self.looks, self.launches = stream, "cuda:0", 0, 0

    def check(self):
        self.looks += 1

    def claimed(self):
        return NULL_CONTEXT

    def launch(self, graph, reads, writes):
        self.launches += 1


class Library:
    """Another array library, whose current stream the test sets."""

    def __init__(self, current):
        self.current = current

    def stream(self, device):
        return self.current

    def is_current(self, device, handle):
        return (self.current.c_handle.value or 0) == handle


def stream_of(handle, *, external, **more):
    return SimpleNamespace(c_handle=ctypes.c_void_p(handle), external=external, **more)


def call_of(stream, library=None, *, is_mixed=False):
    """A prepared call on a stream, without operands of its own."""
    call = BoundCall.__new__(BoundCall)
    call._executor, call._graph, call._bound = Executor(stream), object(), SimpleNamespace(reads=(), writes=())
    call._epoch = call._framework_epoch = -1
    call._own_outputs = []
    call._framework, call._is_mixed, call._written_storages, call._result = library, is_mixed, {}, object()
    call._is_moved = None
    call.request = SimpleNamespace(tensors=tuple)

    def launch():
        call._executor.launches += 1
        return 0

    call._launch = launch
    return call


def test_on_a_stream_of_ours_the_second_call_looks_at_nothing():
    call = call_of(stream_of(7, external=False))
    results = {id(call()) for _ in range(4)}
    assert results == {id(call._result)}
    assert (call._executor.looks, call._executor.launches) == (1, 4)
    order.sync_epoch += 1  # a use on another stream
    call()
    assert call._executor.looks == 2


def test_a_stream_of_ours_that_another_library_knows_is_looked_at_each_time():
    """It may be captured at any time."""
    call = call_of(stream_of(7, external=True))
    for _ in range(3):
        call()
    assert (call._executor.looks, call._executor.launches) == (3, 3)


@pytest.mark.parametrize("handle", [0, 9])
def test_on_another_librarys_lasting_stream_the_second_call_is_one_launch(handle):
    stream = stream_of(handle, external=True, is_lasting=True)
    library = Library(stream)
    call = call_of(stream, library)
    for _ in range(4):
        call()
    assert (call._executor.looks, call._executor.launches) == (1, 4)
    order.sync_epoch += 1
    call()
    assert call._executor.looks == 2


def test_where_it_is_captured_or_lasts_not_or_another_library_has_a_part_it_is_looked_at():
    for is_lasting, is_mixed in ((False, False), (True, True)):
        stream = stream_of(9, external=True, is_lasting=is_lasting)
        call = call_of(stream, Library(stream), is_mixed=is_mixed)
        for _ in range(3):
            call()
        assert call._executor.looks == 3
    stream = stream_of(9, external=True, is_lasting=True)
    call = call_of(stream, Library(stream))
    call()
    call._executor.captured = True
    runs = []
    call._executor.run = lambda request: runs.append(request) or call._result
    call()
    assert (call._executor.looks, len(runs)) == (2, 1), "within a capture the library's own call is captured"


def test_on_another_stream_of_its_library_the_request_runs(monkeypatch):
    stream = stream_of(9, external=True, is_lasting=True)
    library = Library(stream)
    call, ran = call_of(stream, library), []
    monkeypatch.setattr("dispatch.bind.prepare.run", lambda request: ran.append(request) or "elsewhere")
    call()
    library.current = stream_of(11, external=True, is_lasting=True)
    assert call() == "elsewhere"
    assert ran == [call.request]
    library.current = stream
    assert call() is call._result
