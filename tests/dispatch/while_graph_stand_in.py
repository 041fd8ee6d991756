"""The driver's graphs with a while node, on the host: they are built as the driver wants them, and launched for real.

Kernels are those of the iterations, compiled by g++; what is recorded is carried out again in each pass.
"""

import ctypes
import itertools
from types import SimpleNamespace

import cudabind.driver
from dispatch.device.once_per_gpu import OncePerGpu
from dispatch.execute import cuda_graph, graph_nodes, while_graph
from dispatch.ops.sparse import own_krylov

CONTEXT = 0x7000
KERNEL, CHILD, LOOP = "kernel", "child", "loop"


class Function:
    def __init__(self, driver, name):
        self.driver, self.name = driver, name

    def unchecked(self, *arguments):
        self.driver.called.append(self.name)
        return getattr(self.driver, f"_{self.name}")(*arguments) or 0

    def __call__(self, *arguments):
        self.driver.called.append(self.name)
        return getattr(self.driver, f"_{self.name}")(*arguments)


class Driver:
    """What `while_graph`, `cuda_graph` and the plan call; `library` runs kernels, by the number of their function."""

    error = staticmethod(cudabind.driver.error)

    def __init__(self, version=13000):
        self.version, self.numbers = version, itertools.count(0x100, 16)
        self.graphs, self.nodes, self.executables, self.handles = {}, {}, {}, {}
        self.functions, self.called, self.kept = {}, [], []
        self.passes = 0

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return Function(self, name)

    def _cuDriverGetVersion(self):
        return self.version

    def _cuMemsetD8Async(self, at, value, count, stream):
        ctypes.memset(at, value, count)

    def _cuCtxGetCurrent(self, context):
        context._obj.value = CONTEXT

    def _cuModuleLoadData(self, image):
        assert image.endswith(b"\0")
        assert b"cudaGraphSetConditional" in image
        return "module"

    def _cuModuleGetFunction(self, module, name):
        assert (module, name) == ("module", b"set_condition")
        number = next(self.numbers)
        self.functions[number] = None
        return number

    # -- building -----------------------------------------------------------------------------------------------------
    def graph(self, nodes=None):
        number = next(self.numbers)
        self.graphs[number] = [] if nodes is None else nodes
        return number

    def _cuGraphCreate(self, made, flags):
        assert flags.value == 0
        made._obj.value = self.graph()

    def _cuGraphDestroy(self, graph):
        for node in self.graphs.pop(graph.value):
            if LOOP in node:  # its body goes with it
                *_, (_, body) = node
                self.graphs = {number: nodes for number, nodes in self.graphs.items() if nodes is not body}

    def added(self, made, graph, before, count, *what):
        nodes = self.graphs[graph.value]
        behind = [before[k] for k in range(count.value)]
        assert behind == [node for node, *_ in nodes[-1:]], "one behind the other"
        number = next(self.numbers)
        nodes.append((number, *what))
        self.nodes[number] = graph.value
        made._obj.value = number

    def taken(self, params):
        """A kernel's function, launch and parameters, copied as the driver does."""
        given = params._obj
        assert isinstance(given, graph_nodes.KernelParams)
        blocks, *ones, shared = given.launch
        assert ones[:2] == [1, 1]
        assert ones[3:] == [1, 1]
        assert shared == 0
        pointers = ctypes.cast(given.kernelParams, ctypes.POINTER(ctypes.c_void_p))
        if self.functions[given.func] is None:
            assert (blocks, ones[2]) == (1, 1)
            handle, number = (ctypes.c_uint64.from_address(pointers[k]).value for k in range(2))
            return given.func, (blocks, ones[2]), (handle, number)
        held = own_krylov.SolveParameters.from_buffer_copy(
            ctypes.string_at(pointers[0], ctypes.sizeof(own_krylov.SolveParameters))
        )
        return given.func, (blocks, ones[2]), held

    def _cuGraphAddKernelNode(self, made, graph, before, count, params):
        self.added(made, graph, before, count, KERNEL, self.taken(params))

    def _cuGraphAddChildGraphNode(self, made, graph, before, count, child):
        self.added(made, graph, before, count, CHILD, list(self.graphs[child.value]))

    def _cuGraphConditionalHandleCreate(self, made, graph, context, value, flags):
        assert (context.value, value.value, flags.value) == (CONTEXT, 1, 1)
        made._obj.value = next(self.numbers)
        self.handles[made._obj.value] = graph.value

    def _cuGraphAddNode(self, made, graph, before, data, count, params):
        given = params._obj
        assert ctypes.sizeof(given) == 256
        assert (given.type, given.kind, given.size, given.context) == (13, 1, 1, CONTEXT)
        assert self.handles[given.handle] == graph.value
        assert data is None
        body = self.graph()
        given.graphs = (ctypes.c_void_p * 1)(body)
        self.kept.append(given.graphs)
        self.added(made, graph, before, count, LOOP, (given.handle, self.graphs[body]))

    def _cuGraphInstantiate(self, graph, flags):
        number = next(self.numbers)
        self.executables[number] = list(self.graphs[graph])
        return number

    def _cuGraphExecDestroy(self, executable):
        del self.executables[executable.value]

    def _cuGraphExecKernelNodeSetParams(self, executable, node, params):
        assert self.nodes[node.value] in self.graphs, "a node of a graph that is there"
        nodes = self.executables[executable.value]
        place = [number for number, *_ in nodes].index(node.value)
        nodes[place] = (node.value, KERNEL, self.taken(params))

    # -- running ------------------------------------------------------------------------------------------------------
    def _cuGraphLaunch(self, executable, stream):
        self.carry_out(self.executables[executable.value], {})

    def carry_out(self, nodes, conditions):
        for _, kind, what in nodes:
            if kind == KERNEL:
                function, grid, taken = what
                if self.functions[function] is None:
                    conditions[taken[0]] = ctypes.c_uint32.from_address(taken[1]).value
                else:
                    self.functions[function](grid, taken)
            elif kind == CHILD:
                self.carry_out([(0, *node) for node in what], conditions)
            elif kind == LOOP:
                handle, body = what
                conditions[handle] = 1
                while conditions[handle]:
                    self.passes += 1
                    self.carry_out(body, conditions)
            else:
                plan, arguments = what
                plan.enqueue(arguments)

    def _cuLaunchKernel(self, function, blocks, _one, _another, threads, *rest):
        _, _, shared, _, pointers, extra = rest
        assert shared == 0
        assert extra is None
        taken = own_krylov.SolveParameters.from_address(pointers[0])
        self.functions[function.value]((blocks, threads), taken)


