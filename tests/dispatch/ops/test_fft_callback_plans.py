"""Plans with callbacks over a stand-in for cuFFT that calls them, compiled by g++.

Each case of each row, as one transform and as passes around one; operands at other addresses; what is kept and shared;
callbacks that do not compile.
"""

import importlib.util
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from cudabind.errors import LibraryNotFound
from dispatch.errors import BadRequest
from dispatch.keys import C64, C128, F32, F64, Arch
from dispatch.libraries.cufft import callbacks
from dispatch.libraries.nvrtc import launching
from dispatch.ops.fft import cufft_callback
from dispatch.ops.fft.callback import Callback
from dispatch.ops.fft.cases import cases
from dispatch.table.select import select

spec = importlib.util.spec_from_file_location("callback_rows", Path(__file__).with_name("callback_rows.py"))
callback_rows = importlib.util.module_from_spec(spec)
spec.loader.exec_module(callback_rows)
loaded, stand_in, ROWS = callback_rows.loaded, callback_rows.stand_in, callback_rows.ROWS
compiler = callback_rows.compiler

kernels_on_cpu = loaded(Path(__file__).with_name("kernels_on_cpu.py"))
TOO_OLD = "cuFFT is too old"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    return stand_in.Kernels(tmp_path_factory.mktemp("callbacks"), kernels_on_cpu.BEFORE)


@pytest.fixture
def executor(monkeypatch, kernels):
    made = stand_in.executor_of(monkeypatch, kernels)
    monkeypatch.setattr(cufft_callback, "why_not", lambda: "")
    monkeypatch.setattr(cufft_callback, "slower", lambda _: "")  # all that cuFFT takes is tried
    return made


@pytest.fixture
def without_callbacks(executor, monkeypatch):
    monkeypatch.setattr(cufft_callback, "why_not", lambda: TOO_OLD)
    return executor


def verified(request, executor, row, check):
    plan = row.call(request, executor, row)
    outputs = request.device.executor().outputs(request)
    for _ in range(2):  # the second over scratch memory that the first has left
        before = np.array(request.a)
        plan.enqueue(request.arguments(outputs))
        check.verify(request.result(outputs))
        if request.out is None or request.out.ptr != request.a.ptr:
            np.testing.assert_array_equal(np.asarray(request.a), before)
        check.renew(request.result(outputs))
    return plan


# Each case has programs of its own, of which g++ compiles ten a second: double precision is tried with one in three.
def some(row):
    return cases(row)[:: 1 if F32 in row.dtypes or C64 in row.dtypes else 3]


def rows(*quick):
    marks = [() if row.dtypes in quick else pytest.mark.exhaustive for row in ROWS]
    return pytest.mark.parametrize(
        "row", [pytest.param(row, id=row.name, marks=mark) for row, mark in zip(ROWS, marks, strict=True)]
    )


@rows((F64, C128), (C128, C128), (C128, F64))
def test_a_case_is_right_as_one_transform(row, executor, each):
    each(some(row), lambda case, rng: looked_at(case, rng, executor, row))
    assert {"dispatch_load", "dispatch_store"} <= {*executor.library.called}


@rows((F64, C128))
def test_a_case_is_right_as_passes_around_a_transform(row, without_callbacks, each):
    each(some(row), lambda case, rng: looked_at(case, rng, without_callbacks, row))
    assert not without_callbacks.library.called


def looked_at(case, rng, executor, row):
    check = case.check(dp.device("host"), rng)
    verified(check.request, executor, row, check)


def planned(executor, a, **choices):
    request = dp.CallbackDftRequest(a, **choices)
    row = select(request, Arch(90))
    return request, row.call(request, executor, row)


def ran(plan, request):
    outputs = request.device.executor().outputs(request)
    plan.enqueue(request.arguments(outputs))
    return request.result(outputs).numpy()


WINDOW = ("return x * window[i % n];", lambda x, i, window, n: x * window[i % n])


