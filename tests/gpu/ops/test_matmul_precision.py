"""No product is less precise than f32 sums and one rounding, unless the request allows it: every epilogue, on a GPU.

Bias and C take most of the product away, so that what was rounded before they were added shows in what is left.
"""

from __future__ import annotations

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import NoRow
from dispatch.execute import installed
from dispatch.keys import HALF, Compute, Epilogue
from dispatch.ops.matmul import aux_shape, cublaslt
from dispatch.ops.matmul.bounds import Check
from dispatch.ops.matmul.exact import ExactPlan
from dispatch.testing.memory import Mismatch

E = Epilogue
SHAPES = [
    # m, n, k, and how a and b lie
    ((65, 43, 21), "nn"),
    ((33, 77, 4096), "nn"),
    ((37, 53, 1029), "tn"),
    ((64, 48, 512), "nt"),
    ((256, 384, 384), "nt"),
    ((16, 512, 2048), "nt"),
    ((1, 640, 320), "nt"),
]
BENT = [e for e in E if e.adds_bias or e.activation == "gelu"]  # where rounding first shows


def laid(dev, values, order):
    return dev.array(values) if order == "n" else dev.array(np.ascontiguousarray(values.T)).T


def trial_of(dev, rng, dtype, epilogue, shape, order, *, with_c=False, **choices):
    """Products around 100, of which bias and C together leave 10."""
    (m, n, k), number = shape, dtype.numpy
    middle = 10 / k**0.5
    a, b = ((middle + 0.15 * rng.standard_normal(extents)).astype(number) for extents in ((m, k), (k, n)))
    a_order, b_order = order
    if epilogue is E.BGRADA:
        a_order = "t"
    if epilogue is E.BGRADB:
        b_order = "n"
    taken = 90 / ((epilogue.adds_bias + with_c) or 1)
    fields = {"a": laid(dev, a, a_order), "b": laid(dev, b, b_order)}
    if epilogue.adds_bias:
        fields["bias"] = dev.array((rng.standard_normal(n) - taken).astype(number))
    if with_c:
        fields["c"] = dev.array((rng.standard_normal((m, n)) - taken).astype(number))
    if epilogue.is_gradient:
        own, strides = aux_shape(epilogue, (m, n))
        kind = "u8" if epilogue.activation == "relu" else dtype
        values = rng.integers(0, 256, (m, strides[0])) if kind == "u8" else rng.standard_normal((m, strides[0]))
        fields["aux"] = dev.array(values, kind)[:, : own[1]]
    request = dp.MatmulRequest(**fields, epilogue=epilogue, **choices)
    return Check.of(f"{dtype} {epilogue.name} {shape} {order}", request, Compute.COMPUTE_32F, ())


@pytest.mark.parametrize("with_c", [False, True], ids=["", "c"])
@pytest.mark.parametrize(("shape", "order"), SHAPES, ids=str)
@pytest.mark.parametrize("epilogue", E, ids=lambda e: e.name)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_product_is_rounded_once(dev, rng, dtype, epilogue, shape, order, with_c):
    check = trial_of(dev, rng, dtype, epilogue, shape, order, with_c=with_c)
    if epilogue is E.BGRADA and shape[0] == 1:
        with pytest.raises(NoRow, match="cublasLtMatmulAlgoGetHeuristic"):
            dp.run(check.request)
        return
    for _ in range(3):  # the plain call, the recorded one, a replay
        check.verify(dp.run(check.request))


@pytest.mark.parametrize("epilogue", [E.NONE, E.BIAS, E.DRELU, E.BGRADB], ids=lambda e: e.name)
@pytest.mark.parametrize("alpha", [1.0, 2.0])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_product_that_is_added_to_d_is_rounded_once(dev, rng, dtype, epilogue, alpha):
    """D += A·B, by the very tensor and by another view of it: the library has kernels that round A·B before."""
    for shape, order in (SHAPES[3], SHAPES[4], SHAPES[0]):
        check = trial_of(dev, rng, dtype, epilogue, shape, order, with_c=True, alpha=alpha)
        kept = check.request.c.numpy()
        out = dev.array(kept)
        for c in (out, out[:]):
            request = check.request.replace(c=c, out=out)
            for _ in range(3):
                out.copy_from(kept)
                result = dp.run(request)
                Check(check.name, request, check.expected, check.allowed, ()).verify(result)


@pytest.mark.parametrize(("shape", "order"), [SHAPES[0], SHAPES[1], SHAPES[4]], ids=str)
@pytest.mark.parametrize("epilogue", [E.NONE, E.RELU_BIAS, E.GELU_AUX_BIAS, E.DGELU_BGRAD], ids=lambda e: e.name)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_what_autotune_takes_is_rounded_once(dev, rng, monkeypatch, tmp_path, dtype, epilogue, shape, order):
    """Also where the request that allows less was tuned before: each finds its own outcome on disk."""
    monkeypatch.setenv("CUDABIND_CACHE", str(tmp_path))
    installed.algorithms.cache_clear()
    try:
        with dev.stream():
            for reduced in (True, False):
                check = trial_of(
                    dev,
                    rng,
                    dtype,
                    epilogue,
                    shape,
                    order,
                    autotune=True,
                    reduced_precision=reduced,
                    library="cublasLt",
                )
                check.verify(dp.run(check.request))
        with dev.stream():  # an executor without plans, which finds the outcome on disk
            check.verify(dp.run(check.request))
    finally:
        installed.algorithms.cache_clear()


