"""nvCOMP: chunks compressed by LZ4 in a batch and back, and checked against what the text is worth."""

from __future__ import annotations

from ctypes import byref, c_size_t

import numpy as np

from cudabind.sys import nvcomp

LIBRARIES = ("cuda", "nvcomp")
CHUNK, COUNT = 1 << 16, 5
NO_STREAM = nvcomp.cudaStream_t()


def asked(function, *arguments):
    """The size that a function writes behind its arguments."""
    size = c_size_t()
    function(*arguments, byref(size))
    return size.value


def temporary(gpu, function, options):
    """Workspace for all chunks, as this version asks for its size."""
    size = c_size_t()
    function(COUNT, CHUNK, options, byref(size), COUNT * CHUNK, *([NO_STREAM] if _wants_a_stream() else []))
    return gpu.workspace(size.value), size.value


def _wants_a_stream():
    version = nvcomp._lib.version()
    return version is not None and int(version.split(".")[0]) >= 6


def ask_for(name):
    return getattr(nvcomp, f"nvcompBatchedLZ4{name}GetTempSize" + ("" if _wants_a_stream() else "Async"))


def test_chunks_come_back_as_they_were(gpu, rng):
    words = rng.integers(97, 105, (COUNT, CHUNK // 8)).astype(np.uint8)
    x = np.repeat(words, 8, axis=1)  # runs, which LZ4 is for
    x[1] = rng.integers(0, 256, CHUNK)  # and noise, which it is not
    pack, unpack = nvcomp.nvcompBatchedLZ4CompressOpts_t(), nvcomp.nvcompBatchedLZ4DecompressOpts_t()
    most = asked(nvcomp.nvcompBatchedLZ4CompressGetMaxOutputChunkSize, CHUNK, pack)
    most += -most % 256
    d_x, packed, d_y = gpu.array(x), gpu.poisoned((COUNT, most), np.uint8), gpu.poisoned(x.shape, np.uint8)
    every = np.arange(COUNT, dtype=np.uint64)
    sources, targets, results = (
        gpu.array(array.ptr + every * np.uint64(array.shape[1])) for array in (d_x, packed, d_y)
    )
    sizes, packed_sizes = gpu.array(np.full(COUNT, CHUNK, np.uint64)), gpu.poisoned(COUNT, np.uint64)
    statuses, got = gpu.poisoned(COUNT, np.int32), gpu.poisoned(COUNT, np.uint64)
    work, size = temporary(gpu, ask_for("Compress"), pack)
    nvcomp.nvcompBatchedLZ4CompressAsync(
        sources.ptr, sizes.ptr, CHUNK, COUNT, work, size, targets.ptr, packed_sizes.ptr, pack, statuses.ptr, NO_STREAM
    )
    assert (statuses.numpy() == 0).all()
    told = packed_sizes.numpy()
    assert (told[[0, 2, 3, 4]] < CHUNK // 3).all()
    assert CHUNK < told[1] <= most
    work, size = temporary(gpu, ask_for("Decompress"), unpack)
    statuses = gpu.poisoned(COUNT, np.int32)
    nvcomp.nvcompBatchedLZ4DecompressAsync(
        targets.ptr, packed_sizes.ptr, sizes.ptr, got.ptr, COUNT, work, size, results.ptr, unpack, statuses.ptr,
        NO_STREAM,
    )  # fmt: skip
    assert (statuses.numpy() == 0).all()
    assert (got.numpy() == CHUNK).all()
    assert np.array_equal(d_y.numpy(), x)
