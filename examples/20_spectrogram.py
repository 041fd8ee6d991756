"""The spectrogram of a sound: its short-time Fourier transform, the strongest tone, and the sound made anew from it.

`dispatch.signal.stft` transforms overlapping frames on the device; `welch` averages their spectra, whose peak is the
strongest tone; `istft` adds up the frames to the original sound. Unless --sound names a WAV file, the sound is a tenth
of a second of a tone at 44.1 kHz, a test file in SciPy's wheel.

    python examples/20_spectrogram.py --device cuda:0 --sound guitar.wav
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

import dispatch as dp

HERE = Path(__file__).parent
WITH_SCIPY = Path("io", "tests", "data", "test-44100Hz-le-1ch-4bytes.wav")
FLOOR = -90.0  # decibels: weaker points are drawn with this value
MOST = 1e-5  # the limit of the error of the reconstructed sound, relative to its norm


def read(path: Path | None) -> tuple[int, np.ndarray]:
    """The rate of a WAV file and its first channel, f32 from -1 to 1."""
    import scipy
    from scipy.io import wavfile

    rate, samples = wavfile.read(path or Path(scipy.__file__).parent / WITH_SCIPY)
    if samples.ndim == 2:
        samples = samples[:, 0]
    if samples.dtype == np.uint8:
        samples = samples.astype("f4") - 128
    return rate, (samples / max(float(np.abs(samples.astype("f8")).max()), 1e-30)).astype("f4")


def draw(path: Path, f: np.ndarray, t: np.ndarray, decibels: np.ndarray) -> bool:
    """Save the spectrogram as a picture; False if matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    drawn = axes.pcolormesh(t, f / 1000, decibels, vmin=FLOOR, vmax=0, shading="nearest")
    axes.set_xlabel("seconds")
    axes.set_ylabel("kHz")
    figure.colorbar(drawn, label="decibels below the loudest")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True


def main() -> int:
    """Transform a sound and reconstruct it; 1 if the reconstruction differs from it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    parser.add_argument("--sound", type=Path, help="a WAV file (default: a tone that SciPy's wheel has)")
    parser.add_argument("--frame", type=int, default=512, help="elements of a frame (default: 512)")
    parser.add_argument("--out", type=Path, default=HERE / "out" / "spectrogram.png", help="where the picture goes")
    options = parser.parse_args()
    dev = dp.device(None if options.device == "auto" else options.device)
    rate, sound = read(options.sound)
    frames = {"fs": rate, "nperseg": options.frame, "noverlap": options.frame * 7 // 8}

    x = dev.array(sound)
    f, t, spectra = dp.signal.stft(x, **frames)
    _, powers = dp.signal.welch(x, scaling="spectrum", **frames)
    _, again = dp.signal.istft(spectra, **frames)

    strongest = f.numpy()[powers.numpy().argmax()]
    off = np.linalg.norm(again.numpy()[: sound.size] - sound) / np.linalg.norm(sound)
    print(f"{sound.size / rate:.2f} s at {rate} Hz: {spectra.shape[1]} frames of {options.frame} elements on {dev}")
    print(f"the strongest tone is at {strongest:.0f} Hz, to {rate / options.frame:.0f} Hz")
    print(f"made anew from its frames, the sound has a relative error of {off:.1e}")
    size = np.abs(spectra.numpy())
    decibels = 20 * np.log10(np.maximum(size / size.max(), 10 ** (FLOOR / 20)))
    drawn = draw(options.out, f.numpy(), t.numpy(), decibels)
    print(f"spectrogram: {options.out}" if drawn else "no picture: matplotlib is not installed")
    return 0 if off < MOST else 1


if __name__ == "__main__":
    sys.exit(main())
