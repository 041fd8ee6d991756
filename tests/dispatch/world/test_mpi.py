"""Worlds of real processes under mpirun: every collective, ranks that end or stop, and the worlds that go on."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
MPIRUN = Path(sys.executable).with_name("mpirun")
PATIENCE = 60  # seconds, on a machine that has other things to do

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or not MPIRUN.exists(),
    reason="mpi4py or Open MPI is not installed: pip install 'cudabind[mpi]'",
)


def ranks(count, *words, launch=("--with-ft", "ulfm")):
    """What the ranks of `mpi_ranks.py` print, by the numbers they began with or have."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OPENBLAS_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_btl": "self,sm",  # a network is looked for in a second, and not needed
        "OMPI_MCA_pml": "ob1",
    }
    command = [MPIRUN, *launch, "--oversubscribe", "-n", str(count)]
    command += [sys.executable, HERE / "mpi_ranks.py", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*map(str, command)], env=environment, start_new_session=True, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=PATIENCE)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks are in groups of their own, and end with it
            raise
    told = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert told, f"status {process.returncode}: {output}{errors}"
    return told, SimpleNamespace(returncode=process.returncode, stderr=errors)


@pytest.mark.parametrize(
    "count", [2, pytest.param(3, marks=pytest.mark.exhaustive), pytest.param(4, marks=pytest.mark.exhaustive)]
)
def test_every_collective_gives_what_the_reference_gives(count):
    told, done = ranks(count, "collectives")
    assert (len(told), done.returncode) == (count, 0), done.stderr
    assert [each["failed"] for each in told] == [[]] * count
    assert min(each["count"] for each in told) > 400


def test_ranks_that_make_different_calls_all_learn_so_and_go_on():
    told, done = ranks(2, "disagree")
    assert (len(told), done.returncode) == (2, 0), done.stderr
    for each in told:
        assert all("ranks disagree: this rank calls" in text for text in each["said"].values()), each
        assert each["after"] == [True] * 6
        assert each["generation"] == 6


@pytest.mark.parametrize(
    ("way", "count", "victims"),
    [
        ("SIGKILL", 3, [1]),
        ("SIGSTOP", 3, [2]),
        pytest.param("SIGKILL", 4, [0, 2], marks=pytest.mark.exhaustive),
        pytest.param("SIGSTOP", 2, [0], marks=pytest.mark.exhaustive),
    ],
)
def test_a_rank_that_is_lost_is_an_error_on_all_others_and_a_smaller_world_goes_on(way, count, victims):
    told, _ = ranks(count, "lose", way, *map(str, victims))
    members = [rank for rank in range(count) if rank not in victims]
    assert sorted(each["rank"] for each in told) == list(range(len(members)))
    for each in told:
        assert each["error"] in ("RankLost", "CollectiveTimeout"), each
        assert each["members"] == members
        assert (each["size"], each["generation"]) == (len(members), 1)
        assert each["took"] < 0.6 + 2  # the deadline, on a machine that has other things to do
        assert each["after"], "sums after the loss"
        assert each["kept"], "memory of those that live"
        assert each["refused"] in ("RankLost", "CollectiveTimeout"), "the old communicator takes no call"


def test_a_rank_that_leaves_its_world_by_an_error_is_lost_to_the_others_at_once():
    told, done = ranks(2, "leave")
    assert (len(told), done.returncode) == (2, 0), done.stderr
    by_member = {each["member"]: each["error"] for each in told}
    assert by_member == {0: ["RankLost", [1]], 1: ["ValueError", []]}


@pytest.mark.parametrize("which", ["before", "while"])
def test_a_rank_that_has_closed_its_world_is_not_waited_for(which):
    told, done = ranks(2, "close", which)
    assert (len(told), done.returncode) == (2, 0), done.stderr
    by_member = {each["member"]: each for each in told}
    assert by_member[0]["ended"] == ["RankLost", [1], True]
    assert max(each["took"] for each in told) < PATIENCE / 2, "half the deadline"


def test_all_processes_finalize_if_a_rank_has_only_closed_its_world():
    """A plain mpirun reports a process that ends without MPI_Finalize; one that waits there for it may hang."""
    told, done = ranks(3, "close", "before", launch=())
    assert (len(told), done.returncode) == (3, 0), done.stderr
    assert [each["ended"] for each in told if each["member"] != 1] == [["RankLost", [1], True]] * 2


def test_a_program_that_ends_by_an_error_leaves_its_open_world_and_the_others_learn_so():
    told, done = ranks(3, "end")
    assert [each["error"][0] for each in told] == ["RankLost"] * 2, done.stderr
    assert all(each["after"] for each in told)
    assert max(each["took"] for each in told) < 25, "half the deadline, on a machine that has other things to do"
    assert "ValueError: a fault of its own" in done.stderr


def test_a_program_that_exits_without_an_error_does_not_let_the_others_wait_in_its_open_world():
    told, done = ranks(3, "exit_open", "0", launch=())
    assert [each["error"] for each in told] == [["RankLost", [1]]] * 2, done.stderr
    assert max(each["took"] for each in told) < 25, "half the deadline, on a machine that has other things to do"
    assert done.returncode == 0, done.stderr


@pytest.mark.exhaustive
def test_a_rank_that_wakes_up_too_late_is_told_that_it_is_out():
    told, _ = ranks(3, "late")
    by_member = {each["member"]: each for each in told}
    assert by_member[1]["left_out"] == "RankLeftOut"
    assert {by_member[0]["size"], by_member[2]["size"]} == {2}


@pytest.mark.parametrize("given", ["5", "object()", "MPI.COMM_WORLD.group"])
def test_what_is_no_communicator_is_refused(given):
    program = f"from mpi4py import MPI\nimport dispatch as dp\ndp.World.from_mpi({given})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert "BadRequest: comm: got " in done.stderr
    assert "expected a communicator of mpi4py" in done.stderr
