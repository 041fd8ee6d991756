"""Normalization on the host: rows against their definitions, gradients by finite differences, and what is refused."""

import numpy as np
import pytest

import dispatch as dp
from cudabind.sys.cudnn import cudnnBackendNormMode_t
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import HOST, Arch
from dispatch.libraries.cudnn.reference import evaluate
from dispatch.ops.norm import NormBwdRequest, NormFwdRequest, NormMode
from dispatch.ops.norm.cases import cases
from dispatch.ops.norm.graph import lower_to_graph
from dispatch.ops.norm.group import group_norm_steps
from dispatch.ops.norm.reference import reference
from dispatch.row_check import check_row
from dispatch.table.select import select

ROWS = [row for row in dp.TABLE if row.op.startswith("norm_") and row.min_arch == HOST]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]
SHAPES = {
    NormMode.LAYER_NORM: ((3, 4, 6), (4, 6), (1, 2)),
    NormMode.RMS_NORM: ((3, 4, 6), (6,), (2,)),
    NormMode.BATCH_NORM: ((3, 4, 6, 2), (4,), (0, 2, 3)),
    NormMode.INSTANCE_NORM: ((3, 4, 6, 2), (4,), (2, 3)),
    NormMode.GROUP_NORM: ((3, 4, 6, 2), (4,), (2, 3, 4)),  # axes of (N, groups, C / groups, spatial…)
}
GROUPS = {NormMode.GROUP_NORM: 2}


@pytest.fixture
def host():
    return dp.device("host")


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_host_row_passes_its_cases(row, case, host, rng):
    check_row(row, case, host, rng)


def definition(mode, x, scale, bias, epsilon):
    """What each mode is, from NumPy's own mean and variance."""
    _, _, axes = SHAPES[mode]
    if mode is NormMode.GROUP_NORM:
        parts = x.reshape(x.shape[0], GROUPS[mode], -1, *x.shape[2:])
        mean, variance = parts.mean(axis=axes, keepdims=True), parts.var(axis=axes, keepdims=True)
        normal = ((parts - mean) / np.sqrt(variance + epsilon)).reshape(x.shape)
        return normal * scale.reshape(-1, 1, 1) + bias.reshape(-1, 1, 1)
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
    choices = {"mode": mode, "groups": GROUPS.get(mode, 1), "epsilon": 1e-2}
    request = NormFwdRequest(*map(host.array, (x, scale, bias)), training=True, **choices)
    expected = definition(mode, x.astype(float), scale.astype(float), bias.astype(float), 1e-2)
    assert np.allclose(reference(request)["out"], expected)


@pytest.mark.parametrize("mode", NormMode)
def test_gradients_by_finite_differences(mode, host, rng):
    shape, width, _ = SHAPES[mode]
    arrays = {name: rng.standard_normal(s) for name, s in (("x", shape), ("scale", width), ("bias", width))}
    x, scale, bias = (host.array(a, "f32") for a in arrays.values())
    choices = {"mode": mode, "groups": GROUPS.get(mode, 1), "epsilon": 1e-2}
    made = reference(NormFwdRequest(x, scale, bias, training=True, **choices))
    dy = rng.standard_normal(shape)
    inverse = host.array(made["inv_variance_out"], "f32")
    mean = host.array(made["mean_out"], "f32") if "mean_out" in made else None
    found = reference(NormBwdRequest(host.array(dy, "f32"), x, scale, inverse, mean, **choices))
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
        ({"groups": 2}, "groups"),
        ({"mode": NormMode.GROUP_NORM, "groups": 4}, "groups"),
        ({"mode": NormMode.GROUP_NORM, "groups": 0}, "groups"),
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


