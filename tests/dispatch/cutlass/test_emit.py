"""What is emitted: the visitor of each tree word for word, the kernel's types, and nothing of its extents."""

from dataclasses import replace

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, Refused
from dispatch.keys import BF16, C64, F8E4M3, F8E5M2, F32, F64, I8, I32, Arch
from dispatch.libraries.cutlass import evt
from dispatch.libraries.cutlass.config import CONFIGS, DEEP, LARGE, SMALL, Config, candidates, choose
from dispatch.libraries.cutlass.emit.sm90_gemm import GEMM_WORDS, GemmSpec, emit
from dispatch.libraries.cutlass.emit.sm100_gemm import BlackwellSpec
from dispatch.libraries.cutlass.emit.sm100_gemm import emit as emit_blackwell
from dispatch.libraries.cutlass.visitors import Operand, lower
from dispatch.ops.matmul import MatmulRequest
from dispatch.ops.matmul.cutlass import spec_of

SPACE = "cutlass::epilogue::fusion::"
ROUND = "cutlass::FloatRoundStyle::round_to_nearest"
SCALAR = {"alpha": Operand("scalar", F32)}
SPEC = GemmSpec(
    arch=Arch(90),
    a=BF16,
    b=BF16,
    c=None,
    d=BF16,
    orders=("row", "column", "row", "row"),
    tile=(128, 256, 64),
    cluster=(2, 1),
    schedule="cooperative",
    scheduler="persistent",
    epilogue=evt.linear_combination(with_source=False),
    operands=tuple(SCALAR.items()),
)


def squeeze(text):
    return text.replace(SPACE, "").replace("cutlass::", "").replace("FloatRoundStyle::round_to_nearest", "rn")


# fmt: off
GOLDEN = {
    "linear combination": (
        evt.linear_combination(with_source=False), SCALAR, None, BF16,
        ["Sm90ScalarBroadcast<float>", "Sm90AccFetch", "Sm90Compute<multiplies, bfloat16_t, float, rn>"],
        "Sm90EVT<Node2, Node0, Node1>",
        "{{{in.number(alpha_value_)}, {(float const*)in.pointer(alpha_)}, {}}, {}, {}}",
        ["alpha", "alpha.value"],
    ),
    "source": (
        evt.accumulator() - evt.source(), {}, F32, F32,
        ["Sm90AccFetch", "Sm90SrcFetch<ElementC>", "Sm90Compute<minus, float, float, rn>"],
        "Sm90EVT<Node2, Node0, Node1>", "{{}, {}, {}}", [],
    ),
    "clamped row bias": (
        evt.clamp(evt.accumulator() + evt.row("bias"), -1, 2), {"bias": Operand("row", BF16)}, None, F8E4M3,
        ["Sm90AccFetch",
         "Sm90RowBroadcast<0, Tile, bfloat16_t, float, cute::Stride<cute::_0, cute::_1, int64_t>>",
         "Sm90Compute<plus, float, float, rn>",
         "Sm90Compute<epilogue::thread::Clamp, float_e4m3_t, float, rn>"],
        "Sm90EVT<Node3, Sm90EVT<Node2, Node0, Node1>>",
        ("{{{}, {(bfloat16_t const*)in.pointer(bias_), bfloat16_t(0), {{}, {}, in.integer(bias_batch_)}}, {}},"
        " {-1.0f, 2.0f}}"),
        ["bias", "bias.batch"],
    ),
    "a column's largest": (
        evt.reduce(evt.accumulator() * 2, "largest", "max", over="n"), {"largest": Operand("reduce", F32)}, None, F32,
        ["Sm90AccFetch", "Sm90ScalarBroadcast<float>", "Sm90Compute<multiplies, float, float, rn>",
         ("Sm90ColReduction<cudabind::larger, cudabind::larger, atomic_maximum, 0, Tile, float, float, rn,"
         " cute::Stride<cute::_1, cute::_0, int64_t>>"),
         "Sm90Compute<epilogue::thread::Identity, float, float, rn>"],
        "Sm90EVT<Node4, Sm90EVT<Node3, Sm90EVT<Node2, Node0, Node1>>>",
        ("{{{{}, {{2.0f}, {nullptr}, {}}, {}}, {in.pointer(largest_), cudabind::lowest,"
        " {{}, {}, in.integer(largest_batch_)}}}, {}}"),
        ["largest", "largest.batch"],
    ),
    "a gate of itself": (
        evt.sigmoid(evt.accumulator() + evt.col("bias")) * (evt.accumulator() + evt.col("bias")),
        {"bias": Operand("col", F32)}, None, BF16,
        ["Sm90AccFetch", "Sm90ColBroadcast<0, Tile, float, float, cute::Stride<cute::_1, cute::_0, int64_t>>",
         "Sm90Compute<plus, float, float, rn>", "Sm90Compute<Sigmoid, float, float, rn>",
         "Sm90Compute<multiplies, bfloat16_t, float, rn>"],
        ("Sm90TopologicalVisitor<float, cute::tuple<cute::seq<>, cute::seq<>, cute::seq<0, 1>, cute::seq<2>,"
        " cute::seq<3, 2>>, Node0, Node1, Node2, Node3, Node4>"),
        ("{typename Node0::Arguments{}, typename Node1::Arguments{(float const*)in.pointer(bias_), float(0),"
        " {{}, {}, in.integer(bias_batch_)}}, typename Node2::Arguments{}, typename Node3::Arguments{},"
        " typename Node4::Arguments{}}"),
        ["bias", "bias.batch"],
    ),
    "integers": (
        evt.linear_combination(with_source=False), {"alpha": Operand("scalar", I32)}, None, I32,
        ["Sm90ScalarBroadcast<int32_t>", "Sm90AccFetch", "Sm90Compute<multiplies, int32_t, int32_t, rn>"],
        "Sm90EVT<Node2, Node0, Node1>",
        "{{{cudabind::whole(in, alpha_value_)}, {(int32_t const*)in.pointer(alpha_)}, {}}, {}, {}}",
        ["alpha", "alpha.value"],
    ),
}
# fmt: on


