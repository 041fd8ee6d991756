"""The lowering of requests for which it can be said by hand: orders, batches, scales, and what is told of alignment."""

import math

import numpy as np
import pytest

import dispatch as dp
from dispatch import MatmulRequest, Scales, device
from dispatch.device.storage import Storage
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import BF16, F8E4M3, F32, Arch, Compute, Epilogue, ScaleMode
from dispatch.ops.matmul.lower import lower
from dispatch.table.select import select

E = Epilogue
A, B, C, BIAS, AUX, BGRAD, D = range(7)
HOST = None


@pytest.fixture(autouse=True)
def _live_host():
    """Each test has the host that is live now: other tests close it."""
    global HOST
    HOST = device("host")


def test_a_row_major_product_exchanges_its_operands(rng):
    a, b = HOST.array(rng.standard_normal((3, 5))), HOST.array(rng.standard_normal((5, 7)))
    lowered = lower(MatmulRequest(a=a, b=b), Compute.COMPUTE_64F)
    problem = lowered.problem
    assert lowered.exchanged
    assert (problem.a.rows, problem.a.cols, problem.a.ld, problem.op_a) == (7, 5, 7, False)
    assert (problem.b.rows, problem.b.cols, problem.b.ld, problem.op_b) == (5, 3, 5, False)
    assert (problem.d.rows, problem.d.cols, problem.d.ld, problem.batch) == (7, 3, 7, 1)


def test_a_batch_that_shares_b_becomes_one_taller_product(rng):
    a, b = HOST.array(rng.standard_normal((4, 3, 5))), HOST.array(rng.standard_normal((5, 7)))
    problem = lower(MatmulRequest(a=a, b=b), Compute.COMPUTE_64F).problem
    assert (problem.batch, problem.d.cols, problem.b.cols) == (1, 12, 12)


def test_a_batch_axis_of_one_is_none(rng):
    a, b = HOST.array(rng.standard_normal((3, 1, 4, 5))), HOST.array(rng.standard_normal((3, 1, 5, 7)))
    lowered = lower(MatmulRequest(a=a, b=b), Compute.COMPUTE_64F)
    assert (len(lowered.offsets), lowered.problem.batch) == (1, 3)


def unsized(whole):
    """The memory of a tensor as another library's, of which nobody knows where it ends."""
    return Storage(whole.device, whole.ptr, 0, whole.storage.writer, lambda _: None, whole)


def test_rows_beyond_what_an_extent_can_be_stay_a_batch():
    """Layouts alone: lowering reads no memory."""
    m, k, count = 40_000, 8, 2**16
    small = HOST.zeros((k, k), "f64")
    layout = HOST.layout(small.dtype, (count, m, k), (m * k, k, 1), small.ptr)
    a = dp.Tensor(unsized(small), small.ptr, layout)
    problem = lower(MatmulRequest(a=a, b=small.mT), Compute.COMPUTE_64F).problem
    assert (problem.batch, problem.d.cols) == (count, m)


def test_factors_of_rows_belong_to_each_product_of_a_batch():
    a, b = HOST.zeros((3, 32, 32), "f8e4m3"), HOST.zeros((32, 16), "f8e4m3")
    scales = Scales(a=HOST.array(np.ones(32, np.float32)), a_mode=ScaleMode.OUTER_VEC_32F)
    problem = lower(MatmulRequest(a=a, b=b, scales=scales), Compute.COMPUTE_32F).problem
    assert (problem.batch, problem.d.cols) == (3, 32)


def test_batch_axes_that_do_not_join_become_calls_of_their_own(rng):
    a, b = HOST.array(rng.standard_normal((2, 1, 3, 5))), HOST.array(rng.standard_normal((1, 4, 5, 7)))
    lowered = lower(MatmulRequest(a=a, b=b), Compute.COMPUTE_64F)
    assert (len(lowered.offsets), lowered.problem.batch) == (2, 4)
    assert [offsets[A] for offsets in lowered.offsets] == [0, 3 * 5 * 8]


def test_scales_follow_their_operands_through_the_exchange():
    a, b = HOST.array(np.ones((32, 32)), "f8e4m3"), HOST.array(np.ones((32, 16)), "f8e4m3").mT.mT
    vector = HOST.array(np.ones(32, np.float32))
    scales = Scales(a=vector, a_mode=ScaleMode.OUTER_VEC_32F)
    problem = lower(MatmulRequest(a=a, b=b, scales=scales), Compute.COMPUTE_32F).problem
    assert (problem.a_scale_mode, problem.b_scale_mode) == (-1, ScaleMode.OUTER_VEC_32F)
    out = HOST.empty((16, 32), "bf16").mT
    problem = lower(MatmulRequest(a=a, b=b, scales=scales, out=out), Compute.COMPUTE_32F).problem
    assert (problem.a_scale_mode, problem.b_scale_mode) == (ScaleMode.OUTER_VEC_32F, -1)
    assert (problem.a.dtype, problem.d.dtype, problem.scale) == (F8E4M3.cuda, BF16.cuda, F32.cuda)


