"""Contractions that tests and benchmarks share: drawn ones, those of quantum chemistry, lattices of tensors."""

import numpy as np

# The tensor contraction benchmark of P. Springer and P. Bientinesi, https://github.com/HPAC/tccg, which has the result
# first: its modes are column-major, and so the order of their letters is the other way round here.
NAMED = """
abc-bda-dc abc-dca-bd abcd-dbea-ec abcd-deca-be abcd-ebad-ce abcde-efbad-cf abcde-ecbfa-fd abcde-efcad-bf
abcd-ea-ebcd abcd-eb-aecd abcd-ec-abed ab-ac-cb ab-acd-dbc ab-cad-dcb abc-acd-db abc-ad-bdc abc-adc-bd abc-adc-db
abc-adec-ebd abcd-aebf-dfce abcd-aebf-fdec abcd-aecf-bfde abcd-aecf-fbed abcd-aedf-bfce abcd-aedf-fbec
abcd-aefb-fdce abcd-aefc-fbed abcd-eafb-fdec abcd-eafc-bfde abcd-eafd-fbec
abcdef-dega-gfbc abcdef-degb-gfac abcdef-degc-gfab abcdef-dfga-gebc abcdef-dfgb-geac abcdef-dfgc-geab
abcdef-efga-gdbc abcdef-efgb-gdac abcdef-efgc-gdab abcdef-gdab-efgc abcdef-gdac-efgb abcdef-gdbc-efga
abcdef-geab-dfgc abcdef-geac-dfgb abcdef-gebc-dfga abcdef-gfab-degc abcdef-gfac-degb abcdef-gfbc-dega
"""


def row_major(named):
    output, first, second = (modes[::-1] for modes in named.split("-"))
    return f"{first},{second}->{output}"


TCCG = tuple(map(row_major, NAMED.split()))
EXTENTS = (1, 2, 3, 5, 2, 4, 7)
MAX_TERMS = 40_000  # terms of a drawn sum


def drawn(rng):
    """A spec of 1 to 5 operands with up to 12 modes, and their shapes: modes of one, of several, twice, of extent 1."""
    while True:
        modes = "abcdefghijkl"[: rng.integers(1, 13)]
        sizes = {mode: int(rng.choice(EXTENTS)) for mode in modes}
        count = int(rng.integers(1, 6))
        terms = []
        for _ in range(count):
            length = int(rng.integers(0, min(5, len(modes)) + 1))
            term = list(rng.choice(list(modes), length, replace=False))
            if length and rng.random() < 0.1:
                term.append(term[int(rng.integers(length))])
            terms.append("".join(term))
        there = sorted({mode for term in terms for mode in term})
        kept = [mode for mode in rng.permutation(there) if rng.random() < 0.4] if there else []
        if np.prod([float(sizes[mode]) for mode in there]) <= MAX_TERMS:
            spec = f"{','.join(terms)}->{''.join(kept)}"
            return spec, [tuple(sizes[mode] for mode in term) for term in terms]


def lattice(rows, columns, bond):
    """A network of one tensor at each site of a lattice, without legs: a spec for a number, and shapes."""
    names, letters = {}, iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    terms = [["" for _ in range(columns)] for _ in range(rows)]
    for row in range(rows):
        for column in range(columns):
            for other in ((row, column + 1), (row + 1, column)):
                if other[0] < rows and other[1] < columns:
                    letter = names[(row, column), other] = next(letters)
                    terms[row][column] += letter
                    terms[other[0]][other[1]] += letter
    flat = [term for line in terms for term in line]
    return f"{','.join(flat)}->", [(bond,) * len(term) for term in flat]
