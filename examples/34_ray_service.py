"""A service of products as actors of Ray: placed by Ray, restarted by Ray, weights that stay on its devices.

Two supervisors keep a layer's weights. Batches go to the one with less work, at most `--pending` at a time, and their
results are returned by reference. In the middle one actor's process is killed: its requests in flight fail with
ActorLost, Ray starts another actor, the weights are sent there again, and each batch is right in the end. With
`--world` the same machines are then ranks of a world, and add up the batches' sums; on the host that needs PyTorch, for
gloo.

    python examples/34_ray_service.py --device host
    python examples/34_ray_service.py --device cuda            # a GPU for each actor, of this machine
    ray start --head; python examples/34_ray_service.py --address auto --device cuda   # of a cluster
    ray job submit --working-dir . -- python examples/34_ray_service.py --address auto --device cuda

For MPI and torchrun see 30_allreduce_two_gpus.py, 31 and 32: there the ranks are processes that connect by themselves.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import dispatch as dp
from dispatch.errors import ActorLost, DeviceUnavailable, StaleTensor

ROWS, INNER, COLUMNS, BATCHES = 64, 256, 128, 40
BOUND = 1e-4  # relative to the largest element of a batch


def summed(world: Any, numbers: list[float]) -> float:
    """One rank's share, added up over all ranks."""
    share = sum(numbers[world.rank :: world.size])
    return float(dp.all_reduce(world.device.array(np.array([share])), comm=world).numpy()[0])


def served(pool: Any, w: np.ndarray, batches: list[np.ndarray], kill: bool) -> tuple[list[np.ndarray], int]:
    """The products of all batches, and the number of retries."""
    weights = [each.array(w) for each in pool.supervisors]
    left, results, again = list(range(len(batches))), [np.empty(0)] * len(batches), 0
    while left:
        flying = []
        for number in left:
            place = number % len(weights)
            sup = pool.supervisors[place]
            flying.append((number, place, sup.submit(dp.MatmulRequest, a=batches[number], b=weights[place])))
            if kill and number == len(batches) // 2:
                os.kill(pool.supervisors[0].ready().pid, signal.SIGKILL)
                kill = False
        left = []
        for number, _, future in flying:
            try:
                results[number] = future.result(60)
            except (ActorLost, StaleTensor):  # noqa: PERF203  # the actor has gone, or has come without the weights
                left.append(number)
        again += len(left)
        for place in {number % len(weights) for number in left}:
            pool.supervisors[place].ready()
            weights[place] = pool.supervisors[place].array(w)
    return results, again


def main() -> int:
    """Serve, lose an actor, and go on; 1 if a product is not NumPy's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="host", help="host (default), or cuda: a GPU for each actor")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--pending", type=int, default=8, help="requests in flight at each actor")
    parser.add_argument("--world", action="store_true", help="add up the results by ranks that are actors, too")
    parser.add_argument("--address", help="of a Ray cluster, or auto (default: start Ray here)")
    options = parser.parse_args()
    try:
        import ray
    except ImportError as error:
        print(f"skipped, which is no error: {error}; this example needs pip install 'cudabind[ray]'")
        return 0
    import dispatch.ray as dray

    where = str(Path(__file__).resolve().parents[1])
    paths = os.pathsep.join(filter(None, [where, os.environ.get("PYTHONPATH")]))
    gpus = 0 if options.device == "host" else 1
    local: dict[str, Any] = {}
    if not options.address:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # only for this process
        logging.getLogger("ray").setLevel(logging.ERROR)
        local = {"num_cpus": max(2, options.actors), "include_dashboard": False, "configure_logging": False}
        local["object_store_memory"] = 200 << 20
    ray.init(address=options.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths}}, **local)
    rng = np.random.default_rng(7)
    w = rng.standard_normal((INNER, COLUMNS)).astype(np.float32)
    batches = [rng.standard_normal((ROWS, INNER)).astype(np.float32) for _ in range(BATCHES)]
    try:
        begun = time.perf_counter()
        with dray.RayPool(options.actors, num_gpus=gpus, max_pending=options.pending, streams=2) as pool:
            products, again = served(pool, w, batches, kill=not options.address)
        right = [batch.astype(np.float64) @ w for batch in batches]
        error = max(float(np.abs(f - r).max() / np.abs(r).max()) for f, r in zip(products, right, strict=True))
        took = time.perf_counter() - begun
        print(f"{BATCHES} batches by {options.actors} actors in {took:.1f} s, {again} of them again")
        print(f"largest relative error {error:.1e}")
        if options.world:
            with dray.RayWorld(options.actors, num_gpus=gpus, deadline=60) as ranks:
                totals = ranks.run(summed, [float(each.sum()) for each in right])
            print(f"the sum of all elements, by {len(totals)} ranks: {totals[0]:.6f}")
            if abs(totals[0] - sum(float(each.sum()) for each in right)) > 1e-6:
                return 1
    except DeviceUnavailable as missing:
        print(f"skipped, which is no error: {missing}")
        return 0
    finally:
        ray.shutdown()
    return 0 if error < BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
