"""Convolutions of two libraries in one table: whose a request is, and what CUTLASS's plans hand to kernels."""

import importlib.util
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.core.row import refusals
from dispatch.errors import BadRequest, NoRow, Refused
from dispatch.keys import BF16, HOST, Arch
from dispatch.libraries.cutlass import evt
from dispatch.ops.conv import numpy_tree_conv
from dispatch.ops.conv.config import MEDIUM
from dispatch.ops.conv.problem import ArgumentOrder
from dispatch.refusal import Kind
from dispatch.table.select import select

spec = importlib.util.spec_from_file_location("conv_operands", Path(__file__).with_name("conv_operands.py"))
operands = importlib.util.module_from_spec(spec)
spec.loader.exec_module(operands)
host, image, zeros, of = operands.host, operands.image, operands.zeros, operands.of


@pytest.mark.parametrize("op", ["conv_fwd", "conv_bwd_data", "conv_bwd_filter"])
def test_cudnn_is_asked_first(op):
    libraries = [row.library for row in dp.TABLE.of(op) if row.min_arch != HOST]
    assert libraries == sorted(libraries, key=("cudnn", "cutlass").index)
    assert set(libraries) == {"cudnn", "cutlass"}


def test_a_table_has_one_order_whichever_op_is_asked_for_first():
    from dispatch.core.row import Table
    from dispatch.table.table import LATER

    one, other = Table((), LATER), Table((), LATER)
    assert one.of("grouped_matmul")
    assert one.of("conv_fwd")
    assert other.of("softmax")
    assert other.of("conv_fwd")
    assert one.of("conv_fwd") == other.of("conv_fwd") == dp.TABLE.of("conv_fwd")
    assert tuple(one) == tuple(other)


def test_a_plain_request_is_cudnns_and_one_with_a_tree_cutlasss(host):
    tree = {"epilogue": evt.relu(evt.accumulator())}
    for arch, first, second in ((Arch(90), "cudnn", "cutlass"), (HOST, "numpy", "numpy-cutlass")):
        assert select(of(host), arch).library == first
        assert select(of(host, library="cudnn"), arch).library == first
        assert select(of(host, **tree), arch).library == second
        assert select(of(host, config=MEDIUM), arch).library == second
        assert select(of(host, library="cutlass"), arch).library == second


def test_who_is_not_asked_says_so_and_who_has_no_trees_as_well(host):
    tree = evt.relu(evt.accumulator())
    said = dict(dp.explain(of(host, library="cutlass"), Arch(90)).refusals)
    assert {whys[0].kind for name, whys in said.items() if name.endswith("cudnn")} == {Kind.OTHER_LIBRARY}
    assert any("needs library cudnn or None, has cutlass" in str(why) for whys in said.values() for why in whys)
    said = dict(dp.explain(of(host, epilogue=tree), Arch(90)).refusals)
    assert any("needs no epilogue tree, has relu(acc)" in str(why) for whys in said.values() for why in whys)
    with pytest.raises(BadRequest, match=r"library: got 'cublas'; expected a library .* cudnn, cutlass; or None"):
        select(of(host, library="cublas"), Arch(90))
    with pytest.raises(NoRow, match="needs no epilogue tree"):
        select(of(host, epilogue=tree, library="cudnn"), Arch(90))
    with pytest.raises(BadRequest, match="library: got 3"):
        of(host, library=3)


def test_a_tree_says_what_else_is_fused(host):
    for name, value in (("bias", host.zeros(16, "bf16")), ("activation", dp.Activation.RELU_FWD)):
        with pytest.raises(BadRequest, match="None with an epilogue tree"):
            of(host, library="cutlass", **{name: value})


def test_the_key_of_a_plain_request_has_nothing_of_trees(host):
    plain = of(host)
    layouts = (plain.x.layout, plain.w.layout, None, None, None)
    numbers = (1.0, 0.0, None, plain.result_dtype.cuda, False, None, False, dp.Activation.IDENTITY)
    assert plain.key() == (*layouts, *plain.steps, *numbers)
    assert len({plain.key(), of(host, library="cudnn").key(), of(host, library="cutlass").key()}) == 3
    assert "library" not in plain.describe()
    assert "operands" not in plain.describe()


def test_a_plain_request_may_come_to_cutlass(host, rng):
    """On a machine without cuDNN, or where it refuses: numbers are then none of the arguments, and beta adds to out."""
    dy, w = (image(host, rng.integers(-2, 3, shape)) for shape in ((2, 16, 9, 9), (16, 8, 3, 3)))
    before = rng.integers(-2, 3, (2, 8, 9, 9))
    out, copy = image(host, before), image(host, before)
    request = dp.ConvBwdDataRequest(dy, w, pad=1, out=out, alpha=0.5, beta=2.0)
    row = next(row for row in dp.TABLE.of("conv_bwd_data") if row.stands_for == "cutlass" and accepts(row, request))
    numpy_tree_conv(request, None, row).run(request, {})
    dp.run(dp.ConvBwdDataRequest(dy, w, pad=1, out=copy, alpha=0.5, beta=2.0))
    assert np.array_equal(out.numpy(), copy.numpy())
    arranged = ArgumentOrder.of(request)
    assert arranged.names == ("a", "b", "c", "out", "beta", "alpha")
    assert arranged(request.arguments({})) == (dy.ptr, w.ptr, out.ptr, out.ptr, 2.0, 0.5)


