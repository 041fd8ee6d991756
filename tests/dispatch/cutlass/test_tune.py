"""Products as trees and as epilogues, and what autotune remembers of CUTLASS's kernels; no GPU is needed."""

import json
import re
from dataclasses import fields

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, NoRow, Refused
from dispatch.execute.algorithm_cache import Algorithm, AlgorithmCache
from dispatch.keys import Epilogue
from dispatch.libraries.cutlass import evt
from dispatch.libraries.cutlass.compile import CompileFailed
from dispatch.libraries.cutlass.config import Config
from dispatch.libraries.cutlass.headers import HeadersMissing
from dispatch.ops.matmul import MatmulRequest, cutlass, cutlass_matmul, tune
from dispatch.ops.matmul.reference import evaluate_tree, reference

ALPHA = evt.linear_combination(with_source=False)
WITH_C = evt.linear_combination(with_source=True)


def request(tree=Epilogue.NONE, c=None, **options):
    rng, dev = np.random.default_rng(3), dp.device("host")
    a, b = dev.array(rng.standard_normal((16, 24)), "f32"), dev.array(rng.standard_normal((32, 24)), "f32").T
    if "bias" in str(tree):
        options["operands"] = {"bias": dev.array(rng.standard_normal(32), "f32")}
    elif "BIAS" in str(getattr(tree, "name", "")):
        options["bias"] = dev.array(rng.standard_normal(32), "f32")
    c = None if c is None else dev.array(rng.standard_normal((16, 32)), "f32")
    options = {"compute": dp.Compute.COMPUTE_32F_FAST_TF32, "autotune": True} | options
    return MatmulRequest(a, b, c=c, epilogue=tree, **options)


SAID = {
    "plain": (ALPHA, None, Epilogue.NONE),
    "with c": (WITH_C, True, Epilogue.NONE),
    "accumulator": (evt.accumulator(), None, Epilogue.NONE),
    "relu": (evt.relu(ALPHA), None, Epilogue.RELU),
    "bias": (ALPHA + evt.row("bias"), None, Epilogue.BIAS),
    "gelu of bias": (evt.gelu_tanh(evt.accumulator() + evt.row("bias")), None, Epilogue.GELU_BIAS),
    "relu of c and bias": (evt.relu(WITH_C + evt.row("bias")), True, Epilogue.RELU_BIAS),
}


@pytest.mark.parametrize("name", SAID)
def test_a_tree_that_an_epilogue_says_is_that_epilogue(name):
    tree, c, epilogue = SAID[name]
    options = {"beta": -2.0 if c else None, "alpha": 1.0 if name in ("accumulator", "gelu of bias") else 0.5}
    asked, as_tree = request(tree, c, **options), request(tree, c, library="cutlass", **options)
    assert (asked.epilogue, asked.has_tree, as_tree.has_tree) == (epilogue, False, True)
    expected = reference(as_tree)["out"]
    np.testing.assert_allclose(reference(asked)["out"], expected, rtol=2**-9, atol=2**-7)  # of TF32 operands
    np.testing.assert_allclose(dp.run(asked).numpy(), expected, rtol=2**-9, atol=2**-7)
    np.testing.assert_allclose(dp.run(as_tree).numpy(), expected, rtol=2**-9, atol=2**-7)


@pytest.mark.parametrize(
    "tree",
    [
        evt.gelu(evt.accumulator()),
        evt.silu(evt.accumulator()),
        evt.relu(evt.accumulator()) * 2,
        evt.amax(evt.accumulator(), "top"),
        evt.accumulator() + evt.source(),
    ],
    ids=str,
)
def test_what_no_epilogue_says_stays_a_tree(tree):
    assert request(tree, c=True if ", c)" in str(tree) else None).has_tree


def test_a_tree_that_passes_over_what_the_request_has_is_no_epilogue_but_refused():
    for tree, field, given in (
        (evt.accumulator(), "alpha", {"alpha": 0.5}),
        (evt.accumulator(), "alpha", {"alpha": dp.device("host").array([1.0], "f32")}),
        (evt.accumulator(), "c", {"c": True}),
        (ALPHA, "c", {"c": True}),
    ):
        with pytest.raises(BadRequest, match=f"^{field}: got .*, because the epilogue does not read"):
            request(tree, **given)
    assert not request(ALPHA, alpha=0.5).has_tree


