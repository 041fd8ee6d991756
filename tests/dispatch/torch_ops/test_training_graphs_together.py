"""fuse(model, graphs=True) in training: threads, copies, many kinds of calls, and several models in one step."""

import copy
import importlib.util
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from dispatch.torch import fuse, training_graphs  # noqa: E402

spec = importlib.util.spec_from_file_location("training_steps", Path(__file__).with_name("training_steps.py"))
steps = importlib.util.module_from_spec(spec)
spec.loader.exec_module(steps)
nn, BEFORE, recorder, Net, pair, operand = (
    steps.nn,
    steps.BEFORE,
    steps.recorder,
    steps.Net,
    steps.pair,
    steps.operand,
)
loss_of, alike, back, step, recorded = steps.loss_of, steps.alike, steps.back, steps.step, steps.recorded
Normed = steps.Normed


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
    kinds = range(2, training_graphs.MAX_STEPS + 4)
    for _ in range(2):
        for rows in kinds:
            for turn in range(BEFORE + 2):
                for one in (model, twin):
                    one.zero_grad()
                    loss_of(one(operand(turn, rows))).backward()
                alike(model, twin)
    assert recorder.finished >= 2
    assert len(recorder.pools) == 1
    assert len(report.graphs._training._steps) == training_graphs.MAX_STEPS


def test_many_kinds_of_calls_keep_few_gradients():
    model, _, report = pair()
    for rows in range(2, 4 * training_graphs.MAX_STEPS):
        for turn in range(BEFORE):
            loss_of(model(operand(turn, rows))).backward()
    learnt = report.graphs._training._histories.values()
    assert len(learnt) == 4 * training_graphs.MAX_STEPS - 2
    assert sum(one.samples is not None for one in learnt) == training_graphs.MAX_STEPS


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
