"""The kernels for small matrices: compiled for the CPU and run through their rows' cases; mutants; the rows."""

import ctypes
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from cudabind.errors import LibraryNotFound
from dispatch.keys import C64, C128, F32, F64, HOST, Arch
from dispatch.libraries.cusolver.copies import Strides
from dispatch.libraries.nvrtc import kernel as launching
from dispatch.libraries.nvrtc.compiled import compiled
from dispatch.libraries.nvrtc.small_kernels import COLUMNS, SOURCES, WIDTHS, Variant
from dispatch.ops.linalg import own_small
from dispatch.ops.linalg.cases import cases, check
from dispatch.ops.linalg.forms import F, chosen
from dispatch.table.own_linalg import GPU_ROWS, HOST_ROWS
from dispatch.table.select import candidates, select
from dispatch.testing.memory import Mismatch

spec = importlib.util.spec_from_file_location("blocks_on_cpu", Path(__file__).with_name("blocks_on_cpu.py"))
blocks_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(blocks_on_cpu)

H100 = Arch(90)
DTYPES = (F32, F64, C64, C128)
rows = pytest.mark.parametrize("row", GPU_ROWS, ids=lambda row: row.name)


@pytest.fixture
def dev():
    pytest.importorskip("scipy")
    return dp.device("host")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return blocks_on_cpu.InBlocks(tmp_path_factory.mktemp("small"))


KINDS = {"Strides": Strides, "int": ctypes.c_int, "Int": ctypes.c_int64}


class Launches:
    """What stands for the driver: kernels that are launched run on the CPU, with what they are handed."""

    def __init__(self, on_cpu):
        self.on_cpu, self.kernels, self.launched, self.shared = on_cpu, [], [], {}
        self.cuLaunchKernel = SimpleNamespace(unchecked=self.launch)
        self.change = lambda source: source

    def load(self, source, function, options, _):
        self.kernels.append((source, function, options))
        return len(self.kernels)

    def cuFuncSetAttribute(self, function, _, value):
        self.shared[function] = value

    def launch(self, function, *rest):
        blocks, _, _, threads, _, _, shared, _, pointers, _ = rest
        source, name, options = self.kernels[function.value - 1]
        assert shared <= self.shared.get(function.value, 48 << 10)
        source = self.change(source)
        declared = re.search(rf"\n{name}\((.*?)\)\n", source, re.DOTALL)[1].replace("\n", " ").split(",")
        parameters = tuple(" ".join(one.split()) for one in declared)
        kinds = [KINDS.get(one.split()[0], ctypes.c_void_p) for one in parameters]
        kinds = [ctypes.c_void_p if "*" in one else kind for one, kind in zip(parameters, kinds, strict=True)]
        given = [kind.from_address(at) for kind, at in zip(kinds, pointers, strict=True)]
        self.on_cpu.launched(source, name, options, parameters, (blocks, threads), given)
        self.launched.append((name, blocks, threads))
        return 0


@pytest.fixture
def driver(on_cpu, monkeypatch):
    made = Launches(on_cpu)
    made.CUfunction_attribute = launching.driver.CUfunction_attribute
    monkeypatch.setattr(launching, "driver", made)
    monkeypatch.setattr(launching, "loaded", made.load)
    return made


@pytest.fixture
def executor(driver):
    return SimpleNamespace(device=None, target=ctypes.c_void_p(), stream=None, driver=driver)


def run(request, executor, row=GPU_ROWS[0]):
    """What the kernel gives for a request over the host's memory."""
    outputs = request.device.executor().outputs(request)
    row.call(request, executor, row).enqueue(request.arguments(outputs))
    return request.result(outputs)


# -- rows -------------------------------------------------------------------------------------------------------------
@rows
def test_a_plan_run_on_the_cpu_passes_the_cases_in_one_launch_each(row, dev, executor, each):
    def verify(case, rng):
        check = case.check(dev, rng)
        request = check.request
        if any(rule(request) for rule in row.rules):
            return
        plan, before = row.call(request, executor, row), len(executor.driver.launched)
        for _ in range(2):
            outputs = dev.executor().outputs(request)
            plan.enqueue(request.arguments(outputs))
            check.verify(request.result(outputs))
            check.renew(request.result(outputs))
        assert len(executor.driver.launched) == before + 2 * (0 not in request.batch)

    each(cases(row), verify)


# -- kernels ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", SOURCES)
def test_every_kernel_compiles(function, dtype, arch):
    for width in WIDTHS:
        variant = Variant(function, dtype, width)
        try:
            code = compiled(variant.source, function, (f"-arch={arch}", *variant.options))
        except LibraryNotFound as error:
            pytest.skip(str(error))
        assert len(code) > 1000


# Each is a slip that compiles; a case of some size finds it.
MUTANTS = {
    "cholesky": {
        "the root of another column": ("square = line[k]", "square = line[first]"),
        "no conjugate": ("factor, conjugate(pack.at[e])", "factor, pack.at[e]"),
        "a status too low": ("status = k + 1", "status = k"),
        "the next columns do not move up": ("a[j] = a[j + STEP]", "a[j] = a[j]"),
        "a column too many": ("if (j + e > s) subtract", "if (j + e >= s) subtract"),
        "what is above the diagonal stays": ("lane < first + s ? number(0)", "lane < 0 ? number(0)"),
        "all matrices are the first": ("a + number * from.batch", "a"),
    },
}
SLIPS = [(op, name) for op, slips in MUTANTS.items() for name in slips]


@pytest.mark.parametrize(("op", "name"), SLIPS)
def test_a_mutant_is_found(op, name, dev, executor, rng):
    before, after = MUTANTS[op][name]
    executor.driver.change = lambda source: source.replace(before, after)
    row = next(row for row in GPU_ROWS if row.op == op and row.dtypes[0] is C128)
    found = 0
    for case in cases(row):
        check = case.check(dev, rng)
        if not any(rule(check.request) for rule in row.rules) and check.request.matrices.size < 2000:
            assert before in own_small.kernel_of(check.request).source
            try:
                check.verify(run(check.request, executor, row))
            except Mismatch:
                found += 1
    assert found
