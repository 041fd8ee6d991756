"""Which networks of small tensors are one launch: rows, refusals, and what the program of one is."""

import itertools

import numpy as np
import pytest

import dispatch as dp
from dispatch.core.row import refusals
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import C64, F32, F64
from dispatch.ops.contraction import network, network_cost, network_rules
from dispatch.table.einsum import OWN_ROWS
from dispatch.table.select import select

GPU = dp.Arch(90)
F32_ROW = next(row for row in OWN_ROWS if row.dtypes[0] is F32)
CHAIN = "ab,bc,cd,de->ae"


def request_of(spec, *shapes, dtype="f32", **choices):
    dev = dp.device("host")
    return dp.EinsumRequest(spec, [dev.zeros(shape, dtype) for shape in shapes], **choices)


def why_not(request, row=F32_ROW):
    return "; ".join(map(str, refusals(row, request, request.signature())))


def test_a_network_of_small_tensors_is_one_launch():
    request = request_of(CHAIN, *[(6, 6)] * 4)
    assert select(request, GPU) == F32_ROW
    told = str(dp.explain(request, GPU))
    assert "einsum f32→f32 network sm_75 own" in told
    assert "calls own.contract_network" in told


def test_large_tensors_are_the_libraries():
    request = request_of(CHAIN, *[(80, 80)] * 4)
    assert select(request, GPU).library == "cublasLt"
    most = network_rules.CALL_US * 3
    assert f"needs tensors so small that one block takes at most {most:.3g} us, or library own" in why_not(request)


def test_a_single_pair_is_the_libraries():
    request = request_of("ab,bc->ac", (4, 4), (4, 4))
    assert select(request, GPU).library == "cublasLt"
    assert "needs 2 steps or more, or library own or autotune, has 1" in why_not(request)


@pytest.mark.parametrize("arch", [dp.Arch(0), GPU], ids=str)
def test_what_libraries_do_not_take_either_is_said_first(arch, rng):
    dev = dp.device("host")
    x = dev.array(rng.standard_normal((3, 3)))
    wide = x[:1].strided((3, 3), (0, 1))
    for given, words in (
        (
            x[::-1],
            r"needs strides of 0 or more, has operands\[0\] .*: copy it with dev\.array\(x\), or .*library='own'",
        ),
        (
            wide,
            r"operand with a nonzero stride along i, has none: copy one with dev\.array\(x\), or .*library='own'",
        ),
    ):
        with pytest.raises(NoRow, match=f"Nearest that works: .* {words}"):
            select(dp.EinsumRequest("ij,kj->ik", [given, x]), arch)
        own = dp.einsum("ij,kj->ik", given, x, library="own").numpy()
        np.testing.assert_allclose(own, given.numpy() @ x.numpy().T, atol=1e-14)
        np.testing.assert_allclose(dp.einsum("ij,kj->ik", dev.array(given), x).numpy(), own, atol=1e-14)
    assert "steps or more" not in why_not(dp.EinsumRequest("ij,kj->ik", [x[::-1], x]))


@pytest.mark.parametrize("choices", [{"library": "own"}, {"autotune": True}])
def test_whoever_asks_has_it_whatever_the_rule_takes_to_be_faster(choices):
    request = request_of("ab,bc->ac", (96, 96), (96, 96), **choices)
    assert not why_not(request)
    assert why_not(request_of("ab,bc->ac", (96, 96), (96, 96)))


def test_the_library_is_one_that_einsum_knows():
    request = request_of(CHAIN, *[(6, 6)] * 4, library="cublasLt")
    assert select(request, GPU).library == "cublasLt"
    assert "own" in why_not(request)
    with pytest.raises(BadRequest, match="own, cublasLt, cutensor"):
        select(request_of(CHAIN, *[(6, 6)] * 4, library="cublas"), GPU)


