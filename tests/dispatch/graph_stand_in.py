"""Libraries' calls, their graphs and the driver's functions for these, on the host: for the tests of relocated calls.

A `Call` is what a library enqueues, written down anew here: its words are put into images by functions of the arguments
that share nothing with dispatch/execute. `GraphDriver` stands for the driver, as graph_nodes.py asks it; what is
launched is what its executable graphs had at that moment.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import random
import threading
from types import SimpleNamespace

import numpy as np

from dispatch.core.request import Plan
from dispatch.device.stream import RELAXED
from dispatch.execute import cuda_graph, graph_nodes, learner, relocated_graph
from dispatch.execute.cuda_executor import CudaExecutor
from dispatch.execute.graph_nodes import KERNEL, MEMCPY, MEMSET, Node
from dispatch.execute.relocation import Form
from dispatch.execute.relocations import Relocations

INVALID = 1  # CUDA_ERROR_INVALID_VALUE
CONTEXT, OTHERS = 7, 8  # the executor's, and another device's
FORMATS = {"f": np.float32, "d": np.float64, "e": np.float16}


# -- what a library enqueues ------------------------------------------------------------------------------------------
class Put:
    """Bytes of an image: `of(arguments)` gives them."""

    def __init__(self, node, offset, of):
        self.node, self.offset, self.of = node, offset, of


def address(place, step=0, size=8):
    return lambda given: ((int(given[place]) + step) % (1 << 8 * size)).to_bytes(size, "little")


def number(place, code, part="real"):
    """A number as a library has it: of one that is too large, infinity; integers are refused."""

    def of(given):
        value = getattr(given[place], part)
        if code == "i":
            return int(value).to_bytes(4, "little", signed=True)
        with np.errstate(all="ignore"):
            return FORMATS[code](value).tobytes()

    return of


class Call:
    """Nodes with bytes that follow the arguments; `edges` are pairs of the nodes' numbers."""

    def __init__(self, nodes, puts, edges=None):
        self.nodes, self.puts = nodes, puts
        self.edges = [(n, n + 1) for n in range(len(nodes) - 1)] if edges is None else edges

    def __call__(self, given):
        images = [bytearray(node.image) for node in self.nodes]
        for put in self.puts:
            data = put.of(given)
            images[put.node][put.offset : put.offset + len(data)] = data
        nodes = [node._replace(image=bytes(image)) for node, image in zip(self.nodes, images, strict=True)]
        return nodes, self.edges


def node(rng, kind, size, func=None, grid=None):
    """A node with a random image; kernels have parameters of 4 and 8 bytes, or all in one buffer."""
    if kind == MEMSET:
        return Node(MEMSET, (), rng.randbytes(ctypes.sizeof(graph_nodes.MemsetParams)))
    if kind == MEMCPY:
        return Node(MEMCPY, (), rng.randbytes(graph_nodes.MEMCPY_BYTES))
    places = tuple((offset, min(8, size - offset)) for offset in range(0, size, 8)) if rng.random() < 0.5 else ()
    func = func or rng.randrange(1, 1 << 40) * 16
    attributes = tuple((name, rng.randbytes(64)) for name in graph_nodes.ATTRIBUTES if rng.random() < 0.5)
    launch = grid or tuple(rng.randrange(1, 1 << 16) for _ in range(7))
    return Node(KERNEL, (func, None, 7, launch, places, attributes), rng.randbytes(size))


def random_call(rng, arguments, most=6):
    """A call of some nodes whose words follow the arguments in every way that is known."""
    form = Form.of(arguments)
    kinds = [rng.choice((KERNEL, KERNEL, KERNEL, MEMSET, MEMCPY)) for _ in range(rng.randrange(1, most))]
    nodes = [node(rng, kind, 4 * rng.randrange(1, 500 if rng.random() < 0.1 else 30)) for kind in kinds]
    puts = []
    for number_of, one in enumerate(nodes):
        offset = 4 * rng.randrange(4)
        while offset + 8 <= len(one.image):
            puts += random_puts(rng, number_of, offset, arguments, form)
            offset += 8 + 4 * rng.randrange(6)
    return Call(nodes, puts)


def random_puts(rng, of_node, offset, arguments, form):
    numbers = [place for place, kind in enumerate(form.kinds) if kind is not int]
    if numbers and rng.random() < 0.5:
        place = rng.choice(numbers)
        if form.kinds[place] is complex:
            code = rng.choice("fd")
            return [Put(of_node, offset, number(place, code, rng.choice(("real", "imag"))))]
        code = rng.choice("fdei" if float(arguments[place].real).is_integer() else "fde")
        put = Put(of_node, offset + (rng.choice((0, 2)) if code == "e" else 0), number(place, code))
        if code == "e" and rng.random() < 0.5:  # two in one word
            other = rng.choice([p for p in numbers if form.kinds[p] is float])
            return [Put(of_node, offset, number(place, "e")), Put(of_node, offset + 2, number(other, "e"))]
        return [put]
    operands = [place for place, kind in enumerate(form.kinds) if kind is int and arguments[place]]
    if not operands:
        return []
    step = rng.choice((0, 0, rng.randrange(1 << 20), -rng.randrange(1 << 20), rng.randrange(1 << 47, 1 << 62)))
    return [Put(of_node, offset, address(rng.choice(operands), step, rng.choice((8, 8, 8, 4))))]


