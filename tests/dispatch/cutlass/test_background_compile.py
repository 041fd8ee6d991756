"""Several requests prepared together: what they have to compile is compiled at once, and nothing is bound before it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import NoRow
from dispatch.keys import Compute
from dispatch.libraries.cutlass import compile as compiler
from dispatch.libraries.cutlass.compile import CompileFailed
from dispatch.libraries.cutlass.emit.sm90_gemm import Source

PATIENCE = 120  # seconds, on a machine that has other things to do


@pytest.fixture
def compiling(tmp_path, monkeypatch):
    """A row of the host that compiles a kernel for each k before it binds; `bound` has the order of the bindings.

    A compilation ends when as many as `compiling(n)` says are under way.
    """
    monkeypatch.setenv("CUDABIND_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "_known", {})
    pool = ThreadPoolExecutor(4)
    monkeypatch.setattr(compiler, "_compilers", lambda: pool)
    numpy_row = next(
        row for row in dp.TABLE.of("matmul") if row.library == "numpy" and row.dtypes[0] is dp.Dtype.of("f32")
    )
    bound = []

    def call(request, executor, _row):
        code = compiler.request(Source(f"kernel {request.k}", ()), "sm_90", f"k {request.k}").result()
        bound.append((request.k, code))
        return numpy_row.call(request, executor, numpy_row)

    row = replace(numpy_row, library="compiling", rules=(), call=call)
    dp.TABLE.register(row)

    def at_once(count, fails=()):
        together = threading.Barrier(count, timeout=PATIENCE)

        def compile_one(_kernel, text, _target, label):
            together.wait()
            if label in fails:
                raise CompileFailed(label, "an error", "a log")
            return text.encode()

        monkeypatch.setattr(compiler, "_compile", compile_one)
        return bound

    yield at_once
    dp.TABLE.unregister(row)
    pool.shutdown()


def products(rng, *sizes):
    host = dp.device("host")
    return [dp.MatmulRequest(*(host.array(rng.standard_normal(s), "f32") for s in ((8, k), (k, 8)))) for k in sizes]


def test_all_kernels_are_compiled_at_once_and_the_calls_are_right(compiling, rng):
    bound = compiling(3)
    requests = products(rng, 16, 32, 48)
    calls = dp.prepare_all(iter(requests))
    assert sorted(bound) == [(16, b"kernel 16"), (32, b"kernel 32"), (48, b"kernel 48")]  # each once
    for call, request in zip(calls, requests, strict=True):
        assert np.allclose(call().numpy(), request.a.numpy() @ request.b.numpy(), atol=1e-5)


def test_a_kernel_that_two_need_is_compiled_once(compiling, rng):
    compiling(1)
    assert len(dp.prepare_all(products(rng, 16, 16))) == 2


def test_what_does_not_compile_says_so(compiling, rng):
    compiling(2, fails=("k 32",))
    with pytest.raises(CompileFailed, match="k 32"):
        dp.prepare_all(products(rng, 16, 32))


def test_what_no_row_takes_is_refused_before_anything_is_waited_for(compiling, rng):
    compiling(2)  # the one that is started would wait for another
    good = products(rng, 16)
    host = dp.device("host")
    bad = dp.MatmulRequest(host.zeros((8, 8), "f64"), host.zeros((8, 8), "f64"), compute=Compute.COMPUTE_32F)
    with pytest.raises(NoRow):
        dp.prepare_all([*good, bad])
    assert compiler.request(Source("kernel 64", ()), "sm_90", "k 64").result(PATIENCE)  # the other


def test_what_is_being_compiled_is_put_off(compiling):
    compiling(2)
    with compiler.compiling_in_background() as started, pytest.raises(compiler.StillCompiling, match="k 8"):
        compiler.request(Source("kernel 8", ()), "sm_90", "k 8")
    assert compiler.request(Source("kernel 9", ()), "sm_90", "k 9").result(PATIENCE) == b"kernel 9"
    assert [future.result(PATIENCE) for future in started] == [b"kernel 8"]


def test_what_is_there_is_not(compiling):
    compiling(1)
    assert compiler.request(Source("kernel 8", ()), "sm_90", "k 8").result(PATIENCE) == b"kernel 8"
    with compiler.compiling_in_background() as started:
        assert compiler.request(Source("kernel 8", ()), "sm_90", "k 8").result() == b"kernel 8"  # it is there
    assert not started
