"""The data the examples ship are what their README says they are."""

import gzip
import hashlib
from pathlib import Path

import numpy as np

DATA = Path(__file__).parents[1] / "examples" / "data"


def test_files_have_their_checksums() -> None:
    for line in (DATA / "SHA256SUMS").read_text(encoding="ascii").splitlines():
        digest, name = line.split()
        assert hashlib.sha256((DATA / name).read_bytes()).hexdigest() == digest, name


def test_digits_are_the_uci_test_set() -> None:
    with gzip.open(DATA / "digits.csv.gz", "rt", encoding="ascii") as text:
        digits = np.loadtxt(text, delimiter=",", dtype=np.int64)
    pixels, labels = digits[:, :64], digits[:, 64]
    assert digits.shape == (1797, 65)
    assert (pixels.min(), pixels.max()) == (0, 16)
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