# -- the driver -------------------------------------------------------------------------------------------------------
class Function:
    def __init__(self, carry_out):
        self.unchecked = self.unchecked_holding_gil = carry_out

    def __call__(self, *given):
        return self.unchecked(*given)


class GraphDriver:
    """Graphs and executable ones by handle; `freed` has each that was destroyed."""

    def __init__(self):
        self.handles = itertools.count(0x7000, 16)
        self.graphs, self.executables, self.freed = {}, {}, []
        self.nodes = {}  # by handle: the node, and its number
        self.launched = []  # the images of each launch
        self.put_status = 0
        self.mode, self.current = 0, CONTEXT  # the thread's capture mode, and its context
        self.on_put = self.on_run = lambda: None
        self.kept = []  # what the pointers that were given out point to
        self.sizes = {}

    def __getattr__(self, name):
        carry_out = getattr(type(self), f"_{name}", None)
        if carry_out is None:
            raise AttributeError(name)
        return Function(carry_out.__get__(self))

    def captured(self, nodes, edges):
        handle = next(self.handles)
        handles = [next(self.handles) for _ in nodes]
        self.graphs[handle] = handles, edges
        self.nodes |= {of: (one, place) for place, (of, one) in enumerate(zip(handles, nodes, strict=True))}
        for one in nodes:
            if one.kind == KERNEL:
                self.sizes[one.form[0]] = one.form[4]
        return ctypes.c_void_p(handle)

    def instantiated(self, graph):
        handle = next(self.handles)
        self.executables[handle] = [self.nodes[of][0].image for of in self.graphs[graph.value][0]]
        return handle

    def run(self, handle):
        """Launch an executable graph."""
        self.launched.append(list(self.executables[handle]))  # enqueued: what comes later does not change it
        self.on_run()
        return 0

    def held(self, data):
        self.kept.append(buffer := ctypes.create_string_buffer(data, len(data)))
        return ctypes.addressof(buffer)

    def _cuGraphDestroy(self, graph):
        del self.graphs[graph.value]
        self.freed.append(graph.value)
        return 0

    def _cuGraphExecDestroy(self, executable):
        del self.executables[executable.value]
        self.freed.append(executable.value)
        return 0

    def _cuCtxGetCurrent(self, context):
        context._obj.value = self.current
        return 0

    def _cuGraphGetNodes(self, graph, handles, count):
        of, _ = self.graphs[graph.value]
        if handles:
            handles[:] = of
        count._obj.value = len(of)
        return 0

    def _cuGraphGetEdges(self, graph, before, behind, data, count):
        handles, edges = self.graphs[graph.value]
        count._obj.value = len(edges)
        for place, (one, other) in enumerate(edges if before else ()):
            before[place], behind[place], data[place] = handles[one], handles[other], 0
        return 0

    def _cuGraphNodeGetType(self, of, kind):
        kind._obj.value = self.nodes[of.value][0].kind
        return 0

    def _fill(self, of, into):
        image = self.nodes[of.value][0].image
        ctypes.memmove(ctypes.byref(into._obj) if hasattr(into, "_obj") else into, image, len(image))
        return 0

    _cuGraphMemsetNodeGetParams = _cuGraphMemcpyNodeGetParams = _fill

    def _cuGraphKernelNodeGetParams(self, of, params):
        one, params = self.nodes[of.value][0], params._obj
        params.func, params.kern, params.ctx, launch, places, _ = one.form
        params.launch = launch
        if places:
            values = (ctypes.c_void_p * len(places))(*(self.held(one.image[o : o + size]) for o, size in places))
            params.kernelParams = ctypes.addressof(values)
        else:
            size = self.held(len(one.image).to_bytes(8, "little"))
            values = (ctypes.c_void_p * 5)(1, self.held(one.image), 2, size, 0)
            params.extra = ctypes.addressof(values)
        self.kept.append(values)
        return 0

    def _cuFuncGetParamInfo(self, func, index, offset, size):
        places = self.sizes[func.value]
        if index.value >= len(places):
            return INVALID
        offset._obj.value, size._obj.value = places[index.value]
        return 0

    def _cuGraphKernelNodeGetAttribute(self, of, name, value):
        found = dict(self.nodes[of.value][0].form[5]).get(name)
        if found is None:
            return INVALID
        ctypes.memmove(value, found, 64)
        return 0

    def exchange(self, mode):
        mode._obj.value, self.mode = self.mode, mode._obj.value
        return 0

    def _set(self, executable, of, image):
        if self.put_status:
            return self.put_status
        self.executables[executable.value][self.nodes[of.value][1]] = image
        self.on_put()
        return 0

    def _cuGraphExecKernelNodeSetParams(self, executable, of, params):
        one, params = self.nodes[of.value][0], params._obj
        assert (params.func, params.kern, params.ctx, tuple(params.launch)) == one.form[:4]
        if one.form[4]:
            values = (ctypes.c_void_p * len(one.form[4])).from_address(params.kernelParams)
            image = b"".join(ctypes.string_at(v, s) for v, (_, s) in zip(values, one.form[4], strict=True))
        else:
            image = graph_nodes._packed(params.extra)
        return self._set(executable, of, image)

    def _cuGraphExecMemsetNodeSetParams(self, executable, of, image, context):
        assert context.value == CONTEXT
        assert self.mode == RELAXED, "another thread's capture may end by it"
        return self._set(executable, of, ctypes.string_at(image, len(self.nodes[of.value][0].image)))

    _cuGraphExecMemcpyNodeSetParams = _cuGraphExecMemsetNodeSetParams


