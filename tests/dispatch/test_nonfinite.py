"""What rows say of NaN and infinities, and that the host's do as they say: every row by its own cases."""

import contextlib
import dataclasses
import enum
import re
import zlib
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

import dispatch as dp
from dispatch import row_check
from dispatch.core.nonfinite import NONE, STATEMENTS, stated
from dispatch.errors import BadRow, NoRow
from dispatch.keys import E8M0, F4E2M1, F32, HOST
from dispatch.ops.reduction.request import ReduceOp
from dispatch.ops.rnn.weights import named_views, pack, places

ROWS = list(dp.TABLE)


def test_every_row_says_what_becomes_of_nan_and_infinities():
    assert [row.name for row in ROWS if not row.nonfinite] == []
    assert set(STATEMENTS) <= set(dp.TABLE.ops)
    for row in ROWS:
        assert (row.nonfinite == NONE) == (row.dtypes[-1].numpy.kind in "iub"), row.name


def test_the_host_says_what_the_gpu_says():
    said = {}
    for row in ROWS:
        said.setdefault((row.op, row.dtypes, row.compute, row.variant), set()).add(
            (row.min_arch == HOST, row.nonfinite)
        )
    for key, statements in said.items():
        assert {text for host, text in statements if host} == {text for host, text in statements if not host}, key


def test_an_op_without_a_statement_is_no_row_of_this_library():
    like = {name: getattr(ROWS[0], name) for name in ("dtypes", "compute", "fusion", "call")}
    like |= {
        "op": "hadamard",
        "rules": (),
        "min_arch": HOST,
        "max_arch": HOST,
        "min_version": (),
        "library": "numpy",
        "function": "f",
    }
    with pytest.raises(BadRow, match="does not say what it does with NaN and infinities"):
        stated([dp.Row(**like)])
    (own,) = stated([dp.Row(**like, nonfinite="all are 0")])
    assert own.nonfinite == "all are 0"


# -- rows by their cases, which tests/gpu/test_nonfinite.py runs on a GPU -------------------------------------------
USED = 9  # cases of each row, one of each mode, epilogue, …
# Of ops with many rows, or whose kernels take long to compile; all of those whose cases differ by their network.
FEW = {"matmul": 1, "sdpa_fwd": 1, "sdpa_bwd": 1, "conv_fwd": 3, "norm_fwd": 2, "norm_bwd": 1}
FEW |= dict.fromkeys(("rnn", "rnn_bwd_data", "rnn_bwd_weights"), 18)
LARGEST = 150_000  # elements that the operands of a case may have together
VALUES = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
# Operands that say by their sign or order alone what becomes of another one: NaN there is a choice like any other.
CHOOSING = {"activation_bwd": ("x", "y"), "pooling_bwd": ("x", "y")}
# Some have no operands, one is what users draw.
WITHOUT_CASES = {"dropout_states", "cudnn_graph", "send", "recv", "barrier"} | {
    op for op in dp.TABLE.ops if op.startswith("random_")
}
WITHOUT_CASES |= {"prune_to_csr"}  # NaN is left out there, and so its cases have another number of elements
CLEAN = 3  # runs, by which is known what comes out otherwise each time
CHANCE = 8  # times that much is no chance
# Whose sums cuSPARSE adds up in an order of their own each time, which CLEAN runs on a GPU do not always show; of
# iterations these are the solves with factors.
UNORDERED = {"spsv", "spsm", "spmm", "spmm_batched", "sparse_mv", "reduce"}
FACTORED = {"cg", "bicgstab", "gmres"}
# The kinds of cases, by all that they say of themselves but dtypes: to make a request only for its kind takes longest.
KINDS = {}
DTYPE_NAME = re.compile(r"\b[a-z]+\d+(e\d+m\d+\w*)?\b")


def sorted_cases(row):
    found = row_check.cases_of(row)
    assert found or row.op in WITHOUT_CASES
    if row.op == "matmul":  # another epilogue for each row
        start = zlib.crc32(row.name.encode()) % len(found)
        found = found[start:] + found[:start]
    if row.op.startswith("sdpa"):  # to make a large one only to see that it is takes long
        found.sort(key=lambda case: case.form.b * case.form.h * (case.form.sq + case.form.skv) * case.form.d)
    return found


def makers(row, device):
    """For some small cases of a row what makes their request afresh, with the same numbers each time."""
    found = {}
    for case in sorted_cases(row):
        words = row.op, DTYPE_NAME.sub("", repr(case))
        if KINDS.get(words) in found:
            continue

        def make(case=case, device=device):
            rng = np.random.default_rng(7)
            return case.request(device, rng) if hasattr(case, "request") else case.check(device, rng).request

        request = make()
        KINDS[words] = kind_of(request)
        sizes = [tensor.size for _, tensor in operands(request)]
        least = 0 if hasattr(request, "network") or request.op in ("rotg", "rotmg") else 8
        if sizes and min(sizes) > 0 and max(sizes) > least and sum(sizes) <= LARGEST:
            with contextlib.suppress(NoRow):  # what its rules refuse
                if kind_of(request) not in found:
                    dp.run(request)
                    found[kind_of(request)] = make
        if len(found) == FEW.get(row.op, USED):
            break
    return list(found.values())


