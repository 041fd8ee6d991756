"""A request's operators as source, and a compiler's message about their lines as an error of the operator.

This file calls no library.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dispatch.errors import BadRequest
from dispatch.libraries.cusparse.operator_source import Operators

if TYPE_CHECKING:
    from cudabind.errors import NvrtcError
    from dispatch.keys import Dtype

__all__ = ["compile_error", "operators_of"]

LINE = re.compile(r"^(multiply|add|epilogue)\((\d+)\): (?:error|catastrophic error)[^:]*: (.*)$", re.MULTILINE)
FOUND = {"multiply": "a and b", "add": "a and b", "epilogue": "sum and c"}


def operators_of(request: Any, compute: Dtype) -> Operators:
    """The operators of a product over a semiring, and the dtype that they compute in."""
    semiring = request.ring
    epilogue = None if semiring.epilogue is None else semiring.epilogue.code
    codes = semiring.multiply.code, semiring.add.code, epilogue
    return Operators(compute, *codes, semiring.identity, adds_c=request.c is not None)


def compile_error(request: Any, error: NvrtcError) -> BadRequest | NvrtcError:
    """The compiler's error, rewritten to name the caller's line; unchanged if it is not about such a line."""
    match = LINE.search(error.log or "")
    if match is None:
        return error
    name, is_spmv_op = match.group(1), request.op == "spmv_op"
    operator = request.epilogue if is_spmv_op else getattr(request.ring, name)
    if operator is None:
        return error
    lines = operator.code.rstrip().splitlines()
    number = min(int(match.group(2)), len(lines))  # an error at the end of the last line is reported on the next
    place = name if is_spmv_op else f"semiring.{name}"
    message = f"{place}.code, of which line {number}, `{lines[number - 1].strip()}`, does not compile: {match.group(3)}"
    names = "row and x" if is_spmv_op else FOUND[name]
    return BadRequest(
        place, message, f"CUDA C++ that returns a Number; it can read {names}", _hint(request.values.dtype)
    )


def _hint(dtype: Dtype) -> str:
    return "complex numbers cannot be compared with < or >" if dtype.is_complex else ""
