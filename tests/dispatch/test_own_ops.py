"""Ops of a user's own: what a class or a kernel lacks is said in a sentence, and what is sound runs."""

import ctypes
import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

import dispatch as dp
from cudabind import driver
from cudabind.errors import LibraryNotFound, NvrtcError
from dispatch.core import call_cache
from dispatch.errors import BadRequest, BadRequestClass, BadRow, Refused
from dispatch.keys import F32, HOST, Arch
from dispatch.libraries.nvrtc import kernel as nvrtc_kernel

ROOT = Path(dp.__file__).parents[1]
frozen = dataclass(frozen=True, eq=False)


class Own(dp.OperandRequest):
    """What the classes below have, but for what they do not."""

    op: ClassVar[str] = "own"
    reads: ClassVar[tuple[str, ...]] = ("x",)

    def check_fields(self) -> None:
        """All is fine."""


FIELDS = {"x": dp.Tensor, "out": "dp.Tensor | None"}


def made(decorator=frozen, base=Own, annotations=None, **names):
    """A class of a user's: sound, but for what is given."""
    body = {"__annotations__": annotations or FIELDS, "out": None, **names}
    return decorator(type("Mine", (base,), body))


class NoOp(dp.OperandRequest):
    reads = ("x",)

    def check_fields(self) -> None: ...


class NoReads(dp.OperandRequest):
    op = "own"

    def check_fields(self) -> None: ...


class NoChecks(dp.OperandRequest):
    op, reads = "own", ("x",)


BOTH = {"x": dp.Tensor, "y": dp.Tensor, "out": "dp.Tensor | None"}
MALFORMED = {
    "no op": (lambda: made(base=NoOp), "has no op: write op: ClassVar"),
    "no reads": (lambda: made(base=NoReads), "has no reads: write reads: ClassVar"),
    "reads is a string": (lambda: made(reads="x"), r"has reads = 'x', which is not a tuple: write \(\"x\",\)"),
    "writes is a list": (lambda: made(writes=["out"]), r"has writes = \['out'\], which is not a tuple"),
    "no field": (lambda: made(reads=("x", "z")), "has 'z' in reads, which is not a field: .* name some of x, out"),
    "no check_fields": (lambda: made(base=NoChecks), r"no check_fields\(\): write def .* as OperandRequest describes"),
    "no dataclass": (lambda: made(decorator=lambda kind: kind), r"not a dataclass: put @dataclass\(frozen=True, eq=F"),
    "not frozen": (lambda: made(decorator=dataclass(eq=False)), r"is not frozen, .*: put @dataclass"),
    "equal": (lambda: made(decorator=dataclass(frozen=True)), r"compares its fields, .*: put @dataclass"),
    "factory": (
        lambda: made(annotations={**BOTH, "n": "list"}, y=None, reads=("x", "y"), n=field(default_factory=list)),
        "has a default_factory for n: give it a default that is a value",
    ),
    "annotation": (lambda: made(annotations={"x": int, "out": int}), "annotates it int: annotate it Tensor"),
    "tensor without a name": (lambda: made(annotations=BOTH, y=None), "y that is neither in reads nor in writes"),
    "no outputs": (
        lambda: made(annotations=BOTH, y=None, writes=("out", "y")),
        r"has 2 outputs but does not define outputs\(\): return \{'out': Output\(shape, strides, dtype\), 'y'",
    ),
    "updates": (lambda: made(updates=("out",)), "has 'out' in updates and not in reads"),
    "in_place": (lambda: made(in_place=frozenset({("x", "out")})), "write pairs of an output and an input"),
    "reads is a field": (
        lambda: made(annotations={"reads": "tuple", **BOTH}), r"instead of a class variable: write .*ClassVar\[tuple\]"
    ),
    "a function": (lambda: lambda x: x, "derives from OperandRequest"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_class_says_in_a_sentence_what_it_lacks(case):
    make, text = MALFORMED[case]
    with pytest.raises(BadRequestClass, match=text) as caught:
        dp.request_function(make(), "own")
    assert isinstance(caught.value, TypeError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["not an identifier", "lambda", "", 3, None])
def test_a_name_that_no_function_can_have_is_refused(name):
    with pytest.raises(BadRequest, match=r"^name: got .*; expected the name of a function in Python") as caught:
        dp.request_function(dp.SoftmaxRequest, name)
    assert caught.value.hint == 'the op is named "softmax"'


def test_the_first_request_of_a_malformed_class_says_so_as_well():
    with pytest.raises(BadRequestClass, match="compares its fields"):
        made(decorator=dataclass(frozen=True))(dp.device("host").zeros(3))


def test_outputs_that_are_none_of_the_writes_are_told():
    kind = made(outputs=lambda _: {"y": dp.Output((1,), (1,), F32)})
    with pytest.raises(BadRequestClass, match=r"outputs\(\) returns y; writes contains out"):
        dp.run(kind(dp.device("host").zeros(3)))


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (dp.Output((3,), (-1,), F32), "negative stride"),
        (dp.Output((4,), (0,), F32), "elements share an address"),
        (dp.Output((2, 3), (2, 1), F32), "elements share an address"),
        (dp.Output((-3,), (1,), F32), "negative extent"),
        (dp.Output((-1,), (1,), F32), "negative extent"),
        (dp.Output((2, -1), (1, 1), F32), "negative extent"),
        (dp.Output((3,), (1, 1), F32), "1 extents and 2 strides"),
        (dp.Output([3], (1,), F32), "shape is not a tuple of int"),
        (dp.Output((3,), (1.0,), F32), "strides is not a tuple of int"),
        (dp.Output((3,), (1,), "f32"), "dtype is not one of dispatch.keys"),
        (((3,), (1,), F32), "not a dispatch.Output"),
        (None, "not a dispatch.Output"),
    ],
)
def test_an_output_that_cannot_be_allocated_is_told_before_anything_is_written(output, text):
    kind = made(outputs=lambda _: {"out": output})
    wanted = rf"outputs\(\) returns .* for .out., .*{text}.*: return \{{.out.: dispatch.Output"
    with pytest.raises(BadRequestClass, match=wanted):
        dp.run(kind(dp.device("host").zeros(3)))
    with pytest.raises(BadRequestClass, match=r"outputs\(\) returns None: return"):
        dp.run(made(outputs=lambda _: None)(dp.device("host").zeros(3)))


