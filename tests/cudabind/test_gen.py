"""The generator on headers with everything awkward in them, and on NVIDIA's: what is committed is what it makes."""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import shutil
from fnmatch import fnmatch
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("clang", reason="libclang is not installed: pip install cudabind[gen]")
if shutil.which("gcc") is None:
    pytest.skip("gcc, whose own headers the parser needs, is not installed", allow_module_level=True)

from cudabind import LIBRARIES, _bind, _types
from cudabind.gen import __main__ as command
from cudabind.gen import layout, sources
from cudabind.gen.emit import EmitError, emit
from cudabind.gen.libraries import HEADERS_LEFT_OUT, ROWS, Row
from cudabind.gen.merge import Before, Merged, MergeError, merge
from cudabind.gen.model import Enum, Function, Named
from cudabind.gen.parse import HeaderError, parse
from cudabind.gen.pins import RELEASES, WHEELS
from cudabind.gen.wheels import WheelError

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from cudabind.gen.model import Header

pytestmark = pytest.mark.generator

AREA = LIBRARIES["cublas"].area

HEADER = """
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#define AWK_GUARD
#define AWK_API __attribute__((visibility("default")))
#define AWK_MAX (1 << 4)
#define AWK_MASK 0xFF00000000ull
#define AWK_NEGATIVE (-3)
#define AWK_RATIO 1.5
#define AWK_NAME "awk" "ward"
#define AWK_TWICE(x) ((x) * 2)
#define awkOld awkOpen_v2
static const int AWK_FIXED = 12;

typedef enum { AWK_OK = 0, AWK_BAD = 3, AWK_ALSO_BAD = AWK_BAD, AWK_BELOW = -1 } awkStatus_t;
typedef enum awkMode { AWK_FAST = 1 } awkMode_t;
enum { AWK_LOOSE = 9 };

typedef struct awkContext *awkHandle_t;
typedef struct awkThing *awkThing_t;
typedef const struct awkThing *awkConstThing_t;
extern const awkConstThing_t AWK_DEFAULT_THING;
typedef void *awkDesc_t;
typedef uint64_t awkFlags_t;
typedef double *awkTable_t;
typedef void (*awkCallback_t)(int level, const char *text, void *user);

typedef struct {
  unsigned low : 3;
  unsigned high : 5;
  unsigned : 24;
  signed char tail;
  awkMode_t mode;
} awkBits_t;

typedef struct awkAll {
  union { int32_t i; float f; };
  struct { short a, b; } inner;
  int grid[2][3];
  const char *text;
  awkHandle_t handle;
  awkCallback_t callback;
  struct awkAll *next;
  awkBits_t bits;
} awkAll_t;

typedef union { double d; uint64_t u; } awkWord_t;

AWK_API awkStatus_t awkOpen_v2(awkHandle_t *handle, const char *name, FILE *log);
AWK_API awkStatus_t awkRun(awkHandle_t handle, const float *x, const awkAll_t *all, int n, const int sizes[],
                           awkMode_t *mode);
AWK_API awkStatus_t awkEach(awkHandle_t handle, awkCallback_t each, awkFlags_t flags, void **out, awkTable_t table,
                            int lambda);
AWK_API size_t awkGetVersion(void);
AWK_API const char *awkText(awkStatus_t status);
AWK_API void awkReset(void);
static inline int awkInline(int x) { return x; }
int other(void);
"""

ROW = Row(
    module="awk",
    headers=("awk.h",),
    wheel="awk",
    docs="https://example.org",
    prefixes=("awk",),
    status="awkStatus_t",
    success="AWK_OK",
    text="awkText",
    error="CublasLtError",
    left_out={"awkInline": "inline in the header"},
)


def parsed(text: str, folder: Path) -> Header:
    """The header as the generator reads it."""
    (folder / "awk.h").write_text(text)
    return parse(ROW.headers, [folder, sources.compilers_own()], ROW.prefixes)


def emitted(header: Header, row: Row = ROW) -> str:
    return emit(row, merge([("1.0", header)]), {}, "awk 1.0")


@pytest.fixture
def header(tmp_path: Path) -> Header:
    return parsed(HEADER, tmp_path)


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


