"""What `cancel` promises where workers live in a child: True, and it never runs; False, and it ends as ever."""

import concurrent.futures

import numpy as np
import pytest

import dispatch as dp
from dispatch.supervise.process import sending

PATIENCE = 120  # seconds, on a machine that has other things to do


@pytest.fixture
def sup(trouble):
    made = dp.Supervisor("host", isolation="process", streams=1, setup=(trouble.__name__,))
    yield made
    made.close()
    made.device.close()


def copies(sup, trouble, count):
    """Requests that each fill an output of their own with ones."""
    ones = sup.device.array(np.ones(8, np.float32))
    return [trouble.Trouble("fine", ones, sup.device.zeros(8)) for _ in range(count)]


@pytest.mark.parametrize(
    ("count", "is_list", "sent"),
    [(3, True, 3), (10, False, sending.MIN_IN_FLIGHT - 1), (300, True, sending.WINDOW - 1)],
)
def test_what_was_sent_runs_and_what_was_not_never_does(sup, trouble, tmp_path, count, is_list, sent):
    requests = copies(sup, trouble, count)
    with trouble.Hold(tmp_path) as hold:
        held = sup.submit(trouble.Trouble("held", sup.device.zeros(8), sup.device.zeros(8), hold.once))
        futures = sup.submit_many(requests) if is_list else [sup.submit(request) for request in requests]
        cancelled = [future.cancel() for future in futures]
        assert [future.cancelled() for future in futures] == cancelled
        hold.release()
    held.result(PATIENCE)
    assert not concurrent.futures.wait(futures, PATIENCE).not_done
    assert cancelled.count(False) <= sent
    assert cancelled == sorted(cancelled), "those of the end are those that wait"
    for request, future, was_cancelled in zip(requests, futures, cancelled, strict=True):
        if was_cancelled:
            with pytest.raises(concurrent.futures.CancelledError):
                future.result()
        else:
            assert future.result() is request.out
        assert (request.out.numpy() == (0 if was_cancelled else 1)).all()
    assert sup.stats().cancelled == cancelled.count(True)


def test_what_was_cancelled_does_not_run_in_the_next_child_either(sup, trouble, tmp_path):
    requests = copies(sup, trouble, 40)
    die = trouble.Trouble("die once", requests[0].a, sup.device.zeros(8), str(tmp_path / "died"))
    with trouble.Hold(tmp_path) as hold:
        sup.submit(trouble.Trouble("held", die.a, sup.device.zeros(8), hold.once))
        sup.submit(die)
        futures = sup.submit_many(requests)
        cancelled = [future.cancel() for future in futures]
        hold.release()
    assert not concurrent.futures.wait(futures, PATIENCE).not_done
    assert [int(request.out.numpy()[0]) for request in requests] == [1 - was for was in cancelled]
    assert sup.stats().restarts == 1
