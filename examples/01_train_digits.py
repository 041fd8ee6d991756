"""Train a network on real handwritten digits, every product of it one fused request through a supervisor.

The data are the UCI handwritten digits in `data/`, the network a 64 → 256 → 128 → 10 MLP. In the forward pass, the bias
and the ReLU (with its mask) are fused with the product; in the backward pass, the mask and the bias gradient. The
product that computes the gradient of the weights updates them in place: W = W - rate · Xᵀ · dY. NumPy computes the
softmax and updates the biases.

    python examples/01_train_digits.py --device cuda:0 --dtype bf16
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import dispatch as dp
from dispatch import Epilogue

HERE = Path(__file__).resolve().parent
SIZES = (64, 256, 128, 10)
BATCH = 64
RATE = 0.3
GOAL = 0.97


class Data(NamedTuple):
    """Pixels from 0 to 1, and digits; a random fifth of them, chosen by a seed, is held out."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def load(seed: int) -> Data:
    """The 1,797 scans, shuffled and split."""
    with gzip.open(HERE / "data" / "digits.csv.gz", "rt", encoding="ascii") as text:
        digits = np.loadtxt(text, delimiter=",", dtype=np.float32)
    digits = np.random.default_rng(seed).permutation(digits)
    x, y = digits[:, :64] / 16, digits[:, 64].astype(np.int64)
    held_out = len(x) // 5
    return Data(x[held_out:], y[held_out:], x[:held_out], y[:held_out])