def test_a_transform_with_callbacks_is_one_step_however_its_operands_lie(executor):
    dev, rng = dp.device("host"), np.random.default_rng(1)
    whole = dev.array(rng.standard_normal((6, 5, 8, 3)).astype("f4"))
    scale = Callback.scale(0.5)
    for a, choices in (
        (whole[..., 1], {"kind": "r2c", "axes": 2, "load": scale}),
        (whole[:, ::-1, ::2, 0], {"axes": (0, 2), "load": scale, "store": scale}),
        (whole[..., 0], {"axes": 1, "load": scale, "store": Callback.magnitude(), "norm": "ortho"}),
        (whole[0].transpose(2, 0, 1), {"axes": (1, 2), "s": (4, 12), "store": Callback.real()}),
    ):
        executor.library.executed.clear()
        request, plan = planned(executor, a, **choices)
        assert len(plan._steps) == 1
        result = ran(plan, request)
        assert len(executor.library.executed) == 1
        np.testing.assert_allclose(result, dp.run(request).numpy(), rtol=1e-4, atol=1e-4)


def test_operands_at_other_addresses_are_found_there(executor):
    """As a repeated call, a recorded one and a prepared one have them: addresses alone are others."""
    dev, rng = dp.device("host"), np.random.default_rng(2)
    plan = None
    for turn in range(4):
        spare = dev.zeros((turn + 1, 17))
        x, w = rng.standard_normal((3, 16)), rng.standard_normal(16)
        window = Callback(*WINDOW, {"window": dev.array(w), "n": 16})
        request = dp.CallbackDftRequest(
            dev.array(x), "r2c", axes=1, load=window, store=Callback.multiply(dev.array(x[:, :9]))
        )
        if plan is None:
            row = select(request, Arch(90))
            plan = row.call(request, executor, row)
        np.testing.assert_allclose(ran(plan, request), np.fft.rfft(x * w) * x[:, :9], rtol=1e-12)
        del spare


def test_a_call_that_is_still_to_run_keeps_its_own_operands(executor, monkeypatch):
    """What is written before a transform is given to the kernel by value: the launch holds all that it needs."""
    dev, calls = dp.device("host"), []
    launch = launching.driver.cuLaunchKernel.unchecked

    def later(function, *rest):
        _, _, _, threads, _, _, _, _, pointers, _ = rest
        words = callbacks.Blocks.from_buffer_copy(callbacks.Blocks.from_address(pointers[1]))
        place = callbacks.ctypes.c_void_p.from_buffer_copy(callbacks.ctypes.c_void_p.from_address(pointers[0]))
        calls.append((function, threads, words, place))
        return launch(function, *rest)

    monkeypatch.setattr(launching, "driver", SimpleNamespace(cuLaunchKernel=SimpleNamespace(unchecked=later)))
    made = []
    for factor in (1.0, 2.0):
        weights = dev.array(np.full(8, factor, "f4"))
        request, plan = planned(
            executor, dev.zeros((2, 8), "f32"), axes=1, load=Callback(*WINDOW, {"window": weights, "n": 8})
        )
        ran(plan, request)
        made.append(weights.ptr)
    assert [call[2].word[1] for call in calls] == made
    assert [call[2].word[2] for call in calls] == [8, 8]
    assert all(call[1] == 64 for call in calls)


def test_what_is_written_is_of_the_dtype_that_the_callback_says(executor):
    dev, x = dp.device("host"), np.random.default_rng(5).standard_normal((3, 8))
    spectrum = np.fft.rfft(x)
    for code, counterpart, dtype in (
        ("return x.x;", lambda x: x.real != 0, "bool"),
        ("return (int)(100 * x.x);", lambda x: (100 * x.real).astype("i4"), "i32"),
        ("return x.y;", lambda x: x.imag, "f32"),
        ("return ComplexOf<float>(x.y, x.x);", lambda x: x.imag + 1j * x.real, "c64"),
    ):
        store = Callback(code, counterpart, dtype=dtype)
        request, plan = planned(executor, dev.array(x), kind="r2c", axes=1, store=store)
        got = ran(plan, request)
        assert got.dtype == dp.Dtype.of(dtype).numpy
        np.testing.assert_allclose(got, counterpart(spectrum), rtol=1e-6)