def test_the_arguments_of_a_forward_leave_out_the_bias(host):
    plain, has_tree = of(host, alpha=3.0), of(host, alpha=3.0, library="cutlass")
    out = {"out": zeros(host, 2, 16, 7, 7)}
    for request in (plain, has_tree):
        arranged = ArgumentOrder.of(request)
        assert arranged.names == ("a", "b", "c", "out", "alpha")
        found = arranged(request.arguments(out))
        assert found == (request.x.ptr, request.w.ptr, 0, out["out"].ptr, 3.0)


def accepts(row, request):
    return not refusals(row, request, request.signature())


@pytest.fixture
def launched(monkeypatch):
    """The words of each launch; kernels are neither compiled nor loaded."""
    from dispatch.libraries.cutlass import plan as plans
    from dispatch.ops.conv import cutlass

    found = []

    class Launch:
        def __init__(self, *_):
            pass

        def enqueue(self, values, _stream):
            found.append(values)

    future = Future()
    future.set_result(b"")
    for module in (cutlass, plans):
        monkeypatch.setattr(module, "Launch", Launch)
        monkeypatch.setattr(module, "module", lambda *_: None)
    monkeypatch.setattr(plans.compiler, "request", lambda *_: future)
    return found


@pytest.fixture
def executor():
    device = SimpleNamespace(arch=Arch(90), attribute=lambda _: 132)
    return SimpleNamespace(device=device, target=SimpleNamespace(value=0), scalar=lambda number, _: ("at", number))


def planned(request, executor, function):
    row = next(row for row in dp.TABLE.of(request.op) if row.function == function and row.dtypes[0] is BF16)
    return row.call(request, executor, row)


@pytest.mark.parametrize("library", [None, "cutlass"])
def test_a_kernel_for_hopper_is_told_operands_and_numbers(library, host, launched, executor):
    z, out = zeros(host, 2, 16, 7, 7), zeros(host, 2, 16, 7, 7)
    request = of(host, z=z, out=out, alpha=0.5, beta=-2.0, library=library)
    planned(request, executor, "CollectiveConv").enqueue(request.arguments({}))
    (values,) = launched
    told = {name: values.get(name) for name in ("a", "b", "c", "out", "alpha.value", "beta.value")}
    half, minus_two = 0x3F000000, 0xC0000000
    addresses = {"a": request.x.ptr, "b": request.w.ptr, "c": z.ptr, "out": out.ptr}
    assert told == {**addresses, "alpha.value": half, "beta.value": minus_two}
    assert values["problem.groups"] == 1


@pytest.mark.parametrize("library", [None, "cutlass"])
def test_a_gradient_that_adds_to_out_reads_it(library, host, launched, executor):
    dy, w, out = zeros(host, 2, 16, 9, 9), zeros(host, 16, 8, 3, 3), zeros(host, 2, 8, 9, 9)
    request = dp.ConvBwdDataRequest(dy, w, pad=1, out=out, alpha=0.5, beta=2.0, library=library)
    for function in ("CollectiveConv", "ImplicitGemmConvolution"):
        planned(request, executor, function).enqueue(request.arguments({}))
    hopper, multistage = launched
    for values in launched:
        addresses = {name: values[name] for name in ("a", "b", "c", "out")}
        assert addresses == {"a": dy.ptr, "b": w.ptr, "c": out.ptr, "out": out.ptr}
    assert (hopper["alpha.value"], hopper["beta.value"]) == (0x3F000000, 0x40000000)
    assert (multistage["alpha"], multistage["beta"]) == (("at", 0.5), ("at", 2.0))


def test_a_tree_reads_its_operands_and_a_kernel_without_a_source_no_c(host, launched, executor):
    bias, out = host.zeros(16, "f32"), zeros(host, 2, 16, 7, 7)
    tree = (evt.accumulator() + evt.row("bias")) * evt.scalar("bias2")
    request = of(host, out=out, epilogue=tree, operands={"bias": bias, "bias2": 2.0})
    planned(request, executor, "CollectiveConv").enqueue(request.arguments({}))
    (values,) = launched
    assert (values["bias"], values["bias2.value"], values["c"]) == (bias.ptr, 0x40000000, 0)


def test_without_headers_a_plain_request_is_refused_and_one_for_cutlass_says_what_to_install(host, monkeypatch):
    from dispatch.libraries.cutlass.headers import HeadersMissing
    from dispatch.ops.conv import cutlass

    def nothing(*_):
        raise HeadersMissing("the headers are not there")

    monkeypatch.setattr(cutlass, "plan", nothing)
    for request, error in ((of(host), Refused), (of(host, library="cutlass"), HeadersMissing)):
        with pytest.raises(error, match="the headers are not there"):
            planned(request, None, "CollectiveConv")


def test_the_rows_of_cutlass_are_read_when_cudnns_are_through(host):
    from dispatch.core.row import Table
    from dispatch.table.table import LATER

    table, asked = Table((), LATER), of(host).signature().dtypes
    rows = table.with_dtypes("conv_fwd", asked)
    assert next(rows).library == "cudnn"
    assert "dispatch.table.cutlass" in table._unloaded
    assert [row for row in table.of("conv_fwd") if row.dtypes == asked[:3]][1:] == list(rows)
    assert "dispatch.table.cutlass" not in table._unloaded
    other = Table((), LATER)
    assert other.of("grouped_matmul")
    assert next(other.with_dtypes("conv_fwd", asked)).library == "cudnn"
