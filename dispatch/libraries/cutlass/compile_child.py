"""The compiler process: a description of the compilation on stdin, the cubin on stdout, NVRTC's log on stderr.

compile.py starts one for each kernel. Its exit status is 1 if NVRTC refuses the source.
"""

from __future__ import annotations

import json
import sys

from cudabind import nvrtc
from cudabind.errors import NvrtcError
from dispatch.libraries.cutlass import headers

__all__ = ["main"]


def main() -> None:
    """Compile the source that stdin describes."""
    order = json.load(sys.stdin)
    installed = headers.find()
    options = [*(f"-I{path}" for path in installed.include), *order["options"]]
    try:
        compiled = nvrtc.compile(order["text"], "gemm.cu", options, installed.texts)
    except NvrtcError as error:
        sys.stderr.write(error.log or str(error))
        sys.exit(1)
    sys.stdout.buffer.write(compiled.code)
