"""What is taken for a time, at every place where a user gives one, and how often workers may break."""

from __future__ import annotations

import math
import threading
from fractions import Fraction

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest
from dispatch.supervise.limits import LONGEST, RestartLimit, check_seconds

NO_TIME = [math.nan, math.inf, -math.inf, np.float32("nan"), "1", b"1", True, False, np.True_, 1j, [1], {}, object]
PATIENCE = 120


@pytest.mark.parametrize("given", [0, 0.0, 1, 2.5, np.float32(3), np.int8(4), Fraction(1, 3), 1e-300])
def test_numbers_of_seconds_are_taken_as_they_are(given):
    assert check_seconds("timeout", given) == float(given)


@pytest.mark.parametrize("given", [1e300, 10**200, LONGEST * 2])
def test_what_no_system_can_wait_for_is_the_longest_time(given):
    assert check_seconds("timeout", given) == LONGEST


@pytest.mark.parametrize("given", [*NO_TIME, None, 10**400, -1, -1e-9], ids=repr)
def test_what_is_no_time_is_named(given):
    with pytest.raises(BadRequest, match=r"^timeout: got .* expected a finite number of seconds, 0 or more"):
        check_seconds("timeout", given)


def test_a_time_above_zero_is_not_zero():
    with pytest.raises(BadRequest, match="above 0"):
        check_seconds("hang_seconds", 0, above=True)
    assert check_seconds("left", -3, -math.inf) == -3


@pytest.mark.parametrize("name", ["max_seconds", "hang_seconds"])
@pytest.mark.parametrize("given", [*NO_TIME, -1], ids=repr)
def test_a_supervisor_refuses_what_is_no_time_before_it_starts_anything(name, given):
    with pytest.raises(BadRequest, match=f"^{name}: got"):
        dp.Supervisor("host", **{name: given})


@pytest.mark.parametrize("given", [*NO_TIME, -1], ids=repr)
def test_a_bad_timeout_costs_its_own_call_only(probe, given):
    with dp.Supervisor("host", streams=1) as sup:
        with pytest.raises(BadRequest, match=r"^timeout: got"):
            sup.submit(probe(), timeout=given)
        future = sup.submit(probe(lambda: 3), timeout=1e300)
        assert future.result(PATIENCE) == 3


@pytest.mark.parametrize("given", NO_TIME, ids=repr)
@pytest.mark.parametrize("ask", ["result", "exception"])
def test_a_bad_time_to_wait_is_refused_and_the_request_goes_on(probe, ask, given):
    gate = threading.Event()
    with dp.Supervisor("host", streams=1) as sup:
        future = sup.submit(probe(lambda: gate.wait(PATIENCE)))
        with pytest.raises(BadRequest, match=r"^timeout: got"):
            getattr(future, ask)(given)
        with pytest.raises(TimeoutError):
            getattr(future, ask)(-1)  # what is left of a time may be less than nothing
        gate.set()
        assert future.result(1e300) is True


# -- how often something may break ------------------------------------------------------------------------------------
def test_breaks_and_failed_starts_are_counted_together():
    limit = RestartLimit(2, 1000, None)
    assert [limit.count(), limit.count(failed_start=True), limit.count()] == [True, True, False]


def test_starts_that_fail_in_a_row_open_the_circuit_however_long_each_takes():
    limit = RestartLimit(2, 0, None)
    assert [limit.count(failed_start=True) for _ in range(3)] == [True, True, False]
    limit.started()
    assert limit.count(failed_start=True)


def test_only_starts_that_failed_are_waited_after_and_ever_longer():
    limit = RestartLimit(100, 1000, None)
    limit.count()
    delays = [limit.delay]
    for _ in range(100):
        limit.count(failed_start=True)
        delays.append(limit.delay)
    assert delays[:4] == [0, 0.05, 0.1, 0.2]
    assert delays == sorted(delays)
    assert delays[-1] == 2.0


@pytest.mark.parametrize("restarts", [0, 1, 3])
def test_a_half_open_circuit_has_one_try(restarts):
    limit = RestartLimit(restarts, 1000, 5)
    limit.half_open()
    assert not limit.count(failed_start=True)
    limit.half_open()
    limit.started()
    assert not limit.count()
    assert "cooldown=5" in limit.describe()
