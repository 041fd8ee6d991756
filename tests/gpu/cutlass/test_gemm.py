"""Every CUTLASS row of matmul on the GPU through its cases, against float64: the recorded call, a plain one, again."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import NoRow
from dispatch.libraries.cutlass import evt
from dispatch.libraries.cutlass.config import CONFIGS, Config
from dispatch.libraries.cutlass.emit.sm100_gemm import ARCHES
from dispatch.ops.matmul import MatmulRequest, matmul
from dispatch.ops.matmul.reference import reference
from dispatch.ops.matmul.tree_cases import Check, quantized_cases, row_cases, tree_cases

HOPPER, BLACKWELL = (
    [row for row in dp.TABLE.of("matmul") if row.library == "cutlass" and (row.min_arch > 90) is newer]
    for newer in (False, True)
)
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in HOPPER for case in row_cases(row)]
NEWER = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in BLACKWELL for case in row_cases(row)]


@pytest.fixture
def gpu():
    device = dp.device("cuda:0")
    if device.arch != 90:
        pytest.skip(f"needs sm_90, this GPU is {device.arch}")
    return device


def check_until_replayed(check, call):
    """Into poisoned outputs each time: the second run of the same addresses is recorded, the third a replay."""
    result = None
    for _ in range(3):
        check.renew(result)
        result = call()
        check.verify(result)


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_its_cases(row, case, gpu, rng):
    check = case.check(gpu, rng)
    call = dp.prepare(check.request)
    assert call.row is row
    check_until_replayed(check, call)
    again = case.check(gpu, rng)
    again.verify(dp.run(again.request))  # the plain call, at other addresses: the same parameters but for those


@pytest.mark.parametrize(("row", "case"), NEWER)
def test_a_row_of_blackwell_passes_its_cases(row, case, rng):
    device = dp.device("cuda:0")
    if device.arch not in ARCHES or not row.on(device.arch):
        pytest.skip(f"needs {row.min_arch} to {row.max_arch}, this GPU is {device.arch}")
    check = case.check(device, rng)
    call = dp.prepare(check.request)
    assert call.row is row
    check_until_replayed(check, call)


@pytest.mark.parametrize("case", [*tree_cases(), *quantized_cases()], ids=lambda case: case.id)
def test_a_random_tree_passes(case, gpu, rng):
    check = case.check(gpu, rng)
    check_until_replayed(check, lambda: dp.run(check.request))  # reductions start anew each time


def halves(gpu, rng, m, n, k):
    a = gpu.array(rng.standard_normal((m, k)), "bf16")
    return a, gpu.array(rng.standard_normal((n, k)), "bf16").T


def test_a_replay_reads_what_is_there_then(gpu, rng):
    a, b = halves(gpu, rng, 256, 192, 128)
    call = dp.prepare(MatmulRequest(a, b, config=Config((128, 128), (2, 1)), library="cutlass"))
    for _ in range(3):
        a.copy_from(rng.standard_normal(a.shape))
        Check("replay", call.request).verify(call())


def test_a_number_may_change_from_call_to_call(gpu, rng):
    a, b = halves(gpu, rng, 128, 64, 64)
    for alpha in (1.0, -0.5, 3.0):
        request = MatmulRequest(a, b, alpha=alpha, config=Config((128, 128), (2, 1)), library="cutlass")
        Check("alpha", request).verify(dp.run(request))
    request = MatmulRequest(a, b, alpha=gpu.array([0.25], "f32"), config=Config((128, 128), (2, 1)), library="cutlass")
    Check("alpha on the device", request).verify(dp.run(request))


def test_the_default_choice_runs_and_is_right(gpu, rng):
    a, b = halves(gpu, rng, 100, 136, 72)
    np.testing.assert_allclose(
        matmul(a, b, library="cutlass").numpy().astype(float),
        reference(MatmulRequest(a, b, library="cutlass"))["out"],
        rtol=2**-7,
        atol=1e-3,
    )


def test_a_matrix_may_be_shared_by_the_batch(gpu, rng):
    a, b = halves(gpu, rng, 72, 48, 136)
    many = gpu.array(rng.standard_normal((3, 72, 136)), "bf16")
    config = Config((64, 128), (1, 1), "pingpong")
    Check("shared b", MatmulRequest(many, b, config=config, library="cutlass")).verify(
        matmul(many, b, config=config, alpha=1.0, library="cutlass")
    )
    many = gpu.array(rng.standard_normal((3, 48, 136)), "bf16").mT
    Check("shared a", MatmulRequest(a, many, config=config, library="cutlass")).verify(
        matmul(a, many, config=config, alpha=1.0, library="cutlass")
    )


def test_c_may_be_d_itself(gpu, rng):
    a, b = halves(gpu, rng, 300, 136, 72)
    c = gpu.array(rng.standard_normal((300, 136)), "bf16")
    config = Config((128, 128), (2, 1))
    check = Check("in place", MatmulRequest(a, b, c=c, out=c, alpha=0.5, beta=-1.0, config=config, library="cutlass"))
    check.verify(dp.run(check.request))  # once: a second run has another C


def test_stream_k_is_right_run_after_run(gpu, rng):
    """The barriers in its workspace start from zero each time, also in a replay."""
    config = Config((128, 128), (1, 1), "cooperative", "stream_k")
    assert config in CONFIGS
    a, b = halves(gpu, rng, 128, 384, 8192)
    check = Check("stream-K", MatmulRequest(a, b, config=config, library="cutlass"))
    call = dp.prepare(check.request)
    result = None
    for _ in range(4):
        check.renew(result)
        result = call()
        check.verify(result)


def test_a_misaligned_pointer_is_refused_before_it_is_touched(gpu):
    whole = gpu.zeros(65 * 64, "bf16")
    with pytest.raises(NoRow, match="a at a multiple of 16 bytes, has 2"):
        matmul(whole[1 : 1 + 64 * 64].reshape(64, 64), gpu.zeros((64, 64), "bf16"), library="cutlass")


@pytest.mark.parametrize("n", [72, 53])  # TMA stores whole 16 bytes, and 53 of bf16 end amid them
def test_memory_beside_an_output_is_left_alone(n, gpu, rng):
    a, b = halves(gpu, rng, 100, n, 64)
    whole = gpu.array(np.full((102, 96), 7.0), "bf16")
    tree = evt.store(evt.accumulator(), "copy", "bf16")
    other = gpu.array(np.full((102, 96), 7.0), "bf16")
    inside = (slice(1, 101), slice(8, 8 + n))
    request = MatmulRequest(a, b, out=whole[inside], epilogue=tree, operands={"copy": other[inside]}, library="cutlass")
    Check("guarded", request).verify(dp.run(request))
    for matrix in (whole.numpy(), other.numpy()):
        matrix[inside] = 7
        assert (matrix == 7).all()


def test_no_node_of_a_tree_hides_nan(gpu):
    """NaN passes what compares, and stays in every reduction, whichever sign it has and whatever else there is."""
    x = evt.reduce(evt.accumulator() + evt.load("x"), "low", "min", over="n")
    x = evt.reduce(evt.reduce(x, "high", "max", over="m"), "least", "min", over="mn")
    tree = evt.clamp(evt.maximum(evt.minimum(evt.relu(x), evt.load("y")), 0.5), 0.25, 1e30)
    a, b = (gpu.zeros(shape, "bf16") for shape in ((128, 64), (64, 128)))
    for value in (np.nan, -np.nan, np.inf, -np.inf):
        values = np.linspace(-2, 2, 128 * 128).reshape(128, 128).astype(np.float32)
        values[37, 91] = value
        given = {"x": gpu.array(values, "bf16"), "y": gpu.array(np.ones((128, 128)), "bf16")}
        request = MatmulRequest(a, b, epilogue=tree, operands=tuple(given.items()), out_dtype="f32", library="cutlass")
        got, wanted = dp.run(request), reference(request)
        for tensor, expected in zip(got, (wanted[n] for n in ("out", "low", "high", "least")), strict=True):
            np.testing.assert_array_equal(tensor.numpy(), np.asarray(expected, np.float32).reshape(tensor.shape))
