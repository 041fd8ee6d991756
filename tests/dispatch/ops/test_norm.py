"""Normalization on the host: rows against their definitions, gradients by finite differences, and what is refused."""

import numpy as np
import pytest

import dispatch as dp
from cudabind.sys.cudnn import cudnnBackendNormMode_t
from dispatch.cudnn.trial import carry_out
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import HOST, Arch
from dispatch.ops.norm import NormBwdRequest, NormFwdRequest, NormMode, cases, reference
from dispatch.select import select

ROWS = [row for row in dp.TABLE if row.op.startswith("norm_") and row.arch == HOST]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]
SHAPES = {
    NormMode.LAYER_NORM: ((3, 4, 6), (4, 6), (1, 2)),
    NormMode.RMS_NORM: ((3, 4, 6), (6,), (2,)),
    NormMode.BATCH_NORM: ((3, 4, 6, 2), (4,), (0, 2, 3)),
    NormMode.INSTANCE_NORM: ((3, 4, 6, 2), (4,), (2, 3)),
}


@pytest.fixture
def host():
    return dp.device("host")


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_host_row_passes_its_cases(row, case, host, rng):
    carry_out(row, case, host, rng)


def definition(mode, x, scale, bias, epsilon):
    """What each mode is, from NumPy's own mean and variance."""
    _, _, axes = SHAPES[mode]
    mean = x.mean(axis=axes, keepdims=True)
    variance = x.var(axis=axes, keepdims=True)
    if mode is NormMode.RMS_NORM:
        mean, variance = 0, np.square(x).mean(axis=axes, keepdims=True)
    by_channel = mode in (NormMode.BATCH_NORM, NormMode.INSTANCE_NORM)
    wide = [p.reshape(-1, 1, 1) if by_channel else p for p in (scale, bias)]
    return (x - mean) / np.sqrt(variance + epsilon) * wide[0] + wide[1]


@pytest.mark.parametrize("mode", NormMode)
def test_the_forward_is_its_definition(mode, host, rng):
    shape, width, _ = SHAPES[mode]
    x, scale, bias = (rng.standard_normal(s).astype(np.float32) for s in (shape, width, width))
    request = NormFwdRequest(*map(host.array, (x, scale, bias)), mode=mode, training=True, epsilon=1e-2)
    expected = definition(mode, x.astype(float), scale.astype(float), bias.astype(float), 1e-2)
    assert np.allclose(reference(request)["out"], expected)


@pytest.mark.parametrize("mode", NormMode)
def test_gradients_by_finite_differences(mode, host, rng):
    shape, width, _ = SHAPES[mode]
    arrays = {name: rng.standard_normal(s) for name, s in (("x", shape), ("scale", width), ("bias", width))}
    x, scale, bias = (host.array(a, "f32") for a in arrays.values())
    made = reference(NormFwdRequest(x, scale, bias, mode=mode, training=True, epsilon=1e-2))
    dy = rng.standard_normal(shape)
    inverse = host.array(made["inv_variance_out"], "f32")
    mean = host.array(made["mean_out"], "f32") if "mean_out" in made else None
    found = reference(NormBwdRequest(host.array(dy, "f32"), x, scale, inverse, mean, mode=mode, epsilon=1e-2))
    for name, array in arrays.items():
        direction = rng.standard_normal(array.shape)
        losses = []
        for step in (1e-4, -1e-4):
            moved = {**arrays, name: array + step * direction}
            losses.append(np.vdot(dy, definition(mode, *moved.values(), 1e-2)))
        slope = (losses[0] - losses[1]) / 2e-4
        assert np.isclose(np.vdot(found[f"d{name}"], direction), slope, rtol=1e-4, atol=1e-4), name


def test_running_statistics_are_mixed_with_the_unbiased_variance(host, rng):
    x = rng.standard_normal((5, 8, 3)).astype(np.float32)
    old = [rng.random(8).astype(np.float32) for _ in range(2)]
    one = host.array(np.ones(8, np.float32))
    results = dp.norm_fwd(
        host.array(x), one, one, mode=NormMode.BATCH_NORM, training=True, momentum=0.25,
        running_mean=host.array(old[0]), running_var=host.array(old[1]),
    )  # fmt: skip
    _, mean, _, new_mean, new_var = (t.numpy() for t in results)
    assert np.allclose(mean, x.mean(axis=(0, 2)), atol=1e-6)
    assert np.allclose(new_mean, 0.75 * old[0] + 0.25 * x.mean(axis=(0, 2)), atol=1e-6)
    assert np.allclose(new_var, 0.75 * old[1] + 0.25 * x.var(axis=(0, 2), ddof=1), atol=1e-6)


def test_batch_norm_without_training_uses_what_is_given(host, rng):
    x, mean, var = (rng.random(s).astype(np.float32) for s in ((5, 8), (8,), (8,)))
    scale = host.array(np.full(8, 2, np.float32))
    running = {"running_mean": host.array(mean), "running_var": host.array(var)}
    y = dp.norm_fwd(host.array(x), scale, mode=NormMode.BATCH_NORM, **running).numpy()
    assert np.allclose(y, 2 * (x - mean) / np.sqrt(var + 1e-5), atol=1e-5)


def test_modes_are_numbered_as_in_the_header():
    for mode in NormMode:
        assert cudnnBackendNormMode_t[f"CUDNN_{mode.name}"] == mode


@pytest.mark.parametrize(
    ("fields", "operand"),
    [
        ({"scale": (5,)}, "scale"),
        ({"bias": (5,)}, "bias"),
        ({"x": (0, 6)}, "x"),
        ({"epsilon": 0}, "epsilon"),
        ({"momentum": 2}, "momentum"),
        ({"mode": 1}, "mode"),
        ({"running_mean": (6,)}, "running_var"),
        ({"mode": NormMode.BATCH_NORM}, "running_mean"),
        ({"training": True, "mean_out": (4,)}, "mean_out"),
    ],
)
def test_fields_that_do_not_fit_are_named(fields, operand, host):
    shapes = {"x": (4, 6), "scale": (6,)}
    given = {
        name: host.zeros(value, "f32") if isinstance(value, tuple) else value
        for name, value in {**shapes, **fields}.items()
    }
    with pytest.raises(BadRequest) as caught:
        NormFwdRequest(**given)
    assert caught.value.operand == operand


def test_what_cudnn_has_no_engine_for_is_refused(host):
    one = host.zeros((5,), "f32")
    with pytest.raises(NoRow, match="multiple of 8 channels"):
        select(NormFwdRequest(host.zeros((4, 5), "f16"), one, one, mode=NormMode.BATCH_NORM, training=True), Arch(90))
    with pytest.raises(NoRow, match="needs x dense"):
        select(NormFwdRequest(host.zeros((4, 9), "f16")[:, :5], one, one), Arch(90))
