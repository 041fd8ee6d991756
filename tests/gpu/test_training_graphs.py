"""fuse(model, graphs=True) in training on a GPU: steps by graphs are those of the fused model, within rounding."""

import copy
import importlib
import itertools
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)
TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))
real_models = importlib.import_module("real_models")
sys.path.remove(str(TESTS))

from dispatch.torch import fuse, training_graphs  # noqa: E402  # it imports torch

nn = torch.nn
F = nn.functional
pytestmark = pytest.mark.filterwarnings("ignore")  # of packages that nobody here wrote
GPU = "cuda:0"
BEFORE = training_graphs.RUNS_BEFORE
NOISE = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}  # of a norm: kernels may add in another order


class Net(nn.Module):
    """Products, norms, attention with dropout, and dropout."""

    def __init__(self, dropped=0.0, wide=64):
        super().__init__()
        self.dropped = dropped
        self.norm = nn.LayerNorm(wide)
        self.qkv = nn.Linear(wide, 3 * wide)
        self.mlp = nn.Sequential(nn.Linear(wide, 4 * wide), nn.GELU(approximate="tanh"), nn.Linear(4 * wide, wide))
        self.dropout = nn.Dropout(dropped)

    def forward(self, x):
        b, s, wide = x.shape
        q, k, v = (t.view(b, s, 2, wide // 2).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropped if self.training else 0.0)
        x = x + self.dropout(y.transpose(1, 2).reshape(b, s, wide))
        return x + self.mlp(x)


def pair(build=Net, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = build().to(GPU, dtype).train()
    twin = copy.deepcopy(model)
    report = fuse(model, graphs=True)
    fuse(twin)
    return model, twin, report


def operand(turn, dtype=torch.bfloat16, rows=4):
    return torch.randn(rows, 8, 64, generator=torch.Generator().manual_seed(turn)).to(GPU, dtype)


def loss_of(y):
    y = real_models.logits(y).float()
    return y.square().mean() + y.sum() / y.numel()


def near(a, b, noise=None):
    noise = NOISE[b.dtype] if noise is None else noise
    assert a.isfinite().all()
    assert (a.double() - b.double()).norm() <= noise * b.double().norm() + 1e-6


def alike(model, twin, noise=None):
    """All gradients together, and each buffer."""
    grads = [[p.grad for p in one.parameters()] for one in (model, twin)]
    assert [g is None for g in grads[0]] == [g is None for g in grads[1]]
    near(*(torch.cat([g.flatten().float() for g in given if g is not None]) for given in grads), noise or 3e-2)
    for b, c in zip(model.buffers(), twin.buffers(), strict=True):
        near(b, c, 1e-2) if b.is_floating_point() else torch.testing.assert_close(b, c)


def step(model, twin, turn, dtype=torch.bfloat16):
    for one in (model, twin):
        one.zero_grad()
        torch.manual_seed(1000 + turn)
        loss_of(one(operand(turn, dtype))).backward()
    alike(model, twin)


def recorded(build=Net, dtype=torch.bfloat16):
    model, twin, report = pair(build, dtype)
    for turn in range(BEFORE + 2):
        step(model, twin, turn, dtype)
    assert (report.graphs.recorded, report.graphs.replayed) == (1, 2), report.graphs
    return model, twin, report


# -- models that nobody here wrote ---------------------------------------------------------------------------------
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3),
    "adamw, fused": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", real_models.CASES)
def test_twenty_steps_of_a_model(name, optimizer, dtype):
    case = real_models.CASES[name]
    if (why := real_models.why_not(case.package)) is not None:
        pytest.skip(why)
    model = case.model(True, GPU, dtype)
    twin, start = copy.deepcopy(model), copy.deepcopy(model)
    report = fuse(model, graphs=True)
    fuse(twin)
    optimizers = [OPTIMIZERS[optimizer](one.parameters()) for one in (model, twin)]
    losses = []
    for turn in range(20):
        found = []
        for one, own in zip((model, twin), optimizers, strict=True):
            own.zero_grad(set_to_none=turn % 2 == 0)
            torch.manual_seed(turn)
            loss = loss_of(one(case.operand(True, GPU, dtype, seed=turn)))
            loss.backward()
            own.step()
            found.append(loss.detach())
        losses.append(torch.stack(found))
    losses = torch.stack(losses).double()
    assert report.graphs.replayed == 20 - BEFORE, report.graphs
    assert ((losses[:, 0] - losses[:, 1]).abs() <= 5e-2 * losses[:, 1].abs() + 1e-3).all(), losses
    ways = [nn.utils.parameters_to_vector(one.parameters()).double() for one in (model, twin, start)]
    moved = (ways[1] - ways[2]).norm()
    # AdamW goes as far for a gradient that is nothing but rounding as for any other.
    assert (ways[0] - ways[1]).norm() <= (0.5 if "adamw" in optimizer else 0.1) * moved


def test_labels_and_loss_of_transformers():
    if (why := real_models.why_not("transformers")) is not None:
        pytest.skip(why)
    model = real_models.CASES["vit"].model(True, GPU, torch.bfloat16)
    twin = copy.deepcopy(model)
    report = fuse(model, graphs=True)
    fuse(twin)
    for turn in range(BEFORE + 4):
        x = real_models.CASES["vit"].operand(True, GPU, torch.bfloat16, seed=turn)
        labels = torch.randint(0, real_models.CLASSES, (x.shape[0],), device=GPU)
        for one in (model, twin):
            one.zero_grad()
            y = one(pixel_values=x, labels=labels)
            y.loss.backward()
        alike(model, twin)
    assert report.graphs.replayed == 4, report.graphs


# -- random numbers ------------------------------------------------------------------------------------------------
def test_dropout_draws_anew_and_gradients_have_the_forwards_mask():
    model, twin, report = recorded(lambda: Net(0.3))
    for turn in range(6):
        step(model, twin, turn)  # from the same numbers the same masks
    x = operand(1)
    model.zero_grad()
    torch.manual_seed(1)
    first, second = model(x).detach(), model(x).detach()
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(model(x).detach(), first)
    assert report.graphs.replayed >= 2 + 6 + 2


class Drop(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(64))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(x * self.w)


def test_each_gradient_has_the_mask_of_its_forward():
    model = Drop().to(GPU).train()
    report = fuse(model, graphs=True)
    masks = []
    for turn in range(BEFORE + 5):
        x = operand(turn, torch.float32).requires_grad_()
        y = model(x)
        y.sum().backward()
        assert torch.equal(x.grad != 0, y != 0)
        masks.append((y != 0).flatten())
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(masks))
    assert report.graphs.replayed == 5, report.graphs


# -- whose turn it is ----------------------------------------------------------------------------------------------
def test_accumulation():
    model, twin, report = recorded()
    for one in (model, twin):
        one.zero_grad()
        for turn in range(4):
            (loss_of(one(operand(turn))) / 4).backward()
    alike(model, twin)
    assert report.graphs.replayed == 6


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_before_a_backward(order):
    model, twin, report = recorded()
    for _ in range(3):
        for one in (model, twin):
            one.zero_grad()
            found = [loss_of(one(operand(turn))) for turn in (1, 2)]
            for i in order:
                found[i].backward()
        alike(model, twin)
    assert report.graphs.replayed == 5
    assert report.graphs.reasons["the backward pass of an earlier replay is pending"] == 3


def test_gradients_taken_twice_and_of_other_results():
    model, twin, report = recorded(lambda: Net(0.3))
    for one in (model, twin):
        one.zero_grad()
        torch.manual_seed(3)
        found = loss_of(one(operand(1)))
        torch.rand(5, device=GPU)
        found.backward(retain_graph=True)
        found.backward()
        with pytest.raises(RuntimeError, match="second time"):
            found.backward()
    alike(model, twin)
    assert any("retain_graph" in reason for reason in report.graphs.reasons)


def test_operands_with_gradients_and_streams():
    model, twin, report = pair()
    stream = torch.cuda.Stream()
    for turn in range(BEFORE + 6):
        leaves = [operand(turn).requires_grad_() for _ in range(2)]
        for one, x in zip((model, twin), leaves, strict=True):
            one.zero_grad()
            with torch.cuda.stream(stream if turn % 2 else torch.cuda.current_stream()):
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                loss_of(one(x * 2)).backward()
            torch.cuda.default_stream().wait_stream(stream)
        near(leaves[0].grad, leaves[1].grad)
        alike(model, twin)
    assert report.graphs.replayed == 6, report.graphs


def test_two_models_and_inference_between():
    one, one_twin, first = pair()
    two, two_twin, second = pair(lambda: Net(0.2))
    for turn in range(BEFORE + 5):
        for a, b in ((one, two), (one_twin, two_twin)):
            a.zero_grad()
            b.zero_grad()
            torch.manual_seed(turn)
            y = b(a(operand(turn)))
            with torch.no_grad():
                a.eval()(operand(turn + 1))
                a.train()
            loss_of(y).backward()
        alike(one, one_twin)
        alike(two, two_twin)
    assert first.graphs.replayed >= 5, first.graphs
    assert second.graphs.replayed == 5, second.graphs


def test_threads_train_models_at_once():
    wrong = []

    def work(number):
        try:
            torch.cuda.set_device(0)
            with torch.cuda.stream(torch.cuda.Stream()):
                for turn in range(40):
                    step(*pairs[number][:2], turn)
        except BaseException as error:  # noqa: BLE001
            wrong.append(repr(error))

    pairs = [pair() for _ in range(3)]
    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "they wait for each other"
    assert not wrong


# -- what else training has ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_with_a_gradient_scaler(dtype):
    model, twin, report = pair(lambda: Net(0.1), torch.float32)
    optimizers = [torch.optim.SGD(one.parameters(), 1e-2, momentum=0.9) for one in (model, twin)]
    scalers = [torch.amp.GradScaler("cuda", enabled=dtype is torch.float16, init_scale=2.0**12) for _ in range(2)]
    for turn in range(BEFORE + 8):
        for one, optimizer, scaler in zip((model, twin), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(turn)
            with torch.autocast("cuda", dtype):
                y = one(operand(turn, torch.float32))
            scaler.scale(loss_of(y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        alike(model, twin, NOISE[dtype])
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert report.graphs.replayed == 8, report.graphs


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x.unflatten(-1, (8, 8)).transpose(1, 2)[:, :8])))


def test_statistics_of_batch_norm():
    model, twin, report = recorded(Convolved, torch.float32)
    assert model.norm.num_batches_tracked == BEFORE + 2
    for one in (model, twin):
        one.eval()
    with torch.no_grad():
        x = operand(1, torch.float32)
        near(model(x), twin(x))
    assert report.graphs.replayed == 2


def test_frozen_parameters_and_hooks():
    model, twin, report = recorded()
    for one in (model, twin):
        one.qkv.weight.requires_grad_(False)
        one.norm.weight.register_hook(lambda g: g * 3)
    for turn in range(2 * BEFORE + 3):
        step(model, twin, turn)
    assert model.qkv.weight.grad is None
    assert report.graphs.recorded == 2


class Waits(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        y = self.inner(x)
        return y * (2 if y.sum().item() > 0 else 3)


class WaitsBackwards(nn.Module):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x * 2

        @staticmethod
        def backward(_ctx, g):
            return g * (2 if g.sum().item() < 1e9 else 3)

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        return self.Function.apply(self.inner(x))


@pytest.mark.parametrize("kind", [Waits, WaitsBackwards])
def test_a_step_that_waits_for_the_gpu_runs_itself(kind):
    model, twin, report = pair(kind, torch.float32)
    for turn in range(BEFORE + 4):
        step(model, twin, turn, torch.float32)
    assert report.graphs.recorded == 0
    assert any("captured" in reason for reason in report.graphs.reasons), report.graphs.reasons
    assert torch.randn(1000, device=GPU).std() > 0.5
    recorded()  # a failed recording leaves others be


@pytest.mark.alone
def test_memory_is_flat():
    model, _, report = pair(lambda: Net(0.1))

    def steps(count):
        for turn in range(count):
            model.zero_grad()
            loss_of(model(operand(turn, rows=4 + turn % 4))).backward()
        torch.cuda.synchronize()

    steps(60)
    before = torch.cuda.mem_get_info()[0]
    steps(400)
    assert before - torch.cuda.mem_get_info()[0] <= 64 << 20
    assert report.graphs.recorded == 4, report.graphs
