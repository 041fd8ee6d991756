"""What a refusal calls the nearest request that works: which change is smaller than which."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

import dispatch as dp
from dispatch.errors import LINE, NEAREST, NoRow, Refused, Undelivered
from dispatch.keys import BF16, F16, F32, HOST, Arch, Compute, Epilogue, ScaleMode
from dispatch.libraries.cutlass import evt
from dispatch.ops.reduction import ReduceRequest
from dispatch.refusal import EFFORT, Kind, Refusal, distance
from dispatch.table.select import explain, nearest, no_row, select

H100 = Arch(90)
ROWS = [row for row in dp.TABLE.of("matmul") if row.on(H100)][:4]

E, C = Epilogue, Compute
SCALED = (ScaleMode.SCALAR_32F, ScaleMode.SCALAR_32F)
ORDER = Refusal(Kind.RULE, "needs a in row-major order, has column-major")
ALIGNED = Refusal(Kind.RULE, "needs extents that are multiples of 16, has 3")
EPILOGUE = Refusal(Kind.EPILOGUE, (E.NONE,), E.GELU)
OPERAND = Refusal(Kind.EPILOGUE_DTYPE, (F16,), F32)
COMPUTE = Refusal(Kind.COMPUTE, C.COMPUTE_32F, C.COMPUTE_64F)
ASKED = Refusal(Kind.COMPUTE, C.COMPUTE_32F_FAST_TF32, None)
TREE = Refusal(Kind.TREE, (E.NONE, E.RELU), evt.silu(evt.accumulator()))
SCALES = Refusal(Kind.SCALES, ((None, None),), SCALED)
ONE_DTYPE = Refusal(Kind.DTYPES, (F32, F32, F32), (F32, F32, F16))
TWO_DTYPES = Refusal(Kind.DTYPES, (F32, F32, F32), (F16, F32, F16))
ALL_DTYPES = Refusal(Kind.DTYPES, (F32, F32, F32), (F16, F16, F16))
LIBRARY = Refusal(Kind.LIBRARY, "cublasLtMatmulAlgoGetHeuristic finds no algorithm")
OTHER = Refusal(Kind.OTHER_LIBRARY, "cudnn", "cutlass")
OLD = Refusal(Kind.VERSION, ("cublasLt", (12, 9)), (12, 1))
GPU, ELSEWHERE = Refusal(Kind.ARCH, (Arch(100), None), H100), Refusal(Kind.ARCH, (HOST, HOST), H100)

SIZE = Refusal(Kind.SIZE, "needs vectors of 65536 elements or more, x has 16")
MISSING = Refusal(Kind.MISSING, "cudss", "pip install nvidia-cudss")

SENTENCES = {
    MISSING: "needs cudss, which is not installed: pip install nvidia-cudss",
    ORDER: "needs a in row-major order, has column-major",
    SIZE: "needs vectors of 65536 elements or more, x has 16",
    EPILOGUE: "needs an epilogue of NONE, has GELU",
    Refusal(Kind.EPILOGUE, (E.NONE, E.RELU), E.GELU): "needs an epilogue of NONE, RELU, has GELU",
    TREE: "needs an epilogue of NONE, RELU, has the tree silu(acc)",
    OPERAND: "needs an epilogue operand of f16, has f32",
    Refusal(Kind.EPILOGUE_DTYPE, (F16, BF16), F32): "needs an epilogue operand of f16 or bf16, has f32",
    Refusal(Kind.EPILOGUE_DTYPE, (), F32): "needs an epilogue operand of no such operand, has f32",
    COMPUTE: "needs compute COMPUTE_32F, has COMPUTE_64F",
    Refusal(Kind.COMPUTE, None, C.COMPUTE_32F): "needs compute None, has COMPUTE_32F",
    ASKED: "needs compute=COMPUTE_32F_FAST_TF32 in the request",
    SCALES: "needs scale modes (none, none), has (SCALAR_32F, SCALAR_32F)",
    Refusal(Kind.SCALES, ((None, None), SCALED), (None, SCALED[0])): (
        "needs scale modes (none, none) or (SCALAR_32F, SCALAR_32F), has (none, SCALAR_32F)"
    ),
    ONE_DTYPE: "needs dtypes (f32, f32, f32), has (f32, f32, f16)",
    Refusal(Kind.DTYPES, (F32, F32), (F32, None)): "needs dtypes (f32, f32), has (f32, None)",
    LIBRARY: "cublasLtMatmulAlgoGetHeuristic finds no algorithm",
    OLD: "needs cublasLt 12.9, has 12.1",
    OTHER: "needs library cudnn or None, has cutlass",
    GPU: "needs sm_100 or newer, has sm_90",
    ELSEWHERE: "needs host, has sm_90",
    Refusal(Kind.ARCH, (H100, Arch(100)), HOST): "needs sm_90 to sm_100, has host",
}


@pytest.mark.parametrize("refusal", SENTENCES, ids=SENTENCES.values())
def test_a_refusal_prints_as_a_sentence_and_can_be_sent_to_another_process(refusal: Refusal) -> None:
    assert str(refusal) == SENTENCES[refusal]
    copy = pickle.loads(pickle.dumps(refusal))
    assert copy == refusal
    assert copy.kind is refusal.kind
    with pytest.raises(dataclasses.FrozenInstanceError):
        refusal.kind = Kind.RULE  # type: ignore[misc]


def test_every_kind_has_a_distance_and_a_sentence() -> None:
    assert {refusal.kind for refusal in SENTENCES} == set(Kind) == set(EFFORT)


# From the smallest change to the largest; what stands in one line is as far.
FARTHER: list[list[list[Refusal]]] = [
    [[]],
    [[ORDER], [ALIGNED], [OLD]],
    [[ORDER, ALIGNED]],
    [[EPILOGUE], [COMPUTE], [ASKED], [SCALES], [ORDER, ALIGNED, OLD]],
    [[ONE_DTYPE], [EPILOGUE, ORDER]],
    [[TWO_DTYPES], [EPILOGUE, COMPUTE]],
    [[ALL_DTYPES], [ONE_DTYPE, ONE_DTYPE]],
    [[EPILOGUE, COMPUTE, SCALES]],
    [[LIBRARY], [OTHER], [TREE]],
    [[LIBRARY, ORDER]],
    [[SIZE]],
    [[GPU], [ELSEWHERE], [Refusal(Kind.ARCH, (Arch(100), Arch(100)), HOST)]],
    [[GPU, LIBRARY]],
]


def test_a_smaller_change_is_nearer() -> None:
    far = [{distance(why) for why in line} for line in FARTHER]
    assert all(len(each) == 1 for each in far), far
    numbers = [each.pop() for each in far]
    assert numbers == sorted(set(numbers))
    assert distance([OPERAND]) == distance([ORDER])


def test_another_number_of_dtypes_counts_those_that_both_have() -> None:
    assert distance([Refusal(Kind.DTYPES, (F32,) * 4, (F32, F32))]) < distance([ONE_DTYPE])


def test_words_that_sound_like_another_kind_weigh_nothing() -> None:
    for said in ("needs an epilogue of scalars, has bias", "needs sm_100, has sm_90", "a kernel of compute 3"):
        assert distance([Refusal(Kind.RULE, said)]) == distance([ORDER])
        assert distance([Refusal(Kind.LIBRARY, said)]) == distance([LIBRARY])


@pytest.mark.parametrize("line", range(1, len(FARTHER)))
def test_the_nearest_row_is_named_with_all_its_reasons(line: int) -> None:
    tried = [(ROWS[0], FARTHER[-1][0]), (ROWS[1], FARTHER[line][0]), (ROWS[2], FARTHER[-1][0]), (ROWS[3], ())]
    if line == len(FARTHER) - 1:
        tried[0] = (ROWS[0], [*FARTHER[-1][0], ORDER])
    assert nearest(tried, H100) == f"{ROWS[1].name}, which {' and '.join(map(str, FARTHER[line][0]))}"


def test_of_rows_as_near_the_first_is_named() -> None:
    assert nearest([(ROWS[2], [EPILOGUE]), (ROWS[1], [COMPUTE])], H100).startswith(ROWS[2].name)


def test_a_row_of_another_machine_is_never_the_nearest() -> None:
    other = dataclasses.replace(ROWS[0], min_arch=HOST, max_arch=HOST)
    assert nearest([(other, [ORDER]), (ROWS[1], [LIBRARY, LIBRARY])], H100).startswith(ROWS[1].name)
    assert nearest([(other, [ORDER])], H100) == "no row is for sm_90"


def test_an_explanation_has_the_refusals_before_the_row_and_cannot_be_changed() -> None:
    dev = dp.device("host")
    request = dp.MatmulRequest(dev.zeros((4, 4), "bf16"), dev.zeros((4, 4), "bf16"))
    found = explain(request, H100)
    names = [row.name for row in dp.TABLE.of("matmul") if row.on(H100)]
    assert [name for name, _ in found.refusals] == names[: names.index(found.row.name)]
    assert found.refusals
    assert all(why for _, why in found.refusals)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.request = ""  # type: ignore[misc]


# -- what the error says --------------------------------------------------------------------------------------------
def odd() -> dp.MatmulRequest:
    """A request of the op with the most rows that none of them takes."""
    dev = dp.device("host")
    return dp.MatmulRequest(dev.zeros((4, 4), "f32"), dev.zeros((4, 4), "f32"), out_dtype="f64")


@pytest.mark.parametrize("arch", [H100, Arch(80), HOST], ids=str)
def test_the_error_of_many_rows_shows_the_nearest_and_says_where_all_are(arch: Arch) -> None:
    with pytest.raises(NoRow) as caught:
        select(odd(), arch)
    error, rows = caught.value, dp.TABLE.of("matmul")
    assert len(rows) > 10 * NEAREST
    assert [name for name, _ in error.tried] == [row.name for row in rows]
    asked, best, *shown, rest = str(error).split("\n")
    assert asked == f"no row of the table takes {error.request} on {arch}"
    assert best == f"Nearest that works: {error.change}" == "Nearest that works: out_dtype=None (now f64)"
    assert len(shown) == NEAREST
    assert error.nearest.startswith(shown[0].strip().partition(": ")[0])
    assert rest.startswith(f"  {len(rows) - NEAREST} more rows further away; all: error.tried, ")
    assert "dispatch.explain(request)" in rest
    named = {row.name: row for row in rows}
    entries = dict(error.tried)
    far = []
    for line in shown:
        name, _, words = line.strip().partition(": ")
        head, cut, tail = words.partition("…")
        whole = "; ".join(map(str, entries[name]))
        assert whole.startswith(head)
        assert (whole.endswith(tail) and len(line) == LINE) if cut else whole == words
        assert named[name].on(arch)
        far.append(distance(entries[name]))
    assert far == sorted(far)
    assert max(far) <= min(distance(why) for name, why in error.tried if f"  {name}: " not in str(error))
    assert len(str(error)) < 2000


def test_rows_of_this_machine_come_before_those_of_others_however_far_they_are() -> None:
    refusals = [("elsewhere", [ELSEWHERE]), ("far", [ALL_DTYPES] * 20), ("near", [ORDER])]
    error = NoRow("matmul(…)", refusals, "near")
    assert [name for name, _ in error.nearest_first] == ["near", "far", "elsewhere"]
    assert [name for name, _ in error.tried] == ["elsewhere", "far", "near"]


def test_rows_that_take_the_request_come_first_with_what_their_library_says() -> None:
    refusals = [("elsewhere", [ELSEWHERE]), *((f"near {n}", [ORDER]) for n in range(NEAREST)), ("taker", [LIBRARY])]
    error = NoRow("matmul(…)", refusals, "near 0")
    assert [name for name, _ in error.nearest_first][:2] == ["taker", "near 0"]
    assert str(error).split("\n")[2] == f"  taker: {LIBRARY}"


@pytest.mark.parametrize("count", [1, NEAREST, NEAREST + 1])
def test_the_error_of_few_rows_shows_them_all(count: int) -> None:
    lines = str(NoRow("norm(…)", [(f"row {number}", [ORDER, EPILOGUE]) for number in range(count)], "it")).split("\n")
    assert lines[2] == f"  row 0: {ORDER}; {EPILOGUE}"
    assert len(lines) == 3 + min(count, NEAREST)
    assert any("further away" in line for line in lines) == (count > NEAREST)
    assert lines[-1].endswith("all: error.tried, print(dispatch.explain(request))")


def test_what_a_plan_s_maker_misses_is_as_near_as_a_rule_and_a_library_s_refusal_is_not() -> None:
    host = dp.device("host")
    request = ReduceRequest(host.zeros((8, 6)), 0)
    row = select(request, H100)
    ours = no_row(request, H100, refused={row: Refused("needs c, has none", Kind.RULE)})
    theirs = no_row(request, H100, refused={row: Refused("finds no algorithm")})
    assert dict(ours.tried)[row.name] == (Refusal(Kind.RULE, "needs c, has none"),)
    assert dict(theirs.tried)[row.name] == (Refusal(Kind.LIBRARY, "finds no algorithm"),)
    assert ours.nearest.startswith(row.name)
    assert not theirs.nearest.startswith(row.name)
    assert theirs.nearest_first[0] == (row.name, (Refusal(Kind.LIBRARY, "finds no algorithm"),))


WRONG = {
    "mixed": lambda a: dp.matmul(a((4, 4), "f16"), a((4, 4), "bf16")),
    "integers": lambda a: dp.matmul(a((4, 4), "i32"), a((4, 4), "i32")),
    "fp8": lambda a: dp.matmul(a((4, 4), "f8e4m3"), a((4, 4), "f8e4m3"), epilogue="gelu_aux"),
    "tree": lambda a: dp.matmul(a((4, 4)), a((4, 4)), compute="tf32", epilogue="gelu", library="cutlass"),
    "softmax": lambda a: dp.softmax(a((4, 4), "i8")),
    "convolution": lambda a: dp.conv_fwd(a((1, 4, 4, 4), "i8"), a((4, 4, 3, 3))),
    "attention": lambda a: dp.sdpa_fwd(*[a((1, 2, 8, 8), "f64")] * 3),
    "norm": lambda a: dp.norm_fwd(a((4, 4), "i8"), a((4,))),
    "pooling": lambda a: dp.pooling(a((1, 4, 4, 4), "u8"), 2),
    "reduction": lambda a: dp.reduce(a((4, 4), "i64"), (0,)),
    "activation": lambda a: dp.activation(a((4, 4), "f8e5m2")),
    "grouped": lambda a: dp.grouped_matmul(a((4, 4), "f64"), a((2, 4, 4), "f64"), a((2,), "i32")),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_refusal_is_short_and_of_this_machine(name):
    home = dp.device("host")
    with pytest.raises(NoRow) as caught:
        WRONG[name](lambda shape, dtype="f32": home.zeros(shape, dtype))
    first, second, *rows, last = str(caught.value).split("\n")
    assert first.startswith("no row of the table takes ")
    assert "=77" not in first  # the number of a member
    assert second.startswith("Nearest that works: ")
    assert 1 <= len(rows) <= 8
    assert all(len(line) <= 160 for line in (first, *rows, last))
    assert len(second) <= 240
    assert not any(" sm_" in row for row in rows)
    assert last.strip().endswith("all: error.tried, print(dispatch.explain(request))")
    assert f"{len(caught.value.tried) - len(rows)} more rows" in last
    assert "\n" not in repr(caught.value)


def test_undelivered_and_the_log_take_one_line_of_each(caplog):
    caplog.set_level("INFO", "dispatch")
    sup = dp.Supervisor("host", streams=1)
    for name in ("f16", "i8"):
        sup.submit(dp.MatmulRequest(sup.device.zeros((4, 4), name), sup.device.zeros((4, 4), "f64")))
    with pytest.raises(Undelivered) as caught:
        sup.close()
    lines = str(caught.value).split("\n")
    assert len(lines) == 3
    assert all(line.startswith("  NoRow: no row of the table takes matmul(") for line in lines[1:])
    told = [record.getMessage() for record in caplog.records if record.name == "dispatch"]
    assert told
    assert not any("\n" in line for line in told)
