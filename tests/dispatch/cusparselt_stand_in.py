"""cuSPARSELt over memory of the host, by NumPy: plans run where no GPU is.

It is as strict as the library: arguments are counted and of their kinds, structs are those that were initialised and
not destroyed, at the addresses where they were then, extents, steps, alignments, dtypes and batches are those that go
together, and a plan is of a product whose descriptors are alive, from which none is made anew once it is destroyed.
Compressed matrices have the host's own layout. And as rude: workspace is overwritten, a search overwrites D, a plan
adds the bias that it was made with, a check writes 1 or nothing, and 0 times C is added to results of 16 bits of i8.
"""

import ctypes
import importlib.util
import weakref
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from cudabind.sys import cusparseLt as lt
from dispatch.core.precision import FP8_MAX
from dispatch.keys import BF16, F8E4M3, F8E5M2, F16, F32, I8, I32
from dispatch.libraries.cusparselt import calls, descriptors, handle
from dispatch.ops.structured import cusparselt as plans
from dispatch.ops.structured.form import group_of
from dispatch.ops.structured.layout import pack
from dispatch.ops.structured.reference import PruneAlgorithm, is_structured, kept_mask

spec = importlib.util.spec_from_file_location(
    "cusparselt_arguments", Path(__file__).with_name("cusparselt_arguments.py")
)
arguments = importlib.util.module_from_spec(spec)
spec.loader.exec_module(arguments)
FUNCTIONS, NOT_SUPPORTED, Function = arguments.FUNCTIONS, arguments.NOT_SUPPORTED, arguments.Function

spec = importlib.util.spec_from_file_location("cusparselt_matrices", Path(__file__).with_name("cusparselt_matrices.py"))
matrices = importlib.util.module_from_spec(spec)
spec.loader.exec_module(matrices)
PLACEHOLDER, address_of, memory_at = matrices.PLACEHOLDER, matrices.address_of, matrices.memory_at
array_at, Memory, MatrixSpec, turned = matrices.array_at, matrices.Memory, matrices.MatrixSpec, matrices.turned

DTYPES = {dtype.cuda: dtype for dtype in (F16, BF16, F32, I8, I32, F8E4M3, F8E5M2)}
ROW, COL = lt.cusparseOrder_t.CUSPARSE_ORDER_ROW, lt.cusparseOrder_t.CUSPARSE_ORDER_COL
INVALID_VALUE = 3
WORK = 4096
SUMS = lt.cusparseComputeType
# What the README of the library has: of A and B, C and D by the compute type.
KINDS = {(F16, F16, F16, 1), (F16, F16, F16, 2), (BF16, BF16, BF16, 2), (F32, F32, F32, 2)}
KINDS |= {(I8, out, out, 0) for out in (I8, I32, F16, BF16)}
KINDS |= {(a, out, out, 2) for a in (F8E4M3, F8E5M2) for out in (F16, BF16, F32)}
KINDS |= {(a, c, a, 2) for a in (F8E4M3, F8E5M2) for c in (F16, BF16)}
GELU = {(I8, I8), (F8E4M3, BF16), (F8E5M2, BF16), (F8E4M3, F8E4M3), (F8E5M2, F8E5M2)}  # on sm_90
ADDS_ALWAYS = {(I8, F16), (I8, BF16)}  # 0 times C, too
KERNELS = 7


