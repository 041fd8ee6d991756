"""einsum on the command line: up to five operands, each with a flag.

`explain einsum --spec "ij,jk,kl->il" --shape 8x64 --shape 64x32 --shape 32x4 --dtype f32` is a chain of two products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.ops.contraction.einsum import EinsumRequest

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Compute

__all__ = ["EinsumFields"]


@dataclass(frozen=True)
class EinsumFields:
    """The fields of einsum's request in a form for the command line; `request` makes the request.

    Attributes:
        spec: a letter for each axis of each operand, and of the result after "->".
        a, b, c, d, e: the operands.
        conj: the numbers of the operands that are conjugated.
        optimize: how the order of the contractions is chosen.
        memory_limit: the maximum size of an intermediate result, in bytes.
        compute: the precision of the contractions.
        library: the only library whose rows may run the steps.
        autotune: whether all rows that take a step are timed.
        jit: whether cuTENSOR may compile kernels.
    """

    op: ClassVar[str] = EinsumRequest.op

    a: Tensor
    b: Tensor | None = None
    c: Tensor | None = None
    d: Tensor | None = None
    e: Tensor | None = None
    spec: str = "...->..."
    conj: tuple[int, ...] = ()
    optimize: str = "auto"
    memory_limit: int | None = None
    compute: Compute | str | None = None
    library: str | None = None
    autotune: bool = False
    jit: bool = False

    def request(self) -> EinsumRequest:
        """The request over the given operands."""
        operands = [one for one in (self.a, self.b, self.c, self.d, self.e) if one is not None]
        return EinsumRequest(
            self.spec,
            operands,
            conj=self.conj,
            optimize=self.optimize,
            memory_limit=self.memory_limit,
            compute=self.compute,
            library=self.library,
            autotune=self.autotune,
            jit=self.jit,
        )
