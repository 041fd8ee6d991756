"""fuse(model, graphs=True) on a GPU: replays give what the forward gives, or the forward itself runs."""

import copy
import importlib
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

from dispatch.torch import fuse, graphs  # noqa: E402  # it imports torch

nn = torch.nn
pytestmark = pytest.mark.filterwarnings("ignore")  # of packages that nobody here wrote
GPU = "cuda:0"


class Net(nn.Module):
    """Products, a norm, and masked attention."""

    def __init__(self, wide=64):
        super().__init__()
        self.norm = nn.LayerNorm(wide)
        self.qkv = nn.Linear(wide, 3 * wide)
        self.mlp = nn.Sequential(nn.Linear(wide, 4 * wide), nn.GELU(approximate="tanh"), nn.Linear(4 * wide, wide))

    def forward(self, x, mask=None):
        b, s, wide = x.shape
        q, k, v = (t.view(b, s, 2, wide // 2).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + y.transpose(1, 2).reshape(b, s, wide)
        return x + self.mlp(x), y


def net(dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = Net().to(GPU, dtype).eval()
    return model, copy.deepcopy(model).double()


def near(found, model, exact, *operands):
    wide = [x.double() if x.is_floating_point() else x for x in operands]
    own = model.__class__.forward(copy.deepcopy(model), *operands)  # submodules are fused, graphs are not
    for y, plain, want in zip(found, own, exact(*wide), strict=True):
        bound = 1.5 * (plain.double() - want).norm() + 1e-4 * want.norm()
        assert (y.double() - want).norm() <= bound


def test_a_replay_needs_no_workspace_that_others_may_give_back():
    """As torch.compile does before it records graphs of its own: all workspaces of cuBLAS, and then all free memory."""
    model, exact = net()
    report = fuse(model, graphs=True)
    torch.manual_seed(3)
    x = torch.randn(64, 32, 64, device=GPU, dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(6):
            model(x)
        assert report.graphs.replayed, report.graphs
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        others = [torch.full((1 << 22,), 7.0, device=GPU) for _ in range(64)]  # where it was, if it was given back
        for turn in range(8):
            near(model(x + turn), model, exact, x + turn)
        torch.cuda.synchronize()
        assert all(bool((t == 7).all()) for t in others)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_replays_give_what_the_forward_gives_for_each_operand(mode):
    model, exact = net()
    report = fuse(model, graphs=True)
    kept = []
    with mode():
        for turn in range(40):
            torch.manual_seed(turn)
            x = torch.randn(2, 9 + turn % 3, 64, device=GPU, dtype=torch.bfloat16)
            mask = torch.rand(2, 1, x.shape[1], x.shape[1], device=GPU) > 0.3 if turn % 2 else None
            operands = (x,) if mask is None else (x, mask)
            y = model(*operands)
            near(y, model, exact, *operands)
            kept.append((y, [t.clone() for t in y]))
    assert report.graphs.recorded == 6, report.graphs
    assert report.graphs.replayed >= 40 - 6 * graphs.RUNS_BEFORE
    for y, then in kept:
        assert all(torch.equal(a, b) for a, b in zip(y, then, strict=True)), "results are the caller's"


def test_streams_and_threads_share_the_graphs():
    model, exact = net()
    report = fuse(model, graphs=True)
    wrong = []

    def work(number):
        stream = torch.cuda.Stream()
        generator = torch.Generator(GPU).manual_seed(number)
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(150):
                x = torch.randn(2, 8, 64, device=GPU, generator=generator).bfloat16()
                y = model(x)[0]
                want = exact(x.double())[0]
                if not (y.double() - want).norm() <= 2e-2 * want.norm():
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert report.graphs.replayed > 500, report.graphs


def test_two_models_on_two_streams_at_once():
    pairs = []
    for _ in range(2):
        model, exact = net()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.1)
            for p, q in zip(exact.parameters(), model.parameters(), strict=True):
                p.copy_(q)
        fuse(model, graphs=True)
        pairs.append((model, exact, torch.cuda.Stream()))
    with torch.no_grad():
        for _ in range(60):
            x = torch.randn(2, 8, 64, device=GPU, dtype=torch.bfloat16)
            torch.cuda.synchronize()
            found = []
            for model, _, stream in pairs:
                with torch.cuda.stream(stream):
                    found.append(model(x)[0])
            torch.cuda.synchronize()
            for y, (_, exact, _) in zip(found, pairs, strict=True):
                want = exact(x.double())[0]
                assert (y.double() - want).norm() <= 2e-2 * want.norm()


def test_changes_of_the_model_are_seen():
    model, _ = net()
    report = fuse(model, graphs=True)
    x = torch.randn(2, 8, 64, device=GPU, dtype=torch.bfloat16)

    def check():
        exact = copy.deepcopy(model)
        exact.__dict__.pop("forward", None)
        exact = exact.double()
        with torch.no_grad():
            y, want = model(x)[0], Net.forward(exact, x.double())[0]
        assert (y.double() - want).norm() <= 2e-2 * want.norm()

    for _ in range(6):
        check()
    with torch.no_grad():
        model.mlp[2].weight.mul_(-2)  # in place: the graph reads it
    check()
    assert report.graphs.recorded == 1
    model.load_state_dict(net()[0].state_dict(), assign=True)  # other memory
    for _ in range(6):
        check()
    assert report.graphs.recorded == 2
    model.to(torch.float16)
    x = x.half()
    for _ in range(6):
        check()
    assert report.graphs.recorded == 3
    model.mlp[1] = nn.ReLU()
    for _ in range(6):
        check()


class Waits(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        y = self.inner(x)
        return y * (2 if y.sum().item() > 0 else 3)


def test_a_forward_that_waits_for_the_gpu_runs_itself():
    model = Waits().to(GPU).eval()
    plain = copy.deepcopy(model)
    report = fuse(model, graphs=True)
    with torch.no_grad():
        for _ in range(8):
            x = torch.randn(4, 8, device=GPU)  # by torch's generator, which a lost capture left in it
            torch.testing.assert_close(model(x), plain(x))
    assert report.graphs.recorded == 0
    assert any("captured" in reason for reason in report.graphs.reasons), report.graphs.reasons
    assert torch.randn(1000, device=GPU).std() > 0.5
    free = torch.cuda.mem_get_info()[0]
    for _ in range(20):
        torch.empty(64 << 20, device=GPU)
    torch.cuda.empty_cache()
    assert free - torch.cuda.mem_get_info()[0] <= 256 << 20, "torch's allocator takes nothing for captured"
    other, exact = net()
    again = fuse(other, graphs=True)
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(2, 8, 64, device=GPU, dtype=torch.bfloat16)
            near(other(x), other, exact, x)
    assert again.graphs.replayed == 3, "a failed recording leaves others be"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torch.randn(4, device=GPU)
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not torch.equal(y, first)


@pytest.mark.parametrize("which", ["mlp", "net"])
def test_a_fused_model_trains_by_graphs_of_torchs(which):
    """torch.cuda.make_graphed_callables records forward and backward, with what our ops do in them."""
    if which == "mlp":
        model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(approximate="tanh"), nn.Linear(128, 64))
        model = model.to(GPU, torch.bfloat16)
    else:
        model = net()[0].train()
    exact = copy.deepcopy(model).double()
    report = fuse(model)
    assert report.replaced
    x = torch.randn(2, 8, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(model, (x,))
    for turn in range(4):
        torch.manual_seed(turn)
        x = torch.randn(2, 8, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
        wide = x.detach().double().requires_grad_()
        model.zero_grad()
        exact.zero_grad()
        found, want = graphed(x), exact(wide)
        found, want = (found[0], want[0]) if which == "net" else (found, want)
        found.float().square().mean().backward()
        want.square().mean().backward()
        both = zip((x, *model.parameters()), (wide, *exact.parameters()), strict=True)
        for mine, right in ((p.grad, q.grad) for p, q in both):
            assert (mine.double() - right).norm() <= 3e-2 * right.norm() + 1e-4


def test_a_capture_of_the_callers_has_the_forward_itself():
    model, exact = net()
    report = fuse(model, graphs=True)
    x = torch.randn(2, 8, 64, device=GPU, dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(6):
            model(x)
        replayed = report.graphs.replayed
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        assert report.graphs.replayed == replayed
        x.copy_(torch.randn(2, 8, 64, device=GPU))
        graph.replay()
        near(y, model, exact, x)


@pytest.mark.alone
def test_memory_is_flat():
    model, _ = net()
    fuse(model, graphs=True)

    def calls(count):
        with torch.no_grad():
            for turn in range(count):
                model(torch.randn(2, 1 + turn % 20, 64, device=GPU, dtype=torch.bfloat16))
        torch.cuda.synchronize()

    calls(400)
    before = torch.cuda.mem_get_info()[0]
    calls(2000)
    assert before - torch.cuda.mem_get_info()[0] <= 64 << 20


@pytest.mark.parametrize("name", real_models.CASES)
def test_a_model_that_nobody_here_wrote(name):
    case = real_models.CASES[name]
    if (why := real_models.why_not(case.package)) is not None:
        pytest.skip(why)
    model = case.model(True, GPU, torch.bfloat16).eval()
    plain, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    report = fuse(model, graphs=True)
    with torch.no_grad():
        for turn in range(8):
            x = case.operand(True, GPU, torch.bfloat16, seed=turn)
            exact = real_models.logits(wide(x.double() if x.is_floating_point() else x))
            own = (real_models.logits(plain(x)).double() - exact).norm()
            off = (real_models.logits(model(x)).double() - exact).norm()
            assert off <= 1.5 * own + 2e-3 * exact.norm(), turn
    assert report.graphs.replayed == 5, report.graphs
