"""Plans over several GPUs on the host, by NumPy, and what they refuse; the copies between parts and arrays."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, Closed
from dispatch.libraries.cufft import peer_copies
from dispatch.libraries.cufft.xt_layouts import split_extent

CUT = [(33, 34), (64, 48), (40, 130), (33, 35, 4), (40, 32, 8)]
TWO = ["host"] * 2


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


in_parts = loaded(Path(__file__).parents[1] / "fft_in_parts.py")
NUMPY, close, drawn, right, there_and_back = (
    in_parts.NUMPY,
    in_parts.close,
    in_parts.drawn,
    in_parts.right,
    in_parts.there_and_back,
)


# -- on the host ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("n", "count"), [(64, 2), (4096, 2), (1024, 4), (128, 8), (1024, 16)])
@pytest.mark.parametrize("dtype", ["c64", "c128"])
def test_one_axis(rng, n, count, dtype):
    with dp.fft.MultiGpuPlan(["host"] * count, n, dtype) as plan:
        there_and_back(plan, drawn(rng, n, dtype), (n,))


@pytest.mark.parametrize("shape", CUT)
@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("count", [2, 3])
def test_several_axes(rng, shape, dtype, count):
    with dp.fft.MultiGpuPlan(["host"] * count, shape, dtype) as plan:
        there_and_back(plan, drawn(rng, shape, dtype), shape)


@pytest.mark.parametrize("shape", [(7,), (1,), (5, 9), (3, 4, 6)])
@pytest.mark.parametrize("dtype", NUMPY)
def test_a_batch(rng, shape, dtype):
    with dp.fft.MultiGpuPlan(TWO, shape, dtype, batch=5) as plan:
        there_and_back(plan, drawn(rng, (5, *shape), dtype), shape)
        assert [len(part) for part in plan.parts] == [3, 2]


def test_an_inverse_alone_and_transforms_of_transforms(rng):
    x = drawn(rng, (32, 40), "c128")
    with dp.fft.MultiGpuPlan(TWO, x.shape, "c128") as plan:
        close(plan.write(x).inverse().read(), np.fft.ifftn(x))
        close(plan.write(x).forward().forward().read(), np.fft.fftn(np.fft.fftn(x)))
    with dp.fft.MultiGpuPlan(TWO, 64, "c128") as plan:
        close(plan.write(x[0, :1].repeat(64)).inverse().read(), np.fft.ifft(x[0, :1].repeat(64)))


def test_half_a_spectrum_is_written_too(rng):
    x = drawn(rng, (32, 40), "f64")
    with dp.fft.MultiGpuPlan(TWO, x.shape, "f64") as plan:
        assert (plan.shape, plan.dtype.name) == ((32, 40), "f64")
        close(plan.write(np.fft.rfftn(x)).inverse().read(), x)
        plan.write(np.fft.rfftn(x))
        assert (plan.shape, plan.dtype.name) == ((32, 21), "c128")
        with pytest.raises(BadRequest, match=r"forward: got a plan that holds c128\[32, 21\]; expected real numbers"):
            plan.forward()
        plan.inverse()
        with pytest.raises(BadRequest, match=r"inverse: .* expected half a spectrum, c128\[32, 21\]"):
            plan.inverse()


def test_parts_may_be_written(rng):
    x, filter_ = drawn(rng, (32, 40), "c128"), rng.standard_normal((32, 40))
    with dp.fft.MultiGpuPlan(TWO, x.shape, "c128") as plan:
        plan.write(x).forward()
        for part, piece in zip(plan.parts, plan.split(filter_), strict=True):
            part.copy_from(part.numpy() * piece)
        close(plan.inverse().read(), np.fft.ifftn(np.fft.fftn(x) * filter_))
        kept = plan.parts[0]
    assert kept.numpy().shape == (16, 40), "a tensor keeps its memory"


def test_operands_and_results_of_any_kind(rng):
    x = drawn(rng, (32, 40))
    host = dp.device("host")
    with dp.fft.MultiGpuPlan(TWO, x.shape) as plan:
        for given in (x, np.asfortranarray(x), x[:, ::-1], host.array(x), host.array(x.T.copy()).T):
            assert np.array_equal(plan.write(given).read(), np.asarray(given))
        plan.write(x)
        for out in (np.empty_like(x), np.empty(x.shape, x.dtype, order="F"), host.empty(x.shape, "c64")):
            assert plan.read(out) is out
            assert np.array_equal(np.asarray(out), x)
        backwards = np.empty_like(x)[::-1]
        assert np.array_equal(plan.read(out=backwards), x)


def test_torch_s_tensors(rng):
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(drawn(rng, (32, 40)))
    with dp.fft.MultiGpuPlan(TWO, x.shape) as plan:
        plan.write(x).forward()
        out = torch.empty_like(x)
        assert plan.read(out=out) is out
        torch.testing.assert_close(out, torch.fft.fftn(x))
        with pytest.raises(BadRequest, match=r"x: got c128\[32, 40\]; expected c64\[32, 40\]"):
            plan.write(x.to(torch.complex128))


REFUSED = {
    "devices": [
        ("cuda:0", 64, {}, "a list with a GPU for each part"),
        (["host"], 64, {}, "2 to 16"),
        (["host"] * 17, (64, 64), {}, "2 to 16"),
        (["host"] * 3, 64, {}, "2, 4, 8, 16 GPUs"),
        ([0, 1], 64, {}, "Devices or their names"),
    ],
    "shape": [
        (TWO, 32, {}, "a power of 2 from 64 on"),
        (TWO, 96, {}, "a power of 2 from 64 on"),
        (["host"] * 8, 64, {}, "a power of 2 from 128 on"),
        (["host"] * 16, 512, {}, "a power of 2 from 1024 on"),
        (TWO, 64, {"dtype": "f32"}, "has no R2C"),
        (TWO, (16, 64), {}, "32 points or more"),
        (TWO, (64, 16, 64), {}, "32 points or more"),
        (TWO, (64, 63), {"dtype": "f32"}, "an even number"),
        (TWO, (64, 4099), {}, "prime factors up to 127"),
        (TWO, (2 * 1031, 64), {"dtype": "c128"}, "prime factors up to 127"),
        (TWO, (2,) * 4, {}, "1 to 3 axes"),
        (TWO, (), {}, "1 to 3 axes"),
        (TWO, (0, 64), {"batch": 2}, "1 to 3 axes"),
        (TWO, "64", {}, "an integer, or a tuple"),
    ],
    "batch": [
        (["host"] * 4, 8, {"batch": 3}, "at least one transform for each"),
        (TWO, 8, {"batch": 1}, "with None, one transform"),
        (TWO, 8, {"batch": True}, "at least one transform"),
    ],
    "dtype": [(TWO, 64, {"dtype": "f16"}, "c64 or c128"), (TWO, 64, {"dtype": "x"}, "a dtype")],
}


@pytest.mark.parametrize(
    ("operand", "devices", "shape", "more", "words"),
    [(operand, *one) for operand, several in REFUSED.items() for one in several],
)
def test_what_cufft_does_not_have_is_refused_before_a_gpu_is_asked(operand, devices, shape, more, words):
    with pytest.raises(BadRequest, match=words) as raised:
        dp.fft.MultiGpuPlan(devices, shape, **more)
    assert raised.value.operand == operand


def test_a_prime_is_taken_where_the_documentation_has_it(rng):
    x = drawn(rng, (37, 4093))
    with dp.fft.MultiGpuPlan(TWO, x.shape) as plan:
        close(plan.write(x).forward().read(), right(x, x.shape))


def test_wrong_operands_are_refused():
    with dp.fft.MultiGpuPlan(TWO, (32, 40)) as plan:
        for x, words in (
            (np.zeros((32, 40)), r"x: got f64\[32, 40\]; expected c64\[32, 40\].*astype"),
            (np.zeros((40, 32), "c8"), r"x: got c64\[40, 32\]; expected c64\[32, 40\]"),
            ("text", "x: "),
            (dp.device("host").zeros((32, 40), "f32"), r"x: got f32\[32, 40\]"),
        ):
            with pytest.raises(BadRequest, match=words):
                plan.write(x)
        fixed = np.zeros((32, 40), "c8")
        fixed.flags.writeable = False
        for out in (np.zeros((32, 40)), np.zeros((32, 41), "c8"), fixed, 5, dp.device("host").zeros((32, 40))):
            with pytest.raises(BadRequest, match="out: got"):
                plan.read(out)
        with pytest.raises(BadRequest, match=r"x: got f64\[3\]; expected the shape \[32, 40\]"):
            plan.split(np.zeros(3))
        with pytest.raises(BadRequest, match="norm: got 'none'"):
            plan.forward("none")


def test_a_plan_has_an_end():
    plan = dp.fft.MultiGpuPlan(TWO, (32, 40))
    assert "1 of c64[32, 40] over host, host" in repr(plan)
    with plan:
        assert not plan.closed
    plan.close()
    assert plan.closed
    assert "closed" in repr(plan)
    for use in (plan.forward, plan.inverse, plan.read, lambda: plan.parts, lambda: plan.write(0), plan.__enter__):
        with pytest.raises(Closed):
            use()


def test_threads_take_turns(rng):
    x = drawn(rng, (32, 40), "c128")
    with dp.fft.MultiGpuPlan(TWO, x.shape, "c128") as plan:
        plan.write(x)
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(lambda: plan.forward().inverse()) for _ in range(8)]:
                done.result()
        assert plan.read().shape == x.shape


def test_parts_are_shared_out_as_cufft_does():
    assert split_extent(65, 4) == [(0, 17), (17, 33), (33, 49), (49, 65)]
    assert split_extent(15, 4) == [(0, 4), (4, 8), (8, 12), (12, 15)]


# -- rows of copies ---------------------------------------------------------------------------------------------------
def test_copies_are_cut_into_rows(rng, monkeypatch):
    monkeypatch.setattr(peer_copies, "MAX_PITCH", 400)
    for _ in range(200):
        shape = tuple(rng.integers(1, 5, rng.integers(1, 4)))
        memories, views = [], []
        for order in (rng.permutation(len(shape)), rng.permutation(len(shape))):
            steps, step = [0] * len(shape), 1
            for axis in order:
                steps[axis] = step
                step *= int(shape[axis]) + int(rng.integers(0, 2))
            memories.append(np.arange(step + 8, dtype=np.float32) if not memories else np.zeros(step + 8, np.float32))
            views.append(np.lib.stride_tricks.as_strided(memories[-1], shape, [one * 4 for one in steps]))
        strides = [tuple(one // 4 for one in view.strides) for view in views]
        source, target = (memory.view(np.uint8) for memory in memories)
        for rows in peer_copies.rows_of(shape, *strides, 4):
            for row in range(rows.rows):
                at, to = rows.source + row * rows.source_pitch, rows.target + row * rows.target_pitch
                target[to : to + rows.width] = source[at : at + rows.width]
        assert np.array_equal(*views)


def test_a_share_of_a_dense_array_is_few_copies():
    (rows,) = peer_copies.rows_of((8, 16, 4), (64, 4, 1), (128, 4, 1), 8)
    assert (rows.rows, rows.width, rows.source_pitch, rows.target_pitch) == (8, 512, 512, 1024)
    assert len(list(peer_copies.rows_of((8, 16), (16, 1), (16, 1), 8))) == 1
    assert list(peer_copies.rows_of((0, 16), (16, 1), (16, 1), 8)) == []
