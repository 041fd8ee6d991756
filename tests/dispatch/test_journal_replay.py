"""The requests of a journal can be run again: they come back as they were, and differences are told."""

import importlib.util
import json
import threading
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest
from dispatch.keys import BF16, HOST, Compute, Dtype, ScaleMode
from dispatch.ops import FAMILIES
from dispatch.row_check import cases_of
from dispatch.supervise import journal as journal_module
from dispatch.supervise.request_json import Memory, Reader, Writer

spec = importlib.util.spec_from_file_location("journals", Path(__file__).with_name("journals.py"))
journals = importlib.util.module_from_spec(spec)
spec.loader.exec_module(journals)
PATIENCE, N, path, product, replay = journals.PATIENCE, journals.N, journals.path, journals.product, journals.replay
report = journals.report


def rebuilt(request, device):
    """A request, written down and made again on a device."""
    line = json.loads(json.dumps({"define": 1, **Writer().request(request)}, allow_nan=False))
    return Reader(Memory(device, [line], {1: 0}, 0).tensor, device).request(line)


# A callback holds a function of Python's, which cannot be written down, nor can who takes part in a collective: below.
# So do operators of sparse products, but for those of a semiring that is given by its name.
NOT_WRITTEN = ("callback_dft", "spmm_op", "spmv_op", *FAMILIES["collective"][1])
HOST_ROWS = [row for row in dp.TABLE if row.on(HOST) and cases_of(row) and row.op not in NOT_WRITTEN]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=[pytest.mark.exhaustive] if n % 4 else [])
        for n, row in enumerate(HOST_ROWS)
    ],
)
def test_cases_of_a_row_come_back_as_they_were(row, rng):
    dev = dp.device("host")
    cases = cases_of(row)[::4]
    assert cases
    for case in cases:
        request = case.check(dev, rng).request
        again = rebuilt(request, dev)
        assert type(again) is type(request)
        assert again.describe() == request.describe()
        assert again.key() == request.key()
        assert again.repeatable == request.repeatable


def test_a_request_with_a_function_of_pythons_cannot_be_made_again():
    dev = dp.device("host")
    double = dp.fft.Callback("return 2 * x;", lambda x: 2 * x)
    request = dp.CallbackDftRequest(dev.array(np.ones(4)), load=double)
    with pytest.raises(BadRequest, match="got a function; expected a number, a string, a tensor"):
        rebuilt(request, dev)


def test_memory_that_was_shared_is_shared_again():
    dev = dp.device("host")
    base = dev.zeros((4, 2 * N, N))
    c = dev.zeros((N, N))
    request = dp.MatmulRequest(base[1, :N], base[1, N:].T, c=c, out=c)
    again = rebuilt(request, dev)
    assert again.a.storage is again.b.storage
    assert again.b.ptr - again.a.ptr == request.b.ptr - request.a.ptr
    assert again.c is not again.a
    assert again.out is again.c
    assert again.b.strides == request.b.strides


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1 + 2j, np.float32(0.1), np.int64(3), 7])
def test_numbers_come_back(value):
    dev = dp.device("host")
    dtype = "c64" if isinstance(value, complex) else "f32"
    x = dev.zeros((N, N), dtype)
    request = dp.MatmulRequest(x, x, alpha=value)
    np.testing.assert_equal(rebuilt(request, dev).alpha, value)


def test_choices_come_back():
    dev = dp.device("host")
    x, scale = dev.zeros((16, 16), "f8e4m3"), dev.zeros((1,))
    scales = dp.Scales(a=scale, b=2.0, a_mode=ScaleMode.SCALAR_32F)
    choices = {"compute": Compute.COMPUTE_32F, "reduced_precision": True}
    request = dp.MatmulRequest(x, x, scales=scales, out_dtype=np.dtype(BF16.numpy), **choices)
    again = rebuilt(request, dev)
    for field in fields(request):
        if field.name not in ("a", "b", "scales", "out_dtype"):
            assert getattr(again, field.name) == getattr(request, field.name)
    assert Dtype.of(again.out_dtype) is BF16
    assert (again.scales.b, again.scales.a.shape, again.scales.a_mode) == (2.0, (1,), ScaleMode.SCALAR_32F)
    plain = rebuilt(replace(request, scales=dp.MatmulRequest(x, x).scales), dev)
    assert plain.scales is dp.MatmulRequest(x, x).scales


def test_a_journal_is_run_again_with_the_same_outcomes(path, capsys, rng):
    dev = dp.device("host")
    a, b = (dev.array(rng.standard_normal((N, N)), "f32") for _ in range(2))
    bad = dp.MatmulRequest(dev.zeros((4, 4), "f64"), dev.zeros((4, 4), "f32"))
    chain = dp.MatmulRequest(a, b, out=dev.zeros((N, N)))
    with dp.Supervisor("host", streams=2, journal=path) as sup:
        futures = [sup.submit(chain), sup.submit(dp.MatmulRequest(chain.out, b)), sup.submit(bad), sup.submit(chain)]
        futures[-1].result(PATIENCE)
        assert futures[2].exception(PATIENCE)
    code, told = report(path, capsys)
    assert (code, told["requests"], told["ran"], told["difference"]) == (0, 4, 4, None)
    assert replay(path, "--seed", "5", "--device", "host") == 0
    assert "4 requests of host; 4 run again on host\nno difference in outcome\n" in capsys.readouterr().out


