"""What makes one row cover another, on which machines a row is, and which versions of a library it takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import dispatch as dp
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
    extra=((F16, F32), (F16,)),
    compute=Compute.COMPUTE_32F,
    epilogues=(NONE, RELU),
    scales=(PLAIN, SCALED),
    rules=(needs_one,),
    arch=Arch(80),
    until=Arch(90),
    since=(12, 9),
    library="cublasLt",
    function="cublasLtMatmul",
    call=lambda *_: None,  # type: ignore[arg-type,return-value]  # nothing is bound here
)


def test_a_row_covers_itself() -> None:
    assert WIDE.covers(WIDE)


# A row that takes less is covered; one that takes anything more, or something else, is not.
@pytest.mark.parametrize(
    "less",
    [
        {"extra": ((F16,), (F16,))},
        {"extra": ((), ())},
        {"epilogues": (RELU,)},
        {"scales": (SCALED,)},
        {"rules": (needs_one, needs_other)},
        {"arch": Arch(86)},
        {"arch": Arch(90)},
        {"until": Arch(89)},
        {"since": (13,)},
        {"since": (12, 9, 1)},
        {"library": "another"},
        {"function": "another"},
    ],
    ids=" ".join,  # the columns that differ
)
def test_a_row_that_takes_less_is_covered(less: dict[str, Any]) -> None:
    assert WIDE.covers(dataclasses.replace(WIDE, **less))


@pytest.mark.parametrize(
    "other",
    [
        {"op": "other"},
        {"dtypes": (F32, F32, F32, F16)},
        {"compute": None},
        {"compute": Compute.COMPUTE_32F_FAST_TF32},
        {"extra": ((F16, F32, BF16), (F16,))},
        {"extra": ((F16, F32), (F32,))},
        {"epilogues": (NONE, RELU, GELU)},
        {"epilogues": (GELU,)},
        {"scales": ((ScaleMode.SCALAR_32F, None),)},
        {"rules": ()},
        {"rules": (needs_other,)},
        {"arch": Arch(75)},
        {"arch": Arch(100), "until": Arch(120)},
        {"until": Arch(100)},
        {"until": None},
        {"since": (12, 8)},
        {"since": (12,)},
        {"arch": HOST, "until": HOST},
    ],
    ids=" ".join,  # the columns that differ
)
def test_a_row_that_takes_anything_else_is_not_covered(other: dict[str, Any]) -> None:
    assert not WIDE.covers(dataclasses.replace(WIDE, **other))


def test_a_row_without_a_newest_architecture_covers_one_with_any() -> None:
    endless = dataclasses.replace(WIDE, until=None)
    assert endless.covers(WIDE)
    assert endless.covers(endless)
    assert not WIDE.covers(endless)


def test_what_is_covered_may_stand_before_what_covers_it_but_not_behind() -> None:
    narrow = dataclasses.replace(WIDE, epilogues=(RELU,))
    assert tuple(Table([narrow, WIDE])) == (narrow, WIDE)
    with pytest.raises(BadRow, match="can never be reached"):
        Table([WIDE, narrow])


@pytest.mark.parametrize(
    ("arch", "until", "on", "not_on"),
    [
        (Arch(80), Arch(90), (80, 86, 90), (75, 79, 91, 100)),
        (Arch(90), Arch(90), (90,), (89, 91)),
        (Arch(80), None, (80, 120), (79,)),
    ],
)
def test_a_row_is_for_its_architectures_and_no_other(
    arch: Arch, until: Arch | None, on: tuple[int, ...], not_on: tuple[int, ...]
) -> None:
    row = dataclasses.replace(WIDE, arch=arch, until=until)
    assert all(row.on(Arch(number)) for number in on)
    assert not any(row.on(Arch(number)) for number in not_on)
    assert not row.on(HOST)


def test_a_row_of_the_host_is_for_the_host_alone() -> None:
    row = dataclasses.replace(WIDE, arch=HOST, until=HOST)
    assert row.on(HOST)
    assert not row.on(Arch(90))
    assert not dataclasses.replace(row, until=None).on(Arch(90))


@pytest.mark.parametrize("column", ["epilogues", "scales"])
def test_a_row_without_an_epilogue_or_scale_modes_is_unsound(column: str) -> None:
    with pytest.raises(BadRow, match="at least"):
        Table([dataclasses.replace(WIDE, **{column: ()})])


# -- versions -------------------------------------------------------------------------------------------------------
@pytest.fixture
def product() -> dp.MatmulRequest:
    dev = dp.device("host")
    return dp.MatmulRequest(dev.zeros((4, 4)), dev.zeros((4, 4)))


def test_a_row_takes_its_oldest_version_and_all_after_it(product: dp.MatmulRequest) -> None:
    row = select(product, Arch(90))
    assert len(row.since) >= 2
    *head, last = row.since
    for version in (row.since, (*row.since, 0), (*head, last + 1), (row.since[0] + 1,), (row.since[0] + 1, 0)):
        assert select(product, Arch(90), {row.library: version}) is row
    for version in ((*head, last - 1), (*head, last - 1, 99), (row.since[0] - 1, 99), tuple(head)):
        with pytest.raises(NoRow, match=f"needs {row.library}"):
            select(product, Arch(90), {row.library: version})


def test_the_version_of_another_library_does_not_matter(product: dp.MatmulRequest) -> None:
    assert select(product, Arch(90), {"cudnn": (0,)}) is select(product, Arch(90))
