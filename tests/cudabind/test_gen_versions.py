"""The generator on headers of several versions: merged, each name says since when and until when it is there."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("clang", reason="libclang is not installed: pip install cudabind[gen]")
if shutil.which("gcc") is None:
    pytest.skip("gcc, whose own headers the parser needs, is not installed", allow_module_level=True)

from cudabind import _bind
from cudabind.gen import layout
from cudabind.gen.emit import EmitError, emit
from cudabind.gen.merge import Before, Merged, MergeError, merge
from cudabind.gen.model import Enum, Function, Named

if TYPE_CHECKING:
    from types import ModuleType

spec = importlib.util.spec_from_file_location("awkward_header", Path(__file__).with_name("awkward_header.py"))
awkward = importlib.util.module_from_spec(spec)
spec.loader.exec_module(awkward)
ROW, parsed = awkward.ROW, awkward.parsed

pytestmark = pytest.mark.generator

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


def test_a_change_in_a_module_without_a_library_is_refused(two: Merged) -> None:
    with pytest.raises(EmitError, match="without a library no version can be asked"):
        emit(dataclasses.replace(TWO, prefixes=()), two, {}, "awk")