def shift(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Half of the scans shifted by a pixel, each in a random direction: handwriting is not always centred."""
    padded = np.pad(x.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)))
    down, right = (1 + rng.integers(-1, 2, (2, len(x))) * (rng.random(len(x)) < 0.5))[:, :, None] + np.arange(8)
    return padded[np.arange(len(x))[:, None, None], down[:, :, None], right[:, None, :]].reshape(x.shape)


class Layer:
    """One layer's parameters on the device.

    `w` is the operand of products, in the dtype of the run; `master` is its f32 version, which the updates add to. In
    an f32 run they are one tensor, and the weights never leave the device.
    """

    def __init__(self, device: dp.Device, dtype: str, rows: int, columns: int, rng: np.random.Generator) -> None:
        start = rng.standard_normal((rows, columns)) * np.sqrt(2 / rows)
        self.master = device.array(start, "f32")
        self.w = self.master if dtype == "f32" else device.array(start, dtype)
        self.bias_master = np.zeros(columns, np.float32)
        self.bias = device.zeros(columns, dtype)
        # Outputs of a training step, allocated once: its requests then have the same addresses every time.
        self.y = device.empty((BATCH, columns), dtype)
        self.dy = device.empty((BATCH, columns), dtype)

    def descend(self, bias_gradient: dp.Tensor, rate: float) -> None:
        """Update the bias, which is small, in NumPy; and round the master weights to the dtype of the run."""
        self.bias_master -= rate * np.asarray(bias_gradient, np.float32)
        self.bias.copy_from(self.bias_master)
        if self.w is not self.master:
            self.w.copy_from(self.master)


class Network:
    """The layers, and the eight requests of a training step, which are made once and submitted many times."""

    def __init__(self, device: dp.Device, dtype: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.device, self.dtype = device, dtype
        self.x = device.empty((BATCH, SIZES[0]), dtype)
        self.minus_rate = device.array(np.float32([-RATE]))  # alpha of the updates: in memory, so that it may change
        self.layers = [Layer(device, dtype, *pair, rng) for pair in itertools.pairwise(SIZES)]
        one, two, three = self.layers
        masks = [self.mask(layer) for layer in (one, two)]
        self.forward = [
            self.hidden(self.x, one, masks[0]),
            self.hidden(one.y, two, masks[1]),
            dp.MatmulRequest(two.y, three.w, bias=three.bias, epilogue=Epilogue.BIAS, out=three.y),
        ]
        # dX = dY · Wᵀ where the ReLU was active, and its sum over the batch: the bias gradient of the layer below.
        self.back_two = self.back(three, two, masks[1])
        self.back_one = self.back(two, one, masks[0])
        # The last layer's bias gradient is the sum of dY, which is computed with its update.
        self.update_three = self.update(two.y, three, Epilogue.BGRADB)
        self.update_two = self.update(one.y, two, Epilogue.NONE)
        self.update_one = self.update(self.x, one, Epilogue.NONE)

    def mask(self, layer: Layer) -> dp.Tensor:
        shape, _ = dp.aux_shape(Epilogue.RELU_AUX_BIAS, layer.y.shape)
        return self.device.empty(shape, "u8")

    def hidden(self, x: dp.Tensor, layer: Layer, mask: dp.Tensor) -> dp.MatmulRequest:
        return dp.MatmulRequest(x, layer.w, bias=layer.bias, aux=mask, out=layer.y, epilogue=Epilogue.RELU_AUX_BIAS)

    def back(self, layer: Layer, below: Layer, mask: dp.Tensor) -> dp.MatmulRequest:
        bgrad = self.device.empty(below.bias.shape, self.dtype)
        return dp.MatmulRequest(layer.dy, layer.w.T, aux=mask, bgrad=bgrad, out=below.dy, epilogue=Epilogue.DRELU_BGRAD)

    def update(self, x: dp.Tensor, layer: Layer, epilogue: Epilogue) -> dp.MatmulRequest:
        return dp.MatmulRequest(x.T, layer.dy, out=layer.master, alpha=self.minus_rate, beta=1.0, epilogue=epilogue)

    def requests(self) -> dict[str, dp.MatmulRequest]:
        """Every product of a training step, by its purpose."""
        one, two, three = self.forward
        return {
            "forward 1": one, "forward 2": two, "forward 3": three,
            "backward 3": self.back_two, "update 3": self.update_three,
            "backward 2": self.back_one, "update 2": self.update_two, "update 1": self.update_one,
        }  # fmt: skip

    def step(self, sup: dp.Supervisor, x: np.ndarray, y: np.ndarray, rate: float) -> float:
        """One step of gradient descent on a batch; returns its loss before the step."""
        one, two, three = self.layers
        self.x.copy_from(x)
        for request in self.forward:
            sup.submit(request).result()
        loss, gradient = cross_entropy(np.asarray(three.y, np.float32), y)
        three.dy.copy_from(gradient)
        _, bgrad_two = sup.submit(self.back_two).result()
        # The update of a layer waits until the gradient has passed through its weights; then the two run concurrently.
        update, back = sup.submit(self.update_three), sup.submit(self.back_one)
        _, bgrad_one = back.result()
        for future in [sup.submit(self.update_two), sup.submit(self.update_one)]:
            future.result()
        _, bgrad_three = update.result()
        for layer, bgrad in ((three, bgrad_three), (two, bgrad_two), (one, bgrad_one)):
            layer.descend(bgrad, rate)
        return loss

    def predict(self, sup: dp.Supervisor, x: np.ndarray) -> np.ndarray:
        """The most likely digit of each scan; the same products, without the masks that training needs."""
        y = self.device.array(x, self.dtype)
        for layer in self.layers:
            last = layer is self.layers[-1]
            epilogue = Epilogue.BIAS if last else Epilogue.RELU_BIAS
            y = sup.submit(dp.MatmulRequest(y, layer.w, bias=layer.bias, epilogue=epilogue)).result()
        return np.asarray(y, np.float32).argmax(axis=1)


def cross_entropy(logits: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """The mean loss of a batch, and its gradient with respect to the logits."""
    rows = np.arange(len(y))
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    p = odds / odds.sum(axis=1, keepdims=True)
    loss = -np.log(np.maximum(p[rows, y], 1e-30)).mean()
    p[rows, y] -= 1
    return float(loss), p / len(y)


def train(network: Network, sup: dp.Supervisor, data: Data, epochs: int, seed: int) -> tuple[list[float], list[float]]:
    """Gradient descent with a rate that falls to zero; returns each step's loss and each epoch's accuracy."""
    rng = np.random.default_rng(seed)
    losses: list[float] = []
    accuracies: list[float] = []
    steps = len(data.x) // BATCH
    bar = progress(range(epochs))
    for epoch in bar:
        rate = RATE * (1 - epoch / epochs)
        network.minus_rate.copy_from(np.float32([-rate]))
        order = rng.permutation(len(data.x))[: steps * BATCH]
        batches = order.reshape(steps, BATCH)
        losses += [network.step(sup, shift(data.x[batch], rng), data.y[batch], rate) for batch in batches]
        accuracies.append(float(np.mean(network.predict(sup, data.x_test) == data.y_test)))
        if hasattr(bar, "set_postfix"):
            bar.set_postfix(loss=f"{losses[-1]:.4f}", accuracy=f"{accuracies[-1]:.2%}")
    return losses, accuracies


def progress(epochs: range) -> Any:
    """The epochs with a progress bar on stderr; without a bar if tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return epochs
    return tqdm(epochs, desc="training", unit="epoch")


def draw(path: Path, losses: list[float], accuracies: list[float], title: str) -> bool:
    """Save the loss of every step and the accuracy of every epoch as a picture; False if matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.subplots()
    left.semilogy(losses, color="tab:blue", linewidth=0.7)
    left.set(xlabel="step", ylabel="loss of the batch", title=title)
    right = left.twinx()
    steps = len(losses) // len(accuracies)
    right.plot(np.arange(1, len(accuracies) + 1) * steps, accuracies, color="tab:orange")
    right.set(ylabel="accuracy on held-out scans", ylim=(0.8, 1.0))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True


def main() -> int:
    """Train, report, and return 1 if the accuracy is below the goal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32", help="of the products (default: f32)")
    parser.add_argument("--epochs", type=int, default=60, help="default: 60")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the start and the batches (default: 0)")
    parser.add_argument("--streams", type=int, default=2, help="workers of the supervisor (default: 2)")
    parser.add_argument("--out", type=Path, default=HERE / "out" / "digits_loss.png", help="where the picture goes")
    options = parser.parse_args()
    name = dp.device().name if options.device == "auto" else options.device
    data = load(options.seed)
    print(f"{len(data.x)} scans to train on, {len(data.x_test)} held out; {options.dtype} on {name}")
    start = time.perf_counter()
    with dp.Supervisor(name, streams=options.streams) as sup:
        network = Network(sup.device, options.dtype, options.seed)
        for purpose, request in network.requests().items():
            print(f"  {purpose:<11} {request.epilogue.name:<14} {dp.explain(request).row.name}")
        losses, accuracies = train(network, sup, data, options.epochs, options.seed)
        products = sup.stats().done
    seconds = time.perf_counter() - start
    title = f"UCI digits, {options.dtype} on {name}: {accuracies[-1]:.2%}"
    if draw(options.out, losses, accuracies, title):
        print(f"loss curve: {options.out}")
    else:
        print("no picture of the loss: matplotlib is not installed")
    done = f"{len(losses)} steps, {products:,} products, {seconds:.1f} s"
    print(f"accuracy on {len(data.x_test)} held-out scans: {accuracies[-1]:.2%} after {done}")
    if accuracies[-1] < GOAL:
        print(f"that is below {GOAL:.0%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except dp.errors.DeviceUnavailable as error:
        sys.exit(f'no training: {error}\nwithout a GPU: --device host, or make demo ARGS="--device host"')
