"""CtcRequest: logits, labels and their lengths. It is validated when it is made; this file calls no library."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.checks import check_int
from dispatch.core.operands import OperandRequest, Output, dense
from dispatch.core.request import R_co
from dispatch.errors import BadRequest
from dispatch.keys import I32

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["CtcRequest"]


@dataclass(frozen=True, eq=False)
class CtcRequest(OperandRequest[R_co]):
    """-log of the probability that logits give sequences of labels, over all alignments with blanks between the labels.

    Attributes:
        logits: (steps, sequences, classes), dense, before the softmax, which is part of the op; class 0 is the blank.
        labels: i32, the labels of all sequences, one sequence after the other, each label from 1 to classes - 1.
        label_lengths: i32 (sequences,): the number of labels of each sequence, from 1 to `max_label_length`.
        input_lengths: i32 (sequences,): the number of steps of each sequence, up to those of the logits.
        max_label_length: the largest number of labels of a sequence; workspace and launch depend on it.
        with_gradient: whether to return the gradient of each loss with respect to the logits, too.
        deterministic: whether sums are computed in the same order every time.
        out: the losses, (sequences,).
        gradient: of the logits' shape; 0 after the end of a sequence.

    A sequence without an alignment (fewer steps than labels plus one for each label that repeats the one before) has
    loss 0 and gradient 0. Lengths and labels are read on the device. On a GPU they cannot be checked in advance, and
    values out of these ranges are an error that may end the process.

    Returns the losses, with `with_gradient` (losses, gradient).
    """

    op: ClassVar[str] = "ctc_loss"
    reads: ClassVar[tuple[str, ...]] = ("logits", "labels", "label_lengths", "input_lengths")
    mixed: ClassVar[tuple[str, ...]] = ("labels", "label_lengths", "input_lengths")
    writes: ClassVar[tuple[str, ...]] = ("out", "gradient")

    logits: Tensor
    labels: Tensor
    label_lengths: Tensor
    input_lengths: Tensor
    _: KW_ONLY
    max_label_length: int
    with_gradient: bool = True
    deterministic: bool = True
    out: Tensor | None = None
    gradient: Tensor | None = None

    def check_fields(self) -> None:
        if self.logits.ndim != 3 or self.logits.size == 0 or self.logits.shape[2] < 2:
            raise BadRequest(
                "logits",
                str(self.logits.layout),
                "(steps, sequences, classes), with at least 2 classes and no extent of 0",
            )
        for name in ("labels", "label_lengths", "input_lengths"):
            tensor: Tensor = getattr(self, name)
            if tensor.dtype is not I32 or tensor.ndim != 1:
                raise BadRequest(name, str(tensor.layout), "an i32 tensor of one axis")
            if not tensor.layout.is_contiguous or tensor.layout.alignment < I32.itemsize:
                raise BadRequest(
                    name,
                    f"{tensor.layout} at {tensor.ptr:#x}",
                    "a dense tensor at an address that is a multiple of 4 bytes",
                    "dev.array(x)",
                )
            if name != "labels" and tensor.shape[0] != self.logits.shape[1]:
                raise BadRequest(name, str(tensor.layout), f"i32[{self.logits.shape[1]}], one for each sequence")
        check_int("max_label_length", self.max_label_length, 1)

    def outputs(self) -> dict[str, Output]:
        outputs = {"out": dense(self.logits.shape[1:2], self.logits.dtype)}
        if self.with_gradient:
            outputs["gradient"] = dense(self.logits.shape, self.logits.dtype)
        return outputs
