"""Every GPU row of the table at other addresses: a relocated graph gives what the library's own call gives.

A row's cases are laid out at random, each operand exactly as aligned as its layout promises, between guard bytes, and
run by the library's own call and by the relocated graph, in random order with several launches in flight. At the end a
table tells which rows are relocatable, and why the others are not; RELOCATION_JSON names a file for the figures, one
for each of several processes.
CUTLASS's rows, whose kernels compile for half a minute each, have a test of their own: `-k "not cutlass"` leaves it
out.
"""

from __future__ import annotations

import collections
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import dispatch as dp
from dispatch.core.row import refusals
from dispatch.errors import NoRow
from dispatch.keys import HOST
from dispatch.row_check import cases_of

sys.path.insert(0, str(Path(__file__).parents[1]))

import operand_sets as sets

sys.path.remove(str(Path(__file__).parents[1]))  # else every child of a later test would find it, too

CASES = 2  # of a row
MAX_TRIED = 12  # cases that are looked at for those
PLACEMENTS = 4  # of a case
ROWS = [row for row in dp.TABLE if row.min_arch != HOST and row.library != "cutlass"]
CUTLASS = [row for row in dp.TABLE if row.min_arch != HOST and row.library == "cutlass"]
FOUND: list[dict[str, object]] = []  # of each case that was run


@pytest.fixture(scope="module", autouse=True)
def _summary(request):
    """The table of all rows that were run, printed behind the last test."""
    yield
    if not FOUND:
        return
    target = os.environ.get("RELOCATION_JSON")
    if target:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "")  # each has rows of its own
        Path(target + worker).write_text(json.dumps(FOUND, indent=1) + "\n", encoding="utf-8")
    capturing = request.config.pluginmanager.getplugin("capturemanager")
    with capturing.global_and_fixture_disabled():
        print(f"\n{summary()}", flush=True)


def summary() -> str:
    """The share of rows of each library that are relocatable, and the reasons of the others."""
    lines = []
    for library in dict.fromkeys(str(found["library"]) for found in FOUND):
        by_row: dict[str, list[str]] = {}
        for found in FOUND:
            if found["library"] == library:
                by_row.setdefault(str(found["row"]), []).append(str(found["why"]))
        good = [row for row, whys in by_row.items() if not any(whys)]
        lines.append(
            f"{library}: {len(good)} of {len(by_row)} rows relocatable, by {len(FOUND)} cases of all libraries"
        )
        reasons = collections.Counter(why for whys in by_row.values() for why in set(whys) if why)
        lines += [f"    {count:3} rows: {why}" for why, count in reasons.most_common()]
    nodes = collections.Counter(int(str(found["nodes"])) for found in FOUND if not found["why"])
    lines.append(f"nodes of a call: {dict(sorted(nodes.items()))}")
    loose = sorted({str(found["row"]) for found in FOUND if found["loose"]})
    lines.append(f"held to bounds, for the library gives other bits each time: {', '.join(loose) or 'none'}")
    return "\n".join(lines)


def accepted(row, device, rng):
    """Checks of a row's cases that it carries out, with their requests and operands; others where there are none."""
    executor = device.executor()
    cases = cases_of(row)
    beside = []
    for number in rng.permutation(len(cases))[:MAX_TRIED]:
        check = cases[number].check(device, rng)
        request = check.request
        why = refusals(row, request, request.signature())
        if why and getattr(request, "library", "") is None:  # another library may take what this row refuses
            request = replace(request, library=row.library)
            why = refusals(row, request, request.signature())
        written = [tensor for _, tensor, written in request.tensors() if written]
        if why or getattr(request, "autotune", False) or any(not tensor.size for tensor in written):
            continue
        try:
            operands = sets.OperandSet(executor, request)
        except NoRow:  # the library refuses it
            continue
        if operands.plan.row is row:
            yield check, operands
        else:
            beside.append((check, operands))
    yield from beside


def run_row(row, device, rng, most):
    if not row.on(device.arch):
        pytest.skip(f"needs {row.min_arch} to {row.max_arch or 'newer'}, this GPU is {device.arch}")
    executor = device.executor()
    count = 0
    for check, operands in accepted(row, device, rng):
        plan = operands.plan
        why = executor.relocate(plan, operands.arguments)
        before = plan.relocation.launches if plan.relocation is not None else 0
        placements = [sets.Placement(operands, rng) for _ in range(PLACEMENTS)]
        left = sets.run_all(executor, operands, placements, rng)
        relocation = plan.relocation
        launches = 0 if relocation is None else relocation.launches - before
        same_bits = sets.compare(check, operands, placements, left)
        nodes = 0 if relocation is None else relocation.nodes
        found = {"row": row.name, "library": row.library, "op": row.op, "case": check.name, "why": why, "nodes": nodes}
        FOUND.append(found | {"launches": launches, "loose": not same_bits, "operands": len(operands.regions)})
        if why:
            assert not launches, f"relocated, though it says: {why}"
        else:  # one of them may have been compared with the library's own call, and run by that
            assert launches >= PLACEMENTS - 1, f"{check.name}: {launches} of {PLACEMENTS} launches were relocated"
        count += 1
        if count == most:
            break
    if not count:
        pytest.skip("it refuses all cases that were drawn")
    assert not executor.relocation_stats()["differed"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_is_the_same_at_other_addresses(row, dev, rng, skip_without):
    skip_without(row)
    run_row(row, dev, rng, CASES)


@pytest.mark.parametrize("row", CUTLASS, ids=lambda row: row.name)
def test_a_row_of_cutlass_is_the_same_at_other_addresses(row, dev, rng, skip_without):
    skip_without(row)
    run_row(row, dev, rng, 1)


def test_the_comparison_finds_what_is_wrong(dev, rng):
    """A result that is off, or memory beside it that was written, ends in a Mismatch."""
    row = next(row for row in ROWS if row.op == "softmax")
    check, operands = next(accepted(row, dev, rng))
    placements = [sets.Placement(operands, rng) for _ in range(2)]
    left = sets.run_all(dev.executor(), operands, placements, rng)
    sets.compare(check, operands, placements, left)
    for is_free in (True, False):
        wrong = [[image.copy() for image in three] for three in left]
        place = int(rng.choice((placements[1].free == is_free).nonzero()[0]))
        wrong[1][sets.RELOCATED][place] ^= 0x55
        with pytest.raises(sets.Mismatch, match="not what the library" if is_free else "beside the outputs"):
            sets.compare(check, operands, placements, wrong)
