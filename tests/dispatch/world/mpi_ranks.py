"""What each rank of the tests under mpirun does: `python mpi_ranks.py NAME …`, a function of this file.

A rank prints one line of JSON; the tests read those of all ranks.
"""

import json
import os
import signal
import sys
import time

import numpy as np

import dispatch as dp
from dispatch.errors import CollectiveError

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import collective_cases  # noqa: E402

DEADLINE = 0.6
PATIENCE = 50.0


def tell(**facts):
    """One line, whole: lines of several ranks may meet on the way."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def summed(world, n=1000):
    """The sum of what each member has, and what it should be."""
    member = world.members[world.rank]
    x = world.device.array(np.full(n, 1.0 + member, np.float32))
    found = dp.all_reduce(x, comm=world).numpy()
    return bool((found == sum(1.0 + each for each in world.members)).all())


def hurried(world):
    """Have all ranks come, on a machine that has other things to do, and a short deadline from then on."""
    dp.barrier(comm=world)
    world.deadline = world.communicator.deadline = DEADLINE


def collectives(_):
    """Every collective, op and dtype against the reference."""
    with dp.World.from_mpi(deadline=20) as world:
        failed = collective_cases.failures(world)
        tell(rank=world.rank, failed=failed, count=collective_cases.COUNT[0])


def blocks(_):
    """The building blocks of parallel programs against one device."""
    sys.path.insert(0, os.path.join(HERE, "..", "parallel"))
    import parallel_cases

    with dp.World.from_mpi(deadline=20) as world:
        tell(rank=world.rank, failed=parallel_cases.failures(world, "f32") + parallel_cases.failures(world, "f16"))


def disagree(_):
    """Ranks that make different calls; each time a new generation goes on."""
    world = dp.World.from_mpi(deadline=20)
    odd = world.rank == 1

    def x(n=4, dtype=np.float32):
        return world.device.array(np.ones(n, dtype))

    def grouped():
        with dp.collective_group():
            dp.broadcast(x(), comm=world, root=world.rank)

    calls = {
        "root": lambda: dp.broadcast(x(), comm=world, root=world.rank),
        "dtype": lambda: dp.all_reduce(x(dtype=np.float64 if odd else np.float32), comm=world),
        "count": lambda: dp.all_reduce(x(5 if odd else 4), comm=world),
        "reduce": lambda: dp.all_reduce(x(), comm=world, reduce="max" if odd else "sum"),
        "op": lambda: (dp.all_gather if odd else dp.all_reduce)(x(), comm=world),
        "group": grouped,
    }
    said, after = {}, []
    for name, call in calls.items():
        try:
            call()
            said[name] = "no error"
        except CollectiveError as caught:
            said[name] = str(caught)
        world.rebuild()
        after.append(summed(world))
    tell(rank=world.rank, said=said, after=after, generation=world.generation)
    dp.barrier(comm=world)
    world.close()


def lose(way, *victims):
    """Some ranks end, or stop, in the middle of collectives; the others go on."""
    victims = [*map(int, victims)]
    world = dp.World.from_mpi(deadline=60)
    ids = dp.all_gather(world.device.array(np.array([os.getpid()])), comm=world).numpy()[:, 0]
    kept = world.device.array(np.arange(100.0))  # memory that the loss must leave alone
    hurried(world)
    begun, error = time.monotonic(), None
    try:
        if world.rank in victims:
            summed(world)
            os.kill(os.getpid(), getattr(signal, way))
            time.sleep(60)
        for _ in range(1000):
            summed(world)
    except CollectiveError as caught:
        error = caught
    took = time.monotonic() - begun
    stale = world.communicator
    world.rebuild(grace=0.5)
    rebuilt = time.monotonic() - begun - took
    after = [summed(world) for _ in range(3)]
    try:
        dp.barrier(comm=stale)
        refused = None
    except CollectiveError as caught:
        refused = type(caught).__name__
    tell(
        rank=world.rank, size=world.size, members=world.members, generation=world.generation, took=took,
        error=type(error).__name__, lost=list(getattr(error, "ranks", ())), rebuilt=rebuilt, after=all(after),
        refused=refused, kept=bool((kept.numpy() == np.arange(100.0)).all()),
    )  # fmt: skip
    dp.barrier(comm=world)
    if world.rank == 0 and way == "SIGSTOP":
        for victim in victims:  # MPI's end waits for all processes
            os.kill(int(ids[victim]), signal.SIGKILL)
    world.close()


def leave(_):
    """One rank leaves its world by an error of its own, and the other, which waits for it, learns so."""
    from mpi4py import MPI

    try:
        with dp.World.from_mpi() as world:
            member = world.rank
            summed(world)
            if member == 1:
                raise ValueError("a fault of its own")
            summed(world)
    except (CollectiveError, ValueError) as error:
        tell(member=member, error=[type(error).__name__, list(getattr(error, "ranks", ()))])
    MPI.COMM_WORLD.Barrier()  # the process of the rank that left lives on, and is no sign to the other


def close(which):
    """One rank closes its world without an error, before or while the other waits for it."""
    from mpi4py import MPI

    world = dp.World.from_mpi(deadline=PATIENCE)
    member, begun, ended = world.rank, time.monotonic(), "in time"
    summed(world)
    others = [rank for rank in range(world.size) if rank != 1]
    if member == 1:
        for other in others:
            MPI.COMM_WORLD.recv(source=other)
        world.close()
        for other in others:
            MPI.COMM_WORLD.send(None, dest=other)
    else:
        MPI.COMM_WORLD.send(None, dest=1)
        if which == "before":
            MPI.COMM_WORLD.recv(source=1)
        try:
            summed(world)
        except CollectiveError as error:
            ended = [type(error).__name__, list(error.ranks), "has closed its world" in str(error)]
        if which == "while":
            MPI.COMM_WORLD.recv(source=1)
    tell(member=member, ended=ended, took=time.monotonic() - begun)
    MPI.COMM_WORLD.Barrier()


def end(_):
    """One rank's program ends by an error while its world is open, outside of any block."""
    world = dp.World.from_mpi(deadline=PATIENCE)
    summed(world)
    word = world.device.array(np.zeros(1))
    if world.rank == 1:
        for peer in (0, 2):  # who is still within the first sum would fail there
            dp.recv(word, comm=world, peer=peer)
        raise ValueError("a fault of its own")
    dp.send(word, comm=world, peer=1)
    begun = time.monotonic()
    try:
        summed(world)
    except CollectiveError as error:
        took = time.monotonic() - begun
        world.rebuild(grace=5)
        tell(error=[type(error).__name__, list(getattr(error, "ranks", ()))], took=took, after=summed(world))
        dp.barrier(comm=world)
        world.close()


def exit_open(code):
    """One rank's program ends without an error while its world is open."""
    world = dp.World.from_mpi(deadline=PATIENCE)
    summed(world)
    if world.rank == 1:
        sys.exit(int(code))
    begun = time.monotonic()
    try:
        summed(world)
    except CollectiveError as error:
        tell(error=[type(error).__name__, list(getattr(error, "ranks", ()))], took=time.monotonic() - begun)


def late(_):
    """A rank that was stopped wakes up once the others have gone on, and is told."""
    world = dp.World.from_mpi(deadline=60)
    ids = dp.all_gather(world.device.array(np.array([os.getpid()])), comm=world).numpy()[:, 0]
    hurried(world)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        for _ in range(100000):
            summed(world)
    except CollectiveError as caught:
        error = type(caught).__name__
    try:
        world.rebuild(grace=0.4)
        left_out = None
    except CollectiveError as caught:
        left_out = type(caught).__name__
    else:
        if world.rank == 0:
            os.kill(int(ids[1]), signal.SIGCONT)
        assert summed(world)
    tell(member=world.members[world.rank], error=error, left_out=left_out, size=world.size)
    if left_out is None:
        world.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*(sys.argv[2:] or [""]))
