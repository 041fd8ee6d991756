"""One of two processes that train fused models whose parameters FSDP shares out, beside the plain one over all rows.

    python tests/torch_sharded.py MEETING RANK KIND…

MEETING is a file that is not there yet, RANK 0 or 1. Of the kinds `fully_shard` shards after `fuse`, `fuse_last` before
it, `flat` is FullyShardedDataParallel. What is wrong with each is printed in a line of JSON: nothing, or an error where
a loss differs by more than f32's rounding.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from dispatch.torch import fuse

RANKS, ROWS, STEPS = 2, 4, 3
REPLACED = {"fully_shard": 3, "fuse_last": 1, "flat": 3}  # a linear layer that has hooks, as FSDP's, is left to torch


class Net(nn.Module):
    """A pattern of each kind that `fuse` knows without attention: an MLP, a norm, and a layer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 32), nn.GELU(approximate="tanh"), nn.Linear(32, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.norm(self.down(self.act(self.up(x))) + x))
        return y


def sharded(model: nn.Module, kind: str) -> nn.Module:
    """The fused model, its parameters shared out."""
    if kind == "flat":
        assert len(fuse(model, linears=True).replaced) == REPLACED[kind]
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    mesh = init_device_mesh("cpu", (RANKS,))
    if kind == "fuse_last":
        for layer in (model.up, model.down, model.head):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    assert len(fuse(model, linears=True).replaced) == REPLACED[kind]
    if kind == "fully_shard":
        fully_shard(model, mesh=mesh)
    return model


def train(rank: int, kind: str) -> None:
    """One process's part, with one of the kinds."""
    torch.manual_seed(0)
    plain = Net()
    model = sharded(copy.deepcopy(plain), kind)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (plain, model)]
    for step in range(STEPS):
        x = torch.randn(RANKS * ROWS, 16, generator=torch.Generator().manual_seed(step))
        losses = [plain(x).square().mean(), model(x[rank * ROWS : (rank + 1) * ROWS]).square().mean()]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        mean = losses[1].detach() / RANKS
        dist.all_reduce(mean)
        torch.testing.assert_close(mean, losses[0].detach(), rtol=1e-6, atol=0)


def wrong(rank: int, kind: str) -> str:
    """What is wrong with one of the kinds; both ranks find the same."""
    try:
        train(rank, kind)
    except Exception:  # noqa: BLE001  # the other kinds are tried, too
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    meeting, number, *kinds = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(number), world_size=RANKS)
    print(json.dumps({kind: wrong(int(number), kind) for kind in kinds}), flush=True)
    dist.destroy_process_group()
    # The process ends here, without Python's own end: DTensor's caches keep the group and its threads (torch 2.13). One
    # that lets go of a tensor while Python ends would be ended by it, and C++ takes that for an error (std::terminate).
    os._exit(0)
