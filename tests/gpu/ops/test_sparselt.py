"""Structured matrices on the GPU: every row through its cases, large products, biases that move, the search, torch."""

import re
import subprocess
import sys
import warnings

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import HOST
from dispatch.ops import FAMILIES
from dispatch.ops.structured import rules
from dispatch.ops.structured.cases import cases
from dispatch.row_check import check_row

S = dp.structured
ROWS = [row for op in FAMILIES["structured"][1] for row in dp.TABLE.of(op) if row.min_arch != HOST]
DTYPES = ("f16", "bf16", "f32", "i8", "f8e4m3", "f8e5m2")
RELATIVE = {"f16": 2e-3, "bf16": 1e-2, "f32": 2e-3, "i8": 0, "f8e4m3": 1e-2, "f8e5m2": 1e-2}  # of the largest element


@pytest.fixture(autouse=True)
def there(gpu, skip_without):
    """All rows are of one library, of one version on."""
    if gpu.arch < 80:
        pytest.skip(f"needs sm_80 or newer, this GPU is {gpu.arch}")
    skip_without(ROWS[0])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_passes_its_cases(row, gpu, rng):
    if not row.on(gpu.arch):
        pytest.skip(f"needs {row.min_arch} to {row.max_arch or 'any'}, this GPU is {gpu.arch}")
    failed = []
    for case in cases(row):
        try:
            check_row(row, case, gpu, rng)
        except Exception as error:  # noqa: BLE001, PERF203  # whatever it is, the other cases are tried
            failed.append(f"{case.id}: {type(error).__name__}: {error}")
    assert not failed, "\n".join([f"{len(failed)} of {len(cases(row))} cases fail", *failed])


def drawn(rng, dtype, *shape):
    values = rng.integers(-9, 10, shape) if dtype == "i8" else rng.standard_normal(shape)
    return values.astype(dp.Dtype.of(dtype).numpy)


def computed(dtype):
    return {"compute": "tf32"} if dtype == "f32" else {}


def pruned(gpu, rng, dtype, *shape):
    """A structured matrix on the GPU, and in f64."""
    dense = S.prune(gpu.array(drawn(rng, dtype, *shape)))
    return dense, dense.numpy().astype("f8")


