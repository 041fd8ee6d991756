"""Repeated calls over torch's tensors make no request: right with changing shapes, layouts, streams and threads."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest

pytestmark = pytest.mark.usefixtures("dev")
BOUNDS = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 2e-3}  # of the largest element; f32 may be TF32


def matrix(torch, rng, rows, columns, dtype):
    """Random, transposed or not, a slice of something larger or not."""
    kind = rng.integers(4)
    if kind == 0:
        return torch.randn(rows, columns, device="cuda").to(dtype)
    if kind == 1:
        return torch.randn(columns, rows, device="cuda").to(dtype).t()
    wider = torch.randn(rows, columns + 24, device="cuda").to(dtype)
    return wider[:, 8 : columns + 8] if kind == 2 else wider[:, :columns]


def near(y, right, dtype):
    return bool((y.double() - right).abs().max() <= BOUNDS[str(dtype).removeprefix("torch.")] * right.abs().max())


def product(torch, rng, sizes):
    """One random call with its judgement, made before anything is waited for."""
    m, n, k = (int(rng.choice(sizes)) for _ in range(3))
    dtype = (torch.bfloat16, torch.float16, torch.float32)[int(rng.integers(3))]
    a, b = matrix(torch, rng, m, k, dtype), matrix(torch, rng, k, n, dtype)
    bias = torch.randn(n, device="cuda").to(dtype) if rng.integers(2) else None
    out = torch.full((m, n), float("nan"), device="cuda", dtype=dtype) if rng.integers(2) else None
    epilogue = dp.Epilogue.NONE if bias is None else dp.Epilogue.GELU_BIAS if rng.integers(2) else dp.Epilogue.BIAS
    y = dp.matmul(a, b, bias=bias, epilogue=epilogue, out=out)
    assert type(y) is torch.Tensor
    assert out is None or y is out
    right = a.double() @ b.double()
    if bias is not None:
        right = right + bias.double()
    if epilogue is dp.Epilogue.GELU_BIAS:
        right = torch.nn.functional.gelu(right, approximate="tanh")
    return near(y, right, dtype)


@pytest.mark.parametrize("side", [False, True])
def test_products_of_changing_shapes_are_right(torch, rng, made, side):
    with torch.cuda.stream(torch.cuda.Stream() if side else torch.cuda.current_stream()):
        assert all(product(torch, rng, (8, 16, 64, 72, 256)) for _ in range(1500))
    assert made["matmul"] < 1500, "those that came again made none"


def test_eight_threads_on_streams_of_their_own(torch):
    def work(seed):
        rng = np.random.default_rng(seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            return all(product(torch, rng, (8, 16, 64)) for _ in range(400))

    for _ in range(2):  # threads end with their kernels under way, and others come to have their streams
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(8)))
        gc.collect()


def test_other_ops_are_right_again_and_again(torch, made):
    import torch.nn.functional as f

    for turn in range(60):
        rows = 8 * (1 + turn % 3)
        x = torch.randn(rows, 128, device="cuda")
        weight, bias = torch.randn(128, device="cuda"), torch.randn(128, device="cuda")
        image, filters = torch.randn(2, 8, rows, 16, device="cuda"), torch.randn(8, 8, 3, 3, device="cuda")
        q = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.float16)
        pairs = [
            (dp.softmax(x), torch.softmax(x.double(), -1)),
            (
                dp.norm_fwd(x, weight, bias),
                f.layer_norm(x.double(), (128,), weight.double(), bias.double()),
            ),
            (
                dp.conv_fwd(image, filters, pad=1),
                f.conv2d(image.double(), filters.double(), padding=1),
            ),
            (dp.sdpa_fwd(q, q, q), f.scaled_dot_product_attention(q.double(), q.double(), q.double())),
        ]
        for y, right in pairs:
            assert y.shape == right.shape
            assert float((y.double() - right).abs().max()) <= 1e-2 * max(1.0, float(right.abs().max()))
    assert all(count <= 3 for count in made.values()), made


def test_a_capture_of_torch_takes_repeated_calls_in(torch):
    a, b = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(100):  # by now it is relocated
            dp.matmul(a, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        y = dp.matmul(dp.matmul(a, b), b)
    for _ in range(5):
        a.normal_()
        graph.replay()
        assert near(y, a.double() @ b.double() @ b.double(), torch.float32)
    with torch.cuda.stream(side):
        assert near(dp.matmul(a, b), a.double() @ b.double(), torch.float32)


def test_a_stream_that_torch_only_borrows_is_looked_at_each_time(torch, dev, made):
    """Others may destroy it: its calls keep their events, and make requests."""
    ours = dev.stream()
    with torch.cuda.stream(torch.cuda.ExternalStream(ours.handle)):
        for turn in range(1, 5):
            a = torch.randn(64, 64, device="cuda")
            assert near(dp.matmul(a, a), a.double() @ a.double(), torch.float32)
            assert made["matmul"] == turn


def test_workspace_of_threads_that_ended_outlives_their_kernels(torch, dev):
    """Each thread's executor goes with a product under way on a side stream that nobody names again."""
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    right = a.double() @ a.double()
    for _ in range(6):
        results = []

        def work(results=results):
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(50_000_000)
                results.extend(dp.matmul(a, a) for _ in range(20))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        gc.collect()
        junk = [dev.array(np.full(1 << 20, 1e30, np.float32)) for _ in range(16)]
        torch.cuda.synchronize()
        assert all(near(y, right, torch.bfloat16) for y in results)
        del junk