@pytest.mark.parametrize("said", ["dp.Tensor", "Tensor", dp.Tensor, "dispatch.Tensor"])
def test_operands_are_known_whatever_names_the_module_has(said):
    optional = f"{said} | None" if isinstance(said, str) else said | None
    kind = made(annotations={"x": said, "n": int, "out": optional}, n=2)
    assert call_cache.fields_of(kind) == (("x", "out"), ("n",))


def test_numbers_are_checked_where_annotations_are_no_strings():
    kind = made(annotations={"x": dp.Tensor, "p": float, "n": int, "out": dp.Tensor | None}, p=1.0, n=1)
    x = dp.device("host").zeros(3)
    assert type(kind(x, n=np.int64(3)).n) is int
    with pytest.raises(dp.errors.BadRequest, match="p: got 'a'"):
        kind(x, p="a")


def test_every_class_of_this_library_is_sound():
    kinds = [getattr(dp, name) for name in dir(dp)]
    requests = [kind for kind in kinds if isinstance(kind, type) and hasattr(kind, "in_place") and hasattr(kind, "op")]
    assert len(requests) > 15
    for kind in requests:
        assert dp.request_function(kind, "f") is not None


# -- kernels ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def own_op():
    """The example as a module, whose rows leave the table again."""
    spec = importlib.util.spec_from_file_location("own_op_example", ROOT / "examples" / "14_own_op.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    for row in module.ROWS:
        dp.TABLE.unregister(row)
    del sys.modules[spec.name]


def compiled(kernel, arch="sm_90"):
    try:
        return kernel.cubin(arch)
    except (LibraryNotFound, Refused) as error:
        pytest.skip(f"NVRTC is not installed: {error}")


@pytest.fixture
def launched(monkeypatch):
    """What reaches `cuLaunchKernel`, with the parameters read at that moment."""
    calls = []

    def launch(function, *rest):
        *extents, shared, stream, pointers, extra = rest
        types = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64, ctypes.c_float)
        parameters = [kind.from_address(at).value for kind, at in zip(types, pointers, strict=True)]
        calls.append((function.value, tuple(extents), shared, stream, parameters, extra))
        return 0

    monkeypatch.setattr(driver, "cuLaunchKernel", SimpleNamespace(unchecked=launch))
    monkeypatch.setattr(nvrtc_kernel, "_loaded", lambda _kernel, _device: 77)
    return calls


