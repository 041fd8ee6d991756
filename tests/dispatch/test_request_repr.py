"""What things print of themselves: tensors as NumPy's arrays do, all others in a line; nothing raises."""

import html
import re
from html.parser import HTMLParser

import numpy as np
import pytest

import dispatch as dp
from dispatch.core.request import run
from dispatch.device.stream import Stream
from dispatch.supervise.future import Future
from dispatch.supervise.waiters import FAILED


@pytest.fixture
def dev():
    return dp.device("host")


def test_a_tensor_shows_what_numpy_shows(dev, rng):
    for dtype in ("f64", "f32", "f16", "i8", "u64", "bool", "c64"):
        kind = dp.Dtype.of(dtype).numpy
        for shape in ((), (0, 3), (4,), (2, 3), (1500,), (40, 50), (3, 4, 200)):
            model = rng.integers(0, 2, shape).astype(kind) if dtype == "bool" else rng.normal(size=shape).astype(kind)
            views = [(dev.array(model), model)]
            views += [(views[0][0].T[::-1], model.T[::-1])] if shape else []
            for tensor, part in views:
                wanted = np.array2string(part, separator=", ", prefix="Tensor(")
                assert repr(tensor).startswith(f"Tensor({wanted},"), (dtype, shape)
                assert repr(tensor).endswith(f"{tensor.layout} on host)")
                assert str(tensor) == repr(tensor)


def test_narrow_floats_show_their_numbers(dev):
    for dtype in ("bf16", "f8e4m3", "f8e5m2", "f4e2m1", "e8m0"):
        tensor = dev.array([[1.0, 2.0], [4.0, 0.5]], dtype)
        assert repr(tensor) == f"Tensor([[1. , 2. ],\n        [4. , 0.5]], {dtype}[2, 2] on host)"
        assert "[2. , 0.5]" in repr(tensor.T)
    many = dev.array(np.arange(3001) % 7, "f4e2m1")
    assert repr(many) == "Tensor([0., 1., 2., ..., 2., 3., 4.], f4e2m1[3001] on host)"


def test_of_a_large_tensor_the_edges_alone_are_copied(dev, monkeypatch):
    tensor = dev.zeros((4000, 5000))
    copied, copy_out = [], type(dev).copy_out
    monkeypatch.setattr(type(dev), "copy_out", lambda self, one: copied.append(one.nbytes) or copy_out(self, one))
    assert repr(tensor).count("...") == 7
    assert sum(copied) == 6 * 6 * 4
    wide = dev.zeros(1).strided((7,) * 20, (0,) * 20)
    assert repr(wide).startswith("Tensor(… ")


def test_what_cannot_be_read_is_said_and_not_raised(dev, monkeypatch):
    tensor = dev.zeros((2, 3))
    monkeypatch.setattr(dev, "fault", dp.errors.DeviceFault("gone"))
    assert repr(tensor) == str(tensor) == "Tensor(f32[2, 3] on host; lost: its device has faulted)"
    monkeypatch.undo()
    monkeypatch.setattr(type(dev), "look", lambda *_: 1 / 0)
    assert "cannot be read: ZeroDivisionError: division by zero" in repr(tensor)
    monkeypatch.undo()
    tensor.storage.writer.external = True
    monkeypatch.setattr(Stream, "is_capturing", lambda _: True)
    monkeypatch.setattr(type(dev), "copy_out", lambda *_: pytest.fail("it copied"))
    assert repr(tensor) == "Tensor(f32[2, 3] on host; its elements cannot be read: a stream is under capture)"
    monkeypatch.undo()
    tensor.storage.writer.external = False
    dev.close()
    assert repr(tensor) == "Tensor(f32[2, 3] on host; stale: its device was closed, and its memory was freed)"
    assert "stale" in tensor._repr_html_()