@pytest.mark.parametrize("epilogue", [E.BIAS, E.RELU_AUX, E.BGRADA])
def test_a_column_major_d_has_no_epilogue_along_its_rows(epilogue, rng):
    a = HOST.array(rng.standard_normal((8, 8)))
    fields = {"bias": HOST.zeros((8,), "f64")} if epilogue.adds_bias else {}
    request = MatmulRequest(a=a, b=a, out=HOST.zeros((8, 8), "f64").mT, epilogue=epilogue, **fields)
    with pytest.raises(BadRequest, match="row-major") as caught:
        lower(request, Compute.COMPUTE_64F)
    assert caught.value.operand == "out"


def test_c_and_out_have_one_order(rng):
    a, c = HOST.array(rng.standard_normal((8, 8))), HOST.zeros((8, 8), "f64").mT
    with pytest.raises(BadRequest, match="order"):
        lower(MatmulRequest(a=a, b=a, c=c), Compute.COMPUTE_64F)
    assert lower(MatmulRequest(a=a, b=a, c=c, out=HOST.zeros((8, 8), "f64").mT), Compute.COMPUTE_64F).exchanged is False


VECTORS = {
    "bias": dp.Epilogue.BIAS,
    "aux": dp.Epilogue.GELU_AUX,
    "bgrad": dp.Epilogue.DGELU_BGRAD,
}


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("skew", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_the_alignment_of_what_goes_with_an_epilogue_is_told(name, skew, batch):
    """cuBLASLt reads bias and aux in vectors where it may: of another address the GPU makes a fault."""
    host, m, n = dp.device("host"), 6, 10
    a, b = host.zeros((*batch, m, 4), "bf16"), host.zeros((*batch, 4, n), "bf16")
    shapes = {"bias": (n,), "aux": (*batch, m, n), "bgrad": (*batch, n)}
    fields = {}
    for one in {name, *(("aux",) if name == "bgrad" else ())}:
        whole = host.zeros((400,), "bf16")
        ptr = whole.ptr + 2 * (skew if one == name else 0)
        strides = {
            "bias": (1,),
            "aux": (m * 16, 16, 1)[-len(shapes["aux"]) :],
            "bgrad": (n, 1)[-len(shapes["bgrad"]) :],
        }
        fields[one] = dp.Tensor(whole.storage, ptr, host.layout(whole.dtype, shapes[one], strides[one], ptr))
    request = MatmulRequest(a, b, epilogue=VECTORS[name], **fields)
    problem = lower(request, dp.Compute.COMPUTE_32F).problem
    told = problem.aux_alignment if name == "aux" else problem.bias_alignment
    step = {"bias": 0, "aux": m * 16, "bgrad": n}[name] if batch else 0
    expected = np.gcd.reduce([256, 2 * skew, 2 * step])
    assert told == expected


def test_the_alignment_of_an_operand_holds_for_every_call_of_a_batch():
    """Two batch axes that do not merge are calls of their own, and begin where the strides say."""
    host = dp.device("host")
    a, b = host.zeros((2, 1, 3, 5), "bf16"), host.zeros((1, 3, 5, 7), "bf16")
    lowered = lower(MatmulRequest(a, b), dp.Compute.COMPUTE_32F)
    assert len(lowered.offsets) == 2
    problem = lowered.problem
    assert lowered.exchanged
    assert (problem.a.alignment, problem.b.alignment, problem.d.alignment) == (256, 2, 2)
    for place, matrix in ((0, problem.b), (1, problem.a), (6, problem.d)):
        assert all(offsets[place] % matrix.alignment == 0 for offsets in lowered.offsets)


@pytest.mark.parametrize("batch", [(65536, 65537), (2**31 - 1, 1, 2), (2, 2**30), (2**16, 2**15)], ids=str)
def test_no_request_has_more_products_than_cublaslt_can_count(batch):
    """It counts them in an int: of 2**32 + 65536 it would do 65536, and say nothing."""
    host = dp.device("host")
    whole, steps = host.zeros((64,), "bf16"), np.cumprod((1, *batch[:0:-1]), dtype=np.int64)[::-1].tolist()
    layout = host.layout(whole.dtype, (*batch, 1, 1), (*steps, 1, 1), whole.ptr)  # of memory that is not there
    a, b = dp.Tensor(unsized(whole), whole.ptr, layout), host.zeros((1, 1), "bf16")
    for operands in ((a, b), (b, a)):
        with pytest.raises(BadRequest, match=rf"{math.prod(batch)} products .* up to 2147483647"):
            MatmulRequest(*operands)


def outer(host, name, step, dtype, *, given=True):
    """A request of two batch axes that do not merge, two calls of three products, whose vectors are `step` apart."""
    m, n = 3, 5
    a, b = host.zeros((2, 1, m, 4), dtype), host.zeros((1, 3, 4, n), dtype)
    whole = host.zeros((2000,), dtype)

    def lay(*layout):
        return dp.Tensor(whole.storage, whole.ptr, host.layout(whole.dtype, *layout, whole.ptr))

    fields = {}
    if name != "bias":
        aux_step = step if name == "aux" else 3 * m * 8
        fields["aux"] = lay((2, 3, m, n), (aux_step, m * 8, 8, 1))
    if name != "aux" and given:
        fields[name] = lay((2, 3, n), (step, 8, 1)) if name == "bias" else host.zeros((2, 3, step), dtype)[..., :n]
    return MatmulRequest(a, b, epilogue=VECTORS[name] if name != "aux" else E.DGELU, reduced_precision=True, **fields)


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
@pytest.mark.parametrize("name", VECTORS)
def test_vectors_of_outer_products_are_aligned_or_refused(dtype, name):
    """Batch axes that do not merge are calls of their own: a vector must begin as the kernels want it at each."""
    host, item = dp.device("host"), dp.Dtype.of(dtype).itemsize
    for step in range(72, 90):  # of bgrad, 3 products further on
        request = outer(host, name, step, dtype)
        offsets = lower(request, Compute.COMPUTE_64F if dtype == "f64" else Compute.COMPUTE_32F).offsets
        place = {"bias": BIAS, "aux": AUX, "bgrad": BGRAD}[name]
        second = step * item * (3 if name == "bgrad" else 1)
        assert [each[place] for each in offsets] == [0, second]
        if second % 16:
            text = f"{name} at multiples of 16 bytes along the outer batch axis, has {math.gcd(second, 16)}"
            with pytest.raises(NoRow, match=text):
                select(request, Arch(90))
        else:
            assert select(request, Arch(90)).function == "cublasLtMatmul"


def test_a_bias_gradient_that_is_made_is_aligned_at_each_call():
    request = outer(dp.device("host"), "bgrad", 5, "bf16", given=False)
    assert select(request, Arch(90)).function == "cublasLtMatmul"
    assert request.unallocated()["bgrad"][1] == (24, 8, 1)
    offsets = lower(request, Compute.COMPUTE_32F).offsets
    assert [each[BGRAD] for each in offsets] == [0, 48]


def test_vectors_of_one_call_may_be_any_step_apart():
    """Along the inner axis the library knows the steps."""
    host = dp.device("host")
    for batch in ((3,), (2, 3), (2, 1, 3)):
        a, b, bias = (host.zeros(shape, "bf16") for shape in ((*batch, 5, 4), (4, 7), (*batch, 7)))
        request = MatmulRequest(a, b, bias=bias, epilogue=E.BIAS)
        assert len(lower(request, Compute.COMPUTE_32F).offsets) == 1
        assert select(request, Arch(90)).function == "cublasLtMatmul"


@pytest.mark.parametrize(("n", "found"), [(7, 2), (4, 8), (8, 16), (24, 16)])
def test_a_bias_that_steps_back_is_aligned_at_each_call_or_refused(n, found):
    host = dp.device("host")
    a, b, bias = (host.zeros(shape, "bf16") for shape in ((3, 5, 4), (4, n), (4, n)))
    # The first product's begins at a multiple of 16 bytes, wherever the others do.
    layout = host.layout(bias.dtype, (3, n), (-n, 1), at := -(-(bias.ptr + 4 * n) // 16) * 16)
    request = MatmulRequest(a, b, bias=dp.Tensor(bias.storage, at, layout), epilogue=E.BIAS)
    assert len(lower(request, Compute.COMPUTE_32F).offsets) == 3
    if found < 16:
        with pytest.raises(NoRow, match=f"bias at multiples of 16 bytes along the outer batch axis, has {found}"):
            select(request, Arch(90))
    else:
        assert select(request, Arch(90)).function == "cublasLtMatmul"


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize(
    ("dtype", "c_pitch", "d_pitch", "batch", "told"),
    [
        ("bf16", 8, 7, (), 2), ("bf16", 7, 8, (), 2), ("bf16", 8, 8, (), 256), ("bf16", 7, 7, (), 256),
        ("f32", 16, 17, (), 4), ("f32", 24, 32, (), 32), ("bf16", 16, 12, (3,), 8),
    ],
)  # fmt: skip
def test_c_and_d_that_lie_apart_otherwise_are_told_as_aligned_as_the_lesser(dtype, c_pitch, d_pitch, batch, told, beta):
    """cuBLASLt 13.1 looks at C's steps and stores D by them: a lesser D ended in a misaligned address, on an H200."""
    a, b = HOST.zeros((*batch, 6, 16), dtype), HOST.zeros((*batch, 16, 6), dtype)
    c, out = (HOST.zeros((*batch, 6, pitch), dtype)[..., :6] for pitch in (c_pitch, d_pitch))
    problem = lower(MatmulRequest(a=a, b=b, c=c, out=out, beta=beta), Compute.COMPUTE_32F).problem
    if beta:
        assert (problem.c.alignment, problem.d.alignment) == (told, told)
    else:  # nothing reads C: it is described as D is, and its address is not given
        assert problem.c == problem.d
