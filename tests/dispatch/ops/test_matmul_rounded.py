"""Which algorithm a small product gets: the heuristic's for rounded extents, where the library takes it for these.

No GPU is needed: the heuristic and the check of an algorithm are stood in for, descriptors are the library's own.
"""

from __future__ import annotations

import ctypes
import gc
import random

import pytest

import dispatch as dp
from cudabind.sys import cublasLt as lt
from dispatch.device.host import HostDevice
from dispatch.errors import Refused
from dispatch.keys import Compute, Epilogue
from dispatch.libraries.cublaslt import rounded_problem
from dispatch.libraries.cublaslt.problem import Matrix
from dispatch.ops.matmul import cublaslt
from dispatch.ops.matmul.cublaslt import CublasLtPlan
from dispatch.ops.matmul.lower import lower
from dispatch.ops.matmul.vectors import vectors_of

LIMIT = 1 << 25
SHAPE = (24, 200, 72)  # m, n, k
LIKE_IT = [(24, 200, 72), (32, 256, 128), (17, 136, 72), (31, 248, 104)]  # and as aligned


class Executor:
    """What a plan needs of one to be made."""

    target = ctypes.c_void_p()
    workspace = type("W", (), {"nbytes": LIMIT, "c_ptr": None})

    def __init__(self):
        self.handles, self.device = {"cublasLt": lt.cublasLtHandle_t()}, HostDevice(1)


class Library:
    """Stands for cublasLtMatmulAlgoGetHeuristic and …AlgoCheck: an algorithm for each problem, known by a number."""

    def __init__(self, monkeypatch):
        self.asked, self.checked, self.numbers = [], [], {}
        self.refuses, self.workspace, self.takes = set(), 0, True
        monkeypatch.setattr(cublaslt, "heuristic", self.heuristic)
        monkeypatch.setattr(lt, "cublasLtMatmulAlgoCheck", type("Function", (), {"unchecked": self.check}))

    def heuristic(self, _handle, _descriptors, problem, _limit, count=1):
        self.asked.append(problem)
        if extents(problem) in self.refuses:
            raise Refused("cublasLtMatmulAlgoGetHeuristic finds no algorithm")
        return [self.algorithm(problem, turn) for turn in range(count)]

    def algorithm(self, problem, turn=0):
        result = lt.cublasLtMatmulHeuristicResult_t()
        result.algo.data[0] = self.numbers.setdefault((problem, turn), len(self.numbers) + 1)
        return result

    def check(self, _handle, _matmul, _a, _b, _c, _d, algo, result):
        self.checked.append(algo.data[0])
        result.workspaceSize = self.workspace
        return 0 if self.takes else 15  # CUBLAS_STATUS_NOT_SUPPORTED


@pytest.fixture
def library(monkeypatch):
    return Library(monkeypatch)


def extents(problem):
    """m, n and k in cuBLASLt's sense."""
    return problem.d.rows, problem.d.cols, problem.a.rows if problem.op_a else problem.a.cols


def plan(executor, shape, dtype="bf16", limit=LIMIT, **choices):
    m, n, k = shape
    dev = executor.device
    request = dp.MatmulRequest(dev.zeros((m, k), dtype), dev.zeros((k, n), dtype), **choices)
    row = next(row for row in dp.TABLE.of("matmul") if row.dtypes == request.signature().dtypes[:4])
    lowered = lower(request, row.compute or Compute.COMPUTE_32F)
    return CublasLtPlan(executor, row, lowered, vectors_of(request, lowered), dp.Dtype.of("f32"), limit)


def taken(made):
    return made._calls[0].args[cublaslt.ALGO]._obj.data[0]


def test_shapes_that_round_to_one_get_its_algorithm_and_ask_once(library):
    executor = Executor()
    algorithms = {taken(plan(executor, shape)) for shape in LIKE_IT}
    assert [sorted(extents(problem)) for problem in library.asked] == [[32, 128, 256]]
    assert algorithms == {library.numbers[library.asked[0], 0]}
    assert len(library.checked) == len(LIKE_IT)


