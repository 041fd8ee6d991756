"""`dispatch.torch.rope` beside its formula in f64, and what torch does with it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from dispatch.errors import BadRequest

torch = pytest.importorskip("torch")
rotary = pytest.importorskip("dispatch.torch.rotary")
spec = importlib.util.spec_from_file_location("beside", Path(__file__).with_name("beside.py"))
beside = importlib.util.module_from_spec(spec)
spec.loader.exec_module(beside)

F32, F64 = torch.float32, torch.float64
DTYPES = (F64, F32, torch.float16, torch.bfloat16)


def operands(q=(2, 4, 5, 8), heads=2, turned=None, batch=None, dtype=F64, factor=None):
    torch.manual_seed(0)
    angles = (q[0] if batch is None else batch, q[2], q[3] if turned is None else turned)
    both = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in (q, (q[0], heads, *q[2:]))]
    return [*both, *(torch.randn(angles, dtype=factor or dtype) for _ in range(2))]


def theirs(q, k, cos, sin, interleaved=False):
    turned = cos.shape[-1]

    def of(x):
        head, rest = x[..., :turned], x[..., turned:]
        if interleaved:
            half = torch.stack((-head[..., 1::2], head[..., ::2]), -1).flatten(-2)
        else:
            half = torch.cat((-head[..., turned // 2 :], head[..., : turned // 2]), -1)
        return torch.cat((head * cos[:, None] + half * sin[:, None], rest), -1)

    return of(q), of(k)


def wide(given):
    return [t.detach().double().requires_grad_(t.requires_grad) for t in given]


def gradients(both, given):
    torch.manual_seed(1)
    return torch.autograd.grad(both, given[:2], [torch.randn(y.shape).to(y.dtype) for y in both])


CASES = {
    "plain": {},
    "one batch of angles": {"batch": 1},
    "a rest": {"turned": 6},
    "odd extents": {"q": (3, 1, 7, 22), "heads": 5, "turned": 18},
    "no token": {"q": (2, 4, 0, 8)},
    "no head of k": {"heads": 0},
    "nothing turns": {"turned": 0},
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_against_f64(name, dtype, interleaved):
    for factor in (dtype, F32):
        given = operands(**CASES[name], dtype=dtype, factor=factor)
        both, expected = rotary.rope(*given, interleaved), theirs(*wide(given), interleaved)
        assert [y.dtype for y in both] == [dtype] * 2
        others = wide(given)
        expected = theirs(*others, interleaved)
        tolerance = 4 * torch.finfo(dtype).eps
        beside.close([*both, *gradients(both, given)], [*expected, *gradients(expected, others)], tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_it_is_no_further_from_f64_than_torch(dtype):
    given = [t.detach() for t in operands(q=(2, 4, 33, 64), dtype=dtype)]
    exact = theirs(*wide(given))
    for ours, other, right in zip(rotary.rope(*given), theirs(*given), exact, strict=True):
        assert (ours.double() - right).norm() < (other.double() - right).norm()
        assert (ours.double() - right).abs().max() <= (other.double() - right).abs().max()


def test_operands_that_lie_otherwise():
    """Views of (batch, tokens, heads, width), slices of a fused product, and outputs that lie as they do."""
    torch.manual_seed(0)
    fused = torch.randn(2, 5, 8 * 8, dtype=F64)
    q, k, _ = (x.unflatten(-1, (-1, 8)).transpose(1, 2) for x in fused.split([4 * 8, 2 * 8, 2 * 8], -1))
    cos, sin = torch.randn(5, 2, 8, dtype=F64).transpose(0, 1), torch.randn(2, 5, 16, dtype=F64)[..., ::2]
    for given in ((q, k, cos, sin), (q.flip(1), k, cos[:1].expand(2, 5, 8), sin)):
        both = rotary.rope(*given)
        beside.close(both, theirs(*given), 1e-14)
        assert [y.transpose(1, 2).is_contiguous() for y in both] == [True, True]


@pytest.mark.parametrize("dtype", beside.first_of(DTYPES), ids=str)
def test_opcheck(dtype):
    for turned, interleaved, adjoint in ((8, False, False), (6, True, True)):
        q, k, cos, sin = operands(turned=turned, dtype=dtype)
        torch.library.opcheck(rotary.ROPE.overload, (q, k, cos, sin, interleaved, adjoint))
        crossed = (q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(), k)
        torch.library.opcheck(rotary.ROPE.overload, (*crossed, cos, sin, interleaved, adjoint))


def test_gradcheck_of_it_and_of_its_gradient():
    *both, cos, sin = operands(q=(2, 2, 2, 8), heads=1, turned=6)
    for interleaved in (False, True):
        assert torch.autograd.gradcheck(lambda q, k: rotary.rope(q, k, cos, sin, interleaved), both)  # noqa: B023
        assert torch.autograd.gradgradcheck(lambda q, k: rotary.rope(q, k, cos, sin, interleaved), both)  # noqa: B023


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_and_export(dynamic):
    torch.compiler.reset()

    class Turned(torch.nn.Module):
        def forward(self, q, k, cos, sin):
            one, other = rotary.rope(q * 2, k, cos, sin)
            return one + 1, other

    model = Turned()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for tokens in (5, 7):
        given = operands(q=(2, 4, tokens, 8))
        both, expected = compiled(*given), model(*given)
        beside.close([*both, *gradients(both, given)], [*expected, *gradients(expected, given)], 1e-14)
    exported = torch.export.export(model, tuple(given))
    beside.close(exported.module()(*given), expected, 1e-14)


Q, ANGLES = torch.ones(2, 4, 5, 8), torch.ones(2, 5, 8)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((Q.long(), Q, ANGLES, ANGLES), "q: got a tensor of torch.int64"),
        ((Q, Q.half(), ANGLES, ANGLES), "k: got a tensor of torch.float16"),
        ((Q, Q, ANGLES.half(), ANGLES.half()), "cos: got a tensor of torch.float16; expected torch.float32"),
        ((Q, Q, ANGLES, ANGLES.half()), "sin: got a tensor of torch.float16"),
        ((Q[0], Q, ANGLES, ANGLES), "q: got shape"),
        ((Q, Q, Q, ANGLES), "cos: got shape"),
        ((Q, Q[:, :, :3], ANGLES, ANGLES), "k: got f32"),
        ((Q, Q, ANGLES[:, :3], ANGLES), "cos: got f32"),
        ((Q, Q, ANGLES[..., :3], ANGLES[..., :3]), "cos: got f32.*an even number"),
        ((Q, Q, ANGLES, ANGLES[..., :6]), "sin: got f32"),
        ((Q, Q, ANGLES.clone().requires_grad_(), ANGLES), "cos: got a tensor that requires a gradient"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(given, text):
    with pytest.raises(BadRequest, match=text):
        rotary.rope(*given)
