"""Every convolution row that this GPU can run, through all of its cases, with fresh numbers and poisoned outputs.

A case that a rule of its row refuses must raise NoRow with that reason.
"""

import numpy as np
import pytest

import dispatch
from dispatch.execute import installed
from dispatch.libraries.cudnn.handle import handle_of
from dispatch.ops.conv import Activation, ConvFwdRequest
from dispatch.ops.conv.cases import cases
from dispatch.row_check import check_row

ROWS = [row for row in dispatch.TABLE if row.op.startswith("conv_") and row.library == "cudnn"]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]


@pytest.fixture
def gpu():
    return dispatch.device("cuda:0")


def skip_unless_for(row, gpu):
    if not row.on(gpu.arch):
        pytest.skip(f"needs {row.min_arch}, this GPU is {gpu.arch}")


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_a_case_or_refuses_it_with_its_reason(row, case, gpu, rng):
    skip_unless_for(row, gpu)
    check_row(row, case, gpu, rng)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_repeated_request_is_right_each_time(row, gpu, rng):
    """The second run of the same addresses is recorded and the third is a replay; each reads what is there then."""
    skip_unless_for(row, gpu)
    case = next(case for case in cases(row) if case.name == "plain")
    check = case.check(gpu, rng)
    for _ in range(4):
        check.renew()
        check.verify(dispatch.run(check.request))


def test_tuning_keeps_the_result_and_is_remembered(gpu, rng, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDABIND_CACHE", str(tmp_path))
    installed.algorithms.cache_clear()  # an earlier test may have tuned, with another file
    x = gpu.array(rng.standard_normal((4, 14, 14, 64)), "f16")
    w = gpu.array(rng.standard_normal((64, 3, 3, 64)) / 24, "f16")
    nchw = [_channels_first(t) for t in (x, w)]
    plain = dispatch.conv_fwd(*nchw, pad=1).numpy().astype(np.float64)
    tuned = dispatch.conv_fwd(*nchw, pad=1, autotune=True, library="cudnn").numpy().astype(np.float64)
    assert np.abs(tuned - plain).max() <= 2.0**-8 * np.abs(plain).max()
    files = list(tmp_path.glob("autotune-*cudnn*.json"))
    assert len(files) == 1
    written = files[0].read_bytes()
    gpu.forget_plans()
    dispatch.conv_fwd(*nchw, pad=1, autotune=True, library="cudnn")  # taken from the file
    assert files[0].read_bytes() == written
    installed.algorithms.cache_clear()


def test_the_workspace_that_a_request_allows_is_kept_to(gpu, rng):
    x = gpu.array(rng.standard_normal((2, 32, 9, 9)), "f32")
    w = gpu.array(rng.standard_normal((32, 32, 3, 3)), "f32")
    expected = dispatch.conv_fwd(x, w, pad=1).numpy()
    again = dispatch.conv_fwd(x, w, pad=1, workspace=0).numpy()
    assert np.abs(again - expected).max() <= 1e-4 * np.abs(expected).max()


def test_a_deterministic_gradient_is_the_same_bit_for_bit(gpu, rng):
    dy, x = (gpu.array(rng.standard_normal((8, 32, 17, 17)), "f32") for _ in range(2))
    runs = [
        dispatch.conv_bwd_filter(dy, x, w_extents=(3, 3), pad=1, deterministic=True).numpy().tobytes() for _ in range(5)
    ]
    assert len(set(runs)) == 1


def test_the_transposed_convolution_undoes_the_extents(gpu, rng):
    x = gpu.array(rng.standard_normal((2, 16, 7, 9)), "f32")
    w = gpu.array(rng.standard_normal((16, 8, 4, 4)), "f32")
    up = dispatch.conv_transpose(x, w, stride=2, pad=1)
    assert up.shape == (2, 8, 14, 18)
    host = dispatch.device("host")
    expected = dispatch.conv_transpose(host.array(x.numpy()), host.array(w.numpy()), stride=2, pad=1).numpy()
    assert np.abs(up.numpy() - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("activation", [Activation.RELU_FWD, Activation.SWISH_FWD])
def test_against_torch(activation, rng):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x, w, bias = (rng.standard_normal(shape).astype(np.float16) for shape in ((2, 64, 28, 28), (32, 64, 3, 3), (32,)))
    w /= 24
    given = [torch.from_numpy(a).cuda() for a in (x, w, bias)]
    given[0], given[1] = (t.to(memory_format=torch.channels_last) for t in given[:2])
    then = {Activation.RELU_FWD: torch.relu, Activation.SWISH_FWD: torch.nn.functional.silu}[activation]
    expected = then(torch.nn.functional.conv2d(*given, padding=1, stride=2)).float().cpu().numpy()
    ours = [dispatch.from_dlpack(t) for t in given]
    got = dispatch.conv_fwd(ours[0], ours[1], bias=ours[2], pad=1, stride=2, activation=activation)
    assert np.abs(got.numpy().astype(np.float32) - expected).max() <= 2.0**-8 * np.abs(expected).max()


def _channels_first(tensor):
    """A tensor (N, spatial…, C) as (N, C, spatial…), in the same memory."""
    axes = (0, tensor.ndim - 1, *range(1, tensor.ndim - 1))
    shape, strides = ([given[axis] for axis in axes] for given in (tensor.shape, tensor.layout.strides))
    layout = tensor.device.layout(tensor.dtype, tuple(shape), tuple(strides), tensor.ptr)
    return dispatch.Tensor(tensor.storage, tensor.ptr, layout)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_workers_have_handles_of_their_own(isolation, rng):
    """Each worker makes its cuDNN handle and plans on its own stream, and takes them with it when it ends."""
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((2, 8, 9, 9), (4, 8, 3, 3))]
    host = dispatch.device("host")
    expected = dispatch.conv_fwd(*map(host.array, arrays), pad=1).numpy()
    for _ in range(2):
        with dispatch.Supervisor("cuda:0", streams=2, isolation=isolation) as supervisor:
            x, w = map(supervisor.device.array, arrays)
            futures = [supervisor.submit(ConvFwdRequest(x, w, pad=1)) for _ in range(6)]
            for future in futures:
                assert np.abs(future.result(timeout=60).numpy() - expected).max() <= 1e-4 * np.abs(expected).max()


def test_an_executor_s_handle_goes_as_the_executor_is_closed(rng):
    device = dispatch.device("cuda:0")
    executor = device.executor(device.stream())
    x, w = (device.array(rng.standard_normal(shape).astype(np.float32)) for shape in ((2, 8, 9, 9), (4, 8, 3, 3)))
    executor.run(ConvFwdRequest(x, w, pad=1))
    handle = handle_of(executor)
    assert handle.c_handle.value
    executor.close()
    assert not handle.c_handle.value
    handle.close()  # a second time does nothing
    assert np.isfinite(dispatch.conv_fwd(x, w, pad=1).numpy()).all()  # by the handle of another executor
