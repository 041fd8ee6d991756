"""Enums of matrix routines, with the names and values that cuBLAS and cuSPARSE share."""

from __future__ import annotations

from dispatch.keys import Choice

__all__ = ["DiagType", "FillMode", "Operation", "SideMode"]


class FillMode(Choice):
    """`cublasFillMode_t`: which triangle of a matrix is read or written; the other one is not accessed."""

    LOWER = 0
    UPPER = 1

    @staticmethod
    def other_names() -> dict[str, str]:
        return {"L": "LOWER", "U": "UPPER"}

    @property
    def other(self) -> FillMode:
        return FillMode.UPPER if self is FillMode.LOWER else FillMode.LOWER


class SideMode(Choice):
    """`cublasSideMode_t`: on which side of the general matrix the structured one is multiplied."""

    LEFT = 0
    RIGHT = 1

    @staticmethod
    def other_names() -> dict[str, str]:
        return {"L": "LEFT", "R": "RIGHT"}

    @property
    def other(self) -> SideMode:
        return SideMode.RIGHT if self is SideMode.LEFT else SideMode.LEFT


class DiagType(Choice):
    """`cublasDiagType_t`: whether the diagonal of a triangular matrix is read, or assumed to be ones."""

    NON_UNIT = 0
    UNIT = 1

    @staticmethod
    def other_names() -> dict[str, str]:
        return {"N": "NON_UNIT", "U": "UNIT"}


class Operation(Choice):
    """`cublasOperation_t`: a matrix as it is, transposed, or conjugated and transposed."""

    N = 0
    T = 1
    C = 2

    @staticmethod
    def other_names() -> dict[str, str]:
        return {
            **dict.fromkeys(("NONE", "NOTRANS", "NONTRANSPOSE"), "N"),
            **dict.fromkeys(("TRANS", "TRANSPOSE"), "T"),
            **dict.fromkeys(("H", "CONJTRANS", "CONJUGATETRANSPOSE", "HERMITIAN"), "C"),
        }
