"""Tensors as people write NumPy: what works gives what NumPy gives, and what does not says what to use instead."""

import copy
import operator
import pickle

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadIndex, BadRequest, BadType, OutOfRange, StaleTensor

DTYPES = [*dp.Dtype.by_name]


@pytest.fixture
def dev():
    return dp.device("host")


def some(rng, shape, dtype="f32"):
    kind = dp.Dtype.by_name[dtype].numpy
    low, high = (1, 7) if dtype == "e8m0" else (0, 2) if dtype == "bool" else (0, 7)  # e8m0 has no zero
    return rng.integers(low, high, shape).astype(np.float32).astype(kind)


def bits(array):
    return np.ascontiguousarray(array).tobytes()


def a_shape(rng, size):
    """A shape of so many elements, with -1 in place of an extent now and then."""
    shape = []
    while size > 1 and rng.random() < 0.8:
        factor = int(rng.choice([n for n in range(1, size + 1) if size % n == 0]))
        shape.append(factor)
        size //= factor
    shape = [*shape, size]
    if rng.random() < 0.4:
        shape[int(rng.integers(len(shape)))] = -1
    return tuple(shape)


def test_reshape_gives_numpys_view_or_refuses_where_numpy_copies(dev, rng):
    seen = {"view": 0, "copy": 0, "wrong": 0}
    for _ in range(3000):
        shape = tuple(int(n) for n in rng.integers(1, 5, int(rng.integers(0, 4))))
        model = some(rng, shape)
        tensor = dev.array(model)
        if rng.random() < 0.5 and model.ndim > 1:
            axes = tuple(int(axis) for axis in rng.permutation(model.ndim))
            model, tensor = model.transpose(axes), tensor.transpose(axes)
        if rng.random() < 0.3 and model.ndim:
            model, tensor = model[::-2], tensor[::-2]
        wanted = a_shape(rng, model.size) if rng.random() < 0.9 else (model.size + 1,)
        try:
            view = model.reshape(wanted)
        except ValueError:
            kind = "wrong"
        else:
            kind = "view" if np.shares_memory(view, model) else "copy"
        seen[kind] += 1
        if kind != "view":
            with pytest.raises(BadRequest, match="view of"):
                tensor.reshape(wanted)
            continue
        for got in (tensor.reshape(wanted), tensor.reshape(*wanted)):
            np.testing.assert_array_equal(got.numpy(), view)
            assert (got.shape, got.strides) == (view.shape, view.strides)
    assert all(count > 50 for count in seen.values()), seen


def test_of_no_elements_every_shape_of_none_is_a_view(dev):
    for wanted in ((0,), (0, 5), (3, 0), (7, 0, 2)):
        assert dev.zeros((0, 3)).reshape(wanted).shape == wanted
    assert dev.zeros(6).reshape((2, -1)).shape == dev.zeros(6).reshape([3, 2]).T.shape == (2, 3)
    assert dev.zeros(()).reshape(1, 1).shape == (1, 1)
    assert dev.zeros(6).reshape(6).shape == dev.zeros((2, 3)).reshape(-1).shape == (6,)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_and_conversions_are_numpys(dev, rng, dtype):
    model = some(rng, (4, 6), dtype)
    tensor = dev.array(model)
    views = [(tensor, model)]
    if tensor.dtype.bits >= 8:
        views += [(tensor.T, model.T), (tensor[::-1, ::2], model[::-1, ::2]), (tensor[1:1], model[1:1])]
    for view, part in views:
        for other in (view.copy(), copy.copy(view), copy.deepcopy(view), pickle.loads(pickle.dumps(view))):
            assert bits(other.numpy()) == bits(part)
            assert (other.dtype, other.shape, other.storage is view.storage) == (view.dtype, view.shape, False)
        assert copy.deepcopy(view).strides == view.strides
        assert view.copy().layout.is_contiguous
        assert view.tolist() == part.tolist()
        assert view.astype(view.dtype, copy=False) is view
        assert bits(view.astype(dtype).numpy()) == bits(part)
        assert bits(view.astype("c128").numpy()) == bits(part.astype(np.complex128))
        if not view.dtype.is_complex:
            for to in ("f64", "i32", "bf16", np.float16, bool):
                kind = dp.Dtype.of(to).numpy
                assert bits(view.astype(to).numpy()) == bits(part.astype(kind))
    assert [view.tolist() for view in tensor] == model.tolist()
    assert len(tensor) == 4


