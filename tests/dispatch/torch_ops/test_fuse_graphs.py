"""fuse(model, graphs=True) without a GPU: which calls are recorded, replayed, and when the forward itself runs.

In the place of CUDA graphs stands a recorder whose graphs compute what the model computed when it was recorded: with
the tensors and attributes of then. A replay where the forward should have run shows as a wrong result.
"""

import copy
import threading

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from dispatch.torch import fuse, graph_recorder, graphs, model_state  # noqa: E402
from dispatch.torch.model_state import ModelState  # noqa: E402

nn = torch.nn


class Recording:
    """A graph that computes by the parameters' memory and the attributes as they were."""

    def __init__(self, model, forward, args, kwargs):
        self.state = ModelState(model)
        self.then = copy.deepcopy(model)
        for own, theirs in zip(self.then.parameters(), model.parameters(), strict=True):
            own.data = theirs.data  # one memory: what is written there later is seen, what lies elsewhere is not
        self.then.forward = type(model).forward.__get__(self.then)
        self.args, self.kwargs = args, kwargs
        self.finished = False

    def is_valid(self):
        return self.state.is_unchanged()

    def finish(self):
        self.finished = True

    def replay(self, tensors):
        left = list(tensors)
        args, kwargs = graph_recorder.with_operands(left, self.args, self.kwargs)
        return self.then.forward(*args, **kwargs)


class Recorder:
    def __init__(self):
        self.failed, self.why, self.made = False, None, []

    def new_pool(self):
        return None

    def record(self, model, forward, args, kwargs, tensors):
        if self.why is not None:
            self.failed = True
            return self.why
        self.made.append(Recording(model, forward, args, kwargs))
        return self.made[-1]


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    one = Recorder()
    patch(monkeypatch, one)
    return one


def patch(monkeypatch, one):
    monkeypatch.setattr(graphs, "_recorder", lambda _: one)
    monkeypatch.setattr(graphs, "_current_device", lambda: -1)
    monkeypatch.setattr(graphs, "_is_capturing", lambda: False)
    for module in (graphs, model_state):
        monkeypatch.setattr(module, "on_gpu", lambda _: True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.scale = 2.0
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x, times=1, *, minus=None):
        y = self.inner(x) * (self.scale * times) + self.shift
        return {"y": y if minus is None else y - minus, "n": None}


def right(model, *args, **kwargs):
    return Net.forward(model, *args, **kwargs)["y"]


def net():
    model = Net().eval()
    return model, fuse(model, graphs=True)


def call(model, *args, **kwargs):
    with torch.no_grad():
        y = model(*args, **kwargs)["y"]
        assert torch.equal(y, right(model, *args, **kwargs))
    return y


