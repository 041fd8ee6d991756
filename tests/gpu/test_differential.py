"""The sequences of tests/differential.py on a GPU, for about a minute; the program itself makes as many as wanted."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dispatch as dp

sys.path.insert(0, str(Path(__file__).parents[1]))

import differential

sys.path.remove(str(Path(__file__).parents[1]))  # else every child of a later test would find them, too

PROGRAM = Path(differential.__file__)
OPS = tuple(op for op in differential.OPS if not op.startswith("cutlass"))
PATIENCE = 300  # seconds that a sequence may take beside other work; the counts below are asserted


@pytest.mark.timeout(3 * PATIENCE)
@pytest.mark.parametrize("threads", [1, 4])
def test_a_sequence_of_calls_gives_what_fresh_requests_give(rng, threads):
    with differential.Sequence(dp.device("cuda:0"), int(rng.integers(1 << 30)), threads=threads, ops=OPS) as sequence:
        sequence.add_cases(3, 1 << 18, 40)
        report = sequence.run(12_000, PATIENCE)
    print(report)
    assert sum(report.calls.values()) >= 12_000
    assert set(sequence.cases) == {live.spec.function for live in every(sequence)}
    assert len(sequence.cases) >= 15
    assert not report.varying.keys() & {"matmul", "norm_fwd", "pooling", "activation"}  # cuDNN's sums differ


def every(sequence):
    return [live for lives in sequence.cases.values() for live in lives]


@pytest.mark.timeout(PATIENCE)
def test_memcheck_finds_nothing_in_a_sequence():
    checker = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(checker).exists():
        pytest.skip("compute-sanitizer is not installed")
    few = "--device cuda:0 --calls 400 --cases 1 --preparing 10 --ops softmax pooling_bwd reduce"
    ran = subprocess.run(
        [
            checker,
            "--tool",
            "memcheck",
            "--report-api-errors",
            "no",
            "--error-exitcode",
            "9",
            sys.executable,
            str(PROGRAM),
            *few.split(),
        ],
        cwd=PROGRAM.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert "none different" in ran.stdout
