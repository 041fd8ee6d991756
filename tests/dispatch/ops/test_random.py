"""Requests for random numbers on the host; Philox's kernels compiled for the CPU; refusals."""

import ctypes
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from cudabind.errors import LibraryNotFound
from cudabind.sys import curand
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import HOST
from dispatch.libraries.nvrtc.philox import philox
from dispatch.ops.random import restarts_sequence
from dispatch.ops.random.cases import FORMS, cases
from dispatch.ops.random.distribution_kernels import MODES, draws_kernel
from dispatch.ops.random.philox_kernels import kernel_of
from dispatch.ops.random.reference import reference
from dispatch.ops.random.request import BitGenerator
from dispatch.row_check import check_row

spec = importlib.util.spec_from_file_location("random_on_cpu", Path(__file__).with_name("random_on_cpu.py"))
random_on_cpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(random_on_cpu)

OPS = [op for op in dp.TABLE.ops if op.startswith("random_")]
ROWS = [row for op in OPS for row in dp.TABLE.of(op) if row.on(HOST)]
OWN = [row for op in OPS for row in dp.TABLE.of(op) if row.library == "own"]


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return random_on_cpu.OnCpu(tmp_path_factory.mktemp("random"))


def made_by(request):
    return draws_kernel(request) if request.op in MODES else kernel_of(request)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_host_row_passes_its_cases(row, dev, rng):
    refused = {why for case in cases(row) if (why := check_row(row, case, dev, rng))}
    assert refused <= {
        "needs u32 of PHILOX4_32_10, has u64",  # cuRAND's words of 64 bits are Sobol's
        "needs interval (0,1] for f64 of PHILOX4_32_10, has [0,1)",
        "needs lam above 0 and 400000 at most, has 1e+06",
    }


# -- Philox -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers of its authors: Random123, tests/kat_vectors
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_has_the_known_answers_of_its_paper(counter, key, expected):
    words = tuple(np.array([word], np.uint64) for word in counter)
    assert tuple(map(int, philox(words, key)[0])) == expected


@pytest.mark.parametrize("op", ["random_bits", "random_uniform"])
@pytest.mark.parametrize("dtype", ["u32", "f32", "f64"])
def test_bits_and_uniform_numbers_of_curand_are_philoxs_to_the_last_bit(op, dtype, dev):
    if (op == "random_bits") != (dtype == "u32"):
        pytest.skip("no such numbers")
    function = getattr(dp, op)
    for form in FORMS:
        given = {"seed": 0x123456789ABCDEF, "offset": form.offset, "out_dtype": dtype}
        one, other = (function(dev, form.size, **given, library=library).numpy() for library in ("curand", "own"))
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.name, marks=[pytest.mark.compiles] if number else []) for number, row in enumerate(OWN)],
)
def test_the_kernel_run_on_the_cpu_passes_the_cases(row, dev, rng, on_cpu):
    for case in cases(row):
        check = case.check(dev, rng)
        if check.request.count:
            on_cpu.run(made_by(check.request), check.request)
            check.verify(check.request.out)


@pytest.mark.compiles
def test_numbers_do_not_depend_on_the_grid_and_no_replay_has_those_of_another(dev, on_cpu):
    request = dp.RandomUniformRequest(dev, 1003, 5, 6, out=dev.empty((1003,)))
    found = []
    for grid in (None, (1, 32), (7, 8)):
        on_cpu.run(kernel_of(request), request, grid=grid)
        found.append(request.out.numpy().copy())
    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()
    count = np.zeros(1, np.uint32)
    for _ in range(3):
        on_cpu.run(kernel_of(request), request, replays=count.ctypes.data)
        found.append(request.out.numpy().copy())
        count += 1
    assert (found[3] == found[0]).all()
    assert len(np.unique(np.concatenate(found[3:]))) > 3000


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.compiles)])
def test_kernels_compile_for_sm_90(every, dev):
    rows = OWN if every else [next(row for row in OWN if row.op == op) for op in ("random_normal", "random_integers")]
    for row in rows:
        for interval in ("(0,1]", "[0,1)") if row.op == "random_uniform" else ("",):
            kind = next(iter(cases(row))).request(dev, np.random.default_rng(1))
            request = kind.replace(interval=interval) if interval else kind
            assert random_on_cpu.kernels_on_cpu.size_for_sm_90(made_by(request)) > 1000