class Square(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return x @ self.w


def test_a_parameter_that_lies_otherwise_at_the_same_address_is_seen():
    model = Square().eval()
    report = fuse(model, graphs=True)
    x = torch.randn(2, 4)
    with torch.no_grad():
        for _ in range(graphs.RUNS_BEFORE + 2):
            model(x)
        replayed, before = report.graphs.replayed, model.w.data_ptr()
        model.w.data = model.w.data.t()
        assert model.w.data_ptr() == before
        assert torch.equal(model(x), x @ model.w)
    assert replayed == 2
    assert report.graphs.replayed == replayed


def often(model, *args, **kwargs):
    for _ in range(graphs.RUNS_BEFORE + 3):
        call(model, *args, **kwargs)


def test_a_call_that_was_made_often_is_replayed():
    model, report = net()
    for _ in range(graphs.RUNS_BEFORE):
        call(model, torch.randn(2, 4))
    assert (report.graphs.recorded, report.graphs.replayed) == (0, 0)
    for _ in range(5):
        call(model, torch.randn(2, 4))
    assert (report.graphs.recorded, report.graphs.replayed) == (1, 5)
    assert report.graphs.reasons == {"it runs eagerly before a recording": graphs.RUNS_BEFORE}
    assert "forward as a CUDA graph" in str(report)
    assert "1 recorded, 5 replays" in repr(report.graphs)


def test_other_layouts_choices_and_names_are_other_graphs():
    model, report = net()
    x, z = torch.randn(2, 4), torch.randn(3)
    kinds = [
        ((x,), {}), ((x.double().float().repeat(3, 1),), {}), ((torch.randn(4, 2).t(),), {}), ((x, 3), {}),
        ((x,), {"times": 3}), ((x, 2.0), {}), ((x, True), {}), ((x,), {"minus": z}), ((), {"x": x}),
        ((x,), {"minus": None}),
    ]  # fmt: skip
    for _ in range(graphs.RUNS_BEFORE + 2):
        for args, kwargs in kinds:
            call(model, *args, **kwargs)
    assert report.graphs.recorded == len(kinds)
    assert report.graphs.replayed == 2 * len(kinds)


CHANGES = {
    "a parameter at another address": lambda m: setattr(m.inner.weight, "data", torch.randn(3, 4)),
    "another parameter": lambda m: setattr(m.inner, "weight", nn.Parameter(torch.randn(3, 4))),
    "a buffer at another address": lambda m: setattr(m, "shift", torch.randn(3)),
    "an attribute": lambda m: setattr(m, "scale", 5.0),
    "a submodule": lambda m: setattr(m, "inner", nn.Linear(4, 3)),
    "a parameter less": lambda m: setattr(m.inner, "bias", None),
    "a hook": lambda m: m.inner.register_forward_hook(lambda _m, _x, y: y + 1),
    "a hook before": lambda m: m.inner.register_forward_pre_hook(lambda _m, x: (x[0] + 1,)),
    "a forward of a submodule": lambda m: setattr(m.inner, "forward", lambda x: x[:, :3]),
    "a state loaded by assignment": lambda m: m.load_state_dict(Net().state_dict(), assign=True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_model_that_is_another_runs_itself(change):
    model, report = net()
    often(model, torch.randn(2, 4))
    replayed = report.graphs.replayed
    change(model)
    call(model, torch.randn(2, 4))
    assert report.graphs.replayed == replayed
    often(model, torch.randn(2, 4))


def test_what_is_written_to_parameters_in_place_is_seen_by_the_graph():
    model, report = net()
    often(model, torch.randn(2, 4))
    with torch.no_grad():
        model.inner.weight.mul_(3)
    replayed = report.graphs.replayed
    call(model, torch.randn(2, 4))
    assert report.graphs.replayed == replayed + 1


def test_training_gradients_autocast_and_hooks_everywhere_run_the_forward(monkeypatch, recorder):
    model, report = net()
    x = torch.randn(2, 4)
    often(model, x)
    replayed = report.graphs.replayed
    model(x)["y"].sum().backward()
    assert model.inner.weight.grad is not None
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: True)
    call(model, x)
    monkeypatch.undo()
    patch(monkeypatch, recorder)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        call(model, x)
    finally:
        handle.remove()
    assert report.graphs.replayed == replayed
    model.train()
    often(model, x)
    assert report.graphs.replayed == replayed
    assert any("training" in reason for reason in report.graphs.reasons)
    model.eval()
    often(model, x)
    assert report.graphs.replayed > replayed
    assert report.graphs.reasons["it runs eagerly before a recording"] == 2 * graphs.RUNS_BEFORE + 1, (
        "the call with gradients, too"
    )


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x + self.calls


class WritesOperand(nn.Module):
    def forward(self, x):
        return x.add_(1)


class GivesWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return x + self.w, self.w[1:]


class GivesObject(nn.Module):
    def forward(self, x):
        return x, object()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Counts, "writes to"),
        (WritesOperand, "writes to"),
        (GivesWeight, "memory of a parameter"),
        (GivesObject, "returns a object"),
    ],
)
def test_a_forward_that_no_graph_stands_for_is_not_recorded(kind, said, recorder):
    model = kind().eval()
    report = fuse(model, graphs=True)
    with torch.no_grad():
        for _ in range(graphs.RUNS_BEFORE + 3):
            model(torch.zeros(3))
    assert not recorder.made
    assert any(said in reason for reason in report.graphs.reasons)
    if kind is Counts:
        assert model.calls == graphs.RUNS_BEFORE + 3, "it runs once for each call"