OLD = """
typedef enum { AWK_OK = 0, AWK_DROPPED = 4 } awkStatus_t;
typedef enum { AWK_FAST = 1, AWK_MODES = 2 } awkMode_t;
typedef struct { int one; } awkBox_t;
typedef struct { int a; } awkConfig_v1;
typedef awkConfig_v1 awkConfig_t;
typedef enum { AWK_R_32F = 0 } awkKind_t;
#define AWK_VERSION 1
awkStatus_t awkGone(void);
awkStatus_t awkBoth(const awkBox_t *box, awkKind_t oldName);
static inline awkStatus_t awkHidden(int x) { return (awkStatus_t)x; }
const char *awkText(awkStatus_t status);
"""
NEW = """
typedef enum { AWK_OK = 0, AWK_BAD = 5 } awkStatus_t;
typedef enum { AWK_FAST = 1, AWK_SLOW = 2, AWK_MODES = 3 } awkMode_t;
typedef struct { int one; int two; } awkBox_t;
typedef struct { int a; int b; } awkConfig_v2;
typedef awkConfig_v2 awkConfig_t;
typedef enum { AWK_R_32F = 0, AWK_R_64F = 1 } awkAnyKind_t;
typedef awkAnyKind_t awkKind_t;
#define AWK_VERSION 2
awkStatus_t awkBoth(const awkBox_t *box, awkAnyKind_t newName);
awkStatus_t awkLate(void);
awkStatus_t awkHidden(int x);
const char *awkText(awkStatus_t status);
"""
ONE_TWO = "int awkOne(void); int awkTwo(void);"
TWO = dataclasses.replace(ROW, left_out={}, inline_as={"awkHidden": "awkHidden_1"})


@pytest.fixture
def two(tmp_path: Path) -> Merged:
    """Two versions of a header, merged."""
    return merge([("1.0", parsed(OLD, tmp_path)), ("2.0", parsed(NEW, tmp_path))], TWO.inline_as)


def as_of(merged: Merged, version: str | None) -> ModuleType:
    return layout.load("awk", emit(TWO, merged, {}, "awk 1.0, 2.0"), version)


def test_merged_headers_say_since_when_and_until_when(two: Merged) -> None:
    assert two.since == {
        "awkLate": "2.0",
        "awkAnyKind_t": "2.0",
        "AWK_BAD": "2.0",
        "AWK_SLOW": "2.0",
        "awkConfig_v2": "2.0",
    }
    assert two.until == {"awkGone": "1.0", "AWK_DROPPED": "1.0", "awkConfig_v1": "1.0"}
    lines = emit(TWO, two, {}, "awk 1.0, 2.0").splitlines()
    for line in (
        '    "awkLate": "2.0",',
        '    "awkGone": "1.0",',
        "    AWK_BAD = 5  # since 2.0",
        "    AWK_DROPPED = 4  # until 1.0",
    ):
        assert line in lines


def test_what_changed_is_kept_as_it_was_before(two: Merged) -> None:
    assert set(two.before) == {
        Before("awkHidden", "2.0", "awkHidden_1"),
        Before("AWK_MODES", "2.0", 2),
        Before("AWK_VERSION", "2.0", 1),
        Before("awkBox_t", "2.0", "awkBox_t_before_2_0"),
        Before("awkConfig_t", "2.0", "awkConfig_v1"),
        Before("awkKind_t", "2.0", "awkKind_t_before_2_0"),
    }


@pytest.mark.parametrize(
    ("version", "text", "kinds"), [("1.0", OLD, 1), ("1.9", OLD, 1), ("2.0", NEW, 2), ("2.1", NEW, 2), (None, NEW, 2)]
)
def test_a_module_is_as_the_header_of_the_version_that_is_loaded(
    two: Merged, tmp_path: Path, version: str | None, text: str, kinds: int
) -> None:
    module = as_of(two, version)
    layout.check(module, parsed(text, tmp_path))
    assert ctypes.sizeof(module.awkConfig_t) == ctypes.sizeof(module.awkBox_t) == 4 * kinds
    values = module.awkMode_t.AWK_MODES, module.AWK_VERSION, len(module.awkKind_t)
    assert values == (kinds + 1, kinds, kinds)