def test_requests_are_copied_and_pickled_with_memory_of_their_own(dev, rng):
    a, b, c = some(rng, (4, 6)), some(rng, (5, 6)), some(rng, (4, 5))
    d = dev.array(c)
    request = dp.MatmulRequest(dev.array(a), dev.array(b).T, c=d, out=d, epilogue=dp.Epilogue.RELU)
    square = dev.array(some(rng, (16, 16)), "f8e4m3")
    scaled = dp.MatmulRequest(square, square.T, scales=dp.Scales(a=dev.array([2.0], "f32")))
    both = dev.array(a)
    halves = dp.MatmulRequest(both[:2], both[2:].T)
    for made in (copy.deepcopy, lambda request: pickle.loads(pickle.dumps(request))):
        other = made(request)
        assert other.c is other.out
        assert other.out is not d
        assert other.key() == request.key()
        np.testing.assert_array_equal(dp.run(other).numpy(), np.maximum(a @ b.T + c, 0))
        np.testing.assert_array_equal(d.numpy(), c)
        assert made(dp.MatmulRequest(dev.array(a), dev.array(b).T)).scales is dp.MatmulRequest(both, both.T).scales
        np.testing.assert_array_equal(dp.run(made(scaled)).numpy(), dp.run(scaled).numpy())
        other = made(halves)
        assert other.a.storage is other.b.storage is not both.storage
        np.testing.assert_array_equal(dp.run(other).numpy(), a[:2] @ a[2:].T)
    assert copy.copy(request).out is d


