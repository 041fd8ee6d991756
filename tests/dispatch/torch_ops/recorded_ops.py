"""CUDA graphs of torch's without a GPU: the operators that a function calls, called again over the same memory.

Like a graph, a replay reads and writes where it did when it was captured, and draws anew from the generator. What
torch's allocator would give to other graphs of a pool is not a number any more after one of these was replayed.
"""

import random
from contextlib import contextmanager, nullcontext

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dispatch.torch import graph_recorder, graphs, model_state, training_call


def tensors_of(tree):
    return [x for x in _pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def address(t):
    return t.untyped_storage().data_ptr()


class Listening(TorchDispatchMode):
    def __init__(self, graph):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError("operation not permitted when stream is capturing")
        found = function(*args, **kwargs)
        self.graph.add(function, args, kwargs, found)
        return found


class Graph:
    def __init__(self, pool):
        self.pool, self.calls, self.made, self.outside = pool, [], {}, set()
        self.replays = 0

    def add(self, function, args, kwargs, found):
        for t in tensors_of((args, kwargs)):
            if address(t) not in self.made:
                self.outside.add(address(t))
        for t in tensors_of(found):
            if address(t) not in self.outside:
                self.made[address(t)] = t.detach()
        self.calls.append((function, args, kwargs, found))

    def keep(self, results):
        for t in tensors_of(results):
            self.made.pop(address(t), None)

    def replay(self):
        self.replays += 1
        with torch.no_grad():
            for function, args, kwargs, found in self.calls:
                again = function(*args, **kwargs)
                for old, new in zip(tensors_of(found), tensors_of(again), strict=True):
                    if address(old) != address(new):
                        old.detach().copy_(new.detach())
            for other in self.pool.graphs:
                if other is not self:
                    other.spoil()

    def spoil(self):
        for t in self.made.values():
            if t.is_floating_point():
                t.fill_(torch.nan)


class Pool:
    def __init__(self):
        self.graphs = []


class HostGenerators:
    def __init__(self):
        self.python = random.getstate()

    def are_unchanged(self):
        return random.getstate() == self.python

    def restore(self):
        random.setstate(self.python)


class Recorder:
    """The methods of a recorder that training steps use, and those that forwards do."""

    def __init__(self):
        self.lock = graph_recorder.threading.RLock()
        self.captures, self.finished, self.interrupt, self.failed = 0, 0, None, False
        self.pools = []

    def record(self, *_):
        return "no forwards are recorded here"

    def new_pool(self):
        self.pools.append(Pool())
        return self.pools[-1]

    def capture(self, pool, function):
        self.captures += 1
        graph = Graph(pool)
        if self.interrupt is not None:
            raise self.interrupt
        try:
            with Listening(graph):
                found = function()
        except Exception as error:  # noqa: BLE001  # as the recorder itself has it
            raise graph_recorder.FailedCapture(graph_recorder.first_line_of(error)) from None
        graph.keep(found)
        pool.graphs.append(graph)
        return graph, found

    def on_recording_stream(self):
        return nullcontext()

    @contextmanager
    def in_order(self):
        with self.lock:
            yield

    def wait(self):
        pass

    def finish(self):
        self.finished += 1

    def generator(self):
        return torch.default_generator

    def host_generators(self):
        return HostGenerators()


def patch(monkeypatch):
    """Have this recorder in the place of a GPU's; gives it."""
    one = Recorder()
    monkeypatch.setattr(graphs, "_recorder", lambda _: one)
    monkeypatch.setattr(graphs, "_current_device", lambda: -1)
    monkeypatch.setattr(graphs, "_is_capturing", lambda: False)
    monkeypatch.setattr(training_call, "DEVICE_TYPE", "cpu")
    for module in (graphs, model_state):
        monkeypatch.setattr(module, "on_gpu", lambda _: True)
    return one
