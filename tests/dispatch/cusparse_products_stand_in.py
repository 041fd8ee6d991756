"""cuSPARSE's products of a sparse matrix and a dense one, and of two dense ones at the places of a sparse, in NumPy."""

import importlib.util
from pathlib import Path

import numpy as np

from cudabind.sys import cusparse
from dispatch.keys import F32

spec = importlib.util.spec_from_file_location("storage", Path(__file__).with_name("cusparse_storage_stand_in.py"))
storage = importlib.util.module_from_spec(spec)
spec.loader.exec_module(storage)
memory = storage.memory
BSR, COO, CSC, CSR, DTYPES, INDICES, WORK = (
    vars(memory)[name] for name in ("BSR", "COO", "CSC", "CSR", "DTYPES", "INDICES", "WORK")
)
INVALID_VALUE, INTERNAL_ERROR, NOT_SUPPORTED = memory.INVALID_VALUE, memory.INTERNAL_ERROR, memory.NOT_SUPPORTED
address_of, memory_at, number_at, turned = (
    vars(memory)[name] for name in ("address_of", "memory_at", "number_at", "turned")
)
COO_ALG2 = cusparse.cusparseSpMMAlg_t.CUSPARSE_SPMM_COO_ALG2
CSR_ALG3 = cusparse.cusparseSpMMAlg_t.CUSPARSE_SPMM_CSR_ALG3