@pytest.mark.parametrize("mode", list(NormMode))
def test_operands_that_no_engine_can_read_are_refused(mode, host):
    """Scale and bias elsewhere than at a multiple of 16 lose the device (BATCH_NORM); others are a late error."""
    given = {"mode": mode, **({"groups": 2} if mode is NormMode.GROUP_NORM else {"training": True})}
    arrays = {"x": (2, 8, 4, 8), "scale": (8,), **({} if mode is NormMode.RMS_NORM else {"bias": (8,)})}
    whole = {name: host.zeros(shape, "f32") for name, shape in arrays.items()}
    select(NormFwdRequest(**whole, **given), Arch(90))
    for name, shape in {**arrays, "out": arrays["x"]}.items():
        odd = host.zeros((int(np.prod(shape)) + 1,), "f32")[1:].reshape(shape)
        for arch in (HOST, Arch(90)):
            with pytest.raises(NoRow, match=f"needs {name} at a multiple of 16 bytes, has 4"):
                select(NormFwdRequest(**{**whole, name: odd}, **given), arch)


# -- group norm, step by step ---------------------------------------------------------------------------------------
def instance_norm(node, ins):
    """cuDNN's instance norm by its definition, forward in training and backward with given statistics."""
    x, scale = ins["XDESC"], ins["SCALE_DESC"]
    if node.kind == "NORM_FORWARD":
        mean = x.mean(axis=(2, 3), keepdims=True)
        inverse = 1 / np.sqrt(x.var(axis=(2, 3), keepdims=True) + ins["EPSILON_DESC"])
        y = (x - mean) * inverse * scale + ins["BIAS_DESC"]
        return {"YDESC": y, "MEAN_DESC": mean, "INV_VARIANCE_DESC": inverse}
    dy, inverse = ins["DYDESC"], ins["INV_VARIANCE_DESC"]
    normal = (x - ins["MEAN_DESC"]) * inverse
    along, level = ((v * scale).mean(axis=(2, 3), keepdims=True) for v in (dy * normal, dy))
    sums = {"DSCALE_DESC": dy * normal, "DBIAS_DESC": dy}
    made = {name: value.sum(axis=(0, 2, 3), keepdims=True) for name, value in sums.items()}
    return {**made, "DXDESC": inverse * (dy * scale - level - normal * along)}