@pytest.mark.parametrize("name", GOLDEN)
def test_a_tree_becomes_this_visitor(name):
    tree, operands, c, d, nodes, kind, arguments, words = GOLDEN[name]
    made = lower(tree, operands, d, c)
    declared = [line for line in made.declarations if line.startswith("using")]
    assert [squeeze(line) for line in declared] == [f"using Node{i} = {n};" for i, n in enumerate(nodes)]
    assert squeeze(made.type) == kind
    assert squeeze(made.arguments) == arguments
    assert [word.name for word in made.words] == words


def test_a_matrix_is_loaded_and_stored_through_descriptors_of_the_epilogue():
    operands = {"gate": Operand("load", BF16, "column"), "before": Operand("store", F32)}
    made = lower(evt.store(evt.accumulator() * evt.load("gate"), "before"), operands, BF16, None)
    text = "\n".join(made.declarations)
    descriptor = "cutlass::epilogue::collective::detail::Aux"
    assert f"using Node1Descriptor = {descriptor}LoadDescriptor<Descriptor, cutlass::layout::ColumnMajor," in text
    assert (
        f"using Store3Descriptor = {descriptor}StoreDescriptor<Descriptor, cutlass::layout::RowMajor, float>;" in text
    )
    assert (
        "cudabind::stride<Node1Descriptor::Stride>(in.integer(gate_pitch_), in.integer(gate_batch_))" in made.arguments
    )


@pytest.mark.parametrize(
    ("tree", "operands", "d", "reason"),
    [
        (evt.row("bias") * 2, {"bias": Operand("row", F32)}, BF16, "reads the accumulator"),
        (evt.accumulator() + evt.source(), {}, BF16, "needs c"),
        (evt.accumulator() + evt.row("bias"), {"bias": Operand("row", F64)}, BF16, "bias of f32"),
        (evt.accumulator() + evt.load("x"), {"x": Operand("load", C64)}, BF16, "x of f32"),
        (evt.accumulator() * evt.scalar("s"), {"s": Operand("scalar", BF16)}, BF16, "s of f32, has bf16"),
        (evt.relu(evt.accumulator()), {}, I32, "whole numbers"),
        (evt.accumulator() * 0.5, {}, I32, "whole numbers"),
        (sum((evt.relu(evt.accumulator() + i) for i in range(30)), evt.accumulator()), {}, BF16, "nodes at most"),
    ],
)
def test_what_cutlass_cannot_build_is_refused_with_its_reason(tree, operands, d, reason):
    with pytest.raises(Refused, match=reason):
        lower(tree, operands, d, None)


def test_the_kernels_types_are_those_of_the_spec():
    text = emit(
        replace(
            SPEC, a=F8E4M3, b=F8E5M2, tile=(64, 128, 128), cluster=(1, 2), schedule="pingpong", fast_accumulation=True
        )
    ).text
    assert (
        "using ElementA = cutlass::float_e4m3_t;\nusing ElementB = cutlass::float_e5m2_t;\nusing ElementC = void;"
        in text
    )
    assert "using Tile = cute::Shape<cute::_64, cute::_128, cute::_128>;" in text
    assert "using Cluster = cute::Shape<cute::_1, cute::_2, cute::_1>;" in text
    assert "cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum>" in text
    assert "cutlass::layout::RowMajor, 16," in text
    assert "arguments.epilogue.ptr_C" not in text


def test_tf32_and_integers_have_their_accumulators():
    assert "using ElementA = cutlass::tfloat32_t;" in emit(replace(SPEC, a=F32, b=F32, d=F32, tf32=True)).text
    whole = emit(replace(SPEC, a=I8, b=I8, d=I32, operands=(("alpha", Operand("scalar", I32)),))).text
    assert "cutlass::epilogue::collective::EpilogueTileAuto, int32_t, int32_t," in whole


def test_stream_k_tells_its_workspace():
    assert "StreamKScheduler" not in emit(SPEC).text
    text = emit(replace(SPEC, scheduler="stream_k")).text
    assert "cutlass::gemm::StreamKScheduler" in text
    assert "int64_t(Gemm::get_workspace_size(arguments))" in text


