"""NaN, infinite, singular, indefinite, 1x1 and empty input of linear algebra on the GPU, as the docs say."""

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "dispatch" / "ops"


def loaded(name):
    spec = importlib.util.spec_from_file_location(f"the_host_s_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


the_host_s, of_nan = loaded("test_edges"), loaded("test_edges_nan")


def test_each_op_of_linear_algebra_does_with_such_input_as_its_docs_say(gpu):
    assert not list(the_host_s.complaints_of(gpu))


@pytest.mark.parametrize("dtype", ["f64", "f32"])
@pytest.mark.parametrize("call", of_nan.CALLS)
def test_a_nan_anywhere_is_in_each_result_of_its_matrix(call, dtype, gpu):
    """Of sizes that this library's kernels, cuBLAS's batched routines and cuSOLVER take, and by each that is named."""
    complaints = [one for shape in of_nan.SQUARE for one in of_nan.complaints_of(gpu, call, shape, dtype)]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("call", of_nan.TALL_OR_WIDE)
def test_a_nan_anywhere_in_an_oblong_matrix_is_in_each_result(call, gpu):
    shapes = [shape for shape in of_nan.OBLONG if shape[0] > shape[1] or "refined" not in call]
    complaints = [one for shape in shapes for one in of_nan.complaints_of(gpu, call, shape, "f64")]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("call", ["lu_factor(a)", "solve(a, b)", "inv(a)", "qr(a)", 'lstsq(a, b, driver="gels")'])
def test_a_nan_anywhere_in_a_complex_matrix_is_in_each_result(call, gpu):
    complaints = [one for shape in of_nan.SQUARE for one in of_nan.complaints_of(gpu, call, shape, "c64")]
    assert not complaints, "\n".join(complaints)
