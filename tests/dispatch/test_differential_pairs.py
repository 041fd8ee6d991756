"""Matmul calls that differ in one thing, one behind the other: the second is not what is remembered of the first.

Each part of the keys by which calls are remembered has its pair, and is needed: without it a pair is found to differ.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import NoRow
from dispatch.keys import Compute, Dtype, Epilogue
from dispatch.ops import matmul
from dispatch.ops.matmul.lower import lower
from dispatch.ops.matmul.request import MatmulRequest

sys.path.insert(0, str(Path(__file__).parents[1]))

import differential
import differential_standin as standin
from differential_drawn import VECTORS, drawn
from differential_runner import Difference
from differential_specs import Slot, Spec

sys.path.remove(str(Path(__file__).parents[1]))  # else every child of a later test would find them, too

M, N, K = 8, 16, 32
E = Epilogue
ABO = ("a", "b", "out")


def spec(names=ABO, dtype="f32", batch=(), pads=None, skews=None, **given):
    """A call over operands that are the same whatever else is chosen, but for how they lie."""
    epilogue = given.get("epilogue", E.NONE)
    aux, strides = dp.aux_shape(epilogue, (*batch, M, N))
    bias = (*given.pop("bias_batch", ()), N)
    relu = epilogue.activation == "relu"
    kinds = {"aux": "u8" if relu else dtype, "alpha": "f32", "out": given.pop("d", dtype), "c": given.pop("d_", dtype)}
    shapes = {
        "a": (*batch, M, K), "b": (*batch, K, N), "c": (*batch, M, N), "out": (*batch, M, N), "bias": bias, "aux": aux,
        "bgrad": (*batch, N), "alpha": (1,),
    }  # fmt: skip
    operands = []
    for place, name in enumerate(names):
        pad = (pads or {}).get(name, 0) + (strides[-2] - aux[-1] if name == "aux" else 0)
        rng = np.random.default_rng(place)
        order = (1, 0) if name == "b" and dtype.startswith("f8") else None
        kind = Dtype.of(kinds.get(name, dtype))
        operands.append(drawn(rng, kind, shapes[name], order, pad=pad, skew=(skews or {}).get(name, 0)))
        given[name] = Slot(place)
    return Spec(MatmulRequest, given, operands)


def lying(name, more=(), **given):
    """Three calls with an operand that lies as is usual, at another address, and with a step of its own."""
    names = (*ABO, *more)
    pad, skew = (
        {"pads": {name: 16}},
        {name: 4 if name in VECTORS else 3},
    )  # of f32: vectors lie at multiples of 16 bytes
    return [spec(names, **given), spec(names, skews=skew, **given), spec(names, **pad, **given)]


def chosen(common, *others):
    return [spec(**(common | other)) for other in ({}, *others)]


BIAS, BATCH = {"epilogue": E.BIAS}, {"batch": (3,)}
OPEN = {"names": ("a", "b")}
PAIRS = {
    "a": lying("a"),
    "b": lying("b"),
    "c": lying("c", ("c",)),
    "out": lying("out"),
    "bias": lying("bias", ("bias",), **BIAS),
    "bias of a batch": chosen(BIAS | BATCH | {"names": (*ABO, "bias")}, {"bias_batch": (3,)}),
    "aux": lying("aux", ("aux",), epilogue=E.GELU_AUX),
    "aux that is read": lying("aux", ("aux",), epilogue=E.DGELU),
    "bgrad": lying("bgrad", ("bgrad", "aux"), epilogue=E.DGELU_BGRAD, **BATCH),
    "epilogue": chosen({}, {"epilogue": E.RELU}, {"epilogue": E.GELU}),
    "beta": chosen({}, {"beta": 0.0}, {"beta": 0.5}, {"beta": 1.0}),
    "beta of c": chosen({"names": (*ABO, "c")}, {"beta": 0.0}, {"beta": 0.5}),
    "alpha": chosen({}, {"alpha": 2.0}, {"alpha": 0.0}, {"alpha": 3}),
    "alpha on the device": chosen({}, {"names": (*ABO, "alpha")}, {"alpha": 2}),
    "compute": chosen({}, {"compute": dp.Compute.COMPUTE_32F_FAST_TF32}, {"compute": dp.Compute.COMPUTE_32F_FAST_16F}),
    "out_dtype": chosen(OPEN | {"dtype": "f16"}, {"out_dtype": "f32"}, {"out_dtype": "f16"}),
    "scales": chosen({"dtype": "f8e4m3", "d": "f32"}, {"scales": dp.Scales(a=2.0)}, {"scales": dp.Scales(a=0.5)}),
    "workspace": chosen({}, {"workspace": 0}, {"workspace": 1 << 20}),
    "reduced_precision": chosen({"dtype": "bf16"}, {"reduced_precision": True}),
    "left open": chosen({}, OPEN),
    "batch": chosen({}, BATCH, {"batch": (1,)}),
}


@pytest.fixture
def gpu(monkeypatch):
    standin.install(monkeypatch.setattr)
    monkeypatch.setattr(standin, "REFUSES", 1 << 40)  # each problem has an algorithm
    device = standin.Standin()
    yield device
    device.close()


def carry_out(device, specs, way="function"):
    """Call them in every order, often enough to be remembered and recorded; raises Difference."""
    with differential.Sequence(device, 0, ops=(), small=False) as sequence:
        runner = sequence.first
        lives = runner.lives(specs)
        assert all(live.fresh.error is None for live in lives), [live.fresh.error for live in lives]
        runner.ways_of = (way,)
        for first in lives:
            device.forget_plans()
            for live in (first, first, *lives, *reversed(lives), first, *lives):
                runner.call(live)
        runner.compare()
        return runner


def test_an_empty_sum_is_zero_in_every_product_of_a_batch(gpu):
    """Zeros stand for both operands, also where batches are called one after the other; nobody reads a or b."""
    filled = gpu.array(np.full((2, 3, 32, 32), 7, np.float32))
    a, b, c = filled[:, :, :8, :0], filled[:, :, :0, :8], gpu.zeros((3, 2, 8, 8), "f32").transpose(1, 0, 2, 3)
    lowered = lower(MatmulRequest(a=a, b=b, c=c), Compute.COMPUTE_32F)
    assert (lowered.empty_k, len(lowered.offsets)) == (True, 2)
    assert not np.asarray(dp.matmul(a, b, c=c)).any()


def test_the_largest_of_several_calls_is_none_that_the_library_gives(gpu):
    """Each call of cuBLASLt sets amax: behind the last one it would be the largest of a part of the batch."""
    a, b, amax = gpu.zeros((2, 1, 32, 32), "f8e4m3"), gpu.zeros((1, 3, 32, 32), "f8e4m3").mT, gpu.zeros((1,), "f32")
    scales = dp.Scales(a=1.0, b=1.0, d=1.0, amax_d=amax)
    with pytest.raises(NoRow, match=r"need 2 calls, each of which .* amax: pass one batch axis"):
        dp.matmul(a, b, out_dtype="f8e4m3", scales=scales)
    for choices in ({"a": a, "scales": dp.Scales(a=1.0, b=1.0, d=1.0)}, {"a": a[:1], "scales": scales}):
        assert dp.matmul(**choices, b=b, out_dtype="f8e4m3").shape[1] == 3


@pytest.mark.parametrize("way", ["function", "request", "prepared with"])
@pytest.mark.parametrize("name", PAIRS)
def test_calls_that_differ_in_one_thing_are_not_taken_for_each_other(gpu, name, way):
    runner = carry_out(gpu, PAIRS[name], way)
    assert set(runner.ways) == {way}
    assert sum(runner.calls.values()) > 12


FIELDS = "            compute, out_dtype, scales, fast_accum, workspace, autotune, reduced_precision,\n        )"
UNKEYED = {  # what is taken out of the key of `matmul`
    "a": ("            a.layout,\n", "            a.layout.shape,\n"),
    "c": ("None if c is None else c.layout", "None if c is None else 1"),
    "bias of a batch": ("None if bias is None else bias.layout", "None if bias is None else 1"),
    "aux": ("None if aux is None else aux.layout", "None if aux is None else 1"),
    "aux that is read": ("None if aux is None else aux.layout", "None if aux is None else 1"),
    "bgrad": ("None if bgrad is None else bgrad.layout", "None if bgrad is None else 1"),
    "out": ("None if out is None else out.layout", "None if out is None else out.layout.shape"),
    "epilogue": ("            epilogue,\n            beta if", "            E.NONE,\n            beta if"),
    "beta": ("beta if beta is None else beta != 0,", "None,"),
    "compute": (FIELDS, FIELDS.replace("compute", "None")),
    "out_dtype": (FIELDS, FIELDS.replace("out_dtype", "None")),
    "scales": (FIELDS, FIELDS.replace("scales", "None")),
    "workspace": (FIELDS, FIELDS.replace("workspace", "None")),
    "reduced_precision": (FIELDS, FIELDS.replace("reduced_precision", "None")),
}


@pytest.mark.parametrize("name", UNKEYED)
def test_every_part_of_the_key_is_needed(gpu, name, monkeypatch):
    old, new = UNKEYED[name]
    source = inspect.getsource(matmul.matmul)
    assert source.count(old) == 1
    known = dict(vars(matmul), E=E)
    exec("from __future__ import annotations\n" + source.replace(old, new), known)
    monkeypatch.setattr(dp, "matmul", known["_matmul"])
    with pytest.raises(Difference):
        carry_out(gpu, PAIRS[name])


PARTS = ("a", "b", "c", "bias of a batch", "aux", "bgrad", "out", "alpha on the device")
# Fast accumulation is a choice of rows whose cases cover it, autotune of what its own tests cover.
CHOICES = ["epilogue", "beta of c", None, "compute", "out_dtype", "scales", None, "workspace", None]
CHOICES.append("reduced_precision")


@pytest.mark.parametrize("name", [*PARTS, *filter(None, CHOICES)])
def test_every_part_of_a_requests_key_is_needed(gpu, name, monkeypatch):
    """Plans are kept by it; the scales' modes are rows' own, so a pair of them leads to one plan in any case."""
    real = MatmulRequest.key
    place = PARTS.index(name) if name in PARTS else 9 + CHOICES.index(name)

    def key(self):
        parts = list(real(self))
        parts[place] = None
        return tuple(parts)

    monkeypatch.setattr(MatmulRequest, "key", key)
    with pytest.raises(Difference):
        carry_out(gpu, PAIRS[name], "request")