class Library:
    """The functions of cuSPARSELt that plans call; structs hold the number of what they stand for."""

    def __init__(self, arch=90):
        self.alive, self.numbers, self.arch = {}, count(1), arch
        self.structs, self.spent = {}, set()  # where they lie, and those of plans that were destroyed
        self.called, self.refused = [], set()
        self.c_handle = lt.cusparseLtHandle_t()
        self.put(self.c_handle, "handle")

    def function(self, name):
        if name not in FUNCTIONS:
            return getattr(lt, name)
        assert hasattr(self, f"_{name.removeprefix('cusparseLt')}"), name
        found = Function(self, name)
        setattr(self, name, found)
        return found

    def put(self, struct, thing):
        assert ctypes.addressof(struct) % 16 == 0, "structs are aligned"
        number = next(self.numbers)  # never one of another struct
        ctypes.c_int64.from_buffer(struct).value = number
        self.alive[number] = thing
        self.structs[number] = (weakref.ref(struct), ctypes.addressof(struct))
        return number

    def number_of(self, struct):
        number = ctypes.c_int64.from_buffer(struct).value
        assert number in self.alive, f"a {type(struct).__name__} that is not there"
        assert ctypes.addressof(struct) == self.structs[number][1], f"a {type(struct).__name__} that was moved"
        return number

    def of(self, struct):
        return self.alive[self.number_of(struct)]

    def still(self, number):
        """What a number stands for, whose struct has to be there."""
        assert number in self.alive, "what a plan is of was destroyed"
        assert self.structs[number][0]() is not None, "the memory of what a plan is of was freed"
        return self.alive[number]

    def destroy(self, struct):
        del self.alive[self.number_of(struct)]
        ctypes.c_int64.from_buffer(struct).value = 0

    # -- matrices -----------------------------------------------------------------------------------------------------
    def matrix(self, struct, rows, cols, ld, alignment, kind, order, step):
        dtype = DTYPES[int(kind)]
        assert alignment == 16
        least = step // dtype.itemsize
        assert ld >= (cols if order == ROW else rows)
        if not rows or not cols:
            return INVALID_VALUE
        if rows % least or cols % least or ld % least:  # a structured matrix's lines have 32 bytes, too
            return NOT_SUPPORTED
        spec = {"rows": rows, "cols": cols, "ld": ld, "dtype": dtype, "order": order, "structured": step == 32}
        self.put(struct, MatrixSpec(batch=1, stride=0, **spec))
        return 0

    def _DenseDescriptorInit(self, handle, struct, rows, cols, ld, alignment, kind, order):
        assert self.of(handle) == "handle"
        return self.matrix(struct, rows, cols, ld, alignment, kind, order, 16)

    def _StructuredDescriptorInit(self, handle, struct, rows, cols, ld, alignment, kind, order, sparsity):
        assert self.of(handle) == "handle"
        assert sparsity == 0
        return self.matrix(struct, rows, cols, ld, alignment, kind, order, 32)

    def _MatDescriptorDestroy(self, struct):
        self.destroy(struct)

    def _MatDescSetAttribute(self, handle, struct, attribute, data, size):
        matrix, value = self.of(struct), data._obj
        name, kind = {0: ("batch", ctypes.c_int), 1: ("stride", ctypes.c_int64)}[int(attribute)]
        assert type(value) is kind
        assert size == ctypes.sizeof(kind)
        setattr(matrix, name, value.value)
        long = matrix.rows if matrix.order == ROW else matrix.cols
        assert name == "batch" or matrix.stride == 0 or matrix.stride >= long * matrix.ld

    # -- one structured matrix ----------------------------------------------------------------------------------------
    def structured(self, handle, struct, is_a):
        assert self.of(handle) == "handle"
        assert is_a == 1
        matrix = self.of(struct)
        assert matrix.structured
        return matrix

    def _SpMMAPrune2(self, handle, struct, is_a, op, source, target, algorithm, stream):
        matrix = self.structured(handle, struct, is_a)
        one, other = (matrix.at(address_of(argument)) for argument in (source, target))
        dense = turned(one, op)
        stay = kept_mask(dense, PruneAlgorithm(int(algorithm)), *group_of(matrix.dtype))
        turned(other, op)[...] = np.where(stay, dense, np.zeros((), dense.dtype))

    def _SpMMAPruneCheck2(self, handle, struct, is_a, op, source, valid, stream):
        matrix = self.structured(handle, struct, is_a)
        assert matrix.batch == 1, "whether all matrices of a batch are looked at is not known"
        found = is_structured(np.ascontiguousarray(turned(matrix.at(address_of(source)), op)), *group_of(matrix.dtype))
        if not found:  # else the answer is left as it was
            memory_at(address_of(valid), 4).view(np.int32)[0] = 1

    def _SpMMACompressedSize2(self, handle, struct, size, work):
        matrix = self.structured(handle, struct, 1)
        size._obj.value, work._obj.value = matrix.bytes(), WORK

    def _SpMMACompress2(self, handle, struct, is_a, op, source, target, work, stream):
        matrix = self.structured(handle, struct, is_a)
        memory_at(address_of(work), WORK)[...] = 0xFF
        assert matrix.batch == 1, "beyond the bytes that it asked for"
        dense = np.ascontiguousarray(turned(matrix.at(address_of(source)), op))
        memory_at(address_of(target), matrix.bytes())[...] = pack(dense)

    # -- products -----------------------------------------------------------------------------------------------------
    def _MatmulDescriptorInit(self, handle, struct, op_a, op_b, a, b, c, d, compute):
        matrices = [self.of(one) for one in (a, b, c, d)]
        first, second, third, fourth = matrices
        assert first.structured
        assert not any(one.structured for one in matrices[1:])
        assert len({one.batch for one in matrices}) == 1, "all have one number of batches"
        m, k = (first.rows, first.cols) if op_a == 0 else (first.cols, first.rows)
        k_too, n = (second.rows, second.cols) if op_b == 0 else (second.cols, second.rows)
        assert (k, m, n) == (k_too, third.rows, third.cols)
        same = [(one.rows, one.cols, one.ld, one.order, one.stride) for one in (third, fourth)]
        assert same[0] == same[1], "C and D lie alike"
        assert first.dtype is second.dtype
        kinds = (first.dtype, third.dtype, fourth.dtype, int(compute))
        assert kinds in KINDS, kinds
        assert first.dtype.itemsize > 1 or (op_a, op_b, first.order, second.order) == (0, 1, ROW, ROW)
        assert first.batch == 1 or fourth.stride
        relu, bias = SimpleNamespace(on=0, upper=np.inf, threshold=0.0), SimpleNamespace(at=0, stride=0)
        epilogue = {"relu": relu, "bias": bias, "gelu": 0, "scaling": 1.0, "alpha": 0, "beta": 0}
        structs = [self.number_of(one) for one in (a, b, c, d)]
        self.put(struct, SimpleNamespace(op_a=op_a, op_b=op_b, structs=structs, compute=compute, m=m, **epilogue))

    def _MatmulDescSetAttribute(self, handle, struct, attribute, data, size):
        product, value = self.of(struct), data._obj
        kinds = {0: ctypes.c_int, 1: ctypes.c_float, 2: ctypes.c_float, 3: ctypes.c_int, 4: ctypes.c_float}
        kinds |= {5: ctypes.c_int, 6: ctypes.c_int, 7: ctypes.c_int64, 8: ctypes.c_void_p}
        assert type(value) is kinds[int(attribute)]
        assert size == ctypes.sizeof(value)
        a, _, c, d = (self.still(one) for one in product.structs)
        if attribute in (3, 4):
            assert (a.dtype, d.dtype) in GELU
        if attribute in (5, 6):
            assert a.dtype is I8
        if attribute == 7:
            assert value.value == 0 or value.value >= c.rows
        if attribute in (2, 4):
            assert np.isfinite(value.value)
        owner, name = {
            0: (product.relu, "on"),
            1: (product.relu, "upper"),
            2: (product.relu, "threshold"),
            3: (product, "gelu"),
            4: (product, "scaling"),
            5: (product, "alpha"),
            6: (product, "beta"),
            7: (product.bias, "stride"),
            8: (product.bias, "at"),
        }[int(attribute)]
        setattr(owner, name, value.value)

    def _MatmulAlgSelectionInit(self, handle, struct, product, algorithm):
        assert algorithm == 0
        chosen = {0: 1, 1: KERNELS, 2: 5, 3: 1, 4: 0, 5: 0}
        self.put(struct, SimpleNamespace(product=self.of(product), chosen=chosen))

    def _MatmulAlgSelectionDestroy(self, struct):
        self.destroy(struct)

    def _MatmulAlgSetAttribute(self, handle, struct, attribute, data, size):
        assert size == 4
        value, chosen = data._obj.value, self.of(struct).chosen
        assert type(data._obj) is ctypes.c_int
        assert attribute != 1, "it is read only"
        assert attribute or 0 <= value < KERNELS, "a kernel that is not there"
        fits = {0: True, 3: value in (1, -1) if self.arch >= 90 else value >= 1, 4: 1 <= value <= 6}
        if not fits.get(int(attribute), value == 0 if self.arch >= 90 else True):
            return INVALID_VALUE
        chosen[int(attribute)] = value
        return 0

    def _MatmulAlgGetAttribute(self, handle, struct, attribute, data, size):
        assert size == 4
        data._obj.value = self.of(struct).chosen[int(attribute)]

    def _MatmulPlanInit(self, handle, struct, product, algorithm):
        spec = self.of(product)
        assert self.of(algorithm).product is spec
        needs = (self.number_of(product), self.number_of(algorithm))
        assert not self.spent & set(needs), "0.8.0 ends the process: their plan was destroyed"
        bias = SimpleNamespace(**vars(spec.bias))  # as it is now
        self.put(struct, SimpleNamespace(needs=needs, bias=bias))

    def _MatmulPlanDestroy(self, struct):
        self.spent |= set(self.of(struct).needs)
        self.destroy(struct)

    def _MatmulGetWorkspace(self, handle, struct, size):
        size._obj.value = WORK if self.chosen_by(struct)[0] == 1 else 2 * WORK

    def chosen_by(self, plan):
        """The algorithm of a plan."""
        return self.still(self.of(plan).needs[1]).chosen

    def _Matmul(self, handle, struct, alpha, a, b, beta, c, d, work, streams, number):
        plan = self.of(struct)
        assert number == 1
        product = self.still(plan.needs[0])
        first, second, third, fourth = (self.still(one) for one in product.structs)
        memory_at(address_of(work), WORK if self.chosen_by(struct)[0] == 1 else 2 * WORK)[...] = 0xFF
        left = first.compressed_at(address_of(a), product.op_a).astype(np.float64)
        right = turned(second.at(address_of(b)), product.op_b).astype(np.float64)
        sums = left @ right
        factor, rest = (
            array_at(address_of(one), F32, (product.m,), (1,)).astype(np.float64)[:, None] if vector else number_at(one)
            for one, vector in ((alpha, product.alpha), (beta, product.beta))
        )
        found = factor * sums
        if product.alpha and not product.beta:
            rest = 0.0  # a number does not count beside a vector
        if np.any(rest) or (first.dtype, fourth.dtype) in ADDS_ALWAYS:
            found = found + rest * third.at(address_of(c)).astype(np.float64)
        found = self.activated(product, self.with_bias(plan, first, third, found))
        target = fourth.at(address_of(d))
        target[...] = converted(found, fourth.dtype)

    @staticmethod
    def with_bias(plan, first, third, found):
        if not plan.bias.at:
            return found
        kind = F32 if first.dtype is I8 else third.dtype
        steps = (plan.bias.stride, 1)
        return found + array_at(plan.bias.at, kind, found.shape[:2], steps).astype(np.float64)[..., None]

    @staticmethod
    def activated(product, x):
        if product.relu.on:
            return np.where(x <= product.relu.threshold, 0, np.minimum(x, product.relu.upper))
        if product.gelu:
            return product.scaling * x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        return x

    def _MatmulSearch(self, handle, struct, alpha, a, b, beta, c, d, work, streams, number):
        second = self.still(self.still(self.of(struct).needs[0]).structs[1])
        assert np.isfinite(second.at(address_of(b)).astype(np.float64)).all(), "operands are there while it runs"
        self._Matmul(handle, struct, alpha, a, b, beta, c, d, work, streams, number)
        self.chosen_by(struct).update({0: 4, 3: 1})


