"""Train two networks of torch's twice from the same start, as they are and after `dispatch.torch.fuse`, and compare.

The networks are the perceptron of 01_train_digits.py on the UCI digits in `data/`, and a small transformer that learns
to spell: it predicts the next letter of the help texts that are installed with Python. The allowed difference of two
curves is measured: torch trains a few more times, from starts whose weights, f32 in either dtype, differ by a rounding
error or less. That difference grows to the effect of rounding in each step: in bf16 a start that is a thousand times
farther off gives no larger difference. Two implementations round at different places, and neither is more exact.

    python examples/15_beside_torch.py --device cuda:0 --dtype bf16
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import dispatch as dp

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).resolve().parent
STEPS = 200
OTHERS = 3  # runs of torch's from starts that are slightly different
BOUND = 2.5  # times the largest difference between those: among themselves they differ by up to twice as much
ROUNDINGS = 16 * 2.0**-24  # of the first loss: each is a mean in f32 of hundreds of logarithms, added up in some order
LEARNED = 0.75  # of the first loss: the largest loss at the end
CONTEXT, WIDTH, HEADS, LAYERS = 32, 64, 4, 2
LETTERS = [chr(code) for code in range(32, 127)] + ["\n"]


@dataclass
class Task:
    """A network to train, and the batch of each step."""

    name: str
    build: Callable[[], Any]
    batches: list[tuple[np.ndarray, np.ndarray]]
    rate: float


@dataclass
class Curves:
    """The loss of each step: by torch, after `fuse`, and by torch from the other starts."""

    torch: list[float]
    fused: list[float]
    others: list[list[float]] = field(default_factory=list)

    def noise(self) -> float:
        """The largest difference of torch's curves from the first one, at any step."""
        return max(apart(other, self.torch) for other in self.others)


def apart(one: list[float], other: list[float]) -> float:
    return float(np.abs(np.subtract(one, other)).max())


# -- the networks and their data ---------------------------------------------------------------------------------------
def digits(steps: int) -> Task:
    """The scans of handwritten digits, 64 pixels each."""
    from torch import nn

    with gzip.open(HERE / "data" / "digits.csv.gz", "rt", encoding="ascii") as text:
        scans = np.loadtxt(text, delimiter=",", dtype=np.float32)
    rng = np.random.default_rng(0)
    drawn = [scans[rng.integers(0, len(scans), 64)] for _ in range(steps)]
    batches = [(rows[:, :64] / 16, rows[:, 64].astype(np.int64)) for rows in drawn]
    layers = (64, 256, 128, 10)

    def build() -> Any:
        one, two, three = (nn.Linear(*pair) for pair in itertools.pairwise(layers))
        return nn.Sequential(one, nn.ReLU(), two, nn.ReLU(), three)

    return Task("digits", build, batches, 2e-3)


def letters(steps: int) -> Task:
    """A text letter by letter: the topics of Python's `help`, and this project's licence if they are not installed."""
    try:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
    except ImportError:
        text = (HERE.parent / "LICENSE").read_text(encoding="ascii")
    numbers = {letter: number for number, letter in enumerate(LETTERS)}
    codes = np.array([numbers[letter] for letter in text if letter in numbers])
    rng = np.random.default_rng(0)
    starts = rng.integers(0, len(codes) - CONTEXT - 1, (steps, 16))[:, :, None] + np.arange(CONTEXT)
    return Task("letters", language_model, [(codes[at], codes[at + 1]) for at in starts], 3e-3)


