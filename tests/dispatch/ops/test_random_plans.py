"""Plans of a GPU on the CPU: kernels run by g++, and cuRAND's host generators in the place of a GPU's."""

import contextlib
import ctypes
import gc
import importlib.util
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from cudabind.sys import curand as library
from dispatch.core.request import IdlePlan
from dispatch.libraries.curand import generators
from dispatch.ops.random import curand, distribution_kernels, philox_kernels

spec = importlib.util.spec_from_file_location("random_on_cpu", Path(__file__).with_name("random_on_cpu.py"))
random_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(random_on_cpu)

ROW = SimpleNamespace(name="random")


class OnHost:
    """cuRAND whose generators are the host's."""

    curandCreateGenerator = library.curandCreateGeneratorHost  # NVIDIA's name

    def __getattr__(self, name):
        return getattr(library, name)

    def curandSetStream(self, handle, stream):
        assert isinstance(stream, library.cudaStream_t)


class Executor:
    """What plans take from an executor; memory is the host's."""

    def __init__(self):
        self.stream = SimpleNamespace(
            wait_for_uses=lambda _: None, done=lambda: True, synchronize=lambda: None, c_handle=ctypes.c_void_p()
        )
        self.target, self.captured, self.handles, self.at_close = ctypes.c_void_p(0), False, {}, []
        self.kept, self.written = [], []
        graphs = SimpleNamespace(keep=lambda _, *things: self.kept.extend(things))
        self.device = SimpleNamespace(
            idle=defaultdict(list), context=contextlib.nullcontext(), alive=True, fault=None, graphs=graphs,
            releases=SimpleNamespace(side=SimpleNamespace(wait_for_uses=lambda _: None)),
        )  # fmt: skip

    def check(self):
        pass

    def preparing(self):
        return contextlib.nullcontext()

    def empty(self, shape, _, dtype):
        return dp.device("host").empty(shape, dtype)

    def write(self, address, value, dtype):
        assert dtype == dp.Dtype.of("u32")
        ctypes.c_uint32.from_address(address).value = value
        self.written.append(address)


@pytest.fixture
def executor(monkeypatch):
    monkeypatch.setattr(generators, "curand", OnHost())
    generators._class_of.cache_clear()
    monkeypatch.setattr("dispatch.libraries.handle.relaxed", contextlib.nullcontext)
    copy = SimpleNamespace(cuMemcpyDtoDAsync=lambda to, source, size, _: ctypes.memmove(to, source, size))
    monkeypatch.setattr(curand, "driver", copy)
    yield Executor()
    generators._class_of.cache_clear()


@pytest.mark.parametrize("name", ["philox", "xorwow", "mtgp32", "sobol32"])
def test_calls_of_curand_on_a_stream_give_what_the_hosts_do(name, executor):
    """In turn, back again, with odd counts, and with another seed: the generator is set where it does not stand."""
    host, seed = dp.device("host"), 0 if name == "sobol32" else 5
    for op, dtype in (("normal", "f32"), ("uniform", "f64"), ("normal", "f64"), ("bits", "u32")):
        function = getattr(dp, f"random_{op}")
        for turn, (offset, size) in enumerate([(0, 6), (6, 7), (14, 5), (0, 6), (262_140, 9), (3, 4)]):
            if name == "mtgp32" and offset > 100:
                continue
            mine = seed if turn < 5 or not seed else 6
            given = {"bit_generator": name, "out_dtype": dtype, "library": "curand"}
            kind = {"normal": dp.RandomNormalRequest, "uniform": dp.RandomUniformRequest, "bits": dp.RandomBitsRequest}
            request = kind[op](host, size, mine, offset, **given, out=host.empty((size,), dtype))
            plan = curand.curand_random(request, executor, ROW)
            plan.enqueue(request.arguments({}))
            np.testing.assert_array_equal(request.out.numpy(), function(host, size, mine, offset, **given).numpy())
    assert len(executor.handles) == 1
    assert isinstance(curand.curand_random(request.replace(size=0, out=None), executor, ROW), IdlePlan)
    for close in executor.at_close:
        close()
    (idle,) = executor.device.idle.values()
    for handle, destroy in idle:
        assert destroy(handle) == 0


