"""JAX's arrays as operands: dtypes, work of JAX's that is under way, what comes back, and what is refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest
from dispatch.ops.graph import Graph

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy
DTYPES = (
    "float32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "uint8",
    "int32",
    "bool",
    "complex64",
)


@pytest.fixture(params=[False, True], ids=["x64 off", "x64 on"])
def wide(request):
    """Whether JAX has dtypes of 64 bits; it has none unless it is told."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", request.param)
    yield request.param
    jax.config.update("jax_enable_x64", before)


@pytest.fixture
def host():
    return dp.device("host")


def drawn(*shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(0).integers(-3, 4, shape), dtype)


def product(a, b):
    return np.asarray(a, np.float64) @ np.asarray(b, np.float64)


# -- what is taken, and what comes back -------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_that_both_have(dtype):
    x = drawn(3, 4, dtype=dtype)
    taken = dp.MatmulRequest(x, x.T).a
    assert str(taken.dtype.numpy) == dtype
    assert np.array_equal(taken.numpy().view(np.uint8), np.asarray(x).view(np.uint8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
def test_a_product_in_each_dtype(dtype):
    a, b = drawn(5, 7, dtype=dtype), drawn(7, 3, dtype=dtype)
    y = dp.matmul(a, b)
    assert isinstance(y, jax.Array)
    assert y.dtype == a.dtype
    assert np.array_equal(np.asarray(y, np.complex64), np.asarray(a, np.complex64) @ np.asarray(b, np.complex64))


def test_narrow_products_take_b_from_a_layout_or_a_view():
    """JAX's arrays lie row by row, unless they are put otherwise: products of fp8 and int8 want b's columns dense."""
    from jax.experimental.layout import Format, Layout

    a, b = drawn(16, 32), drawn(32, 16)
    columns = jax.device_put(b, Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])))
    for dtype in ("float8_e4m3fn", "int8"):
        low = dp.matmul(a.astype(dtype), dp.from_dlpack(b.T.astype(dtype)).mT)
        assert isinstance(low, jax.Array)
        assert np.array_equal(np.asarray(low, np.float64), product(a, b))
    assert np.array_equal(dp.matmul(a, columns), product(a, b))


def test_empty_scalar_weak_and_committed_arrays():
    eye = jnp.eye(4)
    assert dp.matmul(jnp.ones((0, 4)), eye).shape == (0, 4)
    assert not np.asarray(dp.matmul(jnp.ones((4, 0)), jnp.ones((0, 4)))).any()
    weak = jnp.full((4, 4), 2.0)
    assert np.array_equal(dp.matmul(weak, eye), weak)
    assert np.array_equal(dp.matmul(eye, eye, alpha=jnp.asarray(2.0)), 2 * eye)
    put = jax.device_put(weak, jax.devices("cpu")[0])
    assert np.array_equal(dp.matmul(put, eye) + put, 2 * weak)
    with pytest.raises(BadRequest, match=r"x\[None\]"):
        dp.softmax(jnp.float32(3.0))


def test_results_of_64_bits(wide):
    """Without x64 JAX would make 32 bits of them, and lu_solve would not know its own pivots again."""
    a, b = jnp.asarray(np.eye(4) + 1, "float32"), jnp.ones((4, 1))
    lu, pivots, _ = dp.lu_factor(a)
    assert isinstance(lu, jax.Array)
    assert isinstance(pivots, jax.Array if wide else dp.Tensor)
    assert np.asarray(pivots).dtype == np.int64
    x = dp.lu_solve(lu, pivots, b.astype("float32"))
    assert isinstance(x, jax.Array)
    assert np.allclose(product(a, x), b, atol=1e-5)
    y = dp.matmul(jnp.eye(4).astype("float32"), jnp.eye(4).astype("float32"))
    assert y.dtype == np.float32


