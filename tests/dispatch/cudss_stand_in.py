"""cuDSS over memory of the host, by NumPy: plans of direct solves run where no GPU is.

It is as strict as the library: arguments are counted and of their kinds, objects are alive, phases come in order, and
a factorization is of the pattern that was analysed. And as rude: it solves with the values that it has factorized, and
tells one status for all matrices of a batch.
"""

import ctypes
import importlib.util
import inspect
from enum import IntEnum
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from cudabind._bind import functions
from cudabind.errors import CudaError
from cudabind.sys import cudss
from dispatch.libraries.cudss import factors
from dispatch.ops.sparse import cudss_batched as batched
from dispatch.ops.sparse import cudss_refined as refined
from dispatch.ops.sparse import cudss_single as plans
from dispatch.ops.sparse.refinement_kernels import SOURCE, THREADS

spec = importlib.util.spec_from_file_location("cusparse_memory", Path(__file__).with_name("cusparse_memory.py"))
memory = importlib.util.module_from_spec(spec)
spec.loader.exec_module(memory)

FUNCTIONS = frozenset(functions(cudss))
INDICES = {10: np.dtype(np.int32), 24: np.dtype(np.int64)}
ANALYSIS, FACTORIZATION, REFACTORIZATION, SOLVE = 3, 4, 8, 1008
GENERAL, SYMMETRIC, HERMITIAN, SPD, HPD = range(5)
FULL, LOWER, UPPER = range(3)
BITS = {"int32_t": 32, "int64_t": 64}
CONFIG = cudss.cudssConfigParam_t
SIZES = {  # bytes, and the least value
    CONFIG.CUDSS_CONFIG_UBATCH_SIZE: (4, 1),
    CONFIG.CUDSS_CONFIG_HYBRID_MEMORY_MODE: (4, 0),
    CONFIG.CUDSS_CONFIG_HYBRID_DEVICE_MEMORY_LIMIT: (8, -1),
    CONFIG.CUDSS_CONFIG_IR_N_STEPS: (4, 0),
}
ALLOC_FAILED, NOT_SUPPORTED = 2, 4
MIN_MEMORY = 4096  # bytes of the device's that hybrid mode takes


class Function:
    def __init__(self, library, name):
        self.library, self.name = library, name

    def __call__(self, *arguments):
        status = self.unchecked(*arguments)
        if status:
            raise self.error(status)

    def error(self, status):
        return CudaError("cudss", self.name, int(status), cudss.cudssStatus_t(status).name, "")

    def unchecked(self, *arguments):
        kinds = [str(one.annotation) for one in inspect.signature(getattr(cudss, self.name)).parameters.values()]
        assert len(arguments) == len(kinds), f"{self.name} takes {len(kinds)} arguments, not {len(arguments)}"
        for argument, kind in zip(arguments, kinds, strict=True):
            wanted = getattr(cudss, kind, None)
            if kind in BITS:
                assert type(argument) is int, (self.name, kind, argument)
                assert abs(argument) < 2 ** (BITS[kind] - 1), (self.name, kind, argument)
            elif isinstance(wanted, type) and issubclass(wanted, IntEnum):
                assert isinstance(argument, wanted), (self.name, kind, argument)
            elif kind.startswith("cudss"):
                assert isinstance(argument, wanted), (self.name, kind, argument)
                assert argument.value in self.library.alive, f"{self.name}: what is not there"
        self.library.called.append(self.name)
        return getattr(self.library, f"_{self.name.removeprefix('cudss')}")(*arguments) or 0


