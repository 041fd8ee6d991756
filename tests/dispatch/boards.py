"""How long an answer of a board is waited for in tests, and the name of a board of this process."""

import os

import pytest

from dispatch.supervise import status_server as status

TIMEOUT = 120  # seconds, on a machine that has other things to do


@pytest.fixture(autouse=True)
def _time_to_answer(monkeypatch):
    """Whether an answer comes must not depend on how busy the machine is."""
    monkeypatch.setattr(status, "TIMEOUT", float(TIMEOUT))


def own_name(number):
    return f"\0{status.PREFIX}-{os.getpid()}-{number}"
