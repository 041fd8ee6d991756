"""What makes one row cover another, on which machines a row is, and which versions of a library it takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import dispatch as dp
from dispatch.core.fusion import Fusion
from dispatch.core.row import Row, Table
from dispatch.errors import BadRow, NoRow
from dispatch.keys import BF16, F16, F32, HOST, Arch, Compute, Epilogue, ScaleMode
from dispatch.table.select import select

NONE, RELU, GELU = Epilogue.NONE, Epilogue.RELU, Epilogue.GELU
PLAIN: tuple[ScaleMode | None, ScaleMode | None] = (None, None)
SCALED = (ScaleMode.SCALAR_32F, ScaleMode.SCALAR_32F)


def needs_one(_: Any) -> str:
    return ""


def needs_other(_: Any) -> str:
    return ""


WIDE = Row(
    op="matmul",
    dtypes=(F32, F32, F32, F32),
    compute=Compute.COMPUTE_32F,
    rules=(needs_one,),
    min_arch=Arch(80),
    max_arch=Arch(90),
    min_version=(12, 9),
    library="cublasLt",
    function="cublasLtMatmul",
    fusion=Fusion(((F16, F32), (F16,)), (NONE, RELU), (PLAIN, SCALED)),
    call=lambda *_: None,  # type: ignore[arg-type,return-value]  # nothing is bound here
)


def changed(row: Row, columns: dict[str, Any]) -> Row:
    """A row with other columns, those of its fusion among them."""
    assert row.fusion
    fused = {field.name for field in dataclasses.fields(Fusion)} & columns.keys()
    fusion = dataclasses.replace(row.fusion, **{name: columns[name] for name in fused})
    return dataclasses.replace(row, fusion=fusion, **{name: columns[name] for name in columns.keys() - fused})


def test_a_row_covers_itself() -> None:
    assert WIDE.covers(WIDE)


# A row that takes less is covered; one that takes anything more, or something else, is not.
@pytest.mark.parametrize(
    "less",
    [
        {"epilogue_dtypes": ((F16,), (F16,))},
        {"epilogue_dtypes": ((), ())},
        {"epilogues": (RELU,)},
        {"scales": (SCALED,)},
        {"rules": (needs_one, needs_other)},
        {"min_arch": Arch(86)},
        {"min_arch": Arch(90)},
        {"max_arch": Arch(89)},
        {"min_version": (13,)},
        {"min_version": (12, 9, 1)},
        {"function": "another"},
    ],
    ids=" ".join,  # the columns that differ
)
def test_a_row_that_takes_less_is_covered(less: dict[str, Any]) -> None:
    assert WIDE.covers(changed(WIDE, less))


@pytest.mark.parametrize(
    "other",
    [
        {"op": "other"},
        {"dtypes": (F32, F32, F32, F16)},
        {"compute": None},
        {"compute": Compute.COMPUTE_32F_FAST_TF32},
        {"epilogue_dtypes": ((F16, F32, BF16), (F16,))},
        {"epilogue_dtypes": ((F16, F32), (F32,))},
        {"epilogues": (NONE, RELU, GELU)},
        {"epilogues": (GELU,)},
        {"scales": ((ScaleMode.SCALAR_32F, None),)},
        {"rules": ()},
        {"rules": (needs_other,)},
        {"min_arch": Arch(75)},
        {"min_arch": Arch(100), "max_arch": Arch(120)},
        {"max_arch": Arch(100)},
        {"max_arch": None},
        {"min_version": (12, 8)},
        {"min_version": (12,)},
        {"min_arch": HOST, "max_arch": HOST},
        {"library": "another"},  # whose requests may name it
        {"library": "numpy", "stands_for": "another"},
    ],
    ids=" ".join,  # the columns that differ
)
def test_a_row_that_takes_anything_else_is_not_covered(other: dict[str, Any]) -> None:
    assert not WIDE.covers(changed(WIDE, other))


def test_a_row_without_a_newest_architecture_covers_one_with_any() -> None:
    endless = dataclasses.replace(WIDE, max_arch=None)
    assert endless.covers(WIDE)
    assert endless.covers(endless)
    assert not WIDE.covers(endless)


def test_what_is_covered_may_stand_before_what_covers_it_but_not_behind() -> None:
    narrow = changed(WIDE, {"epilogues": (RELU,)})
    assert tuple(Table([narrow, WIDE])) == (narrow, WIDE)
    with pytest.raises(BadRow, match="can never be reached"):
        Table([WIDE, narrow])


@pytest.mark.parametrize(
    ("min_arch", "max_arch", "on", "not_on"),
    [
        (Arch(80), Arch(90), (80, 86, 90), (75, 79, 91, 100)),
        (Arch(90), Arch(90), (90,), (89, 91)),
        (Arch(80), None, (80, 120), (79,)),
    ],
)
def test_a_row_is_for_its_architectures_and_no_other(
    min_arch: Arch, max_arch: Arch | None, on: tuple[int, ...], not_on: tuple[int, ...]
) -> None:
    row = dataclasses.replace(WIDE, min_arch=min_arch, max_arch=max_arch)
    assert all(row.on(Arch(number)) for number in on)
    assert not any(row.on(Arch(number)) for number in not_on)
    assert not row.on(HOST)


def test_a_row_of_the_host_is_for_the_host_alone() -> None:
    row = dataclasses.replace(WIDE, min_arch=HOST, max_arch=HOST)
    assert row.on(HOST)
    assert not row.on(Arch(90))
    assert not dataclasses.replace(row, max_arch=None).on(Arch(90))


@pytest.mark.parametrize("column", ["epilogues", "scales"])
def test_a_row_without_an_epilogue_or_scale_modes_is_unsound(column: str) -> None:
    with pytest.raises(BadRow, match="at least"):
        Table([changed(WIDE, {column: ()})])


# -- versions -------------------------------------------------------------------------------------------------------
@pytest.fixture
def product() -> dp.MatmulRequest:
    dev = dp.device("host")
    return dp.MatmulRequest(dev.zeros((4, 4)), dev.zeros((4, 4)), library="cublasLt")


def test_a_row_takes_its_oldest_version_and_all_after_it(product: dp.MatmulRequest) -> None:
    row = select(product, Arch(90))
    assert len(row.min_version) >= 2
    *head, last = row.min_version
    for version in (
        row.min_version,
        (*row.min_version, 0),
        (*head, last + 1),
        (row.min_version[0] + 1,),
        (row.min_version[0] + 1, 0),
    ):
        assert select(product, Arch(90), {row.library: version}) is row
    for version in ((*head, last - 1), (*head, last - 1, 99), (row.min_version[0] - 1, 99), tuple(head)):
        with pytest.raises(NoRow, match=f"needs {row.library}"):
            select(product, Arch(90), {row.library: version})


def test_the_version_of_another_library_does_not_matter(product: dp.MatmulRequest) -> None:
    assert select(product, Arch(90), {"cudnn": (0,)}) is select(product, Arch(90))


# -- fusion ---------------------------------------------------------------------------------------------------------
def test_a_row_without_a_fusion_is_as_one_with_an_empty_one() -> None:
    bare, empty = dataclasses.replace(WIDE, fusion=None), dataclasses.replace(WIDE, fusion=Fusion())
    assert (bare.epilogues, bare.epilogue_dtypes, bare.scales) == ((NONE,), (), (PLAIN,))
    assert bare.covers(empty)
    assert empty.covers(bare)
    with pytest.raises(BadRow, match="can never be reached"):
        Table([bare, empty])


def test_rows_have_a_fusion_only_where_it_says_something() -> None:
    assert [row.name for row in dp.TABLE if row.fusion == Fusion()] == []
    assert {row.op for row in dp.TABLE if row.fusion is None} >= {"reduce", "ctc_loss", "conv_bwd_data"}
    assert {row.op for row in dp.TABLE if row.fusion and row.scales != (PLAIN,)} == {"matmul"}
