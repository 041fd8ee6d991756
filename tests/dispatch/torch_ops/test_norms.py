"""`dispatch.torch.layer_norm` and `rms_norm` beside torch's own in f64, and what torch does with them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from dispatch.errors import BadRequest

torch = pytest.importorskip("torch")
F = torch.nn.functional
norms = pytest.importorskip("dispatch.torch.norms")
spec = importlib.util.spec_from_file_location("beside", Path(__file__).with_name("beside.py"))
beside = importlib.util.module_from_spec(spec)
spec.loader.exec_module(beside)

F32 = torch.float32
DTYPES = (F32, torch.float16, torch.bfloat16)
SHAPES = (((3, 5, 8), (8,)), ((4, 6), (4, 6)), ((1, 7), (7,)), ((0, 8), (8,)), ((2, 0, 3, 8), (3, 8)), ((9, 33), (33,)))


def operands(shape, axes, dtype=F32, narrow=True):
    torch.manual_seed(0)
    parameters = [torch.randn(axes, dtype=dtype if narrow else F32) for _ in range(2)]
    return [t.requires_grad_() for t in (torch.randn(shape, dtype=dtype), *parameters)]


def ours(mode, x, axes, weight, bias):
    return norms.layer_norm(x, axes, weight, bias) if mode == "layer" else norms.rms_norm(x, axes, weight)


def theirs(mode, x, axes, weight, bias):
    eps = torch.finfo(F32).eps
    return F.layer_norm(x, axes, weight, bias) if mode == "layer" else F.rms_norm(x, axes, weight, eps)


@pytest.mark.parametrize("mode", ["layer", "rms"])
@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "axes"), SHAPES, ids=str)
def test_values_and_gradients_against_f64(shape, axes, dtype, narrow, mode):
    given = operands(shape, axes, dtype, narrow)
    given = given if mode == "layer" else given[:2]
    wide = beside.mapped_to_f64(given)
    y, expected = (
        call(mode, t[0], axes, t[1], t[2] if mode == "layer" else None) for call, t in ((ours, given), (theirs, wide))
    )
    assert y.dtype == dtype
    assert y.is_contiguous()
    found = beside.gradients(y, given)
    assert [grad.dtype for grad in found] == [t.dtype for t in given]
    beside.close([y, *found], [expected, *beside.gradients(expected, wide)], 16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("mode", ["layer", "rms"])
def test_operands_that_lie_otherwise(mode):
    torch.manual_seed(0)
    apart = torch.randn(4 * 6 + 1)[1:].view(4, 6)
    for x in (torch.randn(6, 4).T, torch.randn(4, 12)[:, ::2], torch.randn(1, 6).expand(4, 6), apart):
        given = [
            x.detach().requires_grad_(),
            torch.randn(12)[::2].requires_grad_(),
            torch.randn(7)[1:].requires_grad_(),
        ]
        given = given if mode == "layer" else given[:2]
        wide = beside.mapped_to_f64(given)
        filled, widened = [*given, None], [*wide, None]
        y = ours(mode, filled[0], (6,), *filled[1:3])
        expected = theirs(mode, widened[0], (6,), *widened[1:3])
        beside.close([y, *beside.gradients(y, given)], [expected, *beside.gradients(expected, wide)], 1e-5)


def test_without_weight_or_bias():
    x, weight, bias = operands((4, 6), (6,))
    for given in ((None, None), (weight, None), (None, bias)):
        y, expected = norms.layer_norm(x, (6,), *given), F.layer_norm(x, (6,), *given)
        followed = [x, *(t for t in given if t is not None)]
        beside.close([y, *beside.gradients(y, followed)], [expected, *beside.gradients(expected, followed)], 1e-5)
    beside.close([norms.rms_norm(x, (6,))], [F.rms_norm(x, (6,))], 1e-5)


@pytest.mark.parametrize("dtype", beside.first_of(DTYPES), ids=str)
def test_opcheck(dtype):
    x, weight, bias = operands((3, 5, 8), (8,), dtype)
    for given in ((bias, "layer"), (None, "layer"), (None, "rms")):
        torch.library.opcheck(norms.NORM.overload, (x, weight, *given, 1e-5))
        with torch.no_grad():
            _, *statistics = norms.NORM(x, weight, *given, 1e-5)
        detached = (torch.randn_like(x), x.detach(), weight.detach(), *statistics)
        torch.library.opcheck(norms.NORM_BACKWARD.overload, (*detached, given[1], 1e-5))


def test_gradcheck_in_f32():
    """No row has f64: differences of f32, as wide as its precision makes them."""
    x, weight, bias = operands((3, 8), (8,))
    settings = {"eps": 1e-2, "atol": 2e-2, "rtol": 2e-2}
    with pytest.warns(UserWarning, match="not a double precision"):
        assert torch.autograd.gradcheck(lambda *t: norms.layer_norm(t[0], (8,), *t[1:]), (x, weight, bias), **settings)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_and_export(dynamic):
    torch.compiler.reset()

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8))

        def forward(self, x):
            return norms.rms_norm(norms.layer_norm(x, (8,), self.weight), (8,), self.weight)

    model = Both()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (3, 5):
        x = torch.randn(rows, 8, requires_grad=True)
        y, expected, given = compiled(x), model(x), [x, model.weight]
        beside.close([y, *beside.gradients(y, given)], [expected, *beside.gradients(expected, given)], 1e-6)
    exported = torch.export.export(model, (x,))
    beside.close([exported.module()(x)], [expected], 1e-6)


def test_vmap_of_x_alone():
    x, weight, bias = (t.detach() for t in operands((4, 5, 8), (8,)))
    beside.close(
        [torch.vmap(lambda t: norms.layer_norm(t, (8,), weight, bias), in_dims=1)(x)],
        [F.layer_norm(x.movedim(1, 0), (8,), weight, bias)],
        1e-5,
    )
    beside.close([torch.vmap(lambda t: norms.rms_norm(t, (8,), weight))(x)], [F.rms_norm(x, (8,), weight)], 1e-5)
    with pytest.raises(BadRequest, match="vmap over dispatch::norm"):
        torch.vmap(lambda w: norms.rms_norm(x, (8,), w))(torch.ones(2, 8))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: norms.layer_norm(torch.ones(2, 3, dtype=torch.float64), (3,)), "x: got a tensor of torch.float64"),
        (lambda: norms.layer_norm(torch.ones(2, 3), (2,)), "normalized_shape: got"),
        (lambda: norms.layer_norm(torch.ones(2, 3), ()), "normalized_shape: got"),
        (lambda: norms.layer_norm(torch.ones(2, 3), 3), r"normalized_shape: got 3; expected extents. Hint: \(3,\)"),
        (lambda: norms.layer_norm(torch.ones(2, 0), (0,)), "normalized_shape: got"),
        (lambda: norms.layer_norm(torch.ones(2, 3), (3,), torch.ones(2)), "weight: got shape"),
        (lambda: norms.layer_norm(torch.ones(2, 3), (3,), torch.ones(3, dtype=torch.float16)), "weight: got a tensor"),
        (lambda: norms.layer_norm(torch.ones(2, 3), (3,), eps=0), "eps: got 0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(call, text):
    with pytest.raises(BadRequest, match=text):
        call()


@pytest.mark.parametrize("eps", ["x", None, True, torch.tensor(1e-5), float("nan"), 0, -1.0], ids=str)
def test_an_eps_that_is_no_number_above_0_is_refused(eps):
    x = torch.randn(3, 4)
    with pytest.raises(BadRequest, match=r"eps: got .*; expected a number"):
        norms.layer_norm(x, [4], eps=eps)
    if eps is not None:
        with pytest.raises(BadRequest, match=r"eps: got .*; expected a number"):
            norms.rms_norm(x, [4], eps=eps)


@pytest.mark.parametrize("shape", [None, "4", 4, ("a",)], ids=str)
def test_extents_that_are_none_are_refused(shape):
    with pytest.raises(BadRequest, match="normalized_shape: got"):
        norms.layer_norm(torch.randn(3, 4), shape)