class Products(storage.Storage):
    """The functions of products; handles, and what is refused of adjoints, are those of the library that has them."""

    def _SpMV_bufferSize(self, *given):
        given[-1]._obj.value = WORK

    _SDDMM_bufferSize = _SparseToDense_bufferSize = _SpMV_bufferSize

    def _SpMM_bufferSize(self, handle, op_a, op_b, alpha, a, b, beta, c, kind, algorithm, size):
        """What is multiplied by 0 needs no room, and most ways to multiply need none."""
        if algorithm == CSR_ALG3 and (op_a, self.of(a).format) != (0, CSR):
            return NOT_SUPPORTED
        size._obj.value = WORK * bool(number_at(alpha, int(kind)) and self.spmm_works(self.of(a), algorithm))
        return None

    @staticmethod
    def spmm_works(a, algorithm):
        return a.format in (CSR, CSC) or algorithm == COO_ALG2

    @staticmethod
    def work_in(buffer):
        memory_at(address_of(buffer), WORK)[...] = 0xFF

    def kinds_fit(self, a, b, c, kind, *, mixed=True):
        """The dtypes of a product that the documentation lists."""
        types = DTYPES[a.value_type], DTYPES[c.value_type]
        assert a.value_type == b.value_type
        if types[0].itemsize == 2:
            assert mixed
            assert types[1] in (types[0], F32.numpy)
            assert kind == F32.cuda
        else:
            assert types[0] == types[1] == DTYPES[int(kind)]

    def added(self, op, alpha, beta, kind, product, target):
        alpha, beta = number_at(alpha, int(kind)), number_at(beta, int(kind))
        found = alpha * product
        if beta or op is None:  # SDDMM promises nothing of a beta of 0
            found = found + beta * target.astype(found.dtype)
        target[...] = found.astype(target.dtype)

    def _SpMV(self, handle, op, alpha, a, x, beta, y, kind, algorithm, buffer):
        self.no_adjoint_of_real(op, a)
        a, x, y = map(self.of, (a, x, y))
        assert a.format != BSR or (op == 0 and a.block[0] == a.block[1])
        assert int(algorithm) in {CSR: (0, 2, 3), CSC: (0, 2, 3), COO: (0, 1, 4), BSR: (0, 6)}[a.format]
        assert a.nnz
        assert a.format != COO or a.is_at_vectors(), storage.MISALIGNED
        self.kinds_fit(a, x, y, kind)
        self.work_in(buffer)
        right = x.array()
        work = np.complex128 if right.dtype.kind == "c" else np.float64
        self.added(op, alpha, beta, kind, turned(a.dense(), op) @ right.astype(work), y.array())

    def _SpMV_preprocess(self, *given):
        assert self.of(given[3]).nnz

    def _SpMM(self, handle, op_a, op_b, alpha, a, b, beta, c, kind, algorithm, buffer):
        self.no_adjoint_of_real(op_a, a)
        a, b, c = map(self.of, (a, b, c))
        if hasattr(c, "batch"):
            return self.batch(handle, op_a, op_b, alpha, a, b, beta, c, kind, algorithm, buffer)
        assert b.by_rows == c.by_rows, "B and C are of one order"
        assert a.format != BSR or (op_a == 0 and a.block[0] == a.block[1])
        assert a.nnz
        faults = a.format == COO and int(algorithm) in (0, 3)
        assert not faults or a.is_at_vectors(), storage.MISALIGNED
        self.kinds_fit(a, b, c, kind)
        if self.spmm_works(a, algorithm) and number_at(alpha, int(kind)):
            if not address_of(buffer):
                return INVALID_VALUE if a.format == COO else INTERNAL_ERROR
            self.work_in(buffer)
        right = turned(b.array(), op_b)
        work = np.complex128 if right.dtype.kind == "c" else np.float64
        left = turned(a.dense(), op_a)
        if c.array().dtype.itemsize == 2 and algorithm not in (CSR_ALG3, COO_ALG2):
            self.added_one_by_one(alpha, beta, kind, left, right.astype(work), c.array())
        else:
            self.added(op_a, alpha, beta, kind, left @ right.astype(work), c.array())
        return None

    def batch(self, handle, op_a, op_b, alpha, a, b, beta, c, kind, algorithm, buffer):
        """Each product of a strided batch by itself."""
        assert a.batch[0] == b.batch[0] == c.batch[0]
        is_one, has_offsets = a.batch[0] == 1, (a.format == CSR and a.batch[1]) or (a.format == COO and a.batch[2])
        assert is_one or not (int(op_a) or has_offsets), "12.6 takes the first one's offsets; wrong sums of COO"
        assert a.format != COO or int(algorithm) in (1, 2, 5), "COO_ALG3 takes no batch, and may be the default"
        item, (offset, index) = DTYPES[a.value_type].itemsize, (INDICES[kind].itemsize for kind in a.kinds)
        for number in range(c.batch[0]):
            _, lines, elements = (number * step for step in a.batch)
            one = {**vars(a), "rows": a.rows + lines * offset, "columns": a.columns + elements * index}
            matrices = [type(a)(**one | {"values": a.values + elements * item})]
            for d in (b, c):  # C of 16 bits is added up in wider memory
                step = d.batch[1] * DTYPES[d.value_type].itemsize
                matrices.append(type(d)(**vars(d) | {"values": d.values + number * step}))
            handles = []
            for matrix in matrices:
                del matrix.batch
                handles.append(cusparse.cusparseSpMatDescr_t())
                self.put(handles[-1], matrix)
            self._SpMM(handle, op_a, op_b, alpha, handles[0], handles[1], beta, handles[2], kind, algorithm, buffer)
            for one_of in handles:
                del self.alive[one_of.value]

    def added_one_by_one(self, alpha, beta, kind, left, right, target):
        """Each product to the sum, which is rounded to the target's 16 bits."""
        alpha, beta = number_at(alpha, int(kind)), number_at(beta, int(kind))
        target[...] = (beta * target.astype(np.float64) if beta else np.zeros(target.shape)).astype(target.dtype)
        for column, line in zip(left.T, right, strict=True):
            target[...] = (target.astype(np.float64) + alpha * np.outer(column, line)).astype(target.dtype)

    def _SDDMM_preprocess(self, handle, op_a, op_b, alpha, a, b, beta, c, kind, algorithm, buffer):
        c = self.of(c)
        c.seen = address_of(buffer), c.rows, c.columns, c.nnz
        memory_at(address_of(buffer), WORK)[...] = 7

    def _SDDMM(self, handle, op_a, op_b, alpha, a, b, beta, c, kind, algorithm, buffer):
        a, b, c = map(self.of, (a, b, c))
        assert (c.format, int(op_a), int(op_b)) == (CSR, 0, 0)
        self.kinds_fit(a, b, c, kind, mixed=False)
        assert c.seen == (address_of(buffer), c.rows, c.columns, c.nnz), "preprocessed for another pattern"
        assert (memory_at(address_of(buffer), WORK) == 7).all(), "what was found is overwritten"
        self.work_in(buffer)
        row, column, values = c.places()
        work = np.complex128 if values.dtype.kind == "c" else np.float64
        product = a.array().astype(work) @ b.array().astype(work)
        self.added(None, alpha, beta, kind, product[row, column], values)