def test_the_newest_names_of_a_signature_are_taken(two: Merged) -> None:
    line = "def awkBoth(box: Ptr[awkBox_t], newName: awkAnyKind_t, /) -> awkStatus_t: ..."
    assert line in emit(TWO, two, {}, "awk 1.0, 2.0").splitlines()


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("int awkDo(int x);", "void awkDo(int x);", "awkDo is .* in 1.0 and .* in 2.0"),
        ("static inline int awkDo(void) { return 0; }", "int awkDo(void);", "awkDo is inline in 1.0: give the symbol"),
        ("typedef struct awkX *awk_t;", "typedef struct { int a; } awk_t;", "awk_t is "),
        ("typedef int awk_t;", "typedef double awk_t;", "awk_t is "),
        ("enum awk { AWK_A = 1 };", "enum awk { AWK_B = 1 };", "the value of AWK_A, which is gone, means"),
        (f"{ONE_TWO}\n#define awkA awkOne", f"{ONE_TWO}\n#define awkA awkTwo", "awkA is awkOne in 1.0"),
    ],
)  # fmt: skip
def test_a_difference_without_a_rule_is_refused(old: str, new: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(MergeError, match=complaint):
        merge([("1.0", parsed(old, tmp_path)), ("2.0", parsed(new, tmp_path))])


def test_what_comes_and_goes_is_refused(tmp_path: Path) -> None:
    there, gone = parsed("int awkDo(void);", tmp_path), parsed("int awkElse(void);", tmp_path)
    with pytest.raises(MergeError, match="awkDo comes and goes"):
        merge([("1.0", there), ("2.0", gone), ("3.0", there)])


def test_a_type_that_changed_is_another_modules_in_each_version(two: Merged) -> None:
    row = dataclasses.replace(TWO, uses=("other",))
    text = emit(row, two, {"awkBox_t": "other", "awkMode_t": "other"}, "awk")
    assert "from cudabind.sys.other import _names as _other" in text.splitlines()
    assert "class awkBox_t(" not in text
    for version, size in (("1.0", 4), ("2.0", 8)):
        other = layout.load("other", emit(dataclasses.replace(TWO, module="other"), two, {}, "awk"), version)
        module = layout.load("awk", text, version, {"other": other})
        assert module.awkBox_t is other.awkBox_t
        assert ctypes.sizeof(module.awkBox_t) == size
        assert {"awkBox_t", "awkMode_t"} <= set(dir(module))
        hint = module._names.signature("awkBoth").__annotations__["box"]
        assert module._names.evaluate(hint) is ctypes.POINTER(other.awkBox_t)


def test_an_older_signature_is_that_of_an_older_library(tmp_path: Path) -> None:
    status = "typedef enum { AWK_OK = 0 } awkStatus_t; const char *awkText(awkStatus_t status);"
    old, new = "awkStatus_t awkDo(int x, int *y);", "awkStatus_t awkDo(long x);"
    merged = merge([("1.0", parsed(status + old, tmp_path)), ("2.0", parsed(status + new, tmp_path))])
    assert merged.before == [Before("awkDo", "2.0", "awkDo_before_2_0")]
    for version, kinds in (("1.0", ["int32_t", "Mem[c_int32]"]), ("2.0", ["long_t"]), (None, ["long_t"])):
        module = layout.load("awk", emit(dataclasses.replace(ROW, left_out={}), merged, {}, "awk"), version)
        assert [*module._names.signature("awkDo").__annotations__.values()] == [*kinds, "awkStatus_t"]
        assert module._names.symbol("awkDo") == "awkDo"
        assert set(_bind.symbols(module)) == {"awkDo", "awkText"}


def test_a_number_that_means_something_else_by_now_is_an_older_librarys(tmp_path: Path) -> None:
    old, new = "typedef enum { AWK_A = 1, AWK_B = 2 } awk_t;", "typedef enum { AWK_B = 1, AWK_C = 2 } awk_t;"
    merged = merge([("1.0", parsed(old, tmp_path)), ("2.0", parsed(new, tmp_path))], renumbered=("awk_t",))
    text = emit(dataclasses.replace(TWO, inline_as={}), _with_a_status(merged), {}, "awk")
    for version, members in (("1.0", {"AWK_A": 1, "AWK_B": 2, "AWK_C": 2}), ("2.0", {"AWK_B": 1, "AWK_C": 2})):
        made = layout.load("awk", text, version).awk_t
        assert {name: each.value for name, each in made.__members__.items()} == members
        assert made(2).name == ("AWK_B" if version == "1.0" else "AWK_C")


def _with_a_status(merged: Merged) -> Merged:
    merged.header.types["awkStatus_t"] = Enum("awkStatus_t", (("AWK_OK", 0),))
    merged.header.functions["awkText"] = Function("awkText", Named("awkStatus_t", "enum", "awkStatus_t"), ())
    return merged


def test_an_alias_is_of_what_its_target_is_in_each_version(tmp_path: Path) -> None:
    old = "typedef struct awkS { int a; } awkT; void awkUse(awkT *x);"
    merged = merge([("1.0", parsed(old, tmp_path)), ("2.0", parsed(old.replace("int", "double"), tmp_path))])
    text = emit(dataclasses.replace(TWO, inline_as={}), _with_a_status(merged), {}, "awk")
    assert [ctypes.sizeof(layout.load("awk", text, version).awkT) for version in ("1.0", "2.0")] == [4, 8]


def test_a_struct_of_an_older_version_is_made_of_older_structs(tmp_path: Path) -> None:
    old = "typedef struct { int a; } awkIn; typedef struct { char c; awkIn in; } awkOut; void awkUse(awkOut *x);"
    merged = merge([("1.0", parsed(old, tmp_path)), ("2.0", parsed(old.replace("int", "double"), tmp_path))])
    text = emit(dataclasses.replace(TWO, inline_as={}), _with_a_status(merged), {}, "awk")
    module = layout.load("awk", text)
    assert (ctypes.sizeof(module.awkOut), ctypes.sizeof(module.awkOut_before_2_0)) == (16, 8)


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


def test_a_change_in_a_module_without_a_library_is_refused(two: Merged) -> None:
    with pytest.raises(EmitError, match="without a library no version can be asked"):
        emit(dataclasses.replace(TWO, prefixes=()), two, {}, "awk")


def test_every_library_has_a_version_for_every_release() -> None:
    assert {len(pins.versions) for pins in WHEELS} == {len(RELEASES)}
    for row in ROWS:
        versions = [tuple(map(int, sources.version(row, release).split("."))) for release in RELEASES]
        assert versions == sorted(versions), row.module


@pytest.fixture(scope="module")
def fetched() -> None:
    try:
        sources.prefetch()
        for row in ROWS:
            for release in RELEASES:
                sources.folders(row, release)
    except WheelError as error:
        pytest.skip(f"NVIDIA's headers cannot be had: {error}")


@pytest.mark.usefixtures("fetched")
def test_every_header_of_a_library_is_read_or_left_out_with_a_reason() -> None:
    read = {header for row in ROWS for header in (*row.headers, *row.included)}
    for library in {row.wheel for row in ROWS if row.prefixes and not row.symbols}:
        for folder in sources.include(sources.wheel(library, RELEASES[-1])):
            unread = {file.name for file in folder.glob("*.h")} - read
            assert not [name for name in unread if not any(fnmatch(name, each) for each in HEADERS_LEFT_OUT)]


@pytest.mark.usefixtures("fetched")
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("module", "numbers"),
    [
        ("cublas", ("CUBLAS_VER_MAJOR", "CUBLAS_VER_MINOR", "CUBLAS_VER_PATCH")),
        ("cudnn", ("CUDNN_MAJOR", "CUDNN_MINOR", "CUDNN_PATCHLEVEL")),
        ("cufft", ("CUFFT_VER_MAJOR", "CUFFT_VER_MINOR", "CUFFT_VER_PATCH")),
        ("curand", ("CURAND_VER_MAJOR", "CURAND_VER_MINOR", "CURAND_VER_PATCH")),
        ("cusolverDn", ("CUSOLVER_VER_MAJOR", "CUSOLVER_VER_MINOR", "CUSOLVER_VER_PATCH")),
        ("cusparse", ("CUSPARSE_VER_MAJOR", "CUSPARSE_VER_MINOR", "CUSPARSE_VER_PATCH")),
        ("cusparseLt", ("CUSPARSELT_VER_MAJOR", "CUSPARSELT_VER_MINOR", "CUSPARSELT_VER_PATCH")),
        ("cutensor", ("CUTENSOR_MAJOR", "CUTENSOR_MINOR", "CUTENSOR_PATCH")),
        ("nccl", ("NCCL_MAJOR", "NCCL_MINOR", "NCCL_PATCH")),
    ],
)
def test_a_librarys_version_is_the_one_in_its_header(module: str, numbers: tuple[str, ...], release: str) -> None:
    row = next(row for row in ROWS if row.module == module)
    constants = sources.header_of(row, release).constants
    assert sources.version(row, release) == ".".join(str(constants[number]) for number in numbers)


@pytest.mark.usefixtures("fetched")
def test_what_is_committed_is_what_the_generator_makes(capsys: pytest.CaptureFixture[str]) -> None:
    # `make check` looks at the libraries of all areas.
    toolkit = [row.module for row in ROWS if getattr(LIBRARIES.get(row.library or row.module), "area", AREA) == AREA]
    assert len(toolkit) > 20
    assert command.main([*toolkit, "--check"]) == 0, capsys.readouterr().out


@pytest.mark.usefixtures("fetched")
def test_a_difference_is_shown_and_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "SYS", tmp_path)
    (tmp_path / "cuda_types.py").write_text("old = 1\n")
    assert command.main(["cuda_types", "--check"]) == 1
    assert "-old = 1" in capsys.readouterr().out
    assert command.main(["cuda_types"]) == 0
    assert command.main(["cuda_types", "--check"]) == 0