@pytest.mark.usefixtures("library")
def test_the_choice_follows_from_the_shape_and_not_from_what_came_before():
    rng = random.Random(1)
    shapes = [tuple(rng.randrange(2, 1200) for _ in range(3)) for _ in range(150)]
    first, second = Executor(), Executor()
    one = {shape: taken(plan(first, shape)) for shape in shapes}
    other = {shape: taken(plan(second, shape)) for shape in reversed(shapes)}
    alone = {shape: taken(plan(Executor(), shape)) for shape in shapes[:20]}
    assert one == other
    assert alone == {shape: one[shape] for shape in alone}


@pytest.mark.parametrize("trouble", ["not taken", "too much workspace", "none for the rounded one"])
def test_what_the_library_does_not_take_here_is_not_taken(library, trouble):
    library.takes = trouble != "not taken"
    library.workspace = LIMIT + 1 if trouble == "too much workspace" else 0
    library.refuses = {(256, 32, 128)} if trouble == "none for the rounded one" else set()
    executor = Executor()
    made = plan(executor, SHAPE)
    assert extents(library.asked[-1]) == (200, 24, 72)
    assert taken(made) == library.numbers[made.lowered.problem, 0]
    assert len(library.checked) == (0 if trouble == "none for the rounded one" else 1)
    plan(executor, SHAPE)
    assert len(library.asked) == 3, "the answer for rounded extents is kept, also where it is none"


def test_the_workspace_is_that_of_these_extents(library):
    library.workspace = 4096
    assert plan(Executor(), SHAPE)._calls[0].args[-2].value == 4096


def test_less_workspace_is_asked_for_anew(library):
    executor = Executor()
    for limit in (LIMIT, 0, LIMIT, 0):
        plan(executor, SHAPE, limit=limit)
    assert len(library.asked) == 2


@pytest.mark.parametrize(
    ("shape", "dtype", "choices"),
    [
        ((24, 200, 72), "f32", {}),
        ((24, 200, 72), "f64", {}),
        ((1, 200, 72), "bf16", {}),
        ((24, 1, 72), "bf16", {}),
        ((24, 200, 1), "f16", {}),
        ((1000, 1000, 1000), "bf16", {}),
        ((24, 200, 72), "bf16", {"epilogue": Epilogue.GELU_AUX}),
    ],
    ids=str,
)
def test_others_are_asked_for_as_they_are(library, shape, dtype, choices):
    m, n, k = shape
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CublasLtPlan, "_fuses", lambda *_: True)
        plan(Executor(), shape, dtype, **choices)
    assert [extents(problem) for problem in library.asked] == [(n, m, k)]
    assert not library.checked


def test_where_it_would_round_too_early_those_for_these_extents_are_looked_at(library, monkeypatch):
    looks = []
    monkeypatch.setattr(CublasLtPlan, "_fuses", lambda _, result: looks.append(result.algo.data[0]) or len(looks) == 3)
    executor = Executor()
    bias = executor.device.zeros((200,), "bf16")
    made = plan(executor, SHAPE, bias=bias, epilogue=Epilogue.GELU_BIAS)
    numbers, problem = library.numbers, made.lowered.problem
    assert looks == [numbers[library.asked[0], 0], numbers[problem, 0], numbers[problem, 1]]
    assert taken(made) == numbers[problem, 1]


def problems(count, seed):
    """Problems of any extents, orders and leading dimensions."""
    rng = random.Random(seed)
    dtypes = [dp.Dtype.of(name).cuda for name in ("bf16", "f16")]
    base = plan_problem(Executor(), (4, 4, 4))
    for _ in range(count):
        m, n, k = (rng.choice((rng.randrange(2, 700), rng.randrange(2, 70), rng.randrange(2, 5000))) for _ in range(3))
        dtype, other = rng.choice(dtypes), rng.choice(dtypes)
        op_a, op_b = rng.random() < 0.5, rng.random() < 0.5

        def matrix(rows, cols, dtype, rng=rng):
            ld = rows + rng.choice((0, 0, rng.randrange(64)))
            return Matrix(dtype, rows, cols, ld, 0, rng.choice((2, 16, 256)))

        a, b = matrix(*((k, m) if op_a else (m, k)), dtype), matrix(*((n, k) if op_b else (k, n)), dtype)
        c, d = matrix(m, n, other), matrix(m, n, other)
        yield base._replace(a=a, b=b, c=rng.choice((c, d)), d=d, op_a=op_a, op_b=op_b)


