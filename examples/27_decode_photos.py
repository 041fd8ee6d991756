"""JPEG files decoded straight into tensors by nvJPEG, shrunk by a kernel of one's own, and put onto a contact sheet.

On a GPU the compressed bytes are copied to it, and pictures stay there until they are small: `cudabind.sys.nvjpeg`
writes each to the memory of a tensor, on the stream on which the kernel then reads it. On the host, or without nvJPEG
(install the extra images-cu13 or images-cu12), Pillow decodes, and the same op runs in NumPy.

Unless --photos names a folder, the photos are the portrait of Grace Hopper in matplotlib's wheel, in six kinds of JPEG
(quality, subsampling of colours, progressive, grey), and those of scikit-learn and scikit-image if installed. Each
small picture is compared with the averages of Pillow's pixels in double precision.

    python examples/27_decode_photos.py --device cuda:0 --photos ~/Pictures
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import dispatch as dp
from cudabind.errors import LibraryNotFound, NvjpegError
from cudabind.sys import nvjpeg
from dispatch.core.operands import Output, dense
from dispatch.errors import BadRequest
from dispatch.keys import HOST, U8, Arch

HERE = Path(__file__).parent
SHIPPED = {
    "matplotlib": "mpl-data/sample_data/grace_hopper.jpg",
    "sklearn": "datasets/images/*.jpg",
    "skimage": "data/*.jpg",
}
KINDS = (  # of JPEG, as Pillow's options
    {"quality": 95, "subsampling": 0}, {"quality": 85, "subsampling": 1}, {"quality": 75, "subsampling": 2},
    {"quality": 90, "progressive": True}, {"quality": 20, "optimize": True}, {"quality": 90, "grey": True},
)  # fmt: skip
CELL, GAP, COLUMNS = 160, 8, 4  # pixels, pixels, pictures in a row
BOUND = 3.0  # of 255, mean of a picture: decoders round, and interpolate colours, in different ways


# -- an op that shrinks: the request, its reference, its kernel, its rows ----------------------------------------------
@dataclass(frozen=True, eq=False)
class ShrinkRequest(dp.OperandRequest["dp.Tensor"]):
    """A picture with fewer pixels: each is the mean of the pixels that it covers, weighted by area.

    Attributes:
        photo: height by width by three colours, u8.
        height, width: of the result, at most the photo's.
        out: u8.
    """

    op: ClassVar[str] = "shrink"
    reads: ClassVar[tuple[str, ...]] = ("photo",)
    photo: dp.Tensor
    height: int = CELL
    width: int = CELL
    out: dp.Tensor | None = None

    def outputs(self) -> dict[str, Output]:
        """One picture of the requested size."""
        return {"out": dense((self.height, self.width, 3), self.photo.dtype)}

    def check_fields(self) -> None:
        """Refuse anything that is not a picture, and sizes larger than the picture's."""
        if len(self.photo.shape) != 3 or self.photo.shape[2] != 3:
            raise BadRequest("photo", str(self.photo.shape), "height by width by three colours")
        for name, extent, most in zip(("height", "width"), (self.height, self.width), self.photo.shape, strict=False):
            if not 0 < extent <= most:
                raise BadRequest(name, str(extent), f"from 1 to the photo's {most}")


def areas(many: int, few: int) -> np.ndarray:
    """The shares of each of many pixels in each of few: a matrix whose rows add up to 1."""
    scale = many / few
    begin = np.arange(few)[:, None] * scale
    pixels = np.arange(many)
    weights: np.ndarray = np.clip(np.minimum(pixels + 1, begin + scale) - np.maximum(pixels, begin), 0, None) / scale
    return weights


def averages(photo: np.ndarray, height: int, width: int) -> np.ndarray:
    """The smaller picture in double precision."""
    down, across = areas(photo.shape[0], height), areas(photo.shape[1], width)
    rows = np.tensordot(down, photo.astype(np.float64), 1)
    averaged: np.ndarray = np.einsum("wx,hxc->hwc", across, rows)
    return averaged


def evaluate(request: ShrinkRequest, _work: np.dtype[Any]) -> dict[str, np.ndarray]:
    """The outputs by name."""
    small = averages(np.asarray(request.photo), request.height, request.width)
    return {"out": np.rint(small).astype(np.uint8)}


