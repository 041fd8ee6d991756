"""A plan of cuBLASLt: the short way of a call, which only sets addresses, does what the long one does."""

import ctypes
from types import SimpleNamespace

import pytest

from cudabind.errors import CublasLtError
from dispatch.keys import F32
from dispatch.ops.matmul.arguments import OUT
from dispatch.ops.matmul.cublaslt import CublasLtPlan
from dispatch.ops.matmul.exact import ExactPlan
from dispatch.ops.matmul.lower import NO_OFFSETS


class Library:
    """Notes what cuBLASLt would find at its pointers, and what it is told is its algorithm."""

    def __init__(self):
        self.status, self.seen = 0, []

    def call(self, name, plan):
        """A call as `_bind` makes it, with pointers of its own."""
        pointers = tuple(ctypes.c_void_p() for _ in range(4))

        def run():
            self.seen.append((name, [pointer.value for pointer in pointers], plan._alpha.value, plan._beta.value))
            return self.status

        return run, pointers


def planned(library, kind=CublasLtPlan, **different):
    """A plan without a device, of one product without a C; `different` says what of it is otherwise."""
    plan = object.__new__(kind)
    executor = SimpleNamespace(_pages=[], zeros=lambda _: 4096, stream=SimpleNamespace(done=lambda: True))
    plan._executor, plan._scale, plan._pages, plan._vectors, plan._pointers = executor, F32, None, (), ()
    plan._alpha, plan._beta, plan._numbers = ctypes.c_float(), ctypes.c_float(), ()
    plan._scalars, plan._may_accumulate, plan._numbers_hidden, plan._c_index = (
        (plan._alpha, plan._beta),
        False,
        False,
        None,
    )
    problem = SimpleNamespace(device_scalars=False)
    plan.lowered = SimpleNamespace(problem=problem, offsets=(NO_OFFSETS,), exchanged=False, empty_k=False)
    for name, value in different.items():
        setattr(plan.lowered if hasattr(plan.lowered, name) else plan, name, value)
    plan._use_call(library.call("first", plan))
    return plan


CALLS = [
    (tuple(256 * (turn + place + 1) for place in range(7)) + numbers)
    for turn, numbers in enumerate(
        [(1.0, 0.0), (1.0, 0.0), (2.5, 0.0), (2.5, 0.0), (1.0, 0.0), (-0.5, 0.0), (-0.5, 0.0)]
    )
]


@pytest.mark.parametrize("exchanged", [False, True])
def test_the_short_way_gives_the_library_what_the_long_one_does(exchanged):
    seen = []
    for is_quick in (True, False):
        library = Library()
        plan = planned(library, exchanged=exchanged)
        assert plan._fast_call is not None
        for turn, arguments in enumerate(CALLS):
            if turn == 3:  # as autotune does
                plan._use_call(library.call("second", plan))
            if not is_quick:
                plan._fast_call = None
            plan.enqueue(arguments)
        seen.append(library.seen)
    assert seen[0] == seen[1]
    assert [name for name, *_ in seen[0]] == ["first"] * 3 + ["second"] * 4
    order = [1, 0] if exchanged else [0, 1]
    for (_, (a, b, c, d), alpha, _), arguments in zip(seen[0], CALLS, strict=True):
        assert [a, b, c, d] == [*(arguments[place] for place in order), None, arguments[6]]
        assert alpha == arguments[7]


@pytest.mark.parametrize(
    "different",
    [
        {"empty_k": True},
        {"_may_accumulate": True},
        {"_c_index": 2},
        {"_vectors": ("a bias",)},
        {"offsets": (NO_OFFSETS, (256,) * 7)},
        {"offsets": ((256,) * 7,)},
        {"problem": SimpleNamespace(device_scalars=True)},
    ],
    ids=lambda given: next(iter(given)),
)
def test_a_call_of_which_more_changes_than_three_addresses_has_no_short_way(different):
    assert planned(Library(), **different)._fast_call is None


@pytest.mark.parametrize("scratch", [False, True], ids=["in place", "from scratch memory"])
def test_the_kernels_of_an_epilogue_run_behind_each_call(scratch):
    """On an H200 the second and later calls gave the product alone; of 16 bits that was f32 beyond D."""
    library, ran = Library(), []
    plan = planned(library, ExactPlan)
    names = ("product", "d", "c", "aux", "bias", "sums")
    plan._work = SimpleNamespace(**{name: SimpleNamespace(at=None) for name in names}, set_beta=lambda *_: None)
    plan._scratch = SimpleNamespace(owner=plan._executor.stream, base=1 << 20) if scratch else None
    plan._launches = [lambda: ran.append((plan._work.product.at, plan._work.d.at)) or 0]
    for arguments in CALLS:
        plan.enqueue((*arguments, *(None for _ in range(8))))
    assert [d for _, (_, _, _, d), *_ in library.seen] == [1 << 20 if scratch else call[OUT] for call in CALLS]
    assert ran == [(1 << 20 if scratch else call[OUT], call[OUT]) for call in CALLS]


def test_a_plan_that_does_more_than_call_the_library_has_no_short_way():
    kinds = CublasLtPlan.__subclasses__()
    assert ExactPlan in kinds
    for kind in kinds:
        changed = vars(kind).keys() & {"_call", "enqueue"}
        assert not changed or not kind._is_single_call, f"{kind.__name__} has {changed} of its own"


def test_a_status_of_the_short_way_is_the_library_s_error():
    library = Library()
    plan = planned(library)
    plan.enqueue(CALLS[0])
    library.status = 13
    with pytest.raises(CublasLtError, match="EXECUTION_FAILED"):
        plan.enqueue(CALLS[1])
    library.status = 0
    plan.enqueue(CALLS[1])
    assert library.seen[-1] == library.seen[-2]
