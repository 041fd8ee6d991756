"""NaN, infinite, singular, indefinite, 1x1 and empty input of linear algebra on the GPU, as the docs say."""

import importlib.util
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "dispatch" / "ops" / "test_edges.py"
spec = importlib.util.spec_from_file_location("the_host_s_edges", SOURCE)
the_host_s = importlib.util.module_from_spec(spec)
spec.loader.exec_module(the_host_s)


def test_each_op_of_linear_algebra_does_with_such_input_as_its_docs_say(gpu):
    assert not list(the_host_s.complaints_of(gpu))
