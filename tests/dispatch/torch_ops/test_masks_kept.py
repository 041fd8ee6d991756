"""A mask that several layers are given is converted once in a recording; anew where it changed, outside each time."""

import threading

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from dispatch.torch import masks  # noqa: E402

DTYPE = torch.bfloat16


@pytest.fixture
def converted(monkeypatch):
    """The masks that were converted."""
    found, convert = [], masks._convert

    def counted(*given):
        found.append(given[0])
        return convert(*given)

    monkeypatch.setattr(masks, "_convert", counted)
    return found


def mask(seed=0):
    torch.manual_seed(seed)
    found = torch.rand(2, 1, 5, 6) > 0.5
    found[0, 0, 2] = False
    return found


def right(m):
    """Whether what is added, and which queries see nothing, are those of the mask as it is."""
    bias, blind = masks.additive_mask(m, DTYPE, 5, 6)
    seen = (bias == 0) if m.dtype == torch.bool else torch.isclose(bias, m.clamp(min=-1e30))
    nothing = ~m.any(-1, keepdim=True) if m.dtype == torch.bool else (m == -torch.inf).all(-1, keepdim=True)
    return torch.equal(seen, m if m.dtype == torch.bool else torch.ones_like(seen)) and torch.equal(blind, nothing)


def test_one_mask_is_converted_once(converted):
    m = mask()
    with masks.cached_during_capture():
        assert all(right(m) for _ in range(8))
    assert len(converted) == 1


@pytest.mark.parametrize("numbers", [False, True])
def test_a_write_is_seen(converted, numbers):
    m = mask()
    if numbers:
        m = torch.zeros(m.shape, dtype=DTYPE).masked_fill_(~m, -torch.inf)
    with masks.cached_during_capture():
        assert right(m)
        m[1, 0, 3] = -torch.inf if numbers else False
        assert right(m)
    assert len(converted) == 2


def test_another_dtype_extent_or_mask_is_converted_anew(converted):
    m, other = mask(), mask(1)
    row = m[:, :, :1]
    with masks.cached_during_capture():
        for _ in range(2):
            assert right(m)
            assert right(other)
            masks.additive_mask(m, torch.float16, 5, 6)
            assert masks.additive_mask(row, DTYPE, 5, 6)[0].shape == (2, 1, 5, 6)
            assert masks.additive_mask(row, DTYPE, 9, 6)[0].shape == (2, 1, 9, 6)
    assert len(converted) == 5


def test_masks_that_are_made_and_dropped_one_after_another_are_not_taken_for_each_other(converted):
    with masks.cached_during_capture():
        assert all(right(mask(seed)) for seed in range(50))
    assert len(converted) == 50


def test_nothing_is_kept_before_and_behind_a_recording_nor_by_other_threads(converted):
    m = mask()
    assert right(m)
    m.data[0] = ~m[0]  # which torch does not count, as it does not what a CUDA graph writes
    assert right(m)
    with masks.cached_during_capture():
        assert right(m)
        thread = threading.Thread(target=lambda: [right(m) for _ in range(3)])
        thread.start()
        thread.join()
    assert masks._capture_cache.converted is None
    with masks.cached_during_capture():
        assert right(m)
    assert right(m)
    assert len(converted) == 8


def test_an_error_ends_it():
    with pytest.raises(RuntimeError), masks.cached_during_capture():
        masks.additive_mask(mask(), DTYPE, 7, 6)  # to whose queries it does not expand
    assert masks._capture_cache.converted is None


def test_what_inference_mode_made_is_converted_each_time_for_its_changes_are_not_counted(converted):
    with torch.inference_mode(), masks.cached_during_capture():
        m = mask()
        assert right(m)
        m[0] = True
        assert right(m)
    assert len(converted) == 2