def language_model() -> Any:
    """Embedding, some blocks of attention and a perceptron, and the letters' logits."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            split = self.qkv(self.before(x)).view(-1, CONTEXT, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(-1, CONTEXT, WIDTH))
            return x + self.down(functional.gelu(self.up(self.between(x)), approximate="tanh"))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.letters = nn.Embedding(len(LETTERS), WIDTH)
            self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
            self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
            self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS))

        def forward(self, x: Any) -> Any:
            return self.head(self.last(self.blocks(self.letters(x) + self.places)))

    return Model()


# -- training ----------------------------------------------------------------------------------------------------------
def train(task: Task, place: str, dtype: str, *, fuse: bool = False, other: int = 0) -> tuple[list[float], str]:
    """The loss of each step, and the report of `fuse`; `other` is the number of a start that is slightly different."""
    import torch

    import dispatch.torch as ours

    torch.manual_seed(0)
    model = task.build()
    if other:
        torch.manual_seed(other)
        eps = torch.finfo(torch.float32).eps
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 2 * eps * (torch.rand_like(parameter) - 0.5))
    model.to(place)
    report = str(ours.fuse(model)) if fuse else ""
    optimizer = torch.optim.Adam(model.parameters(), task.rate)
    kind = torch.device(place).type
    losses = []
    for x, y in task.batches:
        inputs, targets = (torch.from_numpy(array).to(place) for array in (x, y))
        with torch.autocast(kind, torch.bfloat16, enabled=dtype == "bf16"):
            logits = model(inputs)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist(), report


def compare(task: Task, place: str, dtype: str) -> tuple[Curves, bool]:
    """Train a task in all ways, print the results, and return whether the two agree and the network learned."""
    fused, report = train(task, place, dtype, fuse=True)
    curves = Curves(train(task, place, dtype)[0], fused)
    curves.others = [train(task, place, dtype, other=number)[0] for number in range(1, OTHERS + 1)]
    error, noise = apart(curves.fused, curves.torch), curves.noise()
    ends = [float(np.mean(losses[-10:])) for losses in (curves.torch, curves.fused)]
    print(f"{task.name}: {report}")
    print(f"{task.name}: {len(fused)} steps, loss {curves.torch[0]:.3f} to {ends[0]:.4f} by torch, {ends[1]:.4f} fused")
    print(f"  error {error:.2e} at most; {noise:.2e} is what torch's own runs differ by")
    near = error <= BOUND * noise + ROUNDINGS * curves.torch[0]
    return curves, near and max(ends) <= LEARNED * curves.torch[0]


def draw(path: Path, found: dict[str, Curves], title: str) -> bool:
    """Save all curves as a picture; False if matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for axes, (name, curves) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
        for number, other in enumerate(curves.others):
            label = "torch, from a start that is a rounding off" if number == 0 else None
            axes.semilogy(other, color="lightgray", linewidth=2, label=label)
        axes.semilogy(curves.torch, color="tab:blue", linewidth=1, label="torch")
        axes.semilogy(curves.fused, color="tab:orange", linewidth=1, linestyle="--", label="dispatch.torch.fuse")
        axes.set(xlabel="step", ylabel="loss of the batch", title=name)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True


def main() -> int:
    """Train and compare; 1 if curves differ by more than the noise, or the network did not learn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32", help="bf16 by autocast (default: f32)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each network (default: {STEPS})")
    parser.add_argument("--out", type=Path, default=HERE / "out" / "beside_torch.png", help="where the picture goes")
    options = parser.parse_args()
    name = dp.device().name if options.device == "auto" else options.device
    try:
        import torch
    except ImportError:
        print("torch is not installed: there is nothing to train beside, and no error to measure")
        return 0
    place = "cpu" if name == "host" else name
    if place == "cpu":
        torch.set_num_threads(1)  # networks this small do not become faster with more
    curves, right = {}, True
    for task in (digits(options.steps), letters(options.steps)):
        curves[task.name], good = compare(task, place, options.dtype)
        right = right and good
    title = f"{options.dtype} on {name}, {options.steps} steps"
    print(
        f"loss curves: {options.out}" if draw(options.out, curves, title) else "no picture: matplotlib is not installed"
    )
    if not right:
        print("the two differ by more than torch's own runs do, or nothing was learned", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
