"""Arrays of the other byte order: what copies converts, as NumPy does; what does not is refused with what to do."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest

OTHER = np.dtype(np.float32).newbyteorder()
DTYPES = [np.dtype(code).newbyteorder() for code in ("f8", "f4", "f2", "i4", "u4", "i8", "u8", "c8", "c16")]


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_array_is_converted_where_it_is_copied(dev, dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    made = dev.array(array)
    assert made.dtype.numpy == dtype.newbyteorder("=")
    np.testing.assert_array_equal(made.numpy(), array)
    np.testing.assert_array_equal(dev.zeros((2, 3), made.dtype).copy_from(array).numpy(), array)
    np.testing.assert_array_equal(dev.array(array.T[::-1]).numpy(), array.T[::-1])
    assert dev.array(array, "c128").tolist() == array.astype(np.complex128).tolist()


def test_weights_of_a_bound_call_have_the_very_same_dtype(dev):
    call = dp.prepare(dp.MatmulRequest(dev.zeros((4, 4)), dev.zeros((4, 4))))
    with pytest.raises(BadRequest, match="got >f4"):
        call.refit(np.ones((4, 4), OTHER))


@pytest.mark.parametrize(("dtype", "to"), [("i2", "i32"), ("u2", "i32"), (np.longdouble, "f64")])
def test_dtypes_that_no_library_has_say_what_to_convert_to(dev, dtype, to):
    for order in ("=", "S"):
        array = np.ones(3, np.dtype(dtype).newbyteorder(order))
        with pytest.raises(BadRequest, match=f"dev.array\\(x, '{to}'\\)"):
            dev.array(array)
        np.testing.assert_array_equal(dev.array(array, to).numpy(), array)


def test_as_an_operand_it_is_refused_and_told_how_to_convert(dev):
    x = np.ones((4, 4), OTHER)
    for call in (lambda: dp.matmul(x, x), lambda: dp.softmax(dev.zeros((4, 4)), out=x), lambda: dp.softmax(x)):
        with pytest.raises(BadRequest, match=r"the other byte order; .*x\.astype\(x\.dtype\.newbyteorder\('='\)\)"):
            call()
    dp.matmul(x.astype(x.dtype.newbyteorder("=")), np.ones((4, 4), np.float32))


@pytest.mark.parametrize("spec", [OTHER, str(OTHER), OTHER.str])
def test_no_memory_is_made_in_it(dev, spec):
    for call in (
        lambda: dev.empty(3, spec),
        lambda: dev.array([1.0], spec),
        lambda: dev.zeros(3).astype(spec),
        lambda: dp.matmul(dev.zeros((4, 4)), dev.zeros((4, 4)), out_dtype=spec),
    ):
        with pytest.raises(BadRequest, match="this machine's byte order"):
            call()
