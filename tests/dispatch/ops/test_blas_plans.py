"""Plans of cuBLAS's calls on the host: a stand-in for the library gets addresses, numbers and flags as it would."""

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import NoRow
from dispatch.keys import C64, C128, F32, F64, HOST, Arch
from dispatch.libraries.cublas import calls
from dispatch.ops.blas import cublas1, cublas2, cublas3
from dispatch.ops.blas.cases import cases
from dispatch.table.cublas import GPU_ROWS, LEVEL1, LEVEL3
from dispatch.table.select import select

sys.path.insert(0, str(Path(__file__).parent))
import column_major

sys.path.remove(str(Path(__file__).parent))

# No copies: the driver refuses the addresses that a call is captured at to be relocated.
DRIVER = {"cuMemsetD8Async": lambda to, value, count, _: ctypes.memset(to, value, count)}
NUMBERS = {}  # by their addresses
TYPES = {"S": F32, "D": F64, "C": C64, "Z": C128}


class HostScalar(calls.HostScalar):
    """A number whose value is found by its address, as cuBLAS would read it."""

    def __init__(self, dtype):
        super().__init__(dtype)
        NUMBERS[self.address.value] = np.frombuffer(self._memory, dtype.numpy)


class Pointers:
    def __init__(self, _, place, offsets):
        self.place, self.offsets, self.address = place, offsets, []

    def enqueue(self, arguments):
        self.address[:] = [arguments[self.place] + offset for offset in self.offsets]


class KernelCopy:
    def __init__(self, _, source, target, batch, keep, *, conj):
        assert keep is calls.CopyMode.ALL
        assert not conj
        self.given = source, target, batch

    def enqueue(self, arguments):
        column_major.move(*self.given, arguments)


class Library:
    """What `cudabind.sys.cublas` is to plans; `dtype` is that of requests whose routines are told theirs."""

    dtype = None

    def __getattr__(self, name):
        plain = name.removeprefix("cublas").removesuffix("_v2")
        if plain in column_major.ROUTINES:  # it is told its dtypes
            return self.called(name, None, column_major.ROUTINES[plain])
        if plain[0] == "I":
            plain = f"{plain[1].upper()}i{plain[2:]}"
        plain = plain.replace("Sc", "C", 1).replace("Dz", "Z", 1) if plain[2:] in ("asum", "nrm2") else plain
        return self.called(name, TYPES[plain[0]], column_major.ROUTINES[plain[1:]])

    def called(self, name, dtype, routine):
        def unchecked(handle, *arguments):
            assert handle == "handle"
            given = [one.value if isinstance(one, ctypes.c_void_p) else one for one in arguments]
            routine(
                dtype or self.dtype, *(NUMBERS[one][0] if type(one) is int and one in NUMBERS else one for one in given)
            )
            return 0

        return SimpleNamespace(unchecked=unchecked, __name__=name)


def empty(shape, _, dtype):
    """Memory of a plan's own, which holds NaN."""
    held = np.full(shape, 0xFF, dtype.numpy)
    return SimpleNamespace(ptr=held.ctypes.data, held=held)


@pytest.fixture
def executor(monkeypatch):
    """One whose plans call the stand-in."""
    monkeypatch.setattr(calls, "cublas", Library())
    monkeypatch.setattr(calls, "HostScalar", HostScalar)
    monkeypatch.setattr(calls, "PointerArray", Pointers)
    monkeypatch.setattr(calls, "KernelCopy", KernelCopy)
    handle = SimpleNamespace(follow=lambda _, **__: "handle")
    monkeypatch.setattr(calls, "handle_of", lambda _: handle)
    monkeypatch.setattr(calls, "driver", SimpleNamespace(**DRIVER))
    yield SimpleNamespace(target=ctypes.c_void_p(), stream=None, empty=empty)
    NUMBERS.clear()


