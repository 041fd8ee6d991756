"""fuse(model, graphs=True) in training, without a GPU: steps that are replayed are those of the model without graphs.

In the place of CUDA graphs stand lists of operators over fixed memory (recorded_ops.py): a replay that reads what
another one overwrote gives NaN. What is right is the same model without graphs, from the same random numbers.
"""

import gc
import importlib.util
import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

spec = importlib.util.spec_from_file_location("training_steps", Path(__file__).with_name("training_steps.py"))
steps = importlib.util.module_from_spec(spec)
spec.loader.exec_module(steps)
nn, BEFORE, recorder, Net, pair, operand = steps.nn, steps.BEFORE, steps.recorder, steps.Net, steps.pair, steps.operand
loss_of, alike, back, step, recorded = steps.loss_of, steps.alike, steps.back, steps.step, steps.recorded
replays, Normed, Writes, Product = steps.replays, steps.Normed, steps.Writes, steps.Product


# -- steps ---------------------------------------------------------------------------------------------------------
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, eps=1e-3),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, 0.01, eps=1e-3, foreach=True),
}


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_an_optimizer_are_those_without_graphs(name, to_none):
    model, twin, report = pair()
    optimizers = [OPTIMIZERS[name](one.parameters()) for one in (model, twin)]
    kept = []
    for turn in range(BEFORE + 8):
        for one, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=to_none)
            back(one, turn)
            nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            optimizer.step()
        alike(model, twin)
        if to_none:
            kept.append([(p.grad, p.grad.clone()) for p in model.parameters()])
    assert report.graphs.recorded == 1
    assert report.graphs.replayed == 8
    assert report.graphs.reasons == {"it runs eagerly before a recording": BEFORE}
    for grads in kept:
        assert all(torch.equal(now, then) for now, then in grads), "gradients are the caller's"


def test_gradients_add_up_over_several_backward_passes():
    model, twin, report = recorded()
    model.zero_grad()
    twin.zero_grad()
    for turn in range(3):
        back(model, turn)
        back(twin, turn)
    alike(model, twin)
    assert report.graphs.replayed == 5


def test_gradients_are_copied_once():
    """AccumulateGrad keeps what nobody else has, and copies the rest, one by one."""
    model, _, _ = recorded()
    seen = []
    for p in model.parameters():
        p.register_hook(lambda g: seen.append(g.data_ptr()))
    model.zero_grad()
    back(model, 1)
    assert sorted(seen) == sorted(p.grad.data_ptr() for p in model.parameters())


def test_results_are_the_callers():
    model, _, _ = recorded()
    first = model(operand(1))
    then = first.detach().clone()
    loss_of(first).backward()
    second = model(operand(2))
    assert torch.equal(first, then)
    assert first.data_ptr() != second.data_ptr()
    with torch.no_grad():
        second.zero_()
    second.sum().backward()
    assert model.mlp[0].weight.grad.isfinite().all()


@pytest.mark.parametrize("training", [True, False])
def test_dropout_draws_anew_at_each_replay_and_the_gradient_has_the_forwards_mask(training):
    model, twin, report = pair(lambda: Net(0.5))
    model.train(training)
    twin.train(training)
    for turn in range(BEFORE + 4):
        step(model, twin, turn)
    assert report.graphs.replayed == 4
    x = operand(1).requires_grad_()
    masks = []
    for _ in range(BEFORE + 3):
        x.grad = None
        y = model(x)
        y.sum().backward()
        masks.append((y == 0).tolist())
        kept = model.norm.weight.grad
        assert kept is not None
    assert (masks[-1] != masks[-2]) == training
    assert report.graphs.recorded == 2
    before = torch.get_rng_state()
    y = model(x)
    assert torch.equal(before, torch.get_rng_state()) != training, "the generator goes on"


def test_a_recording_draws_nothing_from_the_callers_generators():
    model, twin, _ = pair(lambda: Net(0.5))
    for turn in range(BEFORE):
        step(model, twin, turn)
    states = []
    for one in (model, twin):  # the first is recorded
        torch.manual_seed(5)
        random.seed(5)
        loss_of(one(operand(9))).backward()
        states.append((torch.get_rng_state().tolist(), random.getstate()))
    assert states[0] == states[1]


def test_statistics_of_batch_norm_are_updated_once_a_step():
    model, twin, report = pair(Normed)
    versions = model.norm.running_mean._version
    for turn in range(BEFORE + 4):
        step(model, twin, turn)
    assert model.norm.num_batches_tracked == BEFORE + 4
    assert report.graphs.replayed == 4
    assert model.norm.running_mean._version >= versions + 4, "what keeps something made of it sees that it changed"


def test_a_buffer_that_is_read_and_written_is_right():
    model, twin, report = pair(Writes)
    for turn in range(BEFORE + 4):
        step(model, twin, turn)
    assert report.graphs.replayed == 4


