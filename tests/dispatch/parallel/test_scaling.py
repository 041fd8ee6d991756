"""The model behind docs/scaling.md finds again what it was made from, and the page has the tables that it prints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))
import scaling_model as model  # noqa: E402

TEXT = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
FITS = {op: model.measured(op) for op in model.OPS}
TIMES = {op: model.seconds_measured(op) for op in model.OPS}


@pytest.mark.parametrize("op", model.OPS)
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_latency_and_a_bandwidth_are_found_again(op: str, ranks: int) -> None:
    times = [12e-6 + n * model.bus(op, ranks) / 310e9 for n in model.SIZES]
    found = model.fit(op, model.SIZES, times, ranks)
    assert found.latency == pytest.approx(12e-6, rel=1e-6)
    assert found.bandwidth == pytest.approx(310e9, rel=1e-6)
    assert max(map(abs, found.off)) < 1e-6


def test_errors_have_their_sign_and_stand_where_they_are() -> None:
    times = [12e-6 + n * model.bus("broadcast", 2) / 310e9 for n in model.SIZES]
    slow = model.SIZES.index(model.MIB)
    times[slow] *= 2  # which is neither of the latency nor of the bandwidth
    found = model.fit("broadcast", model.SIZES, times, 2)
    assert found.latency == pytest.approx(12e-6, rel=1e-6)
    assert found.bandwidth == pytest.approx(310e9, rel=1e-6)
    assert found.off == pytest.approx((0, -0.5, 0), abs=1e-6)


@pytest.mark.parametrize("op", model.OPS)
def test_the_measured_two_are_predicted_as_they_were_measured(op: str) -> None:
    """As far as the page says: within 10% of small sizes and of 256 MiB and more, and too quick in between."""
    off = [
        model.predict(op, "ring", size, 2, FITS[op]) / each - 1
        for size, each in zip(model.SIZES, TIMES[op], strict=True)
    ]
    for size, each in zip(model.SIZES, off, strict=True):
        if size <= model.SMALL or size >= 256 * model.MIB:
            assert abs(each) < 0.1
        elif size >= model.MIB:
            assert -0.4 < each < 0


def test_more_gpus_and_more_bytes_take_longer_and_a_tree_wins_where_a_ring_is_long() -> None:
    fit = FITS["all_reduce"]
    for algorithm in ("ring", "tree"):
        for size in (8, 1 << 20, 1 << 30):
            times = [model.predict("all_reduce", algorithm, size, ranks, fit) for ranks in model.GPUS]
            assert times == sorted(times)
    small = [model.predict("all_reduce", each, 1 << 20, 16384, fit) for each in ("ring", "tree")]
    assert small[0] > 50 * small[1]
    assert model.steps_of("all_reduce", 16, 2) == (28, 2)
    assert model.steps_of("all_gather", 8, 1) == (7, 0)


@pytest.mark.parametrize(
    "lines",
    [
        model.measured_table(model.SIZES, TIMES),
        model.fits_table(FITS),
        model.errors_table(model.SIZES, TIMES, FITS),
        *(model.predictions_table(op, FITS) for op in model.OPS),
        model.published_table(FITS),
    ],
    ids=["measured", "fits", "errors", *model.OPS, "published"],
)
def test_the_page_has_the_tables_that_the_script_prints(lines: list[str]) -> None:
    assert "\n".join(lines) in TEXT


def test_the_data_are_those_of_the_table_on_the_page() -> None:
    """Read from the page, and not as the script prints them."""
    lines = TEXT.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("| µs, measured |"))
    units = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    sizes = [cell.split() for cell in lines[head].strip("| ").split(" | ")[1:]]
    assert tuple(int(count) * units[unit] for count, unit in sizes) == model.SIZES
    rows = [line.strip("| ").split(" | ") for line in lines[head + 2 : head + 2 + len(model.OPS)]]
    assert {op: tuple(map(float, cells)) for op, *cells in rows} == model.MEASURED
    assert lines[head + 2 + len(model.OPS)] == ""
