"""The choices of BLAS routines, in cuBLAS's words and numbers."""

from __future__ import annotations

from dispatch.core.matrix_choices import DiagType, FillMode, Operation, SideMode

__all__ = ["DiagType", "FillMode", "Operation", "SideMode"]
