"""The plans that call cuFFT, over a stand-in for it, with the kernels around its transforms: each case of each row.

Their plans of cuFFT are counted, shared, and bounded in bytes.
"""

import ctypes
import gc
import importlib.util
import shutil
import sys
import threading
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import Refused
from dispatch.execute import shared_memory
from dispatch.keys import C128, F16, F32, F64, HOST, I32, Arch
from dispatch.libraries.cufft import cosines, transforms
from dispatch.libraries.cufft.layouts import MAX_CALLS
from dispatch.libraries.cufft.moves import SOURCE, divider, options
from dispatch.libraries.nvrtc.compiled import compiled
from dispatch.ops.fft.cases import cases
from dispatch.ops.fft.roll import kernel_of
from dispatch.table.select import select


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stand_in = loaded(Path(__file__).parents[1] / "cufft_stand_in.py")
kernels_on_cpu = loaded(Path(__file__).with_name("kernels_on_cpu.py"))
ROWS = [row for op in ("dft", "dct", "dst") for row in dp.TABLE.of(op) if row.min_arch != HOST]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    return stand_in.Kernels(tmp_path_factory.mktemp("moves"), kernels_on_cpu.BEFORE)


@pytest.fixture
def executor(monkeypatch, kernels):
    return stand_in.executor_of(monkeypatch, kernels)


# The cosine and sine transforms have a kernel for each type: some seconds of g++ for each dtype.
QUICK = (("dct", F32), ("dst", C128), ("dct", I32), ("dst", F16))


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            id=row.name,
            marks=() if row.op == "dft" or (row.op, row.dtypes[0]) in QUICK else pytest.mark.exhaustive,
        )
        for row in ROWS
    ],
)
def test_a_plan_lays_its_operands_as_cufft_takes_them(row, executor, each):
    def look(case, rng):
        check = case.check(dp.device("host"), rng)
        request = check.request
        given = getattr(request, request.reads[0])
        plan = row.call(request, executor, row)
        for _ in range(2):  # the second over scratch memory that the first has left
            before = np.array(given)
            outputs = request.device.executor().outputs(request)
            plan.enqueue(request.arguments(outputs))
            check.verify(request.result(outputs))
            if request.out is None or request.out.ptr != given.ptr:
                np.testing.assert_array_equal(np.asarray(given), before)
            check.renew(request.result(outputs))

    each(cases(row), look)


def ran(executor, a, /, **choices):
    """The sizes of the plans that cuFFT executes for a transform, and how many of these there are."""
    request = dp.DftRequest(a, **choices)
    row = select(request, Arch(90))
    plan, outputs = row.call(request, executor, row), request.device.executor().outputs(request)
    plan.enqueue(request.arguments(outputs))
    return executor.library.executed, plan, request.result(outputs).numpy()


def test_what_an_advanced_layout_states_is_one_call_without_a_copy(executor, kernels):
    dev = dp.device("host")
    whole = dev.array(np.arange(4 * 6 * 10 * 3).reshape(4, 6, 10, 3).astype(np.complex64))
    before = len(kernels.numbers)
    for a, choices in (
        (whole, {"axes": 0}),
        (whole, {"axes": 3}),
        (whole, {"axes": (2, 3)}),
        (whole, {"axes": (1, 2, 3)}),
        (whole[..., 1], {"axes": (1, 2)}),
        (whole[:, ::2, 1:9:2, 0], {"axes": (0, 1, 2)}),
        (whole.transpose(3, 0, 1, 2), {"axes": (2, 3)}),
        (whole, {"axes": 0, "s": 3}),
    ):
        executed, plan, result = ran(executor, a, **choices)
        axes = choices["axes"] if isinstance(choices["axes"], tuple) else (choices["axes"],)
        s = None if "s" not in choices else (choices["s"],)
        np.testing.assert_allclose(result, np.fft.fftn(np.asarray(a), s, axes), rtol=1e-4, atol=1e-2)
        assert len({*executed}) == 1
        assert len(plan._steps) == 1
        executed.clear()
    assert len(kernels.numbers) == before


def test_dense_lines_side_by_side_are_plans_of_the_basic_layout(executor, monkeypatch):
    dev, lines = dp.device("host"), []
    make = executor.library._MakePlan1d
    monkeypatch.setattr(executor.library, "_MakePlan1d", lambda *given: lines.append(given[1::2]) or make(*given))
    real, spectra = dev.zeros((3, 2, 10), "f32"), dev.zeros((3, 2, 10), "c128")
    for a, choices, wanted in (
        (real, {"kind": "r2c", "axes": 2}, [(10, 6)]),
        (spectra, {"axes": 2}, [(10, 6)]),
        (spectra, {"kind": "c2r", "axes": 2, "s": 13}, [(13, 6)]),
        (spectra[0, 0, ::2], {"axes": 0}, []),  # a gap
        (real[..., :8], {"kind": "r2c", "axes": 2}, []),
        (spectra, {"axes": (1, 2)}, []),
        (spectra, {"axes": 1}, []),
    ):
        lines.clear()
        ran(executor, a, **choices)
        assert lines == wanted, choices


