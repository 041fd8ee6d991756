"""Random numbers on the GPU: every row through its cases, cuRAND's generators against the host's, replays, streams."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest
from dispatch.keys import HOST
from dispatch.ops.random.cases import FORMS, cases

OPS = [op for op in dp.TABLE.ops if op.startswith("random_")]
ROWS = [row for op in OPS for row in dp.TABLE.of(op) if row.min_arch != HOST]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]
PSEUDO = ("philox", "xorwow", "mrg32k3a", "mt19937")
QUASI = ("sobol32", "scrambled_sobol32", "sobol64", "scrambled_sobol64")


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_a_case_or_refuses_it_with_its_reason(row, case, try_row):
    try_row(row, case)


@pytest.mark.parametrize("name", [*PSEUDO, *QUASI])
@pytest.mark.parametrize("draw", ["bits", "uniform f32", "uniform f64"])
def test_a_gpu_gives_the_hosts_bits(name, draw, gpu):
    op, _, dtype = draw.partition(" ")
    given = {"bit_generator": name, "library": "curand"}
    if dtype:
        given["out_dtype"] = dtype
    elif name.endswith("64"):
        given["out_dtype"] = "u64"
    for seed, offset, size in ((7, 0, 100_003), (7, 0, 1), (2**63 + 5, 77, 5000), (7, 1001, 300_000)):
        where = (size, 0 if name in QUASI else seed, offset)
        if name == "mt19937" and (seed != 7 or offset):
            continue  # seconds each on the host
        there, here = (getattr(dp, f"random_{op}")(dev, *where, **given).numpy() for dev in (gpu, dp.device("host")))
        np.testing.assert_array_equal(there, here)


@pytest.mark.parametrize(
    ("name", "ordering"),
    [("philox", "legacy"), ("xorwow", "legacy"), ("xorwow", "seeded"), ("mrg32k3a", "legacy"), ("mt19937", "legacy")],
)
def test_orderings_that_every_device_has_are_the_hosts(name, ordering, gpu):
    given = {"bit_generator": name, "ordering": ordering, "library": "curand"}
    there, here = (dp.random_bits(dev, 50_001, 7, **given).numpy() for dev in (gpu, dp.device("host")))
    np.testing.assert_array_equal(there, here)


@pytest.mark.parametrize("ordering", ["best", "dynamic"])
@pytest.mark.parametrize("name", ["philox", "xorwow", "mrg32k3a"])
def test_orderings_of_a_gpu_are_the_same_in_parts_and_again(name, ordering, gpu):
    given = {"bit_generator": name, "ordering": ordering, "library": "curand"}
    whole = dp.random_bits(gpu, 50_001, 7, **given).numpy()
    np.testing.assert_array_equal(dp.random_bits(gpu, 50_001, 7, **given).numpy(), whole)
    for offset, size in ((0, 1000), (1000, 3), (4097, 20_000)):
        part = dp.random_bits(gpu, size, 7, offset, **given).numpy()
        np.testing.assert_array_equal(part, whole[offset : offset + size])


@pytest.mark.parametrize("name", ["philox", "xorwow", "mrg32k3a", "sobol32", "sobol64"])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_normal_numbers_of_a_gpu_are_the_hosts_but_for_rounding(name, dtype, gpu):
    for op in ("random_normal", "random_lognormal"):
        where = (50_000, 0 if name in QUASI else 7, 64)
        given = {"bit_generator": name, "library": "curand", "out_dtype": dtype}
        there, here = (getattr(dp, op)(dev, *where, **given).numpy() for dev in (gpu, dp.device("host")))
        if op == "random_lognormal":
            there, here = np.log(there), np.log(here)
        assert np.abs(there.astype(np.float64) - here).max() < (3e-5 if dtype == "f32" else 1e-13)


@pytest.mark.parametrize("op", ["random_bits", "random_uniform", "random_normal", "random_lognormal"])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_own_kernels_give_the_numbers_of_curands_philox(op, dtype, gpu):
    kind = "u32" if op == "random_bits" else dtype
    for form in FORMS:
        given = {"seed": 0x123456789ABCDEF, "offset": form.offset, "out_dtype": kind}
        one, other = (getattr(dp, op)(gpu, form.size, **given, library=name).numpy() for name in ("own", "curand"))
        if op in ("random_bits", "random_uniform"):
            np.testing.assert_array_equal(one, other)
        else:
            np.testing.assert_allclose(one, other, rtol=1e-4 if dtype == "f32" else 1e-13, atol=3e-5)


def test_many_calls_of_a_generator_give_what_one_call_gives_while_the_call_is_learnt(gpu):
    """From some tens of calls on they are launches of one graph, whose place follows the number."""
    for draw in ("random", "standard_normal", "bits", "exponential"):
        whole = getattr(dp.random.Generator(5, device=gpu), draw)(size=200 * 96).numpy()
        generator = dp.random.Generator(5, device=gpu)
        parts = [getattr(generator, draw)(size=96) for _ in range(200)]
        np.testing.assert_array_equal(np.concatenate([part.numpy() for part in parts]), whole)


def test_the_same_numbers_on_other_streams_workers_and_in_a_child(gpu):
    generator = dp.random.Generator(11, device=gpu)
    asked = [generator.requests.normal(0, 1, 1000 + number) for number in range(20)]
    right = [dp.run(request).numpy() for request in asked]
    with gpu.stream():
        again = [dp.run(request).numpy() for request in reversed(asked)]
    for one, other in zip(right, reversed(again), strict=True):
        np.testing.assert_array_equal(one, other)
    with dp.Supervisor("cuda:0", streams=2) as sup:
        for future, numbers in zip([sup.submit(request) for request in asked], right, strict=True):
            np.testing.assert_array_equal(future.result().numpy(), numbers)
    with dp.Supervisor("cuda:0", isolation="process") as sup:
        there = dp.random.Generator(11, device=sup.device)
        asked = [there.requests.normal(0, 1, 1000 + number) for number in range(20)]
        for future, numbers in zip([sup.submit(request) for request in asked], right, strict=True):
            np.testing.assert_array_equal(future.result().numpy(), numbers)


def test_a_graph_that_is_replayed_repeats_no_numbers(gpu, torch):
    generator = dp.random.Generator(3, device=gpu)
    eager = generator.random(4096).numpy()
    again = dp.random.Generator(3, device=gpu)
    out = torch.empty(4096, device="cuda")
    more = torch.empty(4096, device="cuda")
    here = dp.from_dlpack(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), dp.Stream(torch.cuda.current_stream()):
        again.random(out=here)
        again.random(out=dp.from_dlpack(more))
    seen = []
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        seen += [out.cpu().numpy().copy(), more.cpu().numpy().copy()]
    np.testing.assert_array_equal(seen[0], eager)
    together = np.concatenate(seen)
    assert len(np.unique(together)) > 0.99 * len(together)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_generator_of_the_library_refuses_a_capture(gpu, torch):
    generator = dp.random.Generator(3, "xorwow", device=gpu)
    out = torch.empty(4096, device="cuda")
    here = dp.from_dlpack(out)
    generator.random(out=here)
    graph = torch.cuda.CUDAGraph()
    said = []
    with torch.cuda.graph(graph), dp.Stream(torch.cuda.current_stream()):
        try:
            generator.random(out=here)
        except BadRequest as refusal:
            said.append(str(refusal))
    assert "capture" in said[0]
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", PSEUDO)
def test_a_billion_bits_pass_and_those_of_a_bad_generator_fail(name, gpu):
    """Moments and counts of 10^8 uniform numbers: p-values of a chi-square over 4,096 cells, and serial correlation."""
    stats = pytest.importorskip("scipy.stats")
    generator = dp.random.Generator(1, name, device=gpu)
    counts, total, products, count = np.zeros(4096, np.int64), 0.0, 0.0, 0
    for _ in range(10):
        bits = generator.bits(10**7).numpy()
        counts += np.bincount(bits >> 20, minlength=4096)
        u = bits * 2.0**-32 - 0.5
        total, products, count = total + u.sum(), products + u[1:] @ u[:-1], count + len(u)
    assert 1e-6 < stats.chisquare(counts).pvalue < 1 - 1e-6
    assert abs(total) < 5 * np.sqrt(count / 12)
    assert abs(products) < 5 * np.sqrt(count) / 12


@pytest.mark.parametrize("draw", ["uniform", "normal", "exponential"])
def test_a_hundred_million_numbers_have_their_distribution(draw, gpu):
    stats = pytest.importorskip("scipy.stats")
    right, low, high = {
        "uniform": (stats.uniform(), 0, 1),
        "normal": (stats.norm(), -5, 5),
        "exponential": (stats.expon(), 0, 14),
    }[draw]
    generator, counts, ends = dp.random.Generator(77, device=gpu), np.zeros(1000), np.linspace(low, high, 1001)
    for _ in range(10):
        x = getattr(generator, draw)(size=10**7).numpy()
        counts += np.histogram(x, 1000, (low, high))[0]
    expected = np.diff(right.cdf(ends)) * 10**8
    often = expected > 50
    found, wanted = np.append(counts[often], 0), np.append(expected[often], 0)
    found[-1], wanted[-1] = 10**8 - found.sum(), 10**8 - wanted.sum()
    if wanted[-1] < 1:
        found, wanted = found[:-1], wanted[:-1] * found[:-1].sum() / wanted[:-1].sum()
    assert stats.chisquare(found, wanted).pvalue > 1e-6


DRAWN = {
    "integers": lambda g: g.integers(-50, 1000, 100_000),
    "integers, many drawn anew": lambda g: g.integers(0, 3 << 30, 100_000, "u32"),
    "integers of a wide range": lambda g: g.integers(-(2**62), 3 << 60, 100_001),
    "integers of 8 bits": lambda g: g.integers(-100, 101, 100_003, "i8"),
    "poisson": lambda g: g.poisson(33.0, 100_000),
    "poisson by a large table": lambda g: g.poisson(39_000.0, 3_000_001),
    "poisson beyond tables": lambda g: g.poisson(1e6, 100_000),
    "binomial by a large table": lambda g: g.binomial(150_000, 0.5, 100_001),
    "binomial beyond tables": lambda g: g.binomial(10**9, 0.7, 100_000),
    "gamma": lambda g: g.gamma(0.7, 2, 100_000, "f64"),
    "beta": lambda g: g.beta(0.4, 3, 100_000, "f64"),
    "binomial": lambda g: g.binomial(1000, 0.37, 100_000),
    "truncated normal": lambda g: g.truncated_normal(1, 5, size=100_000, dtype="f64"),
    "permutation": lambda g: g.permutation(100_000),
    "permutation of few": lambda g: g.permutation(1000),
    "choice": lambda g: g.choice(5, 100_000, p=[0.1, 0.2, 0.3, 0.4, 0]),
    "multinomial": lambda g: g.multinomial(100, [0.2, 0.3, 0.5], 1000),
}


@pytest.mark.parametrize("name", DRAWN)
def test_what_is_drawn_on_a_gpu_is_what_numpy_draws(name, gpu):
    """But for an element or two, where a function of f64 is rounded otherwise just where a number is taken or not."""
    there, here = (DRAWN[name](dp.random.Generator(9, device=dev)).numpy() for dev in (gpu, dp.device("host")))
    assert np.isclose(there, here, rtol=1e-12).mean() > 1 - 1e-4


SINGLES = {
    "gamma": lambda g: g.gamma(2.5, 3.0, 1_000_000),
    "gamma of shape 1": lambda g: g.gamma(1.0, size=1_000_000),
    "gamma of a small shape": lambda g: g.gamma(0.3, size=1_000_000),
    "gamma of a huge shape": lambda g: g.gamma(1e12, 1e-12, 1_000_000),
    "beta": lambda g: g.beta(2.0, 3.0, 1_000_000),
    "beta of small shapes": lambda g: g.beta(0.3, 0.2, 1_000_000),
    "truncated normal": lambda g: g.truncated_normal(size=1_000_000),
    "truncated normal, half": lambda g: g.truncated_normal(0, np.inf, size=1_000_000),
    "truncated normal, narrow": lambda g: g.truncated_normal(-0.5, 1, size=1_000_000),
    "truncated normal, exponential": lambda g: g.truncated_normal(1.5, 9, size=1_000_000),
    "truncated normal, far": lambda g: g.truncated_normal(-np.inf, -30, size=1_000_000),
    "truncated normal, uniform": lambda g: g.truncated_normal(3.3, 3.5, size=1_000_000),
}


@pytest.mark.parametrize("name", SINGLES)
def test_candidates_are_taken_in_f32_as_numpy_takes_them_in_f64(name, gpu):
    """A candidate that is decided otherwise is another number altogether: of millions there is none."""
    there, here = (SINGLES[name](dp.random.Generator(19, device=dev)).numpy() for dev in (gpu, dp.device("host")))
    off = np.abs(there.astype(np.float64) - here)
    assert (off <= 1e-4 * np.abs(here) + 6e-6 * here.std()).all()
    assert np.median(off / np.abs(here)) < 2e-6


@pytest.mark.parametrize("draw", ["poisson", "binomial", "integers", "gamma", "truncated_normal"])
def test_a_captured_draw_repeats_no_numbers_and_keeps_its_table(draw, gpu, torch):
    given = {"poisson": (40.0,), "binomial": (500, 0.3), "integers": (0, 10**6), "gamma": (2.0,)}.get(draw, ())
    here = gpu.zeros((8192,), {"poisson": "u32", "binomial": "i64", "integers": "i64"}.get(draw, "f32"))
    gpu.synchronize()
    eager = getattr(dp.random.Generator(3, device=gpu), draw)(*given, size=8192).numpy()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), dp.Stream(torch.cuda.current_stream()):
        getattr(dp.random.Generator(3, device=gpu), draw)(*given, out=here)
    gpu.executor().forget()
    others = [gpu.empty((12 << 10,), "u32") for _ in range(64)]  # memory that a table may have been in
    for memory in others:
        gpu.fill_zero(memory)
    seen = []
    for _ in range(4):
        graph.replay()
        torch.cuda.synchronize()
        seen.append(here.numpy().copy())
    np.testing.assert_array_equal(seen[0], eager)
    for one in range(4):
        for other in range(one):
            assert (seen[one] == seen[other]).mean() < 0.1


def test_counts_of_a_child_and_of_calls_that_are_learnt_are_the_same(gpu):
    """Plans of other executors make tables of their own; a learnt call reads its plan's."""
    right = dp.random.Generator(11, device=gpu).poisson(12.0, 200 * 96).numpy()
    generator = dp.random.Generator(11, device=gpu)
    parts = [generator.poisson(12.0, 96) for _ in range(200)]
    np.testing.assert_array_equal(np.concatenate([part.numpy() for part in parts]), right)
    with dp.Supervisor("cuda:0", isolation="process") as sup:
        there = dp.random.Generator(11, device=sup.device)
        asked = [there.requests.poisson(12.0, 96 * 20) for _ in range(10)]
        found = [sup.submit(request).result().numpy() for request in asked]
    np.testing.assert_array_equal(np.concatenate(found), right)