class Library:
    """The functions that plans call; `phases` are those that were carried out."""

    def __init__(self):
        self.alive, self.numbers = {1: "handle"}, count(2)
        self.called, self.phases, self.replaced = [], [], 0
        self.is_early = False  # whether already the analysis fails of too little memory

    def __getattr__(self, name):
        if name not in FUNCTIONS:
            return getattr(cudss, name)
        function = Function(self, name)
        setattr(self, name, function)
        return function

    def put(self, handle, thing):
        handle.value = next(self.numbers)
        self.alive[handle.value] = thing

    def _ConfigCreate(self, config):
        self.put(config, {})

    def _ConfigSet(self, config, param, value, size):
        nbytes, least = SIZES[param]
        assert size == nbytes == ctypes.sizeof(value._obj)
        assert value._obj.value >= least
        self.alive[config.value][param] = value._obj.value

    def _DataCreate(self, handle, data):
        assert self.alive[handle.value] == "handle"
        self.put(data, SimpleNamespace(analysed=None, factors=None, info=0, replaced=0, is_scaled=True))

    def _ConfigDestroy(self, config):
        del self.alive[config.value]

    _MatrixDestroy = _ConfigDestroy

    def _DataDestroy(self, handle, data):
        del self.alive[data.value]

    def _MatrixCreateCsr(self, matrix, m, n, nnz, start, end, indices, values, *kinds):
        offset, index, value, kind, view, base = map(int, kinds)
        assert m == n
        assert end is None
        assert start
        assert indices
        assert values
        assert (offset, index) != (10, 24), "indices are no wider than offsets"
        assert kind != GENERAL or view == FULL
        is_complex = memory.DTYPES[value].kind == "c"
        assert is_complex or kind not in (HERMITIAN, HPD)
        assert not is_complex or kind != SPD
        said = {"n": n, "nnz": nnz, "offset": INDICES[offset], "index": INDICES[index], "value": memory.DTYPES[value]}
        self.put(matrix, SimpleNamespace(kind=kind, view=view, base=base, at=None, **said))

    def _MatrixCreateDn(self, matrix, rows, columns, ld, values, value, layout):
        assert layout == cudss.cudssLayout_t.CUDSS_LAYOUT_COL_MAJOR, "rows one behind another are not supported"
        assert ld >= rows
        assert values
        self.put(matrix, SimpleNamespace(rows=rows, columns=columns, ld=ld, at=None, value=memory.DTYPES[int(value)]))

    def _MatrixSetCsrPointers(self, matrix, start, end, indices, values):
        assert end is None
        self.alive[matrix.value].at = start, indices, values

    def _MatrixSetValues(self, matrix, values):
        self.alive[matrix.value].at = values

    def _DataGet(self, handle, data, what, value, size, written):
        found, params = self.alive[data.value], cudss.cudssDataParam_t
        assert found.analysed, "what was never analysed"
        wanted = {
            params.CUDSS_DATA_INFO: (4, found.info),
            params.CUDSS_DATA_NPIVOTS: (found.index_bytes, self.replaced or found.replaced),
            params.CUDSS_DATA_HYBRID_DEVICE_MEMORY_MIN: (8, MIN_MEMORY),
        }
        nbytes, told = wanted[what]
        assert size == ctypes.sizeof(value._obj) == nbytes
        value._obj.value = told
        written._obj.value = size

    # -- the work -----------------------------------------------------------------------------------------------------
    def _Execute(self, handle, phase, config, data, a, x, b):
        chosen, found, matrix = self.alive[config.value], self.alive[data.value], self.alive[a.value]
        batch = chosen.get(CONFIG.CUDSS_CONFIG_UBATCH_SIZE, 1)
        if CONFIG.CUDSS_CONFIG_HYBRID_MEMORY_MODE in chosen and batch > 1:
            return NOT_SUPPORTED
        self.phases.append(phase)
        rows, columns = self.pattern(matrix)
        limit = chosen.get(CONFIG.CUDSS_CONFIG_HYBRID_DEVICE_MEMORY_LIMIT, -1)
        if phase == ANALYSIS:
            if self.is_early and 0 <= limit < MIN_MEMORY:
                return ALLOC_FAILED
            found.analysed, found.factors = (matrix.at[:2], dict(chosen), rows, columns), None
            found.index_bytes = matrix.index.itemsize
        elif phase in (FACTORIZATION, REFACTORIZATION):
            assert phase == FACTORIZATION or found.factors is not None, "what was never factorized"
            at, choices, *before = found.analysed
            assert at == matrix.at[:2]
            assert choices == chosen, "what the analysis was not made for"
            assert all(map(np.array_equal, before, (rows, columns))), "another pattern than the one analysed"
            assert limit in (-1, max(limit, MIN_MEMORY)), "nothing is tried with less than there must be"
            found.factors = self.whole(matrix, rows, columns, batch)
            # All are scaled as the first one needs it, and what is factorized again as that was.
            if phase == FACTORIZATION:
                found.is_scaled = matrix.kind != GENERAL or bool(np.any(found.factors[0]))
            positive = matrix.kind not in (SPD, HPD) or (np.linalg.eigvalsh(found.factors) > 0).all()
            singular = matrix.kind not in (SPD, HPD) and (np.linalg.matrix_rank(found.factors) < matrix.n).sum()
            found.replaced = int(singular) if found.is_scaled or batch == 1 else 0
            found.info = found.info or (0 if positive else 3)  # which nothing takes back
        else:
            assert phase == SOLVE
            right, target = (self.dense(self.alive[one.value], batch) for one in (b, x))
            assert right.shape == target.shape
            if found.info or not found.is_scaled or (np.linalg.matrix_rank(found.factors) < matrix.n).any():
                target[...] = np.nan
            else:
                target[...] = np.linalg.solve(found.factors, right)
        return 0

    def pattern(self, matrix):
        start, indices, _ = matrix.at
        ends = memory.array_at(start, matrix.offset, matrix.n + 1).astype(np.int64) - matrix.base
        assert ends[0] == 0
        assert ends[-1] == matrix.nnz
        columns = memory.array_at(indices, matrix.index, matrix.nnz).astype(np.int64) - matrix.base
        return np.repeat(np.arange(matrix.n), np.diff(ends)), columns

    def whole(self, matrix, rows, columns, batch):
        """Each matrix of a batch with both of its triangles; those of a batch lie one behind another."""
        dense = np.zeros((batch, matrix.n, matrix.n), np.result_type(matrix.value, np.float64))
        given = memory.array_at(matrix.at[2], matrix.value, batch * matrix.nnz)
        dense[:, rows, columns] = given.reshape(batch, matrix.nnz)
        if matrix.view == FULL:
            return dense
        half = np.tril(dense, -1) if matrix.view == LOWER else np.triu(dense, 1)
        turned = half.swapaxes(1, 2)
        turned = turned.conj() if matrix.kind in (HERMITIAN, HPD) else turned
        return half + turned + np.eye(matrix.n) * dense

    @staticmethod
    def dense(said, batch):
        """The matrices of a batch, which are as far apart as all columns of one are long."""
        assert batch == 1 or said.ld == said.rows
        size, between = said.value.itemsize, said.ld * said.columns
        flat = memory.array_at(said.at, said.value, (batch - 1) * between + (said.columns - 1) * said.ld + said.rows)
        shape, steps = (batch, said.rows, said.columns), (between * size, size, said.ld * size)
        return np.lib.stride_tricks.as_strided(flat, shape, steps)