# -- other generators -------------------------------------------------------------------------------------------------
PSEUDO = ("philox", "xorwow", "mtgp32", pytest.param("mrg32k3a", marks=pytest.mark.exhaustive))  # its seeds take 0.4 s
QUASI = ("sobol32", "scrambled_sobol32", "sobol64", "scrambled_sobol64")


@pytest.mark.parametrize("name", [*PSEUDO, *QUASI])
def test_calls_in_turn_give_what_one_call_gives(name, dev):
    seed = None if name in QUASI else 11
    for draw in ("random", "bits", *(["standard_normal"] if name not in ("xorwow", "mrg32k3a") else [])):
        whole = getattr(dp.random.Generator(seed, name, device=dev), draw)(100).numpy()
        generator = dp.random.Generator(seed, name, device=dev)
        parts = [getattr(generator, draw)(size).numpy() for size in (10, 2, 38, 50)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
        assert len(np.unique(whole)) > 90
        if draw == "bits":
            later = dp.random.Generator(seed, name, device=dev, offset=40)
            np.testing.assert_array_equal(later.bits(60).numpy(), whole[40:])


@pytest.mark.parametrize("name", PSEUDO)
def test_a_request_that_is_carried_out_again_or_elsewhere_gives_the_same(name, dev):
    generator = dp.random.Generator(3, name, device=dev)
    asked = [generator.requests.normal(2, 3, size) for size in (5, 8, 1)] + [generator.requests.random((2, 3))]
    assert [request.offset for request in asked[:3]] == ([0, 3, 7] if name in ("xorwow", "mrg32k3a") else [0, 6, 14])
    first = [dp.run(request).numpy().copy() for request in asked]
    for request, right in zip(reversed(asked), reversed(first), strict=True):
        np.testing.assert_array_equal(dp.run(request).numpy(), right)
    with dp.Supervisor("host", streams=2) as sup:
        for future, right in zip([sup.submit(request) for request in asked], first, strict=True):
            np.testing.assert_array_equal(future.result().numpy(), right)


def test_kinds_of_numbers_share_no_bits(dev):
    """Words of what was drawn as pairs are not drawn again as single ones."""
    generator = dp.random.Generator(7, device=dev)
    pairs = generator.bits(300000, "u64").numpy().view(np.uint32)
    singles = generator.bits(600000).numpy()
    again = generator.bits(1000, "u64").numpy().view(np.uint32)
    parts = [set(map(int, part)) for part in (pairs, singles, again)]
    by_chance = len(pairs) * len(singles) / 2**32
    assert len(parts[0] & parts[1]) < 3 * by_chance
    assert len(parts[2] & (parts[0] | parts[1])) < 10


@pytest.mark.parametrize("name", PSEUDO)
def test_an_odd_count_of_normal_numbers_is_what_one_more_begins_with(name, dev):
    for dtype in ("f32", "f64"):
        one, other = (dp.random_normal(dev, n, 5, 4, bit_generator=name, out_dtype=dtype).numpy() for n in (7, 8))
        np.testing.assert_array_equal(one, other[:7])


def test_intervals_and_ends_are_those_that_were_asked_for(dev):
    for name in ("philox", "xorwow", "sobol32"):
        for dtype in ("f32", "f64"):
            generator = dp.random.Generator(None if name == "sobol32" else 3, name, device=dev)
            u = generator.random(5000, dtype, interval="[0,1)").numpy()
            assert 0 <= u.min() < 0.01
            assert 0.99 < u.max() < 1
            steps = u.astype(np.float64) * 2.0 ** (24 if dtype == "f32" else 53)
            assert (steps == np.rint(steps)).all()
            between = generator.uniform(-2, 3, 5000, dtype).numpy()
            assert -2 <= between.min() < -1.9
            assert 2.9 < between.max() <= 3
    for dtype, bits in (("f16", 11), ("bf16", 8)):
        for interval, ends in (("[0,1)", (0, 1 - 2.0**-bits)), ("(0,1]", (2.0**-bits, 1))):
            u = dp.random_uniform(dev, 1 << 17, 3, out_dtype=dtype, interval=interval).numpy().astype(np.float64)
            assert (u.min(), u.max()) == ends


def test_dimensions_of_quasi_random_numbers_are_the_first_axis(dev):
    points = dp.random.Generator(bit_generator="sobol32", dimensions=3, device=dev).random((3, 64), "f64").numpy()
    qmc = pytest.importorskip("scipy.stats.qmc")
    right = qmc.Sobol(3, scramble=False).random(64).T
    np.testing.assert_allclose(points, right, atol=2.0**-31)
    generator = dp.random.Generator(bit_generator="sobol64", dimensions=2, device=dev)
    assert generator.bits().shape == (2,)
    parts = [generator.bits((2, n)).numpy() for n in (3, 4)]
    whole = dp.random.Generator(bit_generator="sobol64", dimensions=2, device=dev, offset=1).bits((2, 7)).numpy()
    np.testing.assert_array_equal(np.concatenate(parts, 1), whole)


# -- refusals ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("call", "operand", "expected"),
    [
        (lambda d: dp.random_uniform(d, -1), "size", "integers of 0 or more"),
        (lambda d: dp.random_uniform(d, (3, 2.5)), "size", "integers of 0 or more"),
        (lambda d: dp.random_uniform(d, 3, -1), "seed", "a whole number from 0"),
        (lambda d: dp.random_uniform(d, 3, 2**64), "seed", "to 18446744073709551615"),
        (lambda d: dp.random_uniform(d, 3, 1, 2**62 - 2), "offset", "to 4611686018427387901"),
        (lambda _: dp.random_uniform("host", 3), "on", "a Device"),
        (lambda d: dp.random_uniform(d, 3, low=2.0, high=1.0), "low", "no more than high, 1.0"),
        (lambda d: dp.random_uniform(d, 3, low=float("nan")), "low", "a finite number"),
        (lambda d: dp.random_uniform(d, 3, low=-1e308, high=1e308, out_dtype="f64"), "high", "f64 can hold"),
        (lambda d: dp.random_uniform(d, 3, interval="[0,1]"), "interval", '"(0,1]" or "[0,1)"'),
        (lambda d: dp.random_uniform(d, 3, out_dtype="i32"), "out_dtype", "f32 or f64 or f16 or bf16"),
        (lambda d: dp.random_bits(d, 3, out_dtype="f32"), "out_dtype", "u32 or u64"),
        (lambda d: dp.random_normal(d, 3, std=-1.0), "std", "a finite number of 0 or more"),
        (lambda d: dp.random_normal(d, 3, mean=float("inf")), "mean", "a finite number"),
        (lambda d: dp.random_poisson(d, 3, lam=-0.5), "lam", "a finite number of 0 or more"),
        (lambda d: dp.random_exponential(d, 3, scale=float("nan")), "scale", "a finite number of 0 or more"),
        (lambda d: dp.random_bits(d, 3, bit_generator="pcg64"), "bit_generator", "PHILOX4_32_10"),
        (lambda d: dp.random_bits(d, 3, dimensions=2), "dimensions", "a whole number from 1 to 1"),
        (lambda d: dp.random_bits(d, 3, 7, bit_generator="sobol32"), "seed", "SOBOL32 has no seed"),
        (lambda d: dp.random_bits(d, 3, bit_generator="sobol32", dimensions=20001), "dimensions", "to 20000"),
        (lambda d: dp.random_bits(d, (4, 2), bit_generator="sobol32", dimensions=2), "size", "(2, …)"),
        (
            lambda d: dp.random_bits(d, 3, 0, 2**32 - 2, bit_generator="sobol32"),
            "offset",
            "4294967296 points of SOBOL32",
        ),
        (lambda d: dp.random_uniform(d, 3, out=d.empty((4,))), "out", "f32[3]"),
        (lambda d: dp.random_uniform(d, 3, out=d.empty((6,))[::2]), "out", "C order"),
        (lambda d: dp.random.Generator(0.5, device=d), "seed", "a whole number"),
        (lambda d: dp.random.Generator(1, "sobol32", device=d), "seed", "None: SOBOL32 has no seed"),
        (lambda d: dp.random.Generator(1, device=d).random(5, "c64"), "dtype", "f32 or f64"),
        (lambda d: dp.random.Generator(bit_generator="sobol32", device=d).spawn(2), "bit_generator", "offset="),
    ],
)
def test_a_refusal_names_operand_and_expected(call, operand, expected, dev):
    with pytest.raises(BadRequest) as caught:
        call(dev)
    assert caught.value.operand == operand
    assert expected in caught.value.expected + caught.value.hint


