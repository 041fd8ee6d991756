"""cuDSS's batches of several patterns over memory of the host: what cudss_stand_in.py is for other solves.

Lists of addresses lie where the device would have them, and extents on the host, where they must stay. One status is
told for all matrices, and what one of them cannot have no other one has either.
"""

import ctypes
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from cudabind.sys import cudss
from dispatch.libraries.cudss import factors, lists
from dispatch.ops.sparse import cudss_lists as plans

spec = importlib.util.spec_from_file_location("cudss_stand_in", Path(__file__).with_name("cudss_stand_in.py"))
single = importlib.util.module_from_spec(spec)
spec.loader.exec_module(single)
memory = single.memory

WIDE, NARROW = 8, 4  # bytes of a real number: what the kernel that looks at solutions is compiled for


class Library(single.Library):
    """The functions of one system, and of a batch of several."""

    def _MatrixCreateBatchCsr(self, matrix, count, rows, columns, elements, start, end, indices, values, *kinds):
        offset, index, value, kind, view, base = map(int, kinds)
        assert end is None, "of 4 arrays the library takes no batch"
        assert offset == index == 10, "with other indices solutions are wrong"
        assert kind != single.GENERAL or view == single.FULL
        is_complex = memory.DTYPES[value].kind == "c"
        assert is_complex or kind not in (single.HERMITIAN, single.HPD)
        assert not is_complex or kind != single.SPD
        said = {"index": single.INDICES[index], "value": memory.DTYPES[value], "kind": kind, "view": view, "base": base}
        extents = rows, columns, elements
        at = start, indices, values
        self.put(matrix, SimpleNamespace(count=count, extents=extents, at=[one.value for one in at], **said))

    def _MatrixCreateBatchDn(self, matrix, count, rows, columns, ld, values, integer, value, layout):
        assert layout == cudss.cudssLayout_t.CUDSS_LAYOUT_COL_MAJOR, "rows one behind another are not supported"
        assert int(integer) == 10
        extents, kind = (rows, columns, ld), memory.DTYPES[int(value)]
        self.put(matrix, SimpleNamespace(count=count, extents=extents, at=values.value, value=kind))

    def _Execute(self, handle, phase, config, data, a, x, b):
        chosen, found, matrix = self.alive[config.value], self.alive[data.value], self.alive[a.value]
        if not hasattr(matrix, "count"):
            return super()._Execute(handle, phase, config, data, a, x, b)
        assert single.CONFIG.CUDSS_CONFIG_UBATCH_SIZE not in chosen
        assert single.CONFIG.CUDSS_CONFIG_HYBRID_MEMORY_MODE not in chosen
        self.phases.append(phase)
        systems = self.systems(matrix)
        patterns = [self.pattern(one) for one in systems]
        if phase == single.ANALYSIS:
            found.analysed, found.factors = (dict(chosen), patterns), None
            found.index_bytes = matrix.index.itemsize
        elif phase in (single.FACTORIZATION, single.REFACTORIZATION):
            assert phase == single.FACTORIZATION or found.factors is not None, "what was never factorized"
            choices, before = found.analysed
            assert choices == chosen, "what the analysis was not made for"
            assert all(map(np.array_equal, sum(before, ()), sum(patterns, ()))), "another pattern than the one analysed"
            found.factors = [self.whole(one, *at, 1)[0] for one, at in zip(systems, patterns, strict=True)]
            found.is_scaled = matrix.kind != single.GENERAL or all(np.any(one) for one in found.factors)
            of_cholesky = matrix.kind in (single.SPD, single.HPD)
            positive = not of_cholesky or all((np.linalg.eigvalsh(one) > 0).all() for one in found.factors)
            singular = sum(np.linalg.matrix_rank(one) < len(one) for one in found.factors)
            found.replaced = 0 if of_cholesky or not found.is_scaled else int(singular)
            found.info = found.info or (0 if positive else 3)  # which nothing takes back
        else:
            assert phase == single.SOLVE
            right, target = (self.sides(self.alive[one.value], systems) for one in (b, x))
            fails = found.info or any(np.linalg.matrix_rank(one) < len(one) for one in found.factors)
            for factor, one, into in zip(found.factors, right, target, strict=True):
                into[...] = np.nan if fails else np.linalg.solve(factor, one)
        return 0

    @staticmethod
    def listed(address, count):
        return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address)).tolist()

    def systems(self, matrix):
        """Each matrix of a batch as one that is alone."""
        rows, columns, elements = (self.listed(at, matrix.count) for at in matrix.extents)
        assert rows == columns
        at = zip(*(memory.array_at(one, np.int64, matrix.count).tolist() for one in matrix.at), strict=True)
        same = {"offset": matrix.index, "index": matrix.index, "value": matrix.value}
        same |= {"kind": matrix.kind, "view": matrix.view, "base": matrix.base}
        parts = zip(rows, elements, at, strict=True)
        return [SimpleNamespace(n=n, nnz=nnz, at=where, **same) for n, nnz, where in parts]

    def sides(self, said, systems):
        """The right-hand sides, or the solution, of each system."""
        assert said.count == len(systems), "as many as there are matrices"
        rows, columns, ld = (self.listed(at, said.count) for at in said.extents)
        assert rows == [one.n for one in systems]
        found = []
        for n, k, step, at in zip(rows, columns, ld, memory.array_at(said.at, np.int64, said.count), strict=True):
            assert step >= n
            flat = memory.array_at(int(at), said.value, (k - 1) * step + n)
            size = said.value.itemsize
            found.append(np.lib.stride_tricks.as_strided(flat, (n, k), (size, step * size)))
        return found