def test_a_kernel_is_launched_with_the_addresses_and_behind_them_the_values(own_op, launched):
    row, stream = own_op.ROWS[0], ctypes.c_void_p(5)
    executor = SimpleNamespace(device=None, target=stream)
    x = dp.device("host").zeros((300, 70))
    plan = row.call(own_op.SquaredReluRequest(x, slope=0.25), executor, row)
    plan.enqueue((4096, 8192))
    plan.enqueue((8192, 0))
    grid = (-(-21000 // 256), 1, 1)
    assert [call[:4] for call in launched] == [(77, (*grid, 256, 1, 1), 0, stream)] * 2
    assert [call[4] for call in launched] == [[4096, 8192, 21000, 0.25], [8192, 0, 21000, 0.25]]
    assert plan.capture_safe
    nothing = row.call(own_op.SquaredReluRequest(dp.device("host").zeros((0, 3))), executor, row)
    nothing.enqueue((0, 0))
    assert len(launched) == 2


@pytest.mark.parametrize(
    ("launch", "text"),
    [
        ((1, 2), "returned a tuple: return a dispatch.Launch"),
        (dp.Launch(7, (1,)), r"the grid of f is 7: pass a tuple of one to three whole numbers from 0 on"),
        (dp.Launch((1,), (0,)), r"the block of f is \(0,\): .* from 1 on"),
        (dp.Launch((1, 1, 1, 1), (1,)), "the grid of f"),
        (dp.Launch((1,), (1,), (3,)), r"f received 3, .* such as ctypes.c_int64\(3\)"),
        (dp.Launch((1,), (1,), (0.5,)), r"such as ctypes.c_float\(0.5\)"),
    ],
)
def test_a_launch_that_cannot_be_says_why(launch, text):
    with pytest.raises(BadRow, match=text):
        dp.Kernel("", "f", lambda _: launch)(None, None, None)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: dp.numpy_call(None), "a formula is a function of a request and a NumPy dtype, not None"),
        (lambda: dp.Kernel(None, "f", lambda _: None), "its source, its name and a function .*: got None, 'f'"),
        (lambda: dp.Kernel("", "f", None), "a function that returns the Launch of a request"),
        (lambda: dp.TABLE.unregister("clamp"), "'clamp' is a str, not a Row of the table"),
    ],
)
def test_what_is_no_function_or_row_is_told_where_it_is_given(make, text):
    with pytest.raises(BadRow, match=text):
        make()


def test_options_are_several():
    with pytest.raises(BadRow, match=r"write \('-DN=3',\)"):
        dp.Kernel("", "f", lambda _: None, options="-DN=3")


def test_kernels_compile_without_a_gpu_and_errors_have_the_compilers_words(own_op):
    assert compiled(own_op.KERNELS[F32])[:4] == b"\x7fELF"
    assert compiled(own_op.KERNELS[F32]) is own_op.KERNELS[F32].cubin("sm_90")  # once
    with pytest.raises(NvrtcError, match="nothing_of_that_name"):
        dp.Kernel('extern "C" __global__ void f() { nothing_of_that_name(); }', "f", lambda _: None).cubin("sm_90")


def test_without_nvrtc_the_row_is_refused(own_op, monkeypatch):
    def missing(*_args):
        raise LibraryNotFound("nvrtc", "it is not there")

    monkeypatch.setattr(nvrtc_kernel, "compiled", missing)
    with pytest.raises(Refused, match="NVRTC, which compiles squared_relu"):
        own_op.KERNELS[F32].cubin("sm_75")


def test_an_own_op_is_explained_and_refused_as_any(own_op):
    dev = dp.device("host")
    x = dev.array(np.arange(-3, 3, dtype=np.float32))
    np.testing.assert_array_equal(own_op.squared_relu(x).numpy(), [0, 0, 0, 0, 1, 4])
    assert dp.explain(own_op.SquaredReluRequest(x)).row in own_op.ROWS
    with pytest.raises(dp.errors.NoRow, match=r"dtypes \(f32, f32\)"):
        own_op.squared_relu(dev.zeros(3, "f16"))
    with pytest.raises(dp.errors.BadRequest, match="slope"):
        own_op.squared_relu(x, float("inf"))
    rows = [row for row in own_op.ROWS if row.min_arch != HOST]
    assert own_op.contiguous(own_op.SquaredReluRequest(dev.zeros((3, 4)).T)).startswith("needs x and out in C order")
    assert all(row.on(Arch(90)) for row in rows)
    assert "slope: what the squares" in own_op.squared_relu.__doc__


