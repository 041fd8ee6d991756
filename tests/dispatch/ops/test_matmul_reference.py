"""The reference and the host's matmul against formulas written anew: einsum, loops over bits, finite differences."""

import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from scipy.special import expit

from dispatch import MatmulRequest, Scales, device
from dispatch.core.precision import to_tf32
from dispatch.keys import Compute, Dtype, Epilogue, ScaleMode
from dispatch.ops.matmul import numpy_matmul
from dispatch.ops.matmul.host import to_bf16, to_f16
from dispatch.ops.matmul.reference import reference

E = Epilogue
EPS = {"f64": 1e-14, "f32": 2e-6, "f16": 2e-3, "bf16": 1.6e-2}
DEFAULT = {"f64": Compute.COMPUTE_64F, "c128": Compute.COMPUTE_64F, "i8": Compute.COMPUTE_32I}
HOST = None


@pytest.fixture(autouse=True)
def _live_host():
    """Each test has the host that is live now: other tests close it."""
    global HOST
    HOST = device("host")


def run_host(request, compute=None):
    """All outputs of a request from the host's plan, by name, without the table."""
    row = SimpleNamespace(compute=compute or DEFAULT.get(request.a.dtype.name, Compute.COMPUTE_32F))
    outputs = {}
    for name, (shape, _, dtype) in request.unallocated().items():
        outputs[name] = HOST.zeros(shape, dtype)
    numpy_matmul(request, None, row).run(request, outputs)
    results = {name: tensor.numpy() for name, tensor in outputs.items()}
    return {"out": request.out.numpy() if request.out is not None else None, **results}


def wide(tensor):
    """The elements in float64, or complex128."""
    array = tensor.numpy()
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def normal(rng, shape, dtype="f64"):
    values = rng.standard_normal(shape)
    if Dtype.of(dtype).is_complex:
        values = values + 1j * rng.standard_normal(shape)
    return HOST.array(values, dtype)