def request(m, n, k, **options):
    dev = dp.device("host")
    return MatmulRequest(dev.zeros((m, k), "bf16"), dev.array(np.zeros((n, k)), "bf16").T, **options, library="cutlass")


def test_no_extent_is_part_of_a_kernel():
    one, other = (emit(spec_of(r.form, Arch(90), LARGE)) for r in (request(64, 48, 32), request(4096, 8192, 1024)))
    assert one == other


def test_the_tree_and_its_operands_are_part_of_a_kernel():
    dev = dp.device("host")
    specs = []
    for tree, kind in (
        (evt.relu(evt.accumulator() + evt.row("bias")), "f32"),
        (evt.accumulator() + evt.row("bias"), "f32"),
    ):
        specs.append(
            spec_of(request(8, 16, 8, epilogue=tree, operands={"bias": dev.zeros(16, kind)}).form, Arch(90), SMALL)
        )
    tree = evt.accumulator() + evt.row("bias")
    specs.append(
        spec_of(request(8, 16, 8, epilogue=tree, operands={"bias": dev.zeros(16, "bf16")}).form, Arch(90), SMALL)
    )
    assert len(set(specs)) == len({emit(spec).text for spec in specs}) == 3


@pytest.mark.parametrize(
    ("extents", "expected"),
    [
        ((8192, 8192, 8192), LARGE),
        ((4096, 4096, 4096), LARGE),
        ((2048, 1536, 1024), Config((128, 128), (2, 1))),
        ((128, 512, 16384), DEEP),
        ((16, 4096, 4096), SMALL),
        ((1, 1, 1), SMALL),
    ],
)
def test_the_choice_without_timing(extents, expected):
    assert choose(*extents, 1, 132) == expected


@pytest.mark.parametrize("extents", [(4096, 4096, 4096), (8192, 8192, 8192), (16, 4096, 4096), (128, 512, 16384)])
def test_the_choice_without_timing_is_timed_first_and_others_with_it(extents):
    found = candidates(*extents, 1, 132)
    assert found[0] == choose(*extents, 1, 132)
    assert set(found) <= set(CONFIGS)
    assert len(set(found)) == len(found)
    assert 1 < len({config.kernel for config in found}) <= 7  # each is compiled
    large = extents[0] * extents[1] > 10**7
    assert {config.raster for config in found} == ({"heuristic", "along_m", "along_n"} if large else {"heuristic"})


def test_orders_that_fill_much_up_are_not_timed():
    twelve = candidates(1500, 3000, 512, 1, 60)  # 12 x 12 tiles of 128 x 256; eight wide, they would be 16 x 16
    assert {config.swizzle for config in twelve if config.kernel == LARGE} == {1, 2}
    sixteen = candidates(4096, 4096, 512, 1, 132)
    assert {config.swizzle for config in sixteen if config.kernel == LARGE} == {1, 2, 4, 8}


def test_no_operand_of_a_tree_is_called_as_a_word_is():
    assert {word.name for word in GEMM_WORDS if "." not in word.name} == set(evt.TAKEN)
    with pytest.raises(BadRequest, match="a name other than a, b"):
        evt.row("raster")


def test_the_order_of_tiles_is_an_argument_and_no_part_of_a_kernel():
    orders = [LARGE, LARGE._replace(swizzle=8), LARGE._replace(raster="along_m")]
    sources = [emit(spec_of(request(64, 48, 32).form, Arch(90), config)) for config in orders]
    assert len(set(sources)) == 1
    assert {"swizzle", "raster"} <= {word.name for word in sources[0].words}
    assert "arguments.scheduler.max_swizzle_size = int(in.integer(swizzle_));" in sources[0].text


def test_a_configuration_of_the_stated_set_is_taken_and_no_other():
    assert all(choose(64, 64, 64, 1, 132, config) == config for config in CONFIGS)
    with pytest.raises(BadRequest, match="one of the"):
        choose(64, 64, 64, 1, 132, Config((96, 96)))


BLACKWELL = BlackwellSpec(Arch(100), BF16, BF16, None, BF16, ("row", "column", "row", "row"))


def test_a_kernel_for_blackwell_is_made_of_its_collectives():
    text = emit_blackwell(BLACKWELL).text
    assert BLACKWELL.target == "sm_100a"
    assert text.count("cutlass::arch::Sm100, cutlass::arch::OpClassTensorOp") == 2
    assert "using Tile = cute::Shape<cute::_128, cute::_128, cute::_64>;" in text
    assert "arguments.epilogue.thread.alpha_ptr = (float const*)in.pointer(alpha_);" in text
    assert "beta" not in text
    newer = emit_blackwell(replace(BLACKWELL, arch=Arch(120), a=F8E4M3, b=F8E4M3, c=BF16)).text
    assert "cutlass::arch::Sm120" in newer
    assert "arguments.epilogue.thread.beta = in.number(beta_value_);" in newer
    assert "arguments.epilogue.ptr_C" in newer
