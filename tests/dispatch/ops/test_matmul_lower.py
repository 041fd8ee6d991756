"""The lowering, proven without a GPU: what a column-major BLAS would compute from a Problem, on the very memory.

`blas` below knows only the Problem, the addresses and cuBLASLt's documented epilogues; it stays inside the memory of
every tensor, and its results must be those of the row-major reference.
"""

import ctypes
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

import dispatch as dp
from dispatch import MatmulRequest, device
from dispatch.keys import F64, Compute, Epilogue
from dispatch.ops.matmul.bounds import Check
from dispatch.ops.matmul.cases import cases
from dispatch.ops.matmul.lower import lower

E = Epilogue
NOTHING = (None, None)
A, B, C, BIAS, AUX, BGRAD, D = range(7)
F64_ROW = replace(next(row for row in dp.TABLE.of("matmul") if row.dtypes == (F64,) * 4), rules=())
HOST = None


@pytest.fixture(autouse=True)
def _live_host():
    """Each test has the host that is live now: other tests close it."""
    global HOST
    HOST = device("host")


class Memory:
    """The storage of one tensor, addressed as a BLAS does: from a pointer, by element; outside it is an error."""

    def __init__(self, tensor, dtype=None):
        storage = tensor.storage
        self.base, self.ptr = storage.base, tensor.ptr
        window = (ctypes.c_uint8 * storage.nbytes).from_address(storage.base)
        self.bytes = np.frombuffer(window, np.uint8)
        self.dtype = np.dtype(dtype or tensor.dtype.numpy)

    def at(self, offset, index):
        """Where elements `index` from `offset` bytes behind the pointer are."""
        start = self.ptr + offset - self.base
        assert start % self.dtype.itemsize == 0
        where = start // self.dtype.itemsize + np.asarray(index)
        if where.size:
            assert where.min() >= 0
            assert (where.max() + 1) * self.dtype.itemsize <= self.bytes.size
        return where

    def read(self, offset, index):
        return self.bytes.view(self.dtype)[self.at(offset, index)]

    def write(self, offset, index, values):
        self.bytes.view(self.dtype)[self.at(offset, index)] = values


def places(matrix, batch):
    """Element indices of a column-major matrix, (rows, cols)."""
    assert matrix.ld >= max(matrix.rows, 1)
    rows, cols = np.arange(matrix.rows)[:, None], np.arange(matrix.cols)[None, :]
    return batch * matrix.batch_stride + cols * matrix.ld + rows


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_slope(x):
    step = 1e-6
    return (gelu(x + step) - gelu(x - step)) / (2 * step)


def mask_places(problem, batch, shape):
    """Byte and bit of each element in a ReLU mask of leading dimension `aux_ld` bits."""
    bit = batch * problem.aux_stride + np.arange(shape[1])[None, :] * problem.aux_ld + np.arange(shape[0])[:, None]
    return bit // 8, bit % 8


def blas(lowered, request, outputs):
    """cublasLtMatmul for each of the request's calls, in float64."""
    problem = lowered.problem
    tensors = [request.a, request.b, request.c, request.bias, request.aux, request.bgrad, request.out]
    for index, name in ((AUX, "aux"), (BGRAD, "bgrad"), (D, "out")):
        tensors[index] = outputs.get(name, tensors[index])
    if tensors[C] is None:
        tensors[C] = tensors[D]
    memories = [None if tensor is None else Memory(tensor) for tensor in tensors]
    first, second = (B, A) if lowered.exchanged else (A, B)
    for offsets, batch in itertools.product(lowered.offsets, range(problem.batch)):
        operands = []
        for which, matrix, transposed in ((first, problem.a, problem.op_a), (second, problem.b, problem.op_b)):
            if lowered.empty_k:
                assert matrix.batch_stride == 0
                assert offsets[which] == 0, "the zeros that stand for an empty operand have no batches"
                values = np.zeros((matrix.rows, matrix.cols))
            else:
                values = memories[which].read(offsets[which], places(matrix, batch))
            operands.append(values.T if transposed else values)
        one(problem, request, memories, offsets, batch, operands)