def test_what_numpy_owns_is_copied_as_far_as_the_view_goes():
    line = np.arange(12, dtype=np.float32)
    for view in (line, line[::-2], line.reshape(3, 4).T[1:]):
        tensor = dp.from_dlpack(view)
        for made in (copy.copy(tensor), copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
            np.testing.assert_array_equal(made.numpy(), view)
            made.copy_from(np.zeros(view.shape, np.float32))
    np.testing.assert_array_equal(line, np.arange(12))


def test_a_tensor_of_a_closed_device_is_not_copied(dev):
    tensor = dev.zeros(3)
    dev.close()
    for way in (copy.copy, copy.deepcopy, pickle.dumps, dp.Tensor.copy):
        with pytest.raises(StaleTensor):
            way(tensor)


def test_a_product_is_numpys_vectors_and_batches_too(dev, rng):
    for one, other in [
        ((4, 6), (6, 5)), ((6,), (6,)), ((4, 6), (6,)), ((6,), (6, 5)), ((3, 4, 6), (6, 5)), ((3, 4, 6), (6,)),
        ((6,), (2, 6, 5)), ((2, 1, 4, 6), (3, 6, 5)),
    ]:  # fmt: skip
        a, b = some(rng, one), some(rng, other)
        got = dev.array(a) @ dev.array(b)
        assert isinstance(got, dp.Tensor)
        assert got.shape == (a @ b).shape
        np.testing.assert_array_equal(got.numpy(), a @ b)
    x = dev.zeros((2, 2))
    with pytest.raises(BadRequest):
        x @ dev.zeros((3, 2))
    with pytest.raises(BadRequest, match="at least one axis"):
        x @ x[0, 0]
    for other in (np.zeros((2, 2)), np.float32(2), [[1, 2], [3, 4]], 3):
        for a, b in ((x, other), (other, x)):
            with pytest.raises(TypeError, match=r"dev\.array\(x\)"):
                a @ b


BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and_", "or_", "xor"]
BINARY += ["lt", "le", "gt", "ge", "eq", "ne"]


@pytest.mark.parametrize("name", [*BINARY, "iadd", "isub", "imul", "itruediv"])
def test_elementwise_operators_say_what_to_use(dev, name):
    x = dev.zeros(3)
    for other in (x, 2.0, np.float32(2), np.zeros(3)):
        with pytest.raises(TypeError, match=r"numpy\(\)"):
            getattr(operator, name)(x, other)
        if name in BINARY:
            with pytest.raises(TypeError, match=r"numpy\(\)"):
                getattr(operator, name)(other, x)


@pytest.mark.parametrize("name", ["neg", "pos", "abs", "invert"])
def test_operators_of_one_say_what_to_use(dev, name):
    with pytest.raises(TypeError, match=r"NumPy's own on a\.numpy\(\)"):
        getattr(operator, name)(dev.zeros(3))


def test_the_requests_that_are_named_are_there(dev):
    """`a + b` names a mode of cuDNN's graphs, and np.add.reduce an operation of dispatch.reduce."""
    x = dev.array([1.0, -2.0, 3.0], "f32").reshape(1, 1, 3)
    graph = dp.cudnn.Graph()
    nodes = [graph.tensor(name, (1, 1, 3), "f32") for name in "xy"]
    graph.output("out", graph.pointwise("ADD", *nodes), "f32")
    assert graph(x=x, y=x).tolist() == [[[2, -4, 6]]]
    with pytest.raises(TypeError, match=r"dispatch\.reduce with ReduceOp\.ADD"):
        np.add.reduce(x)
    for call in (lambda: np.add(x, x), lambda: np.exp(x), lambda: np.ones(3) + x, lambda: np.float64(2) * x):
        with pytest.raises(TypeError, match=r"does not accept a Tensor.*\.numpy\(\)"):
            call()


def test_equality_is_never_that_of_identities_in_silence(dev):
    x, y = dev.zeros(3), dev.zeros(3)
    with pytest.raises(TypeError, match=r"np\.array_equal.*`a is b`"):
        _ = x == y
    with pytest.raises(TypeError):
        [x].index(y)
    assert [x].index(x) == 0
    assert not operator.eq(x, None)
    assert x != "a string"
    assert {x: 1, y: 2}[x] == 1
    assert len({x, y, x}) == 2


def test_one_element_is_a_number_and_others_are_not(dev):
    for value in (0, 1, 2.5, -1):
        for shape in ((), (1,), (1, 1)):
            one = dev.array(np.full(shape, value), "f32")
            assert (float(one), int(one), complex(one), bool(one)) == (value, int(value), value, bool(value))
            assert one.item() == value
            assert f"{one:.2f}" == f"{value:.2f}"
    several = dev.zeros(3)
    for kind in (float, int, complex):
        with pytest.raises(TypeError, match="one element"):
            kind(several)
    for many in (several, dev.zeros(0)):
        with pytest.raises(ValueError, match="one element"):
            bool(many)
        with pytest.raises(ValueError, match="one element"):
            many.item()


def test_indexing_that_copies_says_what_to_do(dev):
    x = dev.zeros((3, 4))
    for index in ([0, 1], np.array([0]), np.ones((3, 4), bool), True, x, "a", 1.5, (0, [1])):
        with pytest.raises(BadType, match=r"x\.numpy\(\)\[index\]") as caught:
            x[index]
        assert isinstance(caught.value, TypeError)
    with pytest.raises(BadIndex):
        x[3]
    with pytest.raises(TypeError, match=r"copy_from"):
        x[0] = 1
    with pytest.raises(TypeError, match=r"item\(\)"):
        iter(x[0, 0])


def test_strides_are_bytes_and_element_strides_elements(dev):
    x = dev.zeros((3, 4), "f64").T
    assert (x.strides, x.element_strides) == ((8, 32), (1, 4))
    assert "element strides (1, 4)" in str(x.layout)
    assert "element strides (1, 4)" in repr(x)


def test_a_view_goes_nowhere_beyond_its_memory(dev, rng):
    model = some(rng, (24,))
    whole = dev.array(model)
    memory = dp.from_dlpack(model)
    made = refused = 0
    for _ in range(2000):
        shape = tuple(int(n) for n in rng.integers(0, 5, int(rng.integers(1, 4))))
        strides = tuple(int(n) for n in rng.integers(-8, 9, len(shape)))
        offset = int(rng.integers(-2, 26))
        places = offset + sum(n * s for n, s in zip(np.indices(shape), strides, strict=True))
        for tensor in (whole, memory):
            if np.size(places) and not 0 <= np.min(places) <= np.max(places) < 24:
                with pytest.raises(BadRequest, match="within"):
                    tensor.strided(shape, strides, offset)
                refused += 1
            else:
                np.testing.assert_array_equal(tensor.strided(shape, strides, offset).numpy(), model[places])
                made += 1
    assert min(made, refused) > 500
    wrong = dp.Tensor(whole.storage, whole.ptr, dev.layout(whole.dtype, (24,), whole.strides, whole.ptr))
    for use in (wrong.numpy, lambda: dp.softmax(wrong.reshape(1, 24)), lambda: wrong.copy_from(np.zeros(24))):
        with pytest.raises(BadRequest, match="a layout's strides count elements"):
            use()


def test_an_array_of_another_dtype_is_no_array_without_a_copy(dev):
    t = dev.array([1.5, 2.5], "f64")
    with pytest.raises(ValueError, match="f64 tensor on host cannot become one of float32 in NumPy without a copy"):
        np.array(t, dtype="f4", copy=False)
    assert np.array(t, dtype="f8", copy=False).ctypes.data == np.array(t, copy=False).ctypes.data == t.ptr
    np.testing.assert_array_equal(np.asarray(t, dtype="f4"), np.float32([1.5, 2.5]))
    assert np.array(t, dtype="f8", copy=True).ctypes.data != t.ptr


@pytest.mark.parametrize(
    ("values", "dtype"), [([300], "i8"), (-1, "u8"), ([1, 2**31], "i32"), ([-1], "u64"), ([300.0], "i8"), ([256], "u8")]
)
def test_a_number_that_the_dtype_cannot_hold_is_an_overflow(dev, values, dtype):
    with pytest.raises(OverflowError, match="the range of ") as caught:
        dev.array(values, dtype)
    assert isinstance(caught.value, OutOfRange)
    with pytest.raises(OverflowError):
        dev.zeros(np.shape(values), dtype).copy_from(values)
    assert dev.array(np.array(values).astype(dp.Dtype.of(dtype).numpy)).dtype == dtype


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([2**64], "u64"),
        ([2**70], "u64"),
        ([-(2**63) - 1], "i64"),
        (2**70, None),
        ([2**63, -1], "i64"),
        ([2.0**64], "u64"),
    ],
)
def test_a_number_that_no_integer_dtype_holds_is_an_overflow_too(dev, values, dtype):
    with pytest.raises(OutOfRange, match="the range of "):
        dev.array(values, dtype)
    with pytest.raises(OutOfRange):
        dev.zeros(np.shape(values), dtype or "f64").copy_from(values)
    with pytest.raises(BadRequest, match="an array of dtype object; expected an array of numbers") as caught:
        dev.array(["a", object()], dtype)
    assert not isinstance(caught.value, OverflowError)


