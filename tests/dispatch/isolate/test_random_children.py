"""Random numbers in child processes: those of the seed, whoever carries a request out, and after a child has died."""

import contextlib

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import WorkerFailed


def draws(rng):
    """Requests of several kinds, each behind the one before."""
    return [
        *(rng.requests.random(size) for size in (3, 50)),
        rng.requests.normal(0, 1, (4, 7)),
        rng.requests.gamma(2.5, size=11),
        rng.requests.choice(3, 9, p=[0.2, 0.3, 0.5]),
        rng.requests.permutation(12),
    ]


def test_children_draw_the_numbers_of_the_seed_also_after_one_was_replaced(trouble, tmp_path):
    right = [dp.run(request).numpy().copy() for request in draws(dp.random.Generator(5, device="host"))]
    for streams in (1, 2):
        once = str(tmp_path / f"once{streams}")
        with dp.Supervisor("host", isolation="process", streams=streams, setup=(trouble.__name__,)) as sup:
            asked = draws(dp.random.Generator(5, device=sup.device))
            first = [sup.submit(request) for request in asked[:3]]
            x = sup.device.zeros(8)
            dying = sup.submit(trouble.Trouble("die once", x, sup.device.zeros(8), once=once))
            later = [sup.submit(request) for request in asked[3:]]
            with contextlib.suppress(WorkerFailed):  # it may be carried out again, and then does nothing
                dying.result()
            for future, numbers in zip([*first, *later], right, strict=True):
                np.testing.assert_array_equal(future.result().numpy(), numbers)
            for request, numbers in zip(reversed(asked), reversed(right), strict=True):
                np.testing.assert_array_equal(sup.submit(request).result().numpy(), numbers)


@pytest.mark.parametrize("children", [1, 3])
def test_spawned_generators_give_the_same_however_many_workers_there_are(children):
    def numbers(streams):
        with dp.Supervisor("host", streams=streams) as sup:
            asked = [rng.requests.standard_normal(100) for rng in dp.random.Generator(8, device="host").spawn(6)]
            return [future.result().numpy() for future in [sup.submit(request) for request in asked]]

    np.testing.assert_array_equal(numbers(children), numbers(2))