def test_nothing_is_written_where_callbacks_have_no_operands(executor, monkeypatch):
    monkeypatch.setattr(launching, "driver", None)
    dev = dp.device("host")
    x = np.arange(24.0).reshape(3, 8)
    lines = Callback("return x * 2;", lambda x: x * 2)
    request, plan = planned(executor, dev.array(x), kind="r2c", axes=1, load=lines, inverse=True)
    np.testing.assert_allclose(ran(plan, request), np.fft.ihfft(2 * x))


def test_the_picture_of_the_example_is_two_steps_from_bytes_to_bytes(executor, monkeypatch):
    example = loaded(Path(__file__).parents[3] / "examples" / "21_image_filter.py")
    dev, rng = dp.device("host"), np.random.default_rng(4)
    picture, kernel = rng.integers(0, 256, (31, 40, 3)).astype("u1"), example.kernel_of("sharpen")
    expected, requests = example.filtered(dev.array(picture), kernel).numpy(), []

    def through_plan(a, kind, s, axes, **choices):
        request, plan = planned(executor, a, kind=kind, s=s, axes=axes, **choices)
        requests.append((request, plan))
        return dev.array(ran(plan, request))

    monkeypatch.setitem(dp.fft.rfft2.__globals__, "callback_dft", through_plan)
    got = example.filtered(dev.array(picture), kernel).numpy()
    assert [len(plan._steps) for _, plan in requests] == [1, 1]
    assert got.dtype == np.uint8
    assert np.abs(got.astype(int) - expected).max() <= 1
    assert (got != expected).mean() < 1e-3


def test_plans_of_cufft_are_kept_for_the_same_lines_alone(executor):
    dev = dp.device("host")
    library, a = executor.library, dev.zeros((3, 8), "c64")
    request, plan = planned(executor, a, axes=1, load=Callback.scale(2.0))
    del plan
    assert len(executor.device.idle["cufft"]) == 1
    request, plan = planned(executor, a, axes=1, load=Callback.scale(3.0))  # a number is no part of the lines
    assert (len(library.plans), len(executor.device.idle["cufft"])) == (1, 0)
    x = np.arange(24).reshape(3, 8).astype("c8")
    np.testing.assert_allclose(ran(plan, request.replace(a=dev.array(x))), 3 * np.fft.fft(x), rtol=1e-5)
    _, another = planned(executor, a, axes=1, load=Callback("return x / 2;", lambda x: x / 2))
    _, without = planned(executor, a, axes=1)
    assert len(library.plans) == 3
    assert another._steps[0]._plan.block is not plan._steps[0]._plan.block is not None
    assert without._steps[0]._plan.block is None


def test_callbacks_that_cufft_refuses_are_passes(executor, caplog):
    caplog.set_level("INFO", "dispatch")
    dev, rng = dp.device("host"), np.random.default_rng(3)
    x = rng.standard_normal((4, 12))
    executor.library.takes_callbacks = False
    request, plan = planned(executor, dev.array(x), kind="r2c", axes=1, load=Callback.scale(2.0))
    assert [type(step).__name__ for step in plan._steps] == ["CallbackPass", "Transform"]  # no pass that does nothing
    assert [record.facts["event"] for record in caplog.records] == ["not fused"]
    assert "cuFFT has no plan for sizes [12]" in caplog.records[0].facts["cause"]
    np.testing.assert_allclose(ran(plan, request), 2 * np.fft.rfft(x), rtol=1e-12)
    assert len(executor.library.plans) == 1


