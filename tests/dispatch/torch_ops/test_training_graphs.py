"""fuse(model, graphs=True) in training, without a GPU: which steps are replayed, and when the model itself runs.

In the place of CUDA graphs stand lists of operators over fixed memory (recorded_ops.py): a replay that reads what
another one overwrote gives NaN. What is right is the same model without graphs, from the same random numbers.
"""

import copy
import gc
import importlib.util
import random
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.utils import _pytree  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from dispatch.torch import fuse, training_graphs  # noqa: E402

spec = importlib.util.spec_from_file_location("recorded_ops", Path(__file__).with_name("recorded_ops.py"))
recorded_ops = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recorded_ops)

nn = torch.nn
BEFORE = training_graphs.BEFORE


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    return recorded_ops.patch(monkeypatch)


class Net(nn.Module):
    def __init__(self, dropped=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(approximate="tanh"), nn.Linear(16, 8))
        self.dropout = nn.Dropout(dropped)
        self.scale = 2.0

    def forward(self, x, times=1, *, minus=None):
        y = self.dropout(x + self.mlp(self.norm(x))) * (self.scale * times)
        return y if minus is None else y - minus


def pair(build=Net):
    """A model with graphs, its like without, and the report."""
    torch.manual_seed(0)
    model = build().train()
    twin = copy.deepcopy(model)
    report = fuse(model, graphs=True)
    fuse(twin)
    return model, twin, report


def operand(turn, rows=4):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(turn))


def loss_of(y):
    return (y * y).mean() + y.sum() / 7


def alike(model, twin):
    """Gradients, parameters and buffers are the same."""
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, msg=lambda text, name=name: f"gradient of {name}: {text}")
        torch.testing.assert_close(p, q, msg=lambda text, name=name: f"{name}: {text}")
    for (name, b), c in zip(model.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(b, c, msg=lambda text, name=name: f"{name}: {text}")


def back(model, turn, *args, **kwargs):
    torch.manual_seed(1000 + turn)
    y = model(operand(turn), *args, **kwargs)
    loss_of(y).backward()
    return y.detach()


def step(model, twin, turn, *args, **kwargs):
    """Forward and backward of both, from nothing, are alike."""
    model.zero_grad()
    twin.zero_grad()
    torch.testing.assert_close(back(model, turn, *args, **kwargs), back(twin, turn, *args, **kwargs))
    alike(model, twin)


def recorded(build=Net):
    """A pair whose step was recorded and replayed."""
    model, twin, report = pair(build)
    for turn in range(BEFORE + 2):
        step(model, twin, turn)
    assert (report.graphs.recorded, report.graphs.replayed) == (1, 2), report.graphs
    return model, twin, report


def replays(report, action):
    """How many calls in it were replays."""
    before = report.graphs.replayed
    action()
    return report.graphs.replayed - before


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
    assert report.graphs.reasons == {"it is learnt": BEFORE}
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


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.inner(x))


def test_statistics_of_batch_norm_are_updated_once_a_step():
    model, twin, report = pair(Normed)
    versions = model.norm.running_mean._version
    for turn in range(BEFORE + 4):
        step(model, twin, turn)
    assert model.norm.num_batches_tracked == BEFORE + 4
    assert report.graphs.replayed == 4
    assert model.norm.running_mean._version >= versions + 4, "what keeps something made of it sees that it changed"


class Writes(nn.Module):
    """Writes to a buffer in place, and reads what it was."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        y = self.inner(x) + self.mean
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0))
        return y


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
    assert report.graphs.reasons["the backward pass of a replay before is still to come"] == 1


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


class Product(nn.Module):
    """With a gradient of its gradient."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return (x @ self.w).tanh()


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


# -- operands and results ------------------------------------------------------------------------------------------
@dataclass
class Output:
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden: tuple | None = None
    name: str = ""


_pytree.register_pytree_node(
    Output, lambda y: ([y.loss, y.logits, y.hidden, y.name], None), lambda values, _: Output(*values)
)


