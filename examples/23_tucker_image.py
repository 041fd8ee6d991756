"""A picture in Tucker's form: a small core and a matrix for each axis, and how far off it is by its rank.

    X[h, w, c] ≈ Σ core[a, b, d] · U[h, a] · V[w, b] · C[c, d]

The columns of U, V and C are eigenvectors of the Gram matrices of X's three unfoldings, and the core is X projected on
them: all of these are contractions with `dispatch.einsum`. The error of the form is at most the sum of those of its
parts, by De Lathauwer, De Moor and Vandewalle, and at least the largest of these: both are checked here. Unless
--picture names a file, the picture is the portrait of Grace Hopper in matplotlib's wheel.

    python examples/23_tucker_image.py --device cuda:0 --picture your.jpg
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

import dispatch as dp

HERE = Path(__file__).resolve().parent
RANKS = (2, 5, 10, 20, 40, 80)
SHOWN = (5, 20, 80)
SLACK = 1e-4  # of the norm, for roundoff in single precision


def read(path: Path | None) -> np.ndarray:
    """The picture, (height, width, 3), from 0 to 1; every second pixel of a large one."""
    from matplotlib import cbook, image

    picture = image.imread(cbook.get_sample_data("grace_hopper.jpg", asfileobj=False) if path is None else path)
    colours = np.asarray(picture)[..., :3].astype(np.float32)
    colours = colours / 255 if picture.dtype == np.uint8 else colours
    step = max(1, max(colours.shape[:2]) // 300)
    return np.ascontiguousarray(colours[::step, ::step])


def axes_of(x: dp.Tensor) -> list[tuple[np.ndarray, dp.Tensor]]:
    """For each axis the eigenvalues of its Gram matrix, the largest first, and the eigenvectors as columns."""
    axes = []
    for spec in ("hwc,gwc->hg", "hwc,hvc->wv", "hwc,hwd->cd"):
        values, vectors = dp.linalg.eigh(dp.einsum(spec, x, x))[:2]
        axes.append((values.numpy()[::-1], x.device.array(np.ascontiguousarray(vectors.numpy()[:, ::-1]))))
    return axes


def draw(path: Path, pictures: dict[str, np.ndarray], sizes: list[float], errors: list[float]) -> bool:
    """Save the pictures and the error by size."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    *places, last = figure.subplots(1, len(pictures) + 1)
    for axes, (name, picture) in zip(places, pictures.items(), strict=True):
        axes.imshow(np.clip(picture, 0, 1))
        axes.set(title=name, xticks=[], yticks=[])
    last.loglog(sizes, errors, "o-")
    last.set(title="error by size", xlabel="share of the numbers", ylabel="relative error")
    last.grid(alpha=0.3, which="both")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return True


def main() -> int:
    """Compress a picture at some ranks; 1 if an error is larger than its parts allow."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    parser.add_argument("--picture", type=Path, help="a picture (default: one that matplotlib's wheel has)")
    parser.add_argument("--out", type=Path, default=HERE / "out" / "tucker.png", help="where the picture goes")
    options = parser.parse_args()
    try:
        values = read(options.picture)
    except ImportError:
        print("matplotlib, which reads pictures, is not installed: pip install 'cudabind[examples]'")
        return 0
    dev = dp.device(None if options.device == "auto" else options.device)
    x = dev.array(values)
    norm = float(np.linalg.norm(values))
    axes = axes_of(x)
    print(f"{values.shape[0]} x {values.shape[1]} pixels of three colours on {dev}, {values.size:,} numbers")

    is_right, sizes, errors, pictures = True, [], [], {"the picture": values}
    for rank in RANKS:
        ranks = (rank, rank, 3 if rank > 5 else 2)
        parts = [vectors[:, :count] for (_, vectors), count in zip(axes, ranks, strict=True)]
        core = dp.einsum("hwc,ha,wb,cd->abd", x, *parts)
        again = dp.einsum("abd,ha,wb,cd->hwc", core, *parts).numpy()
        error = float(np.linalg.norm(again - values)) / norm
        left_out = [float(np.clip(eigen[count:], 0, None).sum()) for (eigen, _), count in zip(axes, ranks, strict=True)]
        least, most = np.sqrt(max(left_out)) / norm, np.sqrt(sum(left_out)) / norm
        numbers = core.size + sum(part.size for part in parts)
        is_right &= bool(least - SLACK <= error <= most + SLACK)
        sizes.append(numbers / values.size)
        errors.append(error)
        if rank in SHOWN:
            pictures[f"rank {rank}"] = again
        bounds = f"between {least:.4f} and {most:.4f}"
        print(f"  rank {rank:2}: {sizes[-1]:6.1%} of the numbers, relative error {error:.4f}, {bounds}")
    draw(options.out, pictures, sizes, errors)
    print(f"pictures: {options.out}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