def kind_of(request):
    """The modes, algorithms and epilogues that a request has chosen; its network, and what it goes without."""
    chosen = (getattr(request, field.name) for field in dataclasses.fields(request))
    kind = tuple(value for value in chosen if isinstance(value, enum.Enum))
    if hasattr(request, "network"):
        kind += (request.network, request.lengths is None, request.hx is None)
    return kind


def parts(request, result):
    """What a run gave, as floating point arrays: real and imaginary parts apart, and no masks, places or reserves.

    The gradient of a weight space has its parts where the host has them.
    """
    for tensor in result if isinstance(result, tuple) else (result,):
        array = tensor.numpy()
        if request.op == "rnn_bwd_weights":
            array = spaces(request, array, tensor)
        if array.dtype.kind == "c":
            yield from (array.real, array.imag)
        elif array.dtype.kind not in "iub":
            yield array.astype(np.float64)


def spaces(request, array, tensor):
    """The numbers of a weight space of any device as the host has them."""
    network, dtype = request.network, tensor.dtype
    named = named_views(network, array, places(network, dtype, tensor.device))
    return pack(network, named, places(network, dtype, dp.device("host")), dtype.numpy)


def operands(request):
    """The floating point tensors that a request only reads, by name."""
    for name, tensor, written in request.tensors():
        if not written and tensor.dtype.numpy.kind not in "iub" and tensor.dtype not in (E8M0, F4E2M1):
            yield name, tensor


class Kept:
    """A request, and what its tensors held: to make it afresh for each element that is changed takes longer than a run.

    What a run changes is laid back before each, so that all begin from the same numbers.
    """

    def __init__(self, request):
        self.request = request
        self.held = [(tensor, tensor.numpy()) for _, tensor, written in request.tensors() if written]

    def with_changed(self, name, number, change):
        """What comes out where one element of an operand is changed."""
        tensor = dict(operands(self.request))[name]
        before, array = tensor.numpy(), tensor.numpy()
        flat = array.reshape(-1)
        flat[number] = change(flat[number])
        tensor.copy_from(array)
        found = self.results()
        tensor.copy_from(before)
        return found

    def results(self):
        """What comes out of a run."""
        found = list(parts(self.request, dp.run(self.request)))
        for tensor, array in self.held:
            tensor.copy_from(array)
        return found