@pytest.mark.parametrize("row", GPU_ROWS, ids=lambda row: row.name)
def test_a_plan_calls_cublas_with_what_the_request_says(row, executor, rng):
    """Twice, at other addresses and with other numbers."""
    assert row.min_arch != HOST
    host, some = dp.device("host"), cases(row)
    calls.cublas.dtype = row.dtypes[0]
    plan_of = cublas3.cublas_level3 if row.op in LEVEL3 else cublas2.cublas_level2
    plan_of = cublas1.cublas_level1 if row.op in LEVEL1 else plan_of
    for number in sorted({0, 5 % len(some), len(some) // 2, len(some) - 1}):
        plan = None
        for _ in range(2):
            check = some[number].check(host, rng)
            outputs = host.executor().outputs(check.request)
            plan = plan or plan_of(check.request, executor, row)
            plan.enqueue(check.request.arguments(outputs))
            check.verify(check.request.result(outputs))


def laid(values, order):
    dev = dp.device("host")
    return dev.array(values.mT.copy()).mT if order == "columns" else dev.array(values)


@pytest.mark.parametrize("dtype", ["f64", "c128"])
@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("n", "right"), [(256, 1), (256, 3), (256, 257), (255, 3)])
def test_triangles_are_solved_from_the_left_where_that_is_faster(n, right, side, order, dtype, executor, rng):
    """Results left open lie so; others are made in scratch memory where they have few lines."""
    a = np.tril(rng.standard_normal((n, n))) / n + np.eye(n)
    b = rng.standard_normal((n, right) if side == "left" else (right, n))
    a, b = (values + 1j * values[::-1, ::-1].copy() * (values is b) if dtype == "c128" else values for values in (a, b))
    if dtype == "c128":
        a = a * np.exp(1j * rng.standard_normal((n, n)))
    for out, trans in ((None, "n"), (None, "c"), ("rows", "n"), ("columns", "n"), ("rows", "c"), ("columns", "c")):
        given = None if out is None else laid(np.full_like(b, np.nan), out)
        request = dp.TrsmRequest(laid(a, order), laid(b, "rows"), side=side, trans=trans, out=given)
        if dtype == "c128" and trans == "c" and right > 1 and out not in (None, order):
            with pytest.raises(NoRow, match="needs a in the order of out"):
                select(request, Arch(90))
            continue
        row, tasks = select(request, Arch(90)), cublas3.lower(request)
        (routine,) = (work for work in tasks if isinstance(work, calls.Routine))
        best = "columns" if side == "left" else "rows"
        may = dtype == "f64" or trans == "n" or order == best
        in_scratch = out not in (None, best) and may and 1 < right <= n >= 256
        is_left = may and (out in (None, best) or in_scratch or right == 1)
        assert routine.arguments[0] == (0 if is_left else 1)
        assert [type(work) for work in tasks].count(calls.MatrixCopy) == 1 + in_scratch
        outputs = dp.device("host").executor().outputs(request)
        cublas3.cublas_level3(request, executor, row).enqueue(request.arguments(outputs))
        x, op = request.result(outputs).numpy(), a if trans == "n" else a.conj().T
        np.testing.assert_allclose(op @ x if side == "left" else x @ op, b, rtol=1e-9, atol=1e-9)


def test_nothing_is_called_for_a_result_without_elements(executor):
    empty = dp.device("host").zeros((0, 4))
    plan = cublas3.cublas_level3(dp.TrsmRequest(dp.device("host").zeros((0, 0)), empty), executor, GPU_ROWS[0])
    assert plan.is_bare
    plan.enqueue((0, 0, 0, 1.0))


def test_a_function_has_64_bits_where_sizes_ask_for_them():
    assert calls.function_name("symm", F32) == "cublasSsymm_v2"
    assert calls.function_name("symm", C128, [2**31]) == "cublasZsymm_v2_64"
    assert calls.function_name("trsmBatched", F64, [2**31 - 1, 5]) == "cublasDtrsmBatched"


@pytest.mark.parametrize("trans", ["n", "t"])
@pytest.mark.parametrize("strides", [((34, 1), (1, 4)), ((1, 4), (34, 1)), ((1, 1), (1, 1)), ((34, 1), (34, 1))])
def test_lines_of_matrices_without_elements_fit_between_their_beginnings(strides, trans, executor):
    """cuBLAS checks it, although it reads nothing; the result is 0."""
    dev, shape = dp.device("host"), (0, 32) if trans == "t" else (32, 0)
    a, b = (dev.zeros((0,), "c64").strided(shape, steps if trans == "t" else steps[::-1]) for steps in strides)
    request = dp.SyrkxRequest(a, b, trans=trans, alpha=3.0, out=dev.array(np.full((32, 32), 5j), "c64"))
    row = select(request, Arch(90))
    cublas3.cublas_level3(request, executor, row).enqueue(request.arguments({}))
    assert not request.out.numpy().any()
