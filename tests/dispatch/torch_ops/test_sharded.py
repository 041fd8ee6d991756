"""A fused model trains under both kinds of FSDP, in two processes."""

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
PROGRAM = Path(__file__).parents[2] / "torch_sharded.py"


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["fully_shard", "fuse_last", "flat"])
def test_losses_are_those_of_the_plain_model(kind):
    ran = subprocess.run([sys.executable, "-W", "ignore", str(PROGRAM), kind], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