def test_integers_of_an_array_wrap_around_as_numpys(dev):
    source = np.array([300, -1, 127])
    np.testing.assert_array_equal(dev.array(source, "i8").numpy(), source.astype(np.int8))
    np.testing.assert_array_equal(dev.array(source).astype("i8").numpy(), source.astype(np.int8))
    assert dev.array([127, -128], "i8").tolist() == [127, -128]


def test_f8_is_refused_for_it_may_mean_two_things(dev):
    for call in (lambda: dev.array([1.0], "f8"), lambda: dev.zeros(3).astype("f8"), lambda: dev.empty(3, "f8")):
        with pytest.raises(BadRequest, match="float64 is f64; the dtypes of 8 bits are f8e4m3 and f8e5m2"):
            call()
    with pytest.raises(TypeError, match="float64 is f64"):
        dp.Dtype.of("f8")
    assert dev.zeros(3, np.dtype("f8")).dtype == "f64"


FUNCTIONS = {
    "np.sum": np.sum,
    "np.mean": lambda a: np.mean(a, axis=0),
    "np.max": np.max,
    "np.linalg.norm": np.linalg.norm,
    "np.concatenate": lambda a: np.concatenate([np.ones(3), a]),
    "np.where": lambda a: np.where(np.ones(a.shape, bool), a, 0),
    "np.allclose": lambda a: np.allclose(np.ones(a.shape), a),
    "np.array_equal": lambda a: np.array_equal(a, a),
    "np.clip": lambda a: np.clip(a, 0, 1),
    "np.einsum": lambda a: np.einsum("i,i->", a, a),
    "np.fft.fft": np.fft.fft,
    "np.reshape": lambda a: np.reshape(a, (3, 1)),
    "np.copyto": lambda a: np.copyto(np.zeros(3), a),
    "np.pad": lambda a: np.pad(array=a, pad_width=1),
}


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Gives a device that says it is the host."""

    def pretend():
        monkeypatch.setattr(type(dp.device("host")), "is_host", False)

    return pretend


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_numpy_read_tensors_of_the_host_and_refuse_those_of_a_gpu(dev, name, on_a_gpu):
    model = np.array([1.0, -2.0, 3.0], np.float32)
    x = dev.array(model)
    on_host = dev.array(model)
    view = np.asarray(on_host)
    got = FUNCTIONS[name](on_host)
    np.testing.assert_array_equal(got, FUNCTIONS[name](model))
    assert np.shares_memory(on_host, view)
    on_a_gpu()
    text = rf"^{name} does not accept a Tensor on host.* silently .*\. .*{name}\(a\.numpy\(\), …\)"
    with pytest.raises(TypeError, match=text):
        FUNCTIONS[name](x)


def test_of_a_gpu_shapes_and_views_are_answered_and_asking_for_an_array_copies(dev, on_a_gpu):
    x = dev.zeros((2, 3))
    on_a_gpu()
    assert (np.shape(x), np.ndim(x), np.size(x), np.size(x, 1)) == ((2, 3), 2, 6, 3)
    assert np.transpose(x).strides == np.transpose(x, (1, 0)).strides == x.T.strides
    with pytest.raises(TypeError, match=r"dispatch\.reduce\(x, axes, reduce='add'\), or on the host np\.sum"):
        np.sum(x)


def test_an_output_of_the_host_is_written(dev):
    x, out = dev.array([[1.0, 2.0], [3.0, 4.0]], "f32"), dev.zeros(2)
    np.sum(x, axis=0, out=out)
    assert out.tolist() == [4, 6]
