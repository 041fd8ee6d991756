"""Principal components of real handwritten digits: one singular value decomposition, and what its parts look like.

    X - mean = U · diag(s) · Vᴴ

The rows of Vᴴ are the components, and s² / (N - 1) the variance along each. The first k of them are the best k
components: their error for X is √(s[k]² + s[k+1]² + …), by Eckart and Young, and that is checked here, too.

    python examples/16_pca_digits.py --device cuda:0
"""

from __future__ import annotations

import argparse
import gzip
import sys
from pathlib import Path

import numpy as np

import dispatch as dp

HERE = Path(__file__).resolve().parent
KEPT = (1, 4, 16, 32)  # numbers of components from which digits are rebuilt
SHOWN = 16  # components in the picture
BOUND = 2e-5  # relative, in single precision


def load() -> np.ndarray:
    """The 1,797 scans, 64 pixels each, from 0 to 1."""
    with gzip.open(HERE / "data" / "digits.csv.gz", "rt", encoding="ascii") as text:
        return np.loadtxt(text, delimiter=",", dtype=np.float32)[:, :64] / 16


def rebuild(x: dp.Tensor, components: dp.Tensor, mean: dp.Tensor) -> dp.Tensor:
    """The nearest sums of components to the scans; the mean is the bias of the second product."""
    return dp.matmul(dp.matmul(x, components.T), components, bias=mean, epilogue="bias")


def draw(path: Path, components: np.ndarray, rebuilt: dict[str, np.ndarray], share: np.ndarray) -> bool:
    """Save the components, some rebuilt digits, and the share of the variance; False if matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    tiles = [one / np.abs(one).max() for one in components[:SHOWN]]
    left.imshow(mosaic(tiles, 4), cmap="RdBu_r", vmin=-1, vmax=1)
    left.set(title=f"the first {SHOWN} components", xticks=[], yticks=[])
    rows = [scan for scans in rebuilt.values() for scan in scans]
    middle.imshow(mosaic(rows, len(rows) // len(rebuilt)), cmap="gray_r", vmin=0, vmax=1)
    middle.set(title="digits from so many components", xticks=[], yticks=9 * np.arange(len(rebuilt)) + 4)
    middle.set_yticklabels(rebuilt)
    right.plot(np.arange(1, 65), share)
    right.set(title="share of the variance", xlabel="components", ylim=(0, 1.02))
    right.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True


def mosaic(scans: list[np.ndarray], columns: int) -> np.ndarray:
    """Scans of 64 numbers next to each other, with a line of pixels between them."""
    tiles = np.pad(np.reshape(scans, (-1, columns, 8, 8)), ((0, 0), (0, 0), (0, 1), (0, 1)))
    return tiles.transpose(0, 2, 1, 3).reshape(9 * len(tiles), -1)[:-1, :-1]


def main() -> int:
    """Decompose, rebuild and draw; 1 if a result differs from NumPy in float64."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    parser.add_argument("--out", type=Path, default=HERE / "out" / "pca_digits.png", help="where the picture goes")
    options = parser.parse_args()
    dev = dp.device(None if options.device == "auto" else options.device)

    scans = load()
    mean = scans.mean(axis=0)
    x, shift = dev.array(scans - mean), dev.array(mean)
    _, s, vh, info = dp.svd(x, full_matrices=False)
    dp.linalg.check_info("svd", info)
    variance = s.numpy().astype(np.float64) ** 2 / (len(scans) - 1)
    share = np.cumsum(variance) / variance.sum()
    print(f"{len(scans)} digits on {dev}: " + ", ".join(f"{share[k - 1]:.1%} by {k}" for k in KEPT) + " components")

    exact = np.linalg.svd(scans.astype(np.float64) - mean, compute_uv=False)
    errors = {"singular values": float(np.abs(s.numpy() - exact).max() / exact[0])}
    rebuilt = {"all": scans[:6]}
    for k in reversed(KEPT):
        nearest = rebuild(x, vh[:k], shift).numpy()
        rebuilt[str(k)] = nearest[:6]
        left = np.linalg.norm(scans.astype(np.float64) - nearest)
        errors[f"what {k} leave"] = abs(float(left / np.linalg.norm(exact[k:])) - 1)
    for what, error in errors.items():
        print(f"    {what}: error {error:.1e}")
    drawn = draw(options.out, vh.numpy(), rebuilt, share)
    print(f"components: {options.out}" if drawn else "no picture: matplotlib is not installed")
    return 0 if max(errors.values()) < BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