def test_a_batch_that_no_plan_states_is_some_calls_or_a_copy(executor):
    dev = dp.device("host")
    executed, plan, _ = ran(executor, dev.zeros((MAX_CALLS, 8, 40), "c64"), axes=1)
    assert executed == [(8,)] * MAX_CALLS
    assert len(plan._steps) == 1
    executed.clear()
    executed, plan, _ = ran(executor, dev.zeros((MAX_CALLS + 1, 8, 40), "c64"), axes=1)
    assert executed == [(8,)]
    assert len(plan._steps) == 3  # a copy, the transform, and back


def test_a_factor_is_a_pass_of_its_own_only_where_there_is_no_other(executor):
    dev = dp.device("host")
    for a, choices, passes in (
        (dev.zeros((3, 8), "c64"), {"inverse": True}, 2),
        (dev.zeros((3, 8), "c64"), {"inverse": True, "norm": "forward"}, 1),
        (dev.zeros((3, 8), "c64"), {"s": (3, 9), "inverse": True}, 2),
        (dev.zeros((3, 8), "f32"), {"norm": "ortho"}, 2),
        (dev.zeros((3, 8), "f32"), {"kind": "r2c"}, 1),
        (dev.zeros((3, 8), "f16"), {"kind": "r2c", "norm": "ortho"}, 2),
        (dev.zeros((3, 5), "c64"), {"kind": "c2r", "inverse": True}, 2),
    ):
        _, plan, _ = ran(executor, a, axes=(0, 1), **choices)
        assert len(plan._steps) == passes, (a, choices)


def test_memory_beyond_the_workspace_is_shared_and_there_while_a_plan_is(executor):
    dev = dp.device("host")
    _, one, _ = ran(executor, dev.zeros((5, 700), "c64"), axes=1, s=(800,), norm="ortho", kind="c2c")
    first = dev.zeros((30, 200, 40), "c64")
    _, one, _ = ran(executor, first, axes=1)
    _, other, _ = ran(executor, first, axes=1, inverse=True)
    assert one._memory is other._memory is not None
    _, small, _ = ran(executor, dev.zeros((17, 4, 18), "c64"), axes=1)
    assert small._memory is None
    assert small._scratch == executor.workspace.base
    del one, other
    assert not executor.handles[shared_memory.NAME]


def test_a_plan_of_cufft_is_given_back_and_taken_again(executor):
    dev = dp.device("host")
    library, idle = executor.library, executor.device.idle["cufft"]
    _, plan, _ = ran(executor, dev.zeros((3, 8), "c64"), axes=1)
    assert (len(library.plans), len(idle)) == (1, 0)
    held = executor.handles["cufft"].nbytes
    assert held > 0
    del plan
    assert (len(library.plans), len(idle)) == (1, 1)
    assert executor.handles["cufft"].nbytes == 0
    _, plan, _ = ran(executor, dev.zeros((3, 8), "c64"), axes=1, inverse=True)  # the direction is the call's
    assert (len(library.plans), len(idle)) == (1, 0)
    _, other, _ = ran(executor, dev.zeros((3, 8), "c64"), axes=1)
    assert len(library.plans) == 2
    assert [entry.stream for entry in library.plans.values()] == [7, 7]
    del plan, other


def test_plans_of_cufft_are_bounded_in_bytes(executor, monkeypatch):
    dev = dp.device("host")
    monkeypatch.setattr(transforms, "LIMIT", 10 << 20)
    for n in range(2, 40):
        ran(executor, dev.zeros((n,), "c64"))
    library = executor.library
    assert not executor.forgotten
    assert len(library.plans) == 10  # nine are within the limit, and the last was given back since
    assert library.destroyed == sorted(library.destroyed)  # the oldest first
    kept = [ran(executor, dev.zeros((n,), "c64"))[1] for n in range(2, 12)]
    assert executor.forgotten == [True]  # its plans would be more than the limit
    assert len(kept) == 10
    kept.clear()
    kept += [ran(executor, dev.zeros((n,), "c64"))[1] for n in range(2, 12)]
    assert executor.forgotten == [True] * 2  # those that were in use then are gone: the limit is what it was


def test_a_problem_that_cufft_refuses_is_a_row_s_refusal(executor):
    executor.library.refused.add((8,))
    with pytest.raises(Refused, match=r"cuFFT has no plan for sizes \[8\]"):
        ran(executor, dp.device("host").zeros((8,), "c64"))
    assert not executor.library.plans


