"""What rows say of NaN and infinities, and that the host's do as they say: every row by its own cases."""

import contextlib
import dataclasses
import enum
import importlib
import zlib

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRow, NoRow
from dispatch.keys import E8M0, F4E2M1, HOST
from dispatch.nonfinite import NONE, STATEMENTS, stated

ROWS = list(dp.TABLE)


def test_every_row_says_what_becomes_of_nan_and_infinities():
    assert [row.name for row in ROWS if not row.nonfinite] == []
    assert set(STATEMENTS) == set(dp.TABLE.ops)
    for row in ROWS:
        assert (row.nonfinite == NONE) == (row.dtypes[-1].numpy.kind in "iu"), row.name


def test_the_host_says_what_the_gpu_says():
    said = {}
    for row in ROWS:
        said.setdefault((row.op, row.dtypes, row.compute, row.variant), set()).add((row.arch == HOST, row.nonfinite))
    for key, statements in said.items():
        assert {text for host, text in statements if host} == {text for host, text in statements if not host}, key


def test_an_op_without_a_statement_is_no_row_of_this_library():
    like = {name: getattr(ROWS[0], name) for name in ("dtypes", "extra", "compute", "epilogues", "scales", "call")}
    like |= {
        "op": "hadamard",
        "rules": (),
        "arch": HOST,
        "until": HOST,
        "since": (),
        "library": "numpy",
        "function": "f",
    }
    with pytest.raises(BadRow, match="does not say what it does with NaN and infinities"):
        stated([dp.Row(**like)])
    (own,) = stated([dp.Row(**like, nonfinite="all are 0")])
    assert own.nonfinite == "all are 0"


# -- rows by their cases, which tests/gpu/test_nonfinite.py runs on a GPU -------------------------------------------
USED = 9  # cases of each row, one of each mode, epilogue, …
# Of ops with many rows, or whose kernels take long to compile.
FEW = {"matmul": 1, "cutlass_gemm": 1, "sdpa_fwd": 1, "sdpa_bwd": 1, "conv_fwd": 3, "norm_fwd": 2, "norm_bwd": 1}
LARGEST = 150_000  # elements that the operands of a case may have together
VALUES = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
# Operands that say by their sign or order alone what becomes of another one: NaN there is a choice like any other.
CHOOSING = {"activation_bwd": ("x", "y"), "pooling_bwd": ("x", "y")}
WITHOUT_CASES = {"dropout_states", "cudnn_graph"}  # one has no operands, the other is what users draw
FROM_RESERVE = {"rnn_bwd_weights"}  # on the host all that it needs has been kept by the passes before


def cases_of(row):
    room = importlib.import_module(row.call.__module__)
    if not hasattr(room, "cases") and row.op not in WITHOUT_CASES:
        room = importlib.import_module(f"{row.call.__module__}.trials")
    found = getattr(room, "cases", lambda _: [])(row)
    if row.op in ("matmul", "cutlass_gemm"):  # another epilogue for each row
        start = zlib.crc32(row.name.encode()) % len(found)
        found = found[start:] + found[:start]
    if row.op.startswith("sdpa"):  # to make a large one only to see that it is takes long
        found.sort(key=lambda case: case.form.b * case.form.h * (case.form.sq + case.form.skv) * case.form.d)
    return found


def makers(row, device):
    """For some small cases of a row what makes their request afresh, with the same numbers each time."""
    found = {}
    for case in cases_of(row):

        def make(case=case, device=device):
            rng = np.random.default_rng(7)
            return case.request(device, rng) if hasattr(case, "request") else case.trial(device, rng).request

        request = make()
        sizes = [tensor.size for _, tensor in operands(request)]
        if sizes and min(sizes) > 0 and max(sizes) > 8 and sum(sizes) <= LARGEST:
            with contextlib.suppress(NoRow):  # what its rules refuse
                if kind_of(request) not in found:
                    dp.run(request)
                    found[kind_of(request)] = make
        if len(found) == FEW.get(row.op, USED):
            break
    return list(found.values())


def kind_of(request):
    """The modes, algorithms and epilogues that a request has chosen."""
    chosen = (getattr(request, field.name) for field in dataclasses.fields(request))
    return tuple(value for value in chosen if isinstance(value, enum.Enum))


def parts(result):
    """What a run gave, as floating point arrays: real and imaginary parts apart, and no masks, places or reserves."""
    for tensor in result if isinstance(result, tuple) else (result,):
        array = tensor.numpy()
        if array.dtype.kind == "c":
            yield from (array.real, array.imag)
        elif array.dtype.kind not in "iub":
            yield array.astype(np.float64)


def operands(request):
    """The floating point tensors that a request only reads, by name."""
    for name, tensor, written in request.tensors():
        if not written and tensor.dtype.numpy.kind not in "iub" and tensor.dtype not in (E8M0, F4E2M1):
            yield name, tensor


def put(request, name, change):
    """Change one element of an operand: a third of the way through, so that no axis is at an end."""
    tensor = dict(operands(request))[name]
    array = tensor.numpy()
    flat = array.reshape(-1)
    flat[flat.size // 3] = change(flat[flat.size // 3])
    tensor.copy_from(array)
    return request


def effects(make, values):
    """For each operand what the results are as it is, with one element moved by 1, and with other values there."""
    clean = list(parts(dp.run(make())))
    for name, _ in operands(make()):
        changes = {"moved": lambda x: x + type(x)(1)}
        changes |= {label: lambda x, value=value: type(x)(value) for label, value in values.items()}
        yield name, clean, {n: list(parts(dp.run(put(make(), name, change)))) for n, change in changes.items()}


def check_nan_stays(row, name, clean, found):
    """Whatever changes where an element is moved is NaN where that element is; returns how many results changed."""
    if name in CHOOSING.get(row.op, ()):
        return 0
    read = 0
    for before, moved, got in zip(clean, found["moved"], found["nan"], strict=True):
        changed = (moved != before) & np.isfinite(moved) & np.isfinite(before)
        lost = changed & ~np.isnan(got)
        assert not lost.any(), f"{row.name}: {lost.sum()} of {lost.size} results that read {name} hide its NaN"
        read += int(changed.sum())
    return read


HOST_ROWS = [row for row in ROWS if row.arch == HOST and row.op not in WITHOUT_CASES]


@pytest.mark.parametrize("op", sorted({row.op for row in HOST_ROWS}))
def test_no_row_of_the_host_hides_nan(op):
    dev, unread = dp.device("host"), []
    for row in HOST_ROWS:
        if row.op == op and row.nonfinite != NONE:
            tried = (effect for make in makers(row, dev) for effect in effects(make, {"nan": np.nan}))
            read = sum(check_nan_stays(row, *effect) for effect in tried)
            whole = row.dtypes[0].numpy.kind in "iu" or row.dtypes[0] is F4E2M1
            unread += [row.name] if not read and not whole else []
    assert not unread or op in FROM_RESERVE
