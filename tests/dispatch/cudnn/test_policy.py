"""What an engine of cuDNN may do to the numbers: every numerical note that there is has been decided upon."""

from __future__ import annotations

import pytest

from cudabind.sys import cudnn
from dispatch.libraries.cudnn.engines import LESS_PRECISE, Policy

NOTE = cudnn.cudnnBackendNumericalNote_t
HARMLESS = {NOTE.CUDNN_NUMERICAL_NOTE_STRICT_NAN_PROP}
ASKED = {  # forbidden where the request wants it so
    NOTE.CUDNN_NUMERICAL_NOTE_TENSOR_CORE: Policy(tensor_cores=False),
    NOTE.CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC: Policy(deterministic=True),
}
NOTES = [note for note in NOTE if note is not NOTE.CUDNN_NUMERICAL_NOTE_TYPE_COUNT]


@pytest.mark.parametrize("note", NOTES, ids=lambda note: note.name)
def test_what_is_less_precise_than_the_compute_type_is_never_used(note):
    assert (note in LESS_PRECISE) + (note in ASKED) + (note in HARMLESS) == 1, "decide about it"
    assert bool(Policy().forbids([note])) == (note in LESS_PRECISE)
    assert bool(Policy().forbids([*HARMLESS, note])) == (note in LESS_PRECISE)
    if note in ASKED:
        assert ASKED[note].forbids([note])