def test_a_generator_that_stands_where_a_request_begins_is_left_alone(executor, monkeypatch):
    host, said = dp.device("host"), []
    monkeypatch.setattr(generators.curand, "curandSetGeneratorOffset", lambda _, at: said.append(at), raising=False)
    for offset in (0, 10, 20, 100, 110, 0):
        request = dp.RandomUniformRequest(host, 10, 5, offset, bit_generator="xorwow", out=host.empty((10,)))
        curand.curand_random(request, executor, ROW).enqueue(request.arguments({}))
    assert said == [0, 100, 0]


@pytest.mark.compiles
def test_kernels_are_launched_for_their_places_and_replays_are_counted(executor, monkeypatch, tmp_path):
    on_cpu, host, sources = random_on_cpu.OnCpu(tmp_path), dp.device("host"), {}

    def loaded(source, function, options, _):
        sources[len(sources) + 1] = source, function, options
        return len(sources)

    def launch(function, *rest):
        blocks, _, _, threads, _, _, _, _, pointers, _ = rest
        source, name, options = sources[function.value]
        if name == "advance":
            at = ctypes.c_void_p.from_address(pointers[0]).value
            ctypes.c_uint32.from_address(at).value += 1
            return 0
        kinds = on_cpu.kinds[name]
        given = [kind.from_address(at) for kind, at in zip(kinds, pointers, strict=True)]
        kernel = SimpleNamespace(source=source, function=name, options=options)
        on_cpu.library(kernel, kinds).launch(blocks, threads, *given)
        return 0

    number, real, place = ctypes.c_uint64, ctypes.c_double, ctypes.c_void_p
    on_cpu.kinds = {
        "random_uniform": (place, number, number, number, real, real, place),
        "random_poisson": (place, number, number, number, number, number, place, place),
        "random_choice": (
            place,
            place,
            number,
            number,
            number,
            number,
            distribution_kernels.DistributionParameters,
            place,
        ),
    }
    monkeypatch.setattr(philox_kernels, "driver", SimpleNamespace(cuLaunchKernel=SimpleNamespace(unchecked=launch)))
    monkeypatch.setattr(philox_kernels, "loaded", loaded)
    copy = SimpleNamespace(cuMemcpyHtoDAsync=lambda to, source, size, _: ctypes.memmove(to, source, size))
    monkeypatch.setattr(distribution_kernels, "driver", copy)
    uniform = dp.RandomUniformRequest(host, 50, 5, 3, out=host.empty((50,)))
    plan = philox_kernels.nvrtc_random(uniform, executor, ROW)
    for request in (uniform, uniform.replace(seed=2**64 - 1, offset=2**40 + 1)):
        plan.enqueue(request.arguments({}))
        np.testing.assert_array_equal(uniform.out.numpy(), dp.run(request.replace(out=None)).numpy())
    sums = host.array(np.array([0.2, 0.5, 1.0]))
    choice = dp.RandomChoiceRequest(host, 50, 5, 3, sums, out=host.empty((50,), "i64"))
    distribution_kernels.nvrtc_draws(choice, executor, ROW).enqueue(choice.arguments({}))
    np.testing.assert_array_equal(choice.out.numpy(), dp.run(choice.replace(out=None)).numpy())
    counts = dp.RandomPoissonRequest(host, 50, 5, 3, lam=20.0, out=host.empty((50,), "u32"))
    by_table = distribution_kernels.nvrtc_draws(counts, executor, ROW)
    gc.collect()  # nothing but the plan has the table
    by_table.enqueue(counts.arguments({}))
    np.testing.assert_array_equal(counts.out.numpy(), dp.run(counts.replace(out=None)).numpy())
    executor.captured = True
    plan.enqueue(uniform.arguments({}))
    np.testing.assert_array_equal(uniform.out.numpy(), dp.run(uniform.replace(out=None)).numpy())
    (count,) = executor.kept
    assert executor.written == [count.ptr]
    assert count.numpy().tolist() == [1]
