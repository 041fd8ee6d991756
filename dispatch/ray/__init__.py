"""Supervisors and ranks as Ray actors: `import dispatch.ray`, with Ray installed (`pip install 'cudabind[ray]'`).

    supervisor  RaySupervisor: requests to a supervisor in an actor, RayFuture, RemoteTensor
    actor       what the actor does
    pool        RayPool: supervisors on the bundles of a placement group
    world       RayWorld: actors that are the ranks of a `dispatch.World`, and functions that run on all of them

Ray places actors on nodes and GPUs, and restarts them when they end. An actor always runs in another process: arguments
and results are pickled, and tensors stay in the process that has them.
"""

from __future__ import annotations

from dispatch.ray.pool import RayPool as RayPool
from dispatch.ray.supervisor import RayFuture as RayFuture
from dispatch.ray.supervisor import RaySupervisor as RaySupervisor
from dispatch.ray.supervisor import RemoteTensor as RemoteTensor
from dispatch.ray.world import RayWorld as RayWorld

__all__ = ["RayFuture", "RayPool", "RaySupervisor", "RayWorld", "RemoteTensor"]
