"""Lists of products by cuBLAS's grouped gemm, without a GPU: a stand-in computes from the call's arguments alone."""

import ctypes
import inspect
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from cudabind import nvrtc
from cudabind.errors import LibraryNotFound
from cudabind.sys import cublas as real
from dispatch.errors import BadRequest, NoRow, Refused
from dispatch.keys import BF16, F16, F32, F64, HOST, Arch
from dispatch.libraries.cublas import pointers
from dispatch.libraries.cutlass import evt
from dispatch.ops.grouped_matmul import GroupedMatmulListRequest, cublas, grouped_matmul
from dispatch.ops.grouped_matmul.cases import cases
from dispatch.table.select import select

ROWS = [row for row in dp.TABLE.of("grouped_matmul") if row.library == "cublas"]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]
DTYPES = {dtype.cuda: dtype.numpy for dtype in (F16, BF16, F32, F64)}
NOT_SUPPORTED = 15


def numbers(address, kind, count):
    return np.frombuffer((kind * count).from_address(address.value), kind).tolist()


def matrix(address, rows, columns, ld, dtype):
    """A column-major matrix at an address."""
    assert ld >= rows
    assert address
    size = np.dtype(dtype).itemsize
    raw = (ctypes.c_char * ((ld * (columns - 1) + rows) * size)).from_address(address)
    return np.lib.stride_tricks.as_strided(np.frombuffer(raw, dtype), (rows, columns), (size, ld * size))


class Library:
    """What `cudabind.sys.cublas` is to these plans; `groups` are the sizes of each call's groups."""

    def __init__(self):
        self.groups, self.status, self.on_device = [], 0, []

    def __getattr__(self, name):
        if name != "cublasGemmGroupedBatchedEx":
            return getattr(real, name)
        said = SimpleNamespace(__name__=name, unchecked=self.call)
        said.error = lambda status: RuntimeError(f"status {status}")
        return said

    def follow(self, _, *, on_device=False):
        assert not on_device, "numbers of grouped products are read on the host"
        return "handle"

    def call(self, *arguments):
        declared = inspect.signature(real.cublasGemmGroupedBatchedEx).parameters.values()
        for parameter, argument in zip(declared, arguments, strict=True):
            if parameter.name == "handle":
                assert argument == "handle"
            elif parameter.annotation == "int32_t":
                assert type(argument) is int
            elif "Mem[" in parameter.annotation or "void_p" in parameter.annotation:
                assert isinstance(argument, ctypes.c_void_p), parameter
                assert argument.value
            else:
                assert type(argument).__name__ in (parameter.annotation, parameter.annotation.removesuffix("_t"))
        if not self.status:
            self.product(*arguments[1:])
        return self.status

    def product(self, *given):
        turn_a, turn_b, m, n, k, alpha, at_a, a, ld_a, at_b, b, ld_b, beta, at_c, c, ld_c, count, sizes, compute = given
        whole = [numbers(one, ctypes.c_int32, count) for one in (turn_a, turn_b, m, n, k, ld_a, ld_b, ld_c)]
        sizes = numbers(sizes, ctypes.c_int32, count)
        kind = {68: ctypes.c_float, 70: ctypes.c_double, 77: ctypes.c_float}[int(compute)]
        assert numbers(beta, kind, count) == [0] * count
        self.groups.append(sizes)
        lists = iter(zip(*(numbers(one, ctypes.c_int64, sum(sizes)) for one in (at_a, at_b, at_c)), strict=True))
        types = [DTYPES[int(one)] for one in (a, b, c)]
        for size, factor, group in zip(sizes, numbers(alpha, kind, count), zip(*whole, strict=True), strict=True):
            for _ in range(size):
                self.one(factor, next(lists), group, types, np.float64 if kind is ctypes.c_double else np.float32)

    def one(self, alpha, addresses, group, types, work):
        turn_a, turn_b, m, n, k, ld_a, ld_b, ld_c = group
        at_a, at_b, at_c = addresses
        if not at_c:
            return  # no more than asked for a kernel
        assert {turn_a, turn_b} <= {0, 1}
        one = matrix(at_a, *((k, m) if turn_a else (m, k)), ld_a, types[0]).astype(work)
        other = matrix(at_b, *((n, k) if turn_b else (k, n)), ld_b, types[1]).astype(work)
        found = work(alpha) * ((one.T if turn_a else one) @ (other.T if turn_b else other))
        matrix(at_c, m, n, ld_c, types[2])[...] = found.astype(types[2])


