"""A mask that several layers are given is converted once; and anew where anything about it changed."""

import gc

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from dispatch.torch import masks  # noqa: E402

DTYPE = torch.bfloat16


@pytest.fixture(autouse=True)
def state(monkeypatch):
    """Streams and captures as a test says, and the count of conversions."""
    found = {"stream": 7, "captured": False, "converted": 0}
    convert = masks._convert

    def counted(*given):
        found["converted"] += 1
        return convert(*given)

    monkeypatch.setattr(masks, "on_gpu", lambda _: True)
    monkeypatch.setattr(masks, "_stream", lambda _: found["stream"])
    monkeypatch.setattr(masks, "_captured", lambda: found["captured"])
    monkeypatch.setattr(masks, "_convert", counted)
    monkeypatch.setattr(masks, "_last", masks._Last())
    return found


def mask(seed=0):
    torch.manual_seed(seed)
    found = torch.rand(2, 1, 5, 6) > 0.5
    found[0, 0, 2] = False
    return found


def right(m):
    """Whether what is added, and which queries see nothing, are those of the mask as it is."""
    bias, blind = masks.added(m, DTYPE, 5, 6)
    seen = (bias == 0) if m.dtype == torch.bool else torch.isclose(bias, m.clamp(min=-1e30))
    nothing = ~m.any(-1, keepdim=True) if m.dtype == torch.bool else (m == -torch.inf).all(-1, keepdim=True)
    return torch.equal(seen, m if m.dtype == torch.bool else torch.ones_like(seen)) and torch.equal(blind, nothing)


def test_one_mask_is_converted_once(state):
    m = mask()
    assert all(right(m) for _ in range(8))
    assert state["converted"] == 1


@pytest.mark.parametrize("numbers", [False, True])
def test_a_write_is_seen(state, numbers):
    m = mask()
    if numbers:
        m = torch.zeros(m.shape, dtype=DTYPE).masked_fill_(~m, -torch.inf)
    assert right(m)
    m[1, 0, 3] = -torch.inf if numbers else False
    assert right(m)
    assert state["converted"] == 2


def test_another_stream_dtype_extent_or_mask_is_converted_anew(state):
    m, other = mask(), mask(1)
    for _ in range(2):
        assert right(m)
        assert right(other)
    assert state["converted"] == 4
    assert right(m)
    state["stream"] = 8
    assert right(m)
    masks.added(m, torch.float16, 5, 6)
    row = m[:, :, :1]
    assert masks.added(row, DTYPE, 5, 6)[0].shape == (2, 1, 5, 6)
    assert masks.added(row, DTYPE, 9, 6)[0].shape == (2, 1, 9, 6)
    assert state["converted"] == 9


def test_a_mask_that_is_gone_keeps_nothing():
    m = mask()
    right(m)
    assert masks._last.found is not None
    del m
    gc.collect()
    assert masks._last.found is None


def test_what_was_converted_before_a_capture_is_not_used_in_it_nor_behind_it(state):
    m = mask()
    assert right(m)
    state["captured"] = True
    with masks.kept_in_a_capture():
        assert all(right(m) for _ in range(3))
        assert state["converted"] == 2
    assert right(m)  # a capture of the caller's, whose end nobody tells
    assert right(m)
    assert state["converted"] == 4
    state["captured"] = False
    assert right(m)
    assert state["converted"] == 5


def test_masks_with_gradients_or_of_inference_mode_are_converted_each_time(state):
    m = torch.zeros(2, 1, 5, 6, dtype=DTYPE, requires_grad=True)
    for _ in range(2):
        bias, _ = masks.added(m, DTYPE, 5, 6)
        assert bias.requires_grad
    with torch.inference_mode():
        m = mask()
        assert right(m)
        m[0] = True
        assert right(m)
    assert state["converted"] == 4
