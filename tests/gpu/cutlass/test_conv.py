"""Every row of CUTLASS's convolutions on the GPU through all its cases, with fresh numbers and poisoned results.

A row's cases are such that the rows above it refuse them. The parameters of a kernel are held against a convolution's
definition, too: corners and reach of an im2col tensor map, derived by hand.
"""

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import NoRow
from dispatch.libraries.cutlass import evt
from dispatch.libraries.cutlass.params import Im2colMap
from dispatch.ops.conv import channels_last
from dispatch.ops.conv.cases import cases
from dispatch.ops.conv.config import CONFIGS, MEDIUM
from dispatch.ops.conv.reference import reference
from dispatch.row_check import check_row

OPS = ("conv_fwd", "conv_bwd_data", "conv_bwd_filter")
ROWS = [row for op in OPS for row in dp.TABLE.of(op) if row.library == "cutlass"]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]


@pytest.fixture
def gpu():
    return dp.device("cuda:0")


def skip_unless_for(row, gpu):
    if not row.on(gpu.arch) or gpu.arch != 90:  # the multistage rows' cases are what sm_90's rows refuse
        pytest.skip(f"needs sm_90, this GPU is {gpu.arch}")


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_its_cases(row, case, gpu, rng):
    skip_unless_for(row, gpu)
    assert check_row(row, case, gpu, rng) == ""


def bf16(gpu, rng, *shape, spread=1.0):
    return channels_last(gpu.array(rng.standard_normal(shape) * spread, "bf16"))


def check(request, result):
    expected = reference(request)["out"]
    off = np.abs(result.numpy().astype(np.float64) - expected).max()
    assert off <= 2.0**-7 * np.abs(expected).max(), request.describe()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_configuration_is_right(config, gpu, rng):
    """The ragged ends of tiles along pixels, filters and channels, and more tiles than multiprocessors."""
    skip_unless_for(ROWS[0], gpu)
    x, w = bf16(gpu, rng, 9, 72, 57, 31), bf16(gpu, rng, 328, 72, 3, 3, spread=0.25)
    request = dp.ConvFwdRequest(x, w, pad=1, config=config)
    for _ in range(3):
        check(request, dp.run(request))


@pytest.mark.parametrize("swizzle", [2, 8])
def test_stripes_change_the_order_alone(swizzle, gpu, rng):
    skip_unless_for(ROWS[0], gpu)
    x, w = bf16(gpu, rng, 9, 64, 33, 31), bf16(gpu, rng, 256, 64, 3, 3, spread=0.25)
    plain, striped = (
        dp.conv_fwd(x, w, pad=1, config=MEDIUM._replace(swizzle=s)).numpy().tobytes() for s in (1, swizzle)
    )
    assert plain == striped


def test_the_choice_without_timing_is_right_for_layers_of_a_network(gpu, rng):
    """What `choose` picks, forward and both gradients, from many pixels and few channels to the other way round."""
    skip_unless_for(ROWS[0], gpu)
    for channels, filters, extent in ((16, 64, 56), (64, 128, 28), (256, 512, 7)):
        x, w = bf16(gpu, rng, 4, channels, extent, extent), bf16(gpu, rng, filters, channels, 3, 3, spread=0.1)
        forward = dp.ConvFwdRequest(x, w, pad=1, library="cutlass")
        y = dp.run(forward)
        check(forward, y)
        for request in (
            dp.ConvBwdDataRequest(y, w, pad=1, library="cutlass"),
            dp.ConvBwdFilterRequest(y, x, w_extents=(3, 3), pad=1, library="cutlass"),
        ):
            check(request, dp.run(request))


def test_a_recorded_map_is_that_of_the_definition(gpu, rng):
    """Pixels are read from (-pad) on, to where the last window begins, and a filter's taps from there."""
    skip_unless_for(ROWS[0], gpu)
    x, w = bf16(gpu, rng, 2, 72, 15, 17), bf16(gpu, rng, 136, 72, 3, 2)
    request = dp.ConvFwdRequest(x, w, pad=((1, 2), (0, 1)), stride=(2, 1), dilation=(1, 3), config=MEDIUM)
    call = dp.prepare(request)
    (found,) = (m for m in call._bound.plan._launch._template.maps if isinstance(m, Im2colMap))
    assert (found.sizes, found.strides) == ((72, 17, 15, 2), (144, 17 * 144, 15 * 17 * 144))
    assert (found.lower, found.upper, found.steps) == ((0, -1), (1 - 3, 2 - 2), (1, 1, 2, 1))
    assert (found.channels, found.pixels) == (64, 128)
    check(request, call())


def test_a_repeated_request_reads_what_is_there_then(gpu, rng):
    """The second run of the same addresses is recorded, and the third is a replay."""
    skip_unless_for(ROWS[0], gpu)
    x, w = bf16(gpu, rng, 2, 16, 9, 9), bf16(gpu, rng, 24, 16, 3, 3)
    tree = evt.relu(evt.scalar("alpha") * evt.accumulator() + evt.row("bias"))
    bias = gpu.array(rng.standard_normal(24), "f32")
    request = dp.ConvFwdRequest(x, w, pad=1, epilogue=tree, operands={"bias": bias}, alpha=0.5, config=MEDIUM)
    for _ in range(4):
        x.copy_from(rng.standard_normal(x.shape))
        bias.copy_from(rng.standard_normal(24))
        check(request, dp.run(request))


def test_misaligned_images_are_refused_by_tensor_maps_and_taken_by_the_others(gpu, rng):
    skip_unless_for(ROWS[0], gpu)
    w = bf16(gpu, rng, 16, 8, 3, 3)
    memory = gpu.array(rng.standard_normal(2 * 9 * 9 * 8 + 2), "bf16")[2:]
    layout = gpu.layout(memory.dtype, (2, 8, 9, 9), (648, 1, 72, 8), memory.ptr)
    x = dp.Tensor(memory.storage, memory.ptr, layout)
    request = dp.ConvFwdRequest(x, w, library="cutlass")
    call = dp.prepare(request)
    assert call.row.function == "ImplicitGemmConvolution"
    check(request, call())
    odd = gpu.array(rng.standard_normal(2 * 9 * 9 * 8 + 1), "bf16")[1:]
    layout = gpu.layout(odd.dtype, (2, 8, 9, 9), (648, 1, 72, 8), odd.ptr)
    with pytest.raises(NoRow, match="multiples of 4 bytes"):
        dp.conv_fwd(dp.Tensor(odd.storage, odd.ptr, layout), w, library="cutlass")


def test_against_torch(gpu):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    skip_unless_for(ROWS[0], gpu)
    x, w = (torch.randn(shape, device="cuda").to(torch.bfloat16) for shape in ((4, 64, 28, 28), (128, 64, 3, 3)))
    x, w = (t.to(memory_format=torch.channels_last) for t in (x, w / 24))
    expected = torch.nn.functional.conv2d(x, w, padding=1, stride=2).float().cpu().numpy()
    got = (
        dp.conv_fwd(dp.from_dlpack(x), dp.from_dlpack(w), pad=1, stride=2, library="cutlass").numpy().astype(np.float32)
    )
    assert np.abs(got - expected).max() <= 2.0**-7 * np.abs(expected).max()