def test_a_request_shows_the_fields_that_are_not_the_default(dev):
    a = dev.zeros((4, 6))
    request = dp.MatmulRequest(a, a.T, epilogue=dp.Epilogue.RELU)
    b = "f32[6, 4] element strides (1, 6) on host"
    assert repr(request) == f"MatmulRequest(a=f32[4, 6] on host, b={b}, epilogue=RELU)"
    assert (
        repr(dp.MatmulRequest(a, a.T, alpha=2.0, beta=0.0)) == f"MatmulRequest(a=f32[4, 6] on host, b={b}, alpha=2.0)"
    )
    assert repr(dp.SoftmaxRequest(a)) == "SoftmaxRequest(x=f32[4, 6] on host)"
    square, x = dev.zeros((4, 4)), dev.zeros(4)
    assert repr(dp.GemvRequest(square, x, y=x, beta=1.5)).startswith("GemvRequest(y=f32[4] on host, beta=1.5, a=")
    assert "beta" not in repr(dp.GemvRequest(square, x, y=x)) + repr(dp.GemvRequest(square, x))
    assert repr(dp.GeamRequest(square, square, beta=2.0)).endswith(", beta=2.0)")
    assert "beta=2.0" in repr(dp.ContractRequest("ik,kj->ij", square, square, c=square, beta=2.0))
    many = request.replace()
    object.__setattr__(many, "operands", (a,) * 9)
    assert repr(many).endswith("f32[4, 6] on host, … 5 more))")


def test_rows_tables_explanations_and_calls_are_a_line(dev):
    a = dev.zeros((4, 6))
    request = dp.MatmulRequest(a, a.T)
    call, why = dp.prepare(request), dp.explain(request)
    for thing in (why.row, dp.TABLE, why, call):
        assert "\n" not in repr(thing)
        assert len(repr(thing)) < 300
    assert repr(why.row) == "<Row matmul f32×f32→f32 32F host numpy>"  # noqa: RUF001
    assert "<" not in why._repr_html_().removeprefix("<div><pre>").removesuffix("</pre></div>")
    assert "<td>matmul</td>" in dp.TABLE._repr_html_()
    run(request)
    dev.close()
    assert repr(call)


def test_a_failed_future_says_with_what_and_stays_undelivered():
    future = Future(None)
    future.claim()
    future.settle(FAILED, ValueError("first line\nsecond line"))
    assert repr(future) == "<Future failed: ValueError: first line>"
    assert future._status == FAILED
    with dp.Supervisor(dp.device("host"), streams=1) as sup:
        assert repr(sup) == "<Supervisor of host, 1 workers, 0 requests queued>"
        assert sup._repr_html_().startswith("<div><code>&lt;Supervisor of host")


# -- in a notebook ----------------------------------------------------------------------------------------------------
class Reader(HTMLParser):
    """The text of HTML, and the tags that do not match."""

    def __init__(self):
        super().__init__()
        self.open, self.wrong, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        self.text += data


def things(dev):
    a, b = dev.zeros((4, 6)), dev.zeros((6, 4), "f16")
    for shape in ((), (0, 5), (3, 4), (1000, 1000), (2,) * 16, (1,) * 40):
        yield dev.zeros(shape)
    yield dp.TABLE
    yield dp.explain(dp.MatmulRequest(a, a.T))
    yield dp.explain(dp.MatmulRequest(a, b))
    yield dp.explain(dp.SoftmaxRequest(dev.zeros((4, 4), "i8")))
    with dp.Supervisor("host", streams=2) as sup:
        yield sup
    yield sup
    stale = dev.zeros(3)
    dev.close()
    yield stale


def test_html_is_balanced_escaped_and_bounded(dev):
    for thing in things(dev):
        text = thing._repr_html_()
        reader = Reader()
        reader.feed(text)
        reader.close()
        assert not reader.wrong
        assert not reader.open
        assert len(text) < 8_000 + (1 << 16) * isinstance(thing, dp.Tensor)
        bare = re.sub(r"</?(div|code|pre|em|table|tr|th|td)>", "", text)
        assert not set("<>") & set(bare)
        assert html.unescape(bare) == reader.text


def test_an_explanation_in_a_notebook_says_where_the_rest_is(dev):
    why = dp.explain(dp.MatmulRequest(dev.zeros((4, 6)), dev.zeros((6, 4), "f16")))
    text = html.unescape(why._repr_html_())
    assert str(why).splitlines()[:3] == text.removeprefix("<div><pre>").splitlines()[:3]
    assert "more rows: print(dispatch.explain(request))" in text
