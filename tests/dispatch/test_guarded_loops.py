"""No Ctrl-C leaves a block without its end: the jumps in `with` blocks are guarded by the blocks' handlers.

Python 3.12 and 3.13 compile a loop that ends in a condition, or a comprehension, with a jump back that no handler
guards (github.com/python/cpython/issues/108214), and look for signals there: a lock would stay held. Code that a main
thread runs has such loops in functions that its blocks call. Before 3.12 all jumps are guarded: this finds nothing.
"""

from __future__ import annotations

import dis
import sys
from pathlib import Path
from types import CodeType

import cudabind
import dispatch

ROOTS = [Path(package.__file__).parent for package in (cudabind, dispatch)]
FILES = [path for root in ROOTS for path in sorted(root.rglob("*.py")) if path.parent.name not in ("sys", "gen", "cli")]
# Blocks of which nothing stays held, or that no main thread comes to, which alone is interrupted.
HARMLESS = {
    "_unpacked": "the file is closed with its last reference",
    "_ask": "the socket is closed with its last reference",
    "Deadlines.seconds_left": "the monitor thread",
    "Deadlines.due": "the monitor thread",
    "Child.__init__": "the monitor thread",
    "CudaChild._take": "a child, which ignores the signal",
}


def codes(code):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def unguarded(code):
    """The lines whose jump back leads into a `with` block, and lies in none itself."""
    entries = list(getattr(dis.Bytecode(code), "exception_entries", ()))
    instructions = {each.offset: each.opname for each in dis.get_instructions(code)} if entries else {}
    offsets = list(instructions)

    def ends_block(target):
        place = offsets.index(target)
        return any(instructions[offset] == "WITH_EXCEPT_START" for offset in offsets[place : place + 3])

    def guards(offset):
        """The handlers of blocks around a place: each that has no end of a block passes on to those around it."""
        found, further = set(), {offset}
        while further:
            place = further.pop()
            around = {entry.target for entry in entries if entry.start <= place < entry.end} - found
            found |= around
            further |= around
        return {target for target in found if ends_block(target)}

    for each in dis.get_instructions(code) if entries else ():
        looks = each.opname.startswith("JUMP_BACKWARD") and not each.opname.endswith("NO_INTERRUPT")
        if looks and guards(each.argval) - guards(each.offset):
            yield [line for start, _, line in code.co_lines() if line and start <= each.offset][-1]


def test_every_jump_in_a_block_is_guarded():
    found = []
    for path in FILES:
        for code in codes(compile(path.read_text(encoding="utf-8"), str(path), "exec")):
            if getattr(code, "co_qualname", code.co_name) not in HARMLESS:
                found += [f"{path.parent.name}/{path.name}:{line} {code.co_name}" for line in set(unguarded(code))]
    assert not found


SAMPLE = """
def leaves(lock, numbers):
    with lock:
        return [number for number in numbers if number]

def loops(lock, numbers):
    with lock:
        while numbers:
            if numbers.pop():
                print()
"""


def test_a_jump_that_is_not_guarded_is_found():
    found = {code.co_name for code in codes(compile(SAMPLE, "sample", "exec")) if list(unguarded(code))}
    if sys.version_info < (3, 12):
        assert found == set()
    elif sys.version_info < (3, 14):
        assert found == {"leaves", "loops"}
    else:
        assert found <= {"leaves", "loops"}, "a later compiler may guard them again"