def one(problem, request, memories, offsets, batch, operands):
    """One product of the batch, with its epilogue in cuBLASLt's terms: bias along the rows."""
    epilogue = E(problem.epilogue)
    left, right = operands
    assert left.shape[1] == right.shape[0]
    x = float(np.asarray(request.alpha).reshape(())) * (left @ right)
    assert x.shape == (problem.d.rows, problem.d.cols) == (problem.c.rows, problem.c.cols)
    beta = float(np.asarray(request.beta).reshape(()))
    if beta:
        x = x + beta * memories[C].read(offsets[C], places(problem.c, batch))
    vector = np.arange(x.shape[0]) + batch * problem.bias_stride
    if epilogue.adds_bias:
        x = x + memories[BIAS].read(offsets[BIAS], vector)[:, None]
    if epilogue.writes_aux or epilogue.is_gradient:
        x = with_aux(problem, epilogue, memories[AUX], offsets[AUX], batch, x)
    if not epilogue.is_gradient:
        x = np.maximum(x, 0) if epilogue.activation == "relu" else gelu(x) if epilogue.activation else x
    if epilogue in (E.DRELU_BGRAD, E.DGELU_BGRAD):
        memories[BGRAD].write(offsets[BGRAD], vector, x.sum(axis=1))
    if epilogue is E.BGRADA:
        memories[BGRAD].write(offsets[BGRAD], vector, left.sum(axis=1))
    if epilogue is E.BGRADB:
        places_of_columns = np.arange(x.shape[1]) + batch * problem.bias_stride
        memories[BGRAD].write(offsets[BGRAD], places_of_columns, right.sum(axis=0))
    memories[D].write(offsets[D], places(problem.d, batch), x)


def with_aux(problem, epilogue, memory, offset, batch, x):
    """Store the forward pass's aux, or apply the backward pass's; gives the x that goes on."""
    if epilogue.activation == "gelu":
        rows, columns = np.arange(x.shape[0])[:, None], np.arange(x.shape[1])[None, :]
        index = batch * problem.aux_stride + columns * problem.aux_ld + rows
        if epilogue.is_gradient:
            return x * gelu_slope(memory.read(offset, index))
        memory.write(offset, index, x)
        return x
    assert problem.aux_ld % 128 == 0
    byte, bit = mask_places(problem, batch, x.shape)
    if epilogue.is_gradient:
        return np.where(memory.read(offset, byte) >> bit & 1, x, 0.0)
    for value in range(8):  # one bit of every byte at a time, for a byte holds eight columns
        here = bit == value
        old = memory.read(offset, byte[here])
        memory.write(offset, byte[here], (old & ~np.uint8(1 << value)) | ((x[here] > 0).astype(np.uint8) << value))
    return x


def check(case_check):
    request = case_check.request
    outputs = HOST.executor().outputs(request)
    if 0 not in request.shape:
        blas(lower(request, Compute.COMPUTE_64F), request, outputs)
        loose = {name: bound + 1e-7 for name, bound in case_check.allowed.items()}  # slopes are by differences here
        Check(case_check.name, request, case_check.expected, loose, case_check.written).verify(request.result(outputs))


@pytest.mark.parametrize("case", cases(F64_ROW), ids=lambda case: case.id)
def test_every_case_is_lowered_to_what_a_blas_computes(case, rng):
    case_check = case.check(HOST, rng)
    check(case_check)
    assert case_check.expected["out"].shape == case_check.request.shape


