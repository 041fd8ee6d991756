"""Cosine and sine transforms with SciPy's signatures: `dispatch.fft.dct`, `idct`, `dst` and `idst`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.ops.fft.cosine import dct as forward_dct
from dispatch.ops.fft.cosine import dst as forward_dst

if TYPE_CHECKING:
    from dispatch.ops.fft.request import DftNorm

__all__ = ["dct", "dst", "idct", "idst"]


def dct(
    x: Any,
    type: int = 2,  # noqa: A002 - SciPy's
    n: int | None = None,
    axis: int = -1,
    norm: DftNorm | str | None = None,
    overwrite_x: bool = False,  # as in SciPy, which may then reuse the memory of `x`; it has no effect here
    *,
    orthogonalize: bool | None = None,
    out: Any = None,
) -> Any:
    """The discrete cosine transform of type 1, 2, 3 or 4; `dispatch.dct` has the formulas."""
    del overwrite_x
    return forward_dct(x, type, n, axis, norm=_word(norm), orthogonalize=orthogonalize, out=out)


def idct(
    x: Any,
    type: int = 2,  # noqa: A002 - SciPy's
    n: int | None = None,
    axis: int = -1,
    norm: DftNorm | str | None = None,
    overwrite_x: bool = False,  # SciPy's
    *,
    orthogonalize: bool | None = None,
    out: Any = None,
) -> Any:
    """The inverse of `dct` of the same type."""
    del overwrite_x
    return forward_dct(x, type, n, axis, inverse=True, norm=_word(norm), orthogonalize=orthogonalize, out=out)


def dst(
    x: Any,
    type: int = 2,  # noqa: A002 - SciPy's
    n: int | None = None,
    axis: int = -1,
    norm: DftNorm | str | None = None,
    overwrite_x: bool = False,  # SciPy's
    *,
    orthogonalize: bool | None = None,
    out: Any = None,
) -> Any:
    """The discrete sine transform of type 1, 2, 3 or 4; `dispatch.dst` has the formulas."""
    del overwrite_x
    return forward_dst(x, type, n, axis, norm=_word(norm), orthogonalize=orthogonalize, out=out)


def idst(
    x: Any,
    type: int = 2,  # noqa: A002 - SciPy's
    n: int | None = None,
    axis: int = -1,
    norm: DftNorm | str | None = None,
    overwrite_x: bool = False,  # SciPy's
    *,
    orthogonalize: bool | None = None,
    out: Any = None,
) -> Any:
    """The inverse of `dst` of the same type."""
    del overwrite_x
    return forward_dst(x, type, n, axis, inverse=True, norm=_word(norm), orthogonalize=orthogonalize, out=out)


def _word(norm: DftNorm | str | None) -> DftNorm | str:
    return "backward" if norm is None else norm