class PointerArrays:
    """Lists of addresses in memory of the host."""

    def __init__(self, executor, count, lists):
        self.arrays = [np.zeros(count, np.int64) for _ in range(lists)]
        self.addresses = tuple(ctypes.c_void_p(array.ctypes.data) for array in self.arrays)

    def enqueue(self, given):
        for array, words in zip(self.arrays, zip(*given, strict=True), strict=True):
            array[...] = words


@pytest.fixture
def executor(monkeypatch):
    library = Library()
    monkeypatch.setattr(cublas, "cublas", library)
    monkeypatch.setattr(cublas, "handle_of", lambda _: library)
    monkeypatch.setattr(cublas, "PointerArrays", PointerArrays)
    monkeypatch.setattr(cublas, "kernels", lambda _, call: call())
    return SimpleNamespace(library=library, stream=SimpleNamespace(done=lambda: None))


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_plan_says_each_product_as_cublas_takes_it(row, case, executor, dev, rng):
    check = case.check(dev, rng)
    assert not any(rule(check.request) for rule in row.rules)
    plan = row.call(check.request, executor, row)
    for _ in range(2):
        check.renew()
        plan.enqueue(check.request.arguments({}))
        check.verify(check.request.out)
    again = case.check(dev, rng)  # at other addresses
    plan.enqueue(again.request.arguments({}))
    again.verify(again.request.out)


def test_products_alike_are_one_group_and_alpha_may_change(executor, dev, rng):
    row = next(row for row in ROWS if row.dtypes[0] is F64)
    shapes = [(3, 4, 5), (2, 6, 4), (3, 4, 5), (3, 4, 5)]
    a = [dev.array(rng.standard_normal((m, k))) for m, _, k in shapes]
    b = [dev.array(rng.standard_normal((k, n))) for _, n, k in shapes]
    request = GroupedMatmulListRequest(a, b)
    plan = row.call(request, executor, row)
    for alpha in (1.0, 0.1):
        outputs = dev.executor().outputs(request)
        plan.enqueue((*request.arguments(outputs)[:-1], alpha))
        for found, x, y in zip(request.result(outputs), a, b, strict=True):
            np.testing.assert_allclose(found.numpy(), alpha * (x.numpy() @ y.numpy()), rtol=1e-14, atol=1e-14)
    assert executor.library.groups[-1] == [3, 1]


def test_what_the_library_has_no_kernel_for_is_refused_in_its_words(executor, dev):
    executor.library.status = NOT_SUPPORTED
    one = [dev.zeros((4, 4))]
    with pytest.raises(Refused, match="cublasGemmGroupedBatchedEx returned status 15"):
        ROWS[-2].call(GroupedMatmulListRequest(one, one), executor, ROWS[-2])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"alpha": "tensor"}, "needs alpha as a number, has a tensor"),
        ({"epilogue": evt.relu(evt.accumulator())}, "needs an epilogue of alpha · acc"),
    ],
    ids=["alpha", "epilogue"],
)
def test_what_cublas_does_not_take_of_lists_is_refused(options, reason, dev):
    one = [dev.zeros((4, 4))]
    options = {name: dev.array([2.0], "f32") if value == "tensor" else value for name, value in options.items()}
    with pytest.raises(NoRow, match=reason):
        grouped_matmul(one, one, **options)


def test_groups_whose_ends_lie_on_the_device_are_refused(dev):
    a, b, ends = dev.zeros((4, 8), "f16"), dev.zeros((2, 8, 8), "f16"), dev.array([1, 4], "i32")
    with pytest.raises(NoRow, match="needs lists of operands, whose extents are known on the host"):
        grouped_matmul(a, b, ends, library="cublas")


