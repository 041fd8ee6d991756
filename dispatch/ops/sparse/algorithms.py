"""The algorithms of cuSPARSE's generic interface, with its names and numbers."""

from __future__ import annotations

from dispatch.keys import Choice

__all__ = ["SpgemmAlgorithm", "SpmmAlgorithm", "SpmvAlgorithm", "SpsvAlgorithm"]


class SpmvAlgorithm(Choice):
    """`cusparseSpMVAlg_t`: ALG2 algorithms give the same bits in each run; BSR needs cuSPARSE 12.6.3."""

    DEFAULT = 0
    COO_ALG1 = 1
    CSR_ALG1 = 2
    CSR_ALG2 = 3
    COO_ALG2 = 4
    BSR_ALG1 = 6


class SpmmAlgorithm(Choice):
    """`cusparseSpMMAlg_t`: CSR_ALG2 is for row-major b, CSR_ALG3 and COO_ALG2 give the same bits in each run.

    CSR_ALG3 supports neither CSC nor a `trans` other than "n".
    """

    DEFAULT = 0
    COO_ALG1 = 1
    COO_ALG2 = 2
    COO_ALG3 = 3
    CSR_ALG1 = 4
    COO_ALG4 = 5
    CSR_ALG2 = 6
    CSR_ALG3 = 12
    BSR_ALG1 = 14


class SpsvAlgorithm(Choice):
    """`cusparseSpSVAlg_t`; all but DEFAULT need cuSPARSE 12.9.4 or newer."""

    DEFAULT = 0
    ALG1 = 1
    ALG2 = 2


class SpgemmAlgorithm(Choice):
    """`cusparseSpGEMMAlg_t`; ALG2 and ALG3 compute the product in parts: they need less memory and more time than ALG1.

    The CSR_ALG ones, spelled as the library does, belong to cusparseSpGEMMreuse: they need two matrices of fixed
    patterns, with i32 indices from 0 on. For such matrices DEFAULT uses it, too; else DEFAULT is the library's choice.
    """

    DEFAULT = 0
    CSR_ALG_DETERMINITIC = 1
    CSR_ALG_NONDETERMINITIC = 2
    ALG1 = 3
    ALG2 = 4
    ALG3 = 5
