"""cuDNN's backend: a graph of operations, the heuristic's engine for it, and a plan that runs it, by descriptors alone.

Each object of the backend is a descriptor whose attributes are set and which is then finalized. First a convolution,
then a matrix product that is fused with a bias and a relu.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int64

import numpy as np
import pytest

from cudabind.errors import CudnnError
from cudabind.sys import cudnn

LIBRARIES = ("cudnn",)
KIND = cudnn.cudnnBackendDescriptorType_t
ATTR = cudnn.cudnnBackendAttributeName_t
TYPE = cudnn.cudnnBackendAttributeType_t
HALF, FLOAT = cudnn.cudnnDataType_t.CUDNN_DATA_HALF, cudnn.cudnnDataType_t.CUDNN_DATA_FLOAT
C_TYPES = {
    TYPE.CUDNN_TYPE_HANDLE: cudnn.cudnnHandle_t,
    TYPE.CUDNN_TYPE_BACKEND_DESCRIPTOR: cudnn.cudnnBackendDescriptor_t,
    TYPE.CUDNN_TYPE_INT64: c_int64,
    TYPE.CUDNN_TYPE_FLOAT: ctypes.c_float,
    TYPE.CUDNN_TYPE_BOOLEAN: ctypes.c_bool,
    TYPE.CUDNN_TYPE_VOID_PTR: ctypes.c_void_p,
}  # the others are enums


@pytest.fixture
def handle(gpu):
    return gpu.make(cudnn.cudnnHandle_t, cudnn.cudnnCreate, cudnn.cudnnDestroy)


@pytest.fixture
def describe(gpu):
    """`describe(kind, NAME=(type, values…), …)`: a finalized descriptor, attributes without CUDNN_ATTR_."""

    def make(kind, **attributes):
        made = begin(gpu, kind)
        for name, (type_name, *values) in attributes.items():
            kind_of = TYPE[f"CUDNN_TYPE_{type_name}"]
            array = (C_TYPES.get(kind_of, ctypes.c_int) * len(values))(*values)
            cudnn.cudnnBackendSetAttribute(made, ATTR[f"CUDNN_ATTR_{name}"], kind_of, len(values), array)
        cudnn.cudnnBackendFinalize(made)
        return made

    return make


def begin(gpu, kind):
    return gpu.make(
        cudnn.cudnnBackendDescriptor_t,
        lambda made: cudnn.cudnnBackendCreateDescriptor(kind, made),
        cudnn.cudnnBackendDestroyDescriptor,
    )


@pytest.fixture
def tensor(describe):
    def make(uid, shape, strides, dtype=HALF, virtual=False):
        return describe(
            KIND.CUDNN_BACKEND_TENSOR_DESCRIPTOR,
            TENSOR_DATA_TYPE=("DATA_TYPE", dtype),
            TENSOR_DIMENSIONS=("INT64", *shape),
            TENSOR_STRIDES=("INT64", *strides),
            TENSOR_UNIQUE_ID=("INT64", uid),
            TENSOR_BYTE_ALIGNMENT=("INT64", 16),
            TENSOR_IS_VIRTUAL=("BOOLEAN", virtual),
        )

    return make


@pytest.fixture
def pointwise(describe):
    def make(mode, **operands):
        desc = describe(
            KIND.CUDNN_BACKEND_POINTWISE_DESCRIPTOR,
            POINTWISE_MODE=("POINTWISE_MODE", cudnn.cudnnPointwiseMode_t[f"CUDNN_POINTWISE_{mode}"]),
            POINTWISE_MATH_PREC=("DATA_TYPE", FLOAT),
        )
        return describe(
            KIND.CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR,
            OPERATION_POINTWISE_PW_DESCRIPTOR=("BACKEND_DESCRIPTOR", desc),
            **{f"OPERATION_POINTWISE_{name}": ("BACKEND_DESCRIPTOR", operand) for name, operand in operands.items()},
        )

    return make


@pytest.fixture
def execute(gpu, handle, describe):
    """Run a graph of operations on memory by unique id, with the first engine that takes it."""

    def configurations(graph, mode):
        heuristic = describe(
            KIND.CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR,
            ENGINEHEUR_OPERATION_GRAPH=("BACKEND_DESCRIPTOR", graph),
            ENGINEHEUR_MODE=("HEUR_MODE", mode),
        )
        found = [begin(gpu, KIND.CUDNN_BACKEND_ENGINECFG_DESCRIPTOR) for _ in range(16)]
        array, count = (cudnn.cudnnBackendDescriptor_t * len(found))(*found), c_int64()
        cudnn.cudnnBackendGetAttribute(
            *(heuristic, ATTR.CUDNN_ATTR_ENGINEHEUR_RESULTS, TYPE.CUDNN_TYPE_BACKEND_DESCRIPTOR),
            *(len(found), byref(count), array),
        )
        return found[: count.value]

    def plan(graph):
        refusals = []
        for mode in ("CUDNN_HEUR_MODE_A", "CUDNN_HEUR_MODE_FALLBACK"):
            for config in configurations(graph, cudnn.cudnnBackendHeurMode_t[mode]):
                try:
                    return describe(
                        KIND.CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR,
                        EXECUTION_PLAN_HANDLE=("HANDLE", handle),
                        EXECUTION_PLAN_ENGINE_CONFIG=("BACKEND_DESCRIPTOR", config),
                    )
                except CudnnError as refused:  # noqa: PERF203 - the heuristic may propose what cannot run: try the next
                    refusals.append(str(refused))
        raise AssertionError(f"no engine takes this graph: {refusals}")

    def run(operations, memory):
        graph = describe(
            KIND.CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR,
            OPERATIONGRAPH_HANDLE=("HANDLE", handle),
            OPERATIONGRAPH_OPS=("BACKEND_DESCRIPTOR", *operations),
        )
        chosen, size = plan(graph), c_int64()
        cudnn.cudnnBackendGetAttribute(
            *(chosen, ATTR.CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, TYPE.CUDNN_TYPE_INT64),
            *(1, byref(c_int64()), byref(size)),
        )
        pack = describe(
            KIND.CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR,
            VARIANT_PACK_UNIQUE_IDS=("INT64", *memory),
            VARIANT_PACK_DATA_POINTERS=("VOID_PTR", *(array.ptr for array in memory.values())),
            VARIANT_PACK_WORKSPACE=("VOID_PTR", gpu.workspace(size)),
        )
        cudnn.cudnnBackendExecute(handle, chosen, pack)

    return run


def channels_last(shape):
    """The strides of an NCHW shape whose memory is NHWC."""
    _, c, h, w = shape
    return h * w * c, 1, w * c, c


def test_a_convolution_with_padding_and_strides(gpu, describe, tensor, execute, rng, close):
    n, c, h, w, k = 2, 16, 13, 9, 24
    x, f = rng.standard_normal((n, h, w, c)).astype(np.float16), rng.standard_normal((k, 3, 3, c)).astype(np.float16)
    pad, step = (1, 1), (2, 1)
    out = (n, k, (h - 1) // 2 + 1, w)
    convolution = describe(
        KIND.CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR,
        CONVOLUTION_COMP_TYPE=("DATA_TYPE", FLOAT),
        CONVOLUTION_CONV_MODE=("CONVOLUTION_MODE", cudnn.cudnnConvolutionMode_t.CUDNN_CROSS_CORRELATION),
        CONVOLUTION_SPATIAL_DIMS=("INT64", 2),
        CONVOLUTION_PRE_PADDINGS=("INT64", *pad),
        CONVOLUTION_POST_PADDINGS=("INT64", *pad),
        CONVOLUTION_DILATIONS=("INT64", 1, 1),
        CONVOLUTION_FILTER_STRIDES=("INT64", *step),
    )
    operands = {"X": (n, c, h, w), "W": (k, c, 3, 3), "Y": out}
    operation = describe(
        KIND.CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
        OPERATION_CONVOLUTION_FORWARD_CONV_DESC=("BACKEND_DESCRIPTOR", convolution),
        OPERATION_CONVOLUTION_FORWARD_ALPHA=("FLOAT", 1),
        OPERATION_CONVOLUTION_FORWARD_BETA=("FLOAT", 0),
        **{
            f"OPERATION_CONVOLUTION_FORWARD_{name}": ("BACKEND_DESCRIPTOR", tensor(uid, shape, channels_last(shape)))
            for uid, (name, shape) in enumerate(operands.items(), 1)
        },
    )
    d_y = gpu.poisoned((n, out[2], out[3], k), np.float16)
    execute([operation], {1: gpu.array(x), 2: gpu.array(f), 3: d_y})

    padded = np.pad(x.astype(np.float64), ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))[:, ::2]
    expected, size = (
        np.einsum("nhwcrs,krsc->nhwk", a, b) for a, b in ((windows, f), (np.abs(windows), np.abs(f).astype(np.float64)))
    )
    terms = 9 * c
    bound = 2 * terms * np.finfo(np.float32).eps * size + np.finfo(np.float16).eps * np.abs(expected)
    close(d_y.numpy(), expected, bound)


def test_a_product_with_bias_and_relu_in_one_graph(gpu, describe, tensor, pointwise, execute, rng, product):
    batch, m, n, k = 3, 40, 56, 72
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((batch, m, k), (batch, k, n)))
    bias = rng.standard_normal((1, 1, n)).astype(np.float16)
    t_a, t_b = tensor(1, a.shape, (m * k, k, 1)), tensor(2, b.shape, (k * n, n, 1))
    t_bias, t_out = tensor(3, bias.shape, (n, n, 1)), tensor(4, (batch, m, n), (m * n, n, 1))
    # What passes from one operation to the next stays in registers: virtual, and in f32.
    passed = [tensor(uid, (batch, m, n), (m * n, n, 1), FLOAT, virtual=True) for uid in (5, 6)]
    matmul = describe(
        KIND.CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR,
        OPERATION_MATMUL_DESC=(
            "BACKEND_DESCRIPTOR",
            describe(KIND.CUDNN_BACKEND_MATMUL_DESCRIPTOR, MATMUL_COMP_TYPE=("DATA_TYPE", FLOAT)),
        ),
        OPERATION_MATMUL_ADESC=("BACKEND_DESCRIPTOR", t_a),
        OPERATION_MATMUL_BDESC=("BACKEND_DESCRIPTOR", t_b),
        OPERATION_MATMUL_CDESC=("BACKEND_DESCRIPTOR", passed[0]),
    )
    add = pointwise("ADD", XDESC=passed[0], BDESC=t_bias, YDESC=passed[1])
    relu = pointwise("RELU_FWD", XDESC=passed[1], YDESC=t_out)
    d_out = gpu.poisoned((batch, m, n), np.float16)
    execute([matmul, add, relu], {1: gpu.array(a), 2: gpu.array(b), 3: gpu.array(bias), 4: d_out})
    product(d_out.numpy(), a, b, beta=1, c=bias, compute=np.float32, then=lambda x: np.maximum(x, 0))


def test_an_operation_without_its_operands_is_refused(describe):
    with pytest.raises(CudnnError) as caught:
        describe(KIND.CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)
    assert caught.value.name.startswith("CUDNN_STATUS_BAD_PARAM")
    assert caught.value.function == "cudnnBackendFinalize"