def test_lists_of_f32_and_f64_go_to_cublas_and_those_of_16_bits_to_cutlass_first(dev):
    for dtype, library in (("f32", "cublas"), ("f64", "cublas"), ("bf16", "cutlass")):
        one = [dev.zeros((8, 8), dtype)]
        assert select(GroupedMatmulListRequest(one, one), Arch(90)).library == library
        assert select(GroupedMatmulListRequest(one, one, library="cublas"), Arch(90)).library == "cublas"
        assert select(GroupedMatmulListRequest(one, one, library="cublas"), HOST).library == "numpy-cublas"
    assert select(GroupedMatmulListRequest(one, one), Arch(80)).library == "cublas"


def test_f64_is_not_rounded_to_f32_on_the_host(dev, rng):
    a, b = rng.standard_normal((5, 7)), rng.standard_normal((7, 3))
    (found,) = grouped_matmul([dev.array(a)], [dev.array(b)], alpha=0.1)
    np.testing.assert_allclose(found.numpy(), 0.1 * (a @ b), rtol=1e-14)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_kernel_that_puts_addresses_compiles(arch):
    try:
        code = nvrtc.compile(pointers.ARRAYS_SOURCE, "put.cu", (f"-arch={arch}", "-std=c++17")).code
    except LibraryNotFound:
        pytest.skip("NVRTC is not installed")
    assert code


def test_addresses_are_put_a_launch_full_at_a_time(monkeypatch, rng):
    memory = np.full(3 * 1002, -1, np.int64)
    launched = []

    def launch(function, *extents_and_given):
        *_, given, extra = extents_and_given
        words, target, count = (ctypes.c_void_p * 3).from_address(given)
        count = ctypes.c_longlong.from_address(count).value
        target = ctypes.c_void_p.from_address(target).value
        assert memory.ctypes.data <= target <= memory.ctypes.data + memory.nbytes - 8 * count
        ctypes.memmove(target, words, 8 * count)
        launched.append((function, count, extra))

    monkeypatch.setattr(pointers, "loaded", lambda *_: "put")
    monkeypatch.setattr(pointers, "driver", SimpleNamespace(cuLaunchKernel=launch))
    made = SimpleNamespace(ptr=memory.ctypes.data)
    executor = SimpleNamespace(device=None, target=ctypes.c_void_p(), empty=lambda *_: made)
    given = rng.integers(1, 2**60, (1001, 3))
    lists = pointers.PointerArrays(executor, 1001, 3)
    assert [(one.value - made.ptr) % 16 for one in lists.addresses] == [0, 0, 0]
    lists.enqueue(given.tolist())
    np.testing.assert_array_equal(memory.reshape(3, 1002)[:, :1001].T, given)
    assert (memory.reshape(3, 1002)[:, 1001] == -1).all()
    assert launched == [("put", 480, 0), ("put", 480, 0), ("put", 41, 0)] * 3


def test_tf32_of_lists_is_asked_for_by_name():
    """On the host, too, operands are rounded to its ten bits."""
    dev = dp.device("host")
    a, b = [dev.array([[1 + 2.0**-11]], "f32")], [dev.array([[1.0]], "f32")]
    for name in ("tf32", "fast_tf32", dp.Compute.COMPUTE_32F_FAST_TF32):
        assert grouped_matmul(a, b, compute=name)[0].item() == 1
    assert grouped_matmul(a, b)[0].item() == 1 + 2.0**-11
    assert grouped_matmul(a, b, compute="32f")[0].item() == 1 + 2.0**-11
    with pytest.raises(NoRow, match="compute"):
        grouped_matmul([dev.array([[1.0]], "f64")], [dev.array([[1.0]], "f64")], compute="tf32")
    with pytest.raises(BadRequest, match="compute: got 'f31'"):
        grouped_matmul(a, b, compute="f31")