# -- whose turn it is ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_before_a_backward(order):
    model, twin, report = recorded()
    for one in (model, twin):
        one.zero_grad()
        found = [loss_of(one(operand(turn))) for turn in (1, 2)]
        for i in order:
            found[i].backward()
    alike(model, twin)
    assert report.graphs.replayed == 3
    assert report.graphs.reasons["the backward pass of an earlier replay is pending"] == 1


def test_the_sum_of_two_losses():
    model, twin, report = recorded()
    for one in (model, twin):
        one.zero_grad()
        (loss_of(one(operand(1))) + 2 * loss_of(one(operand(2)))).backward()
    alike(model, twin)
    assert replays(report, lambda: step(model, twin, 3)) == 1


def test_a_graph_of_autograd_that_is_dropped_makes_room():
    model, twin, report = recorded()
    y = model(operand(1))
    assert replays(report, lambda: model(operand(2))) == 0
    del y
    gc.collect()
    assert replays(report, lambda: step(model, twin, 3)) == 1


def test_other_layouts_share_the_memory_and_wait_for_it():
    model, twin, report = recorded()
    for _ in range(BEFORE + 1):
        loss_of(model(operand(1, rows=6))).backward()
    assert report.graphs.recorded == 2
    model.zero_grad()
    twin.zero_grad()
    for one in (model, twin):
        first = loss_of(one(operand(1)))
        second = loss_of(one(operand(2, rows=6)))
        first.backward()
        second.backward()
    alike(model, twin)
    for turn in range(4):
        model.zero_grad()
        twin.zero_grad()
        for one in (model, twin):
            loss_of(one(operand(turn, rows=4 + turn % 2 * 2))).backward()
        alike(model, twin)


def test_inference_between_forward_and_backward():
    model, twin, report = recorded()
    for one in (model, twin):
        one.zero_grad()
        found = loss_of(one(operand(1)))
        with torch.no_grad():
            one(operand(2))
        found.backward()
    alike(model, twin)
    assert report.graphs.reasons["the model is in training mode: model.eval()"] == 1


# -- backward passes that are others -------------------------------------------------------------------------------
def test_a_gradient_that_is_taken_twice():
    model, twin, report = recorded()
    for one in (model, twin):
        one.zero_grad()
        found = loss_of(one(operand(1)))
        found.backward(retain_graph=True)
        found.backward(retain_graph=True)
        found.backward()
        with pytest.raises(RuntimeError, match="second time"):
            found.backward()
    alike(model, twin)
    assert any("retain_graph" in reason for reason in report.graphs.reasons)
    assert replays(report, lambda: step(model, twin, 2)) == 0, "it runs itself from then on"


def test_dropout_and_buffers_are_those_of_the_forward_where_the_gradient_is_computed_anew():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.writes = Net(0.5), Writes()

        def forward(self, x):
            return self.writes(self.net(x))

    model, twin, _ = recorded(Both)
    torch.manual_seed(1)
    drawn = []
    for one in (model, twin):
        one.zero_grad()
        torch.manual_seed(7)
        found = loss_of(one(operand(1)))
        torch.rand(3)
        found.backward(retain_graph=True)
        drawn.append(torch.rand(1))
        found.backward()
    alike(model, twin)
    assert torch.equal(*drawn)


def test_a_gradient_that_is_always_taken_twice_is_not_recorded():
    model, twin, report = pair()
    for turn in range(BEFORE + 3):
        for one in (model, twin):
            one.zero_grad()
            found = loss_of(one(operand(turn)))
            found.backward(retain_graph=True)
            found.backward()
        alike(model, twin)
    assert report.graphs.recorded == 0
    assert any("retain_graph" in reason for reason in report.graphs.reasons)


def penalty(model, turn):
    x = operand(turn).requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return g.square().sum()


def test_a_gradient_of_the_gradient_is_that_of_the_model_itself_or_refused():
    model, twin, report = pair(Product)
    for turn in range(BEFORE + 3):
        for one in (model, twin):
            one.zero_grad()
            penalty(one, turn).backward()
        alike(model, twin)
    assert report.graphs.recorded == 0
    assert any("gradient of its gradient" in reason for reason in report.graphs.reasons)
    model, twin, report = pair(Product)
    for _ in range(BEFORE + 2):
        x = operand(0).requires_grad_()
        model(x).sum().backward()
    assert report.graphs.replayed == 2
    with pytest.raises(RuntimeError, match="gradient of the gradient"):
        penalty(model, 1).backward()
    for one in (model, twin):
        one.zero_grad()
        penalty(one, 1).backward()
    alike(model, twin)


def test_a_parameter_that_changed_before_the_gradient_reads_it_is_refused_as_by_torch():
    model, twin, _ = recorded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
    for one in (model, twin):
        found = loss_of(one(operand(1)))
        with torch.no_grad():
            one[2].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            found.backward()
        del found
        one.zero_grad()
        found = loss_of(one(operand(1)))
        with torch.no_grad():
            one[2].bias.mul_(2)  # no gradient reads it
        found.backward()
    alike(model, twin)
