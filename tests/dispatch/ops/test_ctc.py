"""The CTC loss on the host: against a sum over all alignments, its gradient against finite differences, refusals."""

import itertools

import numpy as np
import pytest
import scipy.special

import dispatch
from dispatch import TABLE
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import HOST
from dispatch.ops.ctc import CtcRequest, ctc_loss, reference
from dispatch.ops.ctc.cases import cases
from dispatch.row_check import check_row

ROWS = [row for row in TABLE if row.op == "ctc_loss" and row.on(HOST)]


@pytest.fixture
def dev():
    return dispatch.device("host")


def collapsed(path):
    """What a path of classes says: repeats count once, blanks not at all."""
    return tuple(label for label, _ in itertools.groupby(path) if label)


def enumerated(logits, labels):
    """-log of the sum over every path of classes that says these labels."""
    logs = scipy.special.log_softmax(logits, axis=-1)
    paths = [p for p in itertools.product(range(logits.shape[1]), repeat=len(logits)) if collapsed(p) == tuple(labels)]
    return -scipy.special.logsumexp([logs[range(len(logs)), p].sum() for p in map(list, paths)])


def request_of(dev, logits, labels, lengths, steps, **fields):
    numbers = (dev.array(np.array(array, np.int32)) for array in (labels, lengths, steps))
    return CtcRequest(dev.array(logits), *numbers, **{"max_label_length": max(lengths), **fields})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_host_row_passes_its_cases_or_refuses_what_is_too_long(row, dev, rng):
    refused = {case.name: why for case in cases(row) if (why := check_row(row, case, dev, rng))}
    assert refused == {"too long": "needs max_label_length up to 255, has 256"}


@pytest.mark.parametrize("labels", [(1,), (1, 2), (2, 2), (1, 2, 1), (3, 3, 1), (1, 2, 3)])
def test_as_a_sum_over_all_alignments(labels, dev, rng):
    logits = rng.standard_normal((6, 1, 4)) * 2
    held = reference(request_of(dev, logits, labels, [len(labels)], [6]))
    assert held["out"] == pytest.approx(enumerated(logits[:, 0], labels), rel=1e-12)
    losses, gradient = dispatch.run(request_of(dev, logits.astype(np.float32), labels, [len(labels)], [6]))
    np.testing.assert_allclose(losses.numpy(), held["out"], rtol=1e-5)
    np.testing.assert_allclose(gradient.numpy(), held["gradient"], atol=1e-5)


def test_sequences_end_where_their_lengths_say(dev, rng):
    logits = rng.standard_normal((6, 3, 4))
    held = reference(request_of(dev, logits, [1, 2, 2, 3], [2, 1, 1], [6, 3, 4]))
    parts = [enumerated(logits[:n, i], of) for i, (n, of) in enumerate([(6, (1, 2)), (3, (2,)), (4, (3,))])]
    np.testing.assert_allclose(held["out"], parts, rtol=1e-12)
    assert not held["gradient"][3:, 1].any()
    assert not held["gradient"][4:, 2].any()


def test_the_gradient_is_that_of_finite_differences(dev, rng, slope_of):
    logits, weights = rng.standard_normal((5, 2, 4)), rng.standard_normal(2)

    def forward(values):
        return reference(request_of(dev, values, [1, 1, 3], [2, 1], [5, 4]))["out"]

    gradient = reference(request_of(dev, logits, [1, 1, 3], [2, 1], [5, 4]))["gradient"] * weights[None, :, None]
    np.testing.assert_allclose(gradient, slope_of(forward, logits, weights), rtol=1e-6, atol=1e-9)


def test_what_has_no_alignment_has_loss_0_and_gradient_0(dev, rng):
    """Two equal labels want a blank between them: three steps at least."""
    held = reference(request_of(dev, rng.standard_normal((3, 3, 4)), [2, 2] * 3, [2] * 3, [2, 0, 3]))
    assert held["out"][0] == held["out"][1] == 0 < held["out"][2]
    assert not held["gradient"][:, :2].any()
    assert held["gradient"][:, 2].any()


