"""The flags of BLAS routines, with cuBLAS's names and numbers."""

from __future__ import annotations

from dispatch.core.matrix_choices import DiagType, FillMode, Operation, SideMode

__all__ = ["DiagType", "FillMode", "Operation", "SideMode"]
