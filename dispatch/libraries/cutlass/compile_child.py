"""The compiler process: an order on stdin, the cubin on stdout, NVRTC's log on stderr.

compile.py starts one for each kernel. It ends with 1 where NVRTC refuses.
"""

from __future__ import annotations

import json
import sys

from cudabind import nvrtc
from cudabind.errors import NvrtcError
from dispatch.libraries.cutlass import headers

__all__ = ["main"]


def main() -> None:
    """Compile what stdin describes."""
    order = json.load(sys.stdin)
    found = headers.find()
    options = [*(f"-I{path}" for path in found.include), *order["options"]]
    try:
        made = nvrtc.compile(order["text"], "gemm.cu", options, found.texts)
    except NvrtcError as error:
        sys.stderr.write(error.log or str(error))
        sys.exit(1)
    sys.stdout.buffer.write(made.code)