def test_what_torch_follows_is_refused_after_good_calls(torch):
    x = torch.randn(8, 64, device="cuda")
    for _ in range(3):
        dp.softmax(x)
    with pytest.raises(BadRequest, match="requires grad"):
        dp.softmax(x.clone().requires_grad_())
    with torch.no_grad():
        assert dp.softmax(x.clone().requires_grad_()).shape == x.shape
    with pytest.raises(BadRequest, match="overlaps"):
        dp.softmax(x[:4], out=x[1:5])


def test_memory_that_was_let_go_is_refused_after_good_calls(torch):
    for _ in range(3):
        dp.softmax(torch.randn(8, 64, device="cuda"))
    gone = torch.empty(8, 64, device="cuda")
    gone.untyped_storage().resize_(0)
    with pytest.raises(BadRequest, match="was freed"):
        dp.softmax(gone)


def test_ours_and_theirs_stay_in_order(torch, dev):
    """A result of torch is read on our stream, and what is made there by torch again, with repeated calls between."""
    a = torch.randn(256, 256, device="cuda")
    eye = dev.array(np.eye(256, dtype=np.float32))
    for _ in range(50):
        x = dp.matmul(a, a)
        torch.cuda._sleep(1_000_000)
        y = dp.matmul(x, a)
        with dev.stream():
            z = dp.matmul(dp.from_dlpack(y), eye)
        back = torch.from_dlpack(z)
        w = dp.matmul(back, a)
        right = a.double() @ a.double() @ a.double() @ a.double()
        assert near(w, right, torch.float32)


def test_arrays_of_cupy(cupy, rng, made):
    for turn in range(200):
        m, n, k = (int(rng.choice((8, 16, 64))) for _ in range(3))
        a, b = cupy.random.standard_normal((m, k)), cupy.random.standard_normal((n, k)).T
        out = cupy.full((m, n), cupy.nan) if turn % 2 else None
        y = dp.matmul(a, b, out=out)
        assert type(y) is cupy.ndarray
        assert out is None or y is out
        assert np.allclose(y.get(), a.get() @ b.get(), rtol=1e-10, atol=1e-10)
    assert made["matmul"] <= 2 * 27 + 27, "those that came again made none"
    with cupy.cuda.Stream(non_blocking=True):  # which goes with its object: each call has its events
        assert np.allclose(dp.matmul(a, b).get(), a.get() @ b.get())
    assert np.allclose(dp.matmul(a, b).get(), a.get() @ b.get())


@pytest.mark.parametrize("work", ["product", "norm's gradient", "under the stream"])
def test_a_thread_without_a_context_may_begin_with_a_call_of_ours(work):
    """Autograd's thread has none until torch does something there, and default streams are of the current context."""
    script = """
import sys, threading, torch, dispatch as dp, dispatch.torch as ops
work, found = sys.argv[1], []
x, w, b = torch.randn(64, 64, device="cuda"), torch.randn(64, device="cuda"), torch.randn(64, device="cuda")
torch.cuda.synchronize()
if work == "norm's gradient":
    y = x.clone().requires_grad_()
    ops.layer_norm(y, (64,), w, b).backward(torch.ones_like(x))  # the first thing that the thread of gradients does
    z = x.clone().requires_grad_()
    torch.nn.functional.layer_norm(z, (64,), w, b).backward(torch.ones_like(x))
    found = [(y.grad, z.grad)]
else:
    def first():
        if work == "product":
            found.append((dp.matmul(x, x), x @ x))
        else:
            with dp.use_torch_stream():
                found.append((dp.matmul(x, x), x @ x))
    thread = threading.Thread(target=first)
    thread.start()
    thread.join()
torch.testing.assert_close(*found[0], rtol=1e-2, atol=1e-2)
print("right")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, work], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "right", done.stderr