def test_numbers_of_31_bits_are_divided_by_a_product(rng):
    most = 2**31 - 1
    for extent in (1, 2, 3, 7, 257, 1024, 46341, 2**30 + 1, most, *map(int, rng.integers(1, most, 300))):
        magic, shift = divider(extent)
        assert magic < 2**32
        for n in (0, 1, extent - 1, extent, most, most - most % extent - 1, *map(int, rng.integers(0, most, 20))):
            assert magic * n >> shift == n // extent, (n, extent)


def test_the_kernels_compile_for_a_gpu():
    assert len(kernel_of(dp.RollRequest(dp.device("host").zeros((4,), "c128"), 1)).cubin("sm_75")) > 1000
    for source, target in (
        (F32, F32),
        (F16, dp.Dtype.of("c64")),
        (I32, C128),
        (F64, C128),
    ):
        for wide in (False, True):
            code = compiled(SOURCE, "move", ("-arch=sm_75", *options(source, target, wide=wide)))
            assert len(code) > 1000
    code = compiled(SOURCE, "move", ("-arch=sm_75", *options(F32, C128, C128, wide=False)))
    assert len(code) > 1000
    for kind in (1, 2, 3, 4):
        lines = cosines.Lines(kind, kind % 2 == 0, 8, 0, (), True, 1.0)
        code = compiled(cosines.SOURCE, "fold", ("-arch=sm_75", *cosines.options(lines, F16, F32, wide=False)))
        assert len(code) > 1000


def test_the_kernel_of_rolls_moves_every_element_to_its_place(kernels, each):
    """Compiled by g++ as those around transforms are, for elements of each size."""
    for row in dp.TABLE.of("roll"):
        if row.min_arch != HOST:
            each(cases(row), lambda case, numbers: rolled(case.check(dp.device("host"), numbers), kernels))


def rolled(check, kernels):
    request = check.request
    kernel = kernel_of(request)
    launch = kernel.launch(request)
    number = kernels.loaded(kernel.source, "roll", kernel.options, None) - 1
    if launch.grid[0]:
        kernels.numbers[number](launch.grid[0], *addresses(request), None, ctypes.byref(*launch.values))
    check.verify(request.out)


def addresses(request):
    return ctypes.c_void_p(request.x.ptr), ctypes.c_void_p(request.out.ptr)


def test_threads_take_idle_plans_while_others_give_theirs_back():
    """Also where the garbage collector runs code of others, and other threads go on, in the middle of a look."""
    idle = deque((SimpleNamespace(problem=n, routines=()), None) for n in range(200))
    wrong, interval, threshold = [], sys.getswitchinterval(), gc.get_threshold()

    def use():
        try:
            for turn in range(500):
                kept = transforms.take_idle(idle, -turn if turn % 2 else 199)
                if kept is not None:
                    idle.append((kept, None))
                idle.append((SimpleNamespace(problem=200, routines=()), None))
                transforms.take_idle(idle, 200)
        except RuntimeError as error:
            wrong.append(error)

    def collected(*_):
        sum(n * n for n in range(30))

    gc.callbacks.append(collected)
    try:
        gc.set_threshold(1)
        sys.setswitchinterval(1e-6)
        threads = [threading.Thread(target=use) for _ in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        gc.callbacks.remove(collected)
        gc.set_threshold(*threshold)
        sys.setswitchinterval(interval)
    assert not wrong
    assert sorted(each[0].problem for each in idle if each[0].problem != 200) == list(range(200))


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize(
    ("extents", "pitch"), [((6, 5), 6), ((6, 14), 16), ((3, 4, 7), 8), ((6, 5), 5), ((6, 5), 7), ((6, 6), 7)]
)
def test_gaps_between_lines_of_a_result_are_left_alone(extents, pitch, axes, executor, rng):
    """Lines with room for half a spectrum would be worked in; the gaps may be another tensor's."""
    dev, axes = dp.device("host"), tuple(range(-axes, 0))
    lengths = [extents[axis] for axis in axes]
    spectrum = np.fft.rfftn(rng.standard_normal(extents), axes=axes).astype(np.complex64)
    memory = dev.array(np.full((*extents[:-1], pitch), 7, np.float32))
    out = memory[..., : extents[-1]]
    _, _, found = ran(executor, dev.array(spectrum), kind="c2r", s=lengths, axes=axes, inverse=True, out=out)
    np.testing.assert_allclose(found, np.fft.irfftn(spectrum, lengths, axes), rtol=1e-4, atol=1e-4)
    assert (memory.numpy()[..., extents[-1] :] == 7).all()
