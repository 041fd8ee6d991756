"""Train a convolutional network on real handwritten digits: every step of it a request, gradients and updates too.

Three stages of convolution, batch norm and ReLU, two of them with max pooling, then two products. The gradient of a
filter updates it in place: W = (1 - rate · decay) · W - rate · dW is one request, with its alpha and beta. For
prediction, the norms are folded into the filters, and a stage is one convolution with bias and ReLU fused.

On the host the products are small: set OPENBLAS_NUM_THREADS=1, so that they do not wait for each other's threads.

    python examples/10_train_cnn.py --device cuda:0
"""

from __future__ import annotations

import argparse
import gzip
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import dispatch as dp

HERE = Path(__file__).resolve().parent
STAGES = ((16, False), (32, True), (32, True))  # filters of a stage, and whether it halves the image
HIDDEN, DIGITS = 128, 10
BATCH = 32
RATES = ((0.5, 0.1), (0.8, 0.02), (1.0, 0.004))  # (share of the epochs up to which a rate applies, rate)
DECAY = 1e-2  # with less, some splits of the scans stay below the goal
EPSILON = 1e-5
GOAL = 0.985
BATCH_NORM, LOG = dp.NormMode.BATCH_NORM, dp.SoftmaxAlgorithm.LOG
Requests = dict[str, dp.Request]  # by purpose, in the order in which they run


class Data(NamedTuple):
    """Scans (N, 1, 8, 8) from 0 to 1, and digits; a random fifth of them, chosen by a seed, is held out."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def load(seed: int) -> Data:
    """The 1,797 scans, shuffled and split."""
    with gzip.open(HERE / "data" / "digits.csv.gz", "rt", encoding="ascii") as text:
        digits = np.loadtxt(text, delimiter=",", dtype=np.float32)
    digits = np.random.default_rng(seed).permutation(digits)
    x, y = digits[:, :64].reshape(-1, 1, 8, 8) / 16, digits[:, 64].astype(np.int64)
    held_out = len(x) // 5
    return Data(x[held_out:], y[held_out:], x[:held_out], y[:held_out])


def shift(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Scans shifted by a pixel with odds of 1 in 3 in each direction: handwriting is not always centred."""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    corners = 1 + rng.integers(-1, 2, (len(x), 2)) * (rng.random((len(x), 2)) < 0.5)
    return np.stack([scan[:, i : i + 8, j : j + 8] for scan, (i, j) in zip(padded, corners, strict=True)])


class Vector:
    """A small parameter, updated in NumPy: its value here, and on the device the value and its gradient."""

    def __init__(self, device: dp.Device, value: np.ndarray) -> None:
        self.value = value.astype(np.float32)
        self.tensor = device.array(self.value)
        self.gradient = device.empty(value.shape)

    def descend(self, rate: float) -> None:
        """One step along the gradient that is on the device."""
        self.value -= rate * self.gradient.numpy()
        self.tensor.copy_from(self.value)