class Rich(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.net = Net()
        self.head, self.aside = nn.Linear(8, 5), nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens, labels=None, *, x=None):
        h = self.embed(tokens) if x is None else self.embed(tokens) + x
        h = self.net(h)
        logits = self.head(h)
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        with torch.no_grad():
            best = logits.argmax(-1)
            top = logits.amax(-1)
        return Output(loss, logits, (h, h, self.aside(h), best, top), "rich")


def tokens(turn):
    return torch.randint(0, 20, (2, 3), generator=torch.Generator().manual_seed(turn))


def rich_step(models, turn, loss, **given):
    found = []
    for one in models:
        one.zero_grad()
        y = one(tokens(turn), **given)
        loss(y).backward()
        found.append(y)
    for a, b in zip(*(_pytree.tree_leaves(y) for y in found), strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a.detach(), b.detach())
            assert a.requires_grad == b.requires_grad
        else:
            assert a == b
    alike(*models)
    return found[0]


def test_results_of_all_kinds_and_parameters_without_a_gradient():
    model, twin, report = pair(Rich)
    for turn in range(BEFORE + 4):
        y = rich_step((model, twin), turn, lambda y: y.loss, labels=tokens(turn + 50) % 5)
    assert report.graphs.replayed == 4
    assert isinstance(y, Output)
    assert y.name == "rich"
    assert y.hidden[0] is y.hidden[1]
    assert model.unused.weight.grad is None
    assert model.aside.weight.grad is None, "no result of it was given a gradient"
    for turn in range(BEFORE + 4):
        rich_step((model, twin), turn, lambda y: y.logits.square().mean() + y.hidden[2].sum())
    assert report.graphs.recorded == 2


def test_other_results_are_given_gradients_than_before():
    model, twin, report = pair(Rich)
    labels = tokens(50) % 5
    for turn in range(BEFORE + 2):
        rich_step((model, twin), turn, lambda y: y.loss, labels=labels)
    rich_step((model, twin), 9, lambda y: y.loss + y.hidden[2].sum(), labels=labels)
    assert any("other results have gradients" in reason for reason in report.graphs.reasons), report.graphs.reasons
    assert replays(report, lambda: rich_step((model, twin), 9, lambda y: y.logits.mean(), labels=labels)) == 0


def test_results_that_have_gradients_now_here_now_there_are_not_recorded():
    model, twin, report = pair(Rich)
    for turn in range(BEFORE + 4):
        rich_step((model, twin), turn, lambda y, turn=turn: y.logits.mean() if turn % 2 else y.hidden[2].mean())
    assert report.graphs.recorded == 0
    assert any("now here" in reason for reason in report.graphs.reasons)


def test_operands_have_gradients_too():
    model, twin, report = pair(Rich)
    for turn in range(BEFORE + 3):
        given = [torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(turn)) for _ in range(2)]
        leaves = [x.requires_grad_() for x in given]
        for one, x in zip((model, twin), leaves, strict=True):
            one.zero_grad()
            loss_of(one(tokens(turn), x=x * 2).logits).backward()
        torch.testing.assert_close(*(x.grad for x in leaves))
        alike(model, twin)
    assert report.graphs.replayed == 3
    x = torch.randn(2, 3, 8)
    assert replays(report, lambda: loss_of(model(tokens(0), x=x).logits).backward()) == 0, "it asks for none"


def test_a_gradient_of_operands_alone():
    model, _, report = recorded()
    for p in model.parameters():
        p.requires_grad_(False)
    for turn in range(2 * BEFORE + 3):
        x = operand(turn).requires_grad_()
        loss_of(model(x)).backward()
        want = operand(turn).requires_grad_()
        loss_of(Net.forward(model, want)).backward()
        torch.testing.assert_close(x.grad, want.grad)
    assert report.graphs.recorded == 2