def close(found, expected, dtype):
    found = np.asarray(found).astype("f8")
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= RELATIVE[dtype] * np.abs(expected).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", ["strip", "tile"])
def test_a_large_matrix_is_pruned_checked_compressed_and_multiplied(dtype, algorithm, gpu, rng):
    dense = gpu.array(drawn(rng, dtype, 2048, 1024))
    assert not S.is_structured(dense)
    half = S.prune(dense, algorithm=algorithm)
    assert S.is_structured(half)
    before, after = dense.numpy().astype("f8"), half.numpy().astype("f8")
    assert ((after == 0) | (after == before)).all()
    group, kept = (2, 1) if dtype == "f32" else (4, 2)
    if algorithm == "strip":  # of equal magnitudes any may stay, so that the sums of what stays are told
        best = np.sort(np.abs(before).reshape(-1, group), axis=1)[:, -kept:].sum(1)
        np.testing.assert_allclose(np.abs(after).reshape(-1, group).sum(1), best, rtol=1e-6)
    else:
        assert S.is_structured(gpu.array(np.ascontiguousarray(half.numpy().T)))
    a = S.compress(half, validate=True)
    assert a.nbytes < 0.7 * dense.nbytes
    x = gpu.array(drawn(rng, dtype, 512, 1024))
    expected = x.numpy().astype("f8") @ after.T
    close(S.linear(x, a, **computed(dtype)).numpy(), expected, dtype)
    close((a @ x.T).numpy(), expected.T, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_compressed_matrix_means_what_was_compressed(dtype, gpu, rng):
    half, exact = pruned(gpu, rng, dtype, 128, 256)
    found = S.compress(half).todense().numpy().astype("f8")
    np.testing.assert_allclose(found, exact, rtol=2.0**-10 if dtype == "f32" else 0)  # f32 is rounded to TF32


def test_repeated_calls_with_biases_and_operands_elsewhere(gpu, rng):
    """What is remembered, recorded and relocated is compared with each call's own product."""
    weights = [pruned(gpu, rng, "f16", 64, 128) for _ in range(3)]
    compressed = [S.compress(half) for half, _ in weights]
    xs = [gpu.array(drawn(rng, "f16", 32, 128)) for _ in range(4)]
    biases = [gpu.array(drawn(rng, "f16", 64)) for _ in range(5)]
    for turn in range(150):
        i, j, k = turn % 3, turn % 4, turn % 5
        found = S.linear(xs[j], compressed[i], biases[k], alpha=1 + turn % 2, activation="relu")
        product = (1 + turn % 2) * (xs[j].numpy().astype("f8") @ weights[i][1].T)
        close(found.numpy(), np.maximum(product + biases[k].numpy().astype("f8"), 0), "f16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [None, 3])
def test_a_bias_is_added_wherever_it_lies(dtype, batch, gpu, rng):
    """More biases than a plan keeps descriptors for, so that some are destroyed and made again."""
    half, exact = pruned(gpu, rng, dtype, *([batch] if batch else []), 64, 128)
    a, b = S.compress(half), gpu.array(drawn(rng, dtype, 32, 128)).T
    kind = "f4" if dtype == "i8" else half.dtype.numpy if dtype in ("f16", "bf16", "f32") else "f2"
    out = {"out_dtype": "i32" if dtype == "i8" else "f16"} if kind != half.dtype.numpy else {}
    biases = [gpu.array(rng.integers(-9, 10, (*half.shape[:-2], 64)).astype(kind)) for _ in range(20)]
    call = dp.prepare(dp.Matmul24Request(*a, b, bias=biases[0], **computed(dtype), **out))
    for turn in range(60):
        bias = biases[turn % 20 if turn < 40 else turn % 2]
        expected = exact @ b.numpy().astype("f8") + bias.numpy().astype("f8")[..., None]
        close(call(bias=bias).numpy(), expected, dtype)


@pytest.mark.parametrize("wrong", [None, 0, 1, 2])
def test_the_check_of_a_batch_answers_for_all_its_matrices(wrong, gpu):
    values = np.zeros((3, 32, 64), "f2")
    if wrong is not None:
        values[wrong, -1, -3:] = 1
    out = gpu.array(np.full(1, 0x5A5A5A5A, "i4"))
    for _ in range(3):
        assert dp.check_2_4(gpu.array(values), out=out).numpy().item() == (wrong is not None)


def test_a_prepared_call_runs_over_other_operands(gpu, rng):
    half, exact = pruned(gpu, rng, "bf16", 256, 512)
    a = S.compress(half)
    b = [gpu.array(drawn(rng, "bf16", 512, 128)) for _ in range(3)]
    call = dp.prepare(dp.Matmul24Request(*a, b[0]))
    for _ in range(3):
        for each in b:
            close(call(b=each).numpy(), exact @ each.numpy().astype("f8"), "bf16")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_search_finds_an_algorithm_that_is_right_and_remembers_it(dtype, gpu, rng, monkeypatch):
    from dispatch.libraries.cusparselt.calls import ProductPlan

    searches = []
    search = ProductPlan.search
    monkeypatch.setattr(ProductPlan, "search", lambda *given: searches.append(given) or search(*given))
    half, exact = pruned(gpu, rng, dtype, 512, 1024)
    a, x = S.compress(half), gpu.array(drawn(rng, dtype, 256, 1024))
    c = gpu.array(drawn(rng, "i8", 512, 256).astype(S.linear(x, a, **computed(dtype)).dtype.numpy))
    before = c.numpy()
    for _ in range(2):
        found = S.matmul(a, x.T, c=c.T.copy().T, beta=2.0, autotune=True, **computed(dtype))
        close(found.numpy(), exact @ x.numpy().astype("f8").T + 2 * before.astype("f8"), dtype)
    np.testing.assert_array_equal(c.numpy(), before)
    assert len(searches) <= 1, "what was found is remembered, from an earlier run as well"


def test_split_k_is_right_or_refused(gpu, rng):
    half, exact = pruned(gpu, rng, "f16", 64, 8192)
    a, x = S.compress(half), gpu.array(drawn(rng, "f16", 64, 8192))
    expected = x.numpy().astype("f8") @ exact.T
    taken = []
    for split in (1, -1, 2, 8):
        try:
            close(S.linear(x, a, split_k=split).numpy(), expected, "f16")
            taken.append(split)
        except NoRow as error:  # noqa: PERF203
            assert "rejects the request" in str(error)  # noqa: PT017  # on sm_90 it is 1 or -1
    assert 1 in taken


KERNELS = """
import sys
import numpy as np
import dispatch as dp
from dispatch.ops.structured import rules

rules.FAULTY_LIBRARIES = ()  # what is refused elsewhere is tried here
S, gpu, rng = dp.structured, dp.device("cuda:0"), np.random.default_rng(0)
half = S.prune(gpu.array(rng.standard_normal((256, 512)).astype("f2")))
a, x = S.compress(half), gpu.array(rng.standard_normal((128, 512)).astype("f2"))
exact = x.numpy().astype("f8") @ half.numpy().astype("f8").T
for config in range(int(sys.argv[1]), int(sys.argv[2])):
    print(config, end=" ", flush=True)  # the last that is named is the one that ended the process
    try:
        found = S.linear(x, a, config_id=config).numpy().astype("f8")
    except dp.errors.NoRow as error:
        print("refused", flush=True)
        continue
    off = np.abs(found - exact).max() / np.abs(exact).max()
    print("right" if off <= 2e-3 else f"off by {off}", flush=True)
"""


def spans(numbers):
    """Numbers in words: 0-3 5."""
    found = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return " ".join(str(low) if low == high else f"{low}-{high}" for low, high in found) or "none"


def test_every_kernel_of_a_product_is_right_or_refused(gpu, rng, monkeypatch):
    """In child processes, for a kernel that faults takes the context with it; the next child goes on behind it."""
    half, _ = pruned(gpu, rng, "f16", 256, 512)
    a, x = S.compress(half), gpu.array(drawn(rng, "f16", 128, 512))
    with monkeypatch.context() as there:
        there.setattr(rules, "FAULTY_LIBRARIES", ())
        with pytest.raises(NoRow, match=r"config_id 9999 is not below (\d+)") as raised:
            S.linear(x, a, config_id=9999)
    kernels = int(re.search(r"is not below (\d+)", str(raised.value))[1])
    assert kernels > 0
    said, last, start = {}, {}, 0
    while start < kernels:
        given = [sys.executable, "-c", KERNELS, str(start), str(kernels)]
        child = subprocess.run(given, capture_output=True, text=True, timeout=300, check=False)
        lines = [line.split(" ", 1) for line in child.stdout.splitlines()]
        assert lines, child.stderr[-2000:]
        said |= {int(config): words.strip() for config, words in lines}
        start = max(said) + 1
        if child.returncode:
            said[start - 1] = "faults"
            last[start - 1] = child.stderr.strip()[-300:]
        elif start < kernels:
            pytest.fail(f"a child ended early, behind kernel {start - 1} of {kernels}")
    kinds = {kind: [one for one, words in said.items() if words == kind] for kind in ("right", "refused", "faults")}
    off = {one: words for one, words in said.items() if words not in kinds}
    listed = "; ".join(f"{kind}: {spans(numbers)}" for kind, numbers in kinds.items())
    listed = f"{kernels} kernels of f16 by {a.made_by}: {listed}; wrong: {off or 'none'}"
    print(listed)
    assert kinds["right"], listed
    if rules.is_faulty(a.made_by):
        with pytest.raises(NoRow, match="illegal instruction"):
            S.linear(x, a, config_id=rules.SAFE_KERNELS)
        assert not [one for one in (*kinds["faults"], *off) if one < rules.SAFE_KERNELS], listed
        return
    assert not kinds["faults"], f"{listed}; the first: {next(iter(last.items()))}"
    assert not off, listed


def test_bytes_of_another_version_are_refused(gpu, rng):
    half, _ = pruned(gpu, rng, "f16", 32, 64)
    a, b = S.compress(half), gpu.array(drawn(rng, "f16", 64, 16))
    assert a.made_by.startswith("cusparseLt ")
    assert a.made_by.endswith(str(gpu.arch))
    with pytest.raises(BadRequest, match="compress the matrix again"):
        dp.matmul_2_4(a.data, a.form._replace(made_by="cusparseLt 0.1 sm_80"), b)
    with pytest.raises(BadRequest, match=r"form\.made_by: got 'host'"):
        dp.matmul_2_4(a.data, a.form._replace(made_by="host"), b)
    with pytest.raises(BadRequest, match="the size that the device's library reports"):
        dp.matmul_2_4(a.data[:-16], a.form, b)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "int8"])
