"""Fused models train under both kinds of FSDP, in two processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
PROGRAM = Path(__file__).parents[2] / "torch_sharded.py"
KINDS = ("fully_shard", "fuse_last", "flat")
PATIENCE = 600


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What each of the two processes finds wrong, by kind: most of their time is spent on torch's imports."""
    command = [sys.executable, "-W", "ignore", str(PROGRAM), str(tmp_path_factory.mktemp("sharded") / "meeting")]
    ranks = [
        subprocess.Popen([*command, rank, *KINDS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]
    try:
        told = [rank.communicate(timeout=PATIENCE) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    for rank, (_, errors) in zip(ranks, told, strict=True):
        assert rank.returncode == 0, errors[-4000:]
    return [json.loads(out) for out, _ in told]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_the_plain_model(kind, trained):
    assert [found[kind] for found in trained] == ["", ""]
