"""Two processes, each with a GPU, that meet by torchrun's variables: every collective, lost ranks, torch beside it.

Nothing here needs MPI: the processes are started by these tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PATIENCE = 180  # seconds
BLOCKS = ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul", "matmul_all_gather")
TURNS = int(os.environ.get("LOST_RANKS", "2"))  # how often a rank is lost in each way


def free_port():
    """A port that is free, as is the next: below those of which the system gives other tests' connections one."""
    for port in random.SystemRandom().sample(range(12_000, 30_000, 2), 100):
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 1))
            return port
    raise OSError("of a hundred ports none is free")


def ranks(*words, count=2, needed=None):
    """What the ranks of `gpu_ranks.py` print: of those that are `needed`, or of all; the others are ended then."""
    port = free_port()
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NCCL_NVLS_ENABLE": "0"}
    shared["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    started = []
    try:
        for rank in range(count):
            environment = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, str(HERE / "gpu_ranks.py"), *words]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            started.append(subprocess.Popen(command, env=environment, start_new_session=True, **pipes))
        found = {}
        for rank in range(count) if needed is None else needed:
            output, errors = started[rank].communicate(timeout=PATIENCE)
            assert started[rank].returncode == 0, errors[-4000:]
            found[rank] = json.loads(output.splitlines()[-1])
        return found
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.mark.usefixtures("two")
def test_every_collective_between_two_processes():
    found = ranks("collectives")
    assert [each["failed"] for each in found.values()] == [[], []]
    print(f"{found[0]['count']} results compared on each rank")


@pytest.mark.usefixtures("two", "torch")
def test_graphs_of_collectives_between_two_processes():
    for each in ranks("captured").values():
        assert each["failed"] == []
        assert each["right"] == [True] * 43


@pytest.mark.usefixtures("two")
def test_every_block_between_two_processes():
    found = ranks("blocks")
    assert [each["failed"] for each in found.values()] == [[], []]
    assert [each["wrong"] for each in found.values()] == [[], []], "by copies of the GPUs themselves"
    for each in found.values():
        assert each["graphs"] == {name: [True] * 9 for name in BLOCKS}, "between other calls by copies"


@pytest.mark.alone
@pytest.mark.usefixtures("two")
def test_a_product_and_its_sum_take_less_than_one_after_the_other():
    """The figures are those of bench_collectives.py, which asks for more; here only that much of it overlaps."""
    for ms in ranks("overlap").values():
        print({name: f"{value:.3f} ms" for name, value in ms.items()})
        assert ms["block"] < 0.85 * (ms["product"] + ms["sum"])


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("what", ["lose", "lose_block", "lose_graph"])
@pytest.mark.parametrize("way", ["SIGKILL", "SIGSTOP", "abort", "fault", "endless"])
def test_a_lost_rank_is_an_error_on_the_other_within_the_deadline_and_it_goes_on(way, what):
    for turn in range(TURNS):
        victim = turn % 2
        found = ranks(what, way, str(victim), needed=[1 - victim])[1 - victim]
        assert found["error"] in ("RankLost", "CollectiveTimeout", "CollectiveError"), found
        assert (found["members"], found["size"], found["generation"]) == ([1 - victim], 1, 1)
        assert found["took"] < 60
        assert found["after"], "sums of the world that was rebuilt"
        assert found["kept"], "memory of the rank that lives"


@pytest.mark.usefixtures("two")
def test_torch_distributed_beside_it(torch):
    assert torch.cuda.is_available()
    found = ranks("beside_torch")
    assert all(each["right"] for each in found.values())
