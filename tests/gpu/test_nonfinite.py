"""NaN and infinities on the GPU: every row by its own cases, beside the host, and as its column says."""

import functools
import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.core.nonfinite import ENGINE, IEEE, NONE, OPERATORS, SPREAD, TO_NAN
from dispatch.keys import HOST
from dispatch.ops import FAMILIES
from dispatch.ops.rnn.cases import FORMS
from dispatch.ops.rnn.weights import weight_shapes

SOURCE = Path(__file__).parents[1] / "dispatch" / "test_nonfinite.py"
spec = importlib.util.spec_from_file_location("the_host_s", SOURCE)
the_host_s = importlib.util.module_from_spec(spec)
spec.loader.exec_module(the_host_s)

# CUTLASS compiles a kernel for each tree, half a minute each: its trees have a test of their own.
ROWS = [
    row
    for row in dp.TABLE
    if row.min_arch != HOST and row.run_on and row.nonfinite != NONE
    if row.op not in the_host_s.WITHOUT_CASES and not row.op.startswith("cutlass")
]
# Not held to the host: draws of their own; V of a key that a mask hides, which is read or not; gradients of infinities.
DRAWN = ("dropout", "dropout_bwd")
LOCAL_NORMS = ("lrn", "lrn_bwd", "divisive_norm", "divisive_norm_bwd")  # whose rows say what is cuDNN's own way
LINEAR_ALGEBRA = FAMILIES["linalg"][1]  # where one NaN makes all of a matrix NaN, or those elements that read it
FOURIER = FAMILIES["fft"][1]  # where one NaN makes all of a transform NaN
HIDDEN = {"sdpa_fwd": ("v",)}
NAN_ALONE = ("rnn_bwd_data", "rnn_bwd_weights", "norm_bwd")
# Scales of blocks are multiplied into what they scale on the host, and into sums of it on a GPU: 0 times infinity.
FACTORS = ("scales.", "descale", "scale_")


@pytest.fixture
def gpu():
    return dp.device("cuda:0")


def kinds(array):
    """What of numbers is compared where they are not finite: nothing, NaN, +∞ or -∞."""
    return np.where(np.isnan(array), 3, np.where(np.isposinf(array), 2, np.where(np.isneginf(array), 1, 0)))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_does_with_nan_and_infinities_as_it_says(row, gpu):
    """No result that reads an element hides its NaN; where a row is as IEEE 754 has it, the host does the same."""
    if not row.on(gpu.arch):
        pytest.skip(f"needs {row.min_arch}, this GPU is {gpu.arch}")
    host = dp.device("host")
    alike = row.nonfinite.startswith(IEEE) and row.op not in (*DRAWN, *LOCAL_NORMS)
    alike &= not any(dtype.is_complex for dtype in row.dtypes if dtype is not None)  # whose parts mix
    assert (
        alike
        or row.nonfinite.startswith((ENGINE, IEEE, SPREAD, OPERATORS))
        or row.op in ("dense_to_sparse", "ldl")
        or row.op in (*LOCAL_NORMS, *LINEAR_ALGEBRA, *FOURIER)
    )
    values = {"nan": np.nan} if row.op in NAN_ALONE or not alike else the_host_s.VALUES
    complaints = []
    for make in the_host_s.makers(row, gpu):
        alpha = getattr(make(), "alpha", None)
        if "alpha of 0" in row.nonfinite and isinstance(alpha, int | float | complex) and alpha == 0:
            continue  # which NaN is multiplied by, or not
        found = []
        twin = functools.partial(make, device=host)
        others = the_host_s.effects(twin, values) if alike else iter(())
        for effect in the_host_s.effects(make, values):
            found += the_host_s.hidden(row, effect)[1]
            if alike:
                theirs = next(others)
                assert (effect.name, effect.spot) == (theirs.name, theirs.spot)
                if effect.name not in (*the_host_s.CHOOSING.get(row.op, ()), *HIDDEN.get(row.op, ())):
                    found += differences(row, effect, theirs.found)
        complaints += [f"-- {make().describe()}", *found] if found else []
    assert not complaints, "\n".join(complaints)


