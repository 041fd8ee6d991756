"""Nothing beside an output is written where its lines end amid 16 bytes, by plans over kernels that store as TMA does.

The kernels here are Python that writes each line in whole 16 bytes to where a plan tells them to, as TMA was seen to do
on an H200: of 53 f16, 56. Outputs lie in poisoned memory, copies are made by memmove.
"""

import ctypes
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from cudabind import driver
from dispatch.keys import BF16, F32, Arch, Dtype
from dispatch.libraries.cutlass import evt, staged
from dispatch.libraries.cutlass.matrices import poisoned_matrix
from dispatch.libraries.cutlass.staged import Lines, Staged
from dispatch.ops.grouped_matmul import GroupedMatmulListRequest, GroupedMatmulRequest, plans
from dispatch.ops.grouped_matmul import cutlass as grouped
from dispatch.ops.matmul import cutlass as gemm
from dispatch.ops.matmul import sm100 as blackwell
from dispatch.ops.matmul.tree_cases import EXTENTS, Case
from dispatch.testing.memory import GuardedBuffer, poison

WRITTEN = 0x01  # each byte that a kernel writes
AMID = [name for name, (_, n, _) in EXTENTS.items() if n % 8] + ["one row"]
BATCH = 3


def stored(nbytes):
    """What TMA writes of so many bytes from a multiple of 16 on."""
    return -(-nbytes // 16) * 16


def write(address, pitch, lines, width):
    for line in range(lines):
        ctypes.memset(address + line * pitch, WRITTEN, stored(width))


def is_written(tensor):
    values = np.ascontiguousarray(np.asarray(tensor))
    return (values.view(np.uint8) == WRITTEN).all()


@pytest.fixture
def host():
    return dp.device("host")


@pytest.fixture
def copies(monkeypatch):
    """Copies as the driver makes them, by memmove; each that was asked for."""
    made = []

    def copy(asked, _stream):
        made.append(asked)
        assert min(asked.dstPitch, asked.srcPitch) >= asked.WidthInBytes
        assert max(asked.dstPitch, asked.srcPitch) <= 2**31 - 1
        assert min(asked.dstHeight, asked.srcHeight) >= asked.Height
        for slab in range(asked.Depth):
            for line in range(asked.Height):
                to = asked.dstDevice + (slab * asked.dstHeight + line) * asked.dstPitch
                of = asked.srcDevice + (slab * asked.srcHeight + line) * asked.srcPitch
                ctypes.memmove(to, of, asked.WidthInBytes)

    names = {"CUDA_MEMCPY3D": SimpleNamespace, "CUmemorytype": driver.CUmemorytype, "cuMemcpy3DAsync": copy}
    monkeypatch.setattr(staged, "driver", SimpleNamespace(**names))
    return made


@pytest.fixture
def executor(host):
    return SimpleNamespace(
        device=SimpleNamespace(arch=Arch(100), attribute=lambda _: 132),
        target=ctypes.c_void_p(0),
        empty=host.executor().empty,
    )


@pytest.fixture
def kernels(monkeypatch):
    """`kernels(write)` makes launches call `write(values)` with the words of the launch."""

    def install(act):
        class Launch:
            def __init__(self, *_):
                pass

            def enqueue(self, values, _stream):
                act(values)

        future = Future()
        future.set_result(b"")
        loaded = SimpleNamespace(function=lambda _: None)
        for room in (gemm, blackwell, grouped):
            monkeypatch.setattr(room, "Launch", Launch)
            monkeypatch.setattr(room, "module", lambda *_: loaded)
        monkeypatch.setattr(gemm.compiler, "request", lambda *_: future)

    return install


def tma(outputs, order):
    """A kernel that stores these matrices by tensor maps."""

    def act(values):
        m, n = values["m"], values["n"]
        lines, length = (m, n) if order == "row" else (n, m)
        for name, size in outputs.items():
            for batch in range(values["batches"]):
                begin = values[name] + batch * values[f"{name}.batch"] * size
                write(begin, values[f"{name}.pitch"] * size, lines, length * size)

    return act


def check(memories):
    assert [memory.disturbed() for memory in memories] == [0] * len(memories)
    assert all(is_written(memory.view) for memory in memories)


# -- products ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["f8e4m3", "f16", "bf16", "f32"])
@pytest.mark.parametrize("orders", ["rcrr", "rcrc"])
@pytest.mark.parametrize("batch", [(), (BATCH,)], ids=["one", "batch"])
@pytest.mark.parametrize("name", AMID)
def test_a_product_writes_its_output_and_nothing_beside_it(
    name, batch, orders, dtype, host, executor, kernels, copies, rng
):
    d = Dtype.of(dtype)
    case = Case(name, (BF16, BF16, BF16 if d.bits == 8 else d, d), EXTENTS[name], None, orders, batch)
    request, memories = case._request(host, rng)
    row = next(row for row in dp.TABLE.of("matmul") if row.function == "GemmUniversal")
    config = gemm.choose(*EXTENTS[name], BATCH, 132)
    order = gemm.spec_of(request.form, Arch(90), config).orders[3]
    kernels(tma({"out": d.itemsize}, order))
    plan = gemm.CutlassPlan(request, executor, row, config)
    for _ in range(2):
        memories[0].renew()
        plan.enqueue(request.arguments({}))
        check(memories)
    length = EXTENTS[name][1 if order == "row" else 0]
    assert bool(copies) == (length * d.itemsize % 16 != 0)  # where tensor maps end with the lines nothing is copied


def test_what_a_tree_stores_is_written_and_nothing_beside_it(host, executor, kernels, copies, rng):
    tree = evt.store(evt.store(evt.accumulator(), "wide", F32), "narrow", BF16)
    case = Case("tree", (BF16,) * 4, (37, 53, 29), None, tree=tree, has_out=True, batch=(BATCH,))
    request, memories = case._request(host, rng)
    row = next(row for row in dp.TABLE.of("matmul") if row.function == "GemmUniversal")
    kernels(tma({"out": 2, "wide": 4, "narrow": 2}, "row"))
    gemm.CutlassPlan(request, executor, row, gemm.choose(37, 53, 29, BATCH, 132)).enqueue(request.arguments({}))
    assert len(memories) == 3
    check(memories)
    assert len(copies) == 3


def test_what_is_made_for_a_call_has_room_behind_each_line_and_is_not_copied(host, executor, kernels, copies, rng):
    request, _ = Case("made", (BF16,) * 4, (37, 53, 29), None)._request(host, rng)
    request = replace(request, out=None)
    outputs = host.executor().outputs(request)
    made = outputs["out"]
    assert made.layout.strides == (56, 1)
    assert made.storage.nbytes == 37 * 56 * 2
    row = next(row for row in dp.TABLE.of("matmul") if row.function == "GemmUniversal")
    kernels(tma({"out": 2}, "row"))
    gemm.CutlassPlan(request, executor, row, gemm.choose(37, 53, 29, 1, 132)).enqueue(request.arguments(outputs))
    assert is_written(made)
    assert not copies


def test_blackwells_kernels_write_nothing_beside_an_output_either(host, executor, kernels, copies, rng):
    request, memories = Case("awkward", (BF16,) * 4, (37, 53, 29), None)._request(host, rng)
    row = next(row for row in dp.TABLE.of("matmul") if row.min_arch == Arch(100) and row.library == "cutlass")
    kernels(tma({"out": 2}, "row"))
    blackwell.BlackwellPlan(request, executor, row).enqueue(request.arguments({}))
    check(memories)
    assert copies


# -- groups --------------------------------------------------------------------------------------------------------
@pytest.fixture
def small(monkeypatch):
    """What the small kernels of groups were given last."""
    told = []
    monkeypatch.setattr(plans._Plan, "_launch_setup", lambda _, arguments: told.append(arguments))
    return told


@pytest.mark.parametrize("n", [1, 53, 56, 131])
def test_groups_write_their_rows_and_nothing_beside_or_behind_them(n, host, executor, kernels, copies, small, rng):
    ends = [3, 3, 10]
    memory = poisoned_matrix(host, (12, n), BF16, "r")
    memory.before[memory.inside] = 7
    memory.renew()
    a = host.array(rng.standard_normal((12, 16)), "bf16")
    b = host.array(rng.standard_normal((3, n, 16)), "bf16").mT
    request = GroupedMatmulRequest(a, b, host.array(ends, "i32"), out=memory.view)

    def act(_):
        words = [argument.value for argument in small[-1]]
        write(words[9], words[10] * 2, ends[-1], n * 2)

    kernels(act)
    row = dp.TABLE.of("grouped_matmul")[0]
    grouped.plan(request, executor, row).enqueue(request.arguments({}))
    assert memory.disturbed() == 0
    got = np.asarray(memory.view)
    assert is_written(got[:10])
    assert (got[10:] == 7).all()
    assert bool(copies) == (n % 8 != 0)


def test_products_of_any_extents_write_nothing_beside_their_outputs(host, executor, kernels, copies, small, rng):
    extents = ((37, 53, 16), (64, 64, 16), (1, 131, 32), (5, 1, 16))
    memories = [poisoned_matrix(host, (m, n), BF16, "r") for m, n, _ in extents]
    request = GroupedMatmulListRequest(
        tuple(host.array(rng.standard_normal((m, k)), "bf16") for m, _, k in extents),
        tuple(host.array(rng.standard_normal((n, k)), "bf16").mT for _, n, k in extents),
        out=tuple(memory.view for memory in memories),
    )

    def act(_):
        words = list(small[-1][0])
        for g, (m, n, _k) in enumerate(extents):
            _, _, _, _, _, d, _, _, step = words[9 * g : 9 * g + 9]
            write(d, step * 2, m, n * 2)

    kernels(act)
    row = dp.TABLE.of("grouped_matmul")[0]
    grouped.plan(request, executor, row).enqueue(request.arguments({}))
    check(memories)
    assert len(copies) == 3


# -- the copies ----------------------------------------------------------------------------------------------------
LAYOUTS = {
    # name: (shape of all memory, what of it is the output, how its axes are turned, copies)
    "rows": ((40, 64), (slice(1, 38), slice(8, 61)), None, 1),
    "columns": ((40, 64), (slice(1, 38), slice(8, 61)), (1, 0), 1),
    "matrices whole lines apart": ((4, 40, 64), (slice(0, 3), slice(1, 38), slice(8, 61)), None, 1),
    "matrices in lines of each other": ((40, 4, 64), (slice(1, 38), slice(0, 3), slice(0, 53)), (1, 0, 2), 3),
    "matrices of one line": ((9, 3, 64), (slice(1, 8), slice(1, 2), slice(0, 53)), None, 1),
    "a line": ((3, 64), (slice(1, 2), slice(8, 61)), None, 1),
    "an element": ((3, 64), (slice(1, 2), slice(8, 9)), None, 1),
}


@pytest.mark.parametrize("dtype", ["i8", "bf16", "f32"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_copies_reach_every_line_and_nothing_else(name, dtype, host, executor, copies):
    shape, inside, turned, count = LAYOUTS[name]
    before = poison(Dtype.of(dtype), shape)
    whole = host.array(before)
    memory = GuardedBuffer(whole[inside], whole, before, inside)
    tensor = memory.view if turned is None else memory.view.transpose(*turned)
    order = "column" if name == "columns" else "row"
    lines = Lines.of(tensor, order)
    made = Staged(executor, {"out": lines})
    own = lines.staged
    for batch in range(own.batches):
        write(made.addresses["out"] + batch * own.batch, own.pitch, own.lines, own.width)
    made.copy_out({"out": tensor.ptr}, 0)
    check([memory])
    assert len(copies) == count


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.usefixtures("copies")
def test_what_is_copied_in_comes_out_again(name, host, executor):
    shape, inside, turned, _ = LAYOUTS[name]
    values = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    whole = host.array(values)
    tensor = whole[inside] if turned is None else whole[inside].transpose(*turned)
    made = Staged(executor, {"out": Lines.of(tensor, "column" if name == "columns" else "row")})
    made.copy_in({"out": tensor.ptr}, 0)
    changed = values.copy()
    changed[inside] = -1
    whole.copy_from(changed)
    made.copy_out({"out": tensor.ptr}, 0)
    np.testing.assert_array_equal(whole.numpy(), values)


@pytest.mark.usefixtures("copies")
def test_lines_too_far_apart_for_one_copy_are_copied_one_by_one(host, executor):
    tensor = host.array(np.arange(12, dtype=np.float32).reshape(3, 4))
    lines = Lines.of(tensor[:, :3], "row")
    made = Staged(executor, {"out": lines})
    asked = []
    staged.driver.cuMemcpy3DAsync = lambda copy, _: asked.append((copy.dstDevice, copy.Height, copy.dstPitch))
    made._given["out"] = lines._replace(pitch=1 << 31)
    made.copy_out({"out": 0x1000}, 0)
    assert asked == [(0x1000 + line * (1 << 31), 1, 12) for line in range(3)]


def test_outputs_lie_apart_in_memory_of_the_plans_own(host, executor):
    tensors = {f"o{width}": host.zeros((5, width + 16), "bf16")[:, :width] for width in (3, 8, 13, 100)}
    made = Staged(executor, {name: Lines.of(tensor, "row") for name, tensor in tensors.items()})
    assert set(made.addresses) == {"o3", "o13", "o100"}  # 8 of bf16 are 16 bytes
    assert all((address - made._memory.ptr) % 256 == 0 for address in made.addresses.values())
    ends = [made.addresses[f"o{width}"] + 5 * stored(2 * width) for width in (3, 13, 100)]
    begins = [*list(made.addresses.values())[1:], made._memory.ptr + made._memory.nbytes]
    assert all(end <= begin for end, begin in zip(ends, begins, strict=True))
    assert made.words == {
        "o3.pitch": 8, "o3.batch": 0, "o13.pitch": 16, "o13.batch": 0, "o100.pitch": 104, "o100.batch": 0,
    }  # fmt: skip