def spots(request, name):
    """Where to change an operand, in words and as the number of an element.

    A third of the way through, so that no axis is at an end. Of a recurrent network an element of every matrix and
    bias; of its sequences one of the first step, of the middle, of the last, and behind the end of a shorter one. Those
    of f32 alone have all of them.
    """
    tensor = dict(operands(request))[name]
    if not hasattr(request, "network"):
        return [("", tensor.size // 3)]
    network, every = request.network, tensor.dtype is F32 and request.compute is None
    if name == "weights":
        found, where = [], places(network, tensor.dtype, tensor.device)
        for part, (start, bias) in zip(network.parts(), where, strict=True):
            label = f"of {part.name} {part.gate}"
            if every or part.gate == part.pseudo_layer % network.mode.gates:
                found.append((label, start + part.rows * part.columns // 3))
                found += [(f"{label}, bias", bias + part.rows // 3)] if part.bias else []
        return found
    if tensor.shape[:2] != request.sequence()[1].shape[:2] or name not in ("x", "y", "dy"):
        return [("", tensor.size // 3)]
    steps, _, size = tensor.shape
    lengths = request.all_lengths()
    short = int(np.argmin(lengths))
    at = {"in the middle": (lengths[0] // 2, 0, size // 2)}
    if every:
        at |= {"first": (0, 1 % len(lengths), 0), "last": (lengths[0] - 1, 0, size - 1)}
    if lengths[short] < steps:
        at["behind the end"] = (lengths[short], short, size // 3)
        at["at the end of a short one"] = (lengths[short] - 1, short, size // 3)
    return [(label, int(np.ravel_multi_index(place, tensor.shape))) for label, place in at.items()]


class Effect(NamedTuple):
    """What became of the results when an element of an operand was another.

    Attributes:
        name, spot: of the operand, and where in it.
        clean: results as they are; `chance`: of each how far its elements are from run to run, where they are.
        found: results by what was put there: "moved" by 1, "nan" and so on.
    """

    name: str
    spot: str
    clean: list
    chance: list
    found: dict


def effects(make, values):
    """For each operand what the results are as it is, with one element moved by 1, and with other values there."""
    request = make()
    kept = Kept(request)
    clean, *again = (kept.results() for _ in range(CLEAN))
    chance = [max(float(apart(one, run[number])) for run in again) for number, one in enumerate(clean)]
    if is_unordered(request):
        some = roundings(request, clean)
        chance = [max(by_chance, few) for by_chance, few in zip(chance, some, strict=True)]
    for name, spot, number in [(n, *spot) for n, _ in operands(request) for spot in spots(request, n)]:
        changes = {"moved": lambda x: x + type(x)(1)}
        changes |= {label: lambda x, value=value: type(x)(value) for label, value in values.items()}
        found = {label: kept.with_changed(name, number, change) for label, change in changes.items()}
        yield Effect(name, spot, clean, chance, found)
    for one, last, by_chance in zip(clean, kept.results(), chance, strict=True):
        same = np.array_equal(one, last, equal_nan=True) if by_chance == 0 else apart(one, last) <= CHANCE * by_chance
        assert same, f"{request.describe()}: what was changed was not laid back"


def is_unordered(request):
    """Whether a GPU adds in another order in each run: a transposed triangle, also as the second of two factors."""
    if request.device.is_host:
        return False
    return request.op in UNORDERED or (request.op in FACTORED and request.is_factored)


def roundings(request, clean):
    """What a few roundings change of each result, at most."""
    if request.op == "reduce":  # sums and means in f32, of elements that may cancel
        elements = np.abs(request.x.numpy().astype(np.float64))
        most = elements.mean() if request.reduce is ReduceOp.AVG else elements.sum()
        return [max(rounding(one, np.float32), rounding(np.array(most), np.float32)) for one in clean]
    some = [rounding(one, request.values.dtype.numpy) for one in clean]
    # A residual is a sum of numbers as large as the solution's.
    return [max(some)] * len(some) if request.op in FACTORED else some


def rounding(one, kind):
    """What a few roundings of sums in a dtype change, at most."""
    return 16 * float(ml_dtypes.finfo(kind).eps) * float(np.abs(one).max(initial=0))


def apart(one, other):
    """The most that two results differ by where both are finite."""
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(np.abs(one - other), nan=0, posinf=0).max(initial=0)


def hidden(row, effect):
    """Whatever changes where an element is moved is NaN where that element is: how many changed, and what did not.

    Sums by atomic additions are otherwise from run to run: there an element changes that moves further than that.
    """
    if effect.name in CHOOSING.get(row.op, ()):
        return 0, []
    read, complaints = 0, []
    results = zip(effect.clean, effect.chance, effect.found["moved"], effect.found["nan"], strict=True)
    for number, (before, chance, moved, got) in enumerate(results):
        with np.errstate(invalid="ignore"):
            far = np.abs(moved - before) > CHANCE * chance
        changed = (moved != before) & far & np.isfinite(moved) & np.isfinite(before)
        lost = changed & ~np.isnan(got)
        if lost.any():
            complaints.append(
                f"{row.name}: {lost.sum()} of {changed.sum()} of the {lost.size} elements of result {number} that read"
                f" {effect.name} {effect.spot} hide its NaN (from run to run they are {chance:.2g} apart)"
            )
        read += int(changed.sum())
    return read, [] if "may ignore NaN" in row.nonfinite else complaints


HOST_ROWS = [row for row in ROWS if row.min_arch == HOST and row.op not in WITHOUT_CASES]


LONG = ("dft", "rnn", "rnn_bwd_data", "rnn_bwd_weights")  # ten seconds each, of which all others together take ten


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, marks=[pytest.mark.exhaustive] if op in LONG else [])
        for op in sorted({row.op for row in HOST_ROWS})
    ],
)
def test_no_row_of_the_host_hides_nan(op):
    dev, unread = dp.device("host"), []
    for row in HOST_ROWS:
        if row.op == op and row.nonfinite != NONE:
            tried = [hidden(row, effect) for make in makers(row, dev) for effect in effects(make, {"nan": np.nan})]
            assert [complaint for _, complaints in tried for complaint in complaints] == []
            whole = row.dtypes[0].numpy.kind in "iub" or row.dtypes[0] is F4E2M1
            unread += [row.name] if not whole and not any(read for read, _ in tried) else []
    assert not unread


def test_what_is_otherwise_from_run_to_run_counts_as_read_only_where_it_moves_further():
    """As with sums by atomic additions: chance alone changes all results, and hides nothing."""
    rng = np.random.default_rng(3)
    clean = rng.standard_normal(1000)
    moved, nan = clean + 1e-7 * rng.uniform(-1, 1, 1000), clean + 1e-7 * rng.uniform(-1, 1, 1000)
    moved[:10] += 0.3
    row = next(row for row in ROWS if row.op == "conv_bwd_data")
    nan[:10] = np.nan
    found = {"moved": [moved], "nan": [nan]}
    assert hidden(row, Effect("dy", "", [clean], [2e-7], found)) == (10, [])
    nan[3] = 0.1
    read, complaints = hidden(row, Effect("dy", "", [clean], [2e-7], found))
    assert read == 10
    assert len(complaints) == 1
    assert "1 of 10 of the 1000 elements of result 0 that read dy" in complaints[0]
