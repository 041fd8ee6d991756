"""A header with everything awkward in it, and what the generator reads of a header and makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cudabind.gen import sources
from cudabind.gen.emit import emit
from cudabind.gen.libraries import Row
from cudabind.gen.merge import merge
from cudabind.gen.parse import parse

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