def test_beside_arrays_of_other_libraries(host):
    torch = pytest.importorskip("torch")
    a, b = drawn(4, 5), drawn(5, 6)
    right = product(a, b)
    for first, second, kind in (
        (a, np.asarray(b), jax.Array),
        (np.asarray(a), b, np.ndarray),
        (a, torch.from_numpy(np.array(b)), jax.Array),
        (torch.from_numpy(np.array(a)), b, torch.Tensor),
        (host.array(a), b, jax.Array),
    ):
        y = dp.matmul(first, second)
        assert isinstance(y, kind)
        assert np.array_equal(y, right)
    out = torch.zeros(4, 6)
    assert dp.matmul(a, b, out=out) is out
    assert np.array_equal(out, right)


def test_graphs_bound_calls_and_supervisors():
    a, b = drawn(4, 4), drawn(4, 4)
    graph = Graph()
    wires = (graph.tensor(name, (1, 4, 4), "f32") for name in "ab")
    graph.output("y", graph.matmul(*wires) + 1, "f32")
    y = graph(a=a[None], b=b[None])
    assert isinstance(y, jax.Array)
    assert np.array_equal(y[0], product(a, b) + 1)
    call = dp.prepare(dp.MatmulRequest(a, b))
    y = call()
    assert isinstance(y, dp.Tensor), "written again by each call, which an array of JAX never is"
    assert np.array_equal(y, product(a, b))
    assert np.array_equal(call(a=b), product(b, b))
    with pytest.raises(BadRequest, match="read-only"):
        call.refit(b=a)
    with dp.Supervisor("host", streams=2) as sup:
        results = [future.result() for future in sup.submit_many([dp.MatmulRequest(a, b) for _ in range(8)])]
    assert all(isinstance(one, jax.Array) and np.array_equal(one, product(a, b)) for one in results)
    with dp.Supervisor("host", isolation="process") as sup, pytest.raises(BadRequest, match="shared memory"):
        sup.submit(dp.MatmulRequest(a, b)).result()


# -- order and lifetimes ----------------------------------------------------------------------------------------------
N = 600


@jax.jit
def slow(x):
    for _ in range(8):
        x = x @ x
    return x


def test_work_of_jax_that_is_under_way():
    mean = jnp.full((N, N), 1 / N)
    slow(mean).block_until_ready()
    assert np.allclose(dp.matmul(slow(mean), jnp.eye(N)), 1 / N, rtol=1e-3)


def test_results_that_die_while_jax_reads_them(host):
    mean, eye = jnp.full((N, N), 1 / N), jnp.eye(N)
    for _ in range(3):
        z = slow(dp.matmul(mean, eye))
        junk = [host.array(np.full((N, N), np.nan, np.float32)) for _ in range(4)]
        assert np.allclose(z, 1 / N, rtol=1e-3)
        del junk


def test_results_live_without_the_operands():
    a, b = drawn(8, 8), drawn(8, 8)
    right = product(a, b)
    y = dp.matmul(a, b)
    a.delete()
    b.delete()
    assert np.array_equal(y, right)


def test_a_request_holds_operands_that_are_deleted_or_donated():
    a, eye = drawn(4, 4), jnp.eye(4)
    right = np.asarray(a).copy()
    request = dp.MatmulRequest(a, eye)
    a.delete()
    assert np.array_equal(dp.run(request), right)
    y = dp.matmul(request.a, eye)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some platforms cannot donate, and say so
        z = jax.jit(lambda x: x + 1, donate_argnums=0)(y)
    assert np.array_equal(z, right + 1)
    assert np.array_equal(request.a.numpy(), right)


def test_shapes_that_change_and_threads():
    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(100):
            m, n, k = rng.integers(1, 12, 3)
            a, b = (jnp.asarray(rng.integers(-3, 4, shape), "float32") for shape in ((m, k), (k, n)))
            assert np.array_equal(dp.matmul(a, b), product(a, b))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


# -- what is refused --------------------------------------------------------------------------------------------------
def deleted():
    x = jnp.ones((4, 4))
    x.delete()
    return x


