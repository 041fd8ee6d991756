"""cuTENSOR's operators and algorithms, by NVIDIA's names; a test compares the numbers with the bindings."""

from __future__ import annotations

from dispatch.keys import Choice

__all__ = ["BINARY", "ORDERED", "ContractionAlgo", "TensorOp"]


class TensorOp(Choice):
    """`cutensorOperator_t`: of one element, or of two (ADD, MUL, MAX, MIN).

    RCP is 1/x, SOFT_PLUS log(eˣ + 1), SOFT_SIGN x / (|x| + 1), SWISH x · sigmoid(x), MISH x · tanh(log(eˣ + 1)).
    """

    IDENTITY = 1
    SQRT = 2
    ADD = 3
    MUL = 5
    MAX = 6
    MIN = 7
    RELU = 8
    CONJ = 9
    RCP = 10
    SIGMOID = 11
    TANH = 12
    EXP = 22
    LOG = 23
    ABS = 24
    NEG = 25
    SIN = 26
    COS = 27
    TAN = 28
    SINH = 29
    COSH = 30
    ASIN = 31
    ACOS = 32
    ATAN = 33
    ASINH = 34
    ACOSH = 35
    ATANH = 36
    CEIL = 37
    FLOOR = 38
    MISH = 39
    SWISH = 40
    SOFT_PLUS = 41
    SOFT_SIGN = 42

    @staticmethod
    def other_names() -> dict[str, str]:
        return {
            "SUM": "ADD",
            "PROD": "MUL",
            "PRODUCT": "MUL",
            "MAXIMUM": "MAX",
            "MINIMUM": "MIN",
            "NONE": "IDENTITY",
            "CONJUGATE": "CONJ",
            "RECIPROCAL": "RCP",
            "NEGATIVE": "NEG",
            "SILU": "SWISH",
            "ARCTAN": "ATAN",
            "ARCSIN": "ASIN",
            "ARCCOS": "ACOS",
            "ARCSINH": "ASINH",
            "ARCCOSH": "ACOSH",
            "ARCTANH": "ATANH",
        }


BINARY = (TensorOp.ADD, TensorOp.MUL, TensorOp.MAX, TensorOp.MIN)
ORDERED = (  # the operators that are not defined for complex numbers
    *(TensorOp.MAX, TensorOp.MIN, TensorOp.RELU, TensorOp.CEIL, TensorOp.FLOOR),
    *(TensorOp.MISH, TensorOp.SWISH, TensorOp.SOFT_SIGN),
)


class ContractionAlgo(Choice):
    """`cutensorAlgo_t`: the algorithm of a contraction.

    DEFAULT: chosen by a performance model, DEFAULT_PATIENT: by a slower and better model, GETT: direct, TGETT: after a
    transposition of one operand, TTGT: transpositions around a matrix product, which needs memory for copies.
    """

    DEFAULT_PATIENT = -6
    GETT = -4
    TGETT = -3
    TTGT = -2
    DEFAULT = -1
