"""No product is less precise than its compute type unless the request says so: what cuBLASLt is told, and what is kept.

No GPU is needed: the heuristic that is asked here only notes its preference, whose words are the library's own.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from cudabind.sys import cublasLt as lt
from dispatch.errors import Refused
from dispatch.keys import Compute, Epilogue
from dispatch.libraries.cublaslt import descriptors, kernel_recording
from dispatch.ops.matmul import aux_shape, cublaslt, exact, exact_kernels
from dispatch.ops.matmul.lower import lower

spec = importlib.util.spec_from_file_location("kernel_names", Path(__file__).with_name("kernel_names.py"))
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
FUSED, PLAIN, IN_F32, THEN_16, FROM_16 = kernels.FUSED, kernels.PLAIN, kernels.IN_F32, kernels.THEN_16, kernels.FROM_16
BEHIND, Library, ExecutorOf, bound = kernels.BEHIND, kernels.Library, kernels.ExecutorOf, kernels.bound
taken = kernels.taken

PREF = lt.cublasLtMatmulPreferenceAttributes_t
ALL = lt.cublasLtReductionScheme_t.CUBLASLT_REDUCTION_SCHEME_MASK
IN_COMPUTE_TYPE = lt.cublasLtReductionScheme_t.CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE


def problem_of(dtype="bf16", out=None, **choices):
    dev = dp.device("host")
    a, b = dev.array(np.ones((32, 64)), dtype), dev.array(np.ones((48, 64)), dtype).T
    return lower(dp.MatmulRequest(a, b, out_dtype=out, **choices), Compute.COMPUTE_32F).problem


class Noting:
    """Stands for `cublasLtMatmulAlgoGetHeuristic`: notes the mask of reduction schemes, and finds nothing."""

    def __init__(self):
        self.masks = []

    def __call__(self, _handle, _operation, _a, _b, _c, _d, preference, _count, _results, _found):
        mask, size = ctypes.c_uint32(), ctypes.c_size_t()
        lt.cublasLtMatmulPreferenceGetAttribute(
            preference, PREF.CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, ctypes.byref(mask), 4, ctypes.byref(size)
        )
        self.masks.append(mask.value)


@pytest.fixture
def heuristic(monkeypatch):
    noting = Noting()
    monkeypatch.setattr(lt, "cublasLtMatmulAlgoGetHeuristic", noting)
    return noting


# fmt: off
SCHEMES = [
    # operands  D         choices                       may be added up
    ("bf16",    None,     {},                           IN_COMPUTE_TYPE),
    ("f16",     None,     {},                           IN_COMPUTE_TYPE),
    ("f8e4m3",  None,     {},                           IN_COMPUTE_TYPE),
    ("f8e4m3",  "f8e4m3", {},                           IN_COMPUTE_TYPE),
    ("f8e4m3",  "f16",    {"fast_accum": True},         IN_COMPUTE_TYPE),
    ("bf16",    None,     {"autotune": True},           IN_COMPUTE_TYPE),
    ("bf16",    None,     {"workspace": 0},             IN_COMPUTE_TYPE),
    ("bf16",    None,     {"reduced_precision": True},  ALL),
    ("f8e4m3",  None,     {"reduced_precision": True},  ALL),
    ("bf16",    "f32",    {},                           ALL),  # D is as precise as the sums: nothing is lost in it
    ("f32",     None,     {},                           ALL),
]
# fmt: on


@pytest.mark.parametrize(("dtype", "out", "choices", "allowed"), SCHEMES, ids=str)
def test_partial_sums_are_added_in_the_compute_type_unless_the_request_allows_less(
    heuristic, dtype, out, choices, allowed
):
    problem = problem_of(dtype, out, **choices)
    with pytest.raises(Refused, match="finds no algorithm"):
        descriptors.heuristic(None, descriptors.Descriptors(problem), problem, 1 << 25)
    assert heuristic.masks == [allowed]


@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.GELU_AUX], ids=lambda e: e.name)
def test_what_was_tuned_with_less_precision_is_another_problem(epilogue):
    """The cache on disk goes by another text, and so do entries from before there was a choice."""
    exact, reduced = (problem_of(epilogue=epilogue, reduced_precision=choice) for choice in (False, True))
    assert exact._replace(reduced_precision=True) == reduced
    assert exact.as_key() != reduced.as_key()
    assert "reduced_precision=False" in exact.as_key()


# fmt: off
LAUNCHED = [
    ((FUSED,),                True),
    (("",),                   True),   # one kernel needs no name
    ((PLAIN, IN_F32[0]),      True),
    ((IN_F32[1], PLAIN),      True),
    ((PLAIN, THEN_16[0]),     False),
    ((PLAIN, THEN_16[1]),     False),
    ((PLAIN, FROM_16),        False),
    ((FUSED, BEHIND),         False),
    ((PLAIN, IN_F32[0], BEHIND), False),
    (("", ""),                False),  # what has no name is not known to keep f32
    ((FUSED, FUSED),          False),
    ((),                      False),
    (None,                    False),
]
# fmt: on


@pytest.mark.parametrize(("names", "right"), LAUNCHED)
def test_an_epilogue_is_in_time_in_one_kernel_or_where_split_sums_meet_in_f32(names, right):
    assert kernel_recording.fuses(names) is right


@pytest.mark.parametrize("epilogue", Epilogue, ids=lambda e: e.name)
@pytest.mark.parametrize(
    ("dtype", "out", "reduced"), [("bf16", None, False), ("bf16", None, True), ("bf16", "f32", False)]
)
def test_only_where_rounding_first_would_show_is_there_something_to_look_at(epilogue, dtype, out, reduced):
    dev = dp.device("host")
    a, b = dev.zeros((16, 32), dtype).mT, dev.zeros((16, 48), dtype)
    given = {"bias": dev.zeros((48,), out or dtype)} if epilogue.adds_bias else {}
    if epilogue.is_gradient:
        own, strides = aux_shape(epilogue, (32, 48))
        given["aux"] = dev.zeros((32, strides[0]), "u8" if epilogue.activation == "relu" else out or dtype)[:, : own[1]]
    request = dp.MatmulRequest(a, b, epilogue=epilogue, out_dtype=out, reduced_precision=reduced, **given)
    problem = lower(request, Compute.COMPUTE_32F).problem
    bent = epilogue.adds_bias or epilogue.activation == "gelu"
    assert kernel_recording.must_fuse(problem) == (bent and out is None and not reduced)


def test_the_first_algorithm_that_is_precise_is_taken(monkeypatch):
    library = Library(monkeypatch, (FUSED,))
    assert taken(bound()) == 0
    assert (library.asked, library.looks) == ([1], [0])
    library = Library(monkeypatch, (PLAIN, THEN_16[0]), (FUSED, BEHIND), (PLAIN, IN_F32[0]), (FUSED,))
    assert taken(bound()) == 2
    assert (library.asked, library.looks) == ([1, cublaslt.FUSED_CANDIDATES], [0, 1, 2])


def test_what_is_fastest_with_much_workspace_is_not_taken_with_less(monkeypatch):
    """The outcome on disk of a request without a limit does not tell one of `workspace=…` what to take, nor back."""
    raced, known = [], {}

    def heuristic(_handle, _descriptors, _problem, workspace, count=1):
        return [lt.cublasLtMatmulHeuristicResult_t(workspaceSize=workspace) for _ in range(count)]

    def fastest(_executor, _request, _run, count):
        raced.append(count)
        return 0

    monkeypatch.setattr(cublaslt, "heuristic", heuristic)
    monkeypatch.setattr(cublaslt, "fastest", fastest)
    monkeypatch.setattr(lt, "cublasLtMatmulAlgoCheck", SimpleNamespace(unchecked=lambda *_: 0))
    algorithms = SimpleNamespace(
        get=lambda _, name: known.get(name), put=lambda _, name, one: known.update({name: one})
    )
    monkeypatch.setattr(ExecutorOf, "algorithms", lambda *_: algorithms)
    tuned = {"epilogue": Epilogue.NONE, "bias": None, "autotune": True}
    for limit, most in ((None, 1 << 25), (1 << 20, 1 << 20), (0, 0), (1 << 30, 1 << 25), (1 << 20, 1 << 20)):
        assert taken(bound(**tuned, workspace=limit)) == most
    assert len(raced) == 3, "no limit, 1 MiB and 0 each have an outcome of their own"
    (plenty,) = (name for name in known if "bytes" not in name)
    known.update(dict.fromkeys(known, known[plenty]))
    assert taken(bound(**tuned, workspace=0)) == 0, "more than the request allows is not believed"


def test_where_nothing_needs_a_look_none_is_taken(monkeypatch):
    library = Library(monkeypatch, (FUSED, BEHIND))
    assert taken(bound(reduced_precision=True)) == 0
    assert taken(bound(epilogue=Epilogue.RELU, bias=None)) == 0
    assert (library.asked, library.looks) == ([1, 1], [])


def test_where_no_algorithm_is_precise_this_librarys_kernels_do_it(monkeypatch):
    Library(monkeypatch, *[(FUSED, BEHIND)] * 12)
    monkeypatch.setattr(exact, "functions", lambda *_: dict.fromkeys(exact_kernels.NAMES, 1))
    monkeypatch.setattr(exact_kernels, "_launch_function", lambda: lambda *_: 0)
    assert isinstance(bound(), exact.ExactPlan)


def test_where_there_are_no_kernels_either_the_refusal_says_how_to_go_on(monkeypatch):
    def refuse(*_):
        raise Refused("NVRTC compiles no kernel")

    Library(monkeypatch, *[(FUSED, BEHIND)] * 12)
    monkeypatch.setattr(exact, "functions", refuse)
    with pytest.raises(Refused, match="NVRTC compiles no kernel; reduced_precision=True"):
        bound()
