"""data_parallel in worlds of threads on the host: gradients, weights after steps, and what a pass may leave out."""

import gc
import threading

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, BadType, Closed, CollectiveError, CollectiveTimeout

torch = pytest.importorskip("torch", reason="torch is not installed")
data_parallel = pytest.importorskip("dispatch.torch").data_parallel

SIZES = (6, 9, 4)


class Net(torch.nn.Module):
    """Two layers with another beside them that a pass may leave out, a shared one, and a buffer."""

    def __init__(self, seed, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = torch.nn.Linear(6, 9, dtype=dtype), torch.nn.Linear(9, 4, dtype=dtype)
        self.beside = torch.nn.Linear(6, 4, dtype=dtype)
        self.square = torch.nn.Linear(9, 9, bias=False, dtype=dtype)
        self.register_buffer("scale", torch.rand(4, dtype=dtype))

    def forward(self, x, with_beside=True):
        hidden = torch.tanh(self.square(torch.tanh(self.square(self.first(x)))))
        out = self.second(hidden) * self.scale
        return out + self.beside(x) if with_beside else out


LOCK = threading.Lock()  # torch's generator is the process's


def made(seed, dtype=torch.float64):
    with LOCK:
        return Net(seed, dtype)


def data(rank, turn):
    rng = np.random.default_rng([rank, turn])
    return torch.from_numpy(rng.standard_normal((5, 6)))


def loss(net, x, **choices):
    return (net(x, **choices) ** 2).mean()


def gradients(net):
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def expected(size, turn, **choices):
    """The mean gradients of all ranks, by one module."""
    net = made(0)
    sums = [torch.zeros_like(p) for p in net.parameters()]
    for rank in range(size):
        net.zero_grad()
        loss(net, data(rank, turn), **choices).backward()
        for total, p in zip(sums, net.parameters(), strict=True):
            if p.grad is not None:
                total.add_(p.grad, alpha=1 / size)
    return sums


def close(found, right):
    return all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 300, 25 << 20])
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_are_the_mean_of_all_ranks(size, bucket_bytes, to_none):
    def run(world):
        net = made(world.rank)  # rank 0's weights are everybody's then
        with data_parallel(net, comm=world, bucket_bytes=bucket_bytes):
            found = []
            for turn in range(3):
                net.zero_grad(set_to_none=to_none)
                loss(net, data(world.rank, turn)).backward()
                found.append(gradients(net))
        return found, net.scale

    with dp.World.local(["host"] * size, deadline=60) as world:
        results = world.run(run)
    for found, scale in results:
        assert torch.equal(scale, made(0).scale), "a buffer of rank 0"
        for turn, each in enumerate(found):
            assert close(each, expected(size, turn))


def test_weights_stay_the_same_on_all_ranks_and_are_those_of_the_mean():
    def run(world):
        net = made(world.rank)
        kept = data_parallel(net, comm=world, bucket_bytes=200)
        optimizer = torch.optim.Adam(net.parameters(), 0.05)
        for turn in range(6):
            loss(net, data(world.rank, turn)).backward()
            optimizer.step()
            optimizer.zero_grad()
        kept.close()
        return [p.detach().clone() for p in net.parameters()]

    with dp.World.local(["host"] * 2, deadline=60) as world:
        one, other = world.run(run)
    alone = made(0)
    optimizer = torch.optim.Adam(alone.parameters(), 0.05)
    for turn in range(6):
        optimizer.zero_grad()
        (sum(loss(alone, data(rank, turn)) for rank in range(2)) / 2).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(one, alone.parameters(), strict=True))


def test_parameters_that_one_rank_has_no_use_for_count_as_zeros():
    def run(world):
        net = made(0)
        with data_parallel(net, comm=world, bucket_bytes=1):
            loss(net, data(world.rank, 0), with_beside=world.rank == 0).backward()
            return gradients(net)

    with dp.World.local(["host"] * 2, deadline=60) as world:
        one, other = world.run(run)
    first = made(0)
    loss(first, data(0, 0)).backward()
    assert close(one, other)
    assert torch.allclose(one[4], first.beside.weight.grad / 2)