def gelu_by_sigmoid(x):
    """The tanh form of GELU, told with the logistic function instead."""
    return x * expit(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def difference(function, x, step=1e-5):
    return (function(x + step) - function(x - step)) / (2 * step)


def bits_of(mask, n):
    """The columns of a bit mask, bit by bit."""
    rows = mask.reshape(-1, mask.shape[-1])
    found = [[bool(row[j // 8] >> (j % 8) & 1) for j in range(n)] for row in rows]
    return np.array(found, bool).reshape(*mask.shape[:-1], n)


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16", "c64", "c128"])
@pytest.mark.parametrize(("a_batch", "b_batch"), [((), ()), ((3,), ()), ((), (3,)), ((2, 1), (1, 3)), ((1,), (4,))])
def test_the_affine_part_is_alpha_a_b_plus_beta_c(rng, dtype, a_batch, b_batch):
    a, b = normal(rng, (*a_batch, 5, 7), dtype), normal(rng, (*b_batch, 7, 4), dtype)
    c = normal(rng, (*np.broadcast_shapes(a_batch, b_batch), 5, 4), dtype)
    request = MatmulRequest(a=a, b=b, c=c, alpha=-0.5, beta=1.5)
    expected = -0.5 * np.einsum("...ik,...kj->...ij", wide(a), wide(b)) + 1.5 * wide(c)
    np.testing.assert_allclose(reference(request)["out"], expected, rtol=1e-13, atol=1e-13)
    eps = EPS.get(dtype, 2e-6)
    np.testing.assert_allclose(run_host(request)["out"].astype(expected.dtype), expected, rtol=eps, atol=8 * 2e-6 + eps)


@pytest.mark.parametrize("per_batch", [False, True])
def test_bias_is_added_to_every_row_before_the_activation(rng, per_batch):
    a, b = normal(rng, (2, 5, 6)), normal(rng, (2, 6, 3))
    bias = normal(rng, (2, 3) if per_batch else (3,))
    request = MatmulRequest(a=a, b=b, bias=bias, epilogue=E.RELU_BIAS)
    expected = np.empty((2, 5, 3))
    for batch, i, j in np.ndindex(2, 5, 3):
        added = wide(bias)[batch, j] if per_batch else wide(bias)[j]
        expected[batch, i, j] = max(0.0, sum(wide(a)[batch, i, p] * wide(b)[batch, p, j] for p in range(6)) + added)
    np.testing.assert_allclose(reference(request)["out"], expected, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(run_host(request)["out"], expected, rtol=1e-13, atol=1e-14)


def test_gelu_is_its_tanh_form_and_its_input_is_kept(rng):
    a, b, bias = normal(rng, (9, 4)), normal(rng, (4, 11)), normal(rng, (11,))
    request = MatmulRequest(a=a, b=b, bias=bias, epilogue=E.GELU_AUX_BIAS)
    x = np.einsum("ik,kj->ij", wide(a), wide(b)) + wide(bias)
    for results in (reference(request), run_host(request)):
        np.testing.assert_allclose(results["out"], gelu_by_sigmoid(x), rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(results["aux"], x, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("n", [1, 7, 8, 9, 127, 128, 129, 300])
def test_relu_aux_is_one_bit_per_column_in_rows_of_whole_128_bits(rng, n):
    a, b = normal(rng, (2, 3, 4)), normal(rng, (4, n))
    request = MatmulRequest(a=a, b=b, epilogue=E.RELU_AUX)
    x = np.einsum("bik,kj->bij", wide(a), wide(b))
    for results in (reference(request), run_host(request)):
        mask = results["aux"]
        assert mask.shape == (2, 3, 16 * math.ceil(n / 128))
        assert mask.dtype == np.uint8
        np.testing.assert_array_equal(bits_of(mask, n), x > 0)
        padding = bits_of(mask, mask.shape[-1] * 8)[..., n:]
        assert not padding.any()


def test_drelu_is_the_slope_of_relu_at_what_the_forward_pass_saw(rng):
    a, b = normal(rng, (6, 5)), normal(rng, (5, 21))
    x = np.einsum("ik,kj->ij", wide(a), wide(b))
    mask = HOST.array(reference(MatmulRequest(a=a, b=b, epilogue=E.RELU_AUX))["aux"])
    g, w = normal(rng, (6, 8)), normal(rng, (8, 21))
    request = MatmulRequest(a=g, b=w, aux=mask, epilogue=E.DRELU_BGRAD)
    slope = difference(lambda v: np.maximum(v, 0), x, 1e-9)
    expected = np.einsum("ik,kj->ij", wide(g), wide(w)) * np.round(slope)
    for results in (reference(request), run_host(request)):
        np.testing.assert_allclose(results["out"], expected, rtol=1e-12, atol=1e-13)
        sums = [math.fsum(expected[i, j] for i in range(6)) for j in range(21)]
        np.testing.assert_allclose(results["bgrad"], sums, rtol=1e-12, atol=1e-12)


def test_padding_bits_of_a_mask_are_never_read(rng):
    g, w = normal(rng, (2, 3)), normal(rng, (3, 5))
    ones = HOST.array(np.full((2, 16), 0xFF, np.uint8))
    request = MatmulRequest(a=g, b=w, aux=ones, epilogue=E.DRELU)
    np.testing.assert_allclose(run_host(request)["out"], np.einsum("ik,kj->ij", wide(g), wide(w)), rtol=1e-13)


@pytest.mark.parametrize("epilogue", [E.DGELU, E.DGELU_BGRAD])
def test_dgelu_is_the_slope_of_gelu_by_finite_differences(rng, epilogue):
    g, w = normal(rng, (3, 7, 8)), normal(rng, (8, 16))
    x = rng.uniform(-6, 6, (3, 7, 16))
    request = MatmulRequest(a=g, b=w, aux=HOST.array(x), epilogue=epilogue)
    expected = np.einsum("bik,kj->bij", wide(g), wide(w)) * difference(gelu_by_sigmoid, x)
    for results in (reference(request), run_host(request)):
        np.testing.assert_allclose(results["out"], expected, rtol=1e-7, atol=1e-8)
        if epilogue is E.DGELU_BGRAD:
            np.testing.assert_allclose(results["bgrad"], np.einsum("bij->bj", expected), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("a_batch", "b_batch"), [((), ()), ((2,), (2,)), ((), (2,)), ((2, 1), (1, 3))])
def test_bgrada_and_bgradb_sum_the_operands_over_k(rng, a_batch, b_batch):
    a, b = normal(rng, (*a_batch, 4, 9)), normal(rng, (*b_batch, 9, 5))
    batch = np.broadcast_shapes(a_batch, b_batch)
    for epilogue, sums in (
        (E.BGRADA, np.broadcast_to(np.einsum("...ik->...i", wide(a)), (*batch, 4))),
        (E.BGRADB, np.broadcast_to(np.einsum("...kj->...j", wide(b)), (*batch, 5))),
    ):
        request = MatmulRequest(a=a, b=b, epilogue=epilogue, alpha=3.0)  # alpha is D's alone
        for results in (reference(request), run_host(request)):
            np.testing.assert_allclose(results["bgrad"], sums, rtol=1e-13, atol=1e-13)
            product = 3 * np.einsum("...ik,...kj->...ij", wide(a), wide(b))
            np.testing.assert_allclose(results["out"], product, rtol=1e-12, atol=1e-12)


# -- scales -------------------------------------------------------------------------------------------------------
def tiled(line, block, blocks):
    """Where the factor of a line and a block of k is: 128 x 4 tiles in row-major order, 32 x 4 x 4 within one."""
    tile = (line // 128) * (blocks // 4) + block // 4
    return tile * 512 + (line % 32) * 16 + (line % 128 // 32) * 4 + block % 4


def factor_at(mode, flat, line, p, lines, k):
    """The factor of element p of a line of an operand, by its place in memory."""
    return flat[
        {
            ScaleMode.SCALAR_32F: 0,
            ScaleMode.OUTER_VEC_32F: line,
            ScaleMode.VEC128_32F: (p // 128) * lines + line,
            ScaleMode.BLK128x128_32F: (line // 128) * (4 * math.ceil(k / 512)) + p // 128,
            ScaleMode.VEC32_UE8M0: tiled(line, p // 32, 4 * math.ceil(k / 128)),
            ScaleMode.VEC16_UE4M3: tiled(line, p // 16, 4 * math.ceil(k / 64)),
        }[mode]
    ]


def factor_shape(mode, lines, k):
    return {
        ScaleMode.SCALAR_32F: (1,),
        ScaleMode.OUTER_VEC_32F: (lines,),
        ScaleMode.VEC128_32F: (math.ceil(k / 128), lines),
        ScaleMode.BLK128x128_32F: (math.ceil(lines / 128), 4 * math.ceil(k / 512)),
        ScaleMode.VEC32_UE8M0: (128 * math.ceil(lines / 128), 4 * math.ceil(k / 128)),
        ScaleMode.VEC16_UE4M3: (128 * math.ceil(lines / 128), 4 * math.ceil(k / 64)),
    }[mode]


def factor(rng, mode, lines, k):
    dtype = {ScaleMode.VEC32_UE8M0: "e8m0", ScaleMode.VEC16_UE4M3: "f8e4m3"}.get(mode, "f32")
    values = 2.0 ** rng.integers(-2, 3, factor_shape(mode, lines, k))
    return HOST.array(values * (1 if dtype == "e8m0" else 1.25), dtype)


@pytest.mark.parametrize("b_mode", list(ScaleMode))
@pytest.mark.parametrize("a_mode", list(ScaleMode))
def test_each_scale_mode_reaches_the_elements_it_says(rng, a_mode, b_mode):
    m, n, k = 130, 137, 260
    a, b = normal(rng, (m, k), "f8e4m3"), normal(rng, (k, n), "f8e5m2")
    scale_a, scale_b = factor(rng, a_mode, m, k), factor(rng, b_mode, n, k)
    scales = Scales(a=scale_a, b=scale_b, a_mode=a_mode, b_mode=b_mode)
    request = MatmulRequest(a=a, b=b, scales=scales, out_dtype="f32")
    flat_a, flat_b = wide(scale_a).ravel(), wide(scale_b).ravel()
    rows = [0, 1, 31, 32, 33, 64, 127, 128, 129]
    columns = [0, 5, 32, 63, 127, 128, 136]
    expected = np.empty((len(rows), len(columns)))
    wide_a, wide_b = wide(a), wide(b)
    for (i, row), (j, column) in ((r, c) for r in enumerate(rows) for c in enumerate(columns)):
        by_a = [factor_at(a_mode, flat_a, row, p, m, k) for p in range(k)]
        by_b = [factor_at(b_mode, flat_b, column, p, n, k) for p in range(k)]
        expected[i, j] = math.fsum(wide_a[row] * by_a * wide_b[:, column] * by_b)
    picked = np.ix_(rows, columns)
    np.testing.assert_allclose(reference(request)["out"][picked], expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(run_host(request)["out"][picked], expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("dtype", "top"), [("f8e4m3", 448.0), ("f8e5m2", 57344.0)])
def test_an_fp8_d_is_scaled_and_saturates_and_amax_is_taken_before(rng, dtype, top):
    a, b, c = normal(rng, (16, 32), "f8e4m3"), normal(rng, (32, 16), "f8e4m3"), normal(rng, (16, 16), "bf16")
    amax = HOST.zeros((1,))
    scales = Scales(a=0.5, b=HOST.array(np.float32([4.0])), d=top / 8, amax_d=amax)
    request = MatmulRequest(a=a, b=b, c=c, beta=2.0, out_dtype=dtype, scales=scales)
    x = 2.0 * np.einsum("ik,kj->ij", wide(a), wide(b)) + 2.0 * wide(c)
    assert np.abs(x).max() > 8  # some must saturate
    results = reference(request)
    np.testing.assert_allclose(results["out"], np.minimum(np.maximum(x * (top / 8), -top), top), rtol=1e-12)
    np.testing.assert_allclose(results["amax_d"], max(abs(value) for value in x.ravel()), rtol=1e-12)
    got = run_host(request)["out"].astype(np.float64)
    assert np.isfinite(got).all()
    assert got.max() == top
    step = 2.0 ** -(3 if dtype == "f8e4m3" else 2)
    np.testing.assert_allclose(got, np.clip(x * (top / 8), -top, top), rtol=step / 2 + 1e-6)
    np.testing.assert_allclose(amax.item(), np.abs(x).max(), rtol=1e-6)


def test_an_aux_of_fp8_is_scaled_and_its_largest_magnitude_kept(rng):
    a, b = normal(rng, (16, 32), "f8e4m3"), normal(rng, (32, 16), "f8e4m3")
    aux, amax = HOST.zeros((16, 16), "f8e4m3"), HOST.zeros((1,))
    request = MatmulRequest(a=a, b=b, aux=aux, epilogue=E.GELU_AUX, scales=Scales(aux=3.0, amax_aux=amax))
    x = np.einsum("ik,kj->ij", wide(a), wide(b))
    np.testing.assert_allclose(reference(request)["aux"], 3 * x, rtol=1e-12, atol=1e-12)
    run_host(request)
    np.testing.assert_allclose(wide(aux), 3 * x, rtol=2.0**-4 + 1e-5, atol=2.0**-9)
    np.testing.assert_allclose(amax.item(), np.abs(x).max(), rtol=1e-6)


def test_scale_c_multiplies_c_alone(rng):
    a, b, c = (normal(rng, (16, 16), "f8e4m3") for _ in range(3))
    request = MatmulRequest(a=a, b=b, c=c, beta=2.0, out_dtype="f32", scales=Scales(c=0.25))
    expected = np.einsum("ik,kj->ij", wide(a), wide(b)) + 0.5 * wide(c)
    np.testing.assert_allclose(reference(request)["out"], expected, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(run_host(request)["out"], expected, rtol=1e-5, atol=1e-5)


# -- numbers ------------------------------------------------------------------------------------------------------
def test_products_of_i8_are_exact_integers(rng):
    a, b = rng.integers(-128, 128, (5, 1000)), rng.integers(-128, 128, (1000, 6))
    c = rng.integers(-(2**20), 2**20, (5, 6))
    request = MatmulRequest(a=HOST.array(a, "i8"), b=HOST.array(b, "i8"), c=HOST.array(c, "i32"), alpha=3, beta=-2)
    expected = np.empty((5, 6), object)  # of Python's integers
    for i, j in np.ndindex(5, 6):
        expected[i, j] = 3 * sum(int(a[i, p]) * int(b[p, j]) for p in range(1000)) - 2 * int(c[i, j])
    np.testing.assert_array_equal(reference(request)["out"], expected)
    np.testing.assert_array_equal(run_host(request)["out"], expected)


def rounded_by_hand(value, bits):
    """To so many significant bits, half to even, by Python's exact integers."""
    if value == 0:
        return 0.0
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(fraction * 2**bits), exponent - bits)


@pytest.mark.parametrize(("rounding", "bits"), [(to_tf32, 11), (to_bf16, 8), (to_f16, 11)])
def test_fast_modes_round_operands_half_to_even(rng, rounding, bits):
    halfway = np.float32([1 + 2.0**-bits, 1 + 3 * 2.0**-bits, -(1 + 2.0**-bits), 0.0, -2.5])
    values = np.concatenate([rng.standard_normal(500).astype(np.float32), halfway])
    values = values[(np.abs(values) > 1e-3) | (values == 0)]  # above the subnormals of f16
    np.testing.assert_array_equal(rounding(values), [rounded_by_hand(float(v), bits) for v in values])
    np.testing.assert_array_equal(rounding(values[::2].reshape(1, -1)), rounding(values)[None, ::2])


def test_tf32_keeps_infinities_and_nan():
    values = np.float32([np.inf, -np.inf, np.nan, np.finfo(np.float32).max])
    np.testing.assert_array_equal(to_tf32(values), np.float32([np.inf, -np.inf, np.nan, np.inf]))


@pytest.mark.parametrize(
    ("compute", "bits"),
    [(Compute.COMPUTE_32F_FAST_TF32, 11), (Compute.COMPUTE_32F_FAST_16BF, 8), (Compute.COMPUTE_32F_FAST_16F, 11)],
)
@pytest.mark.parametrize("dtype", ["f32", "c64"])
def test_a_fast_mode_multiplies_rounded_operands(rng, compute, bits, dtype):
    a, b = normal(rng, (6, 9), dtype), normal(rng, (9, 5), dtype)
    hand = np.vectorize(lambda value: rounded_by_hand(float(value), bits))

    def parts(tensor):
        values = wide(tensor)
        return hand(values.real) + 1j * hand(values.imag) if dtype == "c64" else hand(values)

    expected = np.einsum("ik,kj->ij", parts(a), parts(b))
    got = run_host(MatmulRequest(a=a, b=b, compute=compute), compute)["out"]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    exact = np.einsum("ik,kj->ij", wide(a), wide(b))
    assert np.abs(got - exact).max() > 1e-4  # it is not silently more precise


def test_an_f32_product_is_not_rounded_to_a_fast_mode(rng):
    a, b = normal(rng, (64, 64), "f32"), normal(rng, (64, 64), "f32")
    got = run_host(MatmulRequest(a=a, b=b))["out"]
    assert np.abs(got - np.einsum("ik,kj->ij", wide(a), wide(b))).max() < 1e-4 / 2


def test_an_f16_overflow_is_an_infinity_and_no_warning():
    a = HOST.array(np.full((2, 2), 60000.0), "f16")
    assert np.isinf(run_host(MatmulRequest(a=a, b=a))["out"]).all()


def test_bf16_results_are_rounded_once(rng):
    a, b = normal(rng, (32, 16), "bf16"), normal(rng, (16, 32), "bf16")
    sums = np.matmul(a.numpy().astype(np.float32), b.numpy().astype(np.float32))
    np.testing.assert_array_equal(run_host(MatmulRequest(a=a, b=b))["out"], sums.astype(ml_dtypes.bfloat16))


# -- memory -------------------------------------------------------------------------------------------------------
def test_strided_transposed_and_broadcast_operands_are_read_where_they_lie(rng):
    whole = normal(rng, (4, 20, 30), "f32")
    a, b = whole[1, 2:12, 3:20], whole[2, :18, 5:22].mT  # (10, 17) and (17, 18)
    expected = np.einsum("ik,kj->ij", wide(a), wide(b))
    np.testing.assert_allclose(run_host(MatmulRequest(a=a, b=b))["out"], expected, rtol=1e-5, atol=1e-5)


def test_c_in_place_is_read_before_it_is_written(rng):
    a, b, out = normal(rng, (4, 5)), normal(rng, (5, 6)), normal(rng, (4, 6))
    before = wide(out)
    run_host(MatmulRequest(a=a, b=b, c=out, out=out, beta=2.0))
    once = np.einsum("ik,kj->ij", wide(a), wide(b)) + 2 * before
    np.testing.assert_allclose(wide(out), once, rtol=1e-13, atol=1e-13)
    run_host(MatmulRequest(a=a, b=b, out=out, beta=-1.0))
    np.testing.assert_allclose(wide(out), np.einsum("ik,kj->ij", wide(a), wide(b)) - once, rtol=1e-12, atol=1e-12)


def test_with_beta_0_nothing_is_read_from_c(rng):
    a, b = normal(rng, (4, 5)), normal(rng, (5, 6))
    c = HOST.array(np.full((4, 6), np.nan))
    for beta in (0, 0.0, HOST.zeros((1,), "f64")):
        request = MatmulRequest(a=a, b=b, c=c, beta=beta)
        expected = np.einsum("ik,kj->ij", wide(a), wide(b))
        np.testing.assert_allclose(run_host(request)["out"], expected, rtol=1e-13, atol=1e-13)


def test_alpha_and_beta_may_be_tensors(rng):
    a, b, c = normal(rng, (4, 5)), normal(rng, (5, 6)), normal(rng, (4, 6))
    alpha, beta = HOST.array(np.array([0.5])), HOST.array(np.array([-3.0]))
    request = MatmulRequest(a=a, b=b, c=c, alpha=alpha, beta=beta)
    expected = 0.5 * np.einsum("ik,kj->ij", wide(a), wide(b)) - 3 * wide(c)
    np.testing.assert_allclose(run_host(request)["out"], expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
def test_empty_extents_give_empty_results_and_empty_sums(rng, m, n, k):
    a, b, c = normal(rng, (m, k)), normal(rng, (k, n)), normal(rng, (m, n))
    request = MatmulRequest(a=a, b=b, c=c)
    product = wide(c) if k == 0 else np.zeros((m, n))
    for results in (reference(request), run_host(request)):
        assert results["out"].shape == (m, n)
        np.testing.assert_array_equal(results["out"], product)
    bgrad = MatmulRequest(a=a, b=b, aux=HOST.zeros((m, 16 * math.ceil(n / 128)), "u8"), epilogue=E.DRELU_BGRAD)
    np.testing.assert_array_equal(run_host(bgrad)["bgrad"], np.zeros(n))