SOURCE = r"""
extern "C" __global__ void shrink(const unsigned char* photo, unsigned char* out, int H, int W, int h, int w)
{
    const int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= w || y >= h) return;
    const double sy = (double)H / h, sx = (double)W / w, y0 = y * sy, y1 = y0 + sy, x0 = x * sx, x1 = x0 + sx;
    double sum[3] = {0, 0, 0};
    for (int i = (int)y0; i < H && i < y1; ++i)
        for (int j = (int)x0; j < W && j < x1; ++j) {
            const double area = (fmin(i + 1.0, y1) - fmax((double)i, y0)) * (fmin(j + 1.0, x1) - fmax((double)j, x0));
            for (int c = 0; c < 3; ++c) sum[c] += area * photo[((long long)i * W + j) * 3 + c];
        }
    for (int c = 0; c < 3; ++c) out[((long long)y * w + x) * 3 + c] = (unsigned char)rint(sum[c] / (sy * sx));
}
"""


def launch(request: ShrinkRequest) -> dp.Launch:
    """A thread for each pixel of the result."""
    sizes = (*request.photo.shape[:2], request.height, request.width)
    return dp.Launch((-(-request.width // 16), -(-request.height // 16)), (16, 16), tuple(map(ctypes.c_int, sizes)))


def contiguous(request: ShrinkRequest) -> str:
    """Rule: the kernel does not support strides."""
    wrong = [name for name in ("photo", "out") if not request.layout_of(name).is_contiguous]
    return f"needs {' and '.join(wrong)} in C order: make a copy" if wrong else ""


KERNEL = dp.Kernel(SOURCE, "shrink", launch)
dp.register(
    dp.Row("shrink", (U8, U8), None, (contiguous,), Arch(75), None, (), "own", "shrink", KERNEL),
    dp.Row("shrink", (U8, U8), None, (), HOST, HOST, (), "numpy", "shrink", dp.numpy_call(evaluate)),
)
shrink = dp.request_function(ShrinkRequest, "shrink")


# -- decoders: bytes of a JPEG file to a tensor of height by width by red, green and blue ------------------------------
class ByPillow:
    """Decodes on the CPU, and copies the picture to the device."""

    name = "Pillow"

    def __init__(self, dev: dp.Device) -> None:
        self.dev = dev

    def decode(self, data: bytes) -> dp.Tensor:
        """The picture on the device."""
        return self.dev.array(pixels(data))


class ByNvjpeg:
    """Decodes on the GPU, by `cudabind.sys.nvjpeg`, in the order of one stream."""

    name = "nvJPEG"

    def __init__(self, dev: dp.Device, stream: dp.Stream) -> None:
        self.dev, self.stream = dev, nvjpeg.cudaStream_t(stream.handle)
        self.handle, self.state = nvjpeg.nvjpegHandle_t(), nvjpeg.nvjpegJpegState_t()
        nvjpeg.nvjpegCreateSimple(self.handle)
        nvjpeg.nvjpegJpegStateCreate(self.handle, self.state)

    def decode(self, data: bytes) -> dp.Tensor:
        """The picture on the device, valid in stream order."""
        count, subsampling = ctypes.c_int32(), ctypes.c_int32()
        widths, heights = ((ctypes.c_int32 * nvjpeg.NVJPEG_MAX_COMPONENT)() for _ in range(2))
        nvjpeg.nvjpegGetImageInfo(
            self.handle, data, len(data), ctypes.byref(count), ctypes.byref(subsampling), widths, heights
        )
        photo = self.dev.empty((heights[0], widths[0], 3), "u8")
        image = nvjpeg.nvjpegImage_t()
        image.channel[0], image.pitch[0] = photo.ptr, 3 * widths[0]
        interleaved = nvjpeg.nvjpegOutputFormat_t.NVJPEG_OUTPUT_RGBI
        nvjpeg.nvjpegDecode(self.handle, self.state, data, len(data), interleaved, image, self.stream)
        return photo

    def close(self) -> None:
        """Destroy the state before the handle that it belongs to."""
        nvjpeg.nvjpegJpegStateDestroy(self.state)
        nvjpeg.nvjpegDestroy(self.handle)


def pixels(data: bytes) -> np.ndarray:
    """Decode with Pillow."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as picture:
        return np.asarray(picture.convert("RGB"))


def photos(folder: Path | None) -> dict[str, bytes]:
    """JPEG files by name."""
    if folder is not None:
        files = sorted(file for file in folder.iterdir() if file.suffix.lower() in (".jpg", ".jpeg"))
        return {file.name: file.read_bytes() for file in files}
    from PIL import Image

    found: dict[str, bytes] = {}
    for package, pattern in SHIPPED.items():
        spec = importlib.util.find_spec(package)
        for file in sorted(Path(spec.origin).parent.glob(pattern)) if spec and spec.origin else ():
            found[file.name] = file.read_bytes()
    with Image.open(io.BytesIO(found["grace_hopper.jpg"])) as portrait:
        for kind in KINDS:
            options, saved = dict(kind), io.BytesIO()
            (portrait.convert("L") if options.pop("grey", False) else portrait).save(saved, "JPEG", **options)
            found[", ".join(f"{key} {value}" for key, value in kind.items())] = saved.getvalue()
    return found


def fitting(height: int, width: int) -> tuple[int, int]:
    """The size of a picture of this size that fits into a cell."""
    scale = min(1.0, CELL / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def sheet(small: list[np.ndarray], path: Path) -> None:
    """Save pictures in rows, each centred in its cell."""
    from PIL import Image

    rows, step = -(-len(small) // COLUMNS), CELL + GAP
    canvas = np.full((rows * step + GAP, COLUMNS * step + GAP, 3), 32, np.uint8)
    for number, picture in enumerate(small):
        row, column = divmod(number, COLUMNS)
        top, left = (
            GAP + at * step + (CELL - size) // 2 for at, size in zip((row, column), picture.shape, strict=False)
        )
        canvas[top : top + picture.shape[0], left : left + picture.shape[1]] = picture
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(canvas).save(path)


def shrunk(dev: dp.Device, files: dict[str, bytes]) -> tuple[str, list[np.ndarray]]:
    """All pictures decoded and shrunk on a device, and the name of the decoder."""
    if dev.is_host:
        return ByPillow.name, [small(ByPillow(dev), data).numpy() for data in files.values()]
    with dev.stream() as stream:
        try:
            decoder = ByNvjpeg(dev, stream)
        except LibraryNotFound as error:
            print(f"Pillow decodes: {error}")
            return ByPillow.name, [small(ByPillow(dev), data).numpy() for data in files.values()]
        try:
            results = [small(decoder, data) for data in files.values()]  # only enqueues
            return decoder.name, [each.numpy() for each in results]
        finally:
            decoder.close()


def small(decoder: ByPillow | ByNvjpeg, data: bytes) -> dp.Tensor:
    """One picture in the size of a cell."""
    photo = decoder.decode(data)
    height, width = fitting(*photo.shape[:2])
    result: dp.Tensor = shrink(photo, height, width)
    return result


def main() -> int:
    """Make the sheet; 1 if a picture differs from Pillow's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    parser.add_argument("--photos", type=Path, help="a folder with JPEG files (default: what wheels bring)")
    parser.add_argument("--out", type=Path, default=HERE / "out" / "contact_sheet.png", help="where the sheet goes")
    options = parser.parse_args()
    dev = dp.device(None if options.device == "auto" else options.device)
    try:
        files = photos(options.photos)
    except (ImportError, KeyError) as error:
        print(f"no pictures: {error}. pip install 'cudabind[examples]', or --photos; not compared, so no error")
        return 0
    try:
        decoder, results = shrunk(dev, files)
    except NvjpegError as error:
        print(f"nvJPEG refuses: {error}", file=sys.stderr)
        return 1
    worst = 0.0
    for (name, data), result in zip(files.items(), results, strict=True):
        off = np.abs(result - averages(pixels(data), *result.shape[:2]))
        worst = max(worst, float(off.mean()))
        height, width = result.shape[:2]
        print(f"{name:<34} {width:>4} x {height:<4} mean error {off.mean():.2f}, largest {off.max():.0f}")
    sheet(results, options.out)
    print(f"{len(files)} pictures, decoded by {decoder} on {dev}: {options.out}")
    return 0 if worst < BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
