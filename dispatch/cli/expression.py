"""Expressions on the command line: names, numbers, calls and + - * /, and nothing else of Python.

Epilogue trees are written like `relu(accumulator() + row("bias"))`, and graphs like `RELU_FWD(matmul(x, y))`.
"""

from __future__ import annotations

import ast
import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["evaluate"]

SIGNS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(text: str, names: Mapping[str, Any]) -> Any:
    """The value of an expression over these names; ValueError for any other text."""
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, names)
    except (SyntaxError, LookupError, TypeError, ZeroDivisionError) as error:
        raise ValueError(str(error)) from error


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=int() | float() | str() as value):
            return value
        case ast.Name(id=name):
            return names[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, names)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in SIGNS:
            return SIGNS[type(sign)](_value(left, names), _value(right, names))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if all(each.arg for each in keywords):
            keyword_values = {str(each.arg): _value(each.value, names) for each in keywords}
            return names[name](*(_value(arg, names) for arg in args), **keyword_values)
        case _:
            raise ValueError(ast.unparse(node))