def test_what_no_row_takes_says_what_would_do(dev):
    with pytest.raises(NoRow, match="needs bit_generator PHILOX4_32_10, has XORWOW"):
        dp.random_exponential(dev, 3, bit_generator="xorwow")
    with pytest.raises(NoRow, match="needs u32 of XORWOW, has u64"):
        dp.random_bits(dev, 3, bit_generator="xorwow", out_dtype="u64")


REFUSED = [("mt19937", "BEST"), *((name, "SEEDED") for name in ("mrg32k3a", "mtgp32", "mt19937", "philox"))]
REFUSED += [(name, "DYNAMIC") for name in ("xorwow", "mrg32k3a", "mtgp32", "mt19937", "philox")]


@pytest.mark.parametrize(("name", "ordering"), REFUSED)
def test_an_ordering_that_curand_has_not_on_the_host_is_refused(name, ordering, dev):
    with pytest.raises(NoRow, match=rf"needs ordering [\w, ]+(or|of) \w+, has (it of|{ordering})"):
        dp.random_bits(dev, 10, 3, bit_generator=name, ordering=ordering)


@pytest.mark.parametrize("ordering", ["DEFAULT", "BEST", "LEGACY", "SEEDED"])
@pytest.mark.parametrize(  # MT19937's states take ten seconds, MRG32K3A's three
    "name", ["xorwow", "mtgp32", "philox", pytest.param("mrg32k3a", marks=pytest.mark.exhaustive)]
)
def test_orderings_are_those_of_curands_host_generators(name, ordering, dev):
    if (name, ordering) in REFUSED:
        return
    made = dp.random_bits(dev, 5000, 3, bit_generator=name, ordering=ordering).numpy()
    kind = BitGenerator["PHILOX4_32_10" if name == "philox" else name.upper()]
    handle, right = curand.curandGenerator_t(), np.empty(5000, "u4")
    try:
        curand.curandCreateGeneratorHost(ctypes.byref(handle), curand.curandRngType_t(int(kind)))
    except LibraryNotFound as error:
        pytest.skip(str(error))
    curand.curandSetGeneratorOrdering(handle, getattr(curand.curandOrdering_t, f"CURAND_ORDERING_PSEUDO_{ordering}"))
    curand.curandSetPseudoRandomGeneratorSeed(handle, 3)
    curand.curandGenerate(handle, right.ctypes.data_as(ctypes.POINTER(ctypes.c_uint32)), 5000)
    curand.curandDestroyGenerator(handle)
    np.testing.assert_array_equal(made, right)
    part = dp.random_bits(dev, 100, 3, 4321, bit_generator=name, ordering=ordering).numpy()
    np.testing.assert_array_equal(part, right[4321:4421])


