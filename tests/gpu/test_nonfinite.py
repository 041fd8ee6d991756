"""NaN and infinities on the GPU: every row by its own cases, beside the host, and as its column says."""

import functools
import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.keys import HOST
from dispatch.nonfinite import ENGINE, IEEE, NONE

SOURCE = Path(__file__).parents[1] / "dispatch" / "test_nonfinite.py"
spec = importlib.util.spec_from_file_location("the_host_s", SOURCE)
the_host_s = importlib.util.module_from_spec(spec)
spec.loader.exec_module(the_host_s)

# CUTLASS compiles a kernel for each tree, half a minute each: its trees have a test of their own.
ROWS = [
    row
    for row in dp.TABLE
    if row.arch != HOST and row.run_on and row.nonfinite != NONE
    if row.op not in the_host_s.WITHOUT_CASES and not row.op.startswith("cutlass")
]
# Not held to the host: draws of their own; V of a key that a mask hides, which is read or not; gradients of infinities.
DRAWN = ("dropout_fwd", "dropout_bwd")
HIDDEN = {"sdpa_fwd": ("v",)}
NAN_ALONE = ("rnn_bwd_data", "rnn_bwd_weights", "norm_bwd")
# Scales of blocks are multiplied into what they scale on the host, and into sums of it on a GPU: 0 times infinity.
FACTORS = ("scales.", "descale", "scale_")


@pytest.fixture
def gpu():
    return dp.device("cuda:0")


def kinds(array):
    """What of numbers is compared where they are not finite: nothing, NaN, +∞ or -∞."""
    return np.where(np.isnan(array), 3, np.where(np.isposinf(array), 2, np.where(np.isneginf(array), 1, 0)))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_does_with_nan_and_infinities_as_it_says(row, gpu):
    """No result that reads an element hides its NaN; where a row is as IEEE 754 has it, the host does the same."""
    if not row.on(gpu.arch):
        pytest.skip(f"needs {row.arch}, this GPU is {gpu.arch}")
    host = dp.device("host")
    alike = row.nonfinite.startswith(IEEE) and row.op not in DRAWN and not row.dtypes[0].is_complex  # whose parts mix
    assert alike or row.nonfinite.startswith((ENGINE, IEEE))
    values = {"nan": np.nan} if row.op in NAN_ALONE or not alike else the_host_s.VALUES
    for make in the_host_s.makers(row, gpu):
        twin = functools.partial(make, device=host)
        others = the_host_s.effects(twin, values) if alike else iter(())
        for name, clean, found in the_host_s.effects(make, values):
            the_host_s.check_nan_stays(row, name, clean, found)
            if alike:
                _, _, theirs = next(others)
                if name not in (*the_host_s.CHOOSING.get(row.op, ()), *HIDDEN.get(row.op, ())):
                    compare(row, name, found, theirs)


def compare(row, name, mine, theirs):
    """The kinds of all results with each value put into an operand; raises where any differs."""
    for label in the_host_s.VALUES.keys() & mine.keys():
        if label != "nan" and name.startswith(FACTORS):
            continue
        for place, (got, wanted) in enumerate(zip(mine[label], theirs[label], strict=True)):
            if row.op == "norm_fwd" and place and label != "nan":
                continue  # the inverse variance of infinity
            if row.op == "ctc_loss" and place and not np.isfinite(theirs[label][0]).all():
                continue  # the gradient of an infinite loss
            differs = kinds(got) != kinds(wanted)
            assert not differs.any(), (
                f"{row.name}: {name}={label}, result {place}: {differs.sum()} of {differs.size} differ, first"
                f" {got[differs][0]} here and {wanted[differs][0]} on the host"
            )