class Stage:
    """Convolution, batch norm, ReLU and perhaps max pooling: parameters, and memory for a batch and its gradients."""

    def __init__(
        self,
        device: dp.Device,
        x: dp.Tensor,
        dx: dp.Tensor | None,
        filters: int,
        pool: bool,
        rng: np.random.Generator,
    ) -> None:
        n, channels, height, width = x.shape
        start = rng.standard_normal((filters, channels, 3, 3)) * np.sqrt(2 / (9 * channels))
        self.device, self.x, self.dx, self.pool = device, x, dx, pool
        self.w = device.array(start, "f32")
        self.scale, self.shift = Vector(device, np.ones(filters)), Vector(device, np.zeros(filters))
        self.running = device.zeros(filters), device.array(np.ones(filters), "f32")  # mean and variance
        self.convolved, self.dconvolved, self.active, self.dactive = (
            device.empty((n, filters, height, width)) for _ in range(4)
        )
        self.y, self.dy = self.active, self.dactive
        if pool:
            self.y, self.dy = (device.empty((n, filters, height // 2, width // 2)) for _ in range(2))
        self.mean, self.inverse = device.empty(filters), device.empty(filters)

    def forward(self) -> Requests:
        """The requests that compute y from x. The ReLU works in place: its gradient only needs the sign of y."""
        requests: Requests = {
            "conv": dp.ConvFwdRequest(self.x, self.w, pad=1, out=self.convolved),
            "norm": self.norm(),
            "relu": dp.ActivationRequest(self.active, out=self.active),
        }
        if self.pool:
            requests["pool"] = dp.PoolingRequest(self.active, 2, out=self.y)
        return requests

    def norm(self) -> dp.NormFwdRequest:
        """The normalization of a batch, which also computes the next running statistics, in separate memory."""
        mean, variance = self.running
        return dp.NormFwdRequest(
            self.convolved, self.scale.tensor, self.shift.tensor, running_mean=mean, running_var=variance,
            mode=BATCH_NORM, epsilon=EPSILON,
            training=True, out=self.active, mean_out=self.mean, inv_variance_out=self.inverse,
        )  # fmt: skip

    def backward(self) -> Requests:
        """The requests that compute the gradients from dy; the first stage does not need that of its x."""
        requests: Requests = {}
        if self.pool:
            requests["pool gradient"] = dp.PoolingBwdRequest(self.active, self.y, self.dy, 2, out=self.dactive)
        requests["relu gradient"] = dp.ActivationBwdRequest(self.active, self.active, self.dactive, out=self.dactive)
        requests["norm gradient"] = dp.NormBwdRequest(
            self.dactive, self.convolved, self.scale.tensor, self.inverse, self.mean, mode=BATCH_NORM, epsilon=EPSILON,
            dx=self.dconvolved, dscale=self.scale.gradient, dbias=self.shift.gradient,
        )  # fmt: skip
        if self.dx is not None:
            requests["conv gradient"] = dp.ConvBwdDataRequest(self.dconvolved, self.w, pad=1, out=self.dx)
        return requests

    def update(self, rate: float) -> Requests:
        """The update of the filters; their gradient is added to them while it is computed."""
        keep = 1 - rate * DECAY
        return {
            "conv update": dp.ConvBwdFilterRequest(self.dconvolved, self.x, out=self.w, pad=1, alpha=-rate, beta=keep)
        }

    def fused(self, x: dp.Tensor) -> dp.Request:
        """The stage up to its ReLU as one convolution, with the running statistics folded into filters and bias."""
        mean, variance = (t.numpy() for t in self.running)
        factor = self.scale.value / np.sqrt(variance + EPSILON)
        w = self.device.array(self.w.numpy() * factor[:, None, None, None])
        bias = self.device.array(self.shift.value - mean * factor)
        return dp.ConvFwdRequest(x, w, bias=bias, pad=1, activation=dp.Activation.RELU_FWD)


class Head:
    """Two products, fused with bias and ReLU, and the logarithm of the softmax of their result."""

    def __init__(self, device: dp.Device, x: dp.Tensor, dx: dp.Tensor, rng: np.random.Generator) -> None:
        n, features = x.shape
        self.x, self.dx = x, dx
        self.w_1 = device.array(rng.standard_normal((features, HIDDEN)) * np.sqrt(2 / features), "f32")
        self.w_2 = device.array(rng.standard_normal((HIDDEN, DIGITS)) / np.sqrt(HIDDEN), "f32")
        self.bias_1, self.bias_2 = Vector(device, np.zeros(HIDDEN)), Vector(device, np.zeros(DIGITS))
        mask, _ = dp.aux_shape(dp.Epilogue.RELU_AUX_BIAS, (n, HIDDEN))
        self.mask = device.empty(mask, "u8")  # where the ReLU was active: a bit for each element
        self.hidden, self.dhidden = (device.empty((n, HIDDEN)) for _ in range(2))
        self.logits, self.dlogits, self.log_p, self.dlog_p = (device.empty((n, DIGITS)) for _ in range(4))

    def forward(self) -> Requests:
        """The requests that compute the log-probabilities."""
        return {
            "hidden": dp.MatmulRequest(
                self.x, self.w_1, bias=self.bias_1.tensor, aux=self.mask, out=self.hidden,
                epilogue=dp.Epilogue.RELU_AUX_BIAS,
            ),
            "logits": dp.MatmulRequest(
                self.hidden, self.w_2, bias=self.bias_2.tensor, out=self.logits, epilogue=dp.Epilogue.BIAS
            ),
            "softmax": dp.SoftmaxRequest(self.logits, algorithm=LOG, out=self.log_p),
        }  # fmt: skip

    def backward(self) -> Requests:
        """The requests that compute the gradients; those of a ReLU and the bias before it are fused with a product."""
        return {
            "softmax gradient": dp.SoftmaxBwdRequest(self.log_p, self.dlog_p, algorithm=LOG, out=self.dlogits),
            "logits gradient": dp.MatmulRequest(
                self.dlogits, self.w_2.T, aux=self.mask, bgrad=self.bias_1.gradient, out=self.dhidden,
                epilogue=dp.Epilogue.DRELU_BGRAD,
            ),
            "hidden gradient": dp.MatmulRequest(self.dhidden, self.w_1.T, out=self.dx),
        }  # fmt: skip

    def update(self, rate: float) -> Requests:
        """The updates of both matrices; the gradient of the last bias is the sum of dlogits, from the same product."""
        keep = 1 - rate * DECAY
        return {
            "logits update": dp.MatmulRequest(
                self.hidden.T, self.dlogits, bgrad=self.bias_2.gradient, out=self.w_2, alpha=-rate, beta=keep,
                epilogue=dp.Epilogue.BGRADB,
            ),
            "hidden update": dp.MatmulRequest(self.x.T, self.dhidden, out=self.w_1, alpha=-rate, beta=keep),
        }  # fmt: skip

    def classify(self, x: dp.Tensor, sup: dp.Supervisor) -> np.ndarray:
        """The most likely digit of each scan; the largest logit is searched on the device, too."""
        hidden = dp.MatmulRequest(x, self.w_1, bias=self.bias_1.tensor, epilogue=dp.Epilogue.RELU_BIAS)
        logits = dp.MatmulRequest(
            sup.submit(hidden).result(), self.w_2, bias=self.bias_2.tensor, epilogue=dp.Epilogue.BIAS
        )
        largest = dp.ReduceRequest(sup.submit(logits).result(), axes=1, reduce=dp.ReduceOp.MAX, indices=True)
        _, places = sup.submit(largest).result()
        return np.asarray(places)


def numbered(requests: Requests, n: int) -> Requests:
    return {f"{name} {n}": request for name, request in requests.items()}


class Network:
    """The stages and the head, and the requests of a training step, made once for each rate and submitted many times.

    On one stream requests run in the order in which they are submitted, so all requests of a step are submitted, and
    then waited for once.
    """

    def __init__(self, device: dp.Device, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.device = device
        self.x = device.empty((BATCH, 1, 8, 8))
        self.stages: list[Stage] = []
        x, dx = self.x, None
        for filters, pool in STAGES:
            stage = Stage(device, x, dx, filters, pool, rng)
            self.stages.append(stage)
            x, dx = stage.y, stage.dy
        self.head = Head(device, stage.y.reshape(BATCH, -1), stage.dy.reshape(BATCH, -1), rng)
        self.vectors = [vector for stage in self.stages for vector in (stage.scale, stage.shift)]
        self.vectors += [self.head.bias_1, self.head.bias_2]

    def requests(self, rate: float) -> Requests:
        """All requests of a training step: forward, backward, and then the updates, when no gradient needs a weight."""
        stages = list(enumerate(self.stages, 1))
        requests: Requests = {}
        for n, stage in stages:
            requests |= numbered(stage.forward(), n)
        requests |= self.head.forward() | self.head.backward()
        for n, stage in reversed(stages):
            requests |= numbered(stage.backward(), n)
        requests |= self.head.update(rate)
        for n, stage in stages:
            requests |= numbered(stage.update(rate), n)
        return requests

    def step(self, sup: dp.Supervisor, requests: Requests, x: np.ndarray, y: np.ndarray, rate: float) -> float:
        """One step of gradient descent on a batch; returns its loss before the step."""
        self.x.copy_from(x)
        target = np.zeros((BATCH, DIGITS), np.float32)
        target[np.arange(BATCH), y] = -1 / BATCH  # the gradient of the loss, -mean(log p of the right digit), by log p
        self.head.dlog_p.copy_from(target)
        fresh = {f"norm {n}": stage.norm() for n, stage in enumerate(self.stages, 1)}  # with new running statistics
        names, futures = list(requests), sup.submit_many((requests | fresh).values())
        results = {name: future.result() for name, future in zip(names, futures, strict=True)}
        for n, stage in enumerate(self.stages, 1):
            *_, mean, variance = results[f"norm {n}"]
            stage.running = mean, variance
        for vector in self.vectors:
            vector.descend(rate)
        return float((self.head.log_p.numpy() * target).sum())

    def predict(self, sup: dp.Supervisor, scans: np.ndarray) -> np.ndarray:
        """The most likely digit of each scan: a request for each convolution, pooling and product."""
        x = self.device.array(scans)
        for stage in self.stages:
            x = sup.submit(stage.fused(x)).result()
            if stage.pool:
                x = sup.submit(dp.PoolingRequest(x, 2)).result()
        return self.head.classify(x.reshape(len(scans), -1), sup)


def train(network: Network, sup: dp.Supervisor, data: Data, epochs: int, seed: int) -> tuple[list[float], list[float]]:
    """Gradient descent with rates that fall in steps; returns each step's loss and each epoch's accuracy."""
    rng = np.random.default_rng(seed)
    losses: list[float] = []
    accuracies: list[float] = []
    steps = len(data.x) // BATCH
    rate, requests = 0.0, Requests()
    bar = progress(range(epochs))
    for epoch in bar:
        before, rate = rate, next(rate for share, rate in RATES if epoch < share * epochs)
        if rate != before:
            requests = network.requests(rate)  # the rate is in the updates: cuDNN's numbers belong to the plan
        batches = rng.permutation(len(data.x))[: steps * BATCH].reshape(steps, BATCH)
        losses += [network.step(sup, requests, shift(data.x[batch], rng), data.y[batch], rate) for batch in batches]
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
    right.set(ylabel="accuracy on held-out scans", ylim=(0.9, 1.0))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True


def main() -> int:
    """Train, report, and return 1 if the accuracy is below the goal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    parser.add_argument("--epochs", type=int, default=15, help="default: 15")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the start and the batches (default: 0)")
    parser.add_argument("--out", type=Path, default=HERE / "out" / "cnn_loss.png", help="where the picture goes")
    options = parser.parse_args()
    name = dp.device().name if options.device == "auto" else options.device
    data = load(options.seed)
    print(f"{len(data.x)} scans to train on, {len(data.x_test)} held out; f32 on {name}")
    start = time.perf_counter()
    with dp.Supervisor(name, streams=1) as sup:
        network = Network(sup.device, options.seed)
        for purpose, request in network.requests(RATES[0][1]).items():
            print(f"  {purpose:<17} {dp.explain(request).row.name}")
        losses, accuracies = train(network, sup, data, options.epochs, options.seed)
        done = sup.stats().done
    seconds = time.perf_counter() - start
    if draw(options.out, losses, accuracies, f"UCI digits, a small CNN on {name}: {accuracies[-1]:.2%}"):
        print(f"loss curve: {options.out}")
    else:
        print("no picture of the loss: matplotlib is not installed")
    print(
        f"accuracy on {len(data.x_test)} held-out scans: {accuracies[-1]:.2%} after {len(losses)} steps, "
        f"{done:,} requests, {seconds:.1f} s"
    )
    if accuracies[-1] < GOAL:
        print(f"that is below {GOAL:.1%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