# What the kernels that refine take; and atomic functions, of threads that take turns.
NUMBERS = "Int n"
KERNELS = {
    "narrow_values": ("const Wide* from", "Narrow* to", "Int count"),
    "begin_residual": ("const Wide* b", "Int ld_b", "Wide* r", "double* sizes", NUMBERS),
    "take_off_product": (
        *("const Wide* elements", "const OFFSET* rows", "const INDEX* columns", "const Wide* x", "Int ld_x"),
        *("Wide* r", "double* sizes", NUMBERS),
    ),
    "narrow_residual": ("const Wide* r", "const double* sizes", "Narrow* right", "Bits* most", NUMBERS),
    "add_correction": ("const Narrow* correction", "Wide* x", "Int ld_x", "Int is_first", NUMBERS),
}
ATOMIC = """
static double atomicAdd(double* at, double x) { const double old = *at; *at = old + x; return old; }
static void atomicMax(unsigned long long* at, unsigned long long x) { if (x > *at) *at = x; }
"""


def look_on_cpu(monkeypatch):
    """Have NumPy look at the solutions of a batch; the kernel itself is tried in test_spsolve_batched.py."""

    def launch(function, blocks, *rest):
        *extents, shared, _, taken, none = rest
        assert extents == [1, 1, batched.THREADS, 1, 1]
        assert not shared
        assert none is None
        assert 0 < blocks <= batched.MAX_BLOCKS
        b, x, at, each, numbers = (ctypes.c_int64.from_address(one).value for one in taken)
        kind = np.dtype("f8" if function.value == 8 else "f4")
        given, found = (memory.array_at(one, kind, numbers).reshape(-1, each) for one in (b, x))
        with np.errstate(invalid="ignore"):
            seen = (~np.isfinite(found)).any(1) + 2 * (~np.isfinite(given)).any(1)
        memory.array_at(at, np.uint32, numbers // each)[...] |= seen.astype(np.uint32)
        return 0

    driver = SimpleNamespace(
        cuLaunchKernel=SimpleNamespace(unchecked=launch),
        cuMemcpyDtoHAsync=lambda to, source, nbytes, _: ctypes.memmove(to, source, nbytes),
        cuMemsetD8Async=lambda at, value, nbytes, _: ctypes.memset(at, value, nbytes),
        cuStreamSynchronize=lambda _: None,
    )
    monkeypatch.setattr(batched, "driver", driver)
    monkeypatch.setattr(batched, "loaded", lambda *given: 8 if "double" in given[2][1] else 4)


def refine_on_cpu(monkeypatch, on_cpu):
    """Have the kernels of solutions that are refined compiled by g++ and run over the host's memory."""
    known = {}

    def loaded(source, name, options, _):
        assert source == SOURCE
        known[len(known) + 1] = name, options
        return len(known)

    def launch(function, blocks, *rest):
        *extents, _, taken, none = rest
        assert extents == [1, 1, THREADS, 1, 1, 0]
        assert none is None
        name, options = known[function.value]
        kinds = [ctypes.c_void_p if "*" in one else ctypes.c_int64 for one in KERNELS[name]]
        given = [kind.from_address(at) for kind, at in zip(kinds, taken, strict=True)]
        on_cpu.launched(f"{ATOMIC}{SOURCE}// {name}\n", name, options, KERNELS[name], (blocks, THREADS), given)
        return 0

    driver = SimpleNamespace(
        cuLaunchKernel=SimpleNamespace(unchecked=launch),
        cuMemcpyDtoHAsync=lambda to, source, nbytes, _: ctypes.memmove(to, source, nbytes),
        cuMemsetD8Async=lambda at, value, nbytes, _: ctypes.memset(at, value, nbytes),
        cuStreamSynchronize=lambda _: None,
    )
    monkeypatch.setattr(refined, "driver", driver)
    monkeypatch.setattr(refined, "loaded", loaded)


class Handle:
    def follow(self):
        return cudss.cudssHandle_t(1)


def executor_of(monkeypatch, copy):
    """What plans are made for; `copy` stands for the kernel that copies. `library` says what was called."""
    library = Library()
    monkeypatch.setattr(factors, "cudss", library)
    monkeypatch.setattr(factors, "handle_of", lambda _: Handle())
    monkeypatch.setattr(plans, "Copy", copy)
    look_on_cpu(monkeypatch)

    def fill(at, value, number, _):
        memory.array_at(at, np.uint32, number)[...] = value

    monkeypatch.setattr(plans, "driver", SimpleNamespace(cuMemsetD32Async=fill))
    device = SimpleNamespace(allocate=lambda nbytes, _: memory.Memory(nbytes), alive=True)
    workspace = SimpleNamespace(c_ptr=ctypes.c_void_p(memory.PLACEHOLDER))
    stream, target = SimpleNamespace(done=lambda: None), SimpleNamespace(value=0)
    return SimpleNamespace(
        workspace=workspace, target=target, stream=stream, device=device, library=library, at_close=[]
    )
