"""Which GPU each of several processes of `make test-gpu` sees."""

import importlib.util
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("conftest_of_all", Path(__file__).with_name("conftest.py"))
conftest = importlib.util.module_from_spec(spec)
spec.loader.exec_module(conftest)


@pytest.mark.parametrize(
    ("worker", "visible", "gpus", "expected"),
    [
        ("gw0", None, 2, "0"),
        ("gw3", None, 2, "1"),
        ("gw5", "2,7,GPU-4f", 8, "GPU-4f"),
        ("gw1", "3", 8, "3"),
        ("gw1", None, 0, None),
        ("", None, 2, None),  # a single process has all
        ("", "1", 2, None),
    ],
)
def test_processes_take_the_gpus_in_turn(worker, visible, gpus, expected):
    assert conftest.gpu_of(worker, visible, gpus) == expected


def test_what_needs_several_gpus_is_there():
    assert all(path.exists() for path in conftest.NEEDS_SEVERAL)