class Device:
    """What kernels are loaded on."""


def iterating(executor, on_cpu, monkeypatch, version=13000):
    """An executor whose graphs are launched, of kernels that the CPU runs; `driver` says what was called."""
    driver = Driver(version)
    for module in (while_graph, cuda_graph, own_krylov):
        monkeypatch.setattr(module, "driver", driver)
    monkeypatch.setattr(while_graph, "_functions", OncePerGpu())

    def loaded(source, name, chosen, _):
        number = next(driver.numbers)
        op = next(op for op, text in own_krylov.SOURCES.items() if text == source)
        few = tuple("-DTHREADS=16" if option.startswith("-DTHREADS") else option for option in chosen)
        library = on_cpu.compiled_all(op, few)

        def run(grid, taken):
            assert grid[1] == own_krylov.THREADS
            getattr(library, f"run_{name}")(ctypes.c_uint(grid[0]), ctypes.c_uint(16), taken)

        driver.functions[number] = run
        return number

    def recorded(plan, arguments):
        return ctypes.c_void_p(driver.graph([("recorded", (plan, arguments))]))

    monkeypatch.setattr(own_krylov, "loaded", loaded)
    target = ctypes.c_void_p(0)
    device = Device()
    device.allocate = executor.device.allocate
    own = {"device": device, "driver": driver, "recorded": recorded, "target": target}
    return SimpleNamespace(**{**vars(executor), **own})