def test_passes_are_accumulated_without_the_others_and_averaged_with_the_last():
    def run(world):
        net = made(0)
        with data_parallel(net, comm=world) as parallel:
            with parallel.no_sync():
                loss(net, data(world.rank, 0)).backward()
            mine = gradients(net)
            loss(net, data(world.rank, 1)).backward()
            return mine, gradients(net)

    with dp.World.local(["host"] * 2, deadline=60) as world:
        (first, one), (second, other) = world.run(run)
    assert not close(first, second), "of each rank alone"
    right = [a + b for a, b in zip(expected(2, 0), expected(2, 1), strict=True)]
    assert close(one, right)
    assert close(other, right)


def test_parameters_of_several_dtypes_and_frozen_ones():
    def run(world):
        net = made(0)
        net.second.to(torch.float32)
        net.beside.requires_grad_(False)
        with data_parallel(net, comm=world):
            hidden = net.first(data(world.rank, 0))
            net.second(hidden.float()).square().mean().backward()
        return net.second.weight.grad.dtype, net.beside.weight.grad, net.first.weight.grad.clone()

    with dp.World.local(["host"] * 2, deadline=60) as world:
        one, other = world.run(run)
    assert one[:2] == other[:2] == (torch.float32, None)
    assert torch.equal(one[2], other[2])


def test_a_rank_that_makes_no_pass_is_an_error_out_of_backward():
    def run(world):
        net = made(0)
        parallel = data_parallel(net, comm=world)
        world.communicator.deadline = 0.2
        if world.rank:
            return
        with pytest.raises(CollectiveTimeout):
            loss(net, data(0, 0)).backward()
        parallel.close()

    with dp.World.local(["host"] * 2, deadline=20) as world:
        world.run(run)


def test_a_pass_that_was_left_by_an_error_is_told_at_the_next():
    def run(world):
        net = made(0)
        with data_parallel(net, comm=world, bucket_bytes=1):
            net.first.weight.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss(net, data(0, 0)).backward()
            with pytest.raises(CollectiveError, match="backward pass raised an error"):
                loss(net, data(0, 0)).backward()

    with dp.World.local(["host"] * 1, deadline=20) as world:
        world.run(run)


def test_it_goes_on_where_nobody_keeps_it():
    def run(world):
        net = made(0)
        data_parallel(net, comm=world)
        gc.collect()
        loss(net, data(world.rank, 0)).backward()
        return gradients(net)

    with dp.World.local(["host"] * 2, deadline=20) as world:
        for found in world.run(run):
            assert close(found, expected(2, 0))


def test_what_is_closed_leaves_gradients_alone():
    def run(world):
        net = made(0)
        parallel = data_parallel(net, comm=world)
        parallel.close()
        parallel.close()
        loss(net, data(world.rank, 0)).backward()
        with pytest.raises(Closed), parallel.no_sync():
            pass
        return gradients(net)

    with dp.World.local(["host"] * 2, deadline=20) as world:
        one, other = world.run(run)
    assert not close(one, other)


def test_refusals():
    def run(world):
        for given, error, text in (
            (torch.nn.ReLU(), BadRequest, "without parameters"),
            (torch.nn.Linear(2, 2, device="meta"), BadRequest, "a parameter on meta"),
            (torch.nn.Linear(2, 2, dtype=torch.complex64), BadRequest, "floating-point"),
            (3, BadType, "a torch.nn.Module"),
        ):
            with pytest.raises(error, match=text):
                data_parallel(given, comm=world)
        table = torch.nn.Embedding(5, 3, sparse=True)
        with data_parallel(table, comm=world), pytest.raises(BadRequest, match="sparse=False"):
            table(torch.tensor([1, 2])).sum().backward()

    with dp.World.local(["host"], deadline=20) as world:
        world.run(run)
