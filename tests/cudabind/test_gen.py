"""The generator on a header that has everything awkward in it, and on NVIDIA's: what is committed is what it makes."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
from importlib import metadata
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("clang", reason="libclang is not installed: pip install cudabind[gen]")
if shutil.which("gcc") is None:
    pytest.skip("gcc, whose own headers the parser needs, is not installed", allow_module_level=True)

from cudabind.gen import __main__ as command
from cudabind.gen import layout
from cudabind.gen.emit import EmitError, emit
from cudabind.gen.libraries import ROWS, Row
from cudabind.gen.parse import HeaderError, parse

if TYPE_CHECKING:
    from pathlib import Path

    from cudabind.gen.model import Header

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

typedef enum { AWK_OK = 0, AWK_BAD = 3, AWK_ALSO_BAD = AWK_BAD, AWK_BELOW = -1 } awkStatus_t;
typedef enum awkMode { AWK_FAST = 1 } awkMode_t;
enum { AWK_LOOSE = 9 };

typedef struct awkContext *awkHandle_t;
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
    wheel=("awk", "1.0"),
    docs="https://example.org",
    prefixes=("awk",),
    status="awkStatus_t",
    success="AWK_OK",
    text="awkText",
    error="CublasLtError",
    left_out={"awkInline": "inline in the header"},
)


@pytest.fixture
def header(tmp_path: Path) -> Header:
    (tmp_path / "awk.h").write_text(HEADER)
    compiler = command.include_folders("libclang")[-1]
    return parse(ROW.headers, [tmp_path, compiler], ROW.prefixes)


def test_macros_are_evaluated_and_what_is_no_constant_drops_out(header: Header) -> None:
    assert header.constants == {
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
    text = emit(ROW, header, {})
    for line in (
        "class awkHandle_t(Handle): ...",
        "class awkDesc_t(Handle): ...",
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
        "    table: awkTable_t,",
        "    lambda_: int32_t,",
        "    out: Mem[c_void_p],",
        "awkOld = awkOpen_v2",
    ):
        assert line in text.splitlines(), line


def test_layouts_are_the_compilers(header: Header) -> None:
    text = emit(ROW, header, {})
    layout.check(text, header)
    module = layout.load(text)
    whole = module.awkAll()
    whole.i = 0x3F800000
    assert whole.f == 1.0
    whole.inner.b = 7
    whole.bits.high = 31
    assert (whole.bits.low, whole.bits.high) == (0, 31)
    assert len(whole.grid) == 2
    assert ctypes.sizeof(module.awkWord_t) == 8


def test_a_layout_that_ctypes_cannot_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "awk.h").write_text("struct awkTight { char a; int b; } __attribute__((packed));\n")
    header = parse(("awk.h",), [tmp_path, command.include_folders("libclang")[-1]])
    text = emit(dataclasses.replace(ROW, prefixes=()), header, {})
    with pytest.raises(layout.LayoutError, match=r"awkTight has 8 bytes, the compiler gives it 5"):
        layout.check(text, header)


def test_an_inline_function_needs_a_reason(header: Header) -> None:
    with pytest.raises(EmitError, match="inline, so give a reason in left_out: awkInline"):
        emit(dataclasses.replace(ROW, left_out={}), header, {})


def test_a_reason_for_what_is_not_there_is_refused(header: Header) -> None:
    with pytest.raises(EmitError, match="no function: awkGone"):
        emit(dataclasses.replace(ROW, left_out={**ROW.left_out, "awkGone": "it is gone"}), header, {})


def test_success_must_be_zero(header: Header) -> None:
    with pytest.raises(EmitError, match="AWK_BAD is not the 0 of awkStatus_t"):
        emit(dataclasses.replace(ROW, success="AWK_BAD"), header, {})


def test_a_header_that_does_not_compile_is_an_error_with_the_parsers_words(tmp_path: Path) -> None:
    with pytest.raises(HeaderError, match=r"nowhere\.h"):
        parse(("nowhere.h",), [tmp_path])


@pytest.fixture
def pinned() -> None:
    for package, version in {row.wheel for row in ROWS}:
        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError:
            pytest.skip(f"{package}, whose headers are parsed, is not installed")
        if installed != version:
            pytest.skip(f"{package} {installed} is installed, and {version} is pinned")


@pytest.mark.usefixtures("pinned")
def test_what_is_committed_is_what_the_generator_makes(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.usefixtures("pinned")
def test_a_difference_is_shown_and_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "SYS", tmp_path)
    (tmp_path / "cuda_types.py").write_text("old = 1\n")
    assert command.main(["cuda_types", "--check"]) == 1
    assert "-old = 1" in capsys.readouterr().out
    assert command.main(["cuda_types"]) == 0
    assert command.main(["cuda_types", "--check"]) == 0


def test_another_wheel_than_the_pinned_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _package: "1.2.3")
    row = next(row for row in ROWS if row.module == "cublasLt")
    assert command.wrong_wheel(row) == (
        "cublasLt: nvidia-cublas 1.2.3 is installed, but the module is generated from 13.10.0.20"
    )


@pytest.mark.usefixtures("pinned")
def test_a_row_is_all_that_another_library_needs() -> None:
    row = Row(
        module="cublas",
        headers=("cublas_v2.h", "cublas_api.h"),
        wheel=("nvidia-cublas", "13.10.0.20"),
        docs="https://docs.nvidia.com/cuda/cublas/",
        prefixes=("cublas",),
        status="cublasStatus_t",
        success="CUBLAS_STATUS_SUCCESS",
        text="cublasGetStatusString",
        error="CublasLtError",
        uses=("cuda_types", "cublasLt"),
    )
    header = command.header_of(row)
    module = layout.load(command.generate(row, header))
    assert len(header.functions) > 500
    assert module.cublasCreate is module.cublasCreate_v2
    assert "alpha: Mem[cuComplex]" in command.generate(row, header)
