"""Calls inside a graph that the caller captures: they become part of it, or are refused by name, and the capture lives.

Nothing is warmed up: handles, engines, workspaces and outputs are made while the capture is under way, in the mode that
forbids most. Afterwards the graph is launched over other numbers, so that what was not captured shows.
"""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest

import dispatch as dp
from cudabind import driver
from cudabind.errors import LibraryNotFound
from dispatch.errors import BadRequest, NoRow
from dispatch.execute.installed import installed
from dispatch.keys import HOST
from dispatch.row_check import cases_of

N = 64
MODES = ["global", "thread_local", "relaxed"]
OPS = sorted(
    {row.op for row in dp.TABLE if row.min_arch != HOST and row.library != "cutlass" and row.op != "cudnn_graph"}
)


def is_installed(row):
    """Whether a row's library is there."""
    try:
        return installed.get(row.library) is not None or row.library == "own"
    except LibraryNotFound:
        return False


def capture(stream, work):
    """What `work()` returned, and the executable graph of what it enqueued; both of a capture in the default mode."""
    handle = ctypes.c_void_p(stream.handle)
    graph = ctypes.c_void_p()
    assert driver.cuStreamBeginCapture.unchecked(handle, 0) == 0
    try:
        with stream:
            result = work()
    finally:
        status = driver.cuStreamEndCapture.unchecked(handle, ctypes.byref(graph))
    assert status == 0, "the capture was ended"
    executable = driver.cuGraphInstantiate(graph.value, 0)
    driver.cuGraphDestroy(graph.value)
    return result, executable


def launch(stream, executable):
    driver.cuGraphLaunch(executable, stream.handle)
    stream.synchronize()


def product(a, b):
    return a.numpy().astype(np.float64) @ b.numpy().astype(np.float64)


@pytest.mark.parametrize("op", OPS)
def test_each_op_is_captured_at_its_first_call(dev, rng, op):
    ran = 0
    for row in dp.TABLE.of(op):
        if not row.on(dev.arch) or not is_installed(row):
            continue
        for case in cases_of(row)[:6]:
            check = case.check(dev, rng)
            dev.synchronize()
            stream = dev.stream()
            said = []

            def work(check=check, said=said):
                try:
                    return dp.run(check.request)
                except (NoRow, BadRequest) as refusal:
                    said.append(refusal)

            result, executable = capture(stream, work)
            launch(stream, executable)
            if said and isinstance(said[0], BadRequest):
                assert "capture" in str(said[0])
            elif not said:
                check.verify(result)
                ran += 1
            driver.cuGraphExecDestroy(executable)
        if ran >= 3:
            return
    if not ran:
        pytest.skip(f"no row of {op} runs on {dev.arch}, or none may be captured")


def test_open_outputs_belong_to_the_graph(dev, rng):
    """Dropped, they are not used again while the graph lives: it writes to them, and reads them, at every launch."""
    a, b = (dev.array(rng.standard_normal((N, N)), "f32") for _ in range(2))
    stream = dev.stream()

    def work():
        passing = dp.matmul(a, b)
        return dp.matmul(passing, b)

    result, executable = capture(stream, work)
    held = dev.bytes_in_use()
    gc.collect()
    for _ in range(3):
        junk = [dev.array(np.full((N, N), np.nan, np.float32)) for _ in range(20)]
        a.copy_from(rng.standard_normal((N, N)))
        dev.synchronize()
        launch(stream, executable)
        assert np.allclose(result.numpy(), product(a, b) @ b.numpy().astype(np.float64), rtol=1e-3, atol=1e-2)
        del junk
    driver.cuGraphExecDestroy(executable)
    del result
    gc.collect()
    dev.synchronize()
    for _ in range(100):  # the driver tells of the end on a thread of its own
        if dev.bytes_in_use() < held:
            break
        dev.synchronize()
    assert dev.bytes_in_use() < held, "the passing tensor's memory comes back with the end of the graph"


@pytest.mark.parametrize(
    ("what", "work"),
    [
        ("copy from the host", lambda x: x.device.array(np.ones(4))),
        ("copy from the host", lambda x: x.copy_from(np.ones((N, N)))),
        ("copy from the host", lambda x: x.copy_from_async(np.ones((N, N), np.float32))),
        ("copy to the host", lambda x: x.numpy()),
        ("copy to the host", lambda x: x.numpy_async()),
        ("copy to the host", lambda x: x[0, 0, ...].item()),
        ("wait for the device", lambda x: x.device.synchronize()),
        ("not under capture", lambda x: x.device.executor().stream.synchronize()),
        ("autotune=True", lambda x: dp.matmul(x, x[:, :24], autotune=True, workspace=12345, library="cublasLt")),
        (
            "autotune=True",
            lambda x: dp.conv_fwd(
                x.reshape(1, 16, 16, 16), x[:4].reshape(16, 16, 1, 1), autotune=True, library="cudnn"
            ),
        ),
    ],
)
def test_what_cannot_be_captured_is_refused_by_name(dev, rng, monkeypatch, tmp_path, what, work):
    monkeypatch.setenv("CUDABIND_CACHE", str(tmp_path))
    from dispatch.execute import installed

    installed.algorithms.cache_clear()
    x, out = dev.array(rng.standard_normal((N, N)), "f32"), dev.empty((N, N))
    dev.synchronize()
    stream = dev.stream()

    def refused():
        with pytest.raises(BadRequest, match=what):
            work(x)
        assert not stream.done()
        dp.matmul(x, x, out=out)

    try:
        _, executable = capture(stream, refused)
    finally:
        installed.algorithms.cache_clear()
    launch(stream, executable)
    assert np.allclose(out.numpy(), product(x, x), rtol=1e-3, atol=1e-2)
    driver.cuGraphExecDestroy(executable)


