"""Rotary embedding on the GPU: every row through its cases, and against torch's, as one kernel beside its many."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.keys import HOST
from dispatch.ops.rope.cases import cases

ROWS = [row for row in dp.TABLE.of("rope") if row.min_arch != HOST]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_a_case_or_refuses_it_with_its_reason(row, case, try_row):
    try_row(row, case)


def turned(x, cos, sin):
    torch = pytest.importorskip("torch")
    low, high = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-high, low), -1) * sin[:, None]


def operands(tokens, dtype, width=64):
    torch = pytest.importorskip("torch")
    torch.manual_seed(tokens)
    fused = torch.randn(4, tokens, 16 + 8 + 8, width, device="cuda", dtype=dtype)
    q, k, _ = (part.transpose(1, 2) for part in fused.split([16, 8, 8], 2))
    return [q, k, *(torch.randn(4, tokens, width, device="cuda", dtype=dtype) for _ in range(2))]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 7, 512])
def test_slices_of_a_fused_product_are_no_further_off_than_torch(tokens, dtype):
    torch = pytest.importorskip("torch")
    given = operands(tokens, getattr(torch, dtype))
    exact = [turned(x.double(), *(t.double() for t in given[2:])) for x in given[:2]]
    for number in range(3):  # learnt, remembered, and once more
        both = dp.rope(*given) if number else dp.rope(*(dp.from_dlpack(x) for x in given))
        for ours, right, x in zip(both, exact, given, strict=False):
            found = torch.from_dlpack(ours).double()
            if dtype == "float64":  # `right` is rounded as often as ours is
                assert (found - right).norm() <= 2**-52 * right.norm()
                continue
            # What torch rounds three times, an f32 of ours is rounded twice: one element may be either's.
            allowed = (turned(x, *given[2:]).double() - right).norm()
            assert (found - right).norm() <= allowed * (1.1 if dtype == "float32" else 1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_calls_of_torch_with_and_without_a_gradient(dtype):
    torch = pytest.importorskip("torch")
    rope = pytest.importorskip("dispatch.torch").rope
    for tokens in (33, 34, 33, 34, 33):
        q, k, cos, sin = operands(tokens, getattr(torch, dtype))
        both = [x.clone().requires_grad_() for x in (q, k)]
        plain, followed = rope(q, k, cos, sin), rope(*both, cos, sin)
        assert all(torch.equal(*pair) for pair in zip(plain, followed, strict=True))
        wide = [x.detach().double().requires_grad_() for x in both]
        expected = [turned(x, cos.double(), sin.double()) for x in wide]
        dy = [torch.randn_like(y) for y in plain]
        found, wanted = (
            torch.autograd.grad(followed, both, dy),
            torch.autograd.grad(expected, wide, [d.double() for d in dy]),
        )
        for one, other in zip([*followed, *found], [*expected, *wanted], strict=True):
            assert (one.double() - other).norm() <= torch.finfo(one.dtype).eps * other.norm()


def test_a_gpu_gives_the_hosts_results(gpu, rng):
    shapes = ((2, 3, 5, 16), (2, 2, 5, 16), (1, 5, 10), (1, 5, 10))
    arrays = [rng.standard_normal(shape) for shape in shapes]
    for choices in ({}, {"interleaved": True}, {"adjoint": True}):
        there, here = (dp.rope(*map(device.array, arrays), **choices) for device in (gpu, dp.device("host")))
        for one, other in zip(there, here, strict=True):
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-14, atol=1e-14)
