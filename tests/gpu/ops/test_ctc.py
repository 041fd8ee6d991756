"""The CTC loss on the GPU: every row through its cases, its gradient against torch's, and labels that change."""

import numpy as np
import pytest

import dispatch
from dispatch.keys import HOST
from dispatch.ops.ctc import CtcRequest, ctc_loss
from dispatch.ops.ctc.cases import cases

ROWS = [row for row in dispatch.TABLE if row.op == "ctc_loss" and row.min_arch != HOST]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_a_case_or_refuses_it_with_its_reason(row, case, try_row):
    try_row(row, case)


def operands(gpu, rng, labels, label_lengths, input_lengths, steps=12, classes=6):
    logits = rng.standard_normal((steps, len(label_lengths), classes)).astype(np.float32)
    numbers = (np.array(array, np.int32) for array in (labels, label_lengths, input_lengths))
    return logits, [gpu.array(logits), *map(gpu.array, numbers)]


def torch_loss(torch, logits, labels, label_lengths, input_lengths):
    """Losses and gradient in f64 on the CPU."""
    x = torch.tensor(logits.astype(np.float64), requires_grad=True)
    losses = torch.nn.functional.ctc_loss(
        x.log_softmax(-1), *map(torch.tensor, (labels, input_lengths, label_lengths)), reduction="none"
    )
    losses.sum().backward()
    return losses.detach().numpy(), x.grad.numpy()


def test_losses_and_gradients_are_those_of_torch(gpu, rng):
    torch = pytest.importorskip("torch")
    numbers = ([1, 2, 2, 3, 4, 1, 5], [3, 1, 3], [12, 7, 10])
    logits, given = operands(gpu, rng, *numbers)
    losses, gradient = ctc_loss(*given, max_label_length=3)
    expected, slope = torch_loss(torch, logits, *numbers)
    np.testing.assert_allclose(losses.numpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(gradient.numpy(), slope, atol=1e-5)


def test_a_replay_reads_the_labels_that_are_there_then(gpu, rng):
    torch = pytest.importorskip("torch")
    _, given = operands(gpu, rng, [1, 1, 1], [2, 1], [12, 12])
    request = CtcRequest(*given, max_label_length=2, out=gpu.empty((2,)), gradient=gpu.empty((12, 2, 6)))
    for labels in ([1, 2, 3], [4, 4, 5], [3, 1, 2], [5, 2, 2]):
        logits = rng.standard_normal((12, 2, 6)).astype(np.float32)
        given[0].copy_from(logits)
        given[1].copy_from(np.array(labels, np.int32))
        losses, gradient = dispatch.run(request)
        expected, slope = torch_loss(torch, logits, labels, [2, 1], [12, 12])
        np.testing.assert_allclose(losses.numpy(), expected, rtol=1e-5)
        np.testing.assert_allclose(gradient.numpy(), slope, atol=1e-5)