def test_memory_written_in_a_capture_is_not_waited_for_outside_of_it(dev, rng):
    a, out = dev.array(rng.standard_normal((N, N)), "f32"), dev.empty((N, N))
    dev.synchronize()
    stream, other = dev.stream(), dev.stream()

    def work():
        dp.matmul(a, a, out=out)
        with other, pytest.raises(BadRequest, match="under capture"):
            dp.matmul(out, a)
        dp.matmul(out, a)

    _, executable = capture(stream, work)
    with other:
        assert np.isfinite(dp.matmul(a, a).numpy()).all()
    launch(stream, executable)
    assert np.allclose(out.numpy(), product(a, a), rtol=1e-3, atol=1e-2)
    driver.cuGraphExecDestroy(executable)


def test_work_of_other_streams_is_there_before_the_graph_runs(dev, rng):
    big = dev.zeros((8192, 8192))
    a, out = dev.empty((N, N)), dev.empty((N, N))
    slow, stream = dev.stream(), dev.stream()
    with slow:
        for _ in range(4):
            dp.matmul(big, big, out=dev.empty((8192, 8192)))
        dev.fill_zero(a)
    _, executable = capture(stream, lambda: dp.matmul(a, a, out=out))
    a_later = rng.standard_normal((N, N))
    launch(stream, executable)
    assert not out.numpy().any()
    a.copy_from(a_later)
    dev.synchronize()
    launch(stream, executable)
    assert np.allclose(out.numpy(), product(a, a), rtol=1e-3, atol=1e-2)
    driver.cuGraphExecDestroy(executable)


# -- torch's own graphs ---------------------------------------------------------------------------------------------
WORKS = {
    "matmul": lambda x: dp.matmul(x, x),
    "alpha on the device": lambda x: dp.matmul(x, x, alpha=0.5),
    "bias and relu": lambda x: dp.matmul(x, x, bias=x[0], epilogue=dp.Epilogue.RELU_BIAS),
    "no k": lambda x: dp.matmul(x[:, :0], x[:0]),
    "conv": lambda x: dp.conv_fwd(x.reshape(1, 16, 16, 16), x[:4].reshape(16, 16, 1, 1)),
    "softmax": dp.softmax,
    "pooling": lambda x: dp.pooling(x.reshape(1, 16, 16, 16), 2),
    "attention": lambda x: dp.sdpa_fwd(*[x.reshape(1, 1, N, N)] * 3),
    "zeros": lambda x: x.device.zeros((N, N)),
}


@pytest.mark.parametrize(
    ("warm", "mode"), [(False, mode) for mode in MODES] + [(True, "global")], ids=[*MODES, "warm, global"]
)
@pytest.mark.parametrize("named", [True, False], ids=["on its stream", "on our own"])
@pytest.mark.parametrize("work", WORKS)
def test_torch_captures_calls_with_open_outputs(dev, torch, work, named, warm, mode):
    dtype = torch.bfloat16 if work == "attention" else torch.float32
    x = torch.randn((N, N), device="cuda").to(dtype)
    side = torch.cuda.Stream()
    enqueue = WORKS[work]

    def run():
        current = torch.cuda.current_stream().cuda_stream
        if not named:
            return torch.from_dlpack(enqueue(dp.from_dlpack(x)))
        with dp.Stream.from_handle(dev, current):
            return torch.from_dlpack(enqueue(dp.from_dlpack(x)))

    if warm:
        with torch.cuda.stream(side):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode=mode):
        noise = torch.rand(8, device="cuda")
        result = run() + 0
    graph.replay()
    torch.cuda.synchronize()
    seen = noise.clone()
    for _ in range(2):
        x.copy_(torch.randn((N, N), device="cuda").to(dtype))
        junk = [dev.array(np.full((N, N), np.nan, np.float32)) for _ in range(12)]
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        expected = run() + 0
        torch.cuda.synchronize()
        torch.testing.assert_close(result, expected)
        del junk
    assert not bool((noise == seen).all()), "torch's random generator goes on with the graph"
    torch.rand(4, device="cuda")
    with torch.cuda.stream(side):
        torch.testing.assert_close(run() + 0, result)
    torch.cuda.synchronize()


def test_a_refusal_leaves_torchs_capture_and_generator_as_they_were(dev, torch):
    x = torch.randn((N, N), device="cuda")
    ours = dp.from_dlpack(x)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        handle = torch.cuda.current_stream().cuda_stream
        with dp.Stream.from_handle(dev, handle), pytest.raises(BadRequest, match="copy to the host"):
            ours.numpy()
        noise = torch.rand(16, device="cuda") + x[0, :16]
    graph.replay()
    first = noise.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert not bool((first == noise).all())
    assert torch.rand(4, device="cuda").shape == (4,)