def carried_out(request, steps):
    """The outputs of steps, in float64, from memory that is laid out as the wires say."""
    names = (*request.reads, *request.writes)
    memory = {}
    for place, name in enumerate(names):
        if name in request.reads and getattr(request, name) is not None:
            memory[place] = np.array(getattr(request, name).numpy(), float).ravel()
        elif name in request.outputs():
            memory[place] = np.full(int(np.prod(request.outputs()[name].shape)), np.nan)
    for number, between in enumerate(steps.intermediates):
        memory[len(names) + number] = np.full(between.size, np.nan if between.fill is None else between.fill)
    for graph, places in steps.steps:
        for wire in graph.wires:  # every operand is as large as its memory, or (the ones) smaller
            assert wire.virtual or wire.value is not None or np.prod(wire.dims) <= memory[places[wire.uid]].size

        def view(uid, graph=graph, places=places):
            wire = graph.wire(uid)
            bytes_of = [8 * step for step in wire.strides]
            return np.lib.stride_tricks.as_strided(memory[places[uid]], wire.dims, bytes_of)

        if graph.nodes[0].kind.startswith("NORM_"):
            (node,) = graph.nodes
            fixed = {wire.uid: np.full(wire.dims, wire.value) for wire in graph.wires if wire.value is not None}
            ins = {name: fixed[uid] if uid in fixed else view(uid).copy() for name, uid in node.ins}
            found = instance_norm(node, ins)
            results = {uid: found[name] for name, uid in node.outs}
        else:
            results = evaluate(graph, {wire.uid: view(wire.uid).copy() for wire in graph.inputs})
        for uid, array in results.items():
            view(uid)[...] = array
    return {name: memory[names.index(name)].reshape(made.shape) for name, made in request.outputs().items()}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("shape", "groups"), [((3, 6, 5, 2), 2), ((1, 6, 4), 3), ((2, 5, 3), 5), ((4, 6), 1), ((2, 4, 1), 2)], ids=str
)
def test_the_graphs_of_group_norm_give_it_together(shape, groups, training, host, rng):
    x, dy, scale, bias = (host.array(rng.standard_normal(s), "f32") for s in (shape, shape, (shape[1],), (shape[1],)))
    choices = {"mode": NormMode.GROUP_NORM, "groups": groups, "epsilon": 1e-2}
    forward = NormFwdRequest(x, scale, bias, training=training, **choices)
    requests = [forward, NormFwdRequest(x, scale, training=training, **choices)]
    if training:
        made = reference(forward)
        statistics = (host.array(made[name], "f32") for name in ("inv_variance_out", "mean_out"))
        requests.append(NormBwdRequest(dy, x, scale, *statistics, **choices))
    for request in requests:
        found = carried_out(request, group_norm_steps(request))
        for name, expected in reference(request).items():
            assert np.allclose(found[name], expected, atol=1e-9), name


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("training", [True, False])
def test_steps_of_axes_of_one_element_mean_nothing(training, last, host, rng):
    """`image[None]` has steps of 0 there, and is as dense as an image that was made with four axes."""
    image = rng.standard_normal((4, 6, 8) if last else (8, 4, 6))
    one = np.ones(8)
    given = {} if training else {"running_mean": host.array(one, "f32"), "running_var": host.array(one, "f32")}
    graphs, results = [], []
    for four in (host.array(image, "f32")[None], host.array(image[None], "f32")):
        x = four.transpose(0, 3, 1, 2) if last else four
        scale, bias = host.array(one, "f32"), host.array(one, "f32")
        request = NormFwdRequest(x, scale, bias, mode=NormMode.BATCH_NORM, training=training, **given)
        if not training and not last:
            with pytest.raises(NoRow, match="channels last"):
                dp.run(request)
            return
        graphs.append(lower_to_graph(request).graph.text())
        results.append(dp.run(request))
    assert graphs[0] == graphs[1]
    made = [found[0] if training else found for found in results]
    assert np.array_equal(made[0].numpy(), made[1].numpy())


def test_pixels_lie_with_their_channels_last_whatever_their_steps_say(host, rng):
    one, x = host.array(np.ones(8), "f32"), rng.standard_normal((4, 8, 1, 1))
    request = NormFwdRequest(
        host.array(x, "f32"), one, one, running_mean=one, running_var=one, mode=NormMode.BATCH_NORM
    )
    assert np.allclose(dp.run(request).numpy(), (x - 1) / np.sqrt(1 + 1e-5) + 1, atol=1e-5)
    assert all(
        wire.strides == (8, 1, 8, 8) for wire in lower_to_graph(request).graph.wires if wire.dims == (4, 8, 1, 1)
    )


@pytest.mark.parametrize("training", [True, False])
def test_an_image_of_one_axis_of_one_pixel_is_described_as_a_matrix(training, host):
    """Both lie with their channels last: strides of (C, 1, 1, C) would be those of no dense image."""
    graphs = []
    for shape in ((16, 8), (16, 8, 1)):
        names = ("scale", "bias", "running_mean", "running_var")
        given = {name: host.zeros((8,), "f32") for name in names}
        request = NormFwdRequest(host.zeros(shape, "f16"), mode=NormMode.BATCH_NORM, training=training, **given)
        graphs.append(lower_to_graph(request).graph)
    assert graphs[0] == graphs[1]
    assert {wire.strides for wire in graphs[1].wires if wire.dims == (16, 8, 1, 1)} == {(8, 1, 8, 8)}


def test_group_norm_takes_channels_first(host):
    x, one = host.zeros((2, 5, 3, 8), "f16"), host.zeros((8,), "f32")
    last = dp.Tensor(x.storage, x.ptr, host.layout(x.dtype, (2, 8, 5, 3), (120, 1, 24, 8), x.ptr))
    with pytest.raises(NoRow, match="C order for GROUP_NORM"):
        select(NormFwdRequest(last, one, mode=NormMode.GROUP_NORM, groups=4), Arch(90))