def test_an_operand_that_is_given_twice_and_one_in_pieces():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(8))

        def forward(self, x, y):
            return x * self.w + 3 * y

    model, _, report = pair(Sum)
    for turn in range(BEFORE + 2):
        x = operand(turn).requires_grad_()
        z = (x * 1)[:, ::2].repeat(1, 2)
        model(z, z).sum().backward()
        want = torch.zeros(4, 8)
        want[:, ::2] = 8
        torch.testing.assert_close(x.grad, want)
    assert report.graphs.replayed == 2


# -- a model that is another ---------------------------------------------------------------------------------------
CHANGES = {
    "a parameter at another address": lambda m: setattr(m.mlp[0].weight, "data", m.mlp[0].weight.data * 2),
    "another parameter": lambda m: setattr(m.mlp[0], "weight", nn.Parameter(m.mlp[0].weight.detach() * 2)),
    "a frozen parameter": lambda m: m.mlp[0].weight.requires_grad_(False),
    "tied parameters": lambda m: setattr(m.norm, "bias", m.mlp[2].bias),
    "an attribute": lambda m: setattr(m, "scale", 5.0),
    "a submodule": lambda m: setattr(m.mlp, "1", nn.ReLU()),
    "a hook": lambda m: m.mlp[0].register_forward_hook(lambda _m, _x, y: y + 1),
    "a hook before": lambda m: m.register_forward_pre_hook(lambda _m, x: (x[0] + 1, *x[1:])),
    "a hook of the gradient": lambda m: m.mlp.register_full_backward_hook(lambda _m, g, _: (g[0] * 2,)),
    "a hook before the gradient": lambda m: m.mlp.register_full_backward_pre_hook(lambda _m, g: (g[0] * 2,)),
    "evaluation": lambda m: m.eval(),
    "evaluation of a part": lambda m: m.dropout.eval(),
    "other numbers": lambda m: m.load_state_dict({name: t * 1.5 for name, t in m.state_dict().items()}),
    "other memory": lambda m: m.load_state_dict({name: t * 1.5 for name, t in m.state_dict().items()}, assign=True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_is_another(name):
    model, twin, report = recorded(lambda: Net(0.5))
    gone = replays(report, lambda: step(model, twin, 1))
    for one in (model, twin):
        CHANGES[name](one)
    found = replays(report, lambda: step(model, twin, 2))
    assert found == (gone if name == "other numbers" else 0)
    for turn in range(2 * BEFORE + 3):
        step(model, twin, turn)


def test_training_and_evaluation_by_turns_have_both():
    model, twin, report = recorded(lambda: Net(0.5))
    for turn in range(8):
        for one in (model, twin):
            one.eval()
        step(model, twin, turn)
        with torch.no_grad():
            torch.testing.assert_close(model(operand(turn)), twin(operand(turn)))
        for one in (model, twin):
            one.train()
        step(model, twin, turn)
    assert report.graphs.recorded == 2, "in training and in evaluation"
    assert report.graphs.replayed == 2 + 8 + 8 - BEFORE


def test_a_model_that_changes_all_the_time_is_recorded_ever_more_rarely():
    model, twin, report = recorded()
    for turn in range(40):
        model.scale = twin.scale = float(turn)
        for again in range(BEFORE + 2):
            step(model, twin, again)
    assert report.graphs.recorded <= 6


def test_hooks_of_parameters_see_gradients_as_without_graphs():
    model, twin, report = recorded()
    seen = {id(model): [], id(twin): []}
    for one in (model, twin):
        note = seen[id(one)].append
        for p in one.parameters():
            p.register_hook(lambda g, note=note: (note(float(g.sum())), g * 2)[1])
            p.register_post_accumulate_grad_hook(lambda p, note=note: note(float(p.grad.sum())))
    assert replays(report, lambda: step(model, twin, 1)) == 1
    assert sorted(seen[id(model)]) == pytest.approx(sorted(seen[id(twin)]), rel=1e-4)
    assert len(seen[id(model)]) == 2 * len(list(model.parameters()))
    model.scale = twin.scale = 3.0
    for turn in range(2 * BEFORE + 3):
        step(model, twin, turn)
    assert report.graphs.recorded == 2
    assert len(seen[id(model)]) == len(seen[id(twin)]), "recording one is not seen by them"


def test_an_optimizer_in_the_backward_pass():
    model, twin, report = pair()
    for one in (model, twin):
        for p in one.parameters():
            optimizer = torch.optim.SGD([p], 0.05)

            def update(p, optimizer=optimizer):
                optimizer.step()
                p.grad = None

            p.register_post_accumulate_grad_hook(update)
    for turn in range(BEFORE + 4):
        back(model, turn)
        back(twin, turn)
        alike(model, twin)
    assert report.graphs.replayed == 4


def test_hooks_of_results_see_gradients():
    model, _, _ = recorded()
    seen = []
    y = model(operand(1))
    y.register_hook(lambda g: seen.append(g.clone()))
    y.sum().backward()
    assert torch.equal(seen[0], torch.ones(4, 8))


# -- modes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("build", [Net, lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))])
def test_autocast_is_another_step(build):
    model, twin, report = pair(build)
    for turn in range(2 * BEFORE + 6):
        xs = [operand(turn).requires_grad_() for _ in range(2)]
        for one, x in zip((model, twin), xs, strict=True):
            one.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=turn % 2 == 1):
                y = one(x)
            loss_of(y.float()).backward()
        torch.testing.assert_close(*(x.grad for x in xs), rtol=1e-2, atol=1e-2)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-2, atol=1e-2)
            p.data.mul_(1.1)  # casts of weights must not be those of then
            q.data.mul_(1.1)
    assert report.graphs.recorded == 2
    assert report.graphs.replayed == 6


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_modes_in_which_the_model_itself_runs():
    model, twin, report = recorded()

    def under(context):
        for one in (model, twin):
            one.zero_grad()
            with context():
                loss = loss_of(one(operand(1)))
            loss.backward()
        alike(model, twin)

    hooks = lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2)  # noqa: E731
    assert replays(report, lambda: under(hooks)) == 0
    assert replays(report, lambda: under(torch.autograd.detect_anomaly)) == 0
    assert replays(report, lambda: under(torch.profiler.profile)) == 0
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert replays(report, lambda: model(operand(1))) == 0
    assert replays(report, lambda: step(model, twin, 1)) == 1
    torch.use_deterministic_algorithms(True)
    try:
        assert replays(report, lambda: step(model, twin, 1)) == 0
    finally:
        torch.use_deterministic_algorithms(False)