def number_at(pointer):
    return float(ctypes.c_float.from_address(address_of(pointer)).value)


def converted(found, dtype):
    if dtype.numpy.kind == "i":
        limits = np.iinfo(dtype.numpy)
        return np.clip(np.rint(found), limits.min, limits.max).astype(dtype.numpy)
    most = FP8_MAX.get(dtype, np.inf)
    with np.errstate(all="ignore"):
        return np.clip(found, -most, most).astype(dtype.numpy)


class Handle:
    """What plans ask for handle, stream and memory."""

    def __init__(self, library):
        self.c_stream, self._library, self.c = lt.cudaStream_t(5), library, library.c_handle

    def follow(self):
        return self._library.c_handle

    def memory(self, executor, nbytes):
        made = Memory(nbytes)
        return made, made.base


class Names:
    """The module as its users see it: functions are the stand-in's, all else is the module's."""

    def __init__(self, library):
        self._library = library

    def __getattr__(self, name):
        found = self._library.function(name) if name in FUNCTIONS else getattr(lt, name)
        setattr(self, name, found)
        return found


def executor_of(monkeypatch, arch=90):
    """What plans are made for; `monkeypatch` puts this file in the library's place. `library` says what was called."""
    library = Library(arch)
    names, made = Names(library), Handle(library)
    for module in (calls, descriptors, handle):
        monkeypatch.setattr(module, "lt", names)
    zero = lambda address, value, nbytes, _: ctypes.memset(address, value, nbytes)  # noqa: E731

    def zero_lines(address, pitch, value, width, lines, _):
        for line in range(lines):
            ctypes.memset(address + line * pitch, value, width)

    driver = SimpleNamespace(cuMemsetD8Async=zero, cuMemsetD2D8Async=zero_lines)
    monkeypatch.setattr(calls, "driver", driver)
    monkeypatch.setattr(calls, "handle_of", lambda _: made)
    monkeypatch.setattr(plans, "library_stamp", lambda _: "host")
    workspace = SimpleNamespace(c_ptr=ctypes.c_void_p(PLACEHOLDER), nbytes=0)
    stream = SimpleNamespace(done=lambda: None, synchronize=lambda: None)
    return SimpleNamespace(workspace=workspace, stream=stream, target=SimpleNamespace(value=0), library=library)