def test_torch_s_tensors_are_operands_and_torch_s_own_product_is_the_same(kind, rng):
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, kind)
    dense = torch.from_numpy(rng.integers(-9, 10, (512, 1024))).to("cuda:0", dtype)
    x = torch.from_numpy(rng.integers(-9, 10, (256, 1024))).to("cuda:0", dtype)
    half = S.prune(dense)
    assert isinstance(half, torch.Tensor)
    a = S.compress(half, validate=True)
    found = S.linear(x, a)
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found.double(), x.double() @ half.double().T, rtol=1e-2, atol=1e-2)
    if kind != "int8":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The PyTorch API of SparseSemiStructuredTensor", UserWarning)
            theirs = torch.nn.functional.linear(x, torch.sparse.to_sparse_semi_structured(half))
        torch.testing.assert_close(found, theirs)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_supervisor_runs_them(isolation, rng):
    dense = drawn(rng, "f16", 64, 128)
    with dp.Supervisor("cuda:0", streams=2, isolation=isolation) as sup:
        half = sup.submit(dp.Prune24Request(sup.device.array(dense))).result(60)
        request = dp.Compress24Request(half)
        data = sup.submit(request).result(60)
        form = request.form._replace(made_by=S.made_by(sup.device))
        b = sup.device.array(drawn(rng, "f16", 128, 32))
        futures = [sup.submit(dp.Matmul24Request(data, form, b, alpha=k)) for k in range(60)]
        product = half.numpy().astype("f8") @ b.numpy().astype("f8")
        for k, future in enumerate(futures):
            close(future.result(60).numpy(), k * product, "f16")
