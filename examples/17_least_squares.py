"""Least squares on a table that is known for its condition: Longley's, against the values that NIST certifies.

The six variables of 16 years are to explain the number of employed people in the USA. They grow together, so the
columns are nearly dependent: the table has a condition number of 5·10⁹, with centred columns of length one still 111.
The example shows how many digits of the certified coefficients single and double precision give, by QR and by singular
values; and that a factor in single precision is enough for all of them if it is refined with residuals in double.

    python examples/17_least_squares.py --device cuda:0
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

import dispatch as dp

HERE = Path(__file__).resolve().parent
CERTIFIED = (  # of the constant and the six columns: https://www.itl.nist.gov/div898/strd/lls/data/Longley.shtml
    *(-3482258.63459582, 15.0618722713733, -0.0358191792925910, -2.02022980381683),
    *(-1.03322686717359, -0.0511041056535807, 1829.15146461355),
)
DEVIATION = 304.854073561965  # of the residuals, certified
STEPS = 6


def load() -> tuple[np.ndarray, np.ndarray]:
    """The six columns, and how many thousands were employed."""
    table = np.loadtxt(HERE / "data" / "longley.csv", delimiter=",", skiprows=1)
    return table[:, 1:], table[:, 0]


def digits(coefficients: np.ndarray) -> float:
    """The number of correct digits of the worst coefficient."""
    off = np.abs(np.asarray(coefficients, np.float64) / CERTIFIED - 1).max()
    return float(np.clip(-np.log10(max(off, 1e-16)), 0, 16))


def fit(dev: dp.Device, a: np.ndarray, b: np.ndarray, dtype: str, driver: str) -> np.ndarray:
    """The least squares solution, by QR ("gels") or by singular values ("gelss")."""
    x, *_, info = dp.lstsq(dev.array(a, dtype), dev.array(b, dtype), driver=driver)
    dp.linalg.check_info("lstsq", info)
    return x.numpy().astype(np.float64)


def refine(dev: dp.Device, a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
    """Solutions by a factor in single precision: R·d = R⁻ᴴ·Aᴴ·(b - A·x) corrects x; the residual is in double."""
    wide, right = dev.array(a), dev.array(b)
    r = dp.qr(dev.array(a, "f32"), mode="r")
    x, solutions = np.zeros(a.shape[1]), []
    for _ in range(STEPS):
        residual = dp.gemv(wide, dev.array(x), y=right, alpha=-1.0)
        gradient = dev.array(dp.gemv(wide, residual, trans="t").numpy(), "f32")
        half = dp.trsv(r, gradient, uplo="upper", trans="t")
        x = x + dp.trsv(r, half, uplo="upper").numpy()
        solutions.append(x)
    return solutions


def draw(
    path: Path, years: np.ndarray, b: np.ndarray, fitted: np.ndarray, found: dict[str, float], steps: list[float]
) -> bool:
    """Save the fit, and the digits of every method; False if matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot(years, b / 1000, "o", color="black", label="had work, millions")
    left.plot(years, fitted / 1000, color="tab:blue", label="least squares")
    left.set(title="Longley's table")
    left.legend()
    for color, (name, right_digits) in zip(
        ("tab:purple", "tab:red", "tab:orange", "tab:green", "tab:blue"), found.items(), strict=True
    ):
        right.axhline(right_digits, color=color, linestyle="--", label=name)
    right.plot(range(1, len(steps) + 1), steps, "o-", color="black", label="factor f32, residual f64")
    right.set(title="digits of the worst coefficient that are right", xlabel="corrections", ylim=(0, 16))
    right.legend(loc="center right", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True


def main() -> int:
    """Fit with every method; 1 if one has fewer digits than its condition number allows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    parser.add_argument("--out", type=Path, default=HERE / "out" / "least_squares.png", help="where the picture goes")
    options = parser.parse_args()
    dev = dp.device(None if options.device == "auto" else options.device)

    columns, b = load()
    table = np.column_stack([np.ones(len(b)), columns])
    middle, lengths = columns.mean(axis=0), np.linalg.norm(columns - columns.mean(axis=0), axis=0)
    scaled, height = (columns - middle) / lengths, b - b.mean()

    def back(x: np.ndarray) -> np.ndarray:
        """The coefficients of the table from those of its centred columns of length 1."""
        slopes = x / lengths
        return np.array([b.mean() - middle @ slopes, *slopes])

    conditions = []
    for a in (table, scaled):
        s = dp.svd(dev.array(a), compute_uv=False)[0].numpy()
        conditions.append(s[0] / s[-1])
    print(f"condition on {dev}: {conditions[0]:.1e} as it stands, {conditions[1]:.0f} with centred columns")
    digits_of = {
        "f32, as it stands, by singular values": digits(fit(dev, table, b, "f32", "gelss")),
        "f32, as it stands": digits(fit(dev, table, b, "f32", "gels")),
        "f32, centred": digits(back(fit(dev, scaled, height, "f32", "gels"))),
        "f64, as it stands, by singular values": digits(fit(dev, table, b, "f64", "gelss")),
        "f64, centred": digits(back(fit(dev, scaled, height, "f64", "gels"))),
    }
    for name, right in digits_of.items():
        print(f"    {name:<38} {right:4.1f} digits")
    solutions = [back(x) for x in refine(dev, scaled, height)]
    steps = [digits(x) for x in solutions]
    print("    factor f32, residual f64, by steps      " + " ".join(f"{right:.1f}" for right in steps))
    fitted = table @ solutions[-1]
    deviation = np.linalg.norm(b - fitted) / np.sqrt(len(b) - table.shape[1])
    error = abs(deviation / DEVIATION - 1)
    print(f"    standard deviation {deviation:.6f}: error {error:.1e} against the certified one")
    drawn = draw(options.out, columns[:, -1], b, fitted, digits_of, steps)
    print(f"fit: {options.out}" if drawn else "no picture: matplotlib is not installed")
    least = {"f32, centred": 3, "f64, as it stands, by singular values": 5, "f64, centred": 10}
    right = all(digits_of[name] >= bound for name, bound in least.items()) and steps[-1] >= 10 and error < 1e-9
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