def donated():
    x = jnp.ones((4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    return x if x.is_deleted() else deleted()


REFUSED = {
    "deleted": (deleted, "deleted", "x.copy()"),
    "donated": (donated, "donated", "donate_argnums"),
    "keys": (lambda: jax.random.split(jax.random.key(0), 4), "key<", "key_data"),
    "int4": (lambda: jnp.ones((4, 4), "int4"), "int4", "astype"),
    "int16": (lambda: jnp.ones((4, 4), "int16"), "int16", "astype"),
    "fp4": (lambda: jnp.ones((4, 4), "float4_e2m1fn"), "float4", "dev.array(x)"),
    "fnuz": (lambda: jnp.ones((4, 4), "float8_e4m3fnuz"), "fnuz", "astype"),
    "reference": (lambda: jax.new_ref(jnp.ones((4, 4))), "Ref", "x[...]"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("operand", ["a", "b", "out"])
def test_what_is_no_array_of_numbers_in_memory_is_refused_by_name(what, operand):
    if what == "reference" and not hasattr(jax, "new_ref"):
        pytest.skip("this JAX has no references")
    make, said, hint = REFUSED[what]
    operands = {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4)), operand: make()}
    for call in (dp.matmul, dp.MatmulRequest):
        with pytest.raises(BadRequest) as found:
            call(**operands)
        assert found.value.operand == operand
        assert said in found.value.given
        assert hint in found.value.hint


def test_copies_refuse_them_too(host):
    for what, make in {"deleted": deleted, "key": lambda: jax.random.key(0)}.items():
        with pytest.raises(BadRequest, match=what):
            host.array(make())


@pytest.mark.parametrize("way", ["jit", "grad", "vmap", "eval_shape"])
def test_transformations_are_refused(way):
    a, b = jnp.ones((4, 4)), jnp.ones((4, 4))
    how = {"jit": jax.jit, "vmap": jax.vmap, "eval_shape": lambda f: lambda x: jax.eval_shape(f, x)}
    how["grad"] = lambda f: jax.grad(lambda x: f(x).sum())
    with pytest.raises(BadRequest, match="pure_callback") as found:
        how[way](lambda x: dp.matmul(b, x))(a if way != "vmap" else jnp.ones((2, 4, 4)))
    assert found.value.operand == "b"
    shape = jax.ShapeDtypeStruct((4, 4), "float32")
    within = jax.jit(lambda x: jax.pure_callback(lambda x: dp.matmul(b, x), shape, x))
    assert np.array_equal(within(a), product(b, a))


@pytest.mark.parametrize("call", [lambda a, y: dp.matmul(a, a, out=y), lambda a, y: dp.softmax(a, out=y)])
def test_outputs_in_arrays_of_jax_are_refused(call):
    a, y = jnp.ones((4, 4)), jnp.zeros((4, 4))
    with pytest.raises(BadRequest, match="array of jax, read-only") as found:
        call(a, y)
    assert found.value.hint.startswith(f"leave {found.value.operand}=None")
    assert not np.asarray(y).any()


SEVERAL = """
import jax, numpy as np, dispatch as dp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = Mesh(np.array(jax.devices()), ("i",))
x, eye = jax.numpy.arange(16.0).reshape(4, 4), jax.numpy.eye(4)
for spec in (PartitionSpec("i"), PartitionSpec()):
    spread = jax.device_put(x, NamedSharding(mesh, spec))
    try:
        dp.matmul(eye, spread)
    except dp.errors.BadRequest as error:
        assert (error.operand, error.given) == ("b", "an array on 2 devices"), error
        assert "addressable_shards" in error.hint
    else:
        raise AssertionError("not refused")
    for shard in spread.addressable_shards:
        assert np.array_equal(dp.matmul(shard.data, eye), x[shard.index])
    assert np.array_equal(dp.matmul(jax.device_put(spread, jax.devices()[1]), eye), x)
"""


def test_arrays_on_several_devices_are_refused():
    flags = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", SEVERAL], check=True, timeout=120, env=flags)
