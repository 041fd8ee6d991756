"""PageRank of a real graph and of a large one: every iteration is one product of a sparse matrix and a vector.

    x = d · Pᵀ · x + d · (x at pages without links) / n + (1 - d) / n

where P has a row for each page, whose elements are the shares of its links. Those are `sparse_mv` with Pᵀ as a view of
the matrix of links, and `y` for what is added; nothing waits for the GPU before the end. The real graph is that of the
characters of Les Misérables, by the chapters they share (networkx has it); the ranks are networkx's own to 1e-9. The
large one is drawn by a power law, and its ranks are held against SciPy's products.

    python examples/24_pagerank.py --device cuda:0
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np
import scipy.sparse as sp

import dispatch as dp

DAMPING = 0.85
STEPS = 120  # 0.85^120 is 3e-9
BOUND = 1e-9


def shares(links: Any) -> tuple[Any, np.ndarray]:
    """Of each page the share that each of its links has, in CSR, and which pages have none."""
    total = np.asarray(links.sum(axis=1)).ravel()
    scale = np.divide(1.0, total, out=np.zeros(len(total)), where=total > 0)
    found = sp.csr_array(sp.diags_array(scale) @ links)
    found.sort_indices()
    return found, total == 0


def ranks(dev: dp.Device, p: Any, dangling: np.ndarray) -> np.ndarray:
    """The ranks of all pages; the row of pages without links is a second, sparse vector beside P."""
    n = p.shape[0]
    a = dp.sparse.sparse_tensor(p, device=dev, validate=True).T
    at = np.flatnonzero(dangling)
    without, ones = dev.array(at.astype(np.int32)), dev.array(np.full(max(1, len(at)), DAMPING / n))
    x, base = dev.array(np.full(n, 1 / n)), dev.array(np.full(n, (1 - DAMPING) / n))
    spread = dev.array(np.ones((n, 1)))
    for _ in range(STEPS):
        added = base
        if len(at):
            lost = dp.spvv(ones, without, x)  # one number, which stays on the device
            added = dp.gemv(spread, lost, y=base)
        x = dp.sparse.spmv(a, x, y=added, alpha=DAMPING)
    found: np.ndarray = x.numpy()
    return found


def by_scipy(p: Any, dangling: np.ndarray) -> np.ndarray:
    """The same by SciPy's products."""
    n = p.shape[0]
    x = np.full(n, 1 / n)
    for _ in range(STEPS):
        x = DAMPING * (p.T @ x + x[dangling].sum() / n) + (1 - DAMPING) / n
    return x


def power_law(pages: int, links: int) -> Any:
    """Links to pages that are popular by a power law; a tenth of the pages has none of its own."""
    rng = np.random.default_rng(0)
    source = rng.integers(0, pages, links)
    target = np.minimum((pages * rng.power(0.3, links)).astype(np.int64), pages - 1)
    kept = source % 10 != 0
    found = sp.coo_array((np.ones(kept.sum()), (source[kept], target[kept])), shape=(pages, pages)).tocsr()
    found.sum_duplicates()
    return found


def main() -> int:
    """Rank both graphs; the exit status says whether the ranks are right."""
    parser = argparse.ArgumentParser(description="PageRank by products of sparse matrices.")
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    parser.add_argument("--pages", type=int, default=None, help="of the large graph")
    options = parser.parse_args()
    try:
        import networkx as nx
    except ImportError:
        sys.exit("this example needs networkx: pip install networkx")
    dev = dp.device(None if options.device == "auto" else options.device)

    graph = nx.les_miserables_graph()
    names = list(graph)
    p, dangling = shares(nx.to_scipy_sparse_array(graph, weight="weight", dtype=float, format="csr"))
    found = ranks(dev, p, dangling)
    theirs = nx.pagerank(graph, alpha=DAMPING, tol=1e-14, max_iter=1000)
    off = max(abs(rank - theirs[name]) for rank, name in zip(found, names, strict=True))
    print(f"{len(names)} characters, {p.nnz} links: error {off:.1e} against networkx")
    for place in np.argsort(-found)[:5]:
        print(f"  {names[place]:<12} {found[place]:.4f}")

    pages = options.pages or (20_000 if dev.is_host else 1_000_000)
    p, dangling = shares(power_law(pages, 8 * pages))
    ranks(dev, p, dangling)  # what is loaded and recorded once is not timed
    began = time.perf_counter()
    found = ranks(dev, p, dangling)
    seconds = time.perf_counter() - began
    far = np.abs(found - by_scipy(p, dangling)).sum()
    print(f"{pages:,} pages, {p.nnz:,} links, {dangling.sum():,} pages without any:")
    print(f"{STEPS} steps in {seconds:.2f} s, error {far:.1e} against SciPy")
    return 0 if off < BOUND and far < BOUND and abs(found.sum() - 1) < BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