@pytest.mark.parametrize(
    ("dtype", "choices", "said"),
    [
        ("f32", {"compute": "tf32"}, "needs compute COMPUTE_32F for f32, has COMPUTE_32F_FAST_TF32"),
        ("f64", {"compute": "32f"}, "needs compute COMPUTE_64F for f64, has COMPUTE_32F"),
        ("c64", {"compute": "3xtf32"}, "needs compute COMPUTE_32F for c64, has COMPUTE_32F_FAST_3XTF32"),
        ("f32", {"jit": True}, "needs jit False, has True, which only cuTENSOR supports"),
    ],
)
def test_other_ways_to_compute_are_the_libraries(dtype, choices, said):
    row = next(row for row in OWN_ROWS if str(row.dtypes[0]) == dtype)
    request = request_of(CHAIN, *[(6, 6)] * 4, dtype=dtype, **choices)
    assert said in why_not(request, row)
    assert select(request, GPU).library == "cutensor" or choices == {"compute": "tf32"}
    with pytest.raises(NoRow, match=said.split(", has")[0]):
        select(request_of(CHAIN, *[(6, 6)] * 4, dtype=dtype, library="own", **choices), GPU)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64", "c64", "c128"])
def test_what_it_computes_in_may_be_said(dtype):
    row = next(row for row in OWN_ROWS if str(row.dtypes[0]) == dtype)
    usual = "64f" if dtype in ("f64", "c128") else "32f"
    assert not why_not(request_of(CHAIN, *[(6, 6)] * 4, dtype=dtype, compute=usual), row)


def test_operands_and_elements_are_few():
    dev = dp.device("host")
    one = dev.zeros((), "f32")
    many = dp.EinsumRequest([*[()] * 64, ()], [one] * 64, library="own", optimize="left-to-right")
    assert "needs at most 63 operands, has 64" in why_not(many)
    wide = [one.strided(shape, (0, 0)) for shape in ((600, 300), (300, 400))]
    wide = dp.EinsumRequest("ab,bc->ac", wide, library="own")
    assert "needs at most 262,144 elements of all operands and intermediate results, has 300,000" in why_not(wide)
    far = dev.empty((1 << 10,), "f32").strided((2, 2), (0, 1))
    assert not why_not(dp.EinsumRequest("ab,bc->ac", [far, far], library="own"))


def test_what_is_on_the_way_is_near_unless_it_is_asked_for():
    shapes = [(200, 200), (200, 1), (1, 20)]
    request = request_of("ab,bc,cd->ad", *shapes, dtype="f64")
    row = next(row for row in OWN_ROWS if row.dtypes[0] is F64)
    assert "needs at most 163,840 bytes of operands and intermediate results at a time" in why_not(request, row)
    assert not why_not(request_of("ab,bc,cd->ad", *shapes, dtype="f64", library="own"), row)


def test_views_that_cutensor_refuses_are_taken():
    dev = dp.device("host")
    a = dev.array(np.arange(12, dtype="f4").reshape(3, 4))
    for view in (a[::-1], a[0].strided((3, 4), (0, 1))):
        request = dp.EinsumRequest("ab,bc,cd->ad", [view, dev.zeros((4, 3), "f32"), dev.zeros((3, 2), "f32")])
        assert select(request, GPU) == F32_ROW
        assert why_not(request, next(row for row in dp.TABLE.of("einsum") if row.library == "cutensor"))


def test_the_host_has_it_too(rng):
    dev = dp.device("host")
    arrays = [rng.standard_normal((4, 4)) for _ in range(4)]
    request = dp.EinsumRequest(CHAIN, [*map(dev.array, arrays)], library="own")
    np.testing.assert_allclose(dp.run(request).numpy(), np.linalg.multi_dot(arrays), rtol=1e-12)
    assert dp.explain(request).row.stands_for == "own"


# -- programs ---------------------------------------------------------------------------------------------------------
def header_of(program):
    names = ("rounds", "chunks", "chunks_at", "schedule_at", "zeros_at", "slot")
    return dict(zip(names, map(int, program.words[:6]), strict=True))


def test_steps_that_do_not_wait_for_each_other_are_one_round():
    tree = "ab,bc,cd,de,ef,fg,gh,hi->ai"
    path = ((0, 1), (0, 1), (0, 1), (0, 1), (0, 1), (0, 1), (0, 1))
    deep = request_of(tree, *[(3, 3)] * 8, optimize=path)
    assert header_of(network.program_of(deep))["rounds"] == 3
    chain = request_of(tree, *[(3, 3)] * 8, optimize="left-to-right")
    assert header_of(network.program_of(chain))["rounds"] == 7


def test_more_steps_than_warps_are_several_rounds():
    spec = ",".join(f"{a}{b}" for a, b in itertools.pairwise("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOP")) + "->aP"
    path = tuple((0, 1) for _ in range(40))
    request = request_of(spec, *[(2, 2)] * 41, optimize=path)
    program = network.program_of(request)
    assert header_of(program)["rounds"] >= 6
    assert program.warps in network.WARPS


