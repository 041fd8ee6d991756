"""What NumPy and torch call otherwise: the error says what to write here, and what it says exists and works."""

import re
import subprocess
import sys
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

import numpy as np
import pytest

import dispatch as dp
from dispatch.elsewhere import MODULE, TENSOR
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import F32, F64
from dispatch.refusal import Kind, Refusal


@pytest.fixture
def x():
    return dp.device("host").array(np.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("name", sorted(MODULE))
def test_a_name_of_another_library_is_an_error_that_says_what_it_is_here(name):
    with pytest.raises(AttributeError) as caught:
        getattr(dp, name)
    text = str(caught.value)
    assert text.startswith(f"module 'dispatch' has no attribute {name!r}; ")
    called = re.search(r"dispatch\.([\w.]+)\(", text)
    assert called is not None
    assert callable(attrgetter(called[1])(dp))
    assert caught.value.name == name


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("tensordot", "tensors"),
        ("kron", "tensors"),
        ("csr", "sparse"),
        ("spsolve_triangular", "sparse"),
        ("rfft", "fft"),
    ],
)
def test_a_function_of_a_module_is_found_there(name, module):
    with pytest.raises(
        AttributeError, match=rf"^module 'dispatch' has no attribute '{name}'; dispatch\.{module}\.{name}$"
    ):
        getattr(dp, name)
    other = "structured" if module != "structured" else "sparse"
    with pytest.raises(
        AttributeError, match=rf"'dispatch\.{other}' has no attribute '{name}'; dispatch\.{module}\.{name}"
    ):
        getattr(getattr(dp, other), name)
    assert callable(attrgetter(f"{module}.{name}")(dp))


@pytest.mark.parametrize("name", sorted(TENSOR))
def test_a_method_of_another_library_is_an_error_that_says_what_it_is_here(x, name):
    with pytest.raises(AttributeError, match=rf"^'Tensor' object has no attribute '{name}'; \S") as caught:
        getattr(x, name)
    for said in re.findall(r"\bx\.(\w+)", str(caught.value)):
        assert hasattr(x, said)


def test_every_public_name_of_numpys_arrays_is_there_or_says_what_to_use(x):
    for name in dir(np.ndarray):
        if not name.startswith("_") and not hasattr(x, name):
            with pytest.raises(AttributeError, match=f"'{name}'; "):
                getattr(x, name)
            assert name not in dir(x)


@pytest.mark.parametrize(
    ("name", "mode"), [("sum", "add"), ("mean", "avg"), ("max", "max"), ("min", "min"), ("prod", "mul")]
)
def test_the_reductions_that_are_named_give_what_numpy_gives(x, name, mode):
    with pytest.raises(AttributeError, match=rf"dispatch\.reduce\(x, axes, reduce='{mode}'\), or on the host x\.numpy"):
        getattr(x, name)
    found = dp.reduce(x, 1, reduce=mode)
    np.testing.assert_allclose(found.numpy(), getattr(x.numpy(), name)(axis=1))


def test_what_a_device_does_not_make_is_copied_there(x):
    dev = x.device
    for name in ("arange", "asarray", "eye", "full", "linspace", "ones"):
        with pytest.raises(AttributeError, match=rf"^'HostDevice' object has no attribute '{name}'; dev\.array\("):
            getattr(dev, name)
        assert name not in dir(dev)
    assert "zeros" in dir(dev)
    assert dev.array(np.ones((2, 2)), "bf16").tolist() == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("module", "name", "meant"),
    [
        ("fft", "dctn", "; did you mean 'dct'?"),
        ("linalg", "svdd", "; did you mean 'svd'?"),
        ("linalg", "matmul", "; dispatch.matmul"),
        ("random", "default_rng", "; dispatch.random.Generator(seed), whose methods draw"),
        ("tensors", "conv2d", "; dispatch.conv_fwd(x, w)"),
        ("signal", "fftconvolv", "; did you mean 'fftconvolve'?"),
        ("sparse", "quite_other", ""),
        ("trace", "__wrapped__", ""),
    ],
)
def test_a_name_that_a_module_lacks_is_told_by_the_modules_public_name(module, name, meant):
    with pytest.raises(AttributeError) as caught:
        getattr(getattr(dp, module), name)
    assert str(caught.value) == f"module 'dispatch.{module}' has no attribute {name!r}{meant}"
    assert caught.value.name == name