def test_functions_of_functions_run_the_model_itself():
    model, _, report = recorded()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, x):
        return Net.forward(model, x).sum() + torch.func.functional_call(model.mlp, _below(parameters), (x,)).sum()

    def _below(parameters):
        return {name.removeprefix("mlp."): p for name, p in parameters.items() if name.startswith("mlp.")}

    twin = Product()
    report = fuse(twin, graphs=True)
    for turn in range(BEFORE + 2):
        twin(operand(turn)).sum().backward()
    found = replays(report, lambda: torch.func.grad(lambda x: twin(x).sum())(operand(1)))
    assert found == 0
    assert replays(report, lambda: torch.func.vmap(twin)(operand(1))) == 0
    assert parameters


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_the_model(reentrant):
    model, twin, report = recorded(lambda: Net(0.5))

    def checkpointed():
        for one in (model, twin):
            one.zero_grad()
            torch.manual_seed(3)
            x = operand(1).requires_grad_()
            loss_of(checkpoint(one, x, use_reentrant=reentrant)).backward()
        alike(model, twin)

    for _ in range(BEFORE + 2):
        assert replays(report, checkpointed) == 0


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.head, self.reentrant = Net(), nn.Linear(8, 8), reentrant

    def forward(self, x):
        return self.head(checkpoint(self.inner, self.head(x), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_in_the_model(reentrant):
    model, twin, report = pair(lambda: Checkpointed(reentrant))
    for turn in range(BEFORE + 4):
        step(model, twin, turn)
    assert report.graphs.replayed in (0, 4)
    assert report.graphs.replayed or any("beside" in reason or "captured" in reason for reason in report.graphs.reasons)


def test_a_capture_of_the_callers_has_the_model_itself(monkeypatch):
    model, twin, report = recorded()
    monkeypatch.setattr("dispatch.torch.graphs._captured", lambda: True)
    assert replays(report, lambda: step(model, twin, 1)) == 0


# -- what is not recorded ------------------------------------------------------------------------------------------
HIDDEN = torch.ones(8, requires_grad=True)


class ReadsHidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        y = self.inner(x)
        return y * HIDDEN if len(x.shape) == 2 else y  # torch.fx, which would make it an attribute, stops here


class DrawsOnHost(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x) * random.choice([1.0, 2.0])


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


class CountsInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(8, 8), [0]

    def forward(self, x):
        self.calls[0] += 1
        return self.inner(x) * self.calls[0]


class Waits(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        y = self.inner(x)
        return y * (2 if y.sum().item() > 0 else 3)


class GivesOperand(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x), x


class GivesWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x), self.inner.weight[:4]


class WritesParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            self.inner.weight.mul_(0.99)
        return self.inner(x)


class WritesOperand(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x.add_(1))


class GivesObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x), object()


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        return self.inner(x)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 8, sparse=True)

    def forward(self, x):
        return self.embed(x.argmax(-1)) * 2