def layouts(rng, shape, *, batch=()):
    """A tensor of this shape in a random layout that a request takes: order, padding, offset, batches."""
    rows, cols = shape
    dims = [1 if rng.random() < 0.25 else extent for extent in batch]
    dims = dims[int(rng.integers(0, len(dims) + 1)) :] if rng.random() < 0.3 else dims
    columns = bool(rng.integers(2))
    lines, extent = (cols, rows) if columns else (rows, cols)
    pad, skip = int(rng.integers(0, 4)), int(rng.integers(0, 3))
    order = rng.permutation(len(dims))
    buffer = HOST.array(rng.standard_normal((*(dims[axis] for axis in order), lines + skip, extent + pad)))
    inner = buffer[..., skip:, :extent] if rng.integers(2) else buffer[..., :lines, pad:]
    if len(dims) == 2 and list(order) == [1, 0]:  # batch axes that are stored in the other order
        views = HOST.view(inner)
        strides = [stride // 8 for stride in views.swapaxes(0, 1).strides]
        inner = type(inner)(
            inner.storage, inner.ptr, HOST.layout(inner.dtype, (*dims, *inner.shape[2:]), tuple(strides), inner.ptr)
        )
    return inner.mT if columns else inner


SHAPES = [1, 2, 3, 5, 8, 13]


def random_request(rng):
    """A strided, batched, broadcast request with a random epilogue."""
    m, n, k = (int(rng.choice(SHAPES)) for _ in range(3))
    batch = tuple(int(rng.integers(1, 4)) for _ in range(int(rng.integers(0, 3))))
    a, b = layouts(rng, (m, k), batch=batch), layouts(rng, (k, n), batch=batch)
    shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    epilogue = E(rng.choice([int(e) for e in E]))
    fields = {"a": a, "b": b, "epilogue": epilogue, "alpha": float(rng.choice([1.0, -0.5]))}
    if rng.integers(2):
        c = HOST.array(rng.standard_normal((*shape, m, n + 2)))[..., 1 : n + 1]
        fields |= {"c": c, "beta": 0.5}
    if epilogue.adds_bias:
        fields["bias"] = HOST.array(rng.standard_normal((*(shape if rng.integers(2) else ()), n)))
    if epilogue.is_gradient:
        mask = epilogue.activation == "relu"
        width = 16 * math.ceil(n / 128) if mask else n
        values = rng.integers(0, 256, (*shape, m, 16 * math.ceil(width / 16) + 16))
        fields["aux"] = HOST.array(values if mask else values / 64 - 2, "u8" if mask else "f64")[..., :width]
    if rng.integers(2):
        fields["out"] = HOST.array(np.full((*shape, m + 1, n + 3), np.nan))[..., :m, :n]
    return MatmulRequest(**fields)


@pytest.mark.parametrize("seed", range(300))
def test_random_strided_requests_are_lowered_to_what_a_blas_computes(seed, rng):
    request = random_request(np.random.default_rng([seed, int(rng.integers(2**31))]))
    case_check = Check.of(request.describe(), request, Compute.COMPUTE_64F, ())
    check(case_check)
    assert case_check.expected["out"].size


def batched(rng, dims, inner, dtype="f64", *, padding=0, backward=True):
    """A view (*dims, *inner) of random numbers whose batch axes may have gaps, or run backward through memory."""
    gaps = [int(rng.integers(0, 2)) * int(rng.integers(1, 3)) for _ in dims]
    between = [extent + int(rng.random() < 0.3) for extent in inner[:-1]]
    room = (*(extent + gap for extent, gap in zip(dims, gaps, strict=True)), *between, inner[-1] + padding)
    values = rng.integers(0, 256, room) if dtype == "u8" else rng.standard_normal(room)
    steps = [slice(None, None, -1) if backward and rng.random() < 0.3 else slice(None) for _ in dims]
    view = HOST.array(values, dtype)[tuple(slice(0, extent) for extent in dims)]
    return view[(*steps, *(slice(0, extent) for extent in inner))]


def request_of_a_batch(rng):
    """A batch of square products that share B now and then, with vectors and a second matrix laid out on their own."""
    m = n = k = int(rng.choice([2, 3, 8]))
    n = n if rng.integers(3) else int(rng.choice([1, 4, 16]))
    dims = tuple(int(rng.integers(1, 4)) for _ in range(int(rng.integers(1, 4))))
    epilogue = E(rng.choice([int(e) for e in E]))

    def matrix(rows, cols, *, columns, shared=False):
        own = () if shared else dims
        made = batched(rng, own, (cols, rows) if columns else (rows, cols), backward=False)
        return made.mT if columns else made

    in_columns = epilogue in (E.NONE, E.RELU, E.GELU) and not rng.integers(3)
    a = matrix(m, k, columns=not rng.integers(3))
    fields = {"a": a, "b": matrix(k, n, columns=bool(rng.integers(2)), shared=bool(rng.integers(3)))}
    if rng.integers(2):
        fields["out"] = matrix(m, n, columns=in_columns)
        fields |= {"c": matrix(m, n, columns=in_columns), "beta": -0.5} if rng.integers(2) else {}
    mask = epilogue.activation == "relu"
    width = 16 * math.ceil(n / 128) if mask else n
    if epilogue.is_gradient or (epilogue.writes_aux and rng.integers(2)):
        padding = -width % (16 if mask else 8) + int(rng.integers(2)) * 16
        fields["aux"] = batched(rng, dims, (m, width), "u8" if mask else "f64", padding=padding)
    if epilogue.adds_bias:
        fields["bias"] = batched(rng, dims if rng.integers(3) else (), (n,))
    if epilogue.writes_bgrad and rng.integers(3):
        fields["bgrad"] = batched(rng, dims, (m if epilogue is E.BGRADA else n,))
    return MatmulRequest(epilogue=epilogue, **fields)


@pytest.mark.parametrize("_", range(20))
def test_random_batches_are_lowered_to_what_a_blas_computes(_, rng):
    """Axes are joined, and a batch becomes one taller product, where every operand steps as that takes, and only there.

    Operands of which each lies otherwise: what joins for A and D need not for a bias, an aux or a bias gradient.
    """
    folded = joined = 0
    for _ in range(40):
        request = request_of_a_batch(rng)
        check(Check.of(request.describe(), request, Compute.COMPUTE_64F, ()))
        problem, offsets, *_ = lower(request, Compute.COMPUTE_64F)
        count = math.prod(request.batch)
        folded += count > 1 and problem.batch == len(offsets) == 1
        joined += len(request.batch) > 1 and problem.batch == count
    assert folded + joined, "no batch was folded and no axes were joined: they say nothing of either"


@pytest.mark.parametrize("batch", [(3,), (2, 3)])
def test_products_whose_bias_steps_back_are_called_one_by_one(batch, rng):
    """No document says that cuBLASLt takes a batch stride below 0."""
    a, b = (HOST.array(rng.standard_normal((*batch, *shape))) for shape in ((4, 5), (5, 7)))
    bias = HOST.array(rng.standard_normal((*batch, 7)))[..., ::-1, :]
    request = MatmulRequest(a=a, b=b, bias=bias, epilogue=E.BIAS)
    check(Check.of("back", request, Compute.COMPUTE_64F, ()))
    lowered = lower(request, Compute.COMPUTE_64F)
    assert (len(lowered.offsets), lowered.problem.batch, lowered.problem.bias_stride) == (math.prod(batch), 1, 0)
    assert [offsets[BIAS] for offsets in lowered.offsets][:3] == [0, -7 * 8, -14 * 8]


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_an_empty_sum_reads_no_operand(batch, rng):
    a, b = HOST.empty((*batch[:1], *(1,) * (len(batch) - 1), 4, 0), "f64"), HOST.empty((*batch, 0, 5), "f64")
    c = HOST.array(rng.standard_normal((*batch, 4, 5)))
    check(Check.of("empty", MatmulRequest(a=a, b=b, c=c), Compute.COMPUTE_64F, ()))
    assert lower(MatmulRequest(a=a, b=b, c=c), Compute.COMPUTE_64F).empty_k
