"""The views of tests/dispatch/test_views.py on a GPU, and on one whose memory a child maps."""

import importlib.util
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "dispatch" / "test_views.py"
spec = importlib.util.spec_from_file_location("the_views", SOURCE)
the_views = importlib.util.module_from_spec(spec)
spec.loader.exec_module(the_views)


@pytest.mark.parametrize("name", ["cuda:0", "shared cuda:0"])
def test_what_is_written_through_a_view_changes_its_elements_alone(name, rng):
    assert the_views.views(name, rng) > the_views.COUNT // 2


@pytest.mark.parametrize("name", ["cuda:0", "shared cuda:0"])
def test_what_may_not_be_written_is_refused(name):
    the_views.refusals(name)