def test_what_is_faster_as_passes_is_passes():
    dev = dp.device("host")
    double, magnitude = Callback.scale(2.0), Callback.magnitude()
    for points, sides, words in (
        (1024, {"load": double}, ""),
        (4095, {"load": double}, ""),
        (4096, {"load": double}, "4096 points or more"),
        (1024, {"load": double, "store": magnitude}, "element by element"),
    ):
        why = cufft_callback.slower(dp.CallbackDftRequest(dev.zeros((2, points)), "r2c", axes=1, **sides))
        assert words in why
        assert bool(why) == bool(words)


def test_a_pass_has_all_elements_of_some_blocks(without_callbacks):
    dev, rng = dp.device("host"), np.random.default_rng(4)
    x = rng.standard_normal((3, 1201)).astype("f4")  # no multiple of a thread's elements, nor of a block's
    choices = {"kind": "r2c", "axes": 1, "load": Callback.scale(2.0), "store": Callback.magnitude()}
    request, plan = planned(without_callbacks, dev.array(x), **choices)
    assert [type(step).__name__ for step in plan._steps] == ["CallbackPass", "Transform", "CallbackPass"]
    np.testing.assert_allclose(ran(plan, request), 2 * np.abs(np.fft.rfft(x.astype("f8"))), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("version", "linker", "compiler", "words"),
    [
        (12500, (13, 5), (13, 5), ""),
        (11300, (12, 9), (12, 6), ""),
        (
            11206,
            (12, 6),
            (12, 6),
            "cuFFT 11.2.6 does not support callbacks as LTO-IR; the first version that does is 11.3, of CUDA 12.6",
        ),
        (12000, (13, 0), (13, 5), "at least as new as NVRTC; found nvJitLink 13.0 and NVRTC 13.5"),
        (12000, (12, 9), (13, 0), "found nvJitLink 12.9 and NVRTC 13.0"),
        (12000, None, (13, 0), "cuFFT links callbacks with nvJitLink: "),
    ],
)
def test_which_versions_take_callbacks(version, linker, compiler, words, executor, monkeypatch):
    monkeypatch.setattr(executor.library, "_GetVersion", lambda at: setattr(at._obj, "value", version))

    def linked():
        if linker is None:
            raise LibraryNotFound("nvJitLink", "nvJitLinkVersion", text="no file")
        return linker

    monkeypatch.setattr(callbacks, "nvjitlink", SimpleNamespace(nvJitLinkVersion=linked))
    monkeypatch.setattr(callbacks, "nvrtc", SimpleNamespace(nvrtcVersion=lambda: compiler))
    callbacks.why_not.cache_clear()
    assert (words in callbacks.why_not()) if words else callbacks.why_not() == ""
    callbacks.why_not.cache_clear()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("return x * windw[i % n];", 'line 1, `return x * windw[i % n];`, does not compile: identifier "windw" is un'),
        ("Real y = x;\n\nreturn y * nowhere(x);", "line 3, `return y * nowhere(x);`, does not compile: identifier"),
        ("Real y = 2 * x;\nreturn y", 'line 2, `return y`, does not compile: expected a ";"'),
        ("return window;", "does not compile: return value type does not match the function type"),
        ("return Complex(x, x);", "does not compile: no suitable conversion function"),
        ("Real y = x;\ny * 2;", "line 2, `y * 2;`, does not compile: missing return statement at end of non-void"),
    ],
)
@pytest.mark.usefixtures("compiler")
def test_lines_that_do_not_compile_are_shown(code, words, executor, monkeypatch):
    from dispatch.libraries.nvrtc.compiled import compiled

    monkeypatch.setattr(callbacks, "compiled", compiled)
    dev = dp.device("host")
    load = Callback(code, lambda x: x, {"window": dev.zeros((8,), "f32"), "n": 8})
    with pytest.raises(
        BadRequest, match="CUDA C\\+\\+ that returns a number; it has const float\\* window, int n"
    ) as told:
        planned(executor, dev.zeros((3, 8), "f32"), kind="r2c", axes=1, load=load)
    assert words in str(told.value)
    assert told.value.operand == "load"
    assert not executor.library.plans