@pytest.mark.parametrize("epilogue", [e for e in Epilogue if not (e.writes_aux or e.is_gradient or e.writes_bgrad)])
@pytest.mark.parametrize("c", [None, True], ids=["no c", "c"])
def test_a_plain_request_as_a_tree_means_the_same_at_the_same_arguments(epilogue, c):
    options = {"alpha": 0.5, "beta": -2.0 if c else None, "library": "cublasLt"}
    asked = request(epilogue, c, **options)
    np.testing.assert_allclose(evaluate_tree(asked, np.float64)["out"], reference(asked)["out"], rtol=2**-9, atol=2**-7)
    out = dp.device("host").zeros((16, 32), "f32")
    named = dict(zip(asked.form.names, asked.arguments({"out": out}), strict=True))
    expected = {"a": asked.a.ptr, "b": asked.b.ptr, "out": out.ptr, "alpha": 0.5}
    expected |= {"c": asked.c.ptr, "beta": -2.0} if c else {}
    expected |= {"bias": asked.bias.ptr} if asked.bias is not None else {}
    assert {name: named[name] for name in expected} == expected
    assert {"a", "b", "out", *asked.form.kinds} <= expected.keys() | {"c"}


def test_what_is_added_without_c_is_out_itself():
    out = dp.device("host").array(np.ones((16, 32)), "f32")
    asked = request(out=out, beta=2.0)
    assert asked.form.c is out
    assert dict(zip(asked.form.names, asked.arguments({}), strict=True))["c"] == out.ptr
    unread = request(c=True, beta=0.0)
    assert unread.form.c is None
    assert "beta" not in unread.form.kinds


def test_without_a_library_the_table_chooses_by_its_order():
    dev = dp.device("host")
    a, b = dev.array(np.ones((16, 32)), "i8"), dev.array(np.ones((16, 32)), "i8").T
    assert dp.explain(MatmulRequest(a, b)).row.of("cublasLt")
    wide = MatmulRequest(a, b, out_dtype="f32", alpha=2)  # only CUTLASS has these dtypes
    assert dp.explain(wide).row.of("cutlass")
    assert (dp.run(wide).numpy() == 64).all()
    with pytest.raises(NoRow, match=r"no row of the table takes matmul\(.*library=cublasLt"):
        dp.matmul(a, b, out_dtype="f32", library="cublasLt")


def test_a_plain_products_dense_output_must_be_what_tensor_maps_can_write():
    dev = dp.device("host")
    a, b = dev.zeros((16, 32), "i8"), dev.zeros((21, 32), "i8").T
    with pytest.raises(NoRow, match=r"out with lines at multiples of 16 bytes, or library='cutlass', has 21 col"):
        dp.matmul(a, b, out_dtype="f32")
    assert dp.matmul(a, b, out_dtype="f32", library="cutlass").layout.strides == (24, 1)


@pytest.mark.parametrize(
    ("options", "operand"),
    [
        ({"epilogue": Epilogue.GELU_AUX, "library": "cutlass"}, "epilogue"),
        ({"epilogue": Epilogue.BGRADB, "config": Config((128, 128), (2, 1))}, "epilogue"),
        ({"epilogue": evt.silu(evt.accumulator()), "scales": dp.Scales(a=2.0)}, "scales"),
        ({"epilogue": evt.silu(evt.accumulator()), "workspace": 0}, "workspace"),
        ({"epilogue": evt.silu(evt.accumulator()), "reduced_precision": True}, "reduced_precision"),
        ({"operands": {"bias": 1.0}}, "operands"),
        ({"library": 3}, "library"),
        ({"config": "large"}, "config"),
    ],
    ids=str,
)
def test_what_no_tree_has_is_refused_by_name(options, operand):
    with pytest.raises(BadRequest, match=rf"^{operand}: "):
        request(**({"tree": options.pop("epilogue")} if "epilogue" in options else {}), **options)


def test_a_bias_beside_a_tree_is_pointed_to_the_tree():
    bias = dp.device("host").zeros(32, "f32")
    with pytest.raises(BadRequest, match=r"^bias: .*evt.row\('bias'\)"):
        request(evt.silu(evt.accumulator()), bias=bias)
    asked = request(Epilogue.GELU_BIAS, library="cutlass")
    assert asked.has_tree
    other = dp.device("host").array(np.full(32, 3.0), "f32")
    assert asked.replace(bias=other).bias is other


# -- what is remembered --------------------------------------------------------------------------------------------
def test_autotune_is_part_of_the_key_and_named():
    assert request(library="cutlass").key() != request(library="cutlass", autotune=False).key()
    assert "autotune" in request(library="cutlass").describe()


