"""Add rows to the table: a policy (TF32 for every f32 product), and a function of one's own. Then take them out again.

A package brings rows without being imported, by an entry point that names a Row or several:

    [project.entry-points."dispatch.rows"]
    my_rows = "my_package.rows:ROWS"

    python examples/03_extend_the_table.py --device cuda:0
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

import numpy as np

import dispatch as dp
from dispatch.core.request import Operands, Plan
from dispatch.keys import F32, HOST, Compute, Epilogue


def tf32_by_policy(dev: dp.Device) -> dp.Row:
    """The row for f32 products in TF32, which normally requires `compute`, as a row that takes all f32 products.

    The program does not change, and the table shows the policy: this row has no value in the column `compute`.
    """
    tf32_row = next(
        row
        for row in dp.TABLE.of("matmul")
        if row.on(dev.arch) and row.dtypes[0] is F32 and row.compute is Compute.COMPUTE_32F_FAST_TF32
    )

    def tf32_matmul(request: dp.MatmulRequest, executor: Any, _row: dp.Row) -> Plan:
        return tf32_row.call(request, executor, tf32_row)

    return replace(tf32_row, compute=None, call=tf32_matmul)


class WideSums(Plan):
    """An f32 product with sums in float64: the interface of a user's function on the host."""

    __slots__ = ()

    def run(self, request: dp.MatmulRequest, outputs: Operands) -> None:
        """Compute a request into its output: the caller's, or one that was allocated for it."""
        target = np.asarray(outputs.get("out", request.out))
        target[...] = request.alpha * np.matmul(np.asarray(request.a, np.float64), np.asarray(request.b, np.float64))


def wide_matmul(_request: dp.MatmulRequest, _executor: Any, row: dp.Row) -> Plan:
    """The plan of a request; a row names this function, and it is called once for each kind of request."""
    return WideSums(row, capture_safe=False)


def without_c(request: dp.MatmulRequest) -> str:
    """There is no C to add, and alpha is a number."""
    if request.has_beta:
        return "needs beta=0, has a C to add"
    return "needs alpha by value, has a tensor" if isinstance(request.alpha, dp.Tensor) else ""


WIDE = dp.Row(
    op="matmul",
    dtypes=(F32, F32, F32, F32),
    compute=None,
    rules=(without_c,),
    min_arch=HOST,
    max_arch=HOST,
    min_version=(),
    library="example",
    function="wide_matmul",
    call=wide_matmul,
)


def main() -> int:
    """Run one product with the original table and with each row; 1 if one is less precise than it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    name = parser.parse_args().device
    dev = dp.device(None if name == "auto" else name)

    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((512, 512), dtype=np.float32) for _ in "ab")
    expected = a.astype(np.float64) @ b
    request = dp.MatmulRequest(dev.array(a), dev.array(b))

    def error() -> float:
        result = dp.matmul(request.a, request.b).numpy()
        largest = float(np.abs(result - expected).max() / np.abs(expected).max())
        print(f"{dp.explain(request).row.name:<45} largest error {largest:.1e}")
        return largest

    plain = error()
    good = plain < 1e-5
    policy = tf32_by_policy(dev)
    dp.register(policy)  # before all others; the next call chooses again
    good &= 1e-5 < error() < 1e-2
    dp.TABLE.unregister(policy)
    if dev.is_host:
        dp.register(WIDE)
        good &= error() <= plain
        # A request that the row refuses goes on to the next row, and `explain` shows the reason.
        fused = replace(request, epilogue=Epilogue.RELU)
        print(f"with RELU it is {dp.explain(fused).row.name}: {dp.explain(fused).refusals[0][1][0]}")
        dp.TABLE.unregister(WIDE)
    good &= error() == plain
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
