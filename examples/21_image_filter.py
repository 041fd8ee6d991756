"""A picture sharpened, blurred or reduced to its edges by two Fourier transforms, and by nothing beside them.

The convolution of a picture is a product of spectra. Three callbacks do everything except the transforms: the first
converts bytes to numbers as the transform reads them, the second multiplies its result by the spectrum of the filter
when it is written, the third rounds the final result to bytes. On a GPU cuFFT runs them in its kernels; on the host
they are NumPy functions.

Unless --picture names a file, the picture is the portrait of Grace Hopper in matplotlib's wheel. The result is
compared with a direct convolution in double precision by SciPy, if that is installed.

    python examples/21_image_filter.py --device cuda:0 --filter edges --picture photo.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

import dispatch as dp

HERE = Path(__file__).parent
WITH_MATPLOTLIB = Path("mpl-data", "sample_data", "grace_hopper.jpg")
SIGMA = 3.0  # pixels, of the Gaussian
RADIUS = 12
AMOUNT = 1.5  # factor of the detail that is added to the picture
TIES = 1e-3  # the share of the bytes that may be rounded differently: sums in single precision
CLIP = """const Real rounded = rint(x * 255);
return (unsigned char)(rounded < 0 ? 0 : rounded > 255 ? 255 : rounded);"""


def read(path: Path | None) -> np.ndarray:
    """The bytes of a picture: height by width by red, green and blue."""
    import matplotlib as mpl
    from PIL import Image  # matplotlib needs it

    file = path or Path(mpl.__file__).parent / WITH_MATPLOTLIB
    with Image.open(file) as picture:
        return np.asarray(picture.convert("RGB"))


def kernel_of(name: str) -> np.ndarray:
    """The filter: the weights of each pixel and its neighbours."""
    steps = np.arange(-RADIUS, RADIUS + 1)
    line = np.exp(-0.5 * (steps / SIGMA) ** 2)
    blur = np.outer(line, line) / line.sum() ** 2
    itself = np.zeros_like(blur)
    itself[RADIUS, RADIUS] = 1
    return {"blur": blur, "sharpen": itself + AMOUNT * (itself - blur), "edges": 4 * (itself - blur)}[name]


def clipped(x: np.ndarray) -> Any:
    """CLIP in NumPy."""
    return np.clip(np.rint(x * 255), 0, 255)


def filtered(picture: dp.Tensor, kernel: np.ndarray) -> dp.Tensor:
    """The convolution of each colour with a kernel, padded with zeros, rounded to bytes: u8 of the picture's shape."""
    dev, extents = picture.device, picture.shape[:2]
    s = [dp.signal.next_fast_len(extent + 2 * RADIUS) for extent in extents]
    around = np.zeros(s, "f4")
    around[: kernel.shape[0], : kernel.shape[1]] = kernel
    spectrum = dp.fft.rfft2(dev.array(np.roll(around, (-RADIUS, -RADIUS), (0, 1))))  # its middle is the first element

    callback = dp.fft.Callback
    multiply = callback.multiply(spectrum[..., None])  # the same for each colour
    bytes_of = callback(CLIP, clipped, dtype="u8")
    spectra = dp.fft.rfft2(picture, s, (0, 1), load=callback.from_u8(), store=multiply, precision="f32")
    padded: dp.Tensor = dp.fft.irfft2(spectra, s, (0, 1), store=bytes_of)
    return padded[: extents[0], : extents[1]]


def by_scipy(picture: np.ndarray, kernel: np.ndarray) -> np.ndarray | None:
    """The same by direct convolution, in double precision; None without SciPy."""
    try:
        from scipy import ndimage
    except ImportError:
        return None
    channels = [ndimage.convolve(picture[..., k] / 255, kernel, mode="constant") for k in range(picture.shape[2])]
    return np.asarray(clipped(np.stack(channels, axis=-1)).astype("u1"))


def draw(path: Path, pictures: list[np.ndarray]) -> None:
    """Save pictures next to each other."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate(pictures, axis=1)).save(path)


def main() -> int:
    """Filter a picture; 1 if the result differs from SciPy's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    parser.add_argument("--filter", choices=("sharpen", "blur", "edges"), default="sharpen", help="default: sharpen")
    parser.add_argument("--picture", type=Path, help="a picture (default: one that matplotlib's wheel has)")
    parser.add_argument("--out", type=Path, default=HERE / "out" / "image_filter.png", help="where both are drawn")
    options = parser.parse_args()
    dev = dp.device(None if options.device == "auto" else options.device)
    try:
        picture = read(options.picture)
    except ImportError as error:
        print(f"no picture can be read: {error}. pip install 'cudabind[examples]'")
        return 0
    kernel = kernel_of(options.filter)

    result = filtered(dev.array(picture), kernel).numpy()
    height, width, colours = picture.shape
    print(
        f"{options.filter}: {width} by {height} pixels of {colours} colours, {2 * RADIUS + 1}² of them a sum, on {dev}"
    )
    draw(options.out, [picture, result])
    print(f"before and after: {options.out}")
    right = by_scipy(picture, kernel)
    if right is None:
        print("not compared: SciPy is not installed")
        return 0
    off = np.abs(right.astype(int) - result)
    others = np.count_nonzero(off)
    print(f"of {off.size} bytes {others} are others than by scipy.ndimage, with an error of {off.max()} at most")
    return 0 if off.max() <= 1 and others <= TIES * off.size else 1


if __name__ == "__main__":
    sys.exit(main())