class Pointers:
    """Lists of words where a kernel writes them on a GPU."""

    def __init__(self, executor, count, lists):
        self.lists, self.count = [(ctypes.c_int64 * count)() for _ in range(lists)], count
        self.addresses = tuple(ctypes.c_void_p(ctypes.addressof(one)) for one in self.lists)

    def enqueue(self, given):
        for target, words in zip(self.lists, zip(*given, strict=True), strict=True):
            target[:] = words


def launch(function, blocks, *rest):
    """Have NumPy look at the solutions; the kernel itself is tried in test_spsolve_lists.py."""
    *extents, shared, _, taken, none = rest
    assert extents == [1, 1, plans.THREADS, 1, 1]
    assert not shared
    assert none is None
    b, x, counts, at, systems = (ctypes.c_int64.from_address(one).value for one in taken)
    assert 0 < blocks <= systems
    kind = np.dtype("f8" if function.value == WIDE else "f4")
    found = memory.array_at(at, np.uint32, systems)
    words = (memory.array_at(one, np.int64, systems).tolist() for one in (b, x, counts))
    for number, (right, solution, count) in enumerate(zip(*words, strict=True)):
        given, made = (memory.array_at(one, kind, count) for one in (right, solution))
        with np.errstate(invalid="ignore"):
            found[number] |= (not np.isfinite(made).all()) + 2 * (not np.isfinite(given).all())
    return 0


def executor_of(monkeypatch, copy):
    """What plans are made for; `copy` stands for the kernel that copies. `library` says what was called."""
    found = single.executor_of(monkeypatch, copy)
    found.library, waits = Library(), []
    found.stream.synchronize, found.waits = lambda: waits.append(len(found.library.phases)), waits
    for module in (factors, lists):
        monkeypatch.setattr(module, "cudss", found.library)
    for module in (lists, plans):
        monkeypatch.setattr(module, "PointerArrays", Pointers)
    monkeypatch.setattr(plans, "Copy", copy)
    monkeypatch.setattr(plans, "loaded", lambda *given: WIDE if "double" in given[2][1] else NARROW)

    def fill(at, value, number, _):
        memory.array_at(at, np.uint32, number)[...] = value

    driver = SimpleNamespace(
        cuLaunchKernel=SimpleNamespace(unchecked=launch),
        cuMemcpyDtoHAsync=lambda to, source, nbytes, _: ctypes.memmove(to, source, nbytes),
        cuMemsetD8Async=lambda at, value, nbytes, _: ctypes.memset(at, value, nbytes),
        cuMemsetD32Async=fill,
        cuStreamSynchronize=lambda _: None,
    )
    monkeypatch.setattr(plans, "driver", driver)
    return found
