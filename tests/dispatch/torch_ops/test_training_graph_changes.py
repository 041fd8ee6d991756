"""fuse(model, graphs=True) in training: a model that is another one by now, hooks, and modes of torch."""

import importlib.util
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from dispatch.torch import fuse  # noqa: E402

spec = importlib.util.spec_from_file_location("training_steps", Path(__file__).with_name("training_steps.py"))
steps = importlib.util.module_from_spec(spec)
spec.loader.exec_module(steps)
nn, BEFORE, recorder, Net, pair, operand = steps.nn, steps.BEFORE, steps.recorder, steps.Net, steps.pair, steps.operand
loss_of, alike, back, step, recorded = steps.loss_of, steps.alike, steps.back, steps.step, steps.recorded
replays, Product = steps.replays, steps.Product


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
    assert report.graphs.replayed or any(
        "fails during a recording" in reason or "captured" in reason for reason in report.graphs.reasons
    )


def test_a_capture_of_the_callers_has_the_model_itself(monkeypatch):
    model, twin, report = recorded()
    monkeypatch.setattr("dispatch.torch.graphs._is_capturing", lambda: True)
    assert replays(report, lambda: step(model, twin, 1)) == 0
