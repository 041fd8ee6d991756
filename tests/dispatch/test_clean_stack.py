"""What a recorded call finds on the stack below its own frame: zeros, whatever was there before."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest

from dispatch.device.recordings import Recordings
from dispatch.execute import clean_stack, cuda_graph

# `leave` writes to a deep frame, and `find` gives what a function finds in one of its own that it does not write.
SOURCE = """
#include <string.h>
void leave(int byte) {
    unsigned char frame[6000];
    memset(frame, byte, sizeof frame);
    __asm__ volatile("" : : "r"(frame) : "memory");
}
void find(unsigned char *out) {
    unsigned char frame[4000];
    __asm__ volatile("" : : "r"(frame) : "memory");
    memcpy(out, frame, sizeof frame);
}
"""
FRAME = 4000
DEEP = 3000  # bytes of it: above them ctypes may have had frames of its own as it cleaned


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler is installed")
    folder = tmp_path_factory.mktemp("stack")
    (folder / "stack.c").write_text(SOURCE)
    options = ["-O1", "-w", "-fno-stack-protector", "-shared", "-fPIC"]
    subprocess.run([compiler, *options, "-o", folder / "stack.so", folder / "stack.c"], check=True)
    return ctypes.CDLL(str(folder / "stack.so"))


def found(library, before, clean):
    frame = (ctypes.c_ubyte * FRAME)()
    library.leave(before)
    clean()
    library.find(frame)
    return bytes(frame)[:DEEP]


def test_a_call_finds_the_same_whatever_was_there_before(library):
    def nothing():
        pass

    one, other = (found(library, byte, nothing) for byte in (17, 200))
    assert sum(a != b for a, b in zip(one, other, strict=True)) > DEEP // 4, "else this shows nothing"
    assert found(library, 17, clean_stack.clean_stack) == found(library, 200, clean_stack.clean_stack)


def test_it_is_so_right_before_a_call_is_recorded(monkeypatch):
    done = []
    begin, end = (type("F", (), {"unchecked_holding_gil": staticmethod(lambda *_: 0)}) for _ in range(2))
    monkeypatch.setattr(cuda_graph.driver, "cuStreamBeginCapture", begin)
    monkeypatch.setattr(cuda_graph.driver, "cuStreamEndCapture", end)
    monkeypatch.setattr(clean_stack, "clean_stack", lambda: done.append("cleaned"))
    target, recorder = ctypes.c_void_p(1), ctypes.c_void_p(2)
    cuda_graph.recorded(lambda: done.append("called"), target, recorder, Recordings())
    assert done == ["cleaned", "called"]
