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


def test_longleys_table_has_the_coefficients_that_nist_certifies() -> None:
    table = np.loadtxt(DATA / "longley.csv", delimiter=",", skiprows=1)
    assert table.shape == (16, 7)
    columns = np.column_stack([np.ones(16), table[:, 1:]])
    coefficients, *_ = np.linalg.lstsq(columns / np.linalg.norm(columns, axis=0), table[:, 0], rcond=None)
    certified = [-3482258.63459582, 15.0618722713733, -0.0358191792925910, -2.02022980381683]
    certified += [-1.03322686717359, -0.0511041056535807, 1829.15146461355]
    np.testing.assert_allclose(coefficients / np.linalg.norm(columns, axis=0), certified, rtol=1e-9)