def test_a_request_is_remembered_by_layouts_and_tree():
    assert tune.stored_key(request()) == tune.stored_key(request())
    keys = {tune.stored_key(request(tree)) for tree in (evt.silu(ALPHA), evt.relu(ALPHA), evt.gelu(ALPHA))}
    assert len(keys) == 3


def test_outputs_that_are_given_change_nothing_where_they_lie_as_they_would():
    asked = request(evt.amax(evt.relu(evt.accumulator()), "top"))
    host = dp.device("host")
    out, top = asked.unallocated()["out"], asked.unallocated()["top"]
    given = asked.replace(out=host.empty(out[0], out[2]), top=host.empty(top[0], top[2]))
    assert not given.unallocated()
    assert tune.stored_key(given) == tune.stored_key(asked)
    column_major = asked.replace(out=host.empty(out[0][::-1], out[2]).T)
    assert tune.stored_key(column_major) != tune.stored_key(asked)


CONFIG = Config((128, 256), (2, 1), swizzle=4, raster="along_m")


class Won:
    """A plan that has won."""

    def __init__(self, row):
        self.row, self.config, self.kernel = row, CONFIG, "1f"


def test_the_outcome_names_row_and_kernel_and_survives_the_disk(tmp_path):
    row = next(row for row in dp.TABLE.of("matmul") if row.library == "cutlass")
    outcome = tune.encode_winner(Won(row))
    assert json.loads(outcome.blob)["row"] == row.name
    AlgorithmCache("GPU", "cublasLt-1", tmp_path).put(tune.OP, "key", outcome)
    assert tune.decode_winner(AlgorithmCache("GPU", "cublasLt-1", tmp_path).get(tune.OP, "key")) == (CONFIG, "1f")


def test_a_remembered_configuration_is_one_of_the_stated_set_or_none():
    def kept(config):
        return Algorithm(json.dumps({"row": "r", "kernel": "k", "config": config, "id": "1f"}).encode(), 0)

    assert tune.decode_winner(kept(CONFIG)) == (CONFIG, "1f")
    assert tune.decode_winner(kept([[128, 255], [2, 1]])) is None
    assert tune.decode_winner(kept("nonsense")) is None
    assert tune.decode_winner(Algorithm(b"\xff", 0)) is None


@pytest.mark.parametrize("scales", [{"d": 2.0}, {"aux": 2.0}, {"amax_d": 1}, {"amax_aux": 1}], ids=str)
def test_no_factor_of_a_plain_product_is_passed_over(scales):
    """What cuBLASLt's rows refuse comes to CUTLASS's, which have no scales at all."""
    dev = dp.device("host")
    a, b = dev.zeros((16, 32), "f8e4m3"), dev.zeros((32, 32), "f8e4m3").T
    scales = {name: value if value == 2.0 else dev.zeros((1,), "f32") for name, value in scales.items()}
    with pytest.raises((NoRow, BadRequest), match="scales"):
        dp.matmul(a, b, scales=dp.Scales(**scales))


def test_every_field_of_a_plain_request_is_honoured_or_refused_by_cutlass():
    """A field that is new must be looked at here: a kernel that knows nothing of it would pass it over."""
    known = {"a", "b", "c", "bias", "out", "epilogue", "alpha", "beta", "compute", "out_dtype", "fast_accum"}
    allowed = {"autotune", "operands", "config", "library", "reduced_precision"}
    refused = {"aux", "bgrad", "scales", "workspace"}
    assert {field.name for field in fields(MatmulRequest)} == known | allowed | refused
    dev = dp.device("host")
    a, b = dev.zeros((16, 32), "i8"), dev.zeros((16, 32), "i8").T
    with pytest.raises(NoRow, match="needs workspace=None, has 0"):
        dp.matmul(a, b, out_dtype="f32", workspace=0)


@pytest.mark.parametrize(
    "error", [HeadersMissing("no headers"), CompileFailed("a kernel", "an error", "a log")], ids=str
)
def test_a_kernel_that_cannot_be_had_costs_a_plain_product_its_row_alone(error, monkeypatch):
    def fails(*_):
        raise error

    for module in (cutlass, tune):
        monkeypatch.setattr(module, "plan", fails)
    for options in ({}, {"autotune": True}):
        asked = MatmulRequest(request().a, request().b, compute=request().compute, **options)
        with pytest.raises(Refused, match=re.escape(str(error))):
            cutlass_matmul(asked, None, None)
    with pytest.raises(type(error)):
        cutlass_matmul(request(evt.silu(ALPHA)), None, None)