def test_the_loss_alone(dev, rng):
    logits = rng.standard_normal((4, 1, 3)).astype(np.float32)
    numbers = [dev.array(np.array(array, np.int32)) for array in ([1, 2], [2], [4])]
    alone = ctc_loss(dev.array(logits), *numbers, max_label_length=2, with_gradient=False)
    both, _ = ctc_loss(dev.array(logits), *numbers, max_label_length=2)
    np.testing.assert_array_equal(alone.numpy(), both.numpy())


# fmt: off
REFUSED = [  # fields that are changed, the operand that is named, what was given, what was expected
    ({"logits": ((4, 2), "f32")},          "logits",           "f32[4, 2]",    "(steps, sequences, classes"),
    ({"logits": ((4, 2, 1), "f32")},       "logits",           "f32[4, 2, 1]", "at least 2 classes"),
    ({"labels": ((3,), "i64")},            "labels",           "i64[3]",       "i32"),
    ({"label_lengths": ((3,), "i32")},     "label_lengths",    "i32[3]",       "i32[2], one for each"),
    ({"input_lengths": ((2, 1), "i32")},   "input_lengths",    "i32[2, 1]",    "one axis"),
    ({"max_label_length": 0},              "max_label_length", "0",            "from 1"),
    ({"with_gradient": 1},                 "with_gradient",    "1",            "bool"),
]
# fmt: on


@pytest.mark.parametrize(("changes", "operand", "given", "expected"), REFUSED)
def test_a_refusal_names_operand_given_and_expected(changes, operand, given, expected, dev):
    fields = {
        "logits": ((4, 2, 5), "f32"),
        "labels": ((3,), "i32"),
        "label_lengths": ((2,), "i32"),
        "input_lengths": ((2,), "i32"),
        "max_label_length": 2,
    }
    fields.update(changes)
    made = {n: dev.zeros(*value) if isinstance(value, tuple) else value for n, value in fields.items()}
    with pytest.raises(BadRequest) as caught:
        CtcRequest(**made)
    assert caught.value.operand == operand
    assert given in caught.value.given
    assert expected in caught.value.expected


OUT_OF_RANGE = [  # labels, their number, the number of steps, the operand that is named
    ([1, 5], [2], [4], "labels"),
    ([0, 1], [2], [4], "labels"),
    ([1], [2], [4], "label_lengths"),
    ([1], [0], [4], "label_lengths"),
    ([1], [1], [5], "input_lengths"),
]


@pytest.mark.parametrize(("labels", "lengths", "steps", "operand"), OUT_OF_RANGE)
def test_the_host_refuses_labels_and_lengths_out_of_range(labels, lengths, steps, operand, dev):
    request = request_of(dev, np.zeros((4, 1, 5), np.float32), labels, lengths, steps, max_label_length=2)
    with pytest.raises(BadRequest) as caught:
        dispatch.run(request)
    assert caught.value.operand == operand


def test_logits_that_are_not_dense_have_no_row(dev):
    numbers = [dev.zeros(shape, "i32") for shape in ((1,), (1,), (1,))]
    with pytest.raises(NoRow, match="needs logits dense"):
        ctc_loss(dev.zeros((4, 1, 6))[:, :, :5], *numbers, max_label_length=1)


def test_a_class_without_probability_has_no_gradient_there(dev, rng):
    """-∞ is a probability of 0: the loss is that of the paths that are left, and no gradient is NaN."""
    logits = rng.standard_normal((5, 1, 3))
    logits[2, 0, 1] = -np.inf
    request = request_of(dev, logits.astype(np.float32), [1, 2], [2], [5])
    loss, gradient = (t.numpy() for t in dispatch.run(request))
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(loss, [enumerated(logits[:, 0].astype(np.float32), [1, 2])], rtol=1e-5)
    assert np.isfinite(gradient).all()
    assert gradient[2, 0, 1] == 0
    np.testing.assert_allclose(gradient.sum(axis=-1), 0, atol=1e-5)