def test_operands_that_are_no_tensors_run_the_forward():
    class Takes(nn.Module):
        def forward(self, xs):
            return xs[0] + 1

    model = Takes().eval()
    report = fuse(model, graphs=True)
    with torch.no_grad():
        for _ in range(graphs.RUNS_BEFORE + 2):
            model([torch.zeros(3)])
    assert report.graphs.reasons == {"an operand is a list, which a graph does not support": graphs.RUNS_BEFORE + 2}


def test_what_cannot_be_recorded_is_tried_once_and_no_more_than_twice_in_all(recorder):
    model, report = net()
    recorder.why = "it cannot be captured: a sync"
    for rows in (1, 2, 3):
        often(model, torch.randn(rows, 4))
    assert report.graphs.recorded == 0
    assert report.graphs.reasons["it cannot be captured: a sync"] == 6
    assert report.graphs.reasons["recordings of other calls failed"] == graphs.RUNS_BEFORE + 3


def test_graphs_make_room_for_each_other(recorder):
    model, _ = net()
    for rows in range(1, graphs.MAX_GRAPHS + 3):
        often(model, torch.randn(rows, 4))
    assert [one.finished for one in recorder.made] == [True] * 2 + [False] * graphs.MAX_GRAPHS
    for rows in range(1, graphs.MAX_GRAPHS + 3):
        call(model, torch.randn(rows, 4))


def test_copies_have_graphs_of_their_own_and_undo_takes_them_away():
    model, report = net()
    often(model, torch.randn(2, 4))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.inner.weight.mul_(2)
    often(other, torch.randn(2, 4))
    assert other.__dict__[graphs.NAME].recorded == 1
    assert report.graphs.recorded == 1
    again = fuse(model, graphs=True)
    assert any("already" in note.why for note in again.kept)
    report.undo()
    assert "forward" not in model.__dict__
    assert graphs.NAME not in model.__dict__
    call(model, torch.randn(2, 4))
    assert fuse(model, graphs=True).graphs is not None


def test_threads_share_a_model():
    model, report = net()
    wrong = []

    def work():
        for rows in (1, 2, 3) * 20:
            x = torch.randn(rows, 4)
            with torch.no_grad():
                if not torch.equal(model(x)["y"], right(model, x)):
                    wrong.append(rows)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert report.graphs.recorded >= 3


def test_a_fused_forward_is_what_is_recorded():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    expected = copy.deepcopy(model)
    report = fuse(model, graphs=True)
    assert len(report.replaced) == 2
    x = torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(graphs.RUNS_BEFORE):
            torch.testing.assert_close(model(x), expected(x))
    report.undo()
    assert not model.__dict__.get("forward")


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_has_workspaces_of_its_own(fails, monkeypatch):
    """Those that torch keeps for a stream may be given back by anybody, and a graph would go on to write to them."""
    said = []

    class Capture:
        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            said.append("begin")

        def __exit__(self, *_):
            said.append("end")

    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: said.append("give back"), raising=False)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    recorder = object.__new__(graph_recorder.Recorder)
    recorder.stream = None

    def capture():
        with recorder._capturing(None, graph_recorder.Pool(None)):
            said.append("run")
            if fails:
                raise ValueError("as it runs")

    if fails:
        with pytest.raises(ValueError, match="as it runs"):
            capture()
    else:
        capture()
    assert said == ["give back", "begin", "run", "end", "give back"]