def test_seeded_numbers_are_others_than_the_default_ones(dev):
    one, other = (dp.random_bits(dev, 64, 3, bit_generator="xorwow", ordering=o).numpy() for o in ("seeded", "default"))
    assert (one == other).sum() == 1  # the first state is that of the seed in both


# -- Generator --------------------------------------------------------------------------------------------------------
def test_spawned_generators_are_the_same_from_the_same_seed_and_of_each_other_independent(dev):
    def spawned():
        generator = dp.random.Generator(42, device=dev)
        children = [*generator.spawn(2), *generator.spawn(1)]
        return [generator, *children, *children[0].spawn(2)]

    numbers = [generator.bits(1000).numpy() for generator in spawned()]
    again = [generator.bits(1000).numpy() for generator in spawned()]
    np.testing.assert_array_equal(numbers, again)
    assert len(np.unique(np.concatenate(numbers))) > 5990
    states = [child.generate_state(1, np.uint64)[0] for child in np.random.SeedSequence(42).spawn(3)]
    assert [generator.seed for generator in spawned()[1:4]] == states


def test_a_generator_says_which_library_it_uses_and_where_it_is(dev):
    generator = dp.random.Generator(42, device="host")
    assert generator.library_used == "curand"
    assert dp.random.Generator(1, device=dev, library="own").library_used == "numpy"
    generator.random((3, 5))
    assert generator.offset == 15
    assert "PHILOX4_32_10, seed=42, offset=15" in repr(generator)
    x = dev.empty((2, 4), "f64")
    assert generator.random(out=x) is x
    assert dp.random.Generator(device=dev).seed != dp.random.Generator(device=dev).seed
    assert generator.standard_normal().shape == ()