def test_arrays_that_are_there_at_a_time_are_apart(rng):
    """Each copy and result on the way, from when it is made until it is read for the last time."""
    for _ in range(30):
        count = int(rng.integers(2, 14))
        sizes = {chr(97 + n): int(rng.integers(1, 6)) for n in range(count + 1)}
        terms = [chr(97 + n) + chr(98 + n) for n in range(count)]
        left, path = count, []
        while left > 1:
            path.append(tuple(sorted(rng.choice(left, 2, replace=False).tolist())))
            left -= 1
        request = request_of(
            f"{','.join(terms)}->a{chr(97 + count)}",
            *[tuple(sizes[mode] for mode in term) for term in terms],
            optimize=tuple(path),
        )
        operands = [
            network.Operand(term, network.c_strides(one.shape), 2, False)
            for term, one in zip(terms, request.operands, strict=True)
        ]
        operands = [
            network.Operand(
                "".join(mode for mode in one.modes if sizes[mode] != 1),
                tuple(step for mode, step in zip(one.modes, one.strides, strict=True) if sizes[mode] != 1),
                *one[2:],
            )
            for one in operands
        ]
        lowered = network._Lowered(operands, request.schedule.steps, sizes)
        writer = network._Writer(lowered, sizes, request.parsed[1], request.out_layout().strides, F32, 4)
        rounds = writer._rounds()
        places, elements = writer._allocate(rounds)
        made = dict.fromkeys(range(count), -1)
        read = {}
        for turn, steps in enumerate(rounds):
            for pair in steps:
                made[pair.out] = turn
                assert all(made[one] < turn for one in (pair.a, pair.b) if one is not None), "a step waits for others"
                read |= {one: turn for one in (pair.a, pair.b) if one is not None}
        spans = {
            one: (places[one], places[one] + int(np.prod([sizes[mode] for mode in lowered.mode_orders[one]])))
            for one in read
        }
        assert max(end for _, end in spans.values()) == elements
        for one, other in itertools.combinations(read, 2):
            if max(made[one], made[other]) <= min(read[one], read[other]):
                assert spans[one][1] <= spans[other][0] or spans[other][1] <= spans[one][0]


@pytest.mark.parametrize("extent", [1, 2, 3, 5, 7, 11, 64, 1000, 65537, (1 << 18) - 1, 1 << 18])
def test_reciprocals_divide(extent, rng):
    magic, shift = network.reciprocal(extent)
    assert magic < 1 << 32
    some = [0, 1, extent - 1, extent, extent + 1, (1 << 31) - 1, *rng.integers(0, 1 << 31, 2000).tolist()]
    some += [turn * extent + by for turn in rng.integers(0, (1 << 31) // extent - 1, 500).tolist() for by in (-1, 0)]
    for x in some:
        if x >= 0:
            assert ((x * magic >> 32) >> shift if magic else x) == x // extent


def test_an_estimate_grows_with_the_work():
    for alone in (False, True):
        few, many = (
            network_cost.choose_tiling((1, n, 1 if alone else n, n), 4, 16, 2, alone=alone).cycles for n in (8, 64)
        )
        assert few < many
    narrow, wide = (network_cost.choose_tiling((1, 64, 64, 64), 4, warps, 2, alone=False).cycles for warps in (1, 16))
    assert wide < narrow
    assert network_cost.choose_tiling((1, 1, 1, 4096), 4, 1, 0, alone=False).split == 5
    assert network_cost.choose_tiling((0, 4, 4, 4), 4, 1, 0, alone=False).cycles == 0


def test_the_estimate_that_is_shown_is_that_of_the_rule():
    request = request_of(CHAIN, *[(80, 80)] * 4)
    cycles = network.program_of(request).cycles
    assert f"{network_rules.LAUNCH_US + cycles / network_cost.CYCLES_PER_US:.3g} us" in why_not(request)


def test_programs_are_kept_for_requests_alike():
    one, other = (request_of(CHAIN, *[(6, 6)] * 4) for _ in range(2))
    assert network.program_of(one) is network.program_of(other)
    assert network.program_of(one) is not network.program_of(request_of(CHAIN, *[(6, 6)] * 4, conj=(1,), dtype=C64))