@pytest.mark.parametrize("library", ["cublasLt", "cublas"])
@pytest.mark.parametrize("k", [1, 16, 64, 1000, 1024, 4096, 16384])
def test_sums_in_f16_lose_what_their_bound_says_and_more_than_those_in_f32(dev, rng, k, library):
    a, b = (dev.array(rng.standard_normal(shape) / k**0.25, "f16") for shape in ((96, k), (k, 80)))
    request = dp.MatmulRequest(a, b, compute="16f", library=library)
    check = Check.of(f"k {k}", request, Compute.COMPUTE_16F, ())
    exact = a.numpy().astype(np.float64) @ b.numpy().astype(np.float64)
    size = np.abs(a.numpy().astype(np.float64)) @ np.abs(b.numpy().astype(np.float64))
    for _ in range(3):
        result = dp.run(request)
        check.verify(result)
    lost = np.abs(result.numpy() - exact) / size * 2**11
    in_f32 = np.abs(dp.matmul(a, b, library=library).numpy() - exact) / size * 2**11
    print(f"k {k}, {library}: {lost.max():.3g} roundoffs of f16 times |A| |B|, by sums in f32 {in_f32.max():.3g}")
    if k >= 1000:
        assert lost.max() > in_f32.max()


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_what_16_bits_do_not_hold_is_there_when_the_bias_is_added(dev, dtype):
    """A product of 2^p + 1, of which p bits keep 2^p, less 2^p: 1 by f32, and 0 or 2 by 16 bits."""
    large = 2 ** (8 if dtype is dp.Dtype.of("bf16") else 11)
    for m, n in ((16, 24), (65, 43), (128, 256)):
        a, b = dev.array(np.ones((m, large + 1)), dtype), dev.array(np.ones((large + 1, n)), dtype)
        bias = dev.array(np.full(n, -float(large)), dtype)
        assert (dp.matmul(a, b, bias=bias, epilogue=E.RELU_BIAS).numpy() == 1).all(), (m, n)


def test_the_bounds_tell_two_roundings_from_one(dev, rng):
    """With an algorithm that rounds first, which the request allows, a check for one rounding fails: here some do."""
    caught = 0
    for dtype in HALF:
        for shape, order in SHAPES[:3]:
            allowed = trial_of(dev, rng, dtype, E.GELU_BIAS, shape, order, reduced_precision=True)
            strict = Check.of("strict", dp.MatmulRequest(**_fields(allowed.request)), Compute.COMPUTE_32F, ())
            result = dp.run(allowed.request)
            allowed.verify(result)
            try:
                strict.verify(result)
            except Mismatch:
                caught += 1
    assert caught


def _fields(request):
    return {name: getattr(request, name) for name in ("a", "b", "c", "bias", "epilogue")}


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("epilogue", BENT, ids=lambda e: e.name)
def test_the_kernels_of_this_library_do_every_epilogue(dev, rng, monkeypatch, dtype, epilogue):
    """Where all algorithms of the library are passed over."""
    monkeypatch.setattr(cublaslt, "fuses", lambda _: False)
    for with_c in (False, True):
        for shape, order in SHAPES[:5]:
            check = trial_of(dev, rng, dtype, epilogue, shape, order, with_c=with_c)
            with dev.stream():
                assert isinstance(dev.executor().plan(check.request), ExactPlan)
                for _ in range(3):
                    check.verify(dp.run(check.request))


@pytest.mark.parametrize("epilogue", [e for e in E if e.activation == "gelu"], ids=lambda e: e.name)
@pytest.mark.parametrize(("shape", "order"), [SHAPES[0], SHAPES[4]], ids=str)
def test_a_gelu_in_f64_is_of_f64s_precision_and_the_librarys_is_not(dev, rng, epilogue, shape, order):
    f64 = dp.Dtype.of("f64")
    for reduced in (False, True):
        check = trial_of(dev, rng, f64, epilogue, shape, order, reduced_precision=reduced)
        check = Check.of(check.name, check.request, Compute.COMPUTE_64F, ())
        for _ in range(3):
            result = dp.run(check.request)
            check.verify(result)
        assert dp.prepare(check.request).row.variant == ("" if reduced else "exact GELU")


def test_the_gelu_of_f64_is_off_by_nothing_that_shows(dev):
    """Around 0, where the library is off by 2.5e-10."""
    x = np.linspace(-6, 6, 64 * 64).reshape(64, 64)
    a, one = dev.array(x), dev.array(np.eye(64))
    right = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    errors = [
        np.abs(dp.matmul(a, one, epilogue=E.GELU, reduced_precision=reduced).numpy() - right).max()
        for reduced in (False, True)
    ]
    assert errors[0] < 4e-15
    assert errors[1] < 4e-10