def test_a_generator_goes_on_from_a_state(dev):
    generator = dp.random.Generator(42, device=dev)
    generator.random(7)
    generator.bits(5, "u64")
    generator.spawn(2)
    state = json.loads(json.dumps(generator.state))
    other = dp.random.Generator(1, device=dev)
    other.state = state
    np.testing.assert_array_equal(other.bits(3, "u64").numpy(), generator.bits(3, "u64").numpy())
    assert other.spawn(1)[0].seed == generator.spawn(1)[0].seed
    with pytest.raises(BadRequest, match="the state of PHILOX4_32_10; expected a state of XORWOW"):
        dp.random.Generator(1, "xorwow", device=dev).state = generator.state
    with pytest.raises(BadRequest, match="state: got 3"):
        other.state = 3


def test_arrays_of_torch_and_numpy_are_filled(dev):
    torch = pytest.importorskip("torch")
    generator = dp.random.Generator(3, device=dev)
    x, y = torch.empty(5, dtype=torch.float64), np.empty(4, np.int64)
    assert generator.random(out=x) is x
    assert generator.integers(0, 5, out=y) is y
    again = dp.random.Generator(3, device=dev)
    np.testing.assert_array_equal(x.numpy(), again.random(5, torch.float64).numpy())
    np.testing.assert_array_equal(y, again.integers(0, 5, 4).numpy())
    assert generator.multinomial(5, torch.tensor([0.2, 0.8], dtype=torch.float64)).numpy().sum() == 5


def test_without_curand_the_host_has_numpys_philox(dev, monkeypatch):
    from cudabind.errors import LibraryNotFound
    from dispatch.libraries.curand import generators

    right = dp.random.Generator(5, device=dev).random(100).numpy()

    def missing(_):
        raise LibraryNotFound("libcurand.so.10 is not there")

    monkeypatch.setattr(generators, "HostGenerator", missing)
    generators._on_host.clear()
    dev.forget() if hasattr(dev, "forget") else dev.executor().forget()
    try:
        generator = dp.random.Generator(5, device=dev)
        assert generator.library_used == "numpy"
        np.testing.assert_array_equal(generator.random(100).numpy(), right)
        with pytest.raises(NoRow, match=r"cuRAND is not installed: libcurand\.so"):
            dp.random.Generator(5, "xorwow", device=dev).random(3)
    finally:
        dev.executor().forget()


def test_statistics_of_reference_are_reachable(dev):
    """The reference gives what the host's rows give."""
    request = dp.RandomUniformRequest(dev, 10, 3)
    np.testing.assert_array_equal(reference(request)["out"], dp.run(request).numpy())


def test_a_generator_that_does_not_begin_anew_is_refused_on_a_gpu():
    """By the rows of cuRAND, which alone have it."""
    rows = [row for row in dp.TABLE if row.library == "curand" and row.min_arch != HOST]
    for name, is_host, refused in (("MTGP32", False, True), ("MTGP32", True, False), ("MT19937", False, False)):
        request = SimpleNamespace(device=SimpleNamespace(is_host=is_host), generator=BitGenerator[name])
        assert bool(restarts_sequence(request)) == refused
    assert rows
    assert all(restarts_sequence in row.rules for row in rows)