def test_a_rounded_problem_is_the_same_for_all_that_round_to_it_and_as_aligned():
    seen, shapes = {}, set()
    for problem in problems(20_000, seed=2):
        key = rounded_problem._key(problem)
        m, n, k = extents(problem)
        assert (key is None) == (m * n * k > rounded_problem.MAX_WORK)
        if key is None:
            continue
        like = rounded_problem.rounded(problem)
        assert seen.setdefault(key, like) == like
        shapes.add((m, n, k))
        for small, large in zip(problem[:4], like[:4], strict=True):
            assert small.rows <= large.rows <= large.ld
            assert small.cols <= large.cols <= max(2 * small.cols, rounded_problem.UNROUNDED)
            assert min(small.ld & -small.ld, 8) == min(large.ld & -large.ld, 8)
            assert large[4:] == small[4:]
        up = extents(like)
        assert (like.b.cols if like.op_b else like.b.rows) == up[2]
        assert all(one == other for one, other in zip((m, n, k), up, strict=True) if one <= rounded_problem.UNROUNDED)
        assert like[4:] == problem[4:]
    assert len(shapes) > 10_000


def test_few_answers_serve_all_small_shapes():
    """Multiples of 8 up to 256 as bench_streams draws them: 32^3 shapes."""
    executor, steps = Executor(), range(8, 257, 8)
    keys = set()
    for m in steps:
        for n in steps:
            made = plan_problem(executor, (m, n, 8 * (1 + (m + n) % 32)))
            keys.add(rounded_problem._key(made))
    assert len(keys) <= 6**3, "powers of two"


def plan_problem(executor, shape):
    m, n, k = shape
    dev = executor.device
    request = dp.MatmulRequest(dev.zeros((m, k), "bf16"), dev.zeros((k, n), "bf16"))
    return lower(request, Compute.COMPUTE_32F).problem


def test_answers_are_bounded(library, monkeypatch):
    monkeypatch.setattr(rounded_problem, "MAX_ANSWERS", 3)
    executor = Executor()
    for rows in (20, 40, 80, 160, 320, 20):
        plan(executor, (rows, 64, 64))
        assert len(executor.handles[rounded_problem.CACHE_NAME]) <= 3
    assert len(library.asked) == 6, "the oldest went, and was asked for again"


@pytest.mark.usefixtures("library")
def test_plans_of_one_pattern_share_the_operation_and_destroy_it_once(monkeypatch):
    destroyed = []
    destroy = lt.cublasLtMatmulDescDestroy.unchecked
    monkeypatch.setattr(
        lt,
        "cublasLtMatmulDescDestroy",
        type("Function", (), {"unchecked": staticmethod(lambda one: destroyed.append(one.value) or destroy(one))}),
    )
    executor = Executor()
    first = plan(executor, SHAPE)
    others = [first.resized(plan_problem(executor, shape)) for shape in LIKE_IT]
    operation = first._descriptors.matmul.value
    assert {other._descriptors.matmul.value for other in others} == {operation}
    assert len({other._descriptors.layouts["a"].value for other in others}) == len(others)
    del first
    gc.collect()
    assert operation not in destroyed, "the others have it still"
    del others
    gc.collect()
    assert destroyed.count(operation) == 1


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("choices", [{"bias": True}, {"adds": True}], ids=["a pointer", "a mode of its own"])
def test_what_calls_set_in_the_operation_is_each_plans_own(monkeypatch, choices):
    monkeypatch.setattr(CublasLtPlan, "_fuses", lambda *_: True)
    executor = Executor()
    dev = executor.device
    fields = {"bias": dev.zeros((200,), "bf16"), "epilogue": Epilogue.BIAS} if "bias" in choices else {}
    if "adds" in choices:
        fields = {"out": dev.zeros((24, 200), "bf16"), "beta": 1.0}
    first = plan(executor, SHAPE, **fields)
    other = first.resized(first.lowered.problem)
    assert other._descriptors.matmul.value != first._descriptors.matmul.value