def test_a_name_that_nobody_has_is_a_plain_error(x):
    with pytest.raises(AttributeError, match=r"^'Tensor' object has no attribute 'reshpae'$"):
        _ = x.reshpae


def test_a_product_with_an_array_names_its_library_and_the_call_that_takes_both(x):
    torch = pytest.importorskip("torch")
    other = torch.ones(3, 2, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"b is a torch\.Tensor, not a Tensor of dispatch; dispatch\.matmul\(a, b\)"):
        x @ other
    np.testing.assert_array_equal(np.asarray(dp.matmul(x, other)), x.numpy() @ other.numpy())
    with pytest.raises(TypeError, match=r"a is a list, not a Tensor of dispatch; copy it to the device"):
        [[1.0, 2.0]] @ x


def test_numpys_matmul_of_two_tensors_is_not_called_one_with_an_array(x):
    with pytest.raises(TypeError, match=r"or np\.matmul: dispatch\.matmul\(a, b\) accepts both"):
        np.matmul(x, x.T)


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_the_copy_that_is_advised_for_steps_backwards_works(kind):
    a = np.arange(9.0).reshape(3, 3)
    dev = dp.device("host")
    backwards = a[:, ::-1] if kind == "array" else dev.array(a)[:, ::-1]
    with pytest.raises(BadRequest, match=r"Hint: copy it: dev\.array\(x\)$"):
        dp.matmul(backwards, dev.array(a))
    np.testing.assert_array_equal(np.asarray(dp.matmul(dev.array(backwards), dev.array(a))), a[:, ::-1] @ a)


def test_a_shape_that_is_wanted_is_named_once(x):
    with pytest.raises(BadRequest, match=r"expected shape \(2,\)$"):
        dp.matmul(x, x.T, bias=np.ones(3), epilogue="bias")


def test_a_library_in_other_letters_is_recognized(x):
    with pytest.raises(BadRequest, match=r"did you mean 'cublasLt'\?"):
        dp.matmul(x, x.T, library="cublaslt")


def test_an_empty_operand_is_not_told_to_be_copied():
    empty = dp.device("host").zeros((3, 4), "f32").T[:0]  # its columns lie one behind another
    assert dp.softmax(empty, out=dp.device("host").zeros((0, 3), "f32")).shape == (0, 3)


def test_a_row_of_too_many_dtypes_is_told_how_many_there_are():
    said = str(Refusal(Kind.DTYPES, (F32, F32, F32), (F32, F32)))
    assert said == "needs dtypes (f32, f32, f32), has (f32, f32): a row of this op has 2 dtypes, as `request.dtypes`"
    assert str(Refusal(Kind.DTYPES, (F32, F32), (F64, F64))) == "needs dtypes (f32, f32), has (f64, f64)"


@dataclass(frozen=True, eq=False)
class AddRequest(dp.OperandRequest):
    """Two reads, of which rows are matched with the first."""

    op: ClassVar[str] = "add_of_test_elsewhere"
    reads: ClassVar[tuple[str, ...]] = ("x", "y")
    x: dp.Tensor
    y: dp.Tensor
    out: dp.Tensor | None = None

    def check_fields(self):
        dp.same_as_first(self)


def test_an_own_op_has_a_check_for_the_operands_that_no_row_is_matched_with(x):
    assert AddRequest(x=x, y=x.copy()).dtypes == (F64, F64)
    with pytest.raises(BadRequest, match=r"y: got f32\[2, 3\]; expected f64\[2, 3\], as x is"):
        AddRequest(x=x, y=x.astype("f32"))


def test_the_collector_calls_nobody_before_anything_is_lent():
    code = """
import gc
import numpy as np
import dispatch as dp
x = dp.device("host").array(np.ones(3))
assert not gc.callbacks, gc.callbacks
for _ in range(2):
    np.from_dlpack(x)
assert len(gc.callbacks) == 1, gc.callbacks
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_the_order_that_fp8_wants_is_made_as_the_refusal_says(kind):
    dev = dp.device("host")
    a = dev.array(np.ones((16, 16)), "f8e4m3")
    b = a.numpy() if kind == "array" else a
    with pytest.raises(NoRow, match=r"needs b column-major \(k dense\): make it as dev\.array\(b\.mT\)\.mT\n"):
        dp.matmul(a, b)
    assert np.all(dp.matmul(a, dev.array(b.mT).mT).numpy() == 16)