def install(patch):
    """A GraphDriver in the driver's place; `patch` is pytest's `monkeypatch.setattr`."""
    made = GraphDriver()
    for module in (graph_nodes, learner, relocated_graph, cuda_graph):
        patch(module, "driver", made)
    patch(learner, "instantiated", made.instantiated)
    patch(learner, "_words", {})
    patch(relocated_graph, "exchange_mode", lambda: made.exchange)
    return made


# -- plans and executors ----------------------------------------------------------------------------------------------
class LibraryPlan(Plan):
    """A plan whose library makes a Call; `called` has the arguments of each call that was not captured."""

    __slots__ = ("call", "called")

    def __init__(self, call, *, capture_safe=True):
        super().__init__(SimpleNamespace(name="of this test"), capture_safe=capture_safe)
        self.call, self.called = call, []

    def enqueue(self, arguments):
        self.called.append(arguments)


class Context:
    """The executor's; outside of it another device's is current."""

    def __init__(self, driver):
        self._driver = driver

    def __enter__(self):
        self._driver.current = CONTEXT

    def __exit__(self, *_):
        self._driver.current = OTHERS


class GraphExecutor:
    """The executor's own way to launch or to call, without a device: what is asked of it stands below."""

    enqueue, _enqueue_by_library = CudaExecutor.enqueue, CudaExecutor._enqueue_by_library
    relocate, relocation_stats = CudaExecutor.relocate, CudaExecutor.relocation_stats
    captured = False

    def __init__(self, driver):
        self.driver, self.relocations, self.stream = driver, Relocations(), SimpleNamespace(external=False)
        self._calls = threading.RLock()
        self.numbers_in_memory = 0
        self.lost = 0  # recordings that end in nothing
        self.seen = []  # arguments of recordings
        self.memory = object()
        driver.current = OTHERS
        self.device = SimpleNamespace(context=Context(driver))
        self.on_recorded = lambda: None

    def wait_for_uses(self, reads, writes):
        pass

    def call(self, plan, arguments):
        plan.enqueue(arguments)

    def failed(self, status):
        raise AssertionError(f"a launch gives {status}")

    def run(self, plan, *arguments):
        """Enqueue a plan and tell the images that reached the device, by a launch or by the library."""
        before, called = len(self.driver.launched), len(plan.called)
        self.enqueue(plan, arguments, (), ())
        launched = self.driver.launched[before:]
        if len(plan.called) > called:
            assert not launched
            return [one.image for one in plan.call(arguments)[0]]
        assert len(launched) == 1
        return launched[0]

    def recorded(self, plan, arguments):
        self.seen.append(arguments)
        if self.lost:
            self.lost -= 1
            return None
        nodes, edges = plan.call(arguments)
        self.on_recorded()
        return self.driver.captured(nodes, edges)

    def launcher(self, executable, nodes):
        assert nodes == len(self.driver.executables[executable.value])
        handle = executable.value
        return lambda: self.driver.run(handle)

    def lasting(self):
        return (self.memory,)


def random_arguments(rng, operands=3, numbers=()):
    """Addresses of random alignments, and numbers."""
    places = []
    while len(set(places)) < operands:
        places = [rng.randrange(1 << 30, 1 << 38) << rng.randrange(10) for _ in range(operands)]
    return (*places, *numbers)


def seeded(number_of):
    return random.Random(number_of)


# -- defects ----------------------------------------------------------------------------------------------------------
def mutate(monkeypatch, module, name, old, new):
    """Put a function or class of a module in its place with one piece of its source replaced by another."""
    source = inspect.getsource(getattr(module, name))
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {name}"
    scope = vars(module)
    kept = dict(scope)
    exec(compile("from __future__ import annotations\n" + source.replace(old, new), f"<{name}>", "exec"), scope)
    made = scope[name]
    scope.clear()
    scope.update(kept)
    monkeypatch.setattr(module, name, made)