def test_the_first_difference_is_reported(path, capsys):
    dev = dp.device("host")
    with dp.Supervisor("host", streams=1, journal=path) as sup:
        for future in sup.submit_many([product(dev) for _ in range(4)]):
            future.result(PATIENCE)
    text = path.read_text()
    (done,) = [line for line in text.splitlines() if '"done"' in line][-1:]
    failed = {"ended": 3, "status": "failed", "error": "OutOfMemory", "words": "none left"}
    changed = text.replace(done, json.dumps({"done": [1, 2, 4]}) + "\n" + json.dumps(failed))
    path.write_text(changed)
    code, told = report(path, capsys)
    assert code == 1
    assert (told["ran"], told["difference"]["request"]) == (3, 3)
    assert told["difference"]["journal"] == "OutOfMemory: none left"
    assert told["difference"]["now"] == f"done, by {dp.explain(product(dev)).row.name}"
    assert replay(path) == 1
    assert "first difference: request 3, matmul(" in capsys.readouterr().out


def test_another_row_is_a_difference(path, capsys):
    dev = dp.device("host")
    with dp.Supervisor("host", streams=1, journal=path) as sup:
        sup.submit(product(dev)).result(PATIENCE)
    name = dp.explain(product(dev)).row.name
    path.write_text(path.read_text().replace(json.dumps(name), json.dumps("matmul of a row that was")))
    code, told = report(path, capsys)
    assert code == 1
    assert told["difference"]["journal"] == "done, by matmul of a row that was"
    assert told["difference"]["now"] == f"done, by {name}"


def test_what_depended_on_the_moment_is_not_run_again(path, probe, capsys, monkeypatch):
    monkeypatch.setattr(probe, "__module__", "elsewhere")
    entered, release = threading.Event(), threading.Event()
    dev = dp.device("host")
    with dp.Supervisor("host", streams=1, journal=path) as sup:
        sup.submit(probe(lambda: (entered.set(), release.wait(PATIENCE))))
        assert entered.wait(PATIENCE)
        late, gone = sup.submit(product(dev), timeout=0.0), sup.submit(product(dev))
        assert gone.cancel()
        release.set()
        assert late.exception(PATIENCE)
    code, told = report(path, capsys)
    assert (told["ran"], told["skipped"], told["unreadable"], told["difference"]) == (0, 2, 1, None)
    assert code == 1  # a request that cannot be made again is not taken to be the same
    assert "a class of this package" in told["why"]
    assert replay(path) == 1
    printed = capsys.readouterr().out
    assert f"  1 could not be rebuilt: not run; reason of the first: {told['why']}\n" in printed
    assert printed.endswith("no difference in outcome of the 0 that ran; incomplete without the 1 that did not\n")


@pytest.mark.parametrize(
    "name", ["os:system", "dispatch.table.table:TABLE", "dispatch.errors:BadRequest", "dispatch.nowhere:X"]
)
def test_a_file_does_not_choose_what_is_run(path, name, capsys):
    with dp.Supervisor("host", streams=1, journal=path) as sup:
        sup.submit(product(sup.device)).result(PATIENCE)
    path.write_text(path.read_text().replace("dispatch.ops.matmul.request:MatmulRequest", name))
    code, told = report(path, capsys)
    assert (code, told["ran"], told["unreadable"]) == (1, 0, 1)


def test_memory_is_held_only_as_long_as_requests_use_it():
    dev = dp.device("host")
    writer = Writer()
    requests = [dp.MatmulRequest(dev.zeros((N, N)), dev.zeros((N, N))) for _ in range(3)]
    lines = [{"define": number, **writer.request(request)} for number, request in enumerate(requests)]
    memory = Memory(dev, lines, {0: 0, 1: 1, 2: 2}, 0)
    reader = Reader(memory.tensor, dev)
    for number, line in enumerate(lines):
        reader.request(line)
        assert len(memory._storages) == 2
        memory.forget(number)
    assert memory._storages == {}


def test_the_data_are_the_seeds():
    dev = dp.device("host")
    line = {"define": 1, **Writer().request(product(dev))}
    one, same, other = (Memory(dev, [line], {1: 0}, seed).tensor(line["fields"]["a"]).numpy() for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_many_notes_do_not_wait_for_the_writer(path, monkeypatch):
    monkeypatch.setattr(journal_module, "WRITE_PERIOD", PATIENCE)
    with dp.Supervisor("host", streams=1, journal=path) as sup:
        request = product(sup.device)
        sup.submit_many([request] * (journal_module.WAKE_AT + 1))
        while path.read_bytes().count(b'"request"') < journal_module.WAKE_AT:
            assert sup._journal._thread.is_alive()