def differences(row, effect, theirs):
    """Where results are of another kind than the host's, with each value put into an operand."""
    for label in the_host_s.VALUES.keys() & effect.found.keys():
        if label != "nan" and effect.name.startswith(FACTORS):
            continue
        for place, (got, wanted) in enumerate(zip(effect.found[label], theirs[label], strict=True)):
            if row.op == "norm_fwd" and place and label != "nan":
                continue  # the inverse variance of infinity
            if row.op == "ctc_loss" and place and not np.isfinite(theirs[label][0]).all():
                continue  # the gradient of an infinite loss
            free = (np.isnan(got) | np.isnan(wanted)) & (label != "nan" and TO_NAN in row.nonfinite)
            what = f"{row.name}: {effect.name} {effect.spot} = {label}, result {place}"
            yield from unlike(what, got, np.where(free, got, wanted))


def unlike(what, got, wanted):
    """In words where two results are of another kind, and the first of them."""
    differs = kinds(got) != kinds(wanted)
    if differs.any():
        first = [tuple(map(int, place)) for place in np.argwhere(differs)[:4]]
        pairs = [f"{place}: {got[place]} here, {wanted[place]} on the host" for place in first]
        yield f"{what}: {differs.sum()} of {differs.size} differ; {'; '.join(pairs)}"


# -- the three passes of a recurrent network, one behind the other ----------------------------------------------------
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form[0])
def test_nan_takes_the_same_way_through_all_passes_of_a_network(form, gpu):
    """NaN in what the forward pass and the first backward pass read, on the GPU and on the host: all results."""
    _, network, steps, batch, lengths, _, states = form
    complaints = []
    for with_states in {states, False}:
        operands = drawn(network, steps, batch, with_states)
        clean = passes(gpu, network, operands, lengths)
        assert all(np.isfinite(array).all() for array in clean.values())
        for name, array in operands.items():
            for number in sorted({0, array.size // 3, array.size - 1}):
                changed = {**operands, name: array.copy()}
                changed[name].reshape(-1)[number] = np.nan
                mine, theirs = (passes(dev, network, changed, lengths) for dev in (gpu, dp.device("host")))
                for result, got in mine.items():
                    what = f"{'' if with_states else 'no states, '}{name}[{number}] = nan, {result}"
                    complaints += unlike(what, got, theirs[result])
    assert not complaints, "\n".join(complaints)


def drawn(network, steps, batch, states):
    """Numbers for all operands of the passes; of ReLU's such that no unit is near its corner."""
    rng = np.random.default_rng(5)
    shapes = {**weight_shapes(network), "x": (steps, batch, network.input_size)}
    shapes["dy"] = (steps, batch, network.output_size)
    hidden, cells = ((network.pseudo_layers, batch, size) for size in (network.state_size, network.hidden_size))
    if states:
        shapes |= {"hx": hidden, "dhy": hidden}
        shapes |= {"cx": cells, "dcy": cells} if network.mode is dp.RnnMode.LSTM else {}
    return {name: rng.standard_normal(shape, np.float32) * np.float32(0.3) for name, shape in shapes.items()}


def passes(dev, network, operands, lengths):
    """All results of the three passes by name, the gradients of the weights by theirs."""
    weights = dp.pack_weights(network, {n: operands[n] for n in weight_shapes(network)}, dev)
    x, dy = dev.array(operands["x"]), dev.array(operands["dy"])
    hx, cx, dhy, dcy = (dev.array(operands[n]) if n in operands else None for n in ("hx", "cx", "dhy", "dcy"))
    y, *last, reserve = dp.rnn(x, weights, network, hx=hx, cx=cx, lengths=lengths, training=True)
    given = {"hx": hx, "lengths": lengths}
    back = dp.rnn_bwd_data(y, dy, weights, reserve, network, cx=cx, dhy=dhy, dcy=dcy, **given)
    space = dp.rnn_bwd_weights(x, y, reserve, network, **given)
    found = {
        "y": y,
        **dict(zip(("hy", "cy"), last, strict=False)),
        **dict(zip(("dx", "dhx", "dcx"), back, strict=False)),
    }
    return {name: tensor.numpy() for name, tensor in found.items()} | dp.unpack_weights(network, space)
