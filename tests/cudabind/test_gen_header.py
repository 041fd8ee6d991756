"""The generator on a header with everything awkward in it."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import inspect
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("clang", reason="libclang is not installed: pip install cudabind[gen]")
if shutil.which("gcc") is None:
    pytest.skip("gcc, whose own headers the parser needs, is not installed", allow_module_level=True)

from cudabind import _bind, _types
from cudabind.gen import __main__ as command
from cudabind.gen import layout, sources
from cudabind.gen.emit import EmitError
from cudabind.gen.merge import merge
from cudabind.gen.parse import HeaderError, parse

if TYPE_CHECKING:
    from cudabind.gen.model import Header

spec = importlib.util.spec_from_file_location("awkward_header", Path(__file__).with_name("awkward_header.py"))
awkward = importlib.util.module_from_spec(spec)
spec.loader.exec_module(awkward)
HEADER, ROW, parsed, emitted, header = awkward.HEADER, awkward.ROW, awkward.parsed, awkward.emitted, awkward.header

pytestmark = pytest.mark.generator


def test_macros_are_evaluated_and_what_is_no_constant_drops_out(header: Header) -> None:
    assert header.constants == {
        "AWK_FIXED": 12,
        "AWK_LOOSE": 9,
        "AWK_MAX": 16,
        "AWK_MASK": 0xFF00000000,
        "AWK_NEGATIVE": -3,
        "AWK_RATIO": 1.5,
        "AWK_NAME": "awkward",
    }
    assert header.renames == {"awkOld": "awkOpen_v2"}


def test_functions_are_the_librarys_own(header: Header) -> None:
    assert list(header.functions) == [
        "awkOpen_v2",
        "awkRun",
        "awkEach",
        "awkGetVersion",
        "awkText",
        "awkReset",
        "awkInline",
    ]
    assert [name for name, function in header.functions.items() if function.inline] == ["awkInline"]


def test_the_text_says_what_the_header_says(header: Header) -> None:
    text = emitted(header)
    for line in (
        "class awkHandle_t(Handle): ...",
        "class awkDesc_t(Handle): ...",
        "class awkConstThing_t(Handle): ...",
        "class awkThing_t(awkConstThing_t): ...",
        "AWK_DEFAULT_THING: awkConstThing_t",
        "class awkCallback_t(Callback):",
        "    def __call__(self, level: int32_t, text: char_p, user: void_p, /) -> None: ...",
        "awkMode_t = awkMode",
        "awkFlags_t = uint64_t",
        "awkTable_t = Mem[c_double]",
        "    low: Annotated[uint32_t, Bits(3)]",
        "    mode: int32_t  # awkMode_t",
        "    grid: Annotated[Array[Array[c_int32]], 2, 3]",
        "    AWK_ALSO_BAD = 3",
        'AWK_NAME = "awkward"',
        "AWK_MASK = 0xFF00000000",
        "def awkOpen_v2(handle: Ptr[awkHandle_t], name: char_p, log: void_p, /) -> awkStatus_t: ...",
        "def awkGetVersion() -> size_t: ...",
        "def awkText(status: awkStatus_t, /) -> str: ...",
        "def awkReset() -> None: ...",
        "awkOld = awkOpen_v2",
    ):
        assert line in text.splitlines(), line
    flat = " ".join(text.split())
    run = "handle: awkHandle_t, x: ConstMem[c_float], all: Ptr[awkAll_t], n: int32_t, sizes: ConstMem[c_int32],"
    each = "handle: awkHandle_t, each: awkCallback_t, flags: awkFlags_t, out: Mem[c_void_p], table: awkTable_t,"
    for signature in (f"def awkRun( {run} mode: Mem[c_int32], / ) ->", f"def awkEach( {each} lambda_: int32_t, / ) ->"):
        assert signature in flat
    assert max(map(len, text.splitlines())) <= 120


FAMILY = """
awkStatus_t awkSaxpy(awkHandle_t handle, int n, const float *x, float *y);
awkStatus_t awkDaxpy(awkHandle_t handle, int n, const double *x, double *y);
awkStatus_t awkSaxpy_64(awkHandle_t handle, int64_t n, const float *x, float *y);
awkStatus_t awkDaxpy_64(awkHandle_t handle, int64_t n, const double *x, double *y);
awkStatus_t awkMixed(awkHandle_t handle, int n, const float *x, double *y);
awkStatus_t awkOther(awkHandle_t handle, int n, const float *x, float *z);
awkStatus_t awkReads(awkHandle_t handle, const float *x, const float *y);
#define awkSum awkSaxpy
"""


def test_signatures_that_differ_by_types_stand_once(tmp_path: Path) -> None:
    text = emitted(parsed(HEADER + FAMILY, tmp_path))
    for line in (
        "class _Saxpy(Status, Generic[T, U, V]):",
        "    def __call__(self, handle: awkHandle_t, n: T, x: ConstMem[U], y: Mem[V], /) -> None: ...",
        "awkSaxpy: _Saxpy[int32_t, c_float, c_float]; awkDaxpy: _Saxpy[int32_t, c_double, c_double]",
        "awkSaxpy_64: _Saxpy[int64_t, c_float, c_float]; awkDaxpy_64: _Saxpy[int64_t, c_double, c_double]",
        "awkMixed: _Saxpy[int32_t, c_float, c_double]",
        "def awkOther(handle: awkHandle_t, n: int32_t, x: ConstMem[c_float], z: Mem[c_float], /) -> awkStatus_t: ...",
        "def awkReads(handle: awkHandle_t, x: ConstMem[c_float], y: ConstMem[c_float], /) -> awkStatus_t: ...",
        'awkOld = awkOpen_v2; awkSum: Annotated[_Saxpy[int32_t, c_float, c_float], "awkSaxpy"]',
    ):
        assert line in text.splitlines(), line


def test_a_function_of_a_family_is_what_it_would_be_alone(tmp_path: Path) -> None:
    text = emitted(parsed(HEADER + FAMILY, tmp_path))
    module = layout.load("awk", text)
    assert set(_bind.symbols(module)) >= {"awkSaxpy", "awkDaxpy_64", "awkOther", "awkOpen_v2"}
    assert "awkSum" not in _bind.symbols(module)
    assert {"awkSaxpy", "awkSum"} <= set(dir(module))
    assert not [name for name in dir(module) if name.startswith("_Saxpy")]
    assert module.awkSum is module.awkSaxpy
    daxpy = module.awkDaxpy_64
    assert (daxpy.__name__, type(daxpy)) == ("awkDaxpy_64", _bind.StatusFunction)
    assert str(inspect.signature(daxpy)) == (
        "(handle: 'awkHandle_t', n: 'int64_t', x: 'ConstMem[c_double]', y: 'Mem[c_double]', /) -> 'awkStatus_t'"
    )
    kinds = [_types.argument(module._names.evaluate(hint)) for hint in daxpy.__wrapped__.__annotations__.values()]
    assert kinds == [module.awkHandle_t, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]


LAYER = """
typedef struct awkLayer {
  void *user;
  int (*run)(struct awkLayer *layer, int task, awkCallback_t each);
  const char *(*name)(const void *user);
  int (*none)();
} awkLayer_t;
"""


def test_a_function_that_is_a_member_has_a_type_by_the_members_name(tmp_path: Path) -> None:
    header = parsed(HEADER + LAYER, tmp_path)
    text = emitted(header)
    for line in (
        "class awkLayer_run(Callback):",
        # A pointer to the struct itself is an address: the struct is made after its members' types. So is a function.
        "    def __call__(self, layer: void_p, task: int32_t, each: void_p, /) -> int32_t: ...",
        "    def __call__(self, user: const_void_p, /) -> str: ...",
        "    def __call__(self) -> int32_t: ...",
        "    run: awkLayer_run",
    ):
        assert line in text.splitlines(), line
    module = layout.load("awk", text)
    layout.check(module, header)
    made = module.awkLayer(run=lambda layer, task, each: task + (layer or 0) + bool(each))
    assert made.run(None, 41, module.awkCallback_t(print)) == 42
    made.name = lambda _user: "in Python"
    assert ctypes.string_at(made.name(None)) == b"in Python"
    with pytest.raises(TypeError, match="awkLayer_run"):
        made.run = 7
    made.run = None
    assert not made.run


def test_layouts_are_the_compilers(header: Header) -> None:
    module = layout.load("awk", emitted(header))
    layout.check(module, header)
    whole = module.awkAll()
    whole.i = 0x3F800000
    assert whole.f == 1.0
    whole.inner.b = 7
    whole.bits.high = 31
    assert (whole.bits.low, whole.bits.high) == (0, 31)
    assert len(whole.grid) == 2
    assert ctypes.sizeof(module.awkWord_t) == 8


def test_a_layout_that_ctypes_cannot_have_is_refused(tmp_path: Path) -> None:
    header = parsed("struct awkTight { char a; int b; } __attribute__((packed));\n", tmp_path)
    module = layout.load("awk", emitted(header, dataclasses.replace(ROW, prefixes=())))
    with pytest.raises(layout.LayoutError, match=r"awkTight has 8 bytes, the compiler gives it 5"):
        layout.check(module, header)


SIZED = """
awkStatus_t awkFill_internal(awkBits_t *bits, size_t size, int x);
static inline awkStatus_t awkFill(awkBits_t *bits, int x) { return awkFill_internal(bits, sizeof(*bits), x); }
"""


def test_an_inline_function_that_adds_a_size_calls_the_exported_one(tmp_path: Path) -> None:
    row = dataclasses.replace(ROW, sized={"awkFill": "awkBits_t"})
    text = emitted(parsed(HEADER + SIZED, tmp_path), row)
    assert '@_lib.sized(awkFill_internal, "awkBits_t")\ndef awkFill(bits: Ptr[awkBits_t], x: int32_t, /)' in text


@pytest.mark.parametrize(
    ("header", "sized", "message"),
    [
        (SIZED, {"awkFill": "awkNone_t"}, "awkFill is to call awkFill_internal with the size of awkNone_t: none here"),
        (SIZED, {"awkInline": "awkBits_t"}, "awkInline is to call awkInline_internal"),
        (SIZED, {"awkGone": "awkBits_t"}, "the row speaks of what is no function: awkGone"),
        (SIZED.replace("int x)", "float x)", 1), {"awkFill": "awkBits_t"}, "awkFill_internal takes more than awkFill"),
    ],
)
def test_a_size_is_added_only_where_the_header_does(
    header: str, sized: dict[str, str], message: str, tmp_path: Path
) -> None:
    left_out = {name: "inline in the header" for name in ("awkInline", "awkFill") if name not in sized}
    row = dataclasses.replace(ROW, left_out=left_out, sized=sized)
    with pytest.raises(EmitError, match=message):
        emitted(parsed(HEADER + header, tmp_path), row)


def test_an_inline_function_needs_a_reason(header: Header) -> None:
    with pytest.raises(EmitError, match="give a reason in left_out: awkInline"):
        emitted(header, dataclasses.replace(ROW, left_out={}))


def test_a_reason_for_what_is_not_there_is_refused(header: Header) -> None:
    with pytest.raises(EmitError, match="no function: awkGone"):
        emitted(header, dataclasses.replace(ROW, left_out={**ROW.left_out, "awkGone": "it is gone"}))


def test_success_must_be_zero(header: Header) -> None:
    with pytest.raises(EmitError, match="AWK_BAD is not the 0 of awkStatus_t"):
        emitted(header, dataclasses.replace(ROW, success="AWK_BAD"))


def test_a_header_that_does_not_compile_is_an_error_with_the_parsers_words(tmp_path: Path) -> None:
    with pytest.raises(HeaderError, match=r"nowhere\.h"):
        parse(("nowhere.h",), [tmp_path, sources.compilers_own()])


PACKED = """
typedef enum { AWK_OK = 0 } awkStatus_t;
const char *awkText(awkStatus_t status);
typedef struct { char a; int b; } __attribute__((packed)) awkTight;
typedef struct { char a; } __attribute__((aligned(8))) awkLoose;
typedef struct { char a; awkTight in; short s[3]; } awkHolds;
void awkUse(awkTight *x, awkLoose *y, awkHolds *z);
"""


def test_members_are_placed_where_ctypes_would_not_place_them(tmp_path: Path) -> None:
    header = parsed(PACKED, tmp_path)
    row = dataclasses.replace(ROW, left_out={})
    text = command.laid_out(row, merge([("1.0", header)]), {}, "awk 1.0")
    module = layout.load("awk", text)
    layout.check(module, header)
    assert [ctypes.sizeof(each) for each in (module.awkTight, module.awkLoose, module.awkHolds)] == [5, 8, 12]
    assert text.count("_pack_ = 1") == 3