# -- what a formula of the host gives ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "its formula returned None; expected a dict of outputs by name"),
        ({}, "its formula returned no output; expected out as well"),
        ({"y": np.ones((2, 3))}, "its formula returned 'y'; expected only out"),
        ({"out": np.ones((3, 2))}, r"its formula returned out of shape \(3, 2\); expected \(2, 3\)"),
        ({"out": np.ones((2, 4))}, r"its formula returned out of shape \(2, 4\); expected \(2, 3\)"),
        ({"out": np.ones(5)}, r"its formula returned out of shape \(5,\); expected \(2, 3\)"),
        (
            {"out": [[1.0, 2, 3]] * 2},
            r"its formula returned out as \[\[1.0, 2, 3\], \[1.0, 2, 3\]\]; expected an array",
        ),
        (
            {"out": np.ones((2, 3)) * 1j},
            "its formula returned out in complex128; expected real numbers, because out is f.*return .real",
        ),
        ({"out": np.arange(6.0)}, None),
        ({"out": np.arange(6.0).reshape(2, 1, 3)}, None),
    ],
    ids=[
        "None",
        "nothing",
        "another",
        "turned",
        "longer",
        "shorter",
        "a list",
        "imaginary",
        "in a line",
        "an axis of one",
    ],
)
def test_a_formula_gives_all_outputs_in_their_shapes(given, words):
    dev, kind = dp.device("host"), made(op="formula")
    row = dp.Row("formula", (F32, F32), None, (), HOST, None, (), "host", "numpy", dp.numpy_call(lambda *_: given))
    dp.TABLE.register(row)
    try:
        request = kind(dev.zeros((2, 3), "f32"))
        if words is None:
            np.testing.assert_array_equal(dp.run(request).numpy(), np.arange(6.0).reshape(2, 3))
        else:
            with pytest.raises(BadRow, match=f"^formula .*: {words}"):
                dp.run(request)
    finally:
        dp.TABLE.unregister(row)


# -- dtypes of other inputs --------------------------------------------------------------------------------------------
@pytest.fixture
def host():
    return dp.device("host")


def two(**names):
    fields = {"x": "dp.Tensor", "w": "dp.Tensor", "out": "dp.Tensor | None"}
    return made(reads=("x", "w"), annotations=fields, **names)


def test_an_input_of_another_dtype_is_refused_unless_the_class_says_that_it_may_be(host):
    x, w = host.zeros((4, 4), "f32"), host.zeros((4, 4), "f16")
    kind = two()
    kind(x, x)
    with pytest.raises(dp.errors.BadRequest, match=r'w: got f16\[4, 4\]; expected f32, as x is.*mixed: .*\("w",\)'):
        kind(x, w)
    with pytest.raises(dp.errors.BadRequest, match="w: got f16"):
        kind(x, x).replace(w=w)
    for free in (two(mixed=("w",)), two(dtypes=property(lambda self: (self.x.dtype, self.w.dtype, self.x.dtype)))):
        assert free(x, w).w is w


def test_an_absent_input_has_no_dtype(host):
    fields = {"x": "dp.Tensor", "w": "dp.Tensor | None", "out": "dp.Tensor | None"}
    kind = made(reads=("x", "w"), annotations=fields, w=None)
    assert kind(host.zeros(3)).w is None
    with pytest.raises(dp.errors.BadRequest, match="w: got i32"):
        kind(host.zeros(3), host.zeros(3, "i32"))


@pytest.mark.parametrize(
    ("mixed", "text"),
    [
        (("z",), "'z' in mixed, which is not a field"),
        ("w", "which is not a tuple"),
        (("x",), "only inputs other than the first"),
    ],
)
def test_what_mixed_may_say(mixed, text):
    with pytest.raises(BadRequestClass, match=text):
        dp.request_function(two(mixed=mixed), "own")


@pytest.mark.parametrize("given", [[1], {1: 2}, (1, [2]), np.ones(2)], ids=repr)
def test_a_choice_that_cannot_be_part_of_a_key_is_named(given):
    annotations = {"x": dp.Tensor, "sizes": object, "out": "dp.Tensor | None"}
    kind = made(annotations=annotations, sizes=None)
    x = dp.device("host").zeros((3,))
    with pytest.raises(BadRequest, match=r"^sizes: got .*; expected a value with a hash.*such as a tuple"):
        kind(x, given)
    assert kind(x, (1, 2)).attributes() == ((1, 2),)
    converted = made(annotations=annotations, sizes=None, attributes=lambda self: (tuple(self.sizes),))
    assert converted(x, [1, 2]).key()
