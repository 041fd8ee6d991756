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


@pytest.mark.parametrize("op", model.OPS)
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_line_is_found_again(op: str, ranks: int) -> None:
    times = [12e-6 + n * model.bus(op, ranks) / 310e9 for n in model.SIZES]
    found = model.fit(op, model.SIZES, times, ranks)
    assert found.latency == pytest.approx(12e-6, rel=1e-6)
    assert found.bandwidth == pytest.approx(310e9, rel=1e-6)
    assert found.off < 1e-6


def test_the_measured_two_are_predicted_as_they_were_measured() -> None:
    """Of the ring, at the sizes where its steps do not count."""
    for op in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
        fit = FITS[op]
        expected = fit.latency + (1 << 30) * model.bus(op, 2) / fit.bandwidth
        assert model.predict(op, "ring", 1 << 30, 2, fit) == pytest.approx(expected, rel=0.02)


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
    [model.fits_table(FITS), *(model.predictions_table(op, FITS) for op in model.OPS), model.published_table(FITS)],
    ids=["fits", *model.OPS, "published"],
)
def test_the_page_has_the_tables_that_the_script_prints(lines: list[str]) -> None:
    assert "\n".join(lines) in TEXT


def test_the_data_are_those_of_the_other_page() -> None:
    other = (ROOT / "docs" / "collectives.md").read_text(encoding="utf-8")
    for op, values in model.MEASURED.items():
        line = next(line for line in other.splitlines() if line.startswith(f"| {op} |"))
        assert [float(cell.split("(")[0]) for cell in line.split("|")[2:7]] == list(values)