class OwnTensor(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.ones(8, requires_grad=True)

    def forward(self, x):
        return x * self.w


REFUSED = {
    ReadsHidden: "no parameters of the model",
    DrawsOnHost: "random numbers on the host",
    Counts: "sets attributes",
    CountsInside: "differ",
    Waits: "cannot be captured",
    GivesOperand: "memory of an operand",
    GivesWeight: "memory of an operand",
    WritesParameter: "writes to",
    WritesOperand: "writes to",
    GivesObject: "gives back a object",
    Frozen: "nothing of it requires",
    Sparse: "sparse",
    OwnTensor: "no parameter requires a gradient",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_a_forward_that_no_graph_stands_for(kind, recorder):
    model, twin, report = pair(kind)
    parameters = list(model.parameters())
    HIDDEN.grad = None
    for turn in range(BEFORE + 4):
        grads = []
        for one in (model, twin):
            one.zero_grad()
            random.seed(turn)
            y = one(operand(turn))
            y = y[0] if isinstance(y, tuple) else y
            if y.requires_grad:
                loss_of(y).backward()
            grads.append((y.detach(), None if HIDDEN.grad is None else HIDDEN.grad.clone()))
            HIDDEN.grad = None
        if kind is not CountsInside:  # recording runs it, too
            torch.testing.assert_close(*grads)
            if kind is not Sparse:
                alike(model, twin)
    assert report.graphs.recorded == 0
    assert any(REFUSED[kind] in reason for reason in report.graphs.reasons), report.graphs.reasons
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    assert len(recorder.pools) <= 1


def test_a_call_without_a_backward_pass_is_not_recorded():
    model, _, report = pair()
    for turn in range(training_graphs.UNUSED + 4):
        assert model(operand(turn)).requires_grad
    assert report.graphs.recorded == 0
    assert any("no gradient is taken" in reason for reason in report.graphs.reasons)


def test_failures_are_few():
    model, _, report = pair(Waits)
    for rows in (4, 5, 6, 7):
        for _ in range(BEFORE + 2):
            model(operand(1, rows)).sum().backward()
    assert report.graphs.reasons["recordings of other calls failed"] > 0


def test_gradients_that_are_not_finite_are_waited_for():
    model, twin, report = pair()
    for turn in range(BEFORE + 1):
        for one in (model, twin):
            one.zero_grad()
            (loss_of(one(operand(turn))) * torch.inf).backward()
    assert report.graphs.recorded == 0
    for turn in range(2 * BEFORE + 2):
        step(model, twin, turn)
    assert report.graphs.recorded == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no memory")])
def test_what_cuts_a_recording_short_leaves_the_model_as_it_was(error, recorder):
    model, twin, report = pair(Normed)
    for turn in range(BEFORE):
        step(model, twin, turn)
    parameters = list(model.parameters())
    recorder.interrupt = error
    model.zero_grad()
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            back(model, 5)
    else:
        back(model, 5)
        back(twin, 5)
    recorder.interrupt = None
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    for turn in range(4):
        step(model, twin, turn)
    assert report.graphs.recorded == isinstance(error, KeyboardInterrupt)


# -- threads, copies, many kinds of calls --------------------------------------------------------------------------
def test_threads_train_a_model_at_once():
    model, twin, _ = pair()
    wrong = []

    def work(number):
        for turn in range(40):
            x = operand(100 * number + turn).requires_grad_()
            want = x.detach().clone().requires_grad_()
            (g,) = torch.autograd.grad(loss_of(model(x)), x)
            (h,) = torch.autograd.grad(loss_of(Net.forward(twin, want)), want)
            if not torch.allclose(g, h, rtol=1e-4, atol=1e-5):
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert all(p.grad is None for p in model.parameters())


def test_steps_make_room_for_each_other(recorder):
    model, twin, report = pair()
    kinds = range(2, training_graphs.MOST + 4)
    for _ in range(2):
        for rows in kinds:
            for turn in range(BEFORE + 2):
                for one in (model, twin):
                    one.zero_grad()
                    loss_of(one(operand(turn, rows))).backward()
                alike(model, twin)
    assert recorder.finished >= 2
    assert len(recorder.pools) == 1
    assert len(report.graphs._training._kept) == training_graphs.MOST


def test_many_kinds_of_calls_keep_few_gradients():
    model, _, report = pair()
    for rows in range(2, 4 * training_graphs.MOST):
        for turn in range(BEFORE):
            loss_of(model(operand(turn, rows))).backward()
    learnt = report.graphs._training._learnt.values()
    assert len(learnt) == 4 * training_graphs.MOST - 2
    assert sum(one.samples is not None for one in learnt) == training_graphs.MOST


def test_copies_have_steps_of_their_own_and_undo_takes_them_away():
    model, twin, report = recorded()
    other = copy.deepcopy(model)
    for turn in range(BEFORE + 2):
        step(other, twin, turn)
    assert report.graphs.replayed == 2
    report.undo()
    step(model, twin, 1)
    assert report.graphs.replayed == 2


def test_a_fused_part_of_a_fused_model():
    def build():
        model = nn.Sequential(Net(), nn.Linear(8, 8))
        fuse(model[0], graphs=True)
        return model

    torch.manual_seed(0)
    model = build()
    twin = nn.Sequential(Net(), nn.Linear(8, 8))
    twin.load_state_dict(model.state_dict())
    report = fuse(model, graphs=True)
    for turn in range(BEFORE + 4):
        step(model, twin, turn)
    assert report.graphs.replayed >= 3


def test_two_models_in_one_step():
    one, one_twin, first = pair()
    two, two_twin, second = pair(Normed)
    for turn in range(BEFORE + 4):
        for a, b in ((one, two), (one_twin, two_twin)):
            a.zero_grad()
            b.zero_grad()
            loss_of(b(a(operand(turn)))).backward()
        alike(one, one_twin)
        alike(two, two_twin)
    assert first.graphs.replayed == second.graphs.replayed == 4


def test_gradients_of_data_parallel_training():
    if not torch.distributed.is_available():
        pytest.skip("torch.distributed is not there")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        model, twin, report = pair()
        parallel = nn.parallel.DistributedDataParallel(model)
        for turn in range(BEFORE + 4):
            model.zero_grad()
            twin.zero_grad()
            back(parallel, turn)
            back(twin, turn)
            alike(model, twin)
    finally:
        torch.distributed.destroy_process_group()
    assert report.graphs.replayed == 4, report.graphs
