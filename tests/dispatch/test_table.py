"""The table as it stands: no row twice, none out of reach, each ends in a function of its library."""

import importlib
import inspect
from collections import Counter

import pytest

import cudabind
import dispatch as dp
from dispatch.core.row import Row, Table
from dispatch.keys import HOST, Arch
from dispatch.table.select import called
from dispatch.table.table import LATER

ROWS = list(dp.TABLE)
GPU_ROWS = [row for row in ROWS if row.min_arch != HOST]
BOUND_ROWS = [row for row in GPU_ROWS if row.library in cudabind.LIBRARIES]  # CUTLASS is templates, and no library
RULES = list(dict.fromkeys(rule for row in ROWS for rule in row.rules))
name = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def test_names_are_unique():
    assert [name for name, count in Counter(row.name for row in ROWS).items() if count > 1] == []


def test_no_row_stands_twice_and_none_is_out_of_reach():
    Table(ROWS)  # raises BadRow for either
    for number, row in enumerate(ROWS):
        assert [other.name for other in ROWS[:number] if other.covers(row)] == []


def test_every_op_has_gpu_rows_and_the_same_on_the_host():
    for op in dp.TABLE.ops:
        columns = {
            kind: [(row.dtypes, row.epilogue_dtypes, row.compute, row.epilogues, row.scales, row.rules) for row in rows]
            for kind, rows in {
                "gpu": [row for row in dp.TABLE.of(op) if row.min_arch != HOST],
                "host": [row for row in dp.TABLE.of(op) if row.min_arch == HOST],
            }.items()
        }
        assert columns["gpu"]
        assert columns["host"] == columns["gpu"]


@pytest.mark.parametrize("row", BOUND_ROWS, ids=lambda row: row.name)
def test_a_gpu_row_ends_in_a_function_of_its_library(row: Row):
    module = importlib.import_module(f"cudabind.sys.{row.library}")
    function = getattr(module, row.function)
    assert callable(function)
    assert called(row) == f"{module.__name__}.{row.function}"
    assert function.__name__ == row.function
    assert row.min_version > (0,)


@name
def test_columns_are_sound(row: Row):
    assert callable(row.call)
    assert row.call.__doc__
    assert row.run_on == () or all(isinstance(machine, str) and machine for machine in row.run_on)
    assert row.max_arch is None or row.max_arch >= row.min_arch
    assert len(set(row.epilogues)) == len(row.epilogues)
    assert len(set(row.scales)) == len(row.scales)
    assert row.on(row.min_arch)
    assert row.on(HOST) == (row.min_arch == HOST)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_is_a_named_function_with_a_docstring(rule):
    assert inspect.isfunction(rule)
    assert rule.__name__ != "<lambda>"
    assert rule.__doc__
    assert getattr(importlib.import_module(rule.__module__), rule.__name__) is rule


def test_rows_for_newer_gpus_say_that_no_machine_has_run_them():
    assert all(row.run_on == () for row in ROWS if row.min_arch >= Arch(100))
    assert any(row.min_arch >= Arch(100) for row in ROWS)


def test_issue_dtypes_are_all_there():
    """Every combination that matmul is to have, by the dtypes of a, b and d."""
    have = {(str(row.dtypes[0]), str(row.dtypes[1]), str(row.dtypes[3])) for row in GPU_ROWS if row.op == "matmul"}
    same = {(one, one, one) for one in ("f64", "f32", "f16", "bf16", "c64", "c128")}
    half = {("f16", "f16", "f32"), ("bf16", "bf16", "f32")}
    pairs = [("f8e4m3", "f8e4m3"), ("f8e4m3", "f8e5m2"), ("f8e5m2", "f8e4m3")]
    fp8 = {(*pair, out) for pair in pairs for out in ("bf16", "f16", "f32", "f8e4m3")}
    assert have >= same | half | fp8 | {("i8", "i8", "i32"), ("f4e2m1", "f4e2m1", "bf16")}


def test_every_room_has_the_ops_that_the_table_expects_there():
    for room, ops in LATER.items():
        assert {row.op for row in importlib.import_module(room).ROWS} == set(ops)
